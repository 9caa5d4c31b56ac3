"""The refusals of eaves.cross_entropy: ValueError for a wrong argument, TypeError for a wrong Python type,
NotImplementedError for a missing feature of eaves. Each sentence names the operator and the argument, its value and the
expected one.
"""

import math
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

import eaves
from comparison import PROMOTED
from cross_entropy_test import EVERYTHING, each
from eaves._torch import operator as _operator
from eaves._torch.outputs import REDUCTIONS
from refusals import Call, assert_each_refused, assert_refused_by

OP = "cross_entropy"


def logits_and_target(device: Any = "cpu", wants_grad: bool = False) -> tuple[Tensor, Tensor]:
    return torch.zeros(4, 5, device=device, requires_grad=wants_grad), torch.zeros(4, dtype=torch.int64, device=device)


LOGITS, TARGET = logits_and_target()
DEEP = torch.zeros(2, 3, 4)
SHARES = torch.full((4, 5), 0.2)
NO_TENSORS = (None, 1.0, [0, 1], numpy.zeros(4))
NO_FLOATS = ("0.5", True, [0.5], torch.tensor(0.5))

CALLS: list[Call] = [
    # shapes, and the axis of the classes
    ({"target": TARGET[:3]}, ValueError, r"target has shape \[3\], expected \[4\] \(one per row of input \[4, 5\]\)"),
    ({"target": TARGET[0]}, ValueError, r"target has shape \[\], expected \[4\]"),
    ({"target": TARGET[:, None]}, ValueError, r"target has shape \[4, 1\], expected \[4\]"),
    ({"input": DEEP, "target": torch.zeros(3, 4).long()}, ValueError,
     r"target has shape \[3, 4\], expected \[2, 3\] .*, or \[2, 4\] with the classes on axis 1"),
    ({"target": LOGITS[:, :4]}, ValueError,
     r"target has shape \[4, 4\] and the floating-point type float32, expected \[4, 5\] for probabilities"),
    ({"target": TARGET.float()}, ValueError, r"floating-point type float32, .* or int64 or int32 for classes"),
    ({"input": torch.zeros(2, 3, 3), "target": torch.zeros(2, 3).long()}, ValueError,
     r"the classes may be axis 1 or the last axis.*class_dim=1 .*class_dim=-1"),
    ({"input": DEEP, "target": DEEP}, ValueError, r"is ambiguous; pass class_dim=1 .*class_dim=-1"),
    ({"input": LOGITS[0, 0], "target": TARGET[0]}, ValueError, r"input has no axes, expected at least the axis"),
    ({"input": LOGITS[:, :0], "target": TARGET - 100}, ValueError, r"input has shape \[4, 0\], expected at least one"),
    *(({"class_dim": dim}, ValueError, r"expected -2 to 1 \(input has 2 axes\)") for dim in (2, -3, 2**62)),
    # integers
    *(({name: value}, ValueError, rf"{name} is {value}, expected an int of 64 bits")
      for name in ("ignore_index", "class_dim") for value in (2**63, -(2**63) - 1)),
    *(({name: value}, TypeError, rf"{name} is .*, expected an int")
      for name in ("ignore_index", "class_dim") for value in ("1", 1.0, True, (1,))),
    # numbers
    *(({name: value}, ValueError, rf"{name} is .*, expected {expected}")
      for name, values, expected in (
          ("label_smoothing", (-0.1, 1.1), "0 to 1"),
          ("z_loss", (-1e-9, 1e39, 10**400), "0 or a positive number .*float32"),
          ("scale", (0.0, -1.0, 1e-45),
           "a positive number .*float32.*; multiply logits or hidden states by a learned scale$"),
          ("softcap", (0.0, -1.0, 1e-45), "a positive number .*float32.*; None for no soft cap$"),
          ("normalizer", (-1.0, 1e300, 10**400), "a number from 0 in the range of float32"),
      ) for value in (*values, math.nan, math.inf, -math.inf)),
    *(({name: value}, TypeError, rf"{name} is .*, expected")
      for name in ("label_smoothing", "z_loss", "scale", "softcap") for value in NO_FLOATS),
    ({"scale": torch.tensor(0.5)}, TypeError, "scale is .*; multiply logits or hidden states by a learned scale$"),
    *(({"normalizer": value}, TypeError, r"normalizer is .*, expected a number")
      for value in ("3", True, [3.0], numpy.ones((4, 5)))),
    *(({"normalizer": 3.0, "reduction": mode}, ValueError, "only the mean divides") for mode in ("none", "sum")),
    ({"row_weight": torch.ones(2)}, ValueError, r"row_weight has shape \[2\], expected \[4\] \(one per row of input"),
    ({"row_weight": torch.ones(4, device="meta")}, ValueError, "row_weight is on meta, expected (cpu|cuda:0)"),
    *(({"outputs": ("lse", "mean_logit"), **named}, ValueError, r'"mean_logit", which does not exist for probabilit')
      for named in ({"target": SHARES}, {"weight": torch.ones(5), "label_smoothing": 0.1})),
    *(({name: torch.ones(size).to_sparse()}, NotImplementedError, "torch.sparse_coo .*, expected dense ones")
      for name, size in (("row_weight", 4), ("weight", 5))),
    ({"row_weight": 1.0}, TypeError, "row_weight is a float, expected a torch.Tensor"),
    ({"normalizer": torch.ones(2)}, ValueError, r"normalizer has shape \[2\], expected one"),
    ({"normalizer": torch.ones((), device="meta")}, ValueError, "normalizer is on meta, expected .*, or a number"),
    # words and names
    *(({"reduction": mode}, ValueError, rf'reduction is \'{mode}\', expected "none", "sum" or "mean"')
      for mode in ("average", "", "MEAN")),
    *(({"reduction": mode}, TypeError, r'reduction is .*, expected "none", "sum" or "mean"')
      for mode in (None, 1, ["mean"])),
    ({"reduction": "batchmean"}, ValueError, r'"mean"; divide by a batch with normalizer=its size$'),
    *(({"inplace_backward": value}, TypeError, "inplace_backward is .*, expected a bool") for value in (None, 1, "y")),
    *(({"outputs": names}, ValueError, rf"outputs has {wrong}, expected names among {', '.join(EVERYTHING)}$")
      for names, wrong in (("is_top1", "'is_top1'"), ("", "''"), (["lse", "loss"], "'loss'"), (("lse", 1), "1"))),
    ({"outputs": ("lse", "entropy", "lse")}, ValueError, r"outputs is \('lse', .*\), expected each name once"),
    *(({"outputs": value}, TypeError, rf"outputs is .*, expected names among {', '.join(EVERYTHING)}, or")
      for value in (None, True, 1, {"lse"})),
    *(({name: 1.0}, TypeError, rf"got an unexpected keyword argument '{name}'{answer}$") for name, answer in (
        ("temperature", r"; pass scale=1 / temperature, and .* softcap=c / temperature"),
        ("logit_softcap", "; pass softcap"), ("lse_square_scale", "; pass z_loss"), ("bias", ""), ("colour", ""),
        ("return_lse", '; pass outputs="lse"'), ("return_predicted_tokens", '; pass outputs="argmax"'),
        ("return_dict", "$"))),
    # weights
    *(({"weight": torch.ones(shape)}, ValueError, r"weight has shape .*, expected \[5\] \(one per class of input\)")
      for shape in ((4,), (5, 1), ())),
    *(({"weight": torch.ones(5, dtype=dtype)}, ValueError, r"weight has dtype .*, expected float32 .as input")
      for dtype in (torch.float64, torch.bfloat16, torch.int64)),
    ({"weight": [1.0] * 5}, TypeError, r"weight is a list, expected a torch\.Tensor"),
    *(({name: tensor.clone().requires_grad_()}, NotImplementedError,
       rf"{name} requires a gradient, which this operator does not compute; pass {name}\.detach\(\)")
      for name, tensor in (("weight", torch.ones(5)), ("row_weight", torch.ones(4)), ("target", SHARES),
                           ("normalizer", torch.ones(())))),
    # kinds of tensors
    *(({"input": LOGITS.to(dtype)}, ValueError, "input has dtype .*, expected a floating-point") for dtype in PROMOTED),
    *(({"target": TARGET.to(dtype)}, ValueError, r"target has dtype .*, expected int64 or int32 for classes")
      for dtype in (torch.int8, torch.int16, torch.uint8, torch.bool)),
    *(({"target": SHARES.to(dtype)}, ValueError,
       r"target has the floating-point type .*, expected float32 for probabilities, or int64 or int32 for")
      for dtype in (torch.float64, torch.bfloat16)),
    *(({name: value}, TypeError, rf"{name} is a {type(value).__name__}, expected a torch\.Tensor")
      for name in ("input", "target") for value in NO_TENSORS),
    *(({name: tensor.to(dtype)}, NotImplementedError, rf"{name} has dtype .*, expected .*float32")
      for name, tensor in (("input", LOGITS), ("target", TARGET))
      for dtype in (torch.complex64, torch.float8_e4m3fn, torch.uint16)),
    ({"input": LOGITS.to_sparse()}, NotImplementedError, r"sparse.*expected"),
    ({"target": TARGET.to("meta")}, ValueError, r"target is on meta, expected"),
    ({"input": torch.zeros([1] * 17), "target": torch.zeros([1] * 16).long()}, NotImplementedError,
     r"17 axes, expected at most 16"),
]  # fmt: skip


