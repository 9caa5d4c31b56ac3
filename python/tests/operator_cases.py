"""The facts about an operator that the tests of the whole library need."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Tensors = tuple[Tensor, ...]


@dataclass(frozen=True)
class Operator:
    """One public function, with the tensors and facts that the tests of the whole library need to call it."""

    name: str
    # Takes only tensors, for a batch of samples or for one sample, and returns one tensor.
    function: Callable[..., Tensor]
    # The same function in torch, for the cost of a call on the host.
    torch_function: Callable[..., Tensor]
    # The tensors that have a gradient. The others, such as indices, are never scaled, sliced or cast.
    differentiable: tuple[int, ...]
    # The tensors of a batch with this number of samples. The first axis of each is the batch; `dtype` is the dtype of
    # the differentiable tensors.
    inputs: Callable[[int, torch.device | str, torch.dtype], Tensors]
    # So small that only the call itself takes time, and that finite differences may take two calls for each element.
    tiny_inputs: Callable[[torch.device | str, torch.dtype], Tensors]
    # So large that the CPU uses several threads, and a GPU a workspace if the operator has one.
    large_inputs: Callable[[torch.device | str], Tensors]
    has_workspace: bool
    # False: torch.autograd.grad of a gradient is a NotImplementedError.
    has_second_derivative: bool
    # Every operator of the extension with arguments: layouts, empty tensors, and each option.
    extension_calls: Callable[[torch.device | str], list[tuple[Any, tuple[Any, ...]]]]
    # True: torch.autocast casts the tensors, as for F.linear. False: it leaves their dtype as it is.
    follows_autocast: bool = False
    # Other public functions that the operator consists of, or that consist of it; they have tests of their own.
    parts: tuple[str, ...] = ()
