"""eaves.jax.cross_entropy against float64 arithmetic, with every pair of options."""

import functools
from typing import Any

import pytest
import torch

from comparison import CrossEntropyOracle, assert_within
from layouts import random_tensor
from pairwise import pairwise

jax = pytest.importorskip("jax", reason="JAX is not installed")
import jax.numpy as jnp  # noqa: E402

import eaves.jax  # noqa: E402
from jax_arrays import DTYPES, array_of, assert_same_bits, tensor_of  # noqa: E402

V = 37
OUTPUTS = ("lse", "argmax", "entropy", "z_loss", "sum_sq", "mean_logit")


def labels_of(shape: tuple[int, ...], classes: int = V, ignored: int = -100) -> torch.Tensor:
    generator = torch.Generator().manual_seed(13)
    labels = torch.randint(0, classes, shape, generator=generator)
    labels.view(-1)[1::7] = ignored
    return labels


CASES = pairwise(
    DTYPES,
    ("none", "sum", "mean"),
    (0.0, 0.1),  # label_smoothing
    (None, 5.0),  # softcap
    (None, 0.7),  # scale
    (0.0, 0.01),  # z_loss
    (False, True),  # weight
    (False, True),  # row_weight
    (-100, 3),  # ignore_index
    (-1, 1),  # axis
    (False, True),  # inplace_backward
    (False, True),  # further outputs
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_loss_outputs_and_gradient_are_within_the_contract(jax_device: Any, case: tuple[Any, ...]) -> None:
    dtype, reduction, smoothing, softcap, scale, z_loss, weighted, rows, ignored, axis, inplace, everything = case
    options: dict[str, Any] = {
        "reduction": reduction, "label_smoothing": smoothing, "softcap": softcap, "scale": scale, "z_loss": z_loss,
        "ignore_index": ignored,
    }  # fmt: skip
    logits = random_tensor((4, 6, V), dtype, deviation=3.0).movedim(-1, axis)
    labels = labels_of((4, 6), ignored=ignored)
    weight = torch.rand(V, generator=torch.Generator().manual_seed(3)) + 0.5 if weighted else None
    row_weight = torch.rand(4, 6, generator=torch.Generator().manual_seed(4)) if rows else None
    names = [name for name in OUTPUTS if everything and not (name == "mean_logit" and weighted and smoothing)]

    def function(array: Any) -> Any:
        return eaves.jax.cross_entropy(
            array, array_of(labels), array_of(weight), axis=axis, row_weight=array_of(row_weight),
            inplace_backward=inplace, outputs=names, **options,
        )  # fmt: skip

    oracle = CrossEntropyOracle(logits, labels, weight, class_dim=axis, row_weight=row_weight, **options)
    result, vjp = jax.vjp(jax.jit(function), array_of(logits))
    found = result._asdict() if everything else {"loss": result}
    bounds = oracle.bounds()
    for name in ("loss", *names):
        if name == "argmax":
            assert tensor_of(found[name]).long().equal(oracle.argmax)
        else:
            assert_within(tensor_of(found[name]), bounds[name], name)
    upstream = {name: random_tensor(tuple(found[name].shape), torch.float32) for name in ("loss", *names)}
    if everything:
        assert result._fields == ("loss", *names)
        given = {name: array_of(upstream[name]) for name in ("loss", "lse", "entropy")}
        constant = {"argmax": jnp.zeros((4, 6), jax.dtypes.float0)}
        (grad,) = vjp(jax.tree.map(jnp.zeros_like, result)._replace(**given, **constant))
        exact = oracle.gradient(dtype, upstream["loss"], upstream["lse"], upstream["entropy"])
    else:
        (grad,) = vjp(array_of(upstream["loss"]))
        exact = oracle.gradient(dtype, upstream["loss"])
    assert grad.dtype == array_of(logits).dtype
    assert_within(tensor_of(grad), exact, "gradient")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_probabilities(jax_device: Any, dtype: torch.dtype, reduction: str) -> None:
    logits = random_tensor((5, V), dtype)
    q = random_tensor((5, V), torch.float32).softmax(-1)
    oracle = CrossEntropyOracle(logits, q, reduction=reduction, label_smoothing=0.1)

    def function(array: Any) -> Any:
        return eaves.jax.cross_entropy(array, array_of(q), reduction=reduction, label_smoothing=0.1)

    loss, vjp = jax.vjp(function, array_of(logits))
    assert_within(tensor_of(loss), oracle.loss)
    assert_within(tensor_of(vjp(jnp.ones_like(loss))[0]), oracle.gradient(dtype))


def test_a_normalizer_divides(jax_device: Any) -> None:
    logits, labels = random_tensor((6, V), torch.float32), labels_of((6,))
    oracle = CrossEntropyOracle(logits, labels, normalizer=11.0)
    for normalizer in (11, 11.0, jnp.array([11.0])):
        function = functools.partial(eaves.jax.cross_entropy, targets=array_of(labels), normalizer=normalizer)
        loss, grad = jax.value_and_grad(lambda x, function=function: function(x))(array_of(logits))
        assert_within(tensor_of(loss), oracle.loss)
        assert_within(tensor_of(grad), oracle.gradient(torch.float32))


def test_without_rows_that_count_the_mean_and_its_gradient_are_0(jax_device: Any) -> None:
    for logits, labels in ((jnp.ones((3, V)), jnp.full(3, -100)), (jnp.ones((0, V)), jnp.zeros(0, jnp.int32))):
        loss, grad = jax.value_and_grad(eaves.jax.cross_entropy)(logits, labels)
        assert float(loss) == 0.0
        assert not grad.any()
    loss, grad = jax.value_and_grad(eaves.jax.cross_entropy)(
        jnp.ones((2, 3)), jnp.array([0, 1]), class_weight=jnp.array([1.0, -1.0, 1.0])
    )
    assert float(loss) == 0.0 and not grad.any()


def test_a_normalizer_of_0_gives_an_infinite_loss_without_a_gradient(jax_device: Any) -> None:
    loss, grad = jax.value_and_grad(eaves.jax.cross_entropy)(jnp.ones((2, 3)), jnp.array([0, 1]), normalizer=0.0)
    assert float(loss) == jnp.inf and not grad.any()


def test_a_refused_axis_leaves_nothing_behind(jax_device: Any) -> None:
    logits, labels = jnp.ones((3, 11)), jnp.zeros(3, jnp.int32)
    with pytest.raises(TypeError, match="axis is not a number"):
        eaves.jax.cross_entropy(logits, labels, axis=-1.0)  # type: ignore[arg-type]
    assert float(eaves.jax.cross_entropy(logits, labels)) == pytest.approx(2.397895, rel=1e-6)


def test_a_long_sum_is_within_the_contract(jax_device: Any) -> None:
    rows = 1 << 17
    logits, labels = random_tensor((rows, 3), torch.float32), labels_of((rows,), 3)
    for reduction in ("sum", "mean"):
        loss = eaves.jax.cross_entropy(array_of(logits), array_of(labels), reduction=reduction)
        assert_within(tensor_of(loss), CrossEntropyOracle(logits, labels, reduction=reduction).loss)


def test_the_gradient_in_place_is_the_same(jax_device: Any) -> None:
    logits, labels = array_of(random_tensor((6, V), torch.bfloat16)), array_of(labels_of((6,)))

    def step(logits: Any, inplace: bool) -> Any:
        loss, grad = jax.value_and_grad(eaves.jax.cross_entropy)(logits, labels, inplace_backward=inplace)
        return loss, grad, logits * 1  # the logits are needed behind the gradient: XLA has to keep a copy

    step = jax.jit(step, static_argnums=1)
    assert_same_bits(step(logits, True), step(logits, False))


RIGHT: dict[str, Any] = {"logits": jnp.zeros((4, 6, V)), "targets": jnp.zeros((4, 6), jnp.int32)}


@pytest.mark.parametrize(
    ("wrong", "kind", "sentence"),
    [
        ({"targets": jnp.zeros((4, 5), jnp.int32)}, ValueError, r"targets has shape \[4, 5\], expected \[4, 6\]"),
        ({"targets": jnp.zeros((4, 6), jnp.uint8)}, ValueError, "targets has dtype uint8, expected int32 or int64 for"),
        ({"targets": jnp.zeros((4, 6))}, ValueError, "floating-point type float32, .* int32 or int64 for classes"),
        ({"normalizer": -2.0}, ValueError, "normalizer is -2.0, expected a number that is not negative"),
        ({"logits": jnp.zeros((4, 6, V), jnp.int32)}, ValueError, "logits has dtype int32"),
        ({"logits": jnp.zeros((4, 6, 0))}, ValueError, "at least one class"),
        ({"axis": 3}, ValueError, "axis is 3, expected -3 to 2"),
        ({"class_weight": jnp.ones(V - 1)}, ValueError, r"class_weight has shape \[36\], expected \[37\]"),
        ({"row_weight": jnp.ones(4)}, ValueError, r"row_weight has shape \[4\], expected \[4, 6\]"),
        ({"reduction": "average"}, ValueError, 'expected "none", "sum" or "mean"'),
        ({"reduction": "sum", "normalizer": 3}, ValueError, "only the mean divides"),
        ({"normalizer": jnp.ones(2)}, ValueError, r"normalizer has shape \[2\], expected one element"),
        ({"label_smoothing": 1.5}, ValueError, "label_smoothing is 1.5, expected 0 to 1"),
        ({"z_loss": -1.0}, ValueError, "z_loss is -1, expected 0 or a positive number"),
        ({"softcap": -1.0}, ValueError, "softcap is -1, expected a positive number"),
        ({"scale": "x"}, TypeError, "scale is not a number"),
        ({"softcap": float("nan")}, ValueError, "softcap is nan, expected a finite number"),
        ({"axis_name": "model"}, ValueError, "inside of jax.shard_map"),
        ({"outputs": ("lse", "logits")}, ValueError, "outputs has 'logits', expected names among lse, argmax, entropy"),
        ({"outputs": ("lse", "lse")}, ValueError, "outputs is .*, expected each name once"),
        ({"outputs": True}, TypeError, r"outputs is True, expected names among .*, or \(\) for none"),
        ({"reduction": "batchmean"}, ValueError, "divide by a batch with normalizer=its size"),
        ({"weight": 1.0}, TypeError, "got an unexpected keyword argument 'weight'; pass class_weight"),
        ({"labels": 1.0}, TypeError, "got an unexpected keyword argument 'labels'; pass targets"),
        ({"return_lse": True}, TypeError, "argument 'return_lse'; pass outputs=\"lse\""),
        ({"class_dim": 1}, TypeError, "argument 'class_dim'; pass axis"),
        ({"colour": 1}, TypeError, r"(?m)argument 'colour'$"),
    ],
)
def test_refusals_while_jax_traces(wrong: dict[str, Any], kind: Any, sentence: str) -> None:
    arrays = {name: each for name, each in {**RIGHT, **wrong}.items() if isinstance(each, jax.Array)}
    constants = {name: each for name, each in wrong.items() if name not in arrays}
    function = functools.partial(eaves.jax.cross_entropy, **constants)
    for call in (function, jax.jit(function), lambda **named: jax.eval_shape(function, **named)):
        with pytest.raises(kind, match=sentence) as caught:
            call(**arrays)
        if kind in (ValueError, NotImplementedError):
            assert str(caught.value).startswith("cross_entropy: ") and "\n" not in str(caught.value)


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("up", [1.0, float("inf"), float("nan")])
def test_what_comes_from_above_does_not_reach_rows_that_do_not_count(up: float, inplace: bool, reduction: str) -> None:
    logits = array_of(random_tensor((6, V), torch.float32)).at[jnp.array([1, 4])].set(jnp.nan)
    labels, row_weight = jnp.array([1, -100, 2, 3, 0, 5]), jnp.array([1.0, 1, 2, 1, 0, 1])

    def function(z: Any) -> Any:
        named = {"row_weight": row_weight, "reduction": reduction, "inplace_backward": inplace}
        return eaves.jax.cross_entropy(z, labels, **named)

    loss, vjp = jax.vjp(function, logits)
    (grad,) = vjp(jnp.full_like(loss, up))
    assert (grad[jnp.array([1, 4])] == 0).all()
    is_finite = jnp.isfinite(grad[jnp.array([0, 2, 3, 5])])
    assert is_finite.all() if up == 1 else not is_finite.any()


def test_an_infinite_class_weight_makes_a_mean_and_its_gradient_nan() -> None:
    weight, labels = jnp.ones(V).at[2].set(jnp.inf), jnp.array([1, -100, 2, 3])

    def mean(z: Any, row_weight: Any) -> Any:
        return eaves.jax.cross_entropy(z, labels, weight, row_weight=row_weight)

    loss, grad = jax.value_and_grad(mean)(jnp.zeros((4, V)), jnp.ones(4))
    assert jnp.isnan(loss) and jnp.isnan(grad[jnp.array([0, 2, 3])]).all() and (grad[1] == 0).all()
    loss, grad = jax.value_and_grad(mean)(jnp.zeros((4, V)), jnp.array([1.0, 1, 0, 1]))
    assert jnp.isfinite(loss) and jnp.isfinite(grad).all()


def test_a_label_that_is_no_class_is_an_error_of_the_run_on_the_cpu(jax_cpu: None) -> None:
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match=r"targets\[1\] is 37, expected 0 to 36"):
        jax.block_until_ready(eaves.jax.cross_entropy(jnp.zeros((2, V)), jnp.array([0, V])))


def test_a_label_that_is_no_class_is_nan_on_a_gpu() -> None:
    try:
        found = jax.devices("cuda")[0]
    except RuntimeError:
        pytest.skip("no GPU for JAX")
    with jax.default_device(found):
        losses, vjp = jax.vjp(
            lambda z: eaves.jax.cross_entropy(z, jnp.array([0, V]), reduction="none"), jnp.zeros((2, V))
        )
        (grad,) = vjp(jnp.ones(2))
    assert jnp.isfinite(losses[0]) and jnp.isnan(losses[1])
    assert jnp.isfinite(grad[0]).all() and jnp.isnan(grad[1]).all()
