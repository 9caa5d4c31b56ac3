"""What eaves.cross_entropy refuses: ValueError where the caller is wrong, TypeError for a wrong Python type,
NotImplementedError for what eaves does not have. Each sentence names the operator, the argument, what it is and what
was expected.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import eaves
from comparison import PROMOTED
from cross_entropy_test import each
from logsumexp_refusals_test import INTERNAL

IN_WORDS = ("cross_entropy_forward", "cross_entropy_backward")


def assert_refused(kind: type[Exception], sentence: str, *arguments: object, **named: object) -> None:
    assert_refused_by(eaves.cross_entropy, kind, sentence, *arguments, **named)


def assert_refused_by(
    function: Callable[..., object], kind: type[Exception], sentence: str, *arguments: object, **named: object
) -> None:
    """The call fails with exactly this kind of error, and its message is one sentence that has `sentence` in it."""
    with pytest.raises(kind, match=sentence) as caught:
        function(*arguments, **named)
    message = str(caught.value)
    assert caught.type is kind, caught.type
    assert message.startswith("cross_entropy: ") and "\n" not in message, message
    # "class_forward" and the like are nobody's words; inplace_backward is the user's.
    without_names = message.replace("inplace_backward", "")
    assert not [internal for internal in (*INTERNAL, *IN_WORDS) if internal in without_names], message


def logits_and_target(device: torch.device, wants_grad: bool = False) -> tuple[Tensor, Tensor]:
    return torch.zeros(4, 5, device=device, requires_grad=wants_grad), torch.zeros(4, dtype=torch.int64, device=device)


def wants_grads() -> pytest.MarkDecorator:
    return pytest.mark.parametrize("wants_grad", [False, True])


# -------------------------------------------------------------------------------------------------- shapes and the axis


@wants_grads()
def test_a_target_of_another_shape(wants_grad: bool, device: torch.device) -> None:
    logits, target = logits_and_target(device, wants_grad)
    assert_refused(
        ValueError, r"target has shape \[3\], expected \[4\] \(one per row of input \[4, 5\]\)", logits, target[:3]
    )
    assert_refused(ValueError, r"target has shape \[\], expected \[4\]", logits, target[0])
    assert_refused(ValueError, r"target has shape \[4, 1\], expected \[4\]", logits, target[:, None])
    deep = torch.zeros(2, 3, 4, device=device, requires_grad=wants_grad)
    neither = r"target has shape \[3, 4\], expected \[2, 3\] .*, or \[2, 4\] where the classes are axis 1"
    assert_refused(ValueError, neither, deep, torch.zeros(3, 4, dtype=torch.int64, device=device))
    soft = torch.zeros(4, 4, device=device)
    sentence = r"target has shape \[4, 4\] and the floating-point type float32, expected \[4, 5\] for probabilities"
    assert_refused(ValueError, sentence, logits, soft)
    # Classes that were made floats on the way.
    assert_refused(ValueError, r"floating-point type float32, .* or int64 or int32 for classes", logits, target.float())


def test_a_shape_that_does_not_say_where_the_classes_are(device: torch.device) -> None:
    square, target = torch.zeros(2, 3, 3, device=device), torch.zeros(2, 3, dtype=torch.int64, device=device)
    assert_refused(
        ValueError, r"fits classes on axis 1 and on the last axis.*class_dim=1 .*class_dim=-1", square, target
    )
    deep = torch.zeros(2, 3, 4, device=device)
    assert_refused(ValueError, r"do not say where the classes are: pass class_dim=1 .*class_dim=-1", deep, deep)


def test_logits_without_classes(device: torch.device) -> None:
    number = torch.zeros((), device=device)
    assert_refused(ValueError, r"input has no axes, expected at least one", number, number.long())
    target = torch.full((4,), -100, device=device)  # nothing looks at it
    sentence = r"input has shape \[4, 0\], expected at least one class"
    assert_refused(ValueError, sentence, torch.zeros(4, 0, device=device), target)
    assert_refused(ValueError, sentence, torch.zeros(4, 0, device=device, requires_grad=True), target)


@each("class_dim", [2, -3, 2**62])
def test_a_class_dim_out_of_range(class_dim: int, device: torch.device) -> None:
    assert_refused(
        ValueError, r"expected -2 to 1 \(input has 2 axes\)", *logits_and_target(device), class_dim=class_dim
    )


@each("value", [2**63, -(2**63) - 1, 2**70])
def test_an_int_beyond_64_bits(value: int, device: torch.device) -> None:
    sentence = rf"ignore_index is {value}, expected an int of 64 bits"
    logits, target = logits_and_target(device)
    assert_refused(ValueError, sentence, logits, target, ignore_index=value)
    assert_refused(ValueError, "class_dim is", logits, target, class_dim=value)
    shard: dict[str, Any] = {"first_class": 0, "classes": 5}
    for function, arguments in (
        (eaves.cross_entropy_shard, (logits, target)),
        (eaves.cross_entropy_merge, (torch.zeros(1, 4, 9, device=device), target)),
    ):
        given = shard if function is eaves.cross_entropy_shard else {"classes": 5}
        assert_refused_by(function, ValueError, sentence, *arguments, **given, ignore_index=value)
        for name in given:
            expected = f"{name} is {value}, expected an int of 64 bits"
            assert_refused_by(function, ValueError, expected, *arguments, **given | {name: value})


def test_numbers_beyond_the_range_of_the_loss(device: torch.device) -> None:
    arguments = logits_and_target(device)
    for name, expected in (("normalizer", "a number that float32 has"), ("z_loss", "not negative")):
        for value in (10**400, math.inf, -math.inf, math.nan, *([1e300] if name == "normalizer" else [])):
            assert_refused(ValueError, f"{name} is .*expected .*{expected}", *arguments, **{name: value})


# ---------------------------------------------------------------------------------------------------------------- names


@each("function", [eaves.cross_entropy, lambda *_, **named: eaves.CrossEntropyLoss(**named)])
def test_names_of_other_libraries_are_answered_with_the_name_here(
    function: Callable[..., object], device: torch.device
) -> None:
    arguments = logits_and_target(device)
    for name, answer in {
        "temperature": r"; pass scale=1 / temperature, and .* softcap=c / temperature$",
        "logit_softcap": r"; pass softcap$",
        "lse_square_scale": r"; pass z_loss$",
        "bias": "'bias'$",  # there is none
        "colour": "'colour'$",
    }.items():
        sentence = f"got an unexpected keyword argument '{name}'.*{answer}" if answer[0] == ";" else answer
        assert_refused_by(function, TypeError, sentence, *arguments, **{name: 1.0})


@each("value", ["1", 1.0, True, (1,)])
def test_what_is_no_int(value: object, device: torch.device) -> None:
    arguments = logits_and_target(device)
    assert_refused(TypeError, r"class_dim is .*, expected an int", *arguments, class_dim=value)
    assert_refused(TypeError, r"ignore_index is .*, expected an int", *arguments, ignore_index=value)


# -------------------------------------------------------------------------------------------------------------- options


def test_an_unknown_reduction(device: torch.device) -> None:
    expected = r'expected "none", "sum" or "mean"'
    for wrong in ("average", "", "MEAN"):
        assert_refused(ValueError, rf"reduction is '{wrong}', {expected}", *logits_and_target(device), reduction=wrong)
    for wrong in (None, 1, ["mean"]):
        assert_refused(TypeError, rf"reduction is .*, {expected}", *logits_and_target(device), reduction=wrong)


NUMBERS = [
    ("label_smoothing", [-0.1, 1.1, math.nan, math.inf], r"0 to 1"),
    ("z_loss", [-1e-9, math.nan, math.inf], r"a number that is not negative"),
    ("scale", [0.0, -1.0, math.nan, math.inf, 1e-45], r"a positive number"),
    ("softcap", [0.0, -1.0, math.nan, math.inf], r"a positive number"),
]


@pytest.mark.parametrize(("name", "values", "expected"), NUMBERS)
@wants_grads()
def test_numbers_out_of_range(
    name: str, values: list[float], expected: str, wants_grad: bool, device: torch.device
) -> None:
    for value in values:
        assert_refused(
            ValueError, rf"{name} is .*, expected {expected}", *logits_and_target(device, wants_grad), **{name: value}
        )
    for wrong in ("0.5", True, [0.5], torch.tensor(0.5)):
        assert_refused(TypeError, rf"{name} is .*, expected {expected}", *logits_and_target(device), **{name: wrong})


@each("name", ["inplace_backward", "return_lse", "return_argmax", "return_entropy", "return_z_loss"])
def test_what_is_no_bool(name: str, device: torch.device) -> None:
    for wrong in (None, 1, "yes"):
        assert_refused(TypeError, rf"{name} is .*, expected a bool", *logits_and_target(device), **{name: wrong})


def test_a_normalizer_that_is_none(device: torch.device) -> None:
    arguments = logits_and_target(device)
    for reduction in ("none", "sum"):
        assert_refused(ValueError, r"only the mean divides", *arguments, normalizer=3.0, reduction=reduction)
    assert_refused(ValueError, r"normalizer has shape \[2\], expected one", *arguments, normalizer=torch.ones(2))
    assert_refused(ValueError, r"normalizer is nan, expected a number", *arguments, normalizer=math.nan)
    for wrong in ("3", True, [3.0]):
        assert_refused(TypeError, r"normalizer is .*, expected a number", *arguments, normalizer=wrong)
    tracked = torch.ones((), device=device, requires_grad=True)
    assert_refused(NotImplementedError, r"no derivative with respect to normalizer", *arguments, normalizer=tracked)


def test_a_normalizer_on_another_device(cuda: torch.device) -> None:
    arguments = logits_and_target(cuda)
    assert_refused(ValueError, r"normalizer is on cpu, expected cuda:0", *arguments, normalizer=torch.ones(()))


def test_weights_of_another_shape_or_dtype(device: torch.device) -> None:
    logits, target = logits_and_target(device)
    for shape in ((4,), (5, 1), ()):
        weight = torch.ones(shape, device=device)
        assert_refused(
            ValueError, r"weight has shape .*, expected \[5\] \(one per class of input\)", logits, target, weight
        )
    for dtype in (torch.float64, torch.bfloat16, torch.int64):
        weight = torch.ones(5, dtype=dtype, device=device)
        assert_refused(ValueError, r"weight has dtype .*, expected that of input, float32", logits, target, weight)
    assert_refused(TypeError, r"weight is a list, expected a torch\.Tensor", logits, target, [1.0] * 5)


def test_derivatives_with_respect_to_weights_and_probabilities(device: torch.device) -> None:
    logits, target = logits_and_target(device)
    weight = torch.ones(5, device=device, requires_grad=True)
    sentence = r"no derivative with respect to {0}, which requires one; pass {0}\.detach\(\)"
    assert_refused(NotImplementedError, sentence.format("weight"), logits, target, weight)
    soft = torch.full((4, 5), 0.2, device=device, requires_grad=True)
    for wants_grad in (False, True):
        tracked = logits.detach().requires_grad_(wants_grad)
        assert_refused(NotImplementedError, sentence.format("target"), tracked, soft)
    with torch.no_grad():
        assert eaves.cross_entropy(logits, soft, weight).dim() == 0
    with pytest.raises(NotImplementedError, match="no derivative with respect to target"):
        torch.func.grad(lambda q: eaves.cross_entropy(logits, q))(soft.detach())


# ----------------------------------------------------------------------------------------------------- kinds of tensors


@each("dtype", PROMOTED)
def test_integers_are_no_logits(dtype: torch.dtype, device: torch.device) -> None:
    logits = torch.zeros(4, 5, dtype=dtype, device=device)
    assert_refused(ValueError, r"input has dtype .*, expected a floating-point", logits, logits_and_target(device)[1])


@each("dtype", [torch.int8, torch.int16, torch.uint8, torch.bool])
def test_classes_of_another_dtype(dtype: torch.dtype, device: torch.device) -> None:
    logits, target = logits_and_target(device)
    assert_refused(ValueError, r"target has dtype .*, expected int64 or int32 for classes", logits, target.to(dtype))


def test_probabilities_of_another_dtype(device: torch.device) -> None:
    logits = torch.zeros(4, 5, device=device)
    for dtype in (torch.float64, torch.bfloat16):
        sentence = r"target has the floating-point type .*, expected float32 for probabilities, or int64 or int32 for"
        assert_refused(ValueError, sentence, logits, logits.to(dtype))


@each("value", [None, 1.0, [0, 1], numpy.zeros(4)])
def test_what_is_no_tensor(value: object, device: torch.device) -> None:
    logits, target = logits_and_target(device)
    assert_refused(TypeError, rf"input is a {type(value).__name__}, expected a torch\.Tensor", value, target)
    assert_refused(TypeError, rf"target is a {type(value).__name__}, expected a torch\.Tensor", logits, value)


@each("dtype", [torch.complex64, torch.float8_e4m3fn, torch.uint16])
def test_dtypes_that_eaves_does_not_have(dtype: torch.dtype, device: torch.device) -> None:
    logits, target = logits_and_target(device)
    assert_refused(NotImplementedError, r"input has dtype .*, expected .*float32", logits.to(dtype), target)
    assert_refused(NotImplementedError, r"target has dtype .*, expected .*float32", logits, target.to(dtype))


@wants_grads()
def test_sparse_tensors(wants_grad: bool, device: torch.device) -> None:
    target = torch.zeros(3, dtype=torch.int64, device=device)
    sparse = torch.eye(3, device=device).to_sparse().detach().requires_grad_(wants_grad)
    assert_refused(NotImplementedError, r"sparse.*expected", sparse, target)


@pytest.mark.filterwarnings("ignore::UserWarning")
@wants_grads()
@each("layout", [torch.strided, torch.jagged])
def test_nested_tensors(layout: torch.layout, wants_grad: bool, device: torch.device) -> None:
    nested = torch.nested.nested_tensor(
        [torch.zeros(2, 3), torch.zeros(4, 3)], layout=layout, device=device, requires_grad=wants_grad
    )
    target = torch.zeros(2, 4, dtype=torch.int64, device=device)
    assert_refused(NotImplementedError, r"input is nested .*expected dense ones", nested, target)


def test_a_target_on_another_device(cuda: torch.device) -> None:
    logits, target = logits_and_target(cuda)
    assert_refused(ValueError, r"target.* is on cpu, expected cuda:0", logits, target.cpu())


def test_more_axes_than_sixteen(device: torch.device) -> None:
    target = torch.zeros([1] * 16, dtype=torch.int64, device=device)
    assert_refused(NotImplementedError, r"17 axes, expected at most 16", torch.zeros([1] * 17, device=device), target)


# -------------------------------------------------------------------------------------------------------------- targets


@wants_grads()
@each("dtype", [torch.int32, torch.int64])
def test_a_target_out_of_range_names_its_row(dtype: torch.dtype, wants_grad: bool) -> None:
    logits, target = logits_and_target(torch.device("cpu"), wants_grad)
    for wrong in (5, -1, -101):
        bad = target.to(dtype)
        bad[2] = wrong
        for named in ({}, {"inplace_backward": True}):
            given = logits * 1 if wants_grad else logits
            assert_refused(ValueError, rf"\b2\b.*{wrong}\b|{wrong}\b.*\b2\b", given, bad, **named)


def test_a_target_out_of_range_writes_nothing_in_place() -> None:
    leaf = torch.randn(4, 5, requires_grad=True)
    logits = leaf * 1
    before = logits.detach().clone()
    target = torch.tensor([0, 1, 2, 5])
    assert_refused(ValueError, r"5", logits, target, inplace_backward=True)
    assert torch.equal(logits, before)


# ----------------------------------------------------------------------------------------------- calls without the core


def test_tensors_without_data_are_refused_with_the_same_words(device: torch.device) -> None:
    def refusals(on: Any) -> None:
        logits, target = logits_and_target(on)
        assert_refused(ValueError, r"target has shape \[3\], expected \[4\]", logits, target[:3])
        assert_refused(ValueError, r"label_smoothing is 2, expected 0 to 1", logits, target, label_smoothing=2)
        assert_refused(ValueError, r"weight has shape", logits, target, logits[0, :3])
        assert_refused(ValueError, r"only the mean divides", logits, target, reduction="sum", normalizer=2.0)

    with FakeTensorMode():
        refusals(device)
    refusals("meta")


def test_a_compiled_call_is_refused_with_the_same_sentence(device: torch.device, fresh_compiler: None) -> None:
    logits, target = logits_and_target(device)
    compiled = torch.compile(lambda x, t: eaves.cross_entropy(x, t), fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match=r"target has shape \[3\], expected \[4\]"):
        compiled(logits, target[:3])


def test_forward_mode_is_refused_by_name(device: torch.device) -> None:
    logits, target = logits_and_target(device)
    with pytest.raises(NotImplementedError, match=r"^cross_entropy.*forward"):
        torch.func.hessian(lambda x: eaves.cross_entropy(x, target))(logits)


def test_second_derivatives_are_refused_and_not_zero(device: torch.device) -> None:
    logits, target = logits_and_target(device, wants_grad=True)
    loss = eaves.cross_entropy(logits, target)
    (grad,) = torch.autograd.grad(loss, logits, create_graph=True)
    assert_refused_by(torch.autograd.grad, NotImplementedError, "no second derivative", grad.sum(), logits)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        torch.func.jacrev(torch.func.jacrev(lambda x: eaves.cross_entropy(x, target)))(logits.detach())


BEYOND_MEMORY = 2**50  # rows whose losses no memory holds


def test_a_result_that_no_memory_holds(device: torch.device) -> None:
    logits = torch.zeros(1, 5, device=device).expand(BEYOND_MEMORY, 5)
    target = torch.zeros(1, dtype=torch.int64, device=device).expand(BEYOND_MEMORY)
    assert_refused(torch.OutOfMemoryError, rf"no memory on .*\[{BEYOND_MEMORY}\]", logits, target, reduction="none")
