"""Arguments that eaves.linear_kl_div refuses."""

from typing import Any

import pytest
import torch

import eaves
from chunked_cases import OF_HEADS
from cross_entropy_test import each
from refusals import Call, assert_each_refused

X, HEAD, Y, TEACHER = torch.zeros(4, 3), torch.zeros(5, 3), torch.zeros(4, 2), torch.zeros(5, 2)


@each("call", [
    *OF_HEADS,
    ({"hidden": torch.tensor(0.0)}, ValueError, "hidden has no axes, expected at least the axis of the features"),
    ({"head": torch.nn.Linear(3, 5), "bias": torch.zeros(5)}, ValueError,
        "head is a torch.nn.Linear with a bias; leave bias out"),
    ({"teacher_head": torch.nn.Linear(2, 5), "teacher_bias": torch.zeros(5)}, ValueError,
        "teacher_head is a torch.nn.Linear with a bias; leave teacher_bias out"),
    ({"head": HEAD[:0]}, ValueError, r"head has shape \[0, 3\], expected at least one class"),
    ({"teacher_head": TEACHER.half()}, ValueError, "teacher_head has dtype float16, expected float32 .as teacher_hidd"),
    ({"teacher_hidden": Y[:3]}, ValueError, r"teacher_hidden has shape \[3, 2\], expected \[4, 2\] \(rows as hid"),
    ({"teacher_head": torch.zeros(7, 2)}, ValueError, r"teacher_head has shape \[7, 2\], expected \[5, 2\] \(cla"),
    ({"teacher_head": TEACHER.to_sparse()}, NotImplementedError, "teacher_head is torch.sparse_coo on"),
    ({"teacher_head": TEACHER.to("meta")}, ValueError, "teacher_head is on meta, expected (cpu|cuda)"),
    ({"teacher_hidden": Y.clone().requires_grad_()}, NotImplementedError, "teacher_hidden requires a gradient"),
    ({"teacher_bias": torch.zeros(5).half()}, ValueError, "teacher_bias has dtype float16, expected float32"),
    ({"targets": torch.zeros(4)}, ValueError, "targets has dtype float32, expected int64 or int32"),
    ({"targets": torch.zeros(3).long()}, ValueError, r"targets has shape \[3\], expected \[4\] \(one per row of hid"),
    ({"divergence": "kl"}, ValueError, "divergence is 'kl', expected one of forward, reverse, jsd, total_variation"),
    ({"divergence": 1}, TypeError, "divergence is 1, expected"),
    ({"beta": -1}, ValueError, "beta is -1, expected a number between 0 and 1"),
    ({"beta": "0.5"}, TypeError, "beta is '0.5', expected a number between 0 and 1"),
    ({"temperature": 0}, ValueError, "temperature is 0, expected a positive number"),
    ({"temperature": torch.ones(3)}, ValueError, r"temperature has shape \[3\], expected \[4\] \(one per row of hid"),
    ({"ignore_index": 0.5, "targets": torch.zeros(4).long()}, TypeError, r"ignore_index is 0\.5, expected an int"),
    ({"reduction": "batchmean"}, ValueError, "reduction is 'batchmean', expected"),
    ({"reduction": "sum", "normalizer": 2.0}, ValueError, "normalizer is given, but only the mean divides"),
    ({"workspace_bytes": 1.5}, TypeError, r"workspace_bytes is 1\.5, expected an int"),
    ({"softcap": 0}, ValueError, "softcap is 0, expected a positive number"),
    ({"teacher_scale": -1.0}, ValueError, r"teacher_scale is -1\.0, expected a positive number"),
    ({"z_loss": 0.1}, TypeError, "got an unexpected keyword argument 'z_loss'"),
    ({"return_lse": True}, TypeError, "got an unexpected keyword argument 'return_lse'; pass outputs=\"lse\""),
    ({"outputs": "argmax"}, ValueError, "outputs has 'argmax', expected names among divergence, hard_loss, entropy"),
    ({"row_weight": torch.ones(5)}, ValueError, r"row_weight has shape \[5\], expected \[4\] \(one per row of hidden"),
    ({"hard_weight": 0.5}, ValueError, "hard_weight is given, but no targets; pass a class for each row"),
    ({"outputs": "hard_loss"}, ValueError, 'outputs has "hard_loss", but no targets'),
    ({"hard_weight": -1, "targets": torch.zeros(4).long()}, ValueError, "hard_weight is -1, expected a number that is"),
    ({"skip_ignored": 1}, TypeError, "skip_ignored is 1, expected a bool"),
    ({"classes": 6}, ValueError, "classes is 6, expected 1 to the number of classes in"),
    ({"grad_weight_out": torch.zeros(4, 3)}, ValueError, r"grad_weight_out has shape \[4, 3\], expected \[5, 3\]"),
    ({"teacher_logits": torch.zeros(4, 5)}, ValueError, "the teacher is given by teacher_hidden and teacher_logit"),
    ({"teacher_head": None}, ValueError, "the teacher is given by teacher_hidden, expected one of teacher_hidden"),
    ({"teacher_hidden": None}, ValueError, "the teacher is given by nothing, expected one of teacher_hidden with"),
    ({"teacher_rest": "tail"}, ValueError, "teacher_rest is 'tail', expected one of class, renormalize, zero, ignore"),
    ({"linear_bias": HEAD[:, 0]}, TypeError, "got an unexpected keyword argument 'linear_bias'; pass bias"),
])  # fmt: skip
def test_refusals(call: Call, any_device: torch.device) -> None:
    right = {"hidden": X, "head": HEAD, "teacher_hidden": Y, "teacher_head": TEACHER}
    assert_each_refused(eaves.linear_kl_div, "linear_kl_div", right, call, any_device)


