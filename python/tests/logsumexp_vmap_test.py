"""The batching rules of eaves.logsumexp: every option under torch.vmap, with and without a gradient, is the loop.

The duties of any operator under torch.vmap and torch.func are in transforms_test.py.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.func import grad

import eaves
from comparison import assert_agree
from layouts import random_tensor
from pairwise import pairwise

# shape of the batch, dims of a sample, the reason
CASES = [
    ((4, 3, 5), -1, "the last axis"),
    ((4, 3, 5), 0, "the first axis of a sample is the second of the batch"),
    ((4, 3, 5), -2, "the first axis, counted from the end"),
    ((4, 3, 5), (0, 1), "all axes by name"),
    ((4, 3, 5), (), "all axes but the batch"),
    ((4, 2, 3, 5), (-1, 0), "the axes around one that stays"),
    ((4, 5), 0, "vectors"),
    ((4,), 0, "numbers"),
    ((4,), -1, "numbers, counted from the end"),
    ((4,), (), "numbers, all of no axes"),
    ((4, 3, 0), 1, "empty rows"),
]


def cases() -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("shape", "dims"), [pytest.param(*c[:2], id=c[2]) for c in CASES])


@cases()
def test_every_option_under_vmap_is_the_loop(shape: tuple[int, ...], dims: object, any_device: torch.device) -> None:
    dtypes, results = (torch.float32, torch.bfloat16, torch.float64), (None, torch.float32)
    for dtype, keepdim, result in pairwise(dtypes, (False, True), results):
        x = random_tensor(shape, dtype, any_device)

        def function(sample: Tensor, keepdim: bool = keepdim, result: torch.dtype | None = result) -> Tensor:
            return eaves.logsumexp(sample, dims, keepdim, dtype=result)

        def weighted(sample: Tensor, function: Callable[[Tensor], Tensor] = function) -> Tensor:
            out = function(sample)
            return (out * torch.arange(1, out.numel() + 1, device=any_device).view(out.shape).to(out.dtype)).sum()

        expected = torch.stack([function(sample) for sample in x])
        actual = torch.vmap(function)(x)
        assert actual.dtype == (result or dtype)
        assert_agree(actual, expected)
        # With a gradient, 16 bits use another operator of the extension. The gradient of each sample, of the batch, and
        # by autograd.
        wanted = torch.stack([grad(weighted)(sample) for sample in x])
        assert wanted.dtype == dtype
        assert_agree(torch.vmap(grad(weighted))(x), wanted)
        assert_agree(grad(lambda batch, f=weighted: torch.vmap(f)(batch).sum())(x), wanted)
        leaf = x.detach().requires_grad_()
        out = torch.vmap(function)(leaf)
        assert_agree(out.detach(), expected)
        upstream = torch.arange(1, out[0].numel() + 1, device=any_device).view(out.shape[1:])
        (actual,) = torch.autograd.grad(out, leaf, upstream.to(out.dtype).expand_as(out))
        assert_agree(actual, wanted)


def test_the_batch_may_lie_on_any_axis_of_x_and_of_the_upstream_gradient(any_device: torch.device) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        x = random_tensor((3, 4, 5), dtype, any_device)
        upstream = random_tensor((3, 4), dtype, any_device)

        def gradient(sample: Tensor, of_sample: Tensor) -> Tensor:
            _, backward = torch.func.vjp(lambda t: eaves.logsumexp(t, -1), sample)
            return backward(of_sample)[0]

        expected = torch.stack([gradient(x[:, i], upstream[:, i]) for i in range(4)])
        assert_agree(torch.vmap(gradient, in_dims=(1, 1))(x, upstream), expected)
        # x has no batch: it is repeated, not copied.
        expected = torch.stack([gradient(x[:, 0], upstream[:, i]) for i in range(4)])
        assert_agree(torch.vmap(gradient, in_dims=(None, 1))(x[:, 0], upstream), expected)
        expected = torch.stack([gradient(x[:, i], upstream[:, 0]) for i in range(4)])
        assert_agree(torch.vmap(gradient, in_dims=(1, None))(x, upstream[:, 0]), expected)


def test_the_rules_themselves_give_the_shapes_of_the_loop(any_device: torch.device) -> None:
    # torch.func reshapes a gradient to its tensor, which hides the shape that the backward's rule returned.
    ops = torch.ops.eaves
    for shape in ((4,), (4, 3), (4, 3, 5)):
        for keepdim in (False, True):
            x = random_tensor(shape, torch.bfloat16, any_device)

            def forward(sample: Tensor, keepdim: bool = keepdim) -> tuple[Tensor, Tensor]:
                return ops.logsumexp_forward_lse(sample, [0], keepdim, torch.bfloat16)

            def backward(grad_out: Tensor, sample: Tensor, lse: Tensor, keepdim: bool = keepdim) -> Tensor:
                return ops.logsumexp_backward(grad_out, sample, lse, [0], keepdim)

            out, lse = torch.vmap(forward)(x)
            grad_x = torch.vmap(backward)(out, x, lse)
            for i, sample in enumerate(x):
                of_sample = forward(sample)
                for actual, expected in zip((out[i], lse[i]), of_sample, strict=True):
                    assert_agree(actual, expected)
                assert_agree(grad_x[i], backward(of_sample[0], sample, of_sample[1]))


def test_a_batch_is_an_axis_and_sixteen_are_the_most(any_device: torch.device) -> None:
    assert torch.vmap(lambda t: eaves.logsumexp(t, 0))(torch.zeros([1] * 16, device=any_device)).shape == (1,) * 15
    with pytest.raises(NotImplementedError, match=r"^logsumexp: x has 17 axes, expected at most 16$"):
        torch.vmap(lambda t: eaves.logsumexp(t, 0))(torch.zeros([1] * 17, device=any_device))
