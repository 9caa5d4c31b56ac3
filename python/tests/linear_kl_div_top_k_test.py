"""eaves.linear_kl_div with the top K of a teacher, against the formula in float64."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import eaves
from chunked_cases import IGNORED, Watching, heads, temperatures
from cross_entropy_test import REDUCTIONS, each
from eaves._chunked.distributions import RESTS
from eaves._chunked.divergence import DIVERGENCES
from kl_div_cases import (
    CLASSES,
    ROWS,
    assert_as_exact,
    divergence_of,
    exact_outputs,
    given_tensors,
    leaves_of,
    logits_of,
    over,
)
from pairwise import pairwise


def top_k_of(logits: Tensor, places: int) -> tuple[Tensor, Tensor]:
    """Tokens and log-probabilities, with padding of both kinds, and one row of padding alone."""
    log_probs, tokens = logits.log_softmax(-1).topk(places, -1)
    tokens, log_probs = tokens.clone(), log_probs.clone()
    tokens[0, 0, 1] = -100
    log_probs[1, 2, 0], tokens[1, 2, 0] = -math.inf, 0
    log_probs[2, 1] = -math.inf
    return tokens, log_probs


def log_probs_with_rest(
    log_s: Tensor, tokens: Tensor, log_probs: Tensor, rest: str, temperature: Any
) -> tuple[Tensor, Tensor]:
    """Student's and teacher's log-probabilities of the tokens, with 0 probability for padding, followed by the rest."""
    is_listed = (tokens >= 0) & (log_probs != -math.inf)
    tiny = torch.finfo(log_s.dtype).eps
    of_s = log_s.gather(-1, tokens.clamp(min=0)).masked_fill(~is_listed, -math.inf)
    of_t = log_probs.masked_fill(~is_listed, -math.inf)
    left = {"s": 1 - of_s.exp().sum(-1, keepdim=True), "t": 1 - of_t.exp().sum(-1, keepdim=True)}
    rest_s, rest_t = (each.clamp(min=tiny).log() for each in left.values())
    if rest in ("renormalize", "zero"):
        rest_t = torch.full_like(rest_t, -math.inf)
    of_t = over(torch.cat([of_t, rest_t], -1), temperature).log_softmax(-1).nan_to_num(nan=-math.inf, neginf=-math.inf)
    if rest in ("class", "zero"):
        return torch.cat([of_s, rest_s], -1), of_t
    if rest == "renormalize":
        of_s = of_s.exp() / of_s.exp().sum(-1, keepdim=True).where(is_listed.any(-1, keepdim=True), 1)
        of_s = of_s.where(is_listed, 1).log().masked_fill(~is_listed, -math.inf)
    return of_s, of_t[..., :-1]


def divergence_of_tokens(log_s: Tensor, log_t: Tensor, divergence: str) -> Tensor:
    """The divergence over the tokens, without places of padding."""
    is_there = (log_s != -math.inf) | (log_t != -math.inf)
    found = []
    for s, t, there in zip(log_s.flatten(0, 1), log_t.flatten(0, 1), is_there.flatten(0, 1)):
        found.append(divergence_of(s[there], t[there], divergence))
    return torch.stack(found).view(log_s.shape[:2])


@each("rest", RESTS)
@each("divergence", DIVERGENCES)
def test_a_top_k_is_its_formula(divergence: str, rest: str) -> None:
    if (divergence, rest) == ("reverse", "zero"):
        pytest.skip("this divergence is infinite, so the call is refused")
    device = torch.device("cpu")
    student, teacher = given_tensors(device)
    tokens, log_probs = top_k_of(logits_of(*teacher), 6)
    targets = torch.arange(15).view(ROWS)
    targets[2, 4] = IGNORED
    for temperature, softcap, scale, reduction, workspace_bytes in pairwise(
        (None, 2.0, temperatures(ROWS, device)), (None, 1.5), (None, 0.7), REDUCTIONS, (None, 1)
    ):
        if rest in ("class", "ignore"):  # these refuse a temperature
            temperature = None
        leaves, exact_leaves = leaves_of(student), leaves_of(student)
        options: dict[str, Any] = {"temperature": temperature, "softcap": softcap, "scale": scale}
        found = eaves.linear_kl_div(
            leaves[0], leaves[1], bias=leaves[2], teacher_tokens=tokens.int(), teacher_log_probs=log_probs,
            teacher_rest=rest, divergence=divergence, reduction=reduction, workspace_bytes=workspace_bytes,
            targets=targets, hard_weight=0.2, outputs=("divergence", "entropy", "lse", "hard_loss"), **options,
        )  # fmt: skip
        exact = exact_outputs(
            exact_leaves, torch.zeros(*ROWS, CLASSES), reduction=reduction, targets=targets, hard_weight=0.2, **options
        )
        counts = targets != IGNORED
        log_s = torch.log_softmax(over(logits_of(*exact_leaves, scale, softcap), temperature), -1)
        rows = divergence_of_tokens(*log_probs_with_rest(log_s, tokens, log_probs, rest, temperature), divergence)
        exact["divergence"] = rows.where(counts, 0)
        loss = exact["divergence"] + 0.2 * exact["hard_loss"]
        exact["loss"] = loss if reduction == "none" else loss.sum() / (14 if reduction == "mean" else 1)
        assert_as_exact(found, leaves, exact, exact_leaves, f"{options} {reduction}")


@each("rest", RESTS)
@each("dtype", (torch.float32, torch.bfloat16))
def test_a_top_k_of_all_classes_is_the_whole_teacher(dtype: torch.dtype, rest: str, device: torch.device) -> None:
    x, head, y, teacher = heads(dtype, device)
    logits = (y @ teacher.T).float()
    log_probs, tokens = logits.log_softmax(-1).topk(CLASSES, -1)
    leaves = leaves_of([x, head])
    expected = eaves.linear_kl_div(*leaves, teacher_logits=logits)
    found = eaves.linear_kl_div(*leaves, teacher_tokens=tokens, teacher_log_probs=log_probs, teacher_rest=rest)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    for mine, theirs in zip(torch.autograd.grad(found, leaves), torch.autograd.grad(expected, leaves), strict=True):
        of_dtype = {"rtol": 1e-3, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 2**-7, "atol": 1e-4}
        torch.testing.assert_close(mine, theirs, **of_dtype)


@each("rest", ("class", "renormalize", "ignore"))
@each("divergence", DIVERGENCES)
@each("served_at", (1.0, 2.0))
def test_of_a_top_k_of_equal_heads_nothing_is_left(
    served_at: float, divergence: str, rest: str, device: torch.device
) -> None:
    x, head = heads(torch.float32, device, (64,), 1000)[:2]
    log_probs, tokens = (x @ head.T / served_at).log_softmax(-1).topk(8)
    leaves = leaves_of([x, head])
    loss = eaves.linear_kl_div(
        *leaves, teacher_tokens=tokens, teacher_log_probs=log_probs, teacher_rest=rest, divergence=divergence,
        scale=1 / served_at,
    )  # fmt: skip
    torch.testing.assert_close(loss, torch.zeros_like(loss), rtol=0, atol=2e-6)
    # The gradients of total variation are signs of differences; for an undivided sum only "jsd" has gradients of 0.
    if divergence == "jsd" or (divergence != "total_variation" and rest != "ignore"):
        for gradient in torch.autograd.grad(loss, leaves):
            torch.testing.assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=2e-6)


@each("token", (0, CLASSES - 1))
def test_empty_places_around_a_token_change_nothing(token: int, device: torch.device) -> None:
    """An empty place has the first column, until it takes the column of the row's first token."""
    x, head, *_ = heads(torch.float32, device, (2,))
    leaves = leaves_of([x, head])

    def step(tokens: list[int]) -> list[Tensor]:
        given = torch.tensor([tokens, tokens], device=device)
        log_probs = torch.full(given.shape, -0.5, device=device)
        loss = eaves.linear_kl_div(*leaves, teacher_tokens=given, teacher_log_probs=log_probs)
        return [loss, *torch.autograd.grad(loss, leaves)]

    for found, expected in zip(step([-1, token, -1]), step([token]), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


@each("temperature", (0.5, 4.0))
def test_a_renormalized_top_k_is_exact_at_any_temperature(temperature: float, device: torch.device) -> None:
    x, head = heads(torch.float32, device, (64,), 1000)[:2]
    log_probs, tokens = (x @ head.T).log_softmax(-1).topk(8)
    leaves = leaves_of([x, head])
    loss = eaves.linear_kl_div(
        *leaves, teacher_tokens=tokens, teacher_log_probs=log_probs, teacher_rest="renormalize", temperature=temperature
    )
    for each_of_them in (loss, *torch.autograd.grad(loss, leaves)):
        torch.testing.assert_close(each_of_them, torch.zeros_like(each_of_them), rtol=0, atol=2e-6)


def test_tokens_of_rows_that_do_not_count_may_be_any() -> None:
    x, head, *_ = heads(torch.float32, torch.device("cpu"), (2, 2))
    tokens = torch.tensor([[[0, 1, 2], [0, 0, 0]], [[3, 4, 5], [CLASSES, 7, 7]]])
    log_probs = torch.full(tokens.shape, -2.0)
    targets, weight = torch.tensor([[1, IGNORED], [2, 3]]), torch.tensor([[1.0, 2.0], [1.0, 0.0]])
    kept = {"teacher_tokens": tokens[:, 0], "teacher_log_probs": log_probs[:, 0]}
    expected = eaves.linear_kl_div(x[:, 0], head, **kept)
    of_rows: dict[str, Any] = {"teacher_log_probs": log_probs, "targets": targets, "row_weight": weight}
    torch.testing.assert_close(eaves.linear_kl_div(x, head, teacher_tokens=tokens, **of_rows), expected)
    tokens[1, 0, 1] = 3
    with pytest.raises(ValueError, match=r"teacher_tokens\[1, 0\] has the token 3 twice"):
        eaves.linear_kl_div(x, head, teacher_tokens=tokens, **of_rows)


def test_a_token_that_the_student_masks_makes_infinity(device: torch.device) -> None:
    x, head, *_ = heads(torch.float32, device, (2,))
    bias = torch.zeros(CLASSES, device=device)
    bias[4] = -math.inf
    tokens = torch.tensor([[4, 5], [6, 7]], device=device)
    log_probs = torch.full((2, 2), math.log(0.4), device=device)
    found = eaves.linear_kl_div(
        x, head, bias=bias, teacher_tokens=tokens, teacher_log_probs=log_probs, reduction="none"
    )
    assert found[0] == math.inf and found[1].isfinite()


def test_of_a_top_k_no_row_of_the_teacher_is_made(device: torch.device) -> None:
    rows, classes, limit = 1000, 2003, 1 << 20
    x, head, *_ = heads(torch.float32, device, (rows,), classes, 16)
    given = [x.requires_grad_(), head.requires_grad_()]
    tokens = torch.arange(8, device=device).expand(rows, 8)
    log_probs = torch.full((rows, 8), -3.0, device=device)
    with Watching() as watching:
        loss = eaves.linear_kl_div(*given, teacher_tokens=tokens, teacher_log_probs=log_probs, workspace_bytes=limit)
        loss.backward()
    of_class = 4 if device.type == "cuda" else 4 * 3 + 1
    assert watching.products == 3 * math.ceil(rows / (limit // (classes * of_class + 20 * 4 * 8)))
    assert limit / 2 < watching.peak < limit + 2 * 4 * 16 * (rows + classes) + 300 * rows