TOKENS = torch.tensor([[0, 1], [2, 4], [3, -1], [1, 0]])
LOG_PROBS = torch.full((4, 2), -1.0)


@each("call", [
    ({"teacher_logits": torch.zeros(4, 6)}, ValueError, r"teacher_logits has shape \[4, 6\], expected \[4, 5\] \(rows"),
    ({"teacher_logits": torch.zeros(4, 5).long()}, ValueError, "teacher_logits has dtype int64, expected a floating-p"),
    ({"teacher_logits": torch.zeros(4, 5, requires_grad=True)}, NotImplementedError, "teacher_logits requires a"),
    ({"teacher_log_probs": torch.zeros(4, 5), "teacher_softcap": 3.0}, ValueError, "teacher_softcap is given, which t"),
    ({"teacher_logits": torch.zeros(4, 5), "teacher_bias": torch.zeros(5)}, ValueError, "teacher_bias is given, which"),
    ({"teacher_probs": torch.ones(4, 2), "teacher_tokens": TOKENS}, ValueError, "teacher_tokens is given beside teach"),
    ({"teacher_log_probs": LOG_PROBS, "teacher_tokens": TOKENS[0]}, ValueError, r"teacher_tokens has shape \[2\], exp"),
    ({"teacher_log_probs": LOG_PROBS[:, :1], "teacher_tokens": TOKENS}, ValueError, r"teacher_log_probs has shape \[4"),
    ({"teacher_log_probs": LOG_PROBS, "teacher_tokens": TOKENS.float()}, ValueError, "teacher_tokens has dtype float3"),
    ({"teacher_log_probs": LOG_PROBS, "teacher_tokens": TOKENS, "divergence": "reverse", "teacher_rest": "zero"},
        ValueError, 'divergence is "reverse", which is infinite if the teacher is 0 outside of its top K'),
    ({"teacher_log_probs": LOG_PROBS, "teacher_tokens": TOKENS, "outputs": "teacher_lse"}, ValueError, 'has "teacher_'),
    ({"teacher_log_probs": LOG_PROBS, "teacher_tokens": TOKENS, "temperature": 2.0}, ValueError,
        'temperature is given beside teacher_tokens and teacher_rest="class".*pass log-probabilities served at the t'),
    ({"teacher_log_probs": LOG_PROBS, "teacher_tokens": TOKENS, "temperature": torch.ones(4), "teacher_rest": "ignore"},
        ValueError, 'teacher_rest="ignore", but a top K does not determine the rest'),
    ({"teacher_log_probs": LOG_PROBS, "teacher_tokens": TOKENS, "temperature": "2"}, TypeError, "temperature is '2', "),
])  # fmt: skip
def test_refusals_of_a_given_teacher(call: Call, any_device: torch.device) -> None:
    assert_each_refused(eaves.linear_kl_div, "linear_kl_div", {"hidden": X, "head": HEAD}, call, any_device)


def test_a_temperature_of_1_goes_with_a_top_k_and_its_rest() -> None:
    given = {"teacher_tokens": TOKENS, "teacher_log_probs": LOG_PROBS}
    assert torch.equal(eaves.linear_kl_div(X, HEAD, **given, temperature=1), eaves.linear_kl_div(X, HEAD, **given))


@each("case", [
    ({"teacher_tokens": torch.tensor([[0, 1], [2, 5], [3, -1], [1, 0]])}, r"teacher_tokens\[1, 1\] is 5, expected 0 t"),
    ({"teacher_tokens": torch.tensor([[0, 1], [2, 4], [3, 3], [1, 0]])}, r"teacher_tokens\[2\] has the token 3 twice"),
    ({"temperature": torch.tensor([1.0, -1, 1, 1]), "teacher_rest": "zero"},
        r"temperature\[1\] is -1\.0, expected a positive number"),
    ({"targets": torch.tensor([0, 1, 5, 2]), "hard_weight": 1}, r"targets\[2\] is 5, expected 0 to 4, or ignore_index"),
])  # fmt: skip
def test_values_are_looked_at_on_the_cpu(case: tuple[dict[str, Any], str]) -> None:
    wrong, sentence = case
    given: dict[str, Any] = {"teacher_tokens": TOKENS, "teacher_log_probs": LOG_PROBS, **wrong}
    with pytest.raises(ValueError, match=rf"^linear_kl_div: {sentence}"):
        eaves.linear_kl_div(X, HEAD, **given)
    with pytest.raises(ValueError, match="grad_weight_out overlaps head, expected memory of its own"):
        eaves.linear_kl_div(X, HEAD, Y, TEACHER, grad_weight_out=HEAD)


def test_tensors_of_two_devices_are_refused(cuda: torch.device) -> None:
    with pytest.raises(ValueError, match=r"^linear_kl_div: teacher_head is on cpu, expected cuda"):
        eaves.linear_kl_div(X.to(cuda), HEAD.to(cuda), Y.to(cuda), TEACHER)
