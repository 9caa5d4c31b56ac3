"""Refusals of eaves.log_prob and eaves.linear_log_prob, with one token for each row and with several."""

import math

import pytest
import torch
from torch import Tensor

import eaves
from chunked_cases import IGNORED, OF_HEADS
from cross_entropy_test import each
from log_prob_test import rows_and_head
from refusals import Call, assert_each_refused, assert_refused_by

NAMES = "entropy, is_top1, sum_sq, mean_logit"
X, HEAD, TOKENS = torch.zeros(4, 3), torch.zeros(5, 3), torch.zeros(4, dtype=torch.int64)
SEVERAL = torch.zeros(4, 2, dtype=torch.int64)
OF_BOTH: list[Call] = [
    ({"tokens": None}, TypeError, r"tokens is a NoneType, expected a torch\.Tensor"),
    *(({"tokens": tokens.to(dtype)}, ValueError, f"tokens has dtype {str(dtype)[6:]}, expected int(32|64) or int")
      for tokens in (TOKENS, SEVERAL) for dtype in (torch.float32, torch.uint8)),
    ({"tokens": TOKENS[:2]}, ValueError, r"tokens has shape \[2\], expected \[4\]"),
    ({"tokens": SEVERAL[:3]}, ValueError, r"tokens has shape \[3, 2\], expected \[4\] or \[4, K\] \(one or K per row"),
    ({"tokens": SEVERAL.to_sparse()}, NotImplementedError, r"tokens is torch\.sparse_coo on"),
    ({"tokens": SEVERAL.to("meta")}, ValueError, "tokens is on meta, expected (cpu|cuda)"),
    ({"temperature": torch.ones(4, 1)}, ValueError, r"temperature has shape \[4, 1\], expected \[4\] \(one per row of"),
    ({"temperature": torch.ones(3)}, ValueError, r"temperature has shape \[3\], expected \[4\] \(one per row of"),
    ({"temperature": torch.ones(4).long()}, ValueError, "temperature has dtype int64, expected a floating-point type"),
    ({"temperature": torch.ones(4).to("meta")}, ValueError, "temperature is on meta, expected (cpu|cuda)"),
    ({"temperature": torch.ones(4, requires_grad=True)}, NotImplementedError, "temperature requires a gradient"),
    ({"temperature": 0}, ValueError, "temperature is 0, expected a positive number .*float32"),
    ({"temperature": "1"}, TypeError, "temperature is '1', expected a positive number"),
    ({"softcap": -1.0}, ValueError, r"softcap is -1\.0, expected a positive number"),
    *(({name: "2", "temperature": temperature}, TypeError, f"{name} is '2', expected a positive number")
      for name in ("softcap", "scale") for temperature in (2.0, torch.ones(4))),
    ({"scale": 1e38, "temperature": 0.1}, ValueError, r"scale / temperature is 1e\+39, expected a positive number"),
    ({"ignore_index": 1.5}, TypeError, r"ignore_index is 1\.5, expected an int"),
    ({"outputs": "argmax"}, ValueError, f"outputs has 'argmax', expected names among {NAMES}$"),
    ({"outputs": ["entropy", "top1"]}, ValueError, f"outputs has 'top1', expected names among {NAMES}$"),
    ({"outputs": ("entropy", "entropy")}, ValueError, r"outputs is .*, expected each name once"),
    *(({"outputs": value}, TypeError, rf"outputs is {value}, expected names among {NAMES}, or \(\) for none$")
      for value in (True, 1)),
    ({"return_top1": True}, TypeError, "unexpected keyword argument 'return_top1'; pass outputs=\"is_top1\"$"),
    ({"return_entropy": True}, TypeError, "unexpected keyword argument 'return_entropy'; pass outputs=\"entropy\"$"),
]  # fmt: skip


