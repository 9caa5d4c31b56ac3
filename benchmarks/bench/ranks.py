"""Measures the cost of a head, or of logits, cut over ranks: time, memory and efficiency against one rank with the
whole, and the time of each collective of a call. Starts the ranks itself, each with a GPU, or as processes on the CPU
with gloo.

    python benchmarks ranks --ranks 2 --json ranks.json

Times are the slowest rank's, after a barrier. The efficiency of N ranks is the time of one rank on the whole, while the
others wait, divided by N times the time of the N ranks. The plan for more ranks is arithmetic: a rank's share of the
whole's time, plus the collectives of a call at the bandwidth measured here, as if nothing hid them.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple

import torch
import torch.multiprocessing as multiprocessing
from torch import Tensor, distributed

import eaves
from eaves._bench import peak_of_call
from eaves._command_line import say

from . import results
from .benchmark import DTYPES, InvalidArgument, reason
from .calls import Call
from .device import find_device, synchronize
from .head import Shape, head_tensors, parse_shape
from .timing import Timer

_STATISTIC_BYTES = 44  # for a row and a rank: ten numbers and the target
_PLAN = (2, 4, 8)


class Case(NamedTuple):
    """Rows [batch, features], a head [classes, features]; the same on all ranks."""

    operator: str
    batch: int
    features: int
    classes: int
    dtype: torch.dtype
    data: str

    def tensors(self, device: torch.device) -> tuple[Tensor, ...]:
        """Hidden states, head and target; cross_entropy has logits in place of the first two."""
        sizes = self.batch, self.features, self.classes
        hidden, head, target = head_tensors(*sizes, self.dtype, device, 1, self.data == "dense")
        return (hidden, head, target) if self.operator == "linear_cross_entropy" else (hidden @ head.t(), target)


Forward = Callable[..., Tensor]
"""Takes the tensors of a rank and the group, which is None on one rank alone."""


def _eaves_head(algorithm: str) -> Forward:
    function = eaves.linear_cross_entropy
    return lambda hidden, head, target, group: function(hidden, head, target, algorithm=algorithm, group=group)


def _eaves_logits(inplace: bool) -> Forward:
    function = eaves.cross_entropy
    return lambda logits, target, group: function(logits * 1, target, inplace_backward=inplace, group=group)


def _loss_parallel_of_head(hidden: Tensor, head: Tensor, target: Tensor, group: Any) -> Tensor:
    """The head as torchtitan calls it: the product's DTensor, and torch's cross_entropy under loss_parallel."""
    whole: Tensor = _SummedGradient.apply(hidden, group)  # type: ignore[no-untyped-call]
    return _loss_parallel_of_logits(whole @ head.t(), target, group)


class _SummedGradient(torch.autograd.Function):
    """A tensor that each rank has whole, although each rank computes a part of its gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.contiguous()
        if ctx.group is not None:
            distributed.all_reduce(grad, group=ctx.group)
        return grad, None


def _loss_parallel_of_logits(logits: Tensor, target: Tensor, group: Any) -> Tensor:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.parallel import loss_parallel

    if group is None:
        return torch.nn.functional.cross_entropy(logits.float(), target)
    mesh = DeviceMesh.from_group(group, logits.device.type)
    whole = DTensor.from_local(logits.float(), mesh, [Shard(1)], run_check=False)
    with loss_parallel():
        loss: Any = torch.nn.functional.cross_entropy(whole, DTensor.from_local(target, mesh, [Replicate()]))
        loss.backward()  # has to be called in the context
    local: Tensor = loss.to_local().detach()
    return local


def _liger(hidden: Tensor, head: Tensor, target: Tensor, group: Any) -> Tensor:
    module: Any = import_module("liger_kernel.ops.fused_linear_scaled_cross_entropy")
    if group is None:
        raise NotImplementedError("a group of several ranks alone")
    losses: Tensor = module.LigerFusedLinearScaledCrossEntropyTPFunction.apply(hidden, head, target, group)
    return losses.mean()


PROVIDERS: Mapping[str, Mapping[str, Forward]] = {
    "linear_cross_entropy": {
        "eaves": _eaves_head("auto"),
        "eaves-memory": _eaves_head("memory"),
        "eaves-recompute": _eaves_head("recompute"),
        "torch-loss-parallel": _loss_parallel_of_head,
        "liger-scaled": _liger,
    },
    "cross_entropy": {
        "eaves": _eaves_logits(False),
        "eaves-inplace": _eaves_logits(True),
        "torch-loss-parallel": _loss_parallel_of_logits,
    },
}


