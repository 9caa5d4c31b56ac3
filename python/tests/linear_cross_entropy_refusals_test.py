"""The refusals of eaves.linear_cross_entropy. A message names the operator, the argument, the value found and the value
expected."""

import math
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import eaves
from comparison import PROMOTED
from cross_entropy_test import each
from refusals import Call, assert_each_refused, assert_refused_by

OP = "linear_cross_entropy"


def tensors(device: torch.device | str, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.zeros(4, 3, dtype=dtype, device=device),
        torch.zeros(5, 3, dtype=dtype, device=device),
        torch.zeros(4, dtype=torch.int64, device=device),
    )


def assert_refused(kind: type[Exception], sentence: str, *arguments: Any, **named: Any) -> None:
    assert_refused_by(eaves.linear_cross_entropy, OP, kind, sentence, *arguments, **named)


X, HEAD, TARGET = tensors("cpu")
RIGHT = {"input": X, "linear_weight": HEAD, "target": TARGET}
OUT = torch.zeros(5, 3)
HALF = {"input": X.bfloat16(), "linear_weight": HEAD.bfloat16()}

CALLS: list[Call] = [
    # shapes
    ({"input": X[0, 0]}, ValueError, "input has no axes"),
    ({"input": X[:, :0]}, ValueError, r"input has shape \[4, 0\], expected at least one feature"),
    ({"linear_weight": HEAD[:, :2]}, ValueError, r"linear_weight has shape \[5, 2\], expected \[classes, 3\]"),
    ({"linear_weight": HEAD[0]}, ValueError, r"linear_weight has shape \[3\], expected \[classes, 3\]"),
    ({"linear_weight": HEAD[:0]}, ValueError, r"linear_weight has shape \[0, 3\], expected at least one class"),
    ({"linear_weight": HEAD[:, None]}, NotImplementedError, r"linear_weight has shape \[5, 1, 3\].*each head"),
    ({"target": TARGET[:3]}, ValueError, r"target has shape \[3\], expected \[4\] \(one per row"),
    ({"target": X}, ValueError,
     r"target has shape \[4, 3\] and the floating-point type float32, expected \[4, 5\] for probabilities"),
    ({"target": X.half()}, ValueError, "target has the floating-point type float16, expected float32"),
    ({"linear_bias": torch.zeros(4)}, ValueError, r"linear_bias has shape \[4\], expected \[5\]"),
    ({"weight": torch.zeros(4)}, ValueError, r"weight has shape \[4\], expected \[5\]"),
    # devices
    *(({name: torch.zeros(shape, device="meta")}, ValueError, f"{name} is on meta, expected (cpu|cuda)")
      for name, shape in (("linear_weight", (5, 3)), ("target", (4, 5)), ("linear_bias", (5,)), ("weight", (5,)),
                          ("normalizer", ()), ("grad_weight_out", (5, 3)))),
    ({"input": X.to("meta")}, ValueError, r" is on .*, expected meta \(as input\)"),
    # dtypes, and arguments that are no tensors
    ({"input": X.bfloat16()}, ValueError,
     r"linear_weight has dtype float32, expected bfloat16 \(as input\); .*torch\.autocast"),
    ({"linear_bias": torch.zeros(5).bfloat16()}, ValueError, "linear_bias has dtype bfloat16, expected"),
    *(({"input": X.to(dtype)}, ValueError, "input has dtype .*, expected a floating-point type") for dtype in PROMOTED),
    *(({name: tensor.to(dtype)}, NotImplementedError, rf"{name} has dtype .*, expected .*float32")
      for name, tensor in RIGHT.items() for dtype in (torch.complex64, torch.float8_e4m3fn, torch.uint16)),
    *(({name: value}, TypeError, rf"{name} is a {type(value).__name__}, expected a torch\.Tensor")
      for name in RIGHT for value in (None, 1.0, [0, 1], numpy.zeros(4))),
    ({"linear_weight": HEAD.to_sparse()}, NotImplementedError, "sparse.*expected"),
    # options
    ({"reduction": "average"}, ValueError, r'reduction is \'average\', expected "none"'),
    ({"reduction": 1}, TypeError, "reduction is 1"),
    ({"label_smoothing": 2}, ValueError, "label_smoothing is 2, expected 0 to 1"),
    ({"softcap": 0}, ValueError, "softcap is 0, expected a positive number.*; None for no soft cap"),
    ({"scale": -1}, ValueError, "scale is -1, expected a positive number"),
    ({"scale": torch.ones(2)}, ValueError, r"scale has shape \[2\] and dtype float32, expected one floating-point"),
    ({"scale": torch.ones((), dtype=torch.int64)}, ValueError, "expected one floating-point number"),
    ({"scale": torch.ones((), device="meta")}, ValueError, r"scale is on meta, expected (cpu|cuda:0) \(as input\)"),
    ({"z_loss": -1}, ValueError, "z_loss is -1, expected 0 or a positive number .*float32"),
    ({"ignore_index": 1.5}, TypeError, r"ignore_index is 1\.5, expected an int"),
    ({"normalizer": 2.0, "reduction": "sum"}, ValueError, "normalizer is given, but only the mean divides"),
    ({"algorithm": "fast"}, ValueError, r'algorithm is \'fast\', expected one of auto, speed, memory, recompute'),
    ({"algorithm": 1}, TypeError, "algorithm is 1, expected"),
    ({"workspace_bytes": 0}, ValueError, "workspace_bytes is 0, expected a positive number of bytes"),
    ({"workspace_bytes": 1e9}, TypeError, r"workspace_bytes is 1000000000\.0, expected an int"),
    ({"skip_ignored": 1}, TypeError, "skip_ignored is 1, expected a bool"),
    ({"outputs": 1}, TypeError, "outputs is 1, expected names among lse, argmax, entropy, z_loss, sum_sq, mean_logit"),
    ({"outputs": "logits"}, ValueError, "outputs has 'logits', expected names among lse, argmax"),
    ({"outputs": ["lse", 1]}, ValueError, "outputs has 1, expected names among"),
    ({"outputs": ("lse", "lse")}, ValueError, r"outputs is \('lse', 'lse'\), expected each name once"),
    ({"outputs": "mean_logit", "target": torch.full((4, 5), 0.2)}, ValueError, '"mean_logit", which does not exist'),
    ({"reduction": "batchmean"}, ValueError, "reduction is 'batchmean'.*; divide by a batch with normalizer=its size"),
    ({"options": 3}, TypeError, r"options is 3, expected a torch\.nn\.LinearCrossEntropyOptions or None"),
    ({"grad_weight_dtype": "float32"}, TypeError, r"grad_weight_dtype is 'float32', expected a torch\.dtype"),
    ({"grad_weight_dtype": torch.bfloat16}, ValueError, "grad_weight_dtype is bfloat16, expected float32"),
    # names of other libraries
    *(({name: 1.0}, TypeError, f"got an unexpected keyword argument '{name}'{answer}$") for name, answer in (
        ("bias", "; pass linear_bias"), ("logit_softcapping", "; pass softcap"), ("colour", ""),
        ("num_items_in_batch", "; pass normalizer"), ("return_lse", '; pass outputs="lse"'),
        ("return_predicted_tokens", '; pass outputs="argmax"'),
        ("temperature", "; pass scale=1 / temperature, and .* softcap=c / temperature"))),
    # derivatives
    *(({name: tensor.clone().requires_grad_()}, NotImplementedError,
       rf"{name} requires a gradient, which this operator does not compute; pass {name}\.detach\(\)")
      for name, tensor in (("weight", torch.ones(5)), ("target", torch.full((4, 5), 0.2)),
                           ("normalizer", torch.ones(())), ("grad_weight_out", OUT))),
    # the tensor to which a gradient is added
    *(({**HALF, "grad_weight_out": wrong}, kind, sentence) for wrong, kind, sentence in (
        (3, TypeError, "grad_weight_out is a int"),
        (OUT.half(), ValueError, "grad_weight_out has dtype float16, expected bfloat16 or float32"),
        (OUT[:4], ValueError, r"grad_weight_out has shape \[4, 3\], expected \[5, 3\]"),
        (OUT.view(3, 5).t(), ValueError, r"grad_weight_out has strides \[1, 5\], expected unit stride"))),
    ({"grad_weight_out": OUT, "grad_weight_dtype": torch.float32}, ValueError, "grad_weight_dtype is given, but"),
]  # fmt: skip


