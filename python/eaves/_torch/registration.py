"""Registers operators with PyTorch: derivatives, fake implementations, batching rules, and overloads that take their
numbers as a tensor."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.fx
from torch import Tensor
from torch.autograd import forward_ad

from eaves._torch.checks import check_device, refuse_gradient
from eaves._torch.transforms import is_exporting, is_transforming

if TYPE_CHECKING:
    OpOverload = torch._ops.OpOverload[Any, Any]


def record_of(overload: OpOverload) -> Any:
    """The class of a named tuple of the operator's arguments, made from its schema."""
    make: Any = namedtuple  # mypy would have to know the fields
    return make("Arguments", [each.name for each in overload._schema.arguments])


def parameters_of(overload: OpOverload) -> str:
    """The arguments in the operator's schema, for the schema of an operator that takes more."""
    return str(overload._schema).partition("(")[2].rpartition(") -> ")[0]


below_autograd: Callable[[], AbstractContextManager[object]] = torch._C._AutoDispatchBelowAutograd

_Function = TypeVar("_Function", bound=Callable[..., Any])

_fragment = torch.library.Library("eaves", "FRAGMENT")  # type: ignore[no-untyped-call]
with_number_tensor: dict[OpOverload, OpOverload] = {}


def _overload_with_number_tensor(overload: OpOverload) -> OpOverload | None:
    """The overload with one more tensor in front, whose numbers replace the argument `numbers`. The first request
    defines it. None if the operator has no such argument, or if it writes in place: torch.compile never calls such an
    operator."""
    schema = overload._schema
    names = [each.name for each in schema.arguments]
    if "numbers" not in names or schema.is_mutable:
        return None
    if overload not in with_number_tensor:
        name = schema.name.removeprefix("eaves::")

        def kernel(number_tensor: Tensor, *arguments: object) -> Any:
            whole = [*arguments, *_defaults_behind(overload, arguments)]
            whole[names.index("numbers")] = number_tensor.tolist()
            return overload(*whole)

        # The kernel reads memory of the host, and a CUDA graph would not read it again.
        tags = [tag] if (tag := getattr(torch.Tag, "cudagraph_unsafe", None)) is not None else []
        arguments = str(schema).partition("(")[2]
        _fragment.define(f"{name}.numbers(Tensor number_tensor, {arguments}", tags=tags)  # type: ignore[no-untyped-call]
        _fragment.impl(f"{name}.numbers", kernel, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
        with_number_tensor[overload] = getattr(torch.ops.eaves, name).numbers
    return with_number_tensor[overload]


def refuse_lost_derivatives(op: str, *overloads: OpOverload) -> None:
    """Makes direct calls of the operators raise an error if one of their tensors needs a derivative. The extension's
    operators have no derivatives, an autograd.Function around them has: without the error, the derivative would be lost
    silently."""
    for overload in overloads:
        _register_autograd(op, overload, None)


def give_derivative(op: str, overload: OpOverload, function: Callable[..., Any], *differentiable: str) -> None:
    """Registers the derivative that programs of torch.export and direct calls use: `function` computes the same as
    `overload`, through an autograd.Function. Calls of eaves' functions bypass it, see `call`."""
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
        # While a model is exported, its parameters require gradients; the program asks again when it runs.
        is_tracked = torch.is_grad_enabled() and not is_exporting() and any(each.requires_grad for _, each in tensors)
        is_dual = any(has_tangent(each) for _, each in tensors)
        if is_dual or (is_tracked and (function is None or is_transforming())):
            where = "in a program of torch.export or a direct call of torch.ops.eaves"
            if function is not None:
                where = (
                    "if one of them or forward mode is around a program of torch.export or a call of torch.ops.eaves"
                )
            raise NotImplementedError(
                f"{op}: its derivative is lost if torch.compile traces torch.vmap or a transform of torch.func, and "
                f"{where}; leave transforms outside of torch.compile, and call eaves.{op}"
            )
        if is_tracked and function is not None:
            for name, each in tensors:
                if name not in differentiable:
                    refuse_gradient(op, name, each)
            return function(*arguments, *_defaults_behind(overload, arguments))
        with below_autograd():
            return overload(*arguments)

    return kernel


def has_tangent(tensor: Tensor) -> bool:
    is_dual = getattr(forward_ad, "_current_level", 0) >= 0
    return is_dual and forward_ad.unpack_dual(tensor).tangent is not None  # type: ignore[no-untyped-call]


def define(schema: str, kernel: Callable[..., Any]) -> OpOverload:
    """Defines an operator that Python computes from the extension's operators and collectives. torch.compile does not
    trace into it."""
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
            # For CUDA graphs inductor moves number_tensor to the GPU, and the kernel reads it there too.
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
    """Checks that all tensors are on one device. If one is on the device "meta", the dispatcher takes the fake
    implementation, whatever devices the others have."""
    tensors = [
        (each.name, value) for each, value in zip(overload._schema.arguments, arguments) if isinstance(value, Tensor)
    ]
    for name, tensor in tensors[1:]:
        if name == "place":  # an argument of _parallel/, always on the CPU
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
    """The values of the arguments that PyTorch leaves out at the end of a call, because they are defaults."""
    return [argument.default_value for argument in overload._schema.arguments[len(arguments) :]]


def batch_first(info: Any, in_dims: tuple[int | None, ...], *tensors: Tensor) -> tuple[Tensor, ...]:
    """For a batching rule: each tensor with its batch as the first axis; one without a batch is repeated, not copied.

    `in_dims` begins with the batch axes of `tensors`.
    """
    return tuple(
        tensor.expand(info.batch_size, *tensor.shape) if axis is None else tensor.movedim(axis, 0)
        for tensor, axis in zip(tensors, in_dims)
    )


def of_each(overload: OpOverload, info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[Any, Any]:
    """For a batching rule without a faster way: calls the operator for each sample. Returns the results and their batch
    axes."""
    results = [overload(*sample) for sample in each_of_batch(info, in_dims, *arguments)]
    if isinstance(results[0], Tensor):
        return torch.stack(results), 0
    stacked = type(results[0])(torch.stack(each) for each in zip(*results))
    return stacked, type(stacked)(0 for _ in stacked)


def each_of_batch(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> list[list[Any]]:
    """The arguments of each sample."""
    return [
        [
            value.select(axis, index) if isinstance(value, Tensor) and axis is not None else value
            for value, axis in zip(arguments, in_dims)
        ]
        for index in range(info.batch_size)
    ]
