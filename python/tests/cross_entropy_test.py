"""eaves.cross_entropy: the path of a call to the core and back, with every option, dtype and layout, and the surface of
a call against torch.nn.functional.cross_entropy.

The tests of the core check its accuracy, in rows of every length and kind. Autograd is in
cross_entropy_gradient_test.py, refused arguments are in cross_entropy_refusals_test.py, each combination of options
beside torch is in cross_entropy_parity_test.py, and the duties of every operator are in library_test.py.
"""

import copy
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy as torch_cross_entropy

import eaves
from comparison import FLOATING_POINT, CrossEntropyOracle, assert_within
from cross_entropy_cases import random_targets
from eaves._torch.options import NUMBERS, numbers_of
from eaves._torch.outputs import REDUCTIONS as NUMBERS_OF_REDUCTIONS
from layouts import LAYOUTS, contiguous, random_tensor
from pairwise import pairwise


def each(name: str, values: object) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(name, values, ids=lambda value: getattr(value, "__name__", str(value)))


REDUCTIONS = ("none", "sum", "mean")


def targets_of(logits: Tensor, class_dim: int = -1, dtype: torch.dtype = torch.int64) -> Tensor:
    """A target for each row of `logits`, some of them ignored."""
    rows = list(logits.shape)
    classes = rows.pop(class_dim)
    return random_targets(tuple(rows), classes, logits.device, dtype)


def probabilities_of(logits: Tensor, class_dim: int = -1, dtype: torch.dtype | None = None) -> Tensor:
    """Soft targets of another distribution than the logits'."""
    soft = random_tensor(tuple(logits.shape), torch.float64, logits.device, 2.0).flip(class_dim).softmax(class_dim)
    return soft.to(dtype or logits.dtype)


EVERYTHING = ("lse", "argmax", "entropy", "z_loss", "sum_sq", "mean_logit")


def every_output(
    target: Tensor, weight: Tensor | None, *, label_smoothing: float = 0.0, **_: object
) -> dict[str, tuple[str, ...]]:
    """The argument `outputs` with all names that a call may have."""
    has_mean_logit = not target.is_floating_point() and (weight is None or label_smoothing == 0)
    return {"outputs": EVERYTHING if has_mean_logit else EVERYTHING[:-1]}


# ------------------------------------------------------------------------------------------------------- the whole call


OPTIONS = [
    {"label_smoothing": 0.1},
    {"label_smoothing": 1.0},
    {"softcap": 3.0},
    {"scale": 0.125},
    {"scale": 2.0, "softcap": 30.0},
    {"z_loss": 1e-2},
    {"label_smoothing": 0.2, "softcap": 5.0, "scale": 1.5, "z_loss": 1e-4},
]

# shape of the logits, class_dim
SHAPES = [((7,), -1), ((3, 1), -1), ((0, 5), -1), ((6, 33), -1), ((33, 6), 0), ((5, 4, 33), -1), ((5, 33, 4), 1),
          ((2, 19, 3, 4), 1)]  # fmt: skip
TARGETS = (torch.int64, torch.int32, None, torch.float32)  # for classes, for probabilities; None: the logits' dtype
WEIGHTS = (None, "of the logits' dtype", torch.float32)
CALLS = pairwise(FLOATING_POINT, SHAPES, TARGETS, REDUCTIONS, [{}, *OPTIONS], WEIGHTS, (False, True), (None, 7.0),
                 (-100, 3), LAYOUTS)  # fmt: skip


def upstream(out: Tensor, layout: Callable[[Tensor], Tensor] = contiguous) -> Tensor:
    """An upstream gradient of both signs, for a result of this shape and dtype."""
    numbers = torch.linspace(-1.5, 2.0, max(out.numel(), 1), dtype=torch.float64)[: out.numel()]
    return layout(numbers.view(out.shape).to(out.dtype).to(out.device))


def upstream_of(name: str, out: Tensor | None) -> Tensor | None:
    """An upstream gradient of the output of this name, if there is one; the entropy's differs from lse's."""
    if out is None:
        return None
    return upstream(out).flip(0) if name == "entropy" and out.dim() else upstream(out)


