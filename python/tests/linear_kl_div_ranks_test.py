"""eaves.linear_kl_div with classes cut over ranks, against the same call of the whole heads, with gloo on the
CPU."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import eaves
from chunked_cases import IGNORED, heads, temperatures, uneven
from comparison import assert_agree
from cross_entropy_test import REDUCTIONS, each
from eaves._chunked.distributions import RESTS
from eaves._chunked.divergence import DIVERGENCES
from head_ranks import CLASSES, pieces
from layouts import random_tensor
from pairwise import pairwise
from ranks import Ranks, here

ROWS = 24


def given(dtype: torch.dtype) -> list[Tensor]:
    """Hidden states, head and bias of the student, then of the teacher."""
    x, head, y, teacher = heads(dtype, here(), (ROWS,), CLASSES)
    bias = random_tensor((CLASSES,), dtype, here())
    return [x, head, bias, y, teacher, bias.flip(0)]


def divergences(
    group: distributed.ProcessGroup | None, dtype: torch.dtype, kind: str, classes: int, is_parallel: bool,
    options: dict[str, Any],
) -> tuple[list[Tensor], list[Tensor]]:  # fmt: skip
    """Loss and outputs, and the gradients of the student's tensors."""
    x, head, bias, y, teacher, teacher_bias = given(dtype)
    own, rows = slice(None), slice(None)
    if group is not None:
        own = pieces(group.size(), False)[group.rank()]
        if is_parallel:
            rows = slice(group.rank() * ROWS // group.size(), (group.rank() + 1) * ROWS // group.size())
    logits = y @ teacher.T + teacher_bias
    outputs = ["divergence", "hard_loss", "entropy", "lse"]
    named: dict[str, Any]
    if kind == "head":
        named = {"teacher_hidden": y[rows], "teacher_head": teacher[own], "teacher_bias": teacher_bias[own]}
        outputs.append("teacher_lse")
    elif kind == "top_k":
        log_probs, tokens = logits[:, :classes].log_softmax(-1).topk(7, -1)
        tokens[3, 2:] = -1
        named = {"teacher_log_probs": log_probs, "teacher_tokens": tokens}
    else:
        named = {f"teacher_{kind}": (logits if kind == "logits" else logits.softmax(-1))[:, own]}
    targets = torch.arange(ROWS, device=here()) % classes
    targets[5] = IGNORED
    leaves = [each.clone().requires_grad_() for each in (x[rows], head[own], bias[own])]
    shard = group if group is None or not is_parallel else eaves.Shard(group, sequence_parallel=True)
    found = eaves.linear_kl_div(
        *leaves[:2], bias=leaves[2], targets=targets, hard_weight=0.3, outputs=outputs, group=shard, classes=classes,
        workspace_bytes=20_000, **named, **options,
    )  # fmt: skip
    totals = [each for each in found if each.requires_grad]
    torch.autograd.backward(totals, [uneven(each) for each in totals], retain_graph=True)
    gradients = [each.grad.clone() for each in leaves]  # type: ignore[union-attr]
    gradients += torch.autograd.grad(found.loss, leaves, uneven(found.loss))  # the forward computed these
    return [each.detach() for each in found], gradients


def test_divergences_of_pieces(ranks: Ranks) -> None:
    per_row = temperatures((ROWS,), torch.device("cpu"))
    for count, dtype, classes, is_parallel, kind_and_rest, divergence, temperature, softcap, reduction in pairwise(
        (1, 2, 4), (torch.float64, torch.float32), (CLASSES, CLASSES - 3), (False, True),
        (("head", "class"), ("logits", "class"), ("probs", "class"), *[("top_k", rest) for rest in RESTS]),
        tuple(DIVERGENCES), (None, 2.0, per_row), (None, 3.0), REDUCTIONS,
    ):  # fmt: skip
        kind, rest = kind_and_rest
        if (rest, divergence) == ("zero", "reverse"):
            divergence = "forward"
        if kind == "top_k" and rest in ("class", "ignore"):  # these refuse a temperature
            temperature = None
        options: dict[str, Any] = {
            "divergence": divergence, "temperature": temperature, "softcap": softcap, "teacher_rest": rest,
            "reduction": reduction,
        }  # fmt: skip
        expected, whole = divergences(None, dtype, kind, classes, False, options)
        results = ranks.run(divergences, dtype, kind, classes, is_parallel, options, ranks=count)
        for outputs, _ in results:
            for found, wanted in zip(outputs, expected, strict=True):
                torch.testing.assert_close(found, wanted)
        for place, wanted in enumerate(whole):
            parts = [gradients[place] for _, gradients in results]
            if place % 3 == 0 and not is_parallel:  # the gradient of hidden
                assert all(torch.equal(part, parts[0]) for part in parts)
                parts = parts[:1]
            torch.testing.assert_close(torch.cat(parts), wanted, rtol=1e-4, atol=1e-5)


def dtensors_say_which_group(group: distributed.ProcessGroup) -> None:
    x, head, bias, y, teacher, teacher_bias = given(torch.float64)
    mesh = DeviceMesh.from_group(group, "cpu")
    whole = [each.clone().requires_grad_() for each in (x, head, bias)]
    expected = eaves.linear_kl_div(*whole[:2], y, teacher, bias=whole[2], teacher_bias=teacher_bias)
    gradients = torch.autograd.grad(expected, whole)
    logits = y @ teacher.T + teacher_bias
    for of_rows in (Replicate(), Shard(0)):
        placed = ((x, of_rows), (head, Shard(0)), (bias, Shard(0)))
        of_teacher = ((y, of_rows), (teacher, Shard(0)), (teacher_bias, Shard(0)), (logits, Shard(1)))
        parts = [distribute_tensor(each, mesh, [placement]).requires_grad_() for each, placement in placed]
        y_part, teacher_part, bias_part, logits_part = (
            distribute_tensor(each, mesh, [placement]) for each, placement in of_teacher
        )
        for named in (
            {"teacher_hidden": y_part, "teacher_head": teacher_part, "teacher_bias": bias_part},
            {"teacher_logits": logits_part},
        ):
            found = eaves.linear_kl_div(*parts[:2], bias=parts[2], **named)
            assert_agree(found, expected)
            for part, wanted in zip(torch.autograd.grad(found, parts), gradients, strict=True):
                assert_agree(part.full_tensor(), wanted)
    with pytest.raises(ValueError, match="head is a DTensor, which knows its group"):
        eaves.linear_kl_div(x, parts[1], y, teacher, group=group)


def a_part_of_the_gradient_may_be_left_unsummed(group: distributed.ProcessGroup) -> None:
    x, head, _, y, teacher, _ = given(torch.float64)
    own = pieces(group.size())[group.rank()]
    x.requires_grad_()
    expected = torch.autograd.grad(eaves.linear_kl_div(x, head, y, teacher), x)[0]
    shard = eaves.Shard(group, reduce_input_grad=False)
    part = torch.autograd.grad(eaves.linear_kl_div(x, head[own], y, teacher[own], group=shard), x)[0]
    distributed.all_reduce(part, group=group)
    assert_agree(part, expected)


@each("function", (dtensors_say_which_group, a_part_of_the_gradient_may_be_left_unsummed))
def test_on_each_rank(function: Callable[..., None], cpu_ranks: Ranks) -> None:
    cpu_ranks.run(function)


def with_a_difference(group: distributed.ProcessGroup, name: str, values: list[Any]) -> Tensor:
    x, head, _, y, teacher, _ = given(torch.float32)
    own = pieces(group.size())[group.rank()]
    options = {name: values[min(group.rank(), len(values) - 1)]}
    named = {} if name == "teacher_head" else {"teacher_head": teacher[own]}
    return eaves.linear_kl_div(x, head[own], y, group=group, **named, **options)


@each("case", (
    ("temperature", [1.0, 2.0], "ValueError", "temperature"),
    ("divergence", ["jsd", "forward"], "ValueError", "divergence, beta and teacher_rest"),
    ("targets", [torch.zeros(ROWS).long(), torch.ones(ROWS).long()], "ValueError", "targets"),
    ("divergence", ["jsd", "kl"], "ValueError", "divergence is 'kl'"),
    ("teacher_head", [torch.zeros(12, 31), torch.zeros(10, 31)], "ValueError", r"teacher_head has shape [12, 31]"),
))  # fmt: skip
def test_a_difference_is_an_error_on_all_ranks(case: tuple[str, list[Any], str, str], cpu_ranks: Ranks) -> None:
    name, values, kind, sentence = case
    for found, message in cpu_ranks.refusals(with_a_difference, name, values):
        assert found == kind and message.startswith("linear_kl_div: ") and sentence in message, message
