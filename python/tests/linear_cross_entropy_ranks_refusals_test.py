"""A head that is cut over ranks. All ranks raise an error if an argument is wrong on one rank or differs between ranks,
and a group refuses calls that it does not support."""

import datetime
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import eaves
from comparison import assert_agree
from cross_entropy_test import each
from eaves._parallel import linear_cross_entropy as _linear_cross_entropy_ranks
from eaves._parallel.shard import Place
from eaves._parallel.statistics import refuse_argmax
from eaves._torch.outputs import ARGMAX
from head_ranks import CLASSES, over, problem_of
from linear_cross_entropy_test import problem
from ranks import Ranks, here


def call_of(group: distributed.ProcessGroup, through: distributed.ProcessGroup | None = None, **named: Any) -> Tensor:
    x, _, target, own = problem_of(group)
    right = {"input": x, "linear_weight": own, "target": target}
    return eaves.linear_cross_entropy(**{**right, **over(through or group, named)})


def wrong_on_a_rank(group: distributed.ProcessGroup, rank: int, changes: dict[str, Any]) -> None:
    is_wrong = rank in (group.rank(), -1)
    of_rank = {name: value[not is_wrong] for name, value in changes.items() if isinstance(value, list)}
    call_of(group, **({**changes, **of_rank} if is_wrong else of_rank))


MASKS = torch.tensor([[1.0, 0, 0, 1], [0, 1, 1, 0]]).repeat(1, 6)

# A rank (-1: all ranks), its changed arguments, the type of the error that all ranks raise, and a part of the message
# of all.
WRONG: list[tuple[int, dict[str, Any], str, str]] = [
    (1, {"input": torch.zeros(20, 16).double()}, "ValueError", r"target has shape \[24\], expected \[20\]"),
    (2, {"reduction": "sum"}, "ValueError", "ranks 0 and 2 of the group differ in reduction: mean and sum"),
    (3, {"label_smoothing": 0.1}, "ValueError", "ranks 0 and 3 of the group differ in label_smoothing, scale, softcap"),
    (0, {"ignore_index": "no"}, "TypeError", "ignore_index is 'no', expected an int"),
    (1, {"sequence_parallel": 3}, "TypeError", "sequence_parallel is 3, expected a bool"),
    (1, {"workspace_bytes": 10_000}, "ValueError", "differ in workspace_bytes: 0 and 10000"),
    (1, {"classes": 39}, "ValueError", "differ in classes: -1 and 39"),
    (1, {"input": torch.zeros(24, 16).double().requires_grad_()}, "ValueError", "which tensors require a gradient"),
    (2, {"row_weight": torch.arange(24.0)}, "ValueError", "differ in row_weight"),
    (1, {"row_weight": [torch.arange(24.0).roll(1), torch.arange(24.0)]}, "ValueError", "differ in row_weight"),
    (1, {"row_weight": [MASKS[0], MASKS[1]]}, "ValueError", "differ in row_weight"),
    (1, {"normalizer": [8.0, 7.0]}, "ValueError", "differ in normalizer"),
    (1, {"outputs": "lse"}, "ValueError", "differ in which outputs are computed"),
    (2, {"outputs": "logits"}, "ValueError", "outputs has 'logits', expected names among lse, argmax"),
    (1, {"skip_ignored": True}, "ValueError", "differ in skip_ignored: False and True"),
    (3, {"unknown": 1}, "TypeError", "got an unexpected keyword argument 'unknown'"),
    (0, {"reduction": "\U0001f600" * 300}, "ValueError", "reduction is '"),
    (2, {"linear_bias": torch.zeros(10).double()}, "ValueError", "differ in the dtype of linear_bias"),
    (-1, {"classes": 41}, "ValueError", "the ranks' shards have 40 classes in all, expected 41"),
    (-1, {"first_class": 0}, "ValueError", r"begin with the classes \[0, 0, 0, 0\] and have \[10, 10, 10, 10\]"),
    (-1, {"target": torch.full((24,), 40)}, "ValueError", r"target\[0\] is 40, expected 0 to 39, or ignore_index -100"),
    # FSDP's pieces of a head give this error: each rank has a batch of its own.
    (2, {"target": torch.arange(24).flip(0)}, "ValueError", "a group shares one head, and each rank has all rows"),
    (1, {"target": torch.ones(24, 10).double()}, "ValueError", "the kind of target: classes and probabilities"),
    (1, {"linear_weight": torch.zeros(10, 8).double()}, "ValueError", r"linear_weight has shape \[10, 8\]"),
    (-1, {"sequence_parallel": True, "reduce_input_grad": False}, "ValueError", "reduce_input_grad is False"),
    (
        -1,
        {"reduce_dtype": torch.float64, "reduce_input_grad": False},
        "ValueError",
        "reduce_input_grad=False adds up nothing",
    ),
]


@pytest.mark.parametrize(("rank", "changes", "kind", "message"), WRONG, ids=range(len(WRONG)))
def test_what_is_wrong_on_a_rank_is_an_error_on_all(
    rank: int, changes: dict[str, Any], kind: str, message: str, cpu_ranks: Ranks
) -> None:
    for found, text in cpu_ranks.refusals(wrong_on_a_rank, rank, changes):
        assert found == kind, text
        with pytest.raises(AssertionError, match=message):
            raise AssertionError(text)
    cpu_ranks.run(call_of)  # the group still works


