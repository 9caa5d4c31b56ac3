"""eaves.jax.linear_cross_entropy and linear_log_prob against float64 arithmetic, with every pair of options."""

import functools
from typing import Any

import numpy as np
import pytest
import torch

from comparison import assert_within
from jax_cross_entropy_test import OUTPUTS, labels_of
from layouts import random_tensor
from linear_cross_entropy_cases import LinearOracle, assert_gradients
from pairwise import pairwise

jax = pytest.importorskip("jax", reason="JAX is not installed")
import jax.numpy as jnp  # noqa: E402

import eaves  # noqa: E402
import eaves.jax  # noqa: E402
from eaves._arguments import MEAN  # noqa: E402
from eaves.jax._library import suits_speed  # noqa: E402
from jax_arrays import DTYPES, array_of, tensor_of  # noqa: E402

V, D = 37, 24

CASES = pairwise(
    DTYPES,
    ("none", "sum", "mean"),
    (0.0, 0.1),  # label_smoothing
    (None, 5.0),  # softcap
    (None, 0.7),  # scale
    (0.0, 0.01),  # z_loss
    (False, True),  # bias
    (False, True),  # weight
    (False, True),  # row_weight
    (-100, 3),  # ignore_index
    ("vd", "dv"),  # head_layout
    ("auto", "speed", "recompute"),
    (False, True),  # further outputs
    (None, 1),  # workspace_bytes
    (None, "float32"),  # grad_head_dtype
)


