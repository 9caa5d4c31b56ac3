"""The options of eaves.linear_kl_div, against the formula in float64 and its autograd: the teacher in each of its
forms, scale, soft cap and temperatures, weights of rows, the hard loss, outputs, padded vocabularies."""

import math
from typing import Any

import pytest
import torch

import eaves
from chunked_cases import IGNORED, Watching, heads, temperatures, uneven
from comparison import assert_agree
from cross_entropy_test import REDUCTIONS, each
from eaves._chunked.divergence import DIVERGENCES
from kl_div_cases import (
    CLASSES,
    EVERYTHING,
    ROWS,
    assert_as_exact,
    exact_outputs,
    given_tensors,
    leaves_of,
    logits_of,
    over,
)
from pairwise import pairwise

# ----------------------------------------------------------------------------------------------- scale, soft cap, rows


@each("divergence", DIVERGENCES)
def test_all_options_of_both_heads(divergence: str) -> None:
    device = torch.device("cpu")
    student, teacher = given_tensors(device)
    targets = torch.arange(15).view(ROWS)
    targets[1, 2] = targets[0, 4] = IGNORED
    weight = torch.linspace(-1, 2, 15, dtype=torch.float64).view(ROWS)
    weight[2, 3] = 0
    per_row = temperatures(ROWS, device)
    for softcap, scale, temperature, row_weight, hard_weight, reduction, workspace_bytes in pairwise(
        (None, 1.5), (None, 0.7), (None, 2.0, per_row), (None, weight, weight > 0.3), (None, 0.0, 0.4), REDUCTIONS,
        (None, 1),
    ):  # fmt: skip
        options: dict[str, Any] = {
            "softcap": softcap, "scale": scale, "temperature": temperature, "row_weight": row_weight,
            "hard_weight": hard_weight, "reduction": reduction, "targets": targets, "divergence": divergence,
            "beta": 0.3,
        }  # fmt: skip
        of_teacher = {"scale": 1.3, "softcap": None if softcap is None else 2.5}
        log_t = torch.log_softmax(over(logits_of(*teacher, **of_teacher), temperature), -1)
        leaves, exact_leaves = leaves_of(student), leaves_of(student)
        found = eaves.linear_kl_div(
            leaves[0], leaves[1], *teacher[:2], bias=leaves[2], teacher_bias=teacher[2], outputs=EVERYTHING,
            workspace_bytes=workspace_bytes, **{f"teacher_{name}": value for name, value in of_teacher.items()},
            **options,
        )  # fmt: skip
        what = f"{options} {workspace_bytes}"
        assert_as_exact(found, leaves, exact_outputs(exact_leaves, log_t, **options), exact_leaves, what)
        counts = (targets != IGNORED) & (torch.ones(ROWS) if row_weight is None else row_weight).bool()
        expected = torch.logsumexp(over(logits_of(*teacher, **of_teacher), temperature), -1).where(counts, 0)
        torch.testing.assert_close(found.teacher_lse, expected)


@each("reduction", REDUCTIONS)
def test_several_outputs_have_a_gradient_at_once(reduction: str) -> None:
    student, teacher = given_tensors(torch.device("cpu"))
    targets = torch.arange(15).view(ROWS)
    log_t = torch.log_softmax(logits_of(*teacher), -1)
    leaves, exact_leaves = leaves_of(student), leaves_of(student)
    options: dict[str, Any] = {"targets": targets, "hard_weight": 0.5, "reduction": reduction}
    found = eaves.linear_kl_div(
        leaves[0], leaves[1], *teacher[:2], bias=leaves[2], teacher_bias=teacher[2], outputs=EVERYTHING, **options
    )
    exact = exact_outputs(exact_leaves, log_t, **options)
    totals = [
        sum(factor * each.sum() for factor, each in enumerate((of[name] for name in ("loss", *EVERYTHING[:4])), 1))
        for of in (found._asdict(), exact)
    ]
    actual, expected = (torch.autograd.grad(total, of) for total, of in zip(totals, (leaves, exact_leaves)))
    for mine, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(mine, theirs)


