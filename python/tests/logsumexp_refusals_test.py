"""The refusals of eaves.logsumexp: ValueError for a wrong argument, TypeError for a wrong Python type,
NotImplementedError for a missing feature of eaves. Each sentence names the operator and the argument, its value and the
expected one.
"""

import numpy
import pytest
import torch

import eaves
from comparison import FLOATING_POINT
from eaves._torch import operator as _operator
from logsumexp_test import each
from refusals import Call, assert_each_refused, assert_refused_by

OP = "logsumexp"
ops = torch.ops.eaves

X = torch.zeros(2, 3)
NEVER = (torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32)

CALLS: list[Call] = [
    # axes
    ({"dim": 2}, ValueError, r"contains 2, expected -2 to 1 \(x has 2 axes\)"),
    ({"dim": (0, -3)}, ValueError, r"contains -3, expected -2 to 1 \(x has 2 axes\)"),
    ({"x": X[0, 0], "dim": 1}, ValueError, r"contains 1, expected -1 to 0 \(x has 0 axes\)"),
    ({"x": X[:0], "dim": 5}, ValueError, "contains 5, expected -2 to 1"),
    ({"dim": (1, -1)}, ValueError, r"\[1, -1\], expected each axis once"),
    ({"dim": [0] * 40}, ValueError, "each axis once"),
    *(({"dim": dim}, ValueError, "expected -2 to 1") for dim in (2**63, -(2**63) - 1, (0, 2**70))),
    *(({"dim": dim}, TypeError, "dim is .*, expected an int or a sequence of ints")
      for dim in (None, "0", 1.0, (0, 1.0), ("a",), {0}, torch.zeros(2))),
    # other arguments
    *(({"keepdim": value}, TypeError, "keepdim is .*, expected a bool") for value in ("yes", None, 2.0)),
    *(({"x": value}, TypeError, rf"x is a {type(value).__name__}, expected a torch\.Tensor")
      for value in (None, 1.0, [1.0, 2.0], numpy.zeros(3, numpy.float32))),
    *(({"x": X.to(of), "dtype": wrong}, ValueError, "dtype is .*, expected .*float32")
      for of in (*FLOATING_POINT, torch.int32)
      for wrong in (torch.float16, torch.bfloat16, torch.float64, torch.int32) if wrong != of or of == torch.int32),
    *(({"dtype": wrong}, TypeError, r"dtype is .*, expected a torch\.dtype") for wrong in ("float32", 1, float)),
    # kinds of tensors
    *(({"x": X.to(of)}, NotImplementedError, rf"{str(of)[6:]}, expected .*float32") for of in NEVER),
    *(({"dtype": of}, ValueError, "dtype is .*, expected float32") for of in NEVER),
    ({"x": torch.zeros([1] * 17)}, NotImplementedError, "17 axes, expected at most 16"),
]  # fmt: skip


@pytest.mark.parametrize("call", CALLS, ids=lambda call: f"{call[0]}"[:60])
def test_what_is_refused(call: Call, device: torch.device) -> None:
    assert_each_refused(eaves.logsumexp, OP, {"x": X, "dim": 0}, call, device)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("wants_grad", [False, True])
def test_sparse_tensors(wants_grad: bool, device: torch.device) -> None:
    dense = torch.eye(3, device=device)
    for sparse in (dense.to_sparse(), dense.to_sparse_csr()):
        x = sparse.detach().requires_grad_(wants_grad)
        assert_refused_by(eaves.logsumexp, OP, NotImplementedError, r"sparse.*expected", x, 1)


@pytest.mark.parametrize("wants_grad", [False, True])
def test_tensors_of_mkldnn(wants_grad: bool) -> None:
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this PyTorch has no mkldnn")
    x = torch.eye(3).to_mkldnn().requires_grad_(wants_grad)
    assert_refused_by(eaves.logsumexp, OP, NotImplementedError, r"_mkldnn on cpu, expected dense ones", x, 1)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_quantised_tensors() -> None:
    if not hasattr(torch, "quantize_per_tensor"):
        pytest.skip("this PyTorch has no quantised tensors")
    x = torch.quantize_per_tensor(torch.zeros(2, 3), 0.1, 0, torch.qint8)
    assert_refused_by(eaves.logsumexp, OP, NotImplementedError, r"x\b.*expected", x, 1)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("wants_grad", [False, True])
@each("layout", [torch.strided, torch.jagged])
def test_nested_tensors(layout: torch.layout, wants_grad: bool, device: torch.device) -> None:
    x = torch.nested.nested_tensor(
        [torch.zeros(2, 3), torch.zeros(4, 3)], layout=layout, device=device, requires_grad=wants_grad
    )
    assert_refused_by(eaves.logsumexp, OP, NotImplementedError, r"expected dense ones", x, 2)


