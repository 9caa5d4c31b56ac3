"""What eaves.linear_cross_entropy refuses, and in which words: operator, argument, what it is, what was expected."""

import math
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import eaves
from comparison import PROMOTED
from cross_entropy_test import each


def tensors(device: torch.device | str, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.zeros(4, 3, dtype=dtype, device=device),
        torch.zeros(5, 3, dtype=dtype, device=device),
        torch.zeros(4, dtype=torch.int64, device=device),
    )


def assert_refused(kind: type[Exception], sentence: str, *arguments: Any, **named: Any) -> None:
    with pytest.raises(kind, match=rf"^linear_cross_entropy: {sentence}"):
        eaves.linear_cross_entropy(*arguments, **named)


def test_shapes_that_do_not_fit(device: torch.device) -> None:
    x, head, target = tensors(device)
    assert_refused(ValueError, r"input has no axes", x[0, 0], head, target)
    assert_refused(ValueError, r"input has shape \[4, 0\], expected at least one feature", x[:, :0], head, target)
    assert_refused(ValueError, r"linear_weight has shape \[5, 2\], expected \[classes, 3\]", x, head[:, :2], target)
    assert_refused(ValueError, r"linear_weight has shape \[3\], expected \[classes, 3\]", x, head[0], target)
    assert_refused(ValueError, r"linear_weight has shape \[0, 3\], expected at least one class", x, head[:0], target)
    assert_refused(NotImplementedError, r"linear_weight has shape \[5, 1, 3\].*each head", x, head[:, None], target)
    assert_refused(ValueError, r"target has shape \[3\], expected \[4\] \(one per row", x, head, target[:3])
    sentence = r"target has shape \[4, 3\] and the floating-point type float32, expected \[4, 5\] for probabilities"
    assert_refused(ValueError, sentence, x, head, x)
    assert_refused(ValueError, r"target has the floating-point type float16, expected float32", x, head, x.half())
    bias = torch.zeros(5, device=device)
    assert_refused(ValueError, r"linear_bias has shape \[4\], expected \[5\]", x, head, target, linear_bias=bias[:4])
    assert_refused(ValueError, r"weight has shape \[4\], expected \[5\]", x, head, target, weight=bias[:4])


def test_names_of_other_libraries_are_answered_with_the_name_here(device: torch.device) -> None:
    for name, answer in {
        "bias": "linear_bias",
        "temperature": r"scale=1 / temperature, and .* softcap=c / temperature",
        "logit_softcapping": "softcap",
        "num_items_in_batch": "normalizer",
    }.items():
        sentence = rf"got an unexpected keyword argument '{name}'; pass {answer}$"
        assert_refused(TypeError, sentence, *tensors(device), **{name: 1.0})
        of_module = sentence if name not in ("bias", "num_items_in_batch") else rf"'{name}'$"  # given with each call
        with pytest.raises(TypeError, match=of_module):
            eaves.LinearCrossEntropyLoss(**{name: 1.0})
    assert_refused(TypeError, r"got an unexpected keyword argument 'colour'$", *tensors(device), colour=1)


def test_tensors_of_two_devices(device: torch.device) -> None:
    x, head, target = tensors(device)
    where = rf"is on meta, expected {device.type}.* \(as (input|linear_weight)\)"
    five = torch.zeros(5, device="meta")
    assert_refused(ValueError, rf"linear_weight {where}", x, head.to("meta"), target)
    assert_refused(ValueError, rf"target {where}", x, head, target.to("meta"))
    assert_refused(ValueError, rf"target {where}", x, head, torch.zeros(4, 5, device="meta"))
    assert_refused(ValueError, rf"linear_bias {where}", x, head, target, linear_bias=five)
    assert_refused(ValueError, rf"weight {where}", x, head, target, weight=five)
    assert_refused(ValueError, r"normalizer is on meta", x, head, target, normalizer=five[0])
    assert_refused(ValueError, rf"grad_weight_out {where}", x, head, target, grad_weight_out=head.to("meta"))
    assert_refused(ValueError, r"target is on .*, expected meta \(as input\)", x.to("meta"), head, target)