@pytest.mark.parametrize("call", CALLS)
def test_every_argument_arrives_whatever_its_dtype_and_layout(call: tuple[Any, ...], device: torch.device) -> None:
    dtype, (shape, class_dim), kind, reduction, options, of_weight, has_row_weight, normalizer, ignored, layout = call
    logits = random_tensor(shape, dtype, device, 3.0)
    classes, named = shape[class_dim], {"class_dim": class_dim, "reduction": reduction, **options}
    if kind in (torch.int64, torch.int32):
        target = targets_of(logits, class_dim, kind)
        if ignored < classes:
            named["ignore_index"] = ignored
            target = target.masked_fill(target == -100, ignored)
    else:
        target = probabilities_of(logits, class_dim, kind)
    weight = None
    if of_weight is not None:
        weight = layout(torch.linspace(0, 2, classes, device=device).to(dtype if type(of_weight) is str else of_weight))
    if has_row_weight:
        rows = logits.select(class_dim, 0)
        named["row_weight"] = layout(torch.linspace(-1, 3, rows.numel(), device=device).view(rows.shape))
    if normalizer is not None and reduction == "mean":
        named["normalizer"] = normalizer
    check(layout(logits), layout(target), weight, layout, **named)


def check(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    layout: Callable[[Tensor], Tensor] = contiguous,
    **options: Any,
) -> None:
    """One call with and without a gradient, with and without the other outputs: they use different operators, or
    different outputs of one. Then the gradients of the loss, of loss, lse and entropy together, and in place."""
    oracle = CrossEntropyOracle(input, target, weight, **options)
    result_dtype = torch.float64 if input.dtype == torch.float64 else torch.float32
    what = f"{input.dtype} {target.dtype} strides={input.stride()} {options}"
    asked = every_output(target, weight, **options)
    for wants_grad in (False, True):
        leaf = input.detach().requires_grad_(wants_grad)
        loss = eaves.cross_entropy(leaf, target, weight, **options)
        out = eaves.cross_entropy(leaf, target, weight, **options, **asked)
        assert out._fields == ("loss", *asked["outputs"])
        assert loss.dtype == result_dtype and loss.requires_grad == wants_grad and loss.is_contiguous(), what
        results, bounds = out._asdict(), oracle.bounds()
        argmax = results.pop("argmax")
        for name, result in results.items():
            assert result.dtype == result_dtype and result.is_contiguous(), what
            assert_within(result, bounds[name], f"{name} {what} wants_grad={wants_grad}")
        assert_within(loss, oracle.loss, what)
        assert torch.equal(argmax.cpu(), oracle.argmax), what
        assert argmax.dtype == torch.int64

    grad_loss, grad_lse, grad_entropy = (upstream(each, layout) for each in (loss, out.lse, out.entropy))
    (grad,) = torch.autograd.grad(loss, leaf, grad_loss)
    assert grad.dtype == input.dtype and grad.device == input.device, what
    assert_within(grad, oracle.gradient(input.dtype, grad_loss), what)
    upstreams = (grad_loss, grad_lse, grad_entropy.flip(0) if grad_entropy.dim() else grad_entropy)
    (grad,) = torch.autograd.grad((out.loss, out.lse, out.entropy), leaf, upstreams)
    assert_within(grad, oracle.gradient(input.dtype, *upstreams), f"of all outputs {what}")

    logits = leaf * 1
    loss = eaves.cross_entropy(logits, target, weight, inplace_backward=True, **options)
    assert_within(loss, oracle.loss, what)
    # Any other number would multiply a rounded bfloat16 gradient, which is then rounded again.
    grad_loss = torch.ones_like(loss) if input.dtype == torch.bfloat16 else upstream(loss)
    (grad,) = torch.autograd.grad(loss, logits, grad_loss)
    assert grad.data_ptr() == logits.data_ptr()
    assert_within(grad, oracle.gradient(input.dtype, grad_loss), f"in place {what}")


def test_logits_have_up_to_sixteen_axes(device: torch.device) -> None:
    logits = random_tensor((2, 1, 2, 1, 2, 1, 2, 1, 2, 1, 2, 1, 2, 1, 2, 3), torch.float32, device)
    check(logits, targets_of(logits), reduction="none")


def test_a_mask_of_any_dtype_weighs_rows(device: torch.device) -> None:
    logits, mask = random_tensor((9, 33), torch.float32, device), torch.arange(9, device=device) % 3 == 0
    target = targets_of(logits)
    kept = eaves.cross_entropy(logits[mask], target[mask])
    for same in (mask, mask.int(), mask.double()):
        torch.testing.assert_close(eaves.cross_entropy(logits, target, row_weight=same), kept)
        torch.testing.assert_close(eaves.CrossEntropyLoss()(logits, target, row_weight=same), kept)