@each("reduction", REDUCTIONS)
def test_the_hard_loss_is_cross_entropy(reduction: str, device: torch.device) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        x, head, y, teacher = heads(dtype, device)
        targets = torch.arange(15, device=device).view(ROWS)
        targets[1, 2] = IGNORED
        given = [x.requires_grad_(), head.requires_grad_()]
        options: dict[str, Any] = {"softcap": 2.0, "scale": 1.5, "reduction": reduction}
        found = eaves.linear_kl_div(
            *given, y, teacher, targets=targets, hard_weight=1.0, temperature=3.0,
            outputs=("divergence", "hard_loss"), **options,
        )  # fmt: skip
        alone = eaves.linear_kl_div(*given, y, teacher, targets=targets, temperature=3.0, **options)
        hard = eaves.linear_cross_entropy(*given, targets, **options)
        torch.testing.assert_close(found.loss, alone + hard)
        rows = eaves.linear_cross_entropy(*given, targets, **{**options, "reduction": "none"})
        torch.testing.assert_close(found.hard_loss, rows)
        upstream = uneven(found.loss)
        actual = torch.autograd.grad(found.loss, given, upstream)
        expected = torch.autograd.grad(alone + hard, given, upstream)
        for mine, theirs in zip(actual, expected, strict=True):
            of_dtype = {} if dtype == torch.float32 else {"rtol": 2**-7, "atol": 2**-7 * theirs.abs().max().item()}
            torch.testing.assert_close(mine, theirs, **of_dtype)


def test_the_hard_loss_costs_no_product(device: torch.device) -> None:
    x, head, *teacher = heads(torch.float32, device)
    with Watching() as watching:
        given = [x.requires_grad_(), head.requires_grad_()]
        targets = torch.zeros(ROWS, dtype=torch.int64, device=device)
        eaves.linear_kl_div(*given, *teacher, targets=targets, hard_weight=0.5, outputs="entropy").loss.backward()
    assert watching.products == 4


@each("reduction", REDUCTIONS)
@each("skip_ignored", (False, True))
def test_rows_that_do_not_count_may_hold_anything(skip_ignored: bool, reduction: str, device: torch.device) -> None:
    x, head, y, teacher = heads(torch.float32, device, (6,))
    targets = torch.tensor([1, IGNORED, 2, 3, IGNORED, 0], device=device)
    weight = torch.tensor([1.0, math.nan, 0.0, 2.0, math.inf, 0.5], device=device)
    temperature = torch.tensor([1.0, 0.0, -1.0, 2.0, math.nan, 0.5], device=device)
    kept = torch.tensor([0, 3, 5], device=device)
    options: dict[str, Any] = {"reduction": reduction, "hard_weight": 0.3, "outputs": EVERYTHING}
    of_rows = {"targets": targets, "row_weight": weight, "temperature": temperature}
    leaves = leaves_of([x, head])
    expected = eaves.linear_kl_div(
        leaves[0][kept], leaves[1], y[kept], teacher, **{name: each[kept] for name, each in of_rows.items()}, **options
    )
    x[1], y[4], x[2] = math.nan, math.inf, math.inf
    given = leaves_of([x, head])
    found = eaves.linear_kl_div(*given, y, teacher, skip_ignored=skip_ignored, **of_rows, **options)
    assert_agree(found.loss[kept] if reduction == "none" else found.loss, expected.loss)
    for name in EVERYTHING:
        of_name = getattr(found, name)
        assert_agree(of_name[kept], getattr(expected, name))
        of_name = of_name.detach().clone()
        of_name[kept] = 0
        assert not of_name.any(), name
    expected_grads = torch.autograd.grad(expected.loss.sum(), leaves)
    grads = torch.autograd.grad(found.loss.sum(), given)
    for mine, theirs in zip(grads, expected_grads, strict=True):
        assert_agree(mine, theirs)


# --------------------------------------------------------------------------------------------- teachers without a head