def test_two_dtypes_are_refused_with_the_way_out(device: torch.device) -> None:
    x, head, target = tensors(device)
    sentence = r"linear_weight has dtype float32, expected that of input, bfloat16; .*torch\.autocast"
    assert_refused(ValueError, sentence, x.bfloat16(), head, target)
    bias = torch.zeros(5, dtype=torch.bfloat16, device=device)
    assert_refused(ValueError, r"linear_bias has dtype bfloat16, expected", x, head, target, linear_bias=bias)
    with torch.autocast(device.type, torch.bfloat16):
        assert eaves.linear_cross_entropy(x.bfloat16(), head, target, linear_bias=bias).dtype == torch.float32


@each("dtype", PROMOTED)
def test_integers_are_no_input(dtype: torch.dtype, device: torch.device) -> None:
    x, head, target = tensors(device)
    assert_refused(ValueError, r"input has dtype .*, expected a floating-point type", x.to(dtype), head, target)


@each("dtype", [torch.complex64, torch.float8_e4m3fn, torch.uint16])
def test_dtypes_that_eaves_does_not_have(dtype: torch.dtype, device: torch.device) -> None:
    x, head, target = tensors(device)
    for index in range(3):
        given = [t.to(dtype) if i == index else t for i, t in enumerate((x, head, target))]
        assert_refused(NotImplementedError, r"\w+ has dtype .*, expected .*float32", *given)


@each("value", [None, 1.0, [0, 1], numpy.zeros(4)])
def test_what_is_no_tensor(value: object, device: torch.device) -> None:
    given: list[Any] = list(tensors(device))
    for index, name in enumerate(("input", "linear_weight", "target")):
        wrong = [value if i == index else t for i, t in enumerate(given)]
        assert_refused(TypeError, rf"{name} is a {type(value).__name__}, expected a torch\.Tensor", *wrong)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_sparse_and_nested_tensors(device: torch.device) -> None:
    x, head, target = tensors(device)
    assert_refused(NotImplementedError, r".*sparse.*expected", x, head.to_sparse(), target)
    nested = torch.nested.nested_tensor([x, x], device=device)
    assert_refused(NotImplementedError, r"input is nested .*expected dense ones", nested, head, target)


def test_a_tensor_on_another_device(cuda: torch.device) -> None:
    x, head, target = tensors(cuda)
    assert_refused(ValueError, r".*is on cpu, expected cuda:0", x, head.cpu(), target)
    assert_refused(ValueError, r".*is on cpu, expected cuda:0", x, head, target.cpu())


def test_options_that_are_not_ones(device: torch.device) -> None:
    given = tensors(device)
    for named, kind, sentence in (
        ({"reduction": "average"}, ValueError, r'reduction is \'average\', expected "none"'),
        ({"reduction": 1}, TypeError, r"reduction is 1"),
        ({"label_smoothing": 2}, ValueError, r"label_smoothing is 2, expected 0 to 1"),
        ({"softcap": 0}, ValueError, r"softcap is 0, expected a positive number"),
        ({"scale": -1}, ValueError, r"scale is -1, expected a positive number"),
        ({"z_loss": -1}, ValueError, r"z_loss is -1, expected a number that is not negative"),
        ({"ignore_index": 1.5}, TypeError, r"ignore_index is 1\.5, expected an int"),
        ({"normalizer": 2.0, "reduction": "sum"}, ValueError, r"normalizer is given, but only the mean divides"),
        ({"algorithm": "fast"}, ValueError, r'algorithm is \'fast\', expected "auto", "speed" or "memory"'),
        ({"algorithm": 1}, TypeError, r"algorithm is 1, expected"),
        ({"workspace_bytes": 0}, ValueError, r"workspace_bytes is 0, expected a positive number of bytes"),
        ({"workspace_bytes": 1e9}, TypeError, r"workspace_bytes is 1000000000\.0, expected an int"),
        ({"skip_ignored": 1}, TypeError, r"skip_ignored is 1, expected a bool"),
        ({"return_lse": 1}, TypeError, r"return_lse is 1, expected a bool"),
        ({"options": 3}, TypeError, r"options is 3, expected a torch\.nn\.LinearCrossEntropyOptions or None"),
        ({"grad_weight_dtype": "float32"}, TypeError, r"grad_weight_dtype is 'float32', expected a torch\.dtype"),
        ({"grad_weight_dtype": torch.bfloat16}, ValueError, r"grad_weight_dtype is bfloat16, expected float32"),
    ):  # fmt: skip
        assert_refused(kind, sentence, *given, **named)