@pytest.mark.parametrize("call", CALLS, ids=lambda call: f"{call[0]}"[:60])
def test_what_is_refused(call: Call, device: torch.device) -> None:
    assert_each_refused(eaves.cross_entropy, OP, {"input": LOGITS, "target": TARGET}, call, device)


def test_the_module_answers_names_of_other_libraries() -> None:
    for wrong, kind, sentence in CALLS:
        if "unexpected" in sentence:
            assert_refused_by(eaves.CrossEntropyLoss, OP, kind, sentence, **wrong)
    with pytest.raises(TypeError, match=r"^CrossEntropyLoss: expected weight, \[V\], and keywords$"):
        eaves.CrossEntropyLoss(None, -100)  # type: ignore[call-arg]


def test_the_words_of_the_core_become_those_of_the_user() -> None:
    call = _operator.call
    forward, backward = torch.ops.eaves.cross_entropy_forward.default, torch.ops.eaves.cross_entropy_backward.default
    assert_refused_by(call, OP, ValueError, r"^cross_entropy: target has shape \[3\]", OP, forward, LOGITS, TARGET[:3])
    saved = (LOGITS, SHARES, None, None, torch.zeros(4), None, None, None, -1, -100, REDUCTIONS["sum"], ())
    sentence = r"target_mass is missing, .* because the targets are soft"
    assert_refused_by(call, OP, ValueError, sentence, OP, backward, torch.ones(()), None, None, *saved)