def used_wrongly(group: distributed.ProcessGroup, what: str) -> None:
    """A call that no group supports, or a wrong call on one rank only: for instance an error before the other ranks
    gather."""
    x, _, target, own = problem_of(group)
    is_wrong = group.rank() == 1
    cut = DTensor.from_local(own, DeviceMesh.from_group(group, "cpu"), [Shard(0)])
    rows = DTensor.from_local(x.chunk(group.size())[group.rank()], cut.device_mesh, [Shard(0)])
    if what == "vmap":
        torch.vmap(lambda x: eaves.linear_cross_entropy(x, own, target, group=group))(x[None])
    elif what == "tokens":
        shard = eaves.Shard(group, sequence_parallel=True)
        eaves.linear_log_prob(x[:6], own, target[:6].unsqueeze(1), group=shard)
    elif what == "unknown":
        eaves.linear_log_prob(x, own, target, group=group, **({"unknown": 1} if is_wrong else {}))
    elif what == "operator" and is_wrong:
        eaves.cross_entropy(x @ own.T, target, group=group)
    elif what == "bias":
        bias = torch.zeros(len(own)).double() if is_wrong else None
        eaves.linear_log_prob(x, own, target.unsqueeze(-1), bias=bias, group=group)
    elif what == "temperature":
        eaves.linear_log_prob(rows, cut, target, temperature=-1.0 if is_wrong else 1.0)
    elif what == "input":
        eaves.linear_cross_entropy(rows if is_wrong else x, cut, target)
    else:
        eaves.linear_cross_entropy(x, own, target, group=group)


@pytest.mark.parametrize(
    ("what", "kind", "message"),
    [
        ("vmap", "NotImplementedError", "does not work inside of torch.vmap"),
        ("tokens", "ValueError", "tokens has shape [6, 1], expected [24] or [24, K]"),
        ("unknown", "TypeError", "got an unexpected keyword argument 'unknown'"),
        ("operator", "ValueError", "differ in the operator: linear_cross_entropy and cross_entropy"),
        ("input", "ValueError", "differ in the placements of input"),
        ("temperature", "ValueError", "temperature is -1.0, expected a positive"),
        ("bias", "ValueError", "differ in the dtype of bias: None and float64"),
    ],
)
def test_a_call_that_a_group_does_not_take_is_an_error_on_all(
    what: str, kind: str, message: str, cpu_ranks: Ranks
) -> None:
    for found, text in cpu_ranks.refusals(used_wrongly, what):
        assert message in text and found == kind, text


def test_float32_does_not_count_more_classes_than_an_argmax_may_have() -> None:
    with pytest.raises(NotImplementedError, match="expected at most 16777216 for argmax over ranks"):
        refuse_argmax("linear_cross_entropy", ARGMAX, Place(0, 2**24 + 1, 5, 5), torch.float32)


def an_interrupt_is_not_lost_in_the_extension(group: distributed.ProcessGroup) -> None:
    x, _, target, own = problem_of(group)
    own.requires_grad_()

    def interrupt(*_: Any) -> Any:
        raise KeyboardInterrupt

    original = _linear_cross_entropy_ranks.gather_statistics
    _linear_cross_entropy_ranks.gather_statistics = interrupt
    try:
        with pytest.raises(KeyboardInterrupt):
            eaves.linear_cross_entropy(x, own, target, group=group)
    finally:
        _linear_cross_entropy_ranks.gather_statistics = original


def a_mesh_of_two_axes_needs_the_group_of_one(group: distributed.ProcessGroup) -> None:
    x, head, target, _ = problem_of(group)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    cut = distribute_tensor(head, mesh, [Replicate(), Shard(0)])
    with pytest.raises(NotImplementedError, match=r"Pass linear_weight\.to_local"):
        eaves.linear_cross_entropy(x, cut, target)
    loss = eaves.linear_cross_entropy(x, cut.to_local(), target, group=mesh.get_group("tp"))
    assert_agree(loss, eaves.linear_cross_entropy(x, head, target))


@each("function", (an_interrupt_is_not_lost_in_the_extension, a_mesh_of_two_axes_needs_the_group_of_one))
def test_on_each_rank(function: Callable[..., None], cpu_ranks: Ranks) -> None:
    cpu_ranks.run(function)


def one_does_not_call(group: distributed.ProcessGroup) -> str:
    short = distributed.new_group(list(range(group.size())), timeout=datetime.timedelta(seconds=2))
    if group.rank() == 1:
        distributed.barrier(group)
        return ""
    try:
        call_of(group, through=short)
    except RuntimeError as error:
        distributed.barrier(group)
        return str(error)
    return "it did not fail"


def test_a_rank_that_does_not_call_is_an_error_within_the_time_out(cpu_ranks: Ranks) -> None:
    for rank, message in enumerate(cpu_ranks.run(one_does_not_call)):
        assert rank == 1 or "imed out" in message or "timeout" in message.lower(), message


def test_what_needs_a_group_says_so() -> None:
    x, head, target, _ = problem((4, 16), CLASSES, torch.float32, here())
    for shard in (eaves.Shard(), eaves.Shard(None, 0), eaves.Shard(sequence_parallel=True)):
        with pytest.raises(ValueError, match=r"^linear_cross_entropy: group is a Shard without a group"):
            eaves.linear_cross_entropy(x, head, target, group=shard)
        for tokens in (target, target.unsqueeze(-1)):
            with pytest.raises(ValueError, match=r"^linear_log_prob: group is a Shard without a group"):
                eaves.linear_log_prob(x, head, tokens, group=shard)
    with pytest.raises(TypeError, match=r"group is a str, expected a torch\.distributed\.ProcessGroup"):
        eaves.linear_cross_entropy(x, head, target, group="tp")
    for classes in (0, CLASSES + 1):
        with pytest.raises(ValueError, match=f"classes is {classes}, expected"):
            eaves.linear_cross_entropy(x, head, target, classes=classes)
    head = torch.nn.Parameter(torch.empty(0))
    head.ds_id = 3
    with pytest.raises(NotImplementedError, match="ZeRO-3"):
        eaves.linear_cross_entropy(x, head, target)
