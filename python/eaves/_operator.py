"""What the Python side of every operator shares: checks of arguments, the way into the extension and its errors, and
the question whether autograd has to know of a call.

An operator is one or more functions of the extension, a fake implementation and a batching rule for each, and where it
has a gradient a torch.autograd.Function outside of them. The Function stands outside because that is cheaper for each
call than registering a gradient, and torch.compile traces it. A program of torch.export contains the forward's operator
alone, so that one has the Function registered too (`give_derivative`).
"""

from __future__ import annotations

import inspect
import math
import operator
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar, cast

import torch
import torch.fx
from torch import Tensor
from torch.autograd import forward_ad

from eaves import _library  # noqa: F401  # the operators have to be there before they are described
from eaves._words import renamed

DTYPES = frozenset({
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool,
})  # fmt: skip

_DENSE = "expected dense ones (torch.strided) on cpu or cuda"

MAX_RANK = 16  # kMaxRank of include/eaves/tensor.h

if TYPE_CHECKING:
    OpOverload = torch._ops.OpOverload[Any, Any]

_Function = TypeVar("_Function", bound=Callable[..., Any])


def check_tensor(op: str, name: str, value: Any) -> None:
    """Raises TypeError where `value` is no tensor, NotImplementedError where it is one that eaves does not have."""
    kind = type(value)
    if kind is not Tensor and kind is not torch.nn.Parameter:
        _check_kind(op, name, value)
    if value.is_nested:  # it has no shape to look at
        raise NotImplementedError(f"{op}: {name} is {_kind_of(value)}, {_DENSE}")
    if value.dim() > MAX_RANK:
        raise NotImplementedError(f"{op}: {name} has {value.dim()} axes, expected at most {MAX_RANK}")
    if value.dtype not in DTYPES:
        raise NotImplementedError(
            f"{op}: {name} has dtype {name_of(value.dtype)}, expected one of " + ", ".join(sorted(map(name_of, DTYPES)))
        )


def check_device(op: str, name: str, tensor: Tensor, reference_name: str, reference: Tensor) -> None:
    """Raises ValueError where the two are on different devices. The dispatcher does not look: of a tensor on the CPU
    and one on the device "meta" it makes a result without values."""
    if tensor.device != reference.device:
        hint = "; if accelerate offloads it, keep it on a device (device_map)"
        is_offloaded = tensor.is_meta and isinstance(tensor, torch.nn.Parameter)
        raise ValueError(
            f"{op}: {name} is on {tensor.device}, expected {reference.device} (as {reference_name})"
            + (hint if is_offloaded else "")
        )


def check_shape(op: str, name: str, tensor: Tensor, expected: Sequence[int], why: str) -> None:
    """Raises ValueError in the words of the core's check::has_shape."""
    if tensor.shape != tuple(expected):
        raise ValueError(f"{op}: {name} has shape {list(tensor.shape)}, expected {list(expected)} ({why})")


def check_dtype_of(op: str, name: str, tensor: Tensor, expected: Sequence[torch.dtype], why: str) -> None:
    """Raises ValueError in the words of the core's check::has_dtype."""
    if tensor.dtype not in expected:
        names = " or ".join(dict.fromkeys(map(name_of, expected)))
        raise ValueError(f"{op}: {name} has dtype {name_of(tensor.dtype)}, expected {names} ({why})")


