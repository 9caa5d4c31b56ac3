"""The operators that library_test.py and cuda_test.py go through. A new operator adds an entry to OPERATORS."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import eaves
from layouts import LAYOUTS, random_tensor

ops = torch.ops.eaves


@dataclass(frozen=True)
class Operator:
    """One public function, and what the tests of the whole library need to call it.

    `function` takes tensors alone, the first of which is differentiable, and gives one tensor.
    `inputs(batch, device, dtype)` makes the tensors of `batch` samples; the first axis of each is the batch, and the
    function treats every sample alone, so that torch.vmap over it has to give the same.
    """

    name: str
    function: Callable[..., Tensor]
    inputs: Callable[[int, torch.device | str, torch.dtype], tuple[Tensor, ...]]
    # The same function in torch, for the cost of a call on the host.
    torch_function: Callable[..., Tensor]
    # Every operator of the extension with arguments: layouts, empty tensors, and each option.
    extension_calls: Callable[[torch.device | str], list[tuple[Any, tuple[Any, ...]]]]
    # Inputs so large that the CPU uses several threads, and a GPU a workspace.
    large_inputs: Callable[[torch.device | str], tuple[Tensor, ...]]


# ------------------------------------------------------------------------------------------------------------ logsumexp


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
        if x.is_floating_point():
            out, lse = ops.logsumexp_forward_lse(*arguments)
            calls.append((ops.logsumexp_backward.default, (torch.ones_like(out), x, lse, list(axes), keepdim)))

    for layout in LAYOUTS:
        add(layout(random_tensor((3, 4, 5), torch.float32, device)), [1], False, torch.float32)
    channels_last = random_tensor((2, 3, 4, 5), torch.float32, device).to(memory_format=torch.channels_last)
    add(channels_last, [-3], True, torch.float32)
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        add(random_tensor((3, 4), dtype, device), [-1], True, dtype)
    add(random_tensor((3, 4), torch.bfloat16, device), [], False, torch.float32)
    add(random_tensor((3, 4), torch.int64, device), [0, 1], False, torch.float32)
    add(random_tensor((3, 0), torch.float32, device), [1], False, torch.float32)
    add(random_tensor((0, 3), torch.float32, device), [1], True, torch.float32)
    add(random_tensor((), torch.float32, device), [0], False, torch.float32)
    return calls


LOGSUMEXP = Operator(
    name="logsumexp",
    function=lambda x: eaves.logsumexp(x, -1),
    inputs=logsumexp_inputs,
    torch_function=lambda x: torch.logsumexp(x, -1),
    extension_calls=logsumexp_extension_calls,
    large_inputs=logsumexp_large_inputs,
)

OPERATORS = [LOGSUMEXP]


def each_operator() -> pytest.MarkDecorator:
    return pytest.mark.parametrize("op", OPERATORS, ids=lambda op: op.name)


def gradient(op: Operator, inputs: Sequence[Tensor], upstream: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The result of a call and its gradient with respect to the first tensor."""
    x = inputs[0].detach().requires_grad_()
    out = op.function(x, *inputs[1:])
    (grad_x,) = torch.autograd.grad(out, x, torch.ones_like(out) if upstream is None else upstream)
    return out.detach(), grad_x


def assert_same(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Equal bit for bit, NaN to NaN."""
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=0, atol=0, equal_nan=True)