@pytest.mark.parametrize("call", CALLS, ids=lambda call: f"{call[0]}"[:60])
def test_what_is_refused(call: Call, device: torch.device) -> None:
    assert_each_refused(eaves.linear_cross_entropy, OP, RIGHT, call, device)


def test_a_tensor_for_a_gradient_that_is_negated_lazily_is_refused(device: torch.device) -> None:
    out = torch._neg_view(OUT.to(device))  # a copy to another device would be negated at once
    call = ({**HALF, "grad_weight_out": out}, ValueError, "grad_weight_out is negated lazily")
    assert_each_refused(eaves.linear_cross_entropy, OP, RIGHT, call, device)


def test_the_module_answers_names_of_other_libraries() -> None:
    for wrong, kind, sentence in CALLS:
        if "unexpected" in sentence:
            given_with_each_call = wrong.keys() & {"bias", "num_items_in_batch"}
            of_module = sentence.partition(";")[0] + "$" if given_with_each_call else sentence
            assert_refused_by(eaves.LinearCrossEntropyLoss, OP, kind, of_module, **wrong)


@each("name", ["first_class", "sequence_parallel", "reduce_input_grad", "reduce_dtype"])
def test_what_a_shard_has_is_no_keyword(name: str) -> None:
    with pytest.raises(TypeError, match=rf"'{name}'; pass group=eaves\.Shard\(group, {name}=\.\.\.\)$"):
        eaves.linear_cross_entropy(X, HEAD, TARGET, **{name: 0})  # type: ignore[call-overload]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_nested_tensors(device: torch.device) -> None:
    x, head, target = tensors(device)
    nested = torch.nested.nested_tensor([x, x], device=device)
    assert_refused(NotImplementedError, "input is nested .*expected dense ones", nested, head, target)


