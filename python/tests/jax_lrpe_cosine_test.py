"""eaves.jax.lrpe_cosine against float64 arithmetic, with every pair of options."""

from typing import Any

import pytest
import torch

from comparison import assert_within
from layouts import random_tensor
from lrpe_cosine_cases import ACTIVATIONS, Oracle, angles
from pairwise import pairwise

jax = pytest.importorskip("jax", reason="JAX is not installed")
import jax.numpy as jnp  # noqa: E402

import eaves.jax  # noqa: E402
from jax_arrays import DTYPES, array_of, tensor_of  # noqa: E402

B, N, H, D = 3, 10, 2, 8

POSITIONS: list[dict[str, Any]] = [
    {},
    {"offset": 5},
    {"offset": torch.tensor([7])},
    {"offset": torch.arange(B)},
    {"positions": torch.arange(N).flip(0)},
    {"positions": torch.arange(B * N).view(B, N), "extra_tokens": 2},
    {"cu_seqlens": torch.tensor([0, 4, 10])},
    {"grid": (2, 4), "extra_tokens": 2},
]

CASES = pairwise(DTYPES, POSITIONS, ACTIVATIONS, ("bnhd", "bhnd"), ((H, 4), (1, D), (H, 1)), (True, False))


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{[*case[1]]}-{case[2:]}")
def test_result_and_gradients_are_within_the_contract(jax_device: Any, case: tuple[Any, ...]) -> None:
    dtype, positions, (activation, dim), layout, of_theta, has_float32_theta = case
    if "cu_seqlens" in positions and dim == -2:
        pytest.skip("a softmax would mix packed sequences")
    shape = (B, N, H, D) if layout == "bnhd" else (B, H, N, D)
    x, theta = random_tensor(shape, dtype), angles(*of_theta, torch.float32 if has_float32_theta else dtype)
    options: dict[str, Any] = {"activation": activation, "layout": layout} | (
        {} if dim is None else {"activation_dim": dim}
    )
    given = {name: array_of(each) if isinstance(each, torch.Tensor) else each for name, each in positions.items()}

    def function(x: Any, theta: Any) -> Any:
        return eaves.jax.lrpe_cosine(x, theta, **given, **options)

    out, vjp = jax.vjp(jax.jit(function), array_of(x), array_of(theta))
    grad_out = random_tensor(tuple(out.shape), dtype)
    oracle = Oracle(x, theta, grad_out, **positions, **options)
    grad_x, grad_theta = vjp(array_of(grad_out))
    assert_within(tensor_of(out), oracle.out, "out")
    assert_within(tensor_of(grad_x), oracle.grad_x, "grad_x")
    assert_within(tensor_of(grad_theta), oracle.grad_theta, "grad_theta")


def test_an_offset_that_is_an_array_compiles_once(jax_device: Any) -> None:
    traces = []

    @jax.jit
    def encode(x: Any, theta: Any, offset: Any) -> Any:
        traces.append(1)
        return eaves.jax.lrpe_cosine(x, theta, offset=offset)

    x, theta = array_of(random_tensor((1, 1, H, D), torch.float32)), array_of(angles(H, D))
    results = [encode(x, theta, jnp.array(offset)) for offset in (0, 1, 70000)]
    assert len(traces) == 1
    for offset, result in zip((0, 1, 70000), results):
        assert_within(tensor_of(result), Oracle(tensor_of(x), tensor_of(theta), offset=offset).out)


@pytest.mark.parametrize(
    ("wrong", "kind", "sentence"),
    [
        ({"x": jnp.zeros((B, N, D))}, ValueError, r"x has shape .*, expected 4 axes"),
        ({"theta": jnp.zeros((3, D))}, ValueError, "theta has 3 heads, expected 2"),
        ({"grid": (3, 3)}, ValueError, "grid is"),
        ({"extra_tokens": N + 1}, ValueError, "extra_tokens is 11"),
        ({"positions": jnp.arange(3)}, ValueError, r"positions has shape \[3\]"),
        ({"offset": 1.5}, TypeError, "offset is not a number"),
        ({"grid": ("a",)}, TypeError, "grid is not a number"),
        ({"offset": jnp.arange(2)}, ValueError, r"offset has shape \[2\]"),
        ({"activation": "gelu"}, ValueError, "activation is 'gelu', expected one of none, relu"),
        ({"activation": "softmax", "activation_dim": 0}, ValueError, "activation_dim is 0"),
        ({"layout": "hbnd"}, ValueError, "layout is 'hbnd'"),
        (
            {"cu_seqlens": jnp.array([0, N]), "activation": "softmax", "activation_dim": -2},
            NotImplementedError,
            "softmax over the sequence",
        ),
    ],
)
def test_refusals_while_jax_traces(wrong: dict[str, Any], kind: Any, sentence: str) -> None:
    named = {"x": jnp.zeros((B, N, H, D)), "theta": jnp.zeros((H, D)), **wrong}
    arrays = {name: each for name, each in named.items() if isinstance(each, jax.Array)}
    constants = {name: each for name, each in named.items() if name not in arrays}
    for call in (eaves.jax.lrpe_cosine, jax.jit(lambda **named: eaves.jax.lrpe_cosine(**named, **constants))):
        with pytest.raises(kind, match=sentence) as caught:
            call(**arrays, **(constants if call is eaves.jax.lrpe_cosine else {}))
        assert str(caught.value).startswith("lrpe_cosine: ") and "\n" not in str(caught.value)