@each("dtype", [torch.float32, torch.bfloat16])
def test_a_result_that_no_memory_holds(dtype: torch.dtype, device: torch.device) -> None:
    # 4 PiB in float32, more than a 47-bit address reaches: no system promises it.
    rows = 2**50
    for wants_grad in (False, True):
        x = torch.zeros(1, dtype=dtype, device=device, requires_grad=wants_grad).expand(rows, 1)
        assert_refused_by(
            eaves.logsumexp, OP, torch.OutOfMemoryError, rf"no memory on {device.type}.* shape \[{rows}\]", x, 1
        )


def through_call(overload: object, *arguments: object) -> object:
    return _operator.call("logsumexp", overload, *arguments)


def test_a_gradient_that_no_memory_holds(device: torch.device) -> None:
    x = torch.zeros((), device=device).expand(2**50)
    number = torch.zeros((), device=device)
    arguments = (ops.logsumexp_backward.default, number, x, number, [0], False)
    assert_refused_by(through_call, OP, torch.OutOfMemoryError, rf"no memory .*{2**50} elements", *arguments)


def test_what_the_core_finds_wrong_is_a_value_error(device: torch.device) -> None:
    # No public call gets this far: the core repeats the checks of Python.
    x, lse = torch.zeros(2, 3, device=device), torch.zeros(2, device=device)
    wrong_gradient = (ops.logsumexp_backward.default, torch.zeros(3, device=device), x, lse, [1], False)
    assert_refused_by(through_call, OP, ValueError, r"grad_out has shape \[3\], expected \[2\]", *wrong_gradient)
    wrong_lse = (ops.logsumexp_backward.default, lse, x, lse.half(), [1], False)
    assert_refused_by(through_call, OP, ValueError, r"lse has dtype float16, expected float32", *wrong_lse)
    wrong_axis = (ops.logsumexp_forward.default, x, [2], False, torch.float32)
    assert_refused_by(through_call, OP, ValueError, r"contains 2, expected -2 to 1", *wrong_axis)
    wrong_dtype = (ops.logsumexp_forward_lse.default, x, [1], False, torch.float16)
    assert_refused_by(through_call, OP, ValueError, r"out has dtype float16, expected", *wrong_dtype)


def test_what_the_core_does_not_have_is_a_not_implemented_error(device: torch.device) -> None:
    x = torch.zeros([1] * 17, device=device)
    for overload in (ops.logsumexp_forward.default, ops.logsumexp_forward_lse.default):
        arguments = (overload, x, [0], False, torch.float32)
        assert_refused_by(through_call, OP, NotImplementedError, r"x has 17 axes, expected at most 16", *arguments)
    arguments = (ops.logsumexp_forward.default, x[0].to(torch.complex64), [0], False, torch.float32)
    assert_refused_by(through_call, OP, NotImplementedError, r"x has a dtype that eaves does not support", *arguments)
    arguments = (ops.logsumexp_forward.default, x[0], [0], False, torch.complex64)
    assert_refused_by(through_call, OP, NotImplementedError, r"dtype has a dtype that eaves does not", *arguments)


def test_what_torch_adds_below_a_sentence_is_left_out() -> None:
    # For instance the stack of C++ calls, with TORCH_SHOW_CPP_STACKTRACES=1.
    def fails(*arguments: object) -> None:
        raise RuntimeError("eaves.InvalidArgument: logsumexp_forward: x is wrong\nException raised from a.cpp")

    assert_refused_by(through_call, OP, ValueError, "^logsumexp: x is wrong$", fails)


def test_an_error_that_is_not_ours_stays_what_it_is() -> None:
    def fails(*arguments: object) -> None:
        raise RuntimeError("the device is on fire")

    fails._schema = torch.ops.eaves.logsumexp_forward.default._schema  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match=r"^the device is on fire$") as caught:
        through_call(fails)
    assert caught.type is RuntimeError


def test_the_batch_of_vmap_is_no_axis(device: torch.device) -> None:
    x = torch.zeros(2, 3, device=device)
    for dim in (1, -2):
        for function in (
            lambda row, dim=dim: eaves.logsumexp(row, dim),
            torch.func.grad(lambda row, dim=dim: eaves.logsumexp(row, dim)),
        ):
            sentence = rf"contains {dim}, expected -1 to 0 \(x has 1 axes\)"
            assert_refused_by(torch.vmap(function), OP, ValueError, sentence, x)


@pytest.mark.parametrize("wants_grad", [False, True])
def test_a_compiled_call_is_refused_with_the_same_sentence(
    wants_grad: bool, device: torch.device, fresh_compiler: None
) -> None:
    x = torch.zeros(2, 3, device=device, requires_grad=wants_grad)
    compiled = torch.compile(lambda t: eaves.logsumexp(t, 5), fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match=r"contains 5, expected -2 to 1 \(x has 2 axes\)"):
        compiled(x)


def test_forward_over_reverse_is_refused_by_name(device: torch.device) -> None:
    x = torch.zeros(3, device=device)
    with pytest.raises(NotImplementedError, match=r"^logsumexp.*forward"):
        torch.func.hessian(lambda t: eaves.logsumexp(t, 0))(x)
