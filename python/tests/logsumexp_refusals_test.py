"""What eaves.logsumexp refuses: ValueError where the caller is wrong, TypeError for a wrong Python type,
NotImplementedError for what eaves does not have. Each sentence names the operator, the argument, what it is and what
was expected.
"""

import re
from collections.abc import Callable

import numpy
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import eaves
from comparison import FLOATING_POINT
from eaves import _operator
from logsumexp_test import each

ops = torch.ops.eaves


# What only those who wrote the package know.
INTERNAL = ("Exception raised from", ".cpp", ".h:", "aten::", "eaves.", "_forward", "_backward", "Error", "aoti")


def assert_refused_by(
    function: Callable[..., object], kind: type[Exception], sentence: str, *arguments: object, **named: object
) -> None:
    """The call fails with exactly this kind of error, and its message is one sentence that has `sentence` in it."""
    with pytest.raises(kind) as caught:
        function(*arguments, **named)
    assert caught.type is kind, caught.type
    message = str(caught.value)
    assert re.search(sentence, message), message
    assert message.startswith("logsumexp: "), message
    assert "\n" not in message, message
    for internal in INTERNAL:
        assert internal not in message, message


def assert_refused(kind: type[Exception], sentence: str, *arguments: object, **named: object) -> None:
    assert_refused_by(eaves.logsumexp, kind, sentence, *arguments, **named)


@pytest.mark.parametrize("wants_grad", [False, True])
def test_an_axis_out_of_range(wants_grad: bool, device: torch.device) -> None:
    x = torch.zeros(2, 3, device=device, requires_grad=wants_grad)
    assert_refused(ValueError, r"contains 2, expected -2 to 1 \(x has 2 axes\)", x, 2)
    assert_refused(ValueError, r"contains -3, expected -2 to 1 \(x has 2 axes\)", x, (0, -3))
    assert_refused(ValueError, r"contains 1, expected -1 to 0 \(x has 0 axes\)", torch.zeros((), device=device), 1)


@pytest.mark.parametrize("wants_grad", [False, True])
def test_an_axis_named_twice(wants_grad: bool, device: torch.device) -> None:
    x = torch.zeros(2, 3, device=device, requires_grad=wants_grad)
    assert_refused(ValueError, r"\[1, -1\], expected each axis once", x, (1, -1))
    assert_refused(ValueError, r"\[0, 0\], expected each axis once", x, [0, 0])


def test_more_axes_named_than_there_can_be(device: torch.device) -> None:
    assert_refused(ValueError, r"40 axes|each axis once", torch.zeros(2, 3, device=device), [0] * 40)


@each("dim", [2**63, -(2**63) - 1, (0, 2**70)])  # beyond what a 64-bit integer holds
def test_an_axis_beyond_64_bits(dim: object, device: torch.device) -> None:
    assert_refused(ValueError, r"expected -2 to 1", torch.zeros(2, 3, device=device), dim)


@each("dim", [None, "0", 1.0, (0, 1.0), ("a",), {0}])
def test_a_dim_that_is_neither_an_int_nor_several(dim: object, device: torch.device) -> None:
    assert_refused(TypeError, r"\bdim\b", torch.zeros(2, 3, device=device), dim)


@each("keepdim", ["yes", None, 2.0])
def test_a_keepdim_that_is_no_bool(keepdim: object, device: torch.device) -> None:
    assert_refused(TypeError, r"\bkeepdim\b", torch.zeros(2, 3, device=device), 0, keepdim)


@each("x", [None, 1.0, [1.0, 2.0], numpy.zeros(3, numpy.float32)])
def test_an_x_that_is_no_tensor(x: object) -> None:
    assert_refused(TypeError, rf"\bx is an? .*{type(x).__name__}.*, expected a torch\.Tensor", x, 0)


def test_a_tensor_is_no_dim(device: torch.device) -> None:
    assert_refused(TypeError, r"\bdim\b", torch.zeros(2, 3, device=device), torch.zeros(2))


@each("dtype", FLOATING_POINT + (torch.int32,))
def test_a_dtype_that_is_neither_that_of_x_nor_float32(dtype: torch.dtype, device: torch.device) -> None:
    for wrong in {torch.float16, torch.bfloat16, torch.float64, torch.int32} - {dtype}:
        x = torch.zeros(2, 3, dtype=dtype, device=device)
        assert_refused(ValueError, r"\bdtype\b.*expected .*float32", x, 1, dtype=wrong)


def test_an_integer_result_is_refused_even_where_x_is_one(device: torch.device) -> None:
    x = torch.zeros(2, 3, dtype=torch.int32, device=device)
    assert_refused(ValueError, r"\bdtype\b.*expected .*float32", x, 1, dtype=torch.int32)