def test_what_the_tensor_for_a_gradient_does_not_go_with(device: torch.device) -> None:
    x, head, target = tensors(device, torch.bfloat16)
    out = OUT.to(device).clone()

    def of_sample(x: Tensor) -> Tensor:
        return eaves.linear_cross_entropy(x, head, target[:1], grad_weight_out=out)

    with pytest.raises(NotImplementedError, match="grad_weight_out is written in the backward"):
        torch.vmap(of_sample)(x[:, None])
    loss = eaves.linear_cross_entropy(x, head.requires_grad_(), target, grad_weight_out=out)
    with pytest.raises(NotImplementedError, match="with grad_weight_out the gradient has no derivative"):
        torch.autograd.grad(loss, head, create_graph=True)
    with FakeTensorMode():
        x, head, target = tensors(device)
        loss = eaves.linear_cross_entropy(x, head.requires_grad_(), target, grad_weight_out=torch.zeros_like(head))
        loss.backward()
        assert head.grad is None


@each("algorithm", ["auto", "speed", "memory", "recompute"])
def test_a_callers_tensor_in_memory_that_the_call_reads(algorithm: str, device: torch.device) -> None:
    def sentence(name: str) -> str:
        return f"grad_weight_out overlaps {name}, expected memory of its own"

    shapes = {"input": (4, 3), "linear_weight": (5, 3), "target": (4, 5), "linear_bias": (5,), "weight": (5,),
              "row_weight": (4,), "normalizer": (1,)}  # fmt: skip
    for name, shape in shapes.items():
        given: dict[str, Any] = {each: torch.zeros(shape, device=device) for each, shape in shapes.items()}
        buffer = torch.zeros(64, device=device)
        for begin in (14, 0):
            given[name] = buffer[begin : begin + math.prod(shape)].view(shape)
            out = buffer[:15].view(5, 3)
            assert_refused(ValueError, sentence(name), **given, grad_weight_out=out, algorithm=algorithm)
    x, head, target = tensors(device)
    out, given = buffer[:15].view(5, 3), {"input": x, "linear_weight": head, "algorithm": algorithm}
    assert_refused(
        ValueError, sentence("target"), **given, target=buffer.view(torch.int64)[7:11], grad_weight_out=out
    )  # fmt: skip
    leaf = head.requires_grad_()
    given = {"target": target, "grad_weight_out": leaf.detach(), "algorithm": algorithm}
    assert_refused(ValueError, sentence("linear_weight"), x, leaf, **given)
    with torch.autocast(device.type, torch.bfloat16):  # autocast multiplies a copy
        assert_refused(ValueError, sentence("linear_weight"), x, leaf, **given)