@each("divergence", DIVERGENCES)
@each("kind", ("logits", "log_probs", "probs"))
def test_a_teacher_may_be_given(kind: str, divergence: str, device: torch.device) -> None:
    x, head, y, teacher_head = heads(torch.float32, device)
    logits = y @ teacher_head.T
    named = {"logits": logits, "log_probs": logits.log_softmax(-1), "probs": logits.softmax(-1)}
    for teacher_dtype, temperature, reduction in pairwise(
        (torch.float32, torch.float64), (None, 3.0, temperatures(ROWS, device)), REDUCTIONS
    ):
        options: dict[str, Any] = {"temperature": temperature, "reduction": reduction, "divergence": divergence}
        leaves = leaves_of([x, head])
        expected = eaves.linear_kl_div(*leaves, y, teacher_head, **options)
        padded = torch.cat([named[kind], torch.zeros_like(named[kind])], -1).to(teacher_dtype)
        # The values as they are, with rows further apart, and without the last row of each batch.
        for values in (named[kind].to(teacher_dtype), padded[..., :CLASSES]):
            found = eaves.linear_kl_div(*leaves, **{f"teacher_{kind}": values}, **options)
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
            upstream = uneven(found)
            actual = torch.autograd.grad(found, leaves, upstream)
            for mine, theirs in zip(actual, torch.autograd.grad(expected, leaves, upstream, retain_graph=True)):
                torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


def test_given_logits_of_any_strides_are_read_by_chunks(device: torch.device) -> None:
    batch, length = 4, 50
    x, head, *_ = heads(torch.bfloat16, device, (batch, length), 3000, 8)
    logits = torch.randn(batch, length + 1, 3000, device=device).bfloat16()
    expected = eaves.linear_kl_div(x, head, teacher_logits=logits[:, :-1].contiguous())
    with Watching() as watching:
        found = eaves.linear_kl_div(x, head, teacher_logits=logits[:, :-1], workspace_bytes=1 << 20)
    assert watching.peak < 1.1 * (1 << 20), "the logits are copied"
    torch.testing.assert_close(found, expected)
    assert_agree(eaves.linear_kl_div(x, head, teacher_logits=logits[:, :-1].mT.contiguous().mT), expected)


def test_a_given_teacher_may_mask_classes(device: torch.device) -> None:
    x, head, y, teacher = heads(torch.float64, device)
    logits = y @ teacher.T
    logits[..., [3, 17]] = -math.inf
    bias = torch.zeros(CLASSES, dtype=torch.float64, device=device)
    bias[[3, 17]] = -math.inf
    expected = eaves.linear_kl_div(x, head, y, teacher, teacher_bias=bias)
    torch.testing.assert_close(eaves.linear_kl_div(x, head, teacher_logits=logits), expected)
    torch.testing.assert_close(eaves.linear_kl_div(x, head, teacher_probs=logits.softmax(-1)), expected)


# --------------------------------------------------------------------------------------------------- divergence, beta


@each("dtype", (torch.bfloat16, torch.float32, torch.float64))
@each("divergence", DIVERGENCES)
def test_of_equal_distributions_nothing_is_left(divergence: str, dtype: torch.dtype, device: torch.device) -> None:
    x, head = heads(dtype, device, (64,), 1000)[:2]
    for options in ({}, {"temperature": 0.1}, {"temperature": 10.0, "softcap": 3.0, "teacher_softcap": 3.0}):
        leaves = leaves_of([x, head])
        loss = eaves.linear_kl_div(*leaves, x, head, divergence=divergence, beta=0.3, **options)
        assert loss == 0 and not any(each.any() for each in torch.autograd.grad(loss, leaves)), options


@each("beta_and_name", ((0, "forward"), (1, "reverse"), (0.0, "forward"), (1.0, "reverse")))
def test_the_ends_of_beta_are_the_two_kls(beta_and_name: tuple[float, str], device: torch.device) -> None:
    beta, name = beta_and_name
    tensors = heads(torch.float32, device)
    assert torch.equal(
        eaves.linear_kl_div(*tensors, divergence="jsd", beta=beta), eaves.linear_kl_div(*tensors, divergence=name)
    )


# ------------------------------------------------------------------------------------------- padding, grad_weight_out


