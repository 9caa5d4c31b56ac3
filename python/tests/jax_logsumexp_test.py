"""eaves.jax.logsumexp against float64 arithmetic."""

import functools
from typing import Any

import numpy as np
import pytest
import torch

from comparison import LogsumexpOracle, assert_within
from layouts import random_tensor

jax = pytest.importorskip("jax", reason="JAX is not installed")
import jax.numpy as jnp  # noqa: E402

import eaves.jax  # noqa: E402
from jax_arrays import DTYPES, array_of, tensor_of  # noqa: E402

# A row of one element, a short one, one that fills vectors unevenly, and one that is cut among threads or blocks.
SHAPES_AND_AXES: list[tuple[tuple[int, ...], Any]] = [
    ((3, 1), -1),
    ((4, 5, 33), -1),
    ((4, 5, 33), 0),
    ((4, 5, 33), (0, 2)),
    ((4, 5, 33), None),
    ((2, 70001), 1),
    ((0, 7), -1),
    ((7, 0), -1),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "axis"), SHAPES_AND_AXES)
@pytest.mark.parametrize("keepdims", [False, True])
def test_result_and_gradient_are_within_the_contract(
    jax_device: Any, dtype: torch.dtype, shape: tuple[int, ...], axis: Any, keepdims: bool
) -> None:
    x = random_tensor(shape, dtype, deviation=3.0)
    oracle = LogsumexpOracle(x, () if axis is None else axis, keepdims)
    for result_dtype in {dtype, torch.float32}:
        name = str(result_dtype).removeprefix("torch.")

        def function(array: Any, name: str = name) -> Any:
            return eaves.jax.logsumexp(array, axis, keepdims=keepdims, dtype=name)

        out, vjp = jax.vjp(jax.jit(function), array_of(x))
        assert_within(tensor_of(out), oracle.forward(result_dtype))
        upstream = random_tensor(tuple(out.shape), result_dtype)
        (grad,) = vjp(array_of(upstream))
        assert_within(tensor_of(grad), oracle.backward(upstream, dtype))


def test_edges_of_the_real_line(jax_device: Any) -> None:
    inf = float("inf")
    x = torch.tensor([[-inf, -inf], [inf, 0.0], [float("nan"), 1.0], [-inf, 2.0]])
    out, vjp = jax.vjp(lambda array: eaves.jax.logsumexp(array, -1), array_of(x))
    oracle = LogsumexpOracle(x, -1)
    assert_within(tensor_of(out), oracle.forward(torch.float32))
    assert_within(tensor_of(vjp(jnp.ones(4))[0]), oracle.backward(torch.ones(4), torch.float32))


def test_float64_where_jax_has_it(jax_device: Any) -> None:
    x = random_tensor((3, 50), torch.float64)
    with jax.enable_x64(True):
        out, vjp = jax.vjp(lambda array: eaves.jax.logsumexp(array, -1), jnp.asarray(x.numpy()))
        assert out.dtype == jnp.float64
        (grad,) = vjp(jnp.ones(3, jnp.float64))
        oracle = LogsumexpOracle(x, -1)
        assert_within(torch.tensor(out.tolist(), dtype=torch.float64), oracle.forward(torch.float64))
        exact = oracle.backward(torch.ones(3).double(), torch.float64)
        assert_within(torch.tensor(grad.tolist(), dtype=torch.float64), exact)


def test_integers_and_scalars_are_converted(jax_device: Any) -> None:
    assert eaves.jax.logsumexp(jnp.arange(3), 0).dtype == jnp.float32
    assert float(eaves.jax.logsumexp(jnp.float32(2.5))) == 2.5
    assert eaves.jax.logsumexp(jnp.ones((2, 3)), ()).shape == (2, 3)
    assert float(jax.grad(eaves.jax.logsumexp)(-jnp.inf)) == 0.0
    assert eaves.jax.logsumexp(jnp.ones((2, 3)), np.int64(1)).shape == (2,)


@pytest.mark.parametrize(
    ("named", "kind", "sentence"),
    [
        ({"axis": 3}, ValueError, "axis is 3, expected -2 to 1"),
        ({"axis": (0, -2)}, ValueError, "each axis once"),
        ({"axis": 0, "dtype": "float16"}, ValueError, "out has dtype float16"),
        ({"axis": (), "dtype": "int32"}, ValueError, "out has dtype int32"),
        ({"axis": 1.0}, TypeError, "axis is not a number"),
        ({"x": jnp.zeros((2, 3), jnp.complex64)}, NotImplementedError, "x has dtype complex64"),
    ],
)
def test_refusals(named: dict[str, Any], kind: type[Exception], sentence: str) -> None:
    function = functools.partial(eaves.jax.logsumexp, **{"x": jnp.zeros((2, 3)), **named})
    for call in (function, jax.jit(function)):
        with pytest.raises(kind, match=sentence) as caught:
            call()
        assert str(caught.value).startswith("logsumexp: ")
