"""row_sum seen from torch. A real operator also gets an entry in operators.py, for what all of them must do."""

import pytest
import torch

import eaves


def test_it_is_torchs_sum_over_the_last_axis() -> None:
    x = torch.randn(3, 1000, requires_grad=True)
    out = eaves.row_sum(x)
    torch.testing.assert_close(out, x.sum(-1))
    upstream = torch.randn(3)
    torch.testing.assert_close(*(torch.autograd.grad(o, x, upstream)[0] for o in (out, x.sum(-1))))


def test_torch_can_trace_and_batch_it() -> None:
    x = torch.randn(3, 4)
    torch.library.opcheck(torch.ops.eaves.row_sum_forward.default, (x,))
    torch.testing.assert_close(torch.vmap(eaves.row_sum)(x), eaves.row_sum(x))
    torch.testing.assert_close(torch.vmap(torch.func.grad(eaves.row_sum))(x), torch.ones_like(x))


def test_integers_are_refused_in_the_words_of_the_core() -> None:
    with pytest.raises(ValueError, match=r"^row_sum: x has dtype int64, expected"):
        eaves.row_sum(torch.ones(3, 4, dtype=torch.int64))