# ----------------------------------------------------------------------------------------------------------- measuring


def _own(case: Case, tensors: tuple[Tensor, ...], rank: int, ranks: int) -> list[Tensor]:
    """This rank's classes."""
    size = case.classes // ranks
    own = slice(rank * size, (rank + 1) * size)
    if case.operator == "cross_entropy":
        return [tensors[0][:, own].contiguous(), tensors[1]]
    return [tensors[0], tensors[1][own].clone(), tensors[2]]


def _measured(forward: Forward, tensors: Sequence[Tensor], group: Any, repetitions: int) -> tuple[list[float], int]:
    """The milliseconds of each repetition, of the slowest rank or without a group of this rank, and the peak in
    bytes."""
    leaves, device = [each.detach().requires_grad_(each.is_floating_point()) for each in tensors], tensors[0].device

    def run() -> None:
        for leaf in leaves:
            leaf.grad = None
        loss = forward(*leaves, group)
        if loss.requires_grad:
            loss.backward()  # type: ignore[no-untyped-call]

    return _times(run, device, group, repetitions), peak_of_call(run, device)


def _times(run: Callable[[], object], device: torch.device, group: Any, repetitions: int) -> list[float]:
    def wait() -> None:
        synchronize(device)
        if group is not None:
            distributed.barrier(group)

    contestant = Timer(device, wait).time({"": [Call(run, prepare=wait)]}, repetitions)[""]
    if contestant.skipped:
        raise RuntimeError(contestant.skipped)
    slowest = torch.tensor(contestant.times_ms, device=device)
    if group is not None:
        distributed.all_reduce(slowest, distributed.ReduceOp.MAX, group)
    found: list[float] = slowest.tolist()
    return found


def _rows_of(case: Case, device: torch.device, repetitions: int) -> Iterator[dict[str, Any]]:
    group: Any = distributed.group.WORLD
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    whole = case.tensors(device)
    for name, forward in PROVIDERS[case.operator].items():
        row: dict[str, Any] = {**case._asdict(), "dtype": str(case.dtype).removeprefix("torch."), "provider": name}
        row["ranks"] = ranks
        try:
            times, peak_bytes = _measured(forward, _own(case, whole, rank, ranks), group, repetitions)
            row |= {"ms": statistics.median(times), "ms_min": min(times), "ms_max": max(times)}
            row["peak_bytes"] = peak_bytes
        except Exception as error:  # an error of another package, on all ranks alike
            row["skipped"] = reason(error)
            yield row
            continue
        if rank == 0:
            try:
                times, peak_bytes = _measured(forward, [each.clone() for each in whole], None, repetitions)
                row |= {"one_rank_ms": statistics.median(times), "one_rank_peak_bytes": peak_bytes}
                row["efficiency"] = row["one_rank_ms"] / (ranks * row["ms"])
            except Exception as error:  # as above
                row["one_rank_skipped"] = reason(error)
        distributed.barrier(group)
        yield row


def _received(case: Case, ranks: int) -> tuple[int, int]:
    """The bytes that a rank receives: the statistics of the rows, and the gradient of the input."""
    gradient_bytes = case.batch * case.features * case.dtype.itemsize
    return (ranks - 1) * case.batch * _STATISTIC_BYTES, 2 * (ranks - 1) * gradient_bytes // ranks


def _collectives(case: Case, device: torch.device, repetitions: int) -> list[dict[str, Any]]:
    """Measures the collectives of a call alone."""
    group: Any = distributed.group.WORLD
    ranks = distributed.get_world_size()
    statistics_of_rows = torch.zeros(case.batch * _STATISTIC_BYTES, dtype=torch.uint8, device=device)
    gathered = statistics_of_rows.new_empty(ranks * statistics_of_rows.numel())
    gradient = torch.zeros(case.batch, case.features, dtype=case.dtype, device=device)
    gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
    calls: dict[str, Callable[[], object]] = {
        "all_gather of statistics": lambda: gather(gathered, statistics_of_rows, group=group),
        "all_reduce of the gradient of input": lambda: distributed.all_reduce(gradient, group=group),
    }
    found = []
    for (name, run), received in zip(calls.items(), _received(case, ranks)):
        milliseconds = statistics.median(_times(run, device, group, repetitions))
        rate = received / milliseconds / 1e6
        found.append({"collective": name, "ranks": ranks, "bytes": received, "ms": milliseconds, "gb_per_s": rate})
    return found


