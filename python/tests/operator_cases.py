"""What the tests of the whole library have to know of an operator."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Tensors = tuple[Tensor, ...]


@dataclass(frozen=True)
class Operator:
    """One public function, and what the tests of the whole library need to call it."""

    name: str
    # Takes tensors alone, a batch of samples or one of them, and gives one tensor.
    function: Callable[..., Tensor]
    # The same function in torch, for the cost of a call on the host.
    torch_function: Callable[..., Tensor]
    # Which of the tensors have a gradient. The others, indices for instance, are never scaled, sliced or cast.
    differentiable: tuple[int, ...]
    # The tensors of a batch of so many samples. The first axis of each is the batch; `dtype` is that of the
    # differentiable ones.
    inputs: Callable[[int, torch.device | str, torch.dtype], Tensors]
    # So small that a call is all there is to measure, and that finite differences may take two calls for each element.
    tiny_inputs: Callable[[torch.device | str, torch.dtype], Tensors]
    # So large that the CPU uses several threads, and a GPU a workspace where there is one.
    large_inputs: Callable[[torch.device | str], Tensors]
    has_workspace: bool
    # Without, torch.autograd.grad of a gradient is a NotImplementedError.
    has_second_derivative: bool
    # Every operator of the extension with arguments: layouts, empty tensors, and each option.
    extension_calls: Callable[[torch.device | str], list[tuple[Any, tuple[Any, ...]]]]
    # torch.autocast casts what it is given, as that of F.linear; without, it leaves the dtype as it is.
    follows_autocast: bool = False
    # Other public functions, that the operator is put together from or that are made of it, with tests of their own.
    parts: tuple[str, ...] = ()
