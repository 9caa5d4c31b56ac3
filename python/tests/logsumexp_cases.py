"""logsumexp as the tests of the whole library call it."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import eaves
from layouts import LAYOUTS, random_tensor
from operator_cases import Operator

ops = torch.ops.eaves


def logsumexp_inputs(batch: int, device: torch.device | str, dtype: torch.dtype) -> tuple[Tensor, ...]:
    return (random_tensor((batch, 5, 33), dtype, device),)


def logsumexp_large_inputs(device: torch.device | str) -> tuple[Tensor, ...]:
    # Few rows, so that each is cut among threads or blocks and its pieces meet in the workspace.
    return (random_tensor((2, (1 << 20) + 13), torch.float32, device),)


def logsumexp_extension_calls(device: torch.device | str) -> list[tuple[Any, tuple[Any, ...]]]:
    calls: list[tuple[Any, tuple[Any, ...]]] = []

    def add(x: Tensor, axes: Sequence[int], keepdim: bool, dtype: torch.dtype) -> None:
        arguments = (x, list(axes), keepdim, dtype)
        calls.append((ops.logsumexp_forward.default, arguments))
        calls.append((ops.logsumexp_forward_lse.default, arguments))
        out, lse = ops.logsumexp_forward_lse(*arguments)
        calls.append((ops.logsumexp_backward.default, (torch.ones_like(out), x, lse, list(axes), keepdim)))

    for layout in LAYOUTS:
        add(layout(random_tensor((3, 4, 5), torch.float32, device)), [1], False, torch.float32)
    channels_last = random_tensor((2, 3, 4, 5), torch.float32, device).to(memory_format=torch.channels_last)
    add(channels_last, [-3], True, torch.float32)
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        add(random_tensor((3, 4), dtype, device), [-1], True, dtype)
    add(random_tensor((3, 4), torch.bfloat16, device), [], False, torch.float32)
    add(random_tensor((3, 4), torch.float32, device), [0, 1], False, torch.float32)
    add(random_tensor((3, 0), torch.float32, device), [1], False, torch.float32)
    add(random_tensor((0, 3), torch.float32, device), [1], True, torch.float32)
    add(random_tensor((), torch.float32, device), [0], False, torch.float32)
    return calls


LOGSUMEXP = Operator(
    name="logsumexp",
    function=lambda x: eaves.logsumexp(x, -1),
    torch_function=lambda x: torch.logsumexp(x, -1),
    differentiable=(0,),
    inputs=logsumexp_inputs,
    tiny_inputs=lambda device, dtype: (random_tensor((2, 3), dtype, device),),
    large_inputs=logsumexp_large_inputs,
    has_workspace=True,
    has_second_derivative=True,
    extension_calls=logsumexp_extension_calls,
)
