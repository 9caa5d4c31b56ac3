"""Heads that DeepSpeed's ZeRO-3 has cut, with a stand-in for its parameters: correct if they are gathered, and
otherwise refused in one sentence."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import eaves
from cross_entropy_test import each

ROWS, FEATURES, CLASSES = 6, 8, 10


class Gathered:
    """A context like deepspeed.zero.GatheredParameters: its parameters have data inside it, and are empty before and
    after."""

    def __init__(self, *parameters: Any) -> None:
        self._parameters = parameters

    def __enter__(self) -> None:
        for parameter in self._parameters:
            parameter.data = parameter.whole.clone()

    def __exit__(self, *_: object) -> None:
        for parameter in self._parameters:
            parameter.data = torch.empty(0, dtype=parameter.dtype)


def in_pieces(whole: Tensor, requires_grad: bool) -> Any:
    parameter: Any = torch.nn.Parameter(whole.clone(), requires_grad)
    parameter.ds_id, parameter.ds_shape, parameter.whole = 3, whole.shape, whole
    if requires_grad:  # DeepSpeed keeps this node, for its hook
        parameter.accumulates = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
    parameter.data = torch.empty(0, dtype=whole.dtype)
    return parameter


TARGET = torch.arange(ROWS)
TOKENS = torch.stack([TARGET, TARGET + 1], -1)
TEACHER = torch.linspace(-1, 1, ROWS * FEATURES).view(ROWS, FEATURES), torch.eye(CLASSES, FEATURES)

# Functions of hidden states and a head. The marked ones do not read a frozen head again in the backward.
OPERATORS: dict[str, tuple[Callable[[Tensor, Any], Tensor], bool]] = {
    "speed": (lambda x, head: eaves.linear_cross_entropy(x, head, TARGET), True),
    "recompute": (lambda x, head: eaves.linear_cross_entropy(x, head, TARGET, algorithm="recompute"), False),
    "classes": (lambda x, head: eaves.linear_cross_entropy(x, head, TARGET, classes=8, algorithm="recompute"), True),
    "log_prob": (lambda x, head: eaves.linear_log_prob(x, head, TARGET).sum(), True),
    "tokens": (lambda x, head: eaves.linear_log_prob(x, head, TOKENS).sum(), False),
    "temperature": (lambda x, head: eaves.linear_log_prob(x, head, TARGET, temperature=torch.ones(ROWS)).sum(), False),
    "student": (lambda x, head: eaves.linear_kl_div(x, head, *TEACHER), True),
    "student of rows": (lambda x, head: eaves.linear_kl_div(x, head, *TEACHER, reduction="none").sum(), False),
    "teacher": (lambda x, head: eaves.linear_kl_div(x, torch.eye(CLASSES, FEATURES), TEACHER[0], head), True),
}


@each("requires_grad", (True, False))
@each("name", OPERATORS)
def test_a_head_is_gathered_around_the_call_and_its_backward(name: str, requires_grad: bool) -> None:
    function, is_read_once = OPERATORS[name]
    whole = torch.linspace(-1, 1, CLASSES * FEATURES).view(CLASSES, FEATURES).sin()
    inputs = [torch.linspace(0, 2, ROWS * FEATURES).view(ROWS, FEATURES).cos().requires_grad_() for _ in range(3)]
    expected = whole.clone().requires_grad_(requires_grad)
    function(inputs[0], expected).backward()

    head = in_pieces(whole, requires_grad)
    with pytest.raises(NotImplementedError, match=r"(linear_weight|head|teacher_weight) has no elements .*ZeRO-3"):
        function(inputs[1], head)
    with Gathered(head):
        function(inputs[1], head).backward()
    assert torch.equal(inputs[1].grad, inputs[0].grad)
    if expected.grad is not None:
        assert torch.equal(head.grad, expected.grad)

    head = in_pieces(whole, requires_grad)
    with Gathered(head):
        loss = function(inputs[2], head)
    if name == "teacher" or (is_read_once and not requires_grad):
        loss.backward()
        assert torch.equal(inputs[2].grad, inputs[0].grad)
    elif name != "classes":  # torch computes the gradient of the cut, so the error is torch's
        with pytest.raises(NotImplementedError, match="to the end of the backward"):
            loss.backward()
    with Gathered(head):  # as DeepSpeed's hooks do before a backward (register_external_parameter)
        x = inputs[2].detach().requires_grad_()
        loss = function(x, head)
        head.data = torch.empty(0)
        head.data = whole.clone()
        loss.backward()
        assert torch.equal(x.grad, inputs[0].grad)


def test_a_bias_in_pieces_is_refused_too() -> None:
    bias, x, whole = in_pieces(torch.zeros(CLASSES), True), TEACHER[0], torch.eye(CLASSES, FEATURES)
    for call in (
        lambda: eaves.linear_cross_entropy(x, whole, TARGET, linear_bias=bias),
        lambda: eaves.linear_log_prob(x, whole, TOKENS, bias=bias),
        lambda: eaves.linear_kl_div(x, whole, *TEACHER, teacher_bias=bias),
    ):
        with pytest.raises(NotImplementedError, match=r"bias has no elements .*ZeRO-3"):
            call()
