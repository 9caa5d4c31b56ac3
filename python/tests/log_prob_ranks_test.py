"""eaves.log_prob and eaves.linear_log_prob with classes that are cut over ranks, for one token a row and for several,
against the same calls without ranks, with gloo on the CPU."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import eaves
from comparison import assert_agree
from cross_entropy_test import each, upstream
from head_ranks import CLASSES, pieces, problem_of
from linear_cross_entropy_test import problem
from pairwise import pairwise
from ranks import Ranks, here


def log_probs(
    group: distributed.ProcessGroup | None, dtype: torch.dtype, named: dict[str, Any], classes: int, is_parallel: bool
) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs and gradients of a head and of its logits, for K tokens of each row or for one."""
    hidden, head, _, bias = problem((24, 16), CLASSES, dtype, here())
    tokens = torch.randint(0, classes, (24, 5), generator=torch.Generator().manual_seed(3))
    tokens[:, 3], tokens[2], tokens[5, 1:] = tokens[:, 0], -100, -100  # one token twice, a row without, a row with one
    named = dict(named)
    tokens = tokens[:, 0] if named.pop("is_one_token", False) else tokens
    tokens, own, rows = tokens.to(here()), slice(None), slice(None)
    if group is not None:
        own = pieces(group.size(), False)[group.rank()]
        if is_parallel:
            rows = slice(group.rank() * 24 // group.size(), (group.rank() + 1) * 24 // group.size())
    names = ("entropy", "is_top1", "sum_sq", "mean_logit")
    outputs, gradients = [], []
    logits = (hidden @ head.T + bias)[:, own].contiguous()
    shard = group if group is None or not is_parallel else eaves.Shard(group, sequence_parallel=True)
    for function, given, of_group in (
        (eaves.linear_log_prob, [hidden[rows], head[own], bias[own]], shard),
        (eaves.log_prob, [logits], group),
    ):
        leaves = [each.clone().requires_grad_() for each in given]
        keywords = {"bias": leaves[2], "workspace_bytes": 20_000} if len(leaves) > 1 else {}
        out = function(*leaves[:2], tokens, **keywords, group=of_group, classes=classes, outputs=names, **named)
        assert out._fields == ("log_prob", *names)
        differentiable = [out.log_prob, out.entropy]
        torch.autograd.backward(differentiable, [upstream(each) for each in differentiable])
        outputs += [each.detach() for each in out]
        gradients += [each.grad for each in leaves]
    return outputs, gradients


def test_log_probabilities_of_tokens(ranks: Ranks) -> None:
    temperature = torch.linspace(0.5, 2, 24)
    for count, dtype, classes, named, is_parallel in pairwise(
        (1, 2, 4),
        (torch.float64, torch.float32),
        (CLASSES, CLASSES - 3),
        ({}, {"softcap": 3.0, "scale": 1.5}, {"temperature": temperature},
         {"temperature": temperature, "softcap": 3.0, "is_one_token": True},
         {"temperature": 0.7, "is_one_token": True}),
        (False, True),
    ):  # fmt: skip
        expected, whole = log_probs(None, dtype, named, classes, False)
        results = ranks.run(log_probs, dtype, named, classes, is_parallel, ranks=count)
        for outputs, _ in results:
            for found, wanted in zip(outputs, expected, strict=True):
                assert_agree(found, wanted)
        for place, wanted in enumerate(whole):
            parts = [gradients[place] for _, gradients in results]
            if place == 0 and not is_parallel:  # of hidden
                assert all(torch.equal(part, parts[0]) for part in parts)
                parts = parts[:1]
            assert_agree(torch.cat(parts, 1 if place == 3 else 0), wanted)


def the_likeliest_class_is_found_before_a_soft_cap_rounds(group: distributed.ProcessGroup) -> None:
    """A soft cap makes these logits equal. The last rank but one has the largest."""
    logits = torch.full((1, CLASSES), 100.0)
    logits[0, pieces(group.size())[-2].start] = 200.0
    own = logits[:, pieces(group.size())[group.rank()]].contiguous()
    tokens, temperature = torch.tensor([pieces(group.size())[-2].start]), torch.ones(1)
    options: dict[str, Any] = {"softcap": 5.0, "temperature": temperature, "outputs": "is_top1"}
    assert eaves.log_prob(logits, tokens, **options).is_top1.all()
    assert eaves.log_prob(own, tokens, group=group, **options).is_top1.all()


def dtensors_say_which_group(group: distributed.ProcessGroup) -> None:
    hidden, head, _, bias = problem((24, 16), CLASSES - 1, torch.float64, here())
    tokens = torch.arange(72).view(24, 3) * 7 % (CLASSES - 1)
    mesh = DeviceMesh.from_group(group, "cpu")
    whole = [each.clone().requires_grad_() for each in (hidden, head, bias)]
    expected = eaves.linear_log_prob(*whole[:2], tokens, bias=whole[2])
    logits = (hidden @ head.T + bias).requires_grad_()
    of_logits = eaves.log_prob(logits, tokens)
    for of_rows in (Replicate(), Shard(0)):
        placed = ((hidden, of_rows), (head, Shard(0)), (bias, Shard(0)))
        parts = [distribute_tensor(each, mesh, [placement]).requires_grad_() for each, placement in placed]
        found = eaves.linear_log_prob(*parts[:2], tokens, bias=parts[2])
        found.sum().backward()
        assert_agree(found, expected)
        for leaf in whole:
            leaf.grad = None
        eaves.linear_log_prob(*whole[:2], tokens, bias=whole[2]).sum().backward()
        for part, leaf in zip(parts, whole):
            assert_agree(part.grad.full_tensor(), leaf.grad)
    cut = distribute_tensor(logits.detach(), mesh, [Shard(1)]).requires_grad_()
    found = eaves.log_prob(cut, distribute_tensor(tokens, mesh, [Replicate()]))
    torch.autograd.backward([found.sum(), of_logits.sum()])
    assert_agree(found, of_logits)
    assert_agree(cut.grad.full_tensor(), logits.grad)
    with pytest.raises(ValueError, match="head is a DTensor, which knows its group"):
        eaves.linear_log_prob(hidden, parts[1], tokens, group=group)


def rows_may_be_those_of_ranks(group: distributed.ProcessGroup) -> None:
    x, head, target, own = problem_of(group)
    rows = x.chunk(group.size())[group.rank()]
    found = eaves.linear_log_prob(rows, own, target, group=eaves.Shard(group, sequence_parallel=True))
    assert_agree(found, eaves.linear_log_prob(x, head, target))


@each(
    "function",
    (the_likeliest_class_is_found_before_a_soft_cap_rounds, dtensors_say_which_group, rows_may_be_those_of_ranks),
)
def test_on_each_rank(function: Callable[..., None], cpu_ranks: Ranks) -> None:
    cpu_ranks.run(function)