def plan(case: Case, one_rank_ms: float, collectives: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The times of more ranks than were measured, by arithmetic, for the head of linear_cross_entropy."""
    found = []
    for ranks in _PLAN:
        received, share = _received(case, ranks), one_rank_ms / ranks
        exchange = sum(each / rate["gb_per_s"] / 1e6 for each, rate in zip(received, collectives))
        found.append({"ranks": ranks, "gathered_bytes": received[0], "reduced_bytes": received[1], "share_ms": share})
        found[-1] |= {"collectives_ms": exchange, "efficiency_if_nothing_is_hidden": share / (share + exchange)}
    return found


# ------------------------------------------------------------------------------------------------------------- program


def _on_a_rank(rank: int, arguments: Namespace, rendezvous: str) -> None:
    device = torch.device("cpu")
    if arguments.device == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    distributed.init_process_group(backend, init_method=rendezvous, rank=rank, world_size=arguments.ranks)
    rows: list[dict[str, Any]] = []
    batch, features, classes = arguments.shape
    for operator in PROVIDERS:
        for data in ("spread", "dense"):
            case = Case(operator, batch, features, classes, DTYPES[arguments.dtype], data)
            for row in _rows_of(case, device, arguments.repetitions):
                rows.append(row)
                if rank == 0:
                    say(_line_of(row))
    collectives = _collectives(case, device, arguments.repetitions)
    if rank == 0:
        whole = next(row for row in rows if row["provider"] == "eaves" and row["data"] == "dense")
        head = results.result(rows, device, "ranks", ["liger-kernel"])
        planned = plan(case, whole["one_rank_ms"], collectives) if "one_rank_ms" in whole else []
        found = {**head, "collectives": collectives, "plan": planned}
        _print(found)
        if arguments.json:
            results.write(arguments.json, found)
    distributed.barrier()
    distributed.destroy_process_group()
    sys.stdout.flush()
    # A DeviceMesh keeps gloo's threads alive. If one of them freed a tensor while the interpreter ends, it would abort
    # the process ("terminate called without an active exception"), so the process ends here.
    os._exit(0)


def _line_of(row: dict[str, Any]) -> str:
    words = f"{row['operator']:22}{row['data']:7}{row['provider']:21}"
    if "skipped" in row:
        return f"{words}{row['skipped']}"
    efficiency = f"{row['efficiency']:.3f}" if "efficiency" in row else "-"
    times = f"{row['ms']:9.2f} ms ({row['ms_min']:.2f} to {row['ms_max']:.2f})"
    return f"{words}{times:32}{row['peak_bytes'] / 2**20:9.0f} MiB  efficiency {efficiency}"


def _print(found: dict[str, Any]) -> None:
    for each in found["collectives"]:
        say(f"{each['collective']:36}{each['bytes'] / 1e6:9.1f} MB {each['ms']:8.3f} ms {each['gb_per_s']:7.1f} GB/s")
    for each in found["plan"]:
        say(f"{each['ranks']} ranks: {each['share_ms']:.2f} ms and {each['collectives_ms']:.2f} ms of collectives, "
            f"efficiency {each['efficiency_if_nothing_is_hidden']:.3f} without overlap")  # fmt: skip


def main(parser: ArgumentParser, argv: Sequence[str]) -> None:
    parser.add_argument("--ranks", type=int, default=2, help="number of processes (2); on GPUs each has its own")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if PyTorch finds a GPU, else cpu")
    parser.add_argument("--shape", type=parse_shape,
        help="rows x features x classes; default: 8192x4096x131072 on GPUs, 512x1024x8192 on the CPU")  # fmt: skip
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bf16", help="type of the inputs (bf16)")
    parser.add_argument("--repetitions", type=int, default=10, help="number of repetitions (10)")
    parser.add_argument("--json", metavar="FILE", help="also write the results to this file")
    arguments = parser.parse_args(argv)
    arguments.device = find_device(arguments.device).type
    if arguments.shape is None:
        arguments.shape = Shape(8192, 4096, 131072) if arguments.device == "cuda" else Shape(512, 1024, 8192)
    if arguments.ranks < 2:
        raise InvalidArgument(f"--ranks: is {arguments.ranks}, expected 2 or more")
    if (classes := arguments.shape.classes) % arguments.ranks:
        raise InvalidArgument(f"--shape: has {classes} classes, expected a multiple of {arguments.ranks} ranks")
    if arguments.json is not None:
        arguments.json = results.check_file("--json", arguments.json)
    with tempfile.TemporaryDirectory() as folder:
        spawn: Any = getattr(multiprocessing, "spawn")  # noqa: B009  # which torch does not declare
        spawn(_on_a_rank, (arguments, f"file://{folder}/rendezvous"), nprocs=arguments.ranks)
