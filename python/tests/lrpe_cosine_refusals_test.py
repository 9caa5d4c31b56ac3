"""The refusals of eaves.lrpe_cosine: ValueError for a wrong argument, TypeError for a wrong Python type,
NotImplementedError for a missing feature of eaves. Each sentence names the operator and the argument, its value and the
expected one.
"""

import numpy
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import eaves
from refusals import Call, assert_each_refused, assert_refused_by

OP = "lrpe_cosine"

# Two batch entries of six positions, three heads and four features.
RIGHT = {"x": torch.zeros(2, 6, 3, 4), "theta": torch.zeros(3, 4)}


def integers(*values: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor(values, dtype=dtype)


CALLS: list[Call] = [
    # tensors
    ({"x": torch.zeros(2, 6, 12)}, ValueError, r"x has shape \[2, 6, 12\], expected four axes \(batch, positions, "),
    ({"x": torch.zeros(6), "layout": "bhnd"}, ValueError, r"x has shape \[6\], .*\(batch, heads, positions, "),
    ({"x": torch.zeros(2, 6, 3, 4, dtype=torch.int64)}, ValueError, r"x has dtype int64, expected float16"),
    ({"x": torch.zeros(2, 6, 3, 4, dtype=torch.complex64)}, NotImplementedError, r"x has dtype complex64, expected"),
    ({"x": torch.zeros(2, 6, 3, 4).to(torch.float8_e5m2)}, NotImplementedError, r"x has dtype float8_e5m2, expected"),
    ({"x": [1.0]}, TypeError, r"x is a list, expected a torch\.Tensor"),
    ({"x": numpy.zeros((2, 6, 3, 4))}, TypeError, r"x is a ndarray, expected a torch\.Tensor"),
    ({"x": torch.zeros(2, 6, 3, 4).to_sparse()}, NotImplementedError, r"sparse.*expected dense"),
    ({"theta": None}, TypeError, r"theta is a NoneType, expected a torch\.Tensor"),
    ({"theta": torch.zeros(3)}, ValueError, r"theta has shape \[3\], expected two axes \(heads, features\)"),
    ({"theta": torch.zeros(2, 4)}, ValueError, r"theta has 2 heads, expected 3 \(as x\) or 1"),
    ({"layout": "bhnd"}, ValueError, r"theta has 3 heads, expected 6 \(as x\) or 1"),
    ({"theta": torch.zeros(3, 4, dtype=torch.bfloat16)}, ValueError, r"theta has dtype bfloat16, expected float32 .*x"),
    ({"theta": torch.zeros(3, 4, dtype=torch.float64)}, ValueError, r"theta has dtype float64, expected float32 .*x"),
    # the grid
    ({"grid": (2, 2)}, ValueError, r"grid is \[2, 2\], .* product is 6 \(6 positions, of which 0 are extra tokens\)"),
    ({"grid": (2, 3), "extra_tokens": 1}, ValueError, r"product is 5 \(6 positions, of which 1 are extra tokens\)"),
    ({"grid": (-2, -3)}, ValueError, r"grid is \[-2, -3\]"),
    ({"grid": ()}, ValueError, r"grid has 0 axes, expected 1 to 16"),
    ({"grid": (1,) * 17}, ValueError, r"grid has 17 axes, expected 1 to 16"),
    ({"grid": 6}, TypeError, r"grid is 6, expected None or a sequence of ints"),
    ({"grid": "6"}, TypeError, r"grid is '6', expected None or a sequence of ints"),
    ({"grid": (6.0,)}, TypeError, r"grid is 6\.0, expected an int"),
    ({"extra_tokens": 7}, ValueError, r"extra_tokens is 7, expected 0 to the number of positions, 6"),
    ({"extra_tokens": -1}, ValueError, r"extra_tokens is -1, expected 0 to the number of positions, 6"),
    ({"extra_tokens": 1.0}, TypeError, r"extra_tokens is 1\.0, expected an int"),
    ({"extra_tokens": True}, TypeError, r"extra_tokens is True, expected an int"),
    # positions
    ({"offset": 2**62 + 1}, ValueError, r"offset is \d+, expected -2\^62 to 2\^62"),
    ({"offset": 0.5}, TypeError, r"offset is 0\.5, expected an int, or a tensor of them, int32 or int64"),
    ({"offset": None}, TypeError, r"offset is None, expected an int"),
    ({"offset": integers(1, 2, 3)}, ValueError, r"offset has shape \[3\], expected \[2\] .*one element for all"),
    ({"offset": torch.zeros(2)}, ValueError, r"offset has dtype float32, expected int64 or int32"),
    ({"offset": integers(1, 2).to("meta")}, ValueError, r"offset is on meta, expected (cpu|cuda:0) "),
    ({"positions": integers(1, 2)}, ValueError, r"positions has shape \[2\], expected \[6\] .* or \[2, 6\]"),
    ({"positions": torch.zeros(3, 6).long()}, ValueError, r"positions has shape \[3, 6\], expected \[6\] .*\[2, 6\]"),
    ({"positions": torch.zeros(6)}, ValueError, r"positions has dtype float32, expected int64 or int32"),
    ({"positions": torch.zeros(6).to(torch.int16)}, ValueError, r"positions has dtype int16, expected int64 or int32"),
    ({"positions": list(range(6))}, TypeError, r"positions is a list, expected a torch\.Tensor"),
    ({"positions": torch.arange(6), "offset": 1}, ValueError, r"positions is given beside an offset"),
    ({"positions": torch.arange(6), "offset": integers(0)}, ValueError, r"positions is given beside an offset"),
    ({"positions": torch.arange(6), "grid": (2, 3)}, ValueError, r"positions is given with a grid \[2, 3\]"),
    ({"cu_seqlens": integers(0, 6), "grid": (2, 3)}, ValueError, r"cu_seqlens is given with a grid \[2, 3\]"),
    ({"cu_seqlens": integers(0, 6), "offset": 1}, ValueError, r"cu_seqlens is given beside an offset"),
    ({"cu_seqlens": integers(0, 6), "positions": torch.arange(6)}, ValueError, r"beside positions, expected one"),
    ({"cu_seqlens": integers(0, 6), "extra_tokens": 1}, ValueError, r"given with extra tokens, expected none"),
    ({"cu_seqlens": integers(0, 6).view(1, 2)}, ValueError, r"cu_seqlens has shape \[1, 2\], expected one axis"),
    ({"cu_seqlens": integers()}, ValueError, r"cu_seqlens has shape \[0\], expected one axis with one entry more"),
    ({"cu_seqlens": torch.tensor([0.0, 6.0])}, ValueError, r"cu_seqlens has dtype float32, expected int64 or int32"),
    (
        {"cu_seqlens": integers(0, 6), "activation": "softmax", "activation_dim": -2},
        NotImplementedError,
        r"cu_seqlens is given with a softmax over the sequence, .*; give positions",
    ),
    # words
    ({"activation": "gelu"}, ValueError, r"activation is 'gelu', expected one of \"none\", \"relu\", .*\"softmax\""),
    ({"activation": None}, TypeError, r"activation is None, expected one of \"none\""),
    ({"activation": "softmax", "activation_dim": 3}, ValueError, r"activation_dim is 3, expected -1 .* or -2 "),
    ({"activation_dim": 1}, ValueError, r"activation_dim is 1, expected -1 .* or -2 "),
    ({"activation": "silu", "activation_dim": 0}, ValueError, r"activation_dim is 0, expected -1 .* or -2 "),
    ({"activation": "silu", "activation_dim": True}, TypeError, r"activation_dim is True, expected an int"),
    ({"activation": "softmax", "activation_dim": "n"}, TypeError, r"activation_dim is 'n', expected an int"),
    ({"layout": "nbhd"}, ValueError, r"layout is 'nbhd', expected \"bnhd\" or \"bhnd\""),
    ({"layout": 0}, TypeError, r"layout is 0, expected \"bnhd\" or \"bhnd\""),
]  # fmt: skip


@pytest.mark.parametrize("call", CALLS, ids=lambda call: f"{call[0]}"[:60])
def test_what_is_refused(call: Call, device: torch.device) -> None:
    assert_each_refused(eaves.lrpe_cosine, OP, RIGHT, call, device)


CONTENTS = [
    (integers(1, 6), r"cu_seqlens has 1 at index 0, expected .*from 0 to the number of positions, 6"),
    (integers(0, 5), r"cu_seqlens has 5 at index 1, expected"),
    (integers(0, 4, 2, 6, dtype=torch.int32), r"cu_seqlens has 2 at index 2, expected numbers that do not decrease"),
]


def test_packed_sequences_that_do_not_fit_are_refused_on_a_cpu() -> None:
    for cu_seqlens, sentence in CONTENTS:
        assert_refused_by(eaves.lrpe_cosine, OP, ValueError, sentence, **RIGHT, cu_seqlens=cu_seqlens)
    with FakeTensorMode() as mode:  # a fake tensor has no contents to check
        fake = [mode.from_tensor(tensor) for tensor in (*RIGHT.values(), integers(3, 1))]
        assert eaves.lrpe_cosine(*fake[:2], cu_seqlens=fake[2]).shape == (2, 6, 3, 8)


def test_a_gradient_with_the_wrong_shape_is_refused_by_the_operator() -> None:
    # Autograd checks a user's gradient; here the operator's own check speaks.
    backward = torch.ops.eaves.lrpe_cosine_backward
    x, theta = RIGHT.values()
    for grad_out, sentence in (
        (torch.zeros(2, 6, 3, 7), "`grad_out` has shape .* expected an even number of features"),
        (torch.zeros(2, 6, 24), "`grad_out` has shape .* expected four axes"),
        (torch.zeros(2, 5, 3, 8), "`x` has shape .* expected"),
    ):
        with pytest.raises(RuntimeError, match=rf"^eaves\.InvalidArgument: lrpe_cosine.*: {sentence}"):
            backward(grad_out, x, theta, None, activation=1)
    with pytest.raises(RuntimeError, match="`x` is missing, "):
        backward(torch.zeros(2, 6, 3, 8), None, theta, None, activation=1)
    for name, value in (("activation", 5), ("activation", -(2**40)), ("activation_dim", 2**40), ("extra_tokens", -1)):
        if value == -(2**40):
            continue  # below the first activation: none
        with pytest.raises(RuntimeError, match=rf"^eaves\.InvalidArgument: lrpe_cosine_forward: `{name}` is"):
            torch.ops.eaves.lrpe_cosine_forward(x, theta, **{name: value})


def test_what_the_module_refuses() -> None:
    for named, kind, sentence in (
        ({"num_heads": 0}, ValueError, "num_heads is 0, expected a positive number"),
        ({"head_dim": 2.0}, TypeError, r"head_dim is 2\.0, expected an int"),
        ({"axes": 5}, ValueError, "theta has 0 features for each of 5 axes, expected at least one"),
        ({"theta_features": -1}, ValueError, "theta has -1 features"),
        ({"base": 0}, ValueError, "base is 0, expected a positive number"),
        ({"activation": "gelu"}, ValueError, "activation is 'gelu'"),
        ({"activation_dim": -3}, ValueError, r"activation_dim is -3, expected -1 .* or -2 "),
        ({"layout": "nbhd"}, ValueError, "layout is 'nbhd'"),
    ):
        assert_refused_by(eaves.LRPECosine, OP, kind, sentence, **({"num_heads": 3, "head_dim": 4} | named))


@pytest.mark.parametrize(
    ("arguments", "shape", "grid", "message"),
    [
        ({}, (1, 6, 4, 8), None, r"x has 8 features, expected 16 \(head_dim of the module\)"),
        ({}, (1, 6, 4, 16), (2, 3), r"grid is \[2, 3\], expected a grid of 1 axes \(as in the module\)"),
        ({"axes": 2}, (1, 6, 4, 16), None, r"grid is None .one axis., expected a grid of 2 axes \(as in the module\)"),
        ({"axes": 2}, (1, 6, 4, 16), (1, 2, 3), r"grid is \[1, 2, 3\], expected a grid of 2 axes"),
    ],
)
def test_a_module_refuses_what_its_angles_were_not_made_for(
    arguments: dict[str, int], shape: tuple[int, ...], grid: tuple[int, ...] | None, message: str
) -> None:
    module = eaves.LRPECosine(4, 16, **arguments)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        module(torch.randn(shape), grid=grid)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int32, torch.complex64])
def test_a_module_has_angles_of_float32_or_float64(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=r"expected torch\.float32 or torch\.float64"):
        eaves.LRPECosine(4, 16, dtype=dtype)
