"""The operators that library_test.py, package_test.py and cuda_test.py test, and the helpers that call them.

A new operator adds a file <op>_cases.py beside logsumexp_cases.py, and its entry to OPERATORS.
"""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from cross_entropy_cases import CROSS_ENTROPY
from linear_cross_entropy_cases import LINEAR_CROSS_ENTROPY
from logsumexp_cases import LOGSUMEXP
from lrpe_cosine_cases import LRPE_COSINE
from operator_cases import Operator

OPERATORS = [LOGSUMEXP, CROSS_ENTROPY, LINEAR_CROSS_ENTROPY, LRPE_COSINE]


def each_operator() -> pytest.MarkDecorator:
    return pytest.mark.parametrize("op", OPERATORS, ids=lambda op: op.name)


class Caller(torch.nn.Module):
    """A module that is a function."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *tensors: Tensor) -> Tensor:
        return self.function(*tensors)


class Stop(torch.autograd.Function):
    """Passes a tensor on, and no gradient back."""

    @staticmethod
    def forward(ctx: object, out: Tensor) -> Tensor:
        return out.clone()

    @staticmethod
    def backward(ctx: object, grad_out: Tensor) -> None:
        return None


def leaves(op: Operator, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The tensors of a call. The differentiable ones are detached, and require a gradient."""
    return tuple(t.detach().requires_grad_() if i in op.differentiable else t for i, t in enumerate(inputs))


def differentiable(op: Operator, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple(inputs[index] for index in op.differentiable)


def gradients_of(
    op: Operator, function: Callable[..., Tensor], inputs: Sequence[Tensor], upstream: Tensor | None = None
) -> tuple[Tensor, ...]:
    """The result of `function`, which takes the operator's tensors, and its gradients."""
    tensors = leaves(op, inputs)
    out = function(*tensors)
    upstream = torch.ones_like(out) if upstream is None else upstream
    return out.detach(), *torch.autograd.grad(out, differentiable(op, tensors), upstream)


def gradient(op: Operator, inputs: Sequence[Tensor], upstream: Tensor | None = None) -> tuple[Tensor, ...]:
    """The result of a call and its gradient with respect to each differentiable tensor."""
    return gradients_of(op, op.function, inputs, upstream)


def lying(op: Operator, layout: Callable[[Tensor], Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """The tensors, with the differentiable ones in another layout."""
    return [layout(tensor) if index in op.differentiable else tensor for index, tensor in enumerate(inputs)]


def of_differentiable(op: Operator, function: Callable[..., Tensor], inputs: Sequence[Tensor]) -> Callable[..., Tensor]:
    """`function` of the differentiable tensors alone, with the other tensors of `inputs`."""

    def of_wanted(*wanted: Tensor) -> Tensor:
        tensors = list(inputs)
        for index, tensor in zip(op.differentiable, wanted, strict=True):
            tensors[index] = tensor
        return function(*tensors)

    return of_wanted


def loop(op: Operator, *inputs: Tensor) -> Tensor:
    """The expected result of torch.vmap: the function called on each sample."""
    return torch.stack([op.function(*sample) for sample in zip(*inputs, strict=True)])


def assert_same(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Asserts that tensors are equal bit for bit, NaN to NaN."""
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=0, atol=0, equal_nan=True)
