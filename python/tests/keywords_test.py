"""Keywords of other functions, and of other libraries: each function says the one to pass."""

import re
from typing import Any

import pytest
import torch

import eaves

X, HEAD, TARGET = torch.zeros(4, 3), torch.zeros(5, 3), torch.zeros(4, dtype=torch.int64)


@pytest.mark.parametrize(("name", "given", "keywords", "sentence"), [
    ("cross_entropy", (), {"logits": X, "targets": TARGET},
        "cross_entropy: got unexpected keyword arguments 'logits', 'targets'; pass input; pass target"),
    ("linear_cross_entropy", (X, HEAD), {"labels": TARGET},
        "linear_cross_entropy: got an unexpected keyword argument 'labels'; pass target"),
    ("linear_cross_entropy", (), {"e": X, "c": HEAD, "target": TARGET},
        "linear_cross_entropy: got unexpected keyword arguments 'e', 'c'; pass input; pass linear_weight"),
    ("linear_cross_entropy", (X, HEAD), {"shift": False, "target": TARGET}, "'shift'; leave shift out"),
    ("linear_cross_entropy", (X, HEAD), {"accum_c_fp32": False, "target": TARGET}, "leave accum_c_fp32 out"),
    ("linear_cross_entropy", (X, HEAD), {"accum_c_fp32": True, "target": TARGET},
        "pass grad_weight_dtype=torch.float32"),
    ("linear_cross_entropy", (X, HEAD), {"accum_e_fp32": True, "target": TARGET}, "the rows' gradient is summed in"),
    ("cross_entropy", (X, TARGET), {"mask": TARGET}, "'mask'; pass row_weight"),
    ("linear_log_prob", (X, HEAD, TARGET), {"mask": TARGET}, "'mask'; pass -100 in tokens for rows that do not count"),
    ("linear_cross_entropy", (X, HEAD), {}, "linear_cross_entropy() missing 1 required positional argument: 'tar"),
    ("linear_log_prob", (X, HEAD), {"targets": TARGET}, "'targets'; pass tokens"),
    ("log_prob", (X,), {"index": TARGET}, "'index'; pass tokens"),
    ("linear_kl_div", (), {"input": X, "linear_weight": HEAD, "teacher_input": X, "teacher_weight": HEAD},
        "; pass hidden; pass head; pass teacher_hidden; pass teacher_head"),
    ("LinearCrossEntropyLoss", (), {"row_weight": X}, "LinearCrossEntropyLoss: row_weight is given with each call"),
    ("LinearCrossEntropyLoss", (8, 10), {},
        "expected weight, [V], and keywords; the head goes in with each call, as linear_weight"),
    ("CrossEntropyLoss", (3.0,), {}, "CrossEntropyLoss: expected weight, [V], and keywords"),
    ("CrossEntropyLoss", (), {"normalizer": 3}, "CrossEntropyLoss: normalizer is given with each call"),
])  # fmt: skip
def test_a_keyword_of_another_function_is_answered(name: str, given: Any, keywords: Any, sentence: str) -> None:
    with pytest.raises(TypeError, match=re.escape(sentence)):
        getattr(eaves, name)(*given, **keywords)


@pytest.mark.parametrize(("name", "given", "keywords", "sentence"), [
    ("trl.install", (), {"chunk_size": 256}, "'chunk_size'; pass workspace_bytes, the scratch memory in bytes"),
    ("trl.install", (), {"algoritm": "keep"}, "'algoritm'; expected algorithm, workspace_bytes, keep_bytes"),
    *((f"{each}.install", (), {"unknown": 1}, "an unexpected keyword argument 'unknown'; expected ")
        for each in ("hf", "liger", "megatron", "nemo_rl", "prime_rl", "skyrl", "torch", "verl")),
    ("hf.patch", (None,), {"unknown": 1, "impl": 2},
        "unexpected keyword arguments 'unknown', 'impl'; expected skip_logits, skip_ignored, label_smoothing, z_loss, "
        "algorithm, workspace_bytes, grad_weight_dtype, metrics, group, sequence_parallel; pass algorithm"),
])  # fmt: skip
def test_an_unknown_option_of_an_integration_is_answered(name: str, given: Any, keywords: Any, sentence: str) -> None:
    module, function = name.split(".")
    with pytest.raises(TypeError, match=re.escape(sentence)) as error:
        getattr(getattr(eaves, module), function)(*given, **keywords)
    assert str(error.value).startswith(f"eaves.{name}: got ")