def test_the_normalizer_divides_instead_of_the_rows(device: torch.device) -> None:
    logits = random_tensor((9, 33), torch.bfloat16, device)
    target = targets_of(logits)
    total = eaves.cross_entropy(logits, target, reduction="sum")
    numbers: list[Any] = [7, 7.0, numpy.float64(7)]
    numbers += [torch.tensor(7, device=device, dtype=d) for d in (torch.int64, torch.float32, torch.float64)]
    numbers += [torch.tensor([7.0], device=device)]
    for normalizer in numbers:
        loss = eaves.cross_entropy(logits, target, normalizer=normalizer)
        torch.testing.assert_close(loss, total / 7)


# ---------------------------------------------------------------------------------------------- arguments as in PyTorch


# shape of the logits, of the targets
TORCH_SHAPES = [((5,), ()), ((4, 5), (4,)), ((4, 5, 3), (4, 3)), ((4, 5, 2, 3), (4, 2, 3)), ((1, 5, 1, 1), (1, 1, 1))]


@pytest.mark.parametrize(("shape", "target_shape"), TORCH_SHAPES)
def test_a_call_of_torch_means_the_same(
    shape: tuple[int, ...], target_shape: tuple[int, ...], device: torch.device
) -> None:
    logits = random_tensor(shape, torch.float64, device).requires_grad_()
    hard = random_targets(target_shape, 5, device)
    soft = probabilities_of(logits.detach(), 1 if len(shape) > 1 else 0)
    weights = (None, torch.rand(5, device=device, dtype=torch.float64))
    # The class that is ignored; None: probabilities, which have no classes to ignore.
    for ignored, weight, smoothing, reduction in pairwise((-100, 3, None), weights, (0.0, 0.3), REDUCTIONS):
        target = soft if ignored is None else torch.where(hard == -100, 2, hard) if ignored == 3 else hard
        named = {"reduction": reduction, "ignore_index": ignored or -100, "label_smoothing": smoothing}
        expected = torch_cross_entropy(logits, target, weight, **named)
        # Probabilities do not imply the axis of the classes.
        where = {"class_dim": 1} if target is soft and len(shape) > 2 else {}
        actual = eaves.cross_entropy(logits, target, weight, **named, **where)
        assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
        if expected.dim() == 0 and expected.isnan():  # no row counts: the documented difference
            assert actual.item() == 0.0
            continue
        torch.testing.assert_close(actual, expected)
        upstream = torch.linspace(-1, 2, actual.numel(), device=device, dtype=torch.float64)
        of_actual, of_expected = (
            torch.autograd.grad(out, logits, upstream.view(out.shape)) for out in (actual, expected)
        )
        torch.testing.assert_close(of_actual, of_expected)


def test_the_shape_of_the_target_says_where_the_classes_are(device: torch.device) -> None:
    logits = random_tensor((4, 6, 5), torch.float32, device)
    last, second = random_targets((4, 6), 5, device), random_targets((4, 5), 6, device)
    assert torch.equal(eaves.cross_entropy(logits, last), eaves.cross_entropy(logits, last, class_dim=-1))
    assert torch.equal(eaves.cross_entropy(logits, last), eaves.cross_entropy(logits, last, class_dim=2))
    assert torch.equal(eaves.cross_entropy(logits, second), eaves.cross_entropy(logits, second, class_dim=1))
    assert not torch.equal(eaves.cross_entropy(logits, last), eaves.cross_entropy(logits, second))
    square = random_tensor((4, 5, 5), torch.float32, device)
    target = random_targets((4, 5), 5, device)
    check(square, target, class_dim=1)
    check(square, target, class_dim=-1)
    first = random_targets((6, 5), 4, device)
    check(logits, first, class_dim=0)
    check(logits, first, class_dim=-3)