def test_probabilities_that_require_a_gradient(device: torch.device) -> None:
    logits, weight = LOGITS.to(device), torch.ones(5, device=device, requires_grad=True)
    with torch.no_grad():
        assert eaves.cross_entropy(logits, SHARES.to(device).requires_grad_(), weight).dim() == 0
    of_target = torch.func.grad(lambda q: eaves.cross_entropy(logits, q))
    assert_refused_by(of_target, OP, NotImplementedError, "target requires a gradient", SHARES.to(device))


@pytest.mark.filterwarnings("ignore::UserWarning")
@each("layout", [torch.strided, torch.jagged])
def test_nested_tensors(layout: torch.layout, device: torch.device) -> None:
    target = torch.zeros(2, 4, dtype=torch.int64, device=device)
    for wants_grad in (False, True):
        nested = torch.nested.nested_tensor(
            [torch.zeros(2, 3), torch.zeros(4, 3)], layout=layout, device=device, requires_grad=wants_grad
        )
        sentence = r"input is nested .*expected dense ones"
        assert_refused_by(eaves.cross_entropy, OP, NotImplementedError, sentence, nested, target)


@each("wants_grad", [False, True])
@each("dtype", [torch.int32, torch.int64])
def test_a_target_out_of_range_names_its_row_and_writes_nothing(dtype: torch.dtype, wants_grad: bool) -> None:
    logits, target = torch.randn(4, 5, requires_grad=wants_grad), TARGET.to(dtype)
    for wrong in (5, -1, -101):
        bad = target.clone()
        bad[2] = wrong
        for named in ({}, {"inplace_backward": True}):
            given = logits * 1
            sentence = rf"target\[2\] is {wrong}, expected 0 to 4, or ignore_index -100"
            assert_refused_by(eaves.cross_entropy, OP, ValueError, sentence, given, bad, **named)
            assert torch.equal(given, logits)


def test_a_compiled_call_is_refused_with_the_same_sentence(device: torch.device, fresh_compiler: None) -> None:
    logits, target = logits_and_target(device)
    compiled = torch.compile(lambda x, t: eaves.cross_entropy(x, t), fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match=r"target has shape \[3\], expected \[4\]"):
        compiled(logits, target[:3])


def test_derivatives_that_there_are_not(device: torch.device) -> None:
    logits, target = logits_and_target(device, wants_grad=True)

    def loss(x: Tensor) -> Tensor:
        return eaves.cross_entropy(x, target)

    (grad,) = torch.autograd.grad(loss(logits), logits, create_graph=True)
    assert_refused_by(torch.autograd.grad, OP, NotImplementedError, "no second derivative", grad.sum(), logits)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        torch.func.jacrev(torch.func.jacrev(loss))(logits.detach())
    with pytest.raises(NotImplementedError, match=r"^cross_entropy.*forward"):
        torch.func.hessian(loss)(logits.detach())


def test_a_result_that_no_memory_holds(device: torch.device) -> None:
    rows = 2**50  # no memory holds the losses of so many rows
    logits, target = (tensor[:1].expand(rows, *tensor.shape[1:]) for tensor in logits_and_target(device))
    sentence = rf"no memory on .*\[{rows}\]"
    assert_refused_by(eaves.cross_entropy, OP, torch.OutOfMemoryError, sentence, logits, target, reduction="none")