def tensors(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states and a head, whose logits have a deviation of about 1."""
    return random_tensor((4, 6, D), dtype), random_tensor((V, D), dtype, deviation=D**-0.5)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_loss_outputs_and_gradients_are_within_the_contract(jax_device: Any, case: tuple[Any, ...]) -> None:
    dtype, reduction, smoothing, softcap, scale, z_loss, biased, weighted, rows, ignored, layout = case[:11]
    algorithm, everything, workspace_bytes, grad_head_dtype = case[11:]
    options: dict[str, Any] = {
        "reduction": reduction, "label_smoothing": smoothing, "softcap": softcap, "scale": scale, "z_loss": z_loss,
        "ignore_index": ignored,
    }  # fmt: skip
    hidden, head = tensors(dtype)
    labels = labels_of((4, 6), V, ignored)
    bias = random_tensor((V,), dtype) if biased else None
    weight = torch.rand(V, generator=torch.Generator().manual_seed(3)) + 0.5 if weighted else None
    row_weight = torch.rand(4, 6, generator=torch.Generator().manual_seed(4)) if rows else None
    names = [name for name in OUTPUTS if everything and not (name == "mean_logit" and weighted and smoothing)]

    def function(hidden: Any, head: Any, bias: Any) -> Any:
        return eaves.jax.linear_cross_entropy(
            hidden, head, array_of(labels), head_layout=layout, bias=bias, class_weight=array_of(weight),
            row_weight=array_of(row_weight), algorithm=algorithm, workspace_bytes=workspace_bytes,
            grad_head_dtype=grad_head_dtype, outputs=names, **options,
        )  # fmt: skip

    oracle = LinearOracle(hidden, head, labels, bias, weight, row_weight=row_weight, **options)
    lying = head.T if layout == "dv" else head
    result, vjp = jax.vjp(jax.jit(function), array_of(hidden), array_of(lying.contiguous()), array_of(bias))
    found = result._asdict() if everything else {"loss": result}
    bounds = oracle.bounds(torch.float32)
    for name in ("loss", *names):
        if name != "argmax":
            assert_within(tensor_of(found[name]), bounds[name], name)
    upstream = {name: random_tensor(tuple(found[name].shape), torch.float32) for name in ("loss", *names)}
    if everything:
        given = {name: array_of(upstream[name]) for name in ("loss", "lse", "entropy")}
        constant = {"argmax": jnp.zeros((4, 6), jax.dtypes.float0)}
        grads = vjp(jax.tree.map(jnp.zeros_like, result)._replace(**given, **constant))
        exact = oracle.gradients(upstream["loss"], upstream["lse"], upstream["entropy"])
    else:
        grads = vjp(array_of(upstream["loss"]))
        exact = oracle.gradients(upstream["loss"])
    grad_hidden, grad_head, grad_bias = (None if grad is None else tensor_of(grad) for grad in grads)
    assert grad_hidden is not None and grad_head is not None
    assert grad_hidden.dtype == grad_head.dtype == dtype
    assert_gradients((grad_hidden, grad_head.T if layout == "dv" else grad_head, grad_bias), exact, dtype)


@pytest.mark.parametrize("algorithm", ["speed", "recompute"])
def test_no_divisor_has_larger_errors_than_a_power_of_two(jax_device: Any, algorithm: str) -> None:
    # Divided by 877, the targets' elements of the gradient of the logits would all be off by 3.2e-3.
    rows, classes, luck = 877, 500, 1.05
    hidden = random_tensor((rows, 64), torch.bfloat16)
    head = random_tensor((classes, 64), torch.bfloat16, deviation=0.25).flip(0)
    labels = torch.arange(rows) * 7919 % classes
    exact = LinearOracle(hidden, head, labels, reduction="sum").gradients()

    def errors(reduction: str, divisor: int) -> list[float]:
        def function(hidden: Any, head: Any, bias: Any) -> Any:
            return eaves.jax.linear_cross_entropy(
                hidden, head, array_of(labels), bias=bias, reduction=reduction, algorithm=algorithm,
                grad_head_dtype="float32",
            )  # fmt: skip

        arrays = (array_of(hidden), array_of(head), jnp.zeros(classes))
        found = map(tensor_of, jax.grad(function, (0, 1, 2))(*arrays))
        return [float((each.double() * divisor - of).norm() / of.norm()) for each, of in zip(found, exact)]

    scaled, best = errors("mean", rows), errors("sum", 1)
    assert all(error <= luck * least for error, least in zip(scaled, best, strict=True)), (scaled, best)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_probabilities(jax_device: Any, dtype: torch.dtype) -> None:
    hidden, head = tensors(dtype)
    q = random_tensor((4, 6, V), torch.float32).softmax(-1)
    loss, grads = jax.value_and_grad(eaves.jax.linear_cross_entropy, (0, 1))(*map(array_of, (hidden, head, q)))
    oracle = LinearOracle(hidden, head, q)
    assert_within(tensor_of(loss), oracle.bounds(torch.float32)["loss"])
    assert_gradients((*map(tensor_of, grads), None), oracle.gradients(), dtype)


def test_the_argmax_is_that_of_the_logits(jax_device: Any) -> None:
    hidden, head = map(array_of, tensors(torch.float32))
    labels = jnp.zeros((4, 6), jnp.int32)
    output = eaves.jax.linear_cross_entropy(hidden, head, labels, outputs="argmax")
    assert (output.argmax == (hidden @ head.T).argmax(-1)).all()


def calls_in(function: Any, *arrays: Any) -> list[str]:
    """The functions of the core that the program calls, with the tensors that they write."""
    text = jax.jit(function).lower(*arrays).as_text()
    return [line for line in text.splitlines() if "custom_call @eaves" in line]


def test_what_nobody_asks_for_is_not_computed() -> None:
    hidden, head = map(array_of, tensors(torch.float32))
    labels = array_of(labels_of((4, 6), V))
    loss = functools.partial(eaves.jax.linear_cross_entropy, targets=labels)

    (call,) = calls_in(lambda x, w: loss(x, w), hidden, head)
    assert "linear_cross_entropy_forward\\22" in call  # one product
    (call,) = calls_in(jax.grad(lambda x, w: loss(x, w), (0, 1)), hidden, head)
    assert "forward_backward" in call and "grad_hidden" in call and "grad_head" in call  # three
    (call,) = calls_in(jax.grad(lambda x, w: loss(x, w)), hidden, head)
    assert "grad_hidden" in call and "grad_head" not in call  # a frozen head
    (call,) = calls_in(jax.grad(lambda x, w: loss(x, w), 1), hidden, head)
    assert "grad_hidden" not in call and "grad_head" in call  # a frozen body
    rows = functools.partial(loss, reduction="none")
    forward, backward = calls_in(jax.grad(lambda x, w: rows(x, w).sum(), (0, 1)), hidden, head)
    assert "linear_cross_entropy_forward\\22" in forward and "linear_cross_entropy_backward" in backward


@pytest.mark.parametrize("is_soft", [False, True])
@pytest.mark.parametrize("sizes", [(50, 8, 5000), (50, 5000, 8), (5000, 50, 8)])
def test_auto_asks_the_core_with_the_sizes_of_the_call(
    jax_cpu: None, sizes: tuple[int, int, int], is_soft: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")  # eaves.jax asks for it
    rows, features, classes = sizes

    def answer(limit: int) -> bool:
        return suits_speed(b"float32", -1, MEAN, *[False] * 4, limit, rows, features, classes, False, is_soft)

    below, least = 1, 1 << 26  # the least limit of speed
    assert not answer(below) and answer(least)
    while least - below > 1:
        middle = (below + least) // 2
        below, least = (below, middle) if answer(middle) else (middle, least)

    hidden, head = torch.zeros(rows, features, requires_grad=True), torch.zeros(classes, features, requires_grad=True)
    targets = torch.full((rows, classes), 1 / classes) if is_soft else torch.zeros(rows, dtype=torch.int32)
    arrays = array_of(hidden.detach()), array_of(head.detach())
    for limit, is_speed in ((below, False), (least, True)):
        loss = eaves.linear_cross_entropy(hidden, head, targets, workspace_bytes=limit)
        assert ("Speed" in type(loss.grad_fn).__name__) == is_speed
        of_jax = functools.partial(eaves.jax.linear_cross_entropy, targets=array_of(targets), workspace_bytes=limit)
        calls = calls_in(jax.grad(lambda x, w, of_jax=of_jax: of_jax(x, w), (0, 1)), *arrays)
        assert any("forward_backward" in call for call in calls) == is_speed


def test_errors_of_a_running_call_are_in_the_names_of_its_function(jax_cpu: None) -> None:
    hidden, head, wrong = jnp.ones((2, 3)), jnp.ones((5, 3)), jnp.array([0, 5])
    for function, name in ((eaves.jax.linear_cross_entropy, "targets"), (eaves.jax.linear_log_prob, "tokens")):
        with pytest.raises(Exception, match=rf"{function.__name__}: {name}\[1\] is 5, expected 0 to 4"):
            jax.block_until_ready(function(hidden, head, wrong))


@pytest.mark.parametrize(("temperature", "scale", "sentence"), [
    (1e-39, None, r"linear_log_prob: scale / temperature is 1\..*e\+39, expected"),
    (2.0, -1.0, r"linear_log_prob: scale is -1\.0"),
])  # fmt: skip
def test_a_tempered_scale_is_refused_as_it_was_passed(
    jax_cpu: None, temperature: float, scale: float | None, sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        eaves.jax.linear_log_prob(
            jnp.ones((1, 3)), jnp.ones((5, 3)), jnp.array([0]), temperature=temperature, scale=scale
        )


def test_no_algorithm_is_asked_for_a_call_that_is_refused(jax_cpu: None) -> None:
    gradient = jax.grad(lambda x, w: eaves.jax.linear_cross_entropy(x, w, jnp.array([0, 1])))
    with pytest.raises(ValueError, match=r"hidden has shape \[2, 0\], expected at least one feature"):
        gradient(jnp.zeros((2, 0)), jnp.zeros((5, 0)))


@pytest.mark.parametrize("algorithm", ["auto", "speed"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("workspace_bytes", [None, 1, 1 << 30])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_way_to_the_gradients_is_that_of_pytorch(
    jax_cpu: None, dtype: torch.dtype, workspace_bytes: int | None, reduction: str, algorithm: str
) -> None:
    labels = labels_of((4, 6), V)
    upstream = torch.full((4, 6) if reduction == "none" else (), 64.0)
    for has_entropy in (False, True):
        for is_frozen in (False, True):
            hidden, head = tensors(dtype)
            hidden.requires_grad_(), head.requires_grad_(not is_frozen)
            options: dict[str, Any] = {
                "reduction": reduction, "algorithm": algorithm, "workspace_bytes": workspace_bytes,
            }  # fmt: skip
            outputs = ("entropy", "argmax") if has_entropy else ("argmax",)
            expected = eaves.linear_cross_entropy(hidden, head, labels, outputs=outputs, **options)
            is_speed = "Speed" in type(expected.loss.grad_fn).__name__

            def loss(x: Any, w: Any, outputs: Any = outputs, options: dict[str, Any] = options) -> Any:
                found: Any = eaves.jax.linear_cross_entropy(x, w, array_of(labels), outputs=outputs, **options)
                return (found.loss * array_of(upstream)).sum()

            arrays = array_of(hidden.detach()), array_of(head.detach())
            gradient = jax.grad(loss, 0 if is_frozen else (0, 1))
            assert any("forward_backward" in call for call in calls_in(gradient, *arrays)) == is_speed
            grads = (gradient(*arrays),) if is_frozen else gradient(*arrays)
            exact = LinearOracle(hidden, head, labels, reduction=reduction).gradients(upstream)
            assert_gradients([*map(tensor_of, grads), None, None][:3], exact, dtype)


def test_products_under_checkpoint_are_those_that_are_documented() -> None:
    hidden, head = map(array_of, tensors(torch.float32))
    products = {"forward\\22": 1, "forward_backward\\22": 3, "entropy_backward\\22": 3}
    for algorithm, documented in (("speed", 6), ("recompute", 5)):
        loss = functools.partial(
            eaves.jax.linear_cross_entropy, targets=array_of(labels_of((4, 6), V)), algorithm=algorithm
        )
        calls = calls_in(jax.value_and_grad(jax.checkpoint(lambda x, w, f=loss: f(x, w)), (0, 1)), hidden, head)
        assert sum(count for call in calls for name, count in products.items() if name in call) == documented


def test_a_head_is_not_copied_in_either_layout() -> None:
    hidden, head = map(array_of, tensors(torch.float32))
    labels = array_of(labels_of((4, 6), V))
    for layout, lying in (("vd", head), ("dv", head.T)):
        program = jax.jit(functools.partial(eaves.jax.linear_cross_entropy, head_layout=layout))
        text = program.lower(hidden, lying, labels).compile().as_text()
        assert "transpose(" not in text and "copy(" not in text


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_log_probabilities_and_entropy(jax_device: Any, dtype: torch.dtype) -> None:
    hidden, head = tensors(dtype)
    tokens = labels_of((4, 6), V)
    options: dict[str, Any] = {"scale": 2.0, "softcap": 3.0}

    def function(hidden: Any, head: Any) -> Any:
        output = eaves.jax.linear_log_prob(
            hidden, head, array_of(tokens), temperature=0.5, outputs=("entropy", "is_top1"), **options
        )
        return tuple(output)

    oracle = LinearOracle(hidden, head, tokens, reduction="none", scale=4.0, softcap=6.0)
    (log_prob, entropy, is_top1), vjp = jax.vjp(function, array_of(hidden), array_of(head))
    bounds = oracle.bounds(torch.float32)
    assert_within(-tensor_of(log_prob), bounds["loss"])
    assert_within(tensor_of(entropy), bounds["entropy"])
    assert (torch.tensor(is_top1.tolist()) == ((oracle.rows.argmax == tokens) & (tokens != -100))).all()
    upstream = [random_tensor((4, 6), torch.float32), random_tensor((4, 6), torch.float32, deviation=0.3)]
    grads = vjp((*map(array_of, upstream), jnp.zeros((4, 6), jax.dtypes.float0)))
    exact = oracle.gradients(-upstream[0], None, upstream[1])
    assert_gradients((*map(tensor_of, grads), None), exact, dtype)
    plain = eaves.jax.linear_log_prob(array_of(hidden), array_of(head), array_of(tokens), temperature=0.5, **options)
    assert (plain == log_prob).all()
    assert not (tensor_of(log_prob).signbit() & (tokens == -100)).any()  # 0 and not -0


RIGHT: dict[str, Any] = {
    "hidden": jnp.zeros((4, 6, D)), "head": jnp.zeros((V, D)), "targets": jnp.zeros((4, 6), jnp.int32),
}  # fmt: skip


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"head": jnp.zeros((V, D + 1))}, r"head has shape \[37, 25\], expected \[classes, 24\]"),
        ({"head": jnp.zeros((V, D)), "head_layout": "dv"}, r"head has shape \[37, 24\], expected \[24, classes\]"),
        ({"head": jnp.zeros(V)}, r"head has shape \[37\], expected \[classes, 24\]"),
        ({"head": jnp.zeros((V, D), jnp.bfloat16)}, "head has dtype bfloat16, expected float32"),
        ({"targets": jnp.zeros(4, jnp.int32)}, r"targets has shape \[4\], expected \[4, 6\]"),
        ({"targets": jnp.zeros((4, 6), jnp.uint32)}, "targets has dtype uint32, expected int32 or int64 for classes"),
        ({"targets": jnp.zeros((4, 6))}, "floating-point type float32, .* int32 or int64 for classes"),
        ({"bias": jnp.zeros(3)}, r"bias has shape \[3\], expected \[37\]"),
        ({"class_weight": jnp.zeros(3)}, r"class_weight has shape \[3\], expected \[37\]"),
        ({"head_layout": "v"}, 'expected "vd" or "dv"'),
        ({"algorithm": "memory"}, 'expected "auto", "speed" or "recompute"'),
        ({"workspace_bytes": 0}, "expected a positive number of bytes"),
        ({"grad_head_dtype": jnp.float16}, "expected float32"),
        ({"scale": 0.0}, "scale is 0, expected a positive number"),
        ({"axis_name": "model"}, "inside of jax.shard_map"),
    ],
)
def test_refusals_while_jax_traces(wrong: dict[str, Any], sentence: str) -> None:
    arrays = {name: each for name, each in {**RIGHT, **wrong}.items() if isinstance(each, jax.Array)}
    constants = {name: each for name, each in wrong.items() if name not in arrays}
    function = functools.partial(eaves.jax.linear_cross_entropy, **constants)
    for call in (function, jax.jit(function)):
        with pytest.raises(ValueError, match=sentence) as caught:
            call(**arrays)
        assert str(caught.value).startswith("linear_cross_entropy: ") and "\n" not in str(caught.value)


@pytest.mark.usefixtures("jax_cpu")
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("algorithm", ["speed", "recompute"])
@pytest.mark.parametrize("is_soft", [False, True])
def test_rows_of_weight_zero_do_not_count_whatever_they_hold(is_soft: bool, algorithm: str, reduction: str) -> None:
    hidden, head = (array_of(random_tensor(shape, torch.float32)) for shape in ((6, D), (V, D)))
    hidden = hidden.at[jnp.array([1, 4])].set(jnp.nan)
    labels = jnp.ones((6, V)) / V if is_soft else jnp.array([1, 2, 3, 4, 5, 6])
    counts = jnp.array([True, False, True, True, False, True])
    others = jnp.array([0, 2, 3, 5])

    def function(hidden: Any, head: Any, labels: Any, row_weight: Any) -> Any:
        return eaves.jax.linear_cross_entropy(
            hidden, head, labels, row_weight=row_weight, reduction=reduction, algorithm=algorithm,
            outputs=("argmax", "sum_sq"),
        )  # fmt: skip

    def gradients(up: float, *arrays: Any) -> Any:
        out, vjp = jax.vjp(lambda *given: function(*given, *arrays[2:]).loss, *arrays[:2])
        return out, vjp(jnp.full_like(out, up))

    out = function(hidden, head, labels, counts)
    assert (out.argmax[~counts] == 0).all() and (out.sum_sq[~counts] == 0).all()
    loss, grads = gradients(1.0, hidden, head, labels, counts)
    expected, expected_grads = gradients(1.0, hidden[others], head, labels[others], jnp.ones(4))
    np.testing.assert_allclose(loss[others] if reduction == "none" else loss, expected, rtol=1e-5)
    np.testing.assert_allclose(grads[0][others], expected_grads[0], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(grads[1], expected_grads[1], rtol=1e-4, atol=1e-6)
    for up in (1.0, jnp.inf, jnp.nan):
        _, (grad, _) = gradients(up, hidden, head, labels, counts)
        assert (grad[~counts] == 0).all() and jnp.isfinite(grad[others]).any() == (up == 1)


@pytest.mark.parametrize(
    "wrong, error, sentence",
    [
        ({"tokens": jnp.zeros((4, 6))}, ValueError, "tokens has dtype float32"),
        ({"tokens": jnp.zeros((4, 3), jnp.int32)}, ValueError, r"tokens has shape \[4, 3\]"),
        ({"temperature": 0}, ValueError, "temperature is 0"),
        ({"temperature": jnp.ones(4)}, TypeError, "temperature is not a number"),
        ({"softcap": "30"}, TypeError, "softcap is not a number"),
        ({"softcap": "30", "temperature": 2.0}, TypeError, "softcap is not a number"),
        ({"ignore_index": 1.5}, TypeError, "ignore_index is not a number"),
        ({"head": jnp.zeros((6, 5))}, ValueError, "head has"),
        ({"tokens": jnp.zeros((4, 6), jnp.int8)}, ValueError, "tokens has dtype int8, expected int32 or int64"),
        ({"axis_name": "model"}, ValueError, "inside of jax.shard_map"),
        (
            {"outputs": "lse"},
            ValueError,
            "outputs has 'lse', expected names among entropy, is_top1, sum_sq, mean_logit",
        ),
        ({"return_top1": True}, TypeError, "argument 'return_top1'; pass outputs=\"is_top1\"$"),
        ({"linear_bias": None}, TypeError, "argument 'linear_bias'; pass bias$"),
    ],
)
def test_refusals_of_log_probabilities(wrong: dict[str, Any], error: type[Exception], sentence: str) -> None:
    right = {"hidden": RIGHT["hidden"], "head": RIGHT["head"], "tokens": RIGHT["targets"]}
    with pytest.raises(error, match=sentence) as caught:
        eaves.jax.linear_log_prob(**{**right, **wrong})
    assert str(caught.value).startswith("linear_log_prob: ") and "targets" not in str(caught.value)
