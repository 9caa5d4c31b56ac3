"""Plain calls, whose options are numbers or defaults, skip the checks of Python (python/eaves/_torch/operator.py). They
return the numbers of checked calls, refuse the same arguments in the same words, and leave as much behind.

A dispatch mode makes a call a checked one, so each case runs with a mode and without.
"""

from collections.abc import Callable
from contextlib import nullcontext
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import eaves
from comparison import FLOATING_POINT
from cross_entropy_test import each

TARGET = torch.tensor([2, 0, -100, 1, 2])
HIDDEN, HEAD, BIAS, LOGITS = (torch.randn(shape) for shape in ((5, 4), (3, 4), (3,), (5, 3)))

# Hidden states, a head, a bias, logits and a target.
CALLS: dict[str, Callable[..., Tensor]] = {
    "cross_entropy": lambda x, head, bias, logits, target: eaves.cross_entropy(logits, target),
    "in place": lambda x, head, bias, logits, target: eaves.cross_entropy(logits * 1, target, inplace_backward=True),
    "log_prob": lambda x, head, bias, logits, target: eaves.log_prob(logits, target),
    "linear_cross_entropy": lambda x, head, bias, logits, target: eaves.linear_cross_entropy(
        x, head, target, linear_bias=bias
    ),
    "linear_cross_entropy of numbers": lambda x, head, bias, logits, target: eaves.linear_cross_entropy(
        x, head, target, linear_bias=bias, label_smoothing=0.1, scale=0.5, softcap=2, z_loss=0.1, ignore_index=None
    ),
    "linear_cross_entropy, sum": lambda x, head, bias, logits, target: eaves.linear_cross_entropy(
        x, head, target, linear_bias=bias, reduction="sum"
    ),
    "linear_cross_entropy of rows": lambda x, head, bias, logits, target: eaves.linear_cross_entropy(
        x, head, target, linear_bias=bias, reduction="none"
    ),
    "linear_log_prob": lambda x, head, bias, logits, target: eaves.linear_log_prob(x, head, target, bias=bias),
}


