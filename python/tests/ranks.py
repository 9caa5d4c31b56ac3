"""Processes that act as the ranks of a torch.distributed job: on the CPU with gloo, or each on a GPU with NCCL. They
start once, and each test runs functions in all of them."""

from __future__ import annotations

import datetime
import gc
import io
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import distributed, multiprocessing
from torch.distributed import _composable_state
from torch.utils._pytree import tree_map_only

RANKS = 4  # on the CPU
TIMEOUT = 60  # seconds, after which a rank that hangs is an error


_device = torch.device("cpu")


def here() -> torch.device:
    """The device of this rank; in the tests' own process it is the CPU."""
    return _device


class Ranks:
    """`count` processes. run(function, *arguments) calls the function in each of them, with the group of all ranks or
    of the first `ranks`, and returns their results. An exception of one rank is raised here. Tensors in arguments move
    to the device of the rank, tensors in results to the CPU."""

    def __init__(self, count: int = RANKS, device_type: str = "cpu") -> None:
        self._folder = tempfile.TemporaryDirectory()
        rendezvous = f"file://{Path(self._folder.name) / 'rendezvous'}"
        context = multiprocessing.get_context("spawn")
        self._connections, self._processes = [], []
        for rank in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(rank, count, device_type, rendezvous, theirs), daemon=True)
            process.start()
            self._connections.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *arguments: Any, ranks: int | None = None) -> list[Any]:
        results = self.try_all(function, *arguments, ranks=ranks)
        for rank, result in enumerate(results):
            if isinstance(result, Failure):
                raise AssertionError(f"rank {rank}: {result.text}")
        return results

    def try_all(self, function: Callable[..., Any], *arguments: Any, ranks: int | None = None) -> list[Any]:
        """Results, or a Failure of each rank that raised."""
        connections = self._connections[:ranks]
        for connection in connections:
            connection.send_bytes(_packed((function, len(connections), arguments)))
        results = []
        for connection in connections:
            assert connection.poll(2 * TIMEOUT), "a rank does not answer"
            results.append(_unpacked(connection.recv_bytes()))
        return results

    def refusals(self, function: Callable[..., Any], *arguments: Any) -> list[tuple[str, str]]:
        """The type and message of each rank's exception; all ranks have to raise one."""
        results = self.try_all(function, *arguments)
        assert all(isinstance(each, Failure) for each in results), results
        return [(each.kind, each.message) for each in results]

    def close(self) -> None:
        for connection, process in zip(self._connections, self._processes):
            connection.close()
            process.join(10)
            process.kill()
        self._folder.cleanup()


class Failure:
    def __init__(self, error: BaseException) -> None:
        self.kind, self.message = type(error).__name__, str(error)
        self.text = "".join(traceback.format_exception(error))


def _packed(value: object) -> bytes:
    """The value as bytes, because a connection would share the memory of its tensors."""
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def _unpacked(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)


def _work(rank: int, count: int, device_type: str, rendezvous: str, connection: Connection) -> None:
    global _device
    torch.set_num_threads(1)
    if device_type == "cuda":
        _device = torch.device("cuda", rank)
        torch.cuda.set_device(_device)
    backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
    distributed.init_process_group(
        backend, init_method=rendezvous, rank=rank, world_size=count, timeout=datetime.timedelta(seconds=TIMEOUT)
    )
    timeout = datetime.timedelta(seconds=TIMEOUT)
    groups = {ranks: distributed.new_group(list(range(ranks)), timeout=timeout) for ranks in range(1, count + 1)}
    while True:
        try:
            function, ranks, arguments = _unpacked(connection.recv_bytes())
        except EOFError:  # the test has ended
            break
        arguments = tree_map_only(torch.Tensor, lambda tensor: tensor.to(_device), arguments)
        try:
            result = function(groups[ranks], *arguments)
        except Exception as error:
            result = Failure(error)
        connection.send_bytes(_packed(result))
        if _composable_state._module_state_mapping:
            # Modules of fully_shard are reference cycles. One that stays alive makes a later test's DTensor on an equal
            # mesh look like its parameter.
            gc.collect()
    distributed.destroy_process_group()