@each("algorithm", ["speed", "recompute"])
def test_a_callers_tensor_beside_what_the_call_reads(algorithm: str, device: torch.device) -> None:
    x, _, target = tensors(device)
    halves = torch.zeros(5, 6, device=device).split(3, 1)  # rows in turn
    pair = torch.zeros(2, 5, 3, device=device)
    for head, out in ((*halves,), halves[::-1], (*pair,), (*pair.flip(0),)):
        leaf = head.detach().requires_grad_()
        eaves.linear_cross_entropy(x + 1, leaf, target, grad_weight_out=out, algorithm=algorithm).backward()
        assert out.any() and not leaf.any()
        out.zero_()
    buffer = torch.zeros(40, device=device)
    for begin in (0, 1, 2, 4, 5, 6):  # of rows in turn, in part the same
        head, out = buffer.as_strided((5, 3), (6, 1), 0), buffer.as_strided((5, 3), (6, 1), begin)
        sentence = "grad_weight_out overlaps linear_weight"
        assert_refused(ValueError, sentence, x, head, target, grad_weight_out=out, algorithm=algorithm)


@each("algorithm", [None, "speed", "memory", "recompute"])
@each("dtype", [torch.int32, torch.int64])
def test_a_target_out_of_range_names_its_row(dtype: torch.dtype, algorithm: str | None) -> None:
    x, head, target = tensors("cpu")
    for wrong in (5, -1, -101):
        bad = target.to(dtype)
        bad[2] = wrong
        given = x.requires_grad_(algorithm is not None)
        sentence = rf"target\[2\] is {wrong}, expected 0 to 4, or ignore_index -100"
        assert_refused(ValueError, sentence, given, head, bad, algorithm=algorithm or "auto")


def test_a_target_out_of_range_is_nan_on_a_gpu(cuda: torch.device) -> None:
    x, head, target = tensors(cuda)
    target[2] = 5
    leaf = (x + 1).requires_grad_()
    for algorithm in ("speed", "recompute"):
        losses = eaves.linear_cross_entropy(leaf, head, target, reduction="none", algorithm=algorithm)
        assert losses.isnan().tolist() == [False, False, True, False]
        (grad,) = torch.autograd.grad(losses.sum(), leaf)
        assert grad.isnan().all(1).tolist() == [False, False, True, False]


def test_derivatives_that_there_are_not(device: torch.device) -> None:
    x, head, target = tensors(device)
    one = X[:1].to(device)
    for function, given in (
        (lambda x: eaves.linear_cross_entropy(x, head, target), x),
        (lambda w: eaves.linear_cross_entropy(x, w.expand_as(head), target), one),
    ):
        with pytest.raises(NotImplementedError, match=r"^linear_cross_entropy.*forward"):
            torch.func.jvp(function, (given,), (given,))
    jacrev, functional = torch.func.jacrev, torch.nn.functional
    with pytest.raises(NotImplementedError, match=r"use torch\.nn\.functional\.linear and cross_entropy"):
        jacrev(jacrev(lambda x: eaves.linear_cross_entropy(x, head, target)))(x)
    hessian = jacrev(jacrev(lambda x: functional.cross_entropy(functional.linear(x, head), target)))(x)
    assert hessian.shape == (4, 3, 4, 3)


def test_a_result_that_no_memory_holds(device: torch.device) -> None:
    rows = 2**50  # no memory holds their losses
    x, head, target = tensors(device)
    given = x[:1].expand(rows, 3), head, target[:1].expand(rows)
    assert_refused(torch.OutOfMemoryError, rf"no memory on .*\[{rows}\]", *given, reduction="none")