class Through(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


def tensors_of(dtype: torch.dtype, wanted: tuple[bool, ...], device: torch.device) -> list[Tensor]:
    made = [each.to(device, dtype, copy=True) for each in (HIDDEN, HEAD, BIAS, LOGITS)]
    return [each.requires_grad_(wants) for each, wants in zip(made, wanted, strict=True)]


@each("name", CALLS)
@each("dtype", FLOATING_POINT)
def test_a_plain_call_gives_the_numbers_of_a_checked_one(
    name: str, dtype: torch.dtype, any_device: torch.device
) -> None:
    def results(wanted: tuple[bool, ...], factor: float, is_checked: bool) -> list[Tensor | None]:
        tensors = tensors_of(dtype, wanted, any_device)
        with Through() if is_checked else nullcontext():
            out = CALLS[name](*tensors, TARGET.to(any_device))
        if out.requires_grad:  # no backward multiplies by a factor of 1
            out.backward(torch.full_like(out, factor))
        return [out.detach(), *(each.grad for each in tensors)]

    # The wanted gradients decide which kernels a head runs.
    for wanted in product((True, False), repeat=3):
        for factor in (1.0, 2.5):
            plain, checked = (results((*wanted, any(wanted)), factor, is_checked) for is_checked in (False, True))
            torch.testing.assert_close(plain, checked, rtol=0, atol=0)
            of_plain, of_checked = plain[0], checked[0]
            assert of_plain is not None and of_checked is not None
            assert torch.equal(of_plain.signbit(), of_checked.signbit())  # an ignored row has 0, not -0


@each("name", [name for name in CALLS if name.startswith("linear")])
def test_reductions_and_numbers_leave_a_call_of_a_head_a_plain_one(name: str) -> None:
    out = CALLS[name](*tensors_of(torch.float32, (True,) * 4, torch.device("cpu")), TARGET)
    assert out.grad_fn is not None and out.grad_fn.name().startswith("Plain")


# For each mistake, the index of the wrong tensor in the order of CALLS, and the tensor.
WRONG: dict[str, tuple[int, Tensor]] = {
    "shape of the target": (4, TARGET[:3]),
    "label": (4, TARGET + 3),
    "dtype of the target": (4, TARGET.to(torch.int16)),
    "complex target": (4, TARGET.to(torch.complex64)),
    "features": (0, torch.randn(5, 3)),
    "dtype of the head": (1, torch.randn(3, 4, dtype=torch.float64)),
    "no classes": (1, torch.randn(0, 4)),
    "shape of the bias": (2, torch.randn(4)),
    "dtype of the logits": (3, torch.ones(5, 3, dtype=torch.int64)),
    "sparse logits": (3, torch.randn(5, 3).to_sparse()),
    "meta target": (4, TARGET.to("meta")),
}


@each("wrong", WRONG)
@each("wants_grad", [True, False])
def test_a_plain_call_refuses_in_the_words_of_a_checked_one(wrong: str, wants_grad: bool) -> None:
    index, tensor = WRONG[wrong]
    is_refused = []
    for call in CALLS.values():
        given: list[Any] = [*tensors_of(torch.float32, (wants_grad,) * 4, torch.device("cpu")), TARGET]
        given[index] = tensor
        said = []
        for mode in (nullcontext(), Through()):
            try:
                with mode:
                    call(*given)
                said.append("")
            except (TypeError, ValueError, NotImplementedError) as error:
                said.append(f"{type(error).__name__} {error}")
        assert said[0] == said[1]
        is_refused.append(said[0] != "")
    assert any(is_refused)


def test_a_device_that_computes_on_the_cpu_for_another_is_told_apart_from_it() -> None:
    backend = pytest.importorskip("torch._lazy.ts_backend", reason="this PyTorch has no lazy tensors")
    backend.init()
    made = [*tensors_of(torch.float32, (True,) * 4, torch.device("cpu")), TARGET]
    for name, call in CALLS.items():
        for index in [4, 2] if name.startswith("linear") else [4]:
            with pytest.raises(ValueError, match=r"is on lazy:0, expected cpu \(as"):
                call(*(tensor.to("lazy") if place == index else tensor for place, tensor in enumerate(made)))
        if name != "in place":
            lazy = [tensor.detach().to("lazy") for tensor in made]
            torch.testing.assert_close(call(*lazy).cpu(), call(*made).detach())


def test_what_is_wrong_with_the_target_is_said_before_what_in_place_refuses() -> None:
    leaf = LOGITS.clone().requires_grad_()
    with pytest.raises(ValueError, match=r"^cross_entropy: target has shape \[3\]"):
        eaves.cross_entropy(leaf, TARGET[:3], inplace_backward=True)
    with pytest.raises(RuntimeError, match=r"^cross_entropy: input is a leaf"):
        eaves.cross_entropy(leaf, TARGET, inplace_backward=True)


@each("wrong", ["shape of the target", "label"])
@each("label_smoothing", [0, 0.1])  # a plain call, and a checked one
def test_a_refused_call_in_place_leaves_the_logits_and_their_graph(wrong: str, label_smoothing: float) -> None:
    x = LOGITS.clone().requires_grad_()
    logits = x.exp()  # its backward reads the logits, and fails if their version has changed
    before, node = logits.detach().clone(), logits.grad_fn
    with pytest.raises(ValueError):
        eaves.cross_entropy(logits, WRONG[wrong][1], inplace_backward=True, label_smoothing=label_smoothing)
    assert torch.equal(logits, before) and logits._version == 0 and logits.grad_fn is node
    logits.sum().backward()
    torch.testing.assert_close(x.grad, before)


@each("name", CALLS)
def test_the_tangent_of_an_upstream_gradient_is_refused_and_not_lost(name: str) -> None:
    tensors = tensors_of(torch.float32, (True,) * 4, torch.device("cpu"))
    out = CALLS[name](*tensors, TARGET)
    with forward_ad.dual_level():
        upstream = forward_ad.make_dual(torch.ones_like(out), torch.ones_like(out))
        with pytest.raises(NotImplementedError, match=r"forward-mode|no derivative"):
            out.backward(upstream)


@each("name", CALLS)
def test_a_version_that_changes_before_the_backward_is_seen(name: str) -> None:
    """The backward sees the change if it reads a tensor again. linear_cross_entropy already has its gradients, and a
    call in place owns its gradient."""
    tensors = tensors_of(torch.float32, (True,) * 4, torch.device("cpu"))
    target = TARGET.clone()
    out = CALLS[name](*tensors, target)
    target.zero_()
    if name == "in place" or (name.startswith("linear_cross_entropy") and name != "linear_cross_entropy of rows"):
        out.sum().backward()
        return
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@each("dynamic", [None, True])
@each("name", ["cross_entropy", "linear_cross_entropy"])
def test_an_option_that_has_its_default_at_times_compiles_no_more_often(
    name: str, dynamic: bool | None, fresh_compiler: None
) -> None:
    """The compiler does not trace the question whether a call is plain, which would compare each option with its
    default."""
    target = TARGET.clamp(min=0)

    def loss(label_smoothing: float, z_loss: float, ignore_index: int) -> Tensor:
        options: dict[str, Any] = {"label_smoothing": label_smoothing, "z_loss": z_loss, "ignore_index": ignore_index}
        if name == "cross_entropy":
            return eaves.cross_entropy(LOGITS, target, **options)
        return eaves.linear_cross_entropy(HIDDEN, HEAD, target, **options)

    counter = CompileCounter()
    compiled = torch.compile(loss, backend=counter, fullgraph=True, dynamic=dynamic)
    for options in ((0.1, 0.2, -100), (0.2, 0.3, 5), (0.0, 0.1, 7), (0.4, 0.0, -100), (0.0, 0.0, -100), (0.5, 0.5, 8)):
        torch.testing.assert_close(compiled(*options), loss(*options))
    assert counter.frame_count <= (1 if dynamic else 2)
