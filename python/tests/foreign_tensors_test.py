"""Tensors of other libraries' classes: they work if the class has the operators that eaves uses, else they are refused
by name."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

import eaves
from cross_entropy_test import each
from hf_models import FLOAT32_TOLERANCE as TOLERANCE
from hf_models import assert_same_step, batch, step, tiny_model

try:
    import accelerate
except ImportError:
    accelerate = None

ROWS, FEATURES, CLASSES = 6, 8, 10
X = torch.linspace(-1, 1, ROWS * FEATURES).view(ROWS, FEATURES).sin()
HEAD = torch.linspace(0, 2, CLASSES * FEATURES).view(CLASSES, FEATURES).cos()
TARGET = torch.arange(ROWS)


class Wrapper(Tensor):
    """Has its numbers in another tensor, as quantised tensors of torchao do."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=torch.float32, device=inner.device)

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner


class Refusing(Wrapper):
    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        if function is torch.ops.aten.detach.default:
            return cls(arguments[0].inner)
        raise NotImplementedError(f"dispatch: attempting to run unimplemented operator/function: {function}")


class Declining(Wrapper):
    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        return cls(arguments[0].inner) if function is torch.ops.aten.detach.default else NotImplemented


class Unwrapping(Wrapper):
    """A tensor like a library's that passes every operator on to its inner tensor."""

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        if function is torch.ops.aten.detach.default:  # a Parameter needs a tensor of the class
            return cls(arguments[0].inner)
        return function(*tree_map_only(cls, lambda each: each.inner, (arguments, options or {}))[0], **(options or {}))


class Named(Tensor):
    """A subclass with no operators of its own."""


class Int8Params(torch.nn.Parameter):
    """A parameter like the one of bitsandbytes: the scales are elsewhere."""


OPERATORS: dict[str, Callable[[Any], Tensor]] = {
    "linear_cross_entropy": lambda head: eaves.linear_cross_entropy(X, head, TARGET),
    "with a gradient": lambda head: eaves.linear_cross_entropy(X.clone().requires_grad_(), head, TARGET),
    "linear_log_prob": lambda head: eaves.linear_log_prob(X, head, TARGET),
    "tokens": lambda head: eaves.linear_log_prob(X, head, TARGET.unsqueeze(-1)),
    "tokens with a gradient": lambda head: eaves.linear_log_prob(
        X.clone().requires_grad_(), head, TARGET.unsqueeze(-1)
    ),
    "student": lambda head: eaves.linear_kl_div(X.clone().requires_grad_(), head, X, HEAD.flip(0)),
    "teacher": lambda head: eaves.linear_kl_div(X, HEAD.flip(0), X, head),
    "cross_entropy": lambda logits: eaves.cross_entropy(logits, torch.zeros(CLASSES, dtype=torch.int64)),
    "log_prob": lambda logits: eaves.log_prob(logits, torch.zeros(CLASSES, 2, dtype=torch.int64)),
    "logsumexp": lambda x: eaves.logsumexp(x, 1),
}  # fmt: skip
HEADS = list(OPERATORS)[:7]


@each("name", OPERATORS)
@each("kind", (Refusing, Declining))
def test_one_that_eaves_does_not_read_is_named(kind: type[Wrapper], name: str) -> None:
    expected = r"is a foreign_tensors_test\.(Refusing|Declining) of float32, which eaves does not read.*dequantised"
    with pytest.raises(NotImplementedError, match=rf"(linear_weight|teacher_weight|head|input|logits|x) {expected}"):
        OPERATORS[name](kind(HEAD))


@each("name", HEADS)
def test_the_integers_of_a_quantised_head_are_no_head(name: str) -> None:
    packed = Int8Params(torch.ones(CLASSES * FEATURES // 2, 1, dtype=torch.uint8), requires_grad=False)  # Params4bit
    for head in (Int8Params(HEAD.to(torch.int8), requires_grad=False), packed):
        with pytest.raises(NotImplementedError, match=r"is a foreign_tensors_test\.Int8Params of u?int8, which eaves"):
            OPERATORS[name](head)


@each("name", OPERATORS)
def test_one_with_the_operators_of_a_tensor_works(name: str) -> None:
    expected = OPERATORS[name](HEAD)
    assert torch.equal(OPERATORS[name](Unwrapping(HEAD)), expected)
    assert torch.equal(OPERATORS[name](HEAD.as_subclass(Named)).as_subclass(Tensor), expected)


@each("name", HEADS)
def test_a_parameter_without_numbers_says_why(name: str) -> None:
    with pytest.raises(ValueError, match=r"is on meta, expected cpu .*accelerate offloads"):
        OPERATORS[name](torch.nn.Parameter(HEAD.to("meta")))


# -------------------------------------------------------------------------------------------------- models of eaves.hf


@each("kind", (Refusing, Declining))
def test_patch_refuses_a_quantised_head(kind: type[Wrapper]) -> None:
    model = tiny_model()
    model.lm_head.weight = torch.nn.Parameter(kind(model.lm_head.weight.detach()), requires_grad=False)
    with pytest.raises(NotImplementedError, match=r"head is a foreign_tensors_test\.\w+, .*out of the quantisation"):
        eaves.hf.patch(model)
    assert type(model.lm_head) is torch.nn.Linear


def test_patch_takes_a_head_that_can_be_multiplied() -> None:
    expected, model = tiny_model()(**batch()).loss, tiny_model()
    model.lm_head.weight = torch.nn.Parameter(Unwrapping(model.lm_head.weight.detach()), requires_grad=False)
    torch.testing.assert_close(eaves.hf.patch(model)(**batch()).loss, expected)


def spread(model: Any) -> Any:
    """The model spread over devices as accelerate does it, with hooks in place of forwards."""
    return accelerate.dispatch_model(model, {"model": "cpu", "lm_head": "cpu"}, main_device="cpu", force_hooks=True)


@each("is_patched_last", (True, False))
@each("name", ("llama", "qwen2"))  # qwen2: tied
def test_a_model_with_a_device_map_keeps_its_head_on_one(name: str, is_patched_last: bool) -> None:
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    expected = step(tiny_model(name))
    model = eaves.hf.patch(spread(tiny_model(name))) if is_patched_last else spread(eaves.hf.patch(tiny_model(name)))
    found = step(model)
    assert found.output.logits is None
    assert_same_step(found, expected, TOLERANCE)
    copied = step(copy.deepcopy(model))
    assert copied.output.logits is None
    assert_same_step(copied, expected, TOLERANCE)
    eaves.hf.unpatch(model)
    found = step(model)
    assert found.output.logits is not None
    assert_same_step(found, expected, TOLERANCE)
    accelerate.hooks.remove_hook_from_module(model, recurse=True)
    assert_same_step(step(model), expected, TOLERANCE)


def test_a_head_that_is_offloaded_is_refused_with_what_to_do() -> None:
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    said = r"accelerate offloads the weight of the head, .*device_map"
    with pytest.raises(NotImplementedError, match=rf"^patch: {said}"):
        eaves.hf.patch(accelerate.cpu_offload(tiny_model(), "cpu"))
    model = accelerate.cpu_offload(eaves.hf.patch(tiny_model()), "cpu")
    with pytest.raises(NotImplementedError, match=rf"^eaves\.hf: {said}"):
        model(**batch())
