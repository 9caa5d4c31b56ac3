"""Gradients of rows with an lse that needs more digits than one number has: beside a class that is almost certain, and
at the end of a dtype's range. Every function that keeps or merges lse keeps two numbers for each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import eaves

CLASSES = 50
LOGIT = 18.0  # 1 - p is 7.5e-7, and float32 has steps of 1.9e-6 there
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

Loss = Callable[[Tensor, Tensor], Tensor]
_Head = Callable[[Tensor, Tensor, Tensor], Tensor]


def k_tokens(tokens: Tensor) -> Tensor:
    return torch.stack((tokens, torch.full_like(tokens, -100)), -1)


def ones(target: Tensor) -> Tensor:
    return torch.ones(target.shape, device=target.device)


LOSSES: dict[str, Loss] = {
    "mean": lambda z, t: eaves.cross_entropy(z, t),
    "sum": lambda z, t: eaves.cross_entropy(z, t, reduction="sum"),
    "none": lambda z, t: eaves.cross_entropy(z, t, reduction="none").sum(),
    "lse too": lambda z, t: eaves.cross_entropy(z, t, outputs="lse").loss,
    "lse with a gradient": lambda z, t: (
        (out := eaves.cross_entropy(z, t, reduction="none", outputs="lse")).loss + 0 * out.lse
    ).sum(),
    "soft cap": lambda z, t: eaves.cross_entropy(z, t, softcap=1e6),
    "in place": lambda z, t: eaves.cross_entropy(z * 1, t, inplace_backward=True),
    "in place, lse too": lambda z, t: eaves.cross_entropy(z * 1, t, inplace_backward=True, outputs="lse").loss,
    "log_prob": lambda z, t: -eaves.log_prob(z, t).sum(),
    "log_prob of K tokens": lambda z, t: -eaves.log_prob(z, k_tokens(t)).sum(),
    "log_prob of a temperature for each row": lambda z, t: -eaves.log_prob(z, t, temperature=ones(t)).sum(),
}

HEADS: dict[str, _Head] = {
    **{
        algorithm: lambda x, w, t, algorithm=algorithm: eaves.linear_cross_entropy(x, w, t, algorithm=algorithm)
        for algorithm in ("speed", "memory", "recompute", "keep")
    },
    "none": lambda x, w, t: eaves.linear_cross_entropy(x, w, t, reduction="none").sum(),
    "log_prob": lambda x, w, t: -eaves.linear_log_prob(x, w, t).sum(),
    "log_prob of K tokens": lambda x, w, t: -eaves.linear_log_prob(x, w, k_tokens(t)).sum(),
}


def learned(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    logits = torch.zeros(1, CLASSES, dtype=dtype, device=device)
    logits[0, 3] = LOGIT
    return logits, torch.tensor([3], device=device)


def allowed(device: torch.device, dtype: torch.dtype, exact: float) -> float:
    """A float16 below 3e-8 is 0. On a GPU the sum next to 1 has an error of two steps of a float32."""
    of_dtype = {torch.float16: 2**-11 * abs(exact) + 2**-25, torch.bfloat16: 2**-8 * abs(exact)}.get(dtype, 0.0)
    of_sum = 2**-22 if device.type == "cuda" and dtype != torch.float64 else 0.0
    return 2e-6 * abs(exact) + of_dtype + of_sum


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", LOSSES)
def test_a_learned_class_has_its_gradient(device: torch.device, name: str, dtype: torch.dtype) -> None:
    logits, target = learned(dtype, device)
    logits.requires_grad_()
    LOSSES[name](logits, target).backward()
    exact = logits.detach().double().requires_grad_()
    torch.nn.functional.cross_entropy(exact, target).backward()
    assert logits.grad is not None and exact.grad is not None
    assert float(exact.grad[0, 3]) == pytest.approx(-7.463e-7, rel=1e-3)
    expected = float(exact.grad[0, 3])
    within = allowed(device, dtype, expected)
    assert float(logits.grad[0, 3]) == pytest.approx(expected, rel=0, abs=within)
    assert logits.grad[0, 3] <= 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", HEADS)
def test_a_learned_class_of_a_head_has_its_gradient(device: torch.device, name: str, dtype: torch.dtype) -> None:
    weight, target = learned(dtype, device)
    weight = weight.T.contiguous().requires_grad_()  # one feature, so that the weight is the row's logits
    hidden = torch.ones(1, 1, dtype=dtype, device=device)
    HEADS[name](hidden, weight, target).backward()
    exact = -1 / (1 + torch.tensor(LOGIT, dtype=torch.float64).exp().item() / (CLASSES - 1))
    assert weight.grad is not None
    assert float(weight.grad[3, 0]) == pytest.approx(exact, rel=0, abs=allowed(device, dtype, exact))
    assert weight.grad[3, 0] <= 0


LARGEST = {torch.float16: 65504.0, torch.bfloat16: 3.0e38, torch.float32: 3.0e38, torch.float64: 1.7e308}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [each for each in LOSSES if each != "soft cap"])
def test_logits_at_the_end_of_their_range_have_their_gradient(
    device: torch.device, name: str, dtype: torch.dtype
) -> None:
    logits = torch.full((1, 2), LARGEST[dtype], dtype=dtype, device=device, requires_grad=True)
    LOSSES[name](logits, torch.tensor([1], device=device)).backward()
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad.double().cpu(), torch.tensor([[0.5, -0.5]]).double(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_logsumexp_at_the_end_of_its_range_has_its_gradient(device: torch.device, dtype: torch.dtype) -> None:
    x = torch.full((2, 4), LARGEST[dtype], dtype=dtype, device=device, requires_grad=True)
    eaves.logsumexp(x, 1).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad.double().cpu(), torch.full((2, 4), 0.25).double(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_a_learned_class_has_its_gradient_in_jax(jax_device: Any, dtype: str) -> None:
    import jax
    import jax.numpy as jnp

    import eaves.jax

    on_gpu = torch.device("cpu" if jax_device.platform == "cpu" else "cuda")
    exact = -1 / (1 + torch.tensor(LOGIT, dtype=torch.float64).exp().item() / (CLASSES - 1))
    within = allowed(on_gpu, getattr(torch, dtype), exact)
    logits, labels = jnp.zeros((1, CLASSES), dtype).at[0, 3].set(LOGIT), jnp.array([3])
    grad = jax.grad(lambda z: eaves.jax.cross_entropy(z, labels))(logits)
    assert float(grad[0, 3]) == pytest.approx(exact, rel=0, abs=within)
    hidden = jnp.ones((1, 1), dtype)
    for algorithm in ("speed", "recompute"):
        loss = lambda head: eaves.jax.linear_cross_entropy(hidden, head, labels, algorithm=algorithm)  # noqa: B023, E731
        assert float(jax.grad(loss)(logits.T)[3, 0]) == pytest.approx(exact, rel=0, abs=within), algorithm
    at_end = jnp.full((1, 2), 65504.0, dtype)
    grad = jax.grad(lambda z: eaves.jax.cross_entropy(z, jnp.array([1])))(at_end)
    assert [float(each) for each in grad[0]] == pytest.approx([0.5, -0.5], rel=0, abs=1e-6)
    assert float(jax.grad(lambda z: eaves.jax.logsumexp(z))(at_end)[0, 0]) == pytest.approx(0.5, rel=0, abs=1e-6)