def test_the_module_is_the_function_with_its_options_kept(device: torch.device) -> None:
    logits, weight = random_tensor((9, 33), torch.float32, device), torch.rand(33, device=device)
    target = targets_of(logits)
    named: dict[str, Any] = {"ignore_index": 3, "reduction": "sum", "label_smoothing": 0.1, "z_loss": 0.1, "scale": 2.0}
    target = torch.where(target == -100, 3, target)
    module = eaves.CrossEntropyLoss(weight, **named)
    assert torch.equal(module(logits, target), eaves.cross_entropy(logits, target, weight, **named))
    assert repr(module) == (
        "CrossEntropyLoss(ignore_index=3, reduction='sum', label_smoothing=0.1, scale=2.0, z_loss=0.1)"
    )
    assert repr(eaves.CrossEntropyLoss()) == "CrossEntropyLoss()"
    # As in torch: a buffer, which moves with the module and is in its state.
    assert list(module.state_dict()) == list(torch.nn.CrossEntropyLoss(weight).state_dict()) == ["weight"]
    assert module.double().weight.dtype == torch.float64
    out = eaves.CrossEntropyLoss(outputs="lse")(logits, target, normalizer=2)
    assert out._fields == ("loss", "lse")
    assert torch.equal(out.loss, eaves.cross_entropy(logits, target, normalizer=2.0))