class Doubled(torch.nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


OF_ANY_HEAD: list[Call] = [
    *OF_BOTH,
    *OF_HEADS,
    ({"hidden": X[0, 0]}, ValueError, "hidden has no axes"),
    ({"hidden": None, "temperature": torch.ones(4)}, TypeError, r"hidden is a NoneType, expected a torch\.Tensor"),
    ({"head": None}, TypeError, r"head is a NoneType, expected a torch\.Tensor"),
    ({"head": Doubled(3, 5)}, TypeError, r"head is a Doubled with hooks or a forward of its own, expected"),
    ({"head": torch.nn.Linear(3, 5), "bias": torch.zeros(5)}, ValueError,
     r"head is a torch\.nn\.Linear with a bias; leave bias out"),
    ({"algorithm": "input"}, ValueError, "algorithm is 'input', expected"),
    ({"tokens": SEVERAL, "algorithm": "speed"}, NotImplementedError,
     'algorithm is "speed", which needs one token for each row and a num'),
    ({"skip_ignored": 1}, TypeError, "skip_ignored is 1, expected a bool"),
    ({"grad_weight_dtype": torch.int8}, ValueError, "grad_weight_dtype is int8, expected float32"),
    ({"grad_weight_out": torch.zeros(5, 2)}, ValueError, r"grad_weight_out has shape \[5, 2\], .*as head"),
]  # fmt: skip


@each("call", OF_ANY_HEAD)
def test_refusals_of_a_head_speak_of_its_arguments(call: Call, any_device: torch.device) -> None:
    for tokens in (TOKENS, SEVERAL):
        right = {"hidden": X, "head": HEAD, "tokens": tokens}
        assert_each_refused(eaves.linear_log_prob, "linear_log_prob", right, call, any_device)


@each("call", [
    *OF_BOTH,
    ({"logits": None}, TypeError, r"logits is a NoneType, expected a torch\.Tensor"),
    ({"logits": X.long()}, ValueError, "logits has dtype int64, expected a floating-point type"),
    ({"logits": X[:, :0]}, ValueError, r"logits has shape \[4, 0\], expected at least one class"),
    ({"inplace_backward": 1}, TypeError, "inplace_backward is 1, expected a bool"),
])  # fmt: skip
def test_refusals_of_logits_speak_of_its_arguments(call: Call, any_device: torch.device) -> None:
    for tokens in (TOKENS, SEVERAL):
        assert_each_refused(eaves.log_prob, "log_prob", {"logits": X, "tokens": tokens}, call, any_device)


@each("value", (0.0, -1.0, math.inf, math.nan))
def test_on_the_cpu_values_that_are_none_are_refused(value: float) -> None:
    temperature = torch.ones(2, 3)
    temperature[1, 2] = value
    for function, tensors in ((eaves.log_prob, (torch.zeros(2, 3, 5),)),
                              (eaves.linear_log_prob, (torch.zeros(2, 3, 4), torch.zeros(5, 4)))):  # fmt: skip
        tokens = torch.zeros(2, 3, 4, dtype=torch.int64)
        sentence = rf"temperature\[1, 2\] is {value}, expected a positive number .*float32"
        assert_refused_by(function, function.__name__, ValueError, sentence, *tensors, tokens, temperature=temperature)
        tokens[1, 0, 3] = 5 if value else -1
        sentence = rf"tokens\[1, 0, 3\] is {tokens[1, 0, 3]}, expected 0 to 4, or ignore_index -100"
        assert_refused_by(function, function.__name__, ValueError, sentence, *tensors, tokens)
        # The message has the temperature's own index, although the rows have more axes.
        for shape, place in (((2, 1), r"\[1, 0\]"), ((2,), r"\[1\]"), ((), "")):
            wrong = temperature[:, 2].contiguous().view(2, 1)[-math.prod(shape) :].view(shape)
            with pytest.raises(ValueError, match=rf"temperature{place} is {value}, expected"):
                function(*tensors, tokens.clamp(0, 4), temperature=wrong)


def test_on_a_gpu_a_row_with_a_token_that_is_no_class_is_nan(cuda: torch.device) -> None:
    hidden, head, _ = rows_and_head((3,), 33, torch.float32, cuda)
    hidden.requires_grad_()
    tokens = torch.tensor([[1, 2], [33, 3], [4, IGNORED]], device=cuda)
    for temperature in (None, torch.ones(3, device=cuda)):
        found = eaves.linear_log_prob(hidden, head, tokens, temperature=temperature)
        (grad,) = torch.autograd.grad(found.sum(), hidden)
        assert found[1].isnan().all() and found[[0, 2]].isfinite().all()
        assert grad[1].isnan().all() and grad[[0, 2]].isfinite().all()