@each("dtype", ["float32", 1, float])
def test_a_dtype_that_is_no_dtype(dtype: object, device: torch.device) -> None:
    assert_refused(TypeError, r"\bdtype\b", torch.zeros(2, 3, device=device), 1, dtype=dtype)


@each("dtype", [torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32])
def test_dtypes_that_eaves_does_not_have(dtype: torch.dtype, device: torch.device) -> None:
    x = torch.zeros(2, 3, device=device).to(dtype)
    name = str(dtype).removeprefix("torch.")
    assert_refused(NotImplementedError, rf"x has dtype {name}, expected .*float32", x, 1)
    # A dtype of the result that eaves does not have is the caller's mistake: no x allows it.
    with pytest.raises((ValueError, NotImplementedError), match=r"^logsumexp.*\bdtype\b"):
        eaves.logsumexp(torch.zeros(2, 3, device=device), 1, dtype=dtype)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("wants_grad", [False, True])
def test_sparse_tensors(wants_grad: bool, device: torch.device) -> None:
    dense = torch.eye(3, device=device)
    for sparse in (dense.to_sparse(), dense.to_sparse_csr()):
        x = sparse.detach().requires_grad_(wants_grad)
        assert_refused(NotImplementedError, r"sparse.*expected", x, 1)


@pytest.mark.parametrize("wants_grad", [False, True])
def test_tensors_of_mkldnn(wants_grad: bool) -> None:
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this PyTorch has no mkldnn")
    x = torch.eye(3).to_mkldnn().requires_grad_(wants_grad)
    assert_refused(NotImplementedError, r"_mkldnn on cpu, expected dense ones", x, 1)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_quantised_tensors() -> None:
    if not hasattr(torch, "quantize_per_tensor"):
        pytest.skip("this PyTorch has no quantised tensors")
    x = torch.quantize_per_tensor(torch.zeros(2, 3), 0.1, 0, torch.qint8)
    assert_refused(NotImplementedError, r"x\b.*expected", x, 1)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("wants_grad", [False, True])
@each("layout", [torch.strided, torch.jagged])
def test_nested_tensors(layout: torch.layout, wants_grad: bool, device: torch.device) -> None:
    x = torch.nested.nested_tensor(
        [torch.zeros(2, 3), torch.zeros(4, 3)], layout=layout, device=device, requires_grad=wants_grad
    )
    assert_refused(NotImplementedError, r"expected dense ones", x, 2)


def test_more_axes_than_sixteen(device: torch.device) -> None:
    assert_refused(NotImplementedError, r"17 axes, expected at most 16", torch.zeros([1] * 17, device=device), 0)


def test_nothing_is_refused_that_an_empty_tensor_makes_legal(device: torch.device) -> None:
    # The checks run before anybody asks whether there is something to compute.
    x = torch.zeros(0, 3, device=device)
    assert_refused(ValueError, r"contains 5, expected -2 to 1", x, 5)
    assert eaves.logsumexp(x, 1).shape == (0,)


# ----------------------------------------------------------------------- what the core refuses, and torch's allocator

# Elements of a result that no memory holds: 4 PiB in float32, more than an address of 47 bits reaches, so that no
# system promises it.
BEYOND_MEMORY = 2**50