def test_a_callers_tensor_that_the_gradient_cannot_be_added_to(device: torch.device) -> None:
    x, head, target = tensors(device, torch.bfloat16)
    out = torch.zeros(5, 3, device=device)
    for wrong, kind, sentence in (
        (3, TypeError, "grad_weight_out is a int"),
        (out.half(), ValueError, r"grad_weight_out has dtype float16, expected bfloat16 or float32"),
        (out[:4], ValueError, r"grad_weight_out has shape \[4, 3\], expected \[5, 3\]"),
        (torch.zeros(3, 5, device=device).t(), ValueError, r"grad_weight_out has strides \[1, 5\], expected features"),
        (out.clone().requires_grad_(), NotImplementedError, r"there is no derivative with respect to grad_weight_out"),
    ):
        assert_refused(kind, sentence, x, head, target, grad_weight_out=wrong)
    assert_refused(
        ValueError, "grad_weight_dtype is given beside", x, head, target, grad_weight_out=out,
        grad_weight_dtype=torch.float32,
    )  # fmt: skip
    with pytest.raises(NotImplementedError, match="grad_weight_out is written in the backward"):
        torch.vmap(lambda x: eaves.linear_cross_entropy(x, head, target[:1], grad_weight_out=out))(x[:, None])
    head.requires_grad_()
    loss = eaves.linear_cross_entropy(x, head, target, grad_weight_out=out)
    with pytest.raises(NotImplementedError, match="with grad_weight_out the gradient has no derivative"):
        torch.autograd.grad(loss, head, create_graph=True)


@each("algorithm", ["auto", "speed", "memory"])
def test_a_callers_tensor_in_memory_that_the_call_reads(algorithm: str, device: torch.device) -> None:
    def sentence(name: str) -> str:
        return f"grad_weight_out overlaps {name}, expected memory of its own"

    shapes = {"input": (4, 3), "linear_weight": (5, 3), "target": (4, 5), "linear_bias": (5,), "weight": (5,),
              "normalizer": (1,)}  # fmt: skip
    for name, shape in shapes.items():
        given: dict[str, Any] = {each: torch.zeros(shape, device=device) for each, shape in shapes.items()}
        buffer = torch.zeros(64, device=device)
        for begin in (14, 0):
            given[name] = buffer[begin : begin + math.prod(shape)].view(shape)
            out = buffer[:15].view(5, 3)
            assert_refused(ValueError, sentence(name), **given, grad_weight_out=out, algorithm=algorithm)
    x, head, target = tensors(device)
    out, given = buffer[:15].view(5, 3), {"input": x, "linear_weight": head, "algorithm": algorithm}
    assert_refused(
        ValueError, sentence("target"), **given, target=buffer.view(torch.int64)[7:11], grad_weight_out=out
    )  # fmt: skip
    leaf = head.requires_grad_()
    given = {"target": target, "grad_weight_out": leaf.detach(), "algorithm": algorithm}
    assert_refused(ValueError, sentence("linear_weight"), x, leaf, **given)
    with torch.autocast(device.type, torch.bfloat16):  # which multiplies a copy
        assert_refused(ValueError, sentence("linear_weight"), x, leaf, **given)


@each("algorithm", ["speed", "memory"])
def test_a_callers_tensor_beside_what_the_call_reads(algorithm: str, device: torch.device) -> None:
    x, _, target = tensors(device)
    halves = torch.zeros(5, 6, device=device).split(3, 1)  # rows in turn
    pair = torch.zeros(2, 5, 3, device=device)
    for head, out in ((*halves,), halves[::-1], (*pair,), (*pair.flip(0),)):
        leaf = head.detach().requires_grad_()
        eaves.linear_cross_entropy(x + 1, leaf, target, grad_weight_out=out, algorithm=algorithm).backward()
        assert out.any() and not leaf.any()
        out.zero_()
    buffer = torch.zeros(40, device=device)
    for begin in (0, 1, 2, 4, 5, 6):  # of rows in turn, in part the same
        head, out = buffer.as_strided((5, 3), (6, 1), 0), buffer.as_strided((5, 3), (6, 1), begin)
        sentence = "grad_weight_out overlaps linear_weight"
        assert_refused(ValueError, sentence, x, head, target, grad_weight_out=out, algorithm=algorithm)