@each("divergence", ("forward", "jsd"))
def test_the_larger_vocabulary_may_be_padded(divergence: str, device: torch.device) -> None:
    x, head, y, teacher = heads(torch.float32, device)
    padding = torch.full((4, 1), math.nan, device=device)
    leaves = leaves_of([x, head])
    expected = eaves.linear_kl_div(*leaves, y, teacher, divergence=divergence)
    grads = torch.autograd.grad(expected, leaves)
    longer = torch.cat([teacher, padding.expand(4, teacher.shape[1])])
    found = eaves.linear_kl_div(*leaves, y, longer, divergence=divergence, classes=CLASSES)
    assert torch.equal(found, expected)
    of_student = leaves_of([x, torch.cat([head, padding.expand(4, head.shape[1])])])
    found = eaves.linear_kl_div(*of_student, y, teacher, divergence=divergence, classes=CLASSES)
    assert torch.equal(found, expected)
    grad_hidden, grad_head = torch.autograd.grad(found, of_student)
    assert torch.equal(grad_hidden, grads[0]) and torch.equal(grad_head[:CLASSES], grads[1])
    assert not grad_head[CLASSES:].any()
    logits = torch.cat([y @ teacher.T, padding.T.expand(*ROWS, 4)], -1)
    found = eaves.linear_kl_div(*leaves, teacher_logits=logits, divergence=divergence, classes=CLASSES)
    torch.testing.assert_close(found, expected)
    with pytest.raises(ValueError, match=r"teacher_head has shape \[37, 31\], expected \[33, 31\].* pass classes="):
        eaves.linear_kl_div(*leaves, y, longer)


@each("reduction", REDUCTIONS)
@each("dtype", (torch.float32, torch.bfloat16))
def test_grad_weight_out_takes_the_gradient_of_the_head(
    dtype: torch.dtype, reduction: str, device: torch.device
) -> None:
    x, head, *teacher = heads(dtype, device)
    leaves = leaves_of([x, head])
    expected = eaves.linear_kl_div(*leaves, *teacher, reduction=reduction)
    upstream = uneven(expected)
    grad_hidden, grad_head = torch.autograd.grad(expected, leaves, upstream)
    for out_dtype in {torch.float32, dtype}:
        out = torch.ones(CLASSES, 24, dtype=out_dtype, device=device)
        given = leaves_of([x, head])
        found = eaves.linear_kl_div(*given, *teacher, reduction=reduction, grad_weight_out=out)
        for times in (1, 2):  # the second backward computes again
            given[0].grad = None
            found.backward(upstream, retain_graph=True)
            assert given[1].grad is None
            torch.testing.assert_close(given[0].grad, grad_hidden)
            # Sums of 16 bits with 1, or with the result of two backwards.
            of_dtype = {} if dtype == torch.float32 else {"rtol": 2**-7, "atol": 2**-6}
            torch.testing.assert_close((out - 1).float(), times * grad_head.float(), **of_dtype)
        with pytest.raises(NotImplementedError, match="with grad_weight_out the gradient has no derivative"):
            found.backward(upstream, create_graph=True)


def test_outputs_without_a_gradient_cost_no_second_forward(device: torch.device) -> None:
    x, head, *teacher = heads(torch.float32, device)
    given = [x.requires_grad_(), head.requires_grad_()]
    with Watching() as watching:
        found = eaves.linear_kl_div(*given, *teacher, outputs=("entropy", "lse", "divergence"))
        found.loss.backward()
    assert watching.products == 4
    with Watching() as watching:
        found = eaves.linear_kl_div(*given, *teacher, outputs="entropy")
        (found.loss - 0.1 * found.entropy.mean()).backward()
    assert watching.products == 8


def test_outputs_of_rows_that_do_not_count_are_tensors_of_their_own(device: torch.device) -> None:
    x, head, y, teacher = heads(torch.float32, device, (3,), 5, 4, 2)
    targets = torch.full((3,), IGNORED, device=device)
    found = eaves.linear_kl_div(
        x.requires_grad_(), head, y, teacher, targets=targets, hard_weight=1.0, skip_ignored=True,
        outputs=("divergence", "hard_loss", "entropy", "lse", "teacher_lse"),
    )  # fmt: skip
    assert len({each.data_ptr() for each in found}) == len(found)
    assert found.divergence.requires_grad and not found.teacher_lse.requires_grad
    (found.loss + found.divergence.sum() + found.entropy.sum()).backward()
    assert torch.equal(x.grad, torch.zeros_like(x))
