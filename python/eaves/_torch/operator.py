"""Calls of the extension's operators, by an autograd.Function or without one, and the extension's errors.

An operator consists of one or more functions of the extension, with a fake implementation and a batching rule for each.
If it has a gradient, a torch.autograd.Function calls these functions from outside: a call then costs less than with a
registered gradient, and torch.compile traces the Function. A program of torch.export contains only the operator of the
forward, so the Function is registered for that operator too (`give_derivative`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from eaves._torch.checks import DENSE, explain, kind_of, said
from eaves._torch.registration import below_autograd, with_number_tensor
from eaves._torch.transforms import is_in_dispatch_mode, is_transforming, needs_function

if TYPE_CHECKING:
    from eaves._torch.registration import OpOverload


def dispatch(
    op: str,
    tensors: Sequence[Tensor],
    function: type[torch.autograd.Function],
    overload: OpOverload,
    *arguments: object,
    number_tensor: Tensor | None = None,
) -> Any:
    """`function.apply(*arguments)` if a derivative with respect to one of `tensors` may be needed (`needs_function`),
    else `overload(*arguments)`, which computes the same without a graph. If the operator takes floats, the function
    gets two more arguments, `number_tensor` and `op`."""
    if not needs_function(*tensors):
        return call(op, overload, *arguments, number_tensor=number_tensor)
    has_numbers = overload in with_number_tensor
    return apply(op, function, *arguments, *([number_tensor, op] if has_numbers else []))


def apply(op: str, function: type[torch.autograd.Function], *arguments: object) -> Any:
    """`function.apply(*arguments)`, in less of the host's time. The error for forward mode names `op` and the way
    out."""
    if is_compiling():
        return function.apply(*arguments)  # type: ignore[no-untyped-call]
    try:
        if is_transforming():
            return function.apply(*arguments)  # type: ignore[no-untyped-call]
        # Without torch.func, Function.apply ends in this call. Before it, for the sake of torch.func, it inspects the
        # signature of the forward in each call (PyTorch 2.13, AMD EPYC: 30 us a call, this line 9).
        return super(torch.autograd.Function, function).apply(*arguments)  # type: ignore[misc]
    except NotImplementedError as error:
        if "jvp" not in str(error):
            raise
        raise NotImplementedError(
            f"{op}: there is no forward-mode derivative; use the reverse mode (torch.autograd.grad, torch.func.vjp; "
            "for the Hessian of an operator with a second derivative jacrev(jacrev(f)))"
        ) from None


class _Bound(NamedTuple):
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def apply_defaults(self) -> None:
        pass


class _Positional(inspect.Signature):
    """The signature of a forward whose callers pass all arguments by position."""

    def bind(self, *args: Any, **kwargs: Any) -> Any:
        return _Bound(args, kwargs)


_Class = TypeVar("_Class", bound=type[torch.autograd.Function])


def takes(*names: str) -> Callable[[_Class], _Class]:
    """The decorator of a Function with a setup_context, whose forward takes arguments of these names.

    PyTorch 2.15 inspects the signature of such a forward in each call, and binds the arguments (8 of 13 us, AMD EPYC).
    The decorator gives the forward a signature that binds nothing. The signature has all the names, because
    torch.compile decides by the number of parameters whether the first is ctx."""
    parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY) for name in names]

    def decorate(function: _Class) -> _Class:
        function.forward.__signature__ = _Positional(parameters)  # type: ignore[attr-defined]
        return function

    return decorate


# A plain call has no options (of a head: only a reduction, an ignored class and numbers), and only PyTorch's eager mode
# follows it. Its tensors go to the extension unchecked: the extension makes the same checks. The checks in Python name
# the arguments as the user does, but they take half the time of a small call. They run only after the extension refuses
# the arguments (`Refused`).


class Refused(Exception):
    """The extension refuses the arguments of a plain call."""


def are_defaults(options: Sequence[object], defaults: Sequence[object]) -> bool:
    """Whether each option has its default. An equal option of another type is no default, because that type has its own
    checks."""
    for option, default in zip(options, defaults):
        if option is not default and (type(option) is not type(default) or option != default):
            return False
    return True


_PLAIN_KINDS = (Tensor, torch.nn.Parameter)


def is_eager(x: Any, y: Any) -> bool:
    """Whether only eager PyTorch follows a call of two tensors: both are on the CPU or both on GPUs, neither has a
    class of its own, and no tracer or transform is active. Not for use under torch.compile."""
    return (
        type(x) in _PLAIN_KINDS
        and type(y) in _PLAIN_KINDS
        and ((x.is_cpu and y.is_cpu) or (x.is_cuda and y.is_cuda))
        and not (is_in_dispatch_mode() or is_transforming())
        and getattr(forward_ad, "_current_level", 0) < 0
    )


def is_one(upstream: Tensor) -> bool:
    """Whether an upstream gradient without a batch is known to be 1, as in `loss.backward()`. On the CPU the host reads
    a number faster than it calls the operator that multiplies by it. Not for use under torch.compile."""
    is_readable = type(upstream) is Tensor and upstream.is_cpu and upstream.dim() == 0 and not is_in_dispatch_mode()
    return is_readable and upstream.item() == 1


def apply_plainly(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """The `apply` of a function that only plain calls use. It looks for no transform and no tracer."""
    plainly: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return plainly


def run_plainly(overload: OpOverload, *arguments: object) -> Any:
    """`call` for the forward of a plain call. Raises Refused if the extension raises an error."""
    try:
        with below_autograd():
            return overload(*arguments)
    except RuntimeError as error:
        raise Refused from error


def call(op: str, overload: OpOverload, *arguments: object, number_tensor: Tensor | None = None) -> Any:
    """Calls an operator of the extension. The extension's errors become Python's types of errors, in the name of `op`.
    The numbers of a `number_tensor` replace the numbers among the arguments."""
    if number_tensor is not None:
        overload, arguments = with_number_tensor[overload], (number_tensor, *arguments)
    try:
        if is_compiling():
            return overload(*arguments)
        with below_autograd():
            return overload(*arguments)
    except (RuntimeError, NotImplementedError, TypeError) as error:
        _raise_as_what_it_is(op, error, overload, arguments)


def number_tensor_of(*numbers: float) -> Tensor | None:
    """The `numbers` of an operator of the extension as a tensor on the CPU, if torch.compile has a symbol for one of
    them; else None.

    torch.compile compiles an operator again for each value of a float argument. A float stays a symbol only as an
    operand of tensor arithmetic, so each number is multiplied by a tensor of 1.
    """
    if not is_compiling() or is_transforming():  # batching rules take no number_tensor
        return None
    from torch.fx.experimental.symbolic_shapes import has_static_value

    if all([has_static_value(number) for number in numbers]):  # torch.compile follows no generator here
        return None
    one = torch.ones((), dtype=torch.float64, device="cpu")
    return torch.stack([one * number for number in numbers])


# The marks that python/csrc/torch_binding.h puts in front of an error, and the errors that they become.
_ERRORS: dict[str, type[Exception]] = {
    "eaves.InvalidArgument: ": ValueError,
    "eaves.Unsupported: ": NotImplementedError,
    "eaves.OutOfMemory: ": torch.OutOfMemoryError,
}


def _raise_as_what_it_is(op: str, error: Exception, overload: OpOverload, arguments: tuple[object, ...]) -> NoReturn:
    message = str(error)
    for mark, kind in _ERRORS.items():
        _, found, text = message.partition(mark)
        if found:  # the mark precedes the core's operator: logsumexp_forward if the user called logsumexp
            raise kind(said(op, text.partition("\n")[0].partition(": ")[2])) from None
    parameters = [each.name for each in overload._schema.arguments]
    explain(op, error, **dict(zip(parameters, arguments)))
    if isinstance(error, NotImplementedError) and not message.startswith(f"{op}: "):
        # The error is not our own: the dispatcher has no kernel for this kind of tensor.
        kinds = sorted({kind_of(argument) for argument in arguments if isinstance(argument, Tensor)})
        raise NotImplementedError(f"{op}: the tensors are {' and '.join(kinds)}, {DENSE}") from None
    raise error


# ------------------------------------------------------------------------------------------------------------- autograd


# For each function without a second derivative, PyTorch's functions that have one.
_TWICE_DIFFERENTIABLE = {
    "cross_entropy": "torch.nn.functional.cross_entropy",
    "log_prob": "torch.log_softmax",
    "linear_cross_entropy": "torch.nn.functional.linear and cross_entropy",
    "linear_log_prob": "torch.nn.functional.linear and torch.log_softmax",
    "linear_log_prob_loss": "torch.nn.functional.linear and torch.log_softmax",
    "linear_kl_div": "torch.nn.functional.linear and kl_div",
}


def _refuse_second_derivative(op: str) -> NoReturn:
    way_out = _TWICE_DIFFERENTIABLE[op]
    raise NotImplementedError(f"{op}: there is no second derivative; use {way_out} if you need one")


def gradient_function(overload: OpOverload) -> type[torch.autograd.Function]:
    """A Function of the operator `overload`, the gradient of a loss. The Function has no derivative itself."""

    names = [each.name for each in overload._schema.arguments if not each.has_default_value()]

    @takes(*names, "number_tensor", "op")
    class Gradient(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(*arguments: Any) -> Any:
            *given, number_tensor, op = arguments
            return call(op, overload, *given, number_tensor=number_tensor)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            ctx.op = inputs[-1]

        @staticmethod
        def backward(ctx: Any, *_: Any) -> NoReturn:
            _refuse_second_derivative(ctx.op)

    return Gradient


class _Computed(torch.autograd.Function):
    """The result of `compute`, which depends on the tensors that follow it. The result has no derivative."""

    @staticmethod
    def forward(
        ctx: Any, op: str, compute: Callable[[], tuple[Tensor | None, ...]], *_: Tensor
    ) -> tuple[Tensor | None, ...]:
        ctx.op = op
        return compute()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> NoReturn:
        _refuse_second_derivative(ctx.op)


def gradients_of(
    op: str, compute: Callable[[], tuple[Tensor | None, ...]], *differentiable: Tensor | None
) -> tuple[Tensor | None, ...]:
    """The result of `compute` in a backward. With create_graph=True the result refuses to be differentiated."""
    if not torch.is_grad_enabled():
        return compute()
    computed: tuple[Tensor | None, ...] = _Computed.apply(op, compute, *differentiable)  # type: ignore[no-untyped-call]
    return computed
