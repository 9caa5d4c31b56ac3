"""The operators of PyTorch that a block calls."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Watch(TorchDispatchMode):
    """Passes each operator of a block, its arguments and its results to a function."""

    def __init__(self, function: Callable[[str, tuple[Any, ...], list[Tensor]], None]) -> None:
        super().__init__()
        self.function = function

    def __torch_dispatch__(self, operator: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        results = operator(*arguments, **(options or {}))
        flat = torch.utils._pytree.tree_leaves(results)
        self.function(str(operator), arguments, [each for each in flat if isinstance(each, Tensor)])
        return results


@contextmanager
def watched(prefix: str = "eaves.") -> Iterator[list[tuple[str, tuple[Any, ...], list[Tensor]]]]:
    """For each operator of the block with this prefix: the rest of its name, its arguments and its results."""
    calls = []

    def note(name: str, arguments: tuple[Any, ...], results: list[Tensor]) -> None:
        if name.startswith(prefix):
            calls.append((name.removeprefix(prefix), arguments, results))

    with Watch(note):
        yield calls
