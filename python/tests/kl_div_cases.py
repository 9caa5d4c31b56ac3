"""Cases of eaves.linear_kl_div: its formula in float64 with all options, and tensors."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from chunked_cases import IGNORED, heads, uneven
from layouts import random_tensor

ROWS, CLASSES = (3, 5), 33
EVERYTHING = ("divergence", "hard_loss", "entropy", "lse", "teacher_lse")


def logits_of(x: Tensor, head: Tensor, bias: Any = None, scale: Any = None, softcap: Any = None) -> Tensor:
    z = F.linear(x, head, bias) * (1.0 if scale is None else scale)
    return z if softcap is None else softcap * torch.tanh(z / softcap)


def divergence_of(log_s: Tensor, log_t: Tensor, divergence: str, beta: float = 0.5) -> Tensor:
    """The divergence of rows of logarithms. They need not be distributions; the teacher's may be -inf."""
    s, t = log_s.exp(), log_t.exp()
    log_t, has_t = log_t.masked_fill(t == 0, 0), t != 0
    if divergence == "total_variation":
        return (s - t).abs().sum(-1) / 2
    if divergence == "forward":
        return (t * (log_t - log_s)).where(has_t, 0).sum(-1)
    if divergence == "reverse":
        return (s * (log_s - log_t)).where(s != 0, 0).sum(-1)
    log_m = (beta * t + (1 - beta) * s).log()
    of_teacher, of_student = (t * (log_t - log_m)).where(has_t, 0), s * (log_s - log_m)
    return beta * of_teacher.sum(-1) + (1 - beta) * of_student.sum(-1)


def over(z: Tensor, temperature: Any) -> Tensor:
    return z / (temperature.double().unsqueeze(-1) if isinstance(temperature, Tensor) else temperature or 1.0)


def exact_outputs(
    student: list[Tensor],
    log_t: Tensor,
    *,
    scale: Any = None,
    softcap: Any = None,
    temperature: Any = None,
    targets: Tensor | None = None,
    divergence: str = "forward",
    beta: float = 0.5,
    hard_weight: float | None = None,
    row_weight: Tensor | None = None,
    reduction: str = "mean",
) -> dict[str, Tensor]:
    """The results from hidden, head and bias in float64, and the teacher's log-probabilities at the temperature."""
    z = logits_of(*student, scale, softcap)
    log_s = torch.log_softmax(over(z, temperature), -1)
    counts = torch.ones(z.shape[:-1], dtype=torch.bool) if targets is None else targets != IGNORED
    weight = torch.ones(z.shape[:-1], dtype=torch.float64) if row_weight is None else row_weight.double()
    counts = counts & (weight != 0)
    rows = {
        "divergence": divergence_of(log_s, log_t, divergence, beta),
        "entropy": -(log_s.exp() * log_s).sum(-1),
        "lse": torch.logsumexp(over(z, temperature), -1),
    }
    if targets is not None:
        classes = targets.long().where(counts, 0)
        rows["hard_loss"] = -torch.log_softmax(z, -1).gather(-1, classes.unsqueeze(-1)).squeeze(-1)
    rows = {name: each.where(counts, 0) for name, each in rows.items()}
    loss = rows["divergence"] + (0 if hard_weight is None else hard_weight * rows["hard_loss"])
    loss = (loss * weight).where(counts, 0)
    if reduction != "none":
        loss = loss.sum() / (weight.where(counts, 0).sum() if reduction == "mean" else 1)
    return {"loss": loss, **rows}


def given_tensors(device: torch.device) -> tuple[list[Tensor], list[Tensor]]:
    """Hidden states, head and bias of student and of teacher."""
    x, head, y, teacher = heads(torch.float64, device, ROWS, CLASSES, deviation=0.8)
    return (
        [x, head, random_tensor((CLASSES,), torch.float64, device)],
        [y, teacher, random_tensor((CLASSES,), torch.float64, device).flip(0)],
    )


def assert_as_exact(
    found: Any, leaves: list[Tensor], exact: dict[str, Tensor], exact_leaves: list[Tensor], what: str = ""
) -> None:
    """Asserts each output of a result, and the gradient of each that has one."""
    found = found if isinstance(found, tuple) else type("Alone", (), {"_fields": ("loss",), "loss": found})
    for name in found._fields:
        value = getattr(found, name)
        if name == "teacher_lse":
            assert not value.requires_grad
            continue
        assert_close(value, exact[name], f"{what} {name}")
        upstream = uneven(value)
        actual = torch.autograd.grad(value, leaves, upstream, retain_graph=True, allow_unused=True)
        expected = torch.autograd.grad(exact[name], exact_leaves, upstream, retain_graph=True, allow_unused=True)
        for index, (mine, theirs) in enumerate(zip(actual, expected)):
            theirs = torch.zeros_like(leaves[index]) if theirs is None else theirs
            assert_close(mine, theirs, f"{what} gradient {index} of {name}")


def assert_close(found: Tensor, exact: Tensor, what: str) -> None:
    torch.testing.assert_close(found, exact, msg=lambda text: f"{what}: {text}")


def leaves_of(tensors: list[Tensor]) -> list[Tensor]:
    return [each.detach().clone().requires_grad_() for each in tensors]