def test_a_callers_tensor_without_data(device: torch.device) -> None:
    with FakeTensorMode():
        x, head, target = tensors(device)
        loss = eaves.linear_cross_entropy(x, head.requires_grad_(), target, grad_weight_out=torch.zeros_like(head))
        loss.backward()
        assert head.grad is None


def test_derivatives_with_respect_to_other_tensors(device: torch.device) -> None:
    x, head, target = tensors(device)
    sentence = r"there is no derivative with respect to {0}, which requires one; pass {0}\.detach\(\)"
    weight = torch.ones(5, device=device, requires_grad=True)
    assert_refused(NotImplementedError, sentence.format("weight"), x, head, target, weight=weight)
    soft = torch.full((4, 5), 0.2, device=device, requires_grad=True)
    assert_refused(NotImplementedError, sentence.format("target"), x, head, soft)
    number = torch.ones((), device=device, requires_grad=True)
    assert_refused(NotImplementedError, sentence.format("normalizer"), x, head, target, normalizer=number)


@each("algorithm", [None, "speed", "memory"])
@each("dtype", [torch.int32, torch.int64])
def test_a_target_out_of_range_names_its_row(dtype: torch.dtype, algorithm: str | None) -> None:
    x, head, target = tensors("cpu")
    for wrong in (5, -1, -101):
        bad = target.to(dtype)
        bad[2] = wrong
        given = x.requires_grad_(algorithm is not None)
        assert_refused(ValueError, rf".*\b2\b.*{wrong}\b", given, head, bad, algorithm=algorithm or "auto")


def test_a_target_out_of_range_is_nan_on_a_gpu(cuda: torch.device) -> None:
    x, head, target = tensors(cuda)
    target[2] = 5
    leaf = (x + 1).requires_grad_()
    for algorithm in ("speed", "memory"):
        losses = eaves.linear_cross_entropy(leaf, head, target, reduction="none", algorithm=algorithm)
        assert losses.isnan().tolist() == [False, False, True, False]
        (grad,) = torch.autograd.grad(losses.sum(), leaf)
        assert grad.isnan().all(1).tolist() == [False, False, True, False]


def test_tensors_without_data_are_refused_with_the_same_words(device: torch.device) -> None:
    def refusals(on: Any) -> None:
        x, head, target = tensors(on)
        assert_refused(ValueError, r"target has shape \[3\], expected \[4\]", x, head, target[:3])
        assert_refused(ValueError, r"linear_weight has shape", x, head[:, :2], target)

    with FakeTensorMode():
        refusals(device)
    refusals("meta")


def test_forward_mode_is_refused_by_name(device: torch.device) -> None:
    x, head, target = tensors(device)
    for function in (
        lambda x: eaves.linear_cross_entropy(x, head, target),
        lambda w: eaves.linear_cross_entropy(x, w.expand_as(head), target),
    ):
        with pytest.raises(NotImplementedError, match=r"^linear_cross_entropy.*forward"):
            torch.func.jvp(function, (x[:1] if function.__code__.co_varnames[0] == "w" else x,),
                           (x[:1] if function.__code__.co_varnames[0] == "w" else x,))  # fmt: skip


def test_a_hessian_is_refused_with_the_way_to_one(device: torch.device) -> None:
    x, head, target = tensors(device)
    jacrev = torch.func.jacrev
    with pytest.raises(NotImplementedError, match=r"use torch\.nn\.functional\.linear and cross_entropy"):
        jacrev(jacrev(lambda x: eaves.linear_cross_entropy(x, head, target)))(x)
    functional = torch.nn.functional
    hessian = jacrev(jacrev(lambda x: functional.cross_entropy(functional.linear(x, head), target)))(x)
    assert hessian.shape == (4, 3, 4, 3)


BEYOND_MEMORY = 2**50  # rows whose losses no memory holds


def test_a_result_that_no_memory_holds(device: torch.device) -> None:
    x, head, target = tensors(device)
    rows, targets = x[:1].expand(BEYOND_MEMORY, 3), target[:1].expand(BEYOND_MEMORY)
    sentence = rf".*no memory on .*\[{BEYOND_MEMORY}\]"
    assert_refused(torch.OutOfMemoryError, sentence, rows, head, targets, reduction="none")