@each("kind", [eaves.CrossEntropyLoss, eaves.LinearCrossEntropyLoss])
def test_a_module_keeps_passes_and_prints_every_option(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    passed: dict[str, object] = {}

    class Derived(kind):  # type: ignore[misc]
        def __init__(self, size: int, **options: object) -> None:
            super().__init__(**options)

    module = inspect.getmodule(kind)
    name = "cross_entropy" if kind is eaves.CrossEntropyLoss else "linear_cross_entropy"
    options = [each for each in inspect.signature(kind).parameters if each not in ("weight", "unknown")]
    assert set(options) < set(inspect.signature(getattr(eaves, name)).parameters)
    monkeypatch.setattr(module, name, lambda *_, **named: passed.update(named))
    given = (torch.zeros(1),) * (2 if kind is eaves.CrossEntropyLoss else 3)
    for option in options:
        for made in (kind(**{option: "other"}), Derived(3, **{option: "other"})):
            assert made.extra_repr() == f"{option}='other'" and getattr(made, option) == "other"
            passed.clear()
            made(*given)
            assert passed[option] == "other" and set(options) <= set(passed)


# -------------------------------------------------------------------------------------------------------------- outputs


def test_what_was_asked_for_is_there_in_the_order_of_the_names(device: torch.device) -> None:
    logits = random_tensor((9, 33), torch.float32, device)
    target = targets_of(logits)
    whole = eaves.cross_entropy(logits, target, outputs=EVERYTHING)
    for names in (*EVERYTHING, EVERYTHING[::-1], ["entropy", "lse"]):
        for wants_grad in (False, True):
            out: Any = eaves.cross_entropy(logits.detach().requires_grad_(wants_grad), target, outputs=names)
            assert out._fields == ("loss", *([names] if isinstance(names, str) else names))
            for name, found in out._asdict().items():
                torch.testing.assert_close(found, getattr(whole, name))
    loss, lse = eaves.cross_entropy(logits, target, outputs="lse")
    torch.testing.assert_close((loss, lse), (whole.loss, whole.lse))
    for nothing in ((), []):
        assert type(eaves.cross_entropy(logits, target, outputs=nothing)) is Tensor


def test_outputs_can_be_pickled(device: torch.device) -> None:
    logits = random_tensor((9, 33), torch.float32, device)
    out = eaves.cross_entropy(logits, targets_of(logits), outputs=("lse", "argmax"))
    for again in (pickle.loads(pickle.dumps(out)), copy.deepcopy(out)):
        assert type(again) is type(out) and all(map(torch.equal, again, out))


def test_targets_out_of_range_are_nan_on_a_gpu(cuda: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = random_tensor((4, 10), torch.float32, cuda).requires_grad_()
    target = torch.tensor([1, 10, -1, 3], device=cuda)
    loss = eaves.cross_entropy(logits, target, reduction="none")
    assert loss.isnan().tolist() == [False, True, True, False]
    loss.sum().backward()
    assert logits.grad.isnan().all(1).tolist() == [False, True, True, False]
    monkeypatch.setenv("EAVES_CHECK_TARGETS", "1")
    with pytest.raises(ValueError, match=r"^cross_entropy: .*10"):
        eaves.cross_entropy(logits, target)


# -------------------------------------------------------------------------------------------------- protection of input


def test_no_grad_and_inference_mode_give_results_without_a_graph(device: torch.device) -> None:
    logits = random_tensor((9, 33), torch.float32, device).requires_grad_()
    target = targets_of(logits)
    expected = eaves.cross_entropy(logits, target).detach()
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            for named in ({}, {"inplace_backward": True}):  # nothing to write: no gradient is wanted
                before = logits.clone()
                loss = eaves.cross_entropy(logits, target, **named)
                assert not loss.requires_grad and torch.equal(loss, expected)
                assert torch.equal(logits, before)


def test_the_operator_has_the_defaults_of_the_function() -> None:
    # A call without options passes no option on.
    of_operator = {a.name: a.default_value for a in torch.ops.eaves.cross_entropy_forward.default._schema.arguments[2:]}
    of_function = {name: p.default for name, p in inspect.signature(eaves.cross_entropy).parameters.items()}
    assert tuple(of_function[name] for name in NUMBERS) == numbers_of.__defaults__
    assert of_operator == {
        "class_weight": of_function["weight"],
        "row_weight": of_function["row_weight"],
        "normalizer": of_function["normalizer"],
        "class_axis": -1,  # of logits with at most two axes
        "ignore_index": of_function["ignore_index"],
        "reduction": NUMBERS_OF_REDUCTIONS[of_function["reduction"]],
        "numbers": [],  # the defaults
        "outputs": 0,
    }


@each("wants_grad", [False, True])
@each("name", NUMBERS)
def test_every_number_changes_the_loss_of_a_small_call(name: str, wants_grad: bool, device: torch.device) -> None:
    # A call without options takes a shorter path, whose condition has to know each number.
    logits, head = random_tensor((9, 33), torch.float32, device, 2.0), random_tensor((5, 33), torch.float32, device)
    logits.requires_grad_(wants_grad)
    for function, arguments in (
        (eaves.cross_entropy, (logits, targets_of(logits))),
        (eaves.linear_cross_entropy, (logits, head, random_targets((9,), 5, device))),
    ):
        assert not torch.equal(function(*arguments, **{name: 0.5}), function(*arguments))


def test_a_parameter_is_a_tensor_and_the_result_is_a_plain_one(device: torch.device) -> None:
    parameter = torch.nn.Parameter(random_tensor((9, 33), torch.float32, device))
    target = targets_of(parameter)
    assert type(eaves.cross_entropy(parameter, target)) is Tensor
    check(parameter, target)


# ---------------------------------------------------------------------------------------------------------- compilation


def test_every_output_and_option_compiles_without_a_graph_break(any_device: torch.device, fresh_compiler: None) -> None:
    logits = random_tensor((4, 6, 33), torch.float32, any_device)
    weight = torch.rand(33, device=any_device)
    named: dict[str, Any] = {"label_smoothing": 0.1, "z_loss": 0.01, "softcap": 5.0, "scale": 2.0}
    hard, soft = targets_of(logits), probabilities_of(logits)
    for reduction, target in (("none", hard), ("sum", soft), ("mean", hard)):
        returns = every_output(target, weight, **named)
        module = eaves.CrossEntropyLoss(weight, reduction=reduction, class_dim=-1, **named, **returns)
        compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
        results = []
        for function in (module, compiled):
            leaf = logits.clone().requires_grad_()
            out = function(leaf, target)
            assert out._fields == ("loss", *returns["outputs"])
            (out.loss.sum() + out.lse.square().sum() + out.entropy.sum()).backward()
            results.append([*out, leaf.grad])
        for expected, actual in zip(*results, strict=True):
            assert torch.equal(actual, expected)


def test_outputs_compile_in_the_order_of_their_names(any_device: torch.device, fresh_compiler: None) -> None:
    logits = random_tensor((6, 33), torch.float32, any_device)
    target = targets_of(logits)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        loss, entropy, lse = eaves.cross_entropy(x, target, outputs=["entropy", "lse"])
        return loss + entropy.sum(), lse

    whole = eaves.cross_entropy(logits, target, outputs=EVERYTHING)
    assert all(map(torch.equal, function(logits), (whole.loss + whole.entropy.sum(), whole.lse)))


def test_a_normalizer_compiles_as_a_number_and_as_a_tensor(any_device: torch.device, fresh_compiler: None) -> None:
    logits = random_tensor((6, 33), torch.float32, any_device)
    target = targets_of(logits)

    def function(x: Tensor, n: Any) -> Tensor:
        return eaves.cross_entropy(x, target, normalizer=n)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for normalizer in (5.0, torch.tensor(5, device=any_device)):
        assert torch.equal(compiled(logits, normalizer), function(logits, normalizer))
