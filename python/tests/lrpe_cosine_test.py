"""eaves.lrpe_cosine: the path of a call and its backward to the core, positions in each form, and eaves.LRPECosine.

The tests of the core check its accuracy, at positions and sizes of every kind."""

import copy
import io
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import eaves
from comparison import FLOATING_POINT, assert_within
from layouts import LAYOUTS, random_tensor
from lrpe_cosine_cases import ACTIVATIONS, Oracle, angles
from pairwise import pairwise

each_activation = pytest.mark.parametrize(("activation", "dim"), ACTIVATIONS)
each_dtype = pytest.mark.parametrize("dtype", FLOATING_POINT, ids=str)

# Nine positions, as one axis and as grids, with and without extra tokens in front.
GRIDS: list[dict[str, Any]] = [
    {},
    {"extra_tokens": 2},
    {"grid": (9,), "offset": 1000},
    {"grid": (3, 3), "offset": -4},
    {"grid": (2, 4), "extra_tokens": 1},
    {"grid": (2, 2, 2), "extra_tokens": 1},
    {"extra_tokens": 9},
]
# Angles for 7 features: for all, for fewer and more than there are, one; for each head and for all heads.
THETAS = [(3, 7), (1, 7), (3, 3), (1, 2), (3, 9), (3, 1), (1, 1), (3, 0)]
# The bool: whether theta is float32 for any x. The two layouts: of its tensors in memory, and of the upstream gradient.
CASES = pairwise(ACTIVATIONS, GRIDS, THETAS, FLOATING_POINT, ("bnhd", "bhnd"), (False, True), LAYOUTS, LAYOUTS)