@each("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("wants_grad", [False, True])
def test_a_result_that_no_memory_holds(dtype: torch.dtype, wants_grad: bool, device: torch.device) -> None:
    row = torch.zeros(1, dtype=dtype, device=device)
    x = row.requires_grad_(wants_grad and dtype.is_floating_point).expand(BEYOND_MEMORY, 1)
    where = "cpu" if device.type == "cpu" else "cuda"
    assert_refused(torch.OutOfMemoryError, rf"no memory on {where}.* shape \[{BEYOND_MEMORY}\]", x, 1)


def through_call(overload: object, *arguments: object) -> object:
    return _operator.call("logsumexp", overload, *arguments)


def test_a_gradient_that_no_memory_holds(device: torch.device) -> None:
    x = torch.zeros((), device=device).expand(BEYOND_MEMORY)
    number = torch.zeros((), device=device)
    arguments = (ops.logsumexp_backward.default, number, x, number, [0], False)
    assert_refused_by(through_call, torch.OutOfMemoryError, rf"no memory .*{BEYOND_MEMORY} elements", *arguments)


def test_what_the_core_finds_wrong_is_a_value_error(device: torch.device) -> None:
    # No public call comes so far: the core looks again at what Python has looked at.
    x, lse = torch.zeros(2, 3, device=device), torch.zeros(2, device=device)
    wrong_gradient = (ops.logsumexp_backward.default, torch.zeros(3, device=device), x, lse, [1], False)
    assert_refused_by(through_call, ValueError, r"grad_out has shape \[3\], expected \[2\]", *wrong_gradient)
    wrong_lse = (ops.logsumexp_backward.default, lse, x, lse.half(), [1], False)
    assert_refused_by(through_call, ValueError, r"lse has dtype float16, expected float32", *wrong_lse)
    wrong_axis = (ops.logsumexp_forward.default, x, [2], False, torch.float32)
    assert_refused_by(through_call, ValueError, r"contains 2, expected -2 to 1", *wrong_axis)
    wrong_dtype = (ops.logsumexp_forward_lse.default, x, [1], False, torch.float16)
    assert_refused_by(through_call, ValueError, r"out has dtype float16, expected", *wrong_dtype)


def test_what_the_core_does_not_have_is_a_not_implemented_error(device: torch.device) -> None:
    x = torch.zeros([1] * 17, device=device)
    for overload in (ops.logsumexp_forward.default, ops.logsumexp_forward_lse.default):
        arguments = (overload, x, [0], False, torch.float32)
        assert_refused_by(through_call, NotImplementedError, r"x has 17 axes, expected at most 16", *arguments)
    arguments = (ops.logsumexp_forward.default, x[0].to(torch.complex64), [0], False, torch.float32)
    assert_refused_by(through_call, NotImplementedError, r"x has a dtype that eaves does not have", *arguments)
    arguments = (ops.logsumexp_forward.default, x[0], [0], False, torch.complex64)
    assert_refused_by(through_call, NotImplementedError, r"dtype has a dtype that eaves does not have", *arguments)


def test_what_torch_adds_below_a_sentence_is_left_out() -> None:
    # Such as the stack of C++ calls, with TORCH_SHOW_CPP_STACKTRACES=1.
    def fails(*arguments: object) -> None:
        raise RuntimeError("eaves.InvalidArgument: logsumexp_forward: x is wrong\nException raised from a.cpp")

    assert_refused_by(through_call, ValueError, "^logsumexp: x is wrong$", fails)


def test_an_error_that_is_not_ours_stays_what_it_is() -> None:
    def fails(*arguments: object) -> None:
        raise RuntimeError("the device is on fire")

    with pytest.raises(RuntimeError, match=r"^the device is on fire$") as caught:
        through_call(fails)
    assert caught.type is RuntimeError


# -------------------------------------------------------------------------------- calls that go round the core's checks


def refused_by(function: Callable[[Tensor], Tensor], x: Tensor) -> str:
    with pytest.raises(Exception) as caught:
        function(x)
    assert "eaves.InvalidArgument" not in str(caught.value)
    return str(caught.value)


def test_tensors_without_data_have_the_same_axes(device: torch.device) -> None:
    with FakeTensorMode():
        assert_refused(ValueError, r"contains 2, expected -2 to 1", torch.zeros(2, 3, device=device), 2)
        assert_refused(ValueError, r"each axis once", torch.zeros(2, 3, device=device), (1, -1))
    assert_refused(ValueError, r"contains 2, expected -2 to 1", torch.zeros(2, 3, device="meta"), 2)
    assert_refused(ValueError, r"each axis once", torch.zeros(2, 3, device="meta"), (1, -1))
    assert_refused(NotImplementedError, r"17 axes, expected at most 16", torch.zeros([1] * 17, device="meta"), 0)


def test_the_batch_of_vmap_is_no_axis(device: torch.device) -> None:
    x = torch.zeros(2, 3, device=device)
    for dim in (1, -2):
        for function in (
            lambda row, dim=dim: eaves.logsumexp(row, dim),
            torch.func.grad(lambda row, dim=dim: eaves.logsumexp(row, dim)),
        ):
            text = refused_by(torch.vmap(function), x)
            assert f"contains {dim}, expected -1 to 0 (x has 1 axes)" in text, text


@pytest.mark.parametrize("wants_grad", [False, True])
def test_a_compiled_call_is_refused_with_the_same_sentence(
    wants_grad: bool, device: torch.device, fresh_compiler: None
) -> None:
    x = torch.zeros(2, 3, device=device, requires_grad=wants_grad)
    compiled = torch.compile(lambda t: eaves.logsumexp(t, 5), fullgraph=True, backend="aot_eager")
    assert "contains 5, expected -2 to 1 (x has 2 axes)" in refused_by(compiled, x)


def test_forward_over_reverse_is_refused_by_name(device: torch.device) -> None:
    x = torch.zeros(3, device=device)
    with pytest.raises(NotImplementedError, match=r"^logsumexp.*forward"):
        torch.func.hessian(lambda t: eaves.logsumexp(t, 0))(x)