def _check_kind(op: str, name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{op}: {name} is a {type(value).__name__}, expected a torch.Tensor")
    # A tensor that is distributed can only be there when its module is.
    distributed = sys.modules.get("torch.distributed.tensor")
    if distributed is not None and isinstance(value, distributed.DTensor):
        raise NotImplementedError(
            f"{op}: {name} is a DTensor, expected a tensor of one device; pass {name}.full_tensor(), where ranks have "
            "rows of their own with grad_placements=[Partial('avg')] (of torch.distributed.tensor), or its gradient is "
            f"one rank's, or {name}.to_local(), where what is missing there is not needed"
        )


def is_foreign(tensor: object) -> bool:
    """Whether it is of a class that is not PyTorch's, which may keep the numbers in another form."""
    kind = type(tensor)
    is_plain = kind is Tensor or kind is torch.nn.Parameter
    return not is_plain and isinstance(tensor, Tensor) and not kind.__module__.startswith("torch.")


def refuse_foreign(op: str, name: str, tensor: Tensor, error: Exception | None = None) -> NoReturn:
    kind = type(tensor)
    raise NotImplementedError(
        f"{op}: {name} is a {kind.__module__}.{kind.__qualname__} of {name_of(tensor.dtype)}, which eaves does not "
        "read, expected a torch.Tensor of floating-point numbers; pass it dequantised, as a torch.Tensor"
    ) from error


def check_not_packed(op: str, name: str, head: Tensor) -> None:
    """Of a head in the integers of a quantisation the shape and the dtype say nothing about the numbers."""
    if not head.is_floating_point() and is_foreign(head):
        refuse_foreign(op, name, head)


def explain(op: str, error: Exception, **tensors: object) -> None:
    """Raises a refusal in place of an error that comes of a tensor whose class has operators of its own."""
    if isinstance(error, (ValueError, torch.OutOfMemoryError)) or str(error).startswith(f"{op}: "):
        return
    for name, tensor in tensors.items():
        has_operators = getattr(type(tensor), "__torch_dispatch__", None) is not Tensor.__torch_dispatch__
        if has_operators and is_foreign(tensor):
            refuse_foreign(op, name, cast("Tensor", tensor), error)


def check_dtype(op: str, dtype: object, *expected: torch.dtype) -> None:
    """Raises TypeError where the argument `dtype` is none, ValueError where it is not an expected one."""
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{op}: dtype is {dtype!r}, expected a torch.dtype")
    if dtype not in expected:
        names = " or ".join(dict.fromkeys(map(name_of, expected)))
        raise ValueError(f"{op}: dtype is {name_of(dtype)}, expected {names}")


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def axes_of(op: str, x: Tensor, dim: int | Sequence[int]) -> tuple[int, ...]:
    """The axes of x that `dim`, one axis or several, names; none are all.

    Raises TypeError for what is no axis, ValueError for an axis that x does not have, or that is there twice. The core
    checks the same, but it sees neither a fake tensor nor, under torch.vmap, which axis is the batch.
    """
    if type(dim) is int:
        axes: tuple[int, ...] = (dim,)
    else:
        try:
            axes = tuple(map(_as_axis, dim)) if isinstance(dim, Sequence) else (_as_axis(dim),)
        except TypeError:
            raise TypeError(f"{op}: dim is {dim!r}, expected an int or a sequence of ints") from None
    # As in torch, a tensor without axes has an axis 0 that may be named.
    rank = x.dim() or 1
    for axis in axes:
        if not -rank <= axis < rank:
            raise ValueError(f"{op}: dim contains {axis}, expected {-rank} to {rank - 1} (x has {x.dim()} axes)")
    if len(axes) > 1 and len({axis % rank for axis in axes}) < len(axes):
        raise ValueError(f"{op}: dim is {list(axes)}, expected each axis once (x has {x.dim()} axes)")
    return axes


def _as_axis(value: object) -> int:
    if isinstance(value, (bool, Tensor)):
        raise TypeError
    return operator.index(value)  # type: ignore[arg-type]  # numpy's integers too


def refuse_gradient(op: str, name: str, tensor: Tensor) -> None:
    if tensor.requires_grad and torch.is_grad_enabled():
        raise NotImplementedError(
            f"{op}: there is no derivative with respect to {name}, which requires one; pass {name}.detach()"
        )


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """What sums of a dtype are kept in, and losses are returned in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def check_bool(op: str, name: str, value: object) -> None:
    if value is not True and value is not False:
        raise TypeError(f"{op}: {name} is {value!r}, expected a bool")


def number_of(op: str, name: str, value: object, low: float, high: float, expected: str) -> float:
    """`value` as a float in [low, high], an infinite bound itself excluded.

    Raises TypeError where it is no number, ValueError where it is another one.
    """
    # A float or an int may be a symbol of torch.compile, which follows neither hasattr nor math.isinf of one; in
    # torch.export a symbol has a type of its own.
    number: Any = value
    if isinstance(value, (torch.SymFloat, torch.SymInt)):
        number = torch.sym_float(value)  # type: ignore[no-untyped-call]
    elif type(value) is not float:
        is_number = type(value) is int or (not isinstance(value, (bool, Tensor, str)) and hasattr(value, "__float__"))
        if not is_number:
            raise TypeError(f"{op}: {name} is {value!r}, expected {expected}")
        try:
            number = float(number)
        except OverflowError:  # of an int
            number = math.inf
        except (TypeError, ValueError):  # of an array
            raise TypeError(f"{op}: {name} is a {type(value).__name__}, expected {expected}") from None
    if not (low <= number <= high and -math.inf < number < math.inf):
        raise ValueError(f"{op}: {name} is {value_for_message(value)}, expected {expected}")
    return number  # type: ignore[no-any-return]


def value_for_message(value: object) -> str:
    """torch.compile writes no symbol into a message."""
    return "out of range" if torch.compiler.is_compiling() else repr(value)


_LARGEST_INDEX = 2**63 - 1  # of an int of the extension


def index_of(op: str, name: str, value: object) -> int:
    """`value` as an int of 64 bits. Raises TypeError where it is no integer, ValueError where it is a larger one."""
    index: Any = value
    if type(value) is not int and not isinstance(value, torch.SymInt):
        if isinstance(value, (bool, Tensor)):
            _no_index(op, name, value)
        try:
            index = operator.index(value)  # type: ignore[arg-type]  # numpy's integers too
        except TypeError:
            _no_index(op, name, value)
    if not -_LARGEST_INDEX - 1 <= index <= _LARGEST_INDEX:
        raise ValueError(f"{op}: {name} is {value_for_message(index)}, expected an int of 64 bits")
    return index  # type: ignore[no-any-return]


def _no_index(op: str, name: str, value: object) -> NoReturn:
    raise TypeError(f"{op}: {name} is {value!r}, expected an int")


def dispatch(
    op: str,
    tensors: Sequence[Tensor],
    function: type[torch.autograd.Function],
    overload: OpOverload,
    *arguments: object,
    number_tensor: Tensor | None = None,
) -> Any:
    """`function.apply(*arguments)` where a derivative with respect to one of `tensors` is asked for, else
    `overload(*arguments)`, which is the same without a graph. A function whose operator takes floats has one argument
    more than that, the `number_tensor`."""
    if not needs_function(*tensors):
        return call(op, overload, *arguments, number_tensor=number_tensor)
    has_numbers = overload in _with_number_tensor
    return apply(op, function, *arguments, *([number_tensor] if has_numbers else []))


def apply(op: str, function: type[torch.autograd.Function], *arguments: object) -> Any:
    """`function.apply(*arguments)`, for less of the host's time, and with the refusal of forward mode in words."""
    if torch.compiler.is_compiling():
        return function.apply(*arguments)  # type: ignore[no-untyped-call]
    try:
        if is_transforming():
            return function.apply(*arguments)  # type: ignore[no-untyped-call]
        # What Function.apply comes to without torch.func, for which it looks at the signature of the forward again in
        # each call (PyTorch 2.13, AMD EPYC: 30 us a call, so 9).
        return super(torch.autograd.Function, function).apply(*arguments)  # type: ignore[misc]
    except NotImplementedError as error:
        if "jvp" not in str(error):
            raise
        raise NotImplementedError(
            f"{op}: there is no forward-mode derivative; use the reverse mode (torch.autograd.grad, torch.func.vjp; "
            "of what has a second derivative, jacrev(jacrev(f)) is the Hessian)"
        ) from None


class _Bound(NamedTuple):
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def apply_defaults(self) -> None:
        pass


class _Positional(inspect.Signature):
    """The signature of a forward whose arguments are all given, and by their places."""

    def bind(self, *args: Any, **kwargs: Any) -> Any:
        return _Bound(args, kwargs)


def binds_quickly(function: type[torch.autograd.Function]) -> type[torch.autograd.Function]:
    """PyTorch 2.15 asks for the signature of a forward beside a setup_context in each call, and binds its arguments (8
    of 13 us, AMD EPYC). Here it finds one that binds nothing."""
    parameters = list(inspect.signature(function.forward).parameters.values())
    function.forward.__signature__ = _Positional(parameters)  # type: ignore[attr-defined]
    return function


def uncompiled(op: str, function: Callable[..., Any], when: str = "") -> Callable[..., Any]:
    """The function, and all that it calls, as torch.compile leaves it alone: a frame that cannot be compiled runs as it
    is, but those that it calls are tried again, each for itself, where a side effect of a backward would be lost."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and to load it would take seconds
        return function
    if torch.compiler.is_compiling():
        # torch.compiler.disable breaks the graph too, but fullgraph=True would not say whose call it is.
        torch._dynamo.graph_break(msg=f"{op}: {when}{OUTSIDE}")
    disabled: Callable[..., Any] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return disabled


OUTSIDE = "it runs outside of the graph that torch.compile makes; leave fullgraph=True out"


# They are not public. Where a later PyTorch lacks one of the first two, calls take the longer way, and cost more.
is_transforming: Callable[[], bool] = getattr(torch._C, "_are_functorch_transforms_active", lambda: True)
_is_legacy_batched: Callable[[Tensor], bool] = getattr(
    torch._C._functorch, "is_legacy_batchedtensor", lambda tensor: False
)
_is_in_dispatch_mode: Callable[[], int] = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 1)
_below_autograd: Callable[[], AbstractContextManager[object]] = torch._C._AutoDispatchBelowAutograd


def is_batched(upstream: Tensor) -> bool:
    """In a backward: may what it computes have a batch? Either of torch.func, or of is_grads_batched."""
    return is_transforming() or _is_legacy_batched(upstream)


def is_exporting() -> bool:
    # torch.compiler.is_exporting() is True in all that PyTorch 2.11 compiles.
    return bool(getattr(torch.compiler, "_is_exporting_flag", False))


def needs_function(*tensors: Tensor) -> bool:
    """True where a call has to go through its autograd.Function: where a derivative depends on it, and always under
    torch.compile. Never in a program of torch.export, which would keep the forward of the Function alone: there the
    operator has its derivative, see `give_derivative`."""
    if torch.compiler.is_compiling():
        return not is_exporting()
    return needs_autograd(*tensors)


def needs_autograd(*tensors: Tensor) -> bool:
    """True where a call has to go through its autograd.Function, because a derivative depends on it."""
    if is_transforming() or getattr(forward_ad, "_current_level", 0) >= 0:
        return True  # under torch.func a tensor may depend on others without saying so
    if torch.is_grad_enabled():
        for tensor in tensors:  # any() costs more
            if tensor.requires_grad:
                return True
    return False


def call_plainly(overload: OpOverload, function: type[torch.autograd.Function], x: Tensor, y: Tensor) -> Any:
    """The first result of `overload(x, y)` for arguments that are not checked yet, by `function` where one of them
    requires a gradient; None where the way with the checks is to be taken: the call needs more, or the extension has
    refused it (`run_plainly` in the function's forward). Outside of torch.compile only.

    The extension checks the same things; the checks of the caller know the user's words, and cost half of a small call.
    """
    is_plain = type(x) is type(y) is Tensor and not (x.is_meta or y.is_meta or _is_in_dispatch_mode())
    if not is_plain or is_transforming() or getattr(forward_ad, "_current_level", 0) >= 0:
        return None
    try:
        if not torch.is_grad_enabled() or not (x.requires_grad or y.requires_grad):
            return run_plainly(overload, x, y)[0]
        if y.is_floating_point():  # probabilities need more, and have no gradient
            return None
        return super(torch.autograd.Function, function).apply(x, y)  # type: ignore[misc]  # as in apply()
    except _Refused:
        return None


class _Refused(Exception):
    """By the extension."""


def run_plainly(overload: OpOverload, *arguments: object) -> Any:
    """`call` for call_plainly, which catches what the extension refuses."""
    try:
        with _below_autograd():
            return overload(*arguments)
    except RuntimeError as error:
        raise _Refused from error


def call(op: str, overload: OpOverload, *arguments: object, number_tensor: Tensor | None = None) -> Any:
    """Calls an operator of the extension, and raises its errors as what they are, in the name of `op`. Where there is a
    `number_tensor`, its numbers stand for those among the arguments."""
    if number_tensor is not None:
        overload, arguments = _with_number_tensor[overload], (number_tensor, *arguments)
    try:
        if torch.compiler.is_compiling():
            return overload(*arguments)
        with _below_autograd():
            return overload(*arguments)
    except (RuntimeError, NotImplementedError, TypeError) as error:
        _raise_as_what_it_is(op, error, overload, arguments)


def number_tensor_of(*numbers: float) -> Tensor | None:
    """The `numbers` of an operator of the extension as a tensor on the CPU, where torch.compile has a symbol for one of
    them; else None.

    Of a float argument torch.compile compiles an operator again for each value. A float stays variable only as an
    operand of tensor arithmetic, so each is multiplied by a tensor of 1.
    """
    if not torch.compiler.is_compiling() or is_transforming():  # batching rules take numbers as numbers
        return None
    from torch.fx.experimental.symbolic_shapes import has_static_value

    if all([has_static_value(number) for number in numbers]):  # torch.compile follows no generator here
        return None
    one = torch.ones((), dtype=torch.float64, device="cpu")
    return torch.stack([one * number for number in numbers])


_fragment = torch.library.Library("eaves", "FRAGMENT")  # type: ignore[no-untyped-call]
_with_number_tensor: dict[OpOverload, OpOverload] = {}


def _overload_with_number_tensor(overload: OpOverload) -> OpOverload | None:
    """The operator with one more tensor in front, whose numbers stand for its argument `numbers`; made when it is first
    asked for. None where there is no such argument, or where torch.compile never calls it: in place."""
    schema = overload._schema
    names = [each.name for each in schema.arguments]
    if "numbers" not in names or schema.is_mutable:
        return None
    if overload not in _with_number_tensor:
        name = schema.name.removeprefix("eaves::")

        def kernel(number_tensor: Tensor, *arguments: object) -> Any:
            whole = [*arguments, *_defaults_behind(overload, arguments)]
            whole[names.index("numbers")] = number_tensor.tolist()
            return overload(*whole)

        # It reads memory of the host, which a CUDA graph would not read again.
        tags = [tag] if (tag := getattr(torch.Tag, "cudagraph_unsafe", None)) is not None else []
        arguments = str(schema).partition("(")[2]
        _fragment.define(f"{name}.numbers(Tensor number_tensor, {arguments}", tags=tags)  # type: ignore[no-untyped-call]
        _fragment.impl(f"{name}.numbers", kernel, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
        _with_number_tensor[overload] = getattr(torch.ops.eaves, name).numbers
    return _with_number_tensor[overload]


# The marks of python/csrc/torch_binding.h.
_ERRORS: dict[str, type[Exception]] = {
    "eaves.InvalidArgument: ": ValueError,
    "eaves.Unsupported: ": NotImplementedError,
    "eaves.OutOfMemory: ": torch.OutOfMemoryError,
}

# The user's names of the arguments, by those of the core.
_NAMES = {
    "cross_entropy": {"logits": "input", "targets": "target", "class_axis": "class_dim"},
    "linear_cross_entropy": {
        "x": "input", "weight": "linear_weight", "bias": "linear_bias", "targets": "target", "class_weight": "weight",
    },
    "lrpe_cosine": {"offsets": "offset"},
}  # fmt: skip


def _raise_as_what_it_is(op: str, error: Exception, overload: OpOverload, arguments: tuple[object, ...]) -> NoReturn:
    message, names = str(error), _NAMES.get(op, {})
    for mark, kind in _ERRORS.items():
        _, found, sentence = message.partition(mark)
        if found:
            sentence = sentence.partition("\n")[0]
            prefix, _, rest = sentence.partition(": ")
            if prefix.startswith(op):  # the core says logsumexp_forward where the user called logsumexp
                sentence = renamed(rest, names)
            raise kind(f"{op}: {sentence}") from None
    parameters = [each.name for each in overload._schema.arguments]
    # Python's operators have the user's names, the extension's have the core's.
    users = [name if names.get(name, name) in parameters else names[name] for name in parameters]
    explain(op, error, **dict(zip(users, arguments)))
    if isinstance(error, NotImplementedError) and not message.startswith(f"{op}: "):
        # Not our own: the dispatcher has no kernel for this kind of tensor.
        kinds = sorted({_kind_of(argument) for argument in arguments if isinstance(argument, Tensor)})
        raise NotImplementedError(f"{op}: the tensors are {' and '.join(kinds)}, {_DENSE}") from None
    raise error


def _kind_of(tensor: Tensor) -> str:
    return f"{'nested' if tensor.is_nested else tensor.layout} on {tensor.device.type}"


def refuse_lost_derivatives(op: str, *overloads: OpOverload) -> None:
    """The operators of the extension have no derivatives: those are around them, in an autograd.Function. A direct call
    with a tensor of which a derivative is wanted would give none without a word."""
    for overload in overloads:
        _register_autograd(op, overload, None)


def give_derivative(op: str, overload: OpOverload, function: Callable[..., Any], *differentiable: str) -> None:
    """Registers the derivative that programs of torch.export and direct calls use: `function` computes the same as
    `overload` by an autograd.Function. Calls of eaves' functions go around it, see `call`."""
    _register_autograd(op, overload, function, differentiable)


def _register_autograd(
    op: str, overload: OpOverload, function: Callable[..., Any] | None, differentiable: Sequence[str] = ()
) -> None:
    def impl(overload: OpOverload, function: Callable[..., Any] | None) -> None:
        name = overload._name.removeprefix("eaves::").removesuffix(".default")
        kernel = _autograd_kernel(op, overload, function, differentiable)
        _fragment.impl(name, kernel, "Autograd")  # type: ignore[no-untyped-call]

    impl(overload, function)
    if (numbered := _overload_with_number_tensor(overload)) is not None:
        impl(numbered, function and (lambda number, *arguments: function(*arguments, number_tensor=number)))


def _autograd_kernel(
    op: str, overload: OpOverload, function: Callable[..., Any] | None, differentiable: Sequence[str]
) -> Callable[..., Any]:
    names = [each.name for each in overload._schema.arguments]

    def kernel(*arguments: object) -> Any:
        tensors = [(name, each) for name, each in zip(names, arguments) if isinstance(each, Tensor)]
        # A program is exported from a model with parameters, and asked here again when it runs.
        is_tracked = torch.is_grad_enabled() and not is_exporting() and any(each.requires_grad for _, each in tensors)
        has_tangent = any(_has_tangent(each) for _, each in tensors)
        if has_tangent or (is_tracked and (function is None or is_transforming())):
            where = "in a program of torch.export or a direct call of torch.ops.eaves"
            if function is not None:
                where = "where one or forward mode is around a program of torch.export or a call of torch.ops.eaves"
            raise NotImplementedError(
                f"{op}: its derivative is lost where torch.compile traces torch.vmap or a transform of torch.func, and "
                f"{where}; leave transforms outside of torch.compile, and call eaves.{op}"
            )
        if is_tracked and function is not None:
            for name, each in tensors:
                if name not in differentiable:
                    refuse_gradient(op, name, each)
            return function(*arguments, *_defaults_behind(overload, arguments))
        with _below_autograd():
            return overload(*arguments)

    return kernel


def _has_tangent(tensor: Tensor) -> bool:
    is_dual = getattr(forward_ad, "_current_level", 0) >= 0
    return is_dual and forward_ad.unpack_dual(tensor).tangent is not None  # type: ignore[no-untyped-call]


def define(schema: str, kernel: Callable[..., Any]) -> OpOverload:
    """An operator that is computed in Python, from those of the extension and collectives, and that torch.compile takes
    as it is."""
    name = schema.partition("(")[0]
    _fragment.define(schema)  # type: ignore[no-untyped-call]
    _fragment.impl(name, kernel, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    overload: OpOverload = getattr(torch.ops.eaves, name).default
    torch.fx.node.has_side_effect(overload)  # other ranks wait for it, whether or not its result is used
    return overload


def register_fake(op: str) -> Callable[[_Function], _Function]:
    """The decorator of an operator's fake implementation: shapes, strides and dtypes of the outputs, no data."""
    overload = getattr(torch.ops.eaves, op).default

    def decorate(fake: _Function) -> _Function:
        def checked(*arguments: object) -> Any:
            _check_devices(overload, arguments)
            return fake(*arguments, *_defaults_behind(overload, arguments))

        def with_number_tensor(number_tensor: Tensor, *arguments: object) -> Any:
            # For CUDA graphs inductor moves it to the GPU, where the kernel reads it as well.
            first = next(each for each in arguments if isinstance(each, Tensor))
            if number_tensor.device.type not in ("cpu", first.device.type):
                raise ValueError(f"{op}: number_tensor is on {number_tensor.device}, expected cpu or {first.device}")
            return checked(*arguments)

        torch.library.register_fake(f"eaves::{op}", checked)
        if _overload_with_number_tensor(overload) is not None:
            torch.library.register_fake(f"eaves::{op}.numbers", with_number_tensor)
        return fake

    return decorate


def _check_devices(overload: OpOverload, arguments: Sequence[object]) -> None:
    """With one tensor on the device "meta" the dispatcher takes the fake implementation, whatever the others are on."""
    tensors = [
        (each.name, value) for each, value in zip(overload._schema.arguments, arguments) if isinstance(value, Tensor)
    ]
    for name, tensor in tensors[1:]:
        if name == "place":  # of _ranks.py: on the CPU, whatever the others are on
            continue
        check_device(overload._schema.name.removeprefix("eaves::"), name, tensor, *tensors[0])


def register_vmap(op: str) -> Callable[[_Function], _Function]:
    """The decorator of an operator's batching rule, see torch.library.register_vmap."""

    overload = getattr(torch.ops.eaves, op).default

    def decorate(rule: _Function) -> _Function:
        def whole(info: Any, in_dims: tuple[int | None, ...], *arguments: object) -> Any:
            defaults = _defaults_behind(overload, arguments)
            return rule(info, in_dims + (None,) * len(defaults), *arguments, *defaults)

        torch.library.register_vmap(f"eaves::{op}", whole)
        return rule

    return decorate


def _defaults_behind(overload: OpOverload, arguments: Sequence[object]) -> list[Any]:
    """Torch leaves out the arguments at the end of a call that have their default; here they are."""
    return [argument.default_value for argument in overload._schema.arguments[len(arguments) :]]


def batch_first(info: Any, in_dims: tuple[int | None, ...], *tensors: Tensor) -> tuple[Tensor, ...]:
    """For a batching rule: each tensor with its batch as the first axis; one without a batch is repeated, not copied.

    `in_dims` begins with the batch axes of `tensors`.
    """
    return tuple(
        tensor.expand(info.batch_size, *tensor.shape) if axis is None else tensor.movedim(axis, 0)
        for tensor, axis in zip(tensors, in_dims)
    )


def each_of_batch(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> list[list[Any]]:
    """For a batching rule that has no better way: the arguments of each sample."""
    return [
        [
            value.select(axis, index) if isinstance(value, Tensor) and axis is not None else value
            for value, axis in zip(arguments, in_dims)
        ]
        for index in range(info.batch_size)
    ]