def same(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("case", CASES)
def test_every_argument_arrives_whatever_its_dtype_and_layout(case: tuple[Any, ...], device: torch.device) -> None:
    (activation, dim), options, shape, dtype, layout, is_float32, laid, laid_upstream = case
    size = (2, 9, 3, 7) if layout == "bnhd" else (2, 3, 9, 7)
    x = laid(random_tensor(size, dtype, device, 2.0)).requires_grad_()
    theta = laid(angles(*shape, torch.float32 if is_float32 else dtype, device)).requires_grad_()
    call = options | {"activation": activation, "activation_dim": dim, "layout": layout}
    out = eaves.lrpe_cosine(x, theta, **call)
    assert out.dtype == dtype and out.is_contiguous() and out.shape == (*size[:-1], 14)
    grad_out = laid_upstream(random_tensor((*size[:-1], 14), dtype, device).flip(-1))
    grads = torch.autograd.grad(out, (x, theta), grad_out)
    oracle = Oracle(x, theta, grad_out, **call)
    for actual, bound in zip((out, *grads), (oracle.out, oracle.grad_x, oracle.grad_theta), strict=True):
        assert_within(actual, bound, f"{call}, theta {shape}")


# ------------------------------------------------------------------------------------------------------------ positions


@each_activation
def test_what_makes_the_same_positions_gives_the_same_bits(
    activation: str, dim: int | None, device: torch.device
) -> None:
    x = random_tensor((2, 9, 3, 7), torch.float32, device)
    theta = angles(3, 7, device=device)

    def call(x: Tensor = x, **options: Any) -> Tensor:
        return eaves.lrpe_cosine(x, theta, activation=activation, activation_dim=dim, **options)

    def integers(*values: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    plain = call()
    same(call(grid=[9]), plain)
    same(call(offset=integers(0)), plain)
    same(call(positions=torch.arange(9, device=device)), plain)
    same(call(positions=torch.arange(9, device=device).expand(2, 9)), plain)
    same(call(positions=torch.arange(18, device=device, dtype=torch.int32)[::2] // 2), plain)
    moved = call(offset=5)
    for dtype in (torch.int32, torch.int64):
        for tensor in (integers(5, dtype=dtype), integers(5, dtype=dtype)[0], integers(5, 5, dtype=dtype)):
            same(call(offset=tensor), moved)
    same(call(positions=5 + torch.arange(9, device=device)), moved)
    each = call(offset=integers(5, -3))
    same(each[:1], call(x[:1], offset=5))
    same(each[1:], call(x[1:], offset=-3))
    # The call does not read the positions of extra tokens.
    same(call(extra_tokens=2, positions=integers(99, -99, *range(7))), call(extra_tokens=2))
    # One axis of a grid with one row, and features beyond it.
    if dim != -2:
        same(call(cu_seqlens=integers(0, 9)), plain)
        packed = call(cu_seqlens=integers(0, 0, 4, 9, dtype=torch.int32))
        same(packed[:, :4], call(x[:, :4]))
        same(packed[:, 4:], call(x[:, 4:]))
        same(call(cu_seqlens=integers(0, 99, 4, 99, 9, 99)[::2]), packed)


def test_the_softmax_is_over_the_features_unless_it_is_said(device: torch.device) -> None:
    x, theta = random_tensor((2, 9, 3, 7), torch.float32, device), angles(3, 7, device=device)
    same(
        eaves.lrpe_cosine(x, theta, activation="softmax"),
        eaves.lrpe_cosine(x, theta, activation="softmax", activation_dim=-1),
    )


@pytest.mark.parametrize("activation", [name for name, dim in ACTIVATIONS if dim is None])
def test_only_a_softmax_has_an_axis(activation: str, device: torch.device) -> None:
    x, theta = random_tensor((2, 9, 3, 7), torch.float32, device), angles(3, 7, device=device)
    cu_seqlens = torch.tensor([0, 9], device=device)
    expected = eaves.lrpe_cosine(x, theta, activation=activation)
    for given in (-1, -2):
        call = {"activation": activation, "activation_dim": given}
        same(eaves.lrpe_cosine(x, theta, **call), expected)
        same(eaves.lrpe_cosine(x, theta, cu_seqlens=cu_seqlens, **call), expected)
        of_module = eaves.LRPECosine(3, 7, device=device, **call)
        same(of_module(x), eaves.lrpe_cosine(x, of_module.theta, activation=activation))


# ----------------------------------------------------------------------------------------------------------- the module


def test_the_module_is_the_function_with_its_angles(device: torch.device) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        x = random_tensor((2, 9, 3, 8), dtype, device)
        module = eaves.LRPECosine(3, 8, axes=2, activation="softmax", activation_dim=-2, device=device)
        options = {"activation": "softmax", "activation_dim": -2}
        assert module.theta.shape == (3, 4) and module.theta.device.type == device.type
        for grid, extra_tokens in (((3, 3), 0), ((2, 4), 1)):
            call = {"grid": grid, "extra_tokens": extra_tokens, "offset": 3}
            same(module(x, **call), eaves.lrpe_cosine(x, module.theta, **call, **options))
    plain = eaves.LRPECosine(3, 8, layout="bhnd", device=device)
    x = x.transpose(1, 2)
    positions, cu_seqlens = torch.arange(9, device=device), torch.tensor([0, 9], device=device)
    same(plain(x, positions=positions), plain(x))
    same(plain(x, cu_seqlens=cu_seqlens), plain(x))


def test_the_angles_fall_geometrically_over_all_heads() -> None:
    theta = eaves.LRPECosine(4, 8, base=100.0).theta
    assert theta.dtype == torch.float32 and theta[0, 0] == 1
    steps = theta.double().flatten()[1:] / theta.double().flatten()[:-1]
    torch.testing.assert_close(steps, torch.full_like(steps, 100.0 ** (-2 / 32)), rtol=1e-6, atol=0)
    assert eaves.LRPECosine(4, 9, axes=2).theta.shape == (4, 4)
    assert eaves.LRPECosine(4, 9, axes=2, theta_features=5).theta.shape == (4, 5)


def test_angles_are_a_buffer_or_a_parameter() -> None:
    fixed, learnable = eaves.LRPECosine(2, 4), eaves.LRPECosine(2, 4, learnable=True)
    assert list(fixed.parameters()) == [] and dict(fixed.named_buffers()).keys() == {"theta"}
    assert dict(learnable.named_parameters()).keys() == {"theta"} and list(learnable.buffers()) == []
    x = random_tensor((2, 5, 2, 4), torch.float32)
    learnable(x).sum().backward()
    assert learnable.theta.grad is not None and learnable.theta.grad.shape == (2, 4)
    with torch.no_grad():
        learnable.theta.mul_(2)
    fixed.load_state_dict(learnable.state_dict())
    same(fixed(x), learnable(x))
    learnable.reset_parameters()
    same(learnable.theta.detach(), eaves.LRPECosine(2, 4).theta)


@pytest.mark.parametrize("learnable", [False, True])
def test_angles_are_not_narrowed_with_the_module(learnable: bool) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), eaves.LRPECosine(2, 4, learnable=learnable))
    theta = module[1].theta.detach().clone()
    for cast in (lambda m: m.to(torch.bfloat16), lambda m: m.half(), lambda m: m.float()):
        cast(module)
        same(module[1].theta.detach(), theta)
        assert isinstance(module[1].theta, torch.nn.Parameter) == learnable
        x = random_tensor((1, 3, 2, 4), module[0].weight.dtype)
        assert module[1](x).dtype == x.dtype
    assert module.to("meta")[1].theta.is_meta
    assert module.to_empty(device="cpu")[1].theta.device.type == "cpu"
    assert eaves.LRPECosine(2, 4, dtype=torch.float64).theta.dtype == torch.float64


@pytest.mark.parametrize(
    ("casts", "expected"),
    [
        ([torch.float64], torch.float64),
        ([torch.float64, torch.float32], torch.float32),
        ([torch.float64, torch.bfloat16], torch.float32),
        ([torch.float64, torch.float16, torch.float32], torch.float32),
        ([torch.bfloat16], torch.float32),
        ([torch.float16], torch.float32),
        ([torch.float16, torch.float64], torch.float64),
    ],
    ids=str,
)
def test_a_module_that_was_cast_encodes_what_its_layers_give(casts: list[torch.dtype], expected: torch.dtype) -> None:
    methods = {torch.float16: "half", torch.bfloat16: "bfloat16", torch.float32: "float", torch.float64: "double"}
    for by_method, learnable in itertools.product((False, True), repeat=2):
        module = torch.nn.Sequential(torch.nn.Linear(4, 4), eaves.LRPECosine(2, 4, learnable=learnable))
        theta = module[1].theta.detach().clone()
        for dtype in casts:
            assert (getattr(module, methods[dtype])() if by_method else module.to(dtype)) is module
        same(module[1].theta.detach(), theta.to(expected))
        assert isinstance(module[1].theta, torch.nn.Parameter) == learnable
        x = random_tensor((1, 3, 2, 4), casts[-1])
        assert module(x).dtype == casts[-1]


def test_the_module_can_be_copied_saved_and_printed() -> None:
    module = eaves.LRPECosine(2, 4, learnable=True, activation="silu")
    x = random_tensor((2, 5, 2, 4), torch.float32)
    same(copy.deepcopy(module)(x), module(x))
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    other = eaves.LRPECosine(2, 4, base=7.0, activation="silu")
    other.load_state_dict(torch.load(file))
    same(other(x), module(x))
    assert repr(module) == "LRPECosine(num_heads=2, head_dim=4, learnable=True, activation='silu')"
    assert (
        repr(eaves.LRPECosine(2, 9, axes=2, layout="bhnd"))
        == "LRPECosine(num_heads=2, head_dim=9, axes=2, layout='bhnd')"
    )
    assert "theta_features=3" in repr(eaves.LRPECosine(2, 4, theta_features=3))
