"""The shared check of the tests of refusals: an error has one type, and its message is one sentence without internal
words."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

# Words that only the authors of the package know.
INTERNAL = ("Exception raised from", ".cpp", ".h:", "aten::", "eaves.", "Error", "aoti", "_forward", "_backward")

Call = tuple[dict[str, Any], type[Exception], str]  # the wrong arguments, the type, a part of the sentence


def assert_refused_by(
    function: Callable[..., object], op: str, kind: type[Exception], sentence: str, *arguments: object, **named: object
) -> None:
    with pytest.raises(kind) as caught:
        function(*arguments, **named)
    message = str(caught.value)
    assert caught.type is kind, caught.type
    assert re.search(sentence, message), message
    assert message.startswith(f"{op}: ") and "\n" not in message, message
    without_names = message.replace("inplace_backward", "")  # a word of the user
    assert not [internal for internal in INTERNAL if internal in without_names], message


def assert_each_refused(
    function: Callable[..., object], op: str, right: dict[str, Any], call: Call, device: Any
) -> None:
    """Asserts the refusal of a call that is right except for some arguments: with a gradient and without, and in the
    same words for tensors without data. `right` begins with the tensor that is differentiated."""
    wrong, kind, sentence = call
    named = {
        name: value.to(device) if isinstance(value, Tensor) and not value.is_meta else value
        for name, value in {**right, **wrong}.items()
    }
    assert_refused_by(function, op, kind, sentence, **named)
    first = next(iter(right))
    if isinstance(named[first], Tensor) and named[first].is_floating_point() and named[first].layout == torch.strided:
        tracked = named[first].detach().requires_grad_()
        assert_refused_by(function, op, kind, sentence, **{**named, first: tracked})
    if all(value.layout == torch.strided for value in named.values() if isinstance(value, Tensor)):
        with FakeTensorMode() as mode:
            fake = {k: mode.from_tensor(v) if isinstance(v, Tensor) else v for k, v in named.items()}
            assert_refused_by(function, op, kind, sentence, **fake)
