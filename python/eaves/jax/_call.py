"""The way from a JAX array into the library: one primitive, whose parameter is the call.

A Call names the function of the core and its arrays; shapes are the shapes of the arrays. From the outside in, two
rules surround the primitive: the batching rule of jax.vmap (jax.custom_batching.custom_vmap), and the rule by which XLA
cuts a call over devices (custom_partitioning). Derivatives are further out, in the operators' own files.
"""

# mypy: disallow-untyped-calls=False

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap, sequential_vmap
from jax.custom_derivatives import SymbolicZero
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import mlir

from eaves.jax._library import PRODUCTS_TARGET, ROWS_TARGET, workspace


@dataclasses.dataclass(frozen=True)
class Operand:
    """A tensor of a call.

    `factors` has a name for each axis: axes of the same name have the same size. Names that begin with "r" are factors
    of the rows, which XLA may cut over devices; other factors are never cut. jax.vmap adds its batch to `per_row`
    tensors as one more axis of rows, at `batch_axis`. `axes` is the core's order of the axes if it differs from the
    array's. `values` are valid example values, which the core checks on the CPU while there is no array yet.
    """

    name: str
    factors: tuple[str, ...]
    per_row: bool = True
    axes: tuple[int, ...] | None = None
    batch_axis: int = 0
    values: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Result(Operand):
    """A tensor that the call writes. If it has no factors of the rows, it is a sum over the rows."""

    shape: tuple[int, ...] = ()
    dtype: Any = np.float32


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of the core's `function`. `op` and `names` are the operator and its arguments under the user's names, for
    errors. `aliases` are pairs of numbers, a result and the operand that it is written over. With `has_fixed_rank` the
    core takes no further axes of rows, and the batch of jax.vmap becomes a part of the first one."""

    op: str
    function: str
    operands: tuple[Operand, ...]
    results: tuple[Result, ...]
    numbers: tuple[tuple[str, Any], ...] = ()
    names: tuple[tuple[str, str], ...] = ()
    aliases: tuple[tuple[int, int], ...] = ()
    has_fixed_rank: bool = False

    def run(self, *operands: Any) -> tuple[Any, ...]:
        """The results on one device: the primitive, without its rules."""
        return tuple(_call_p.bind(*operands, call=self))

    @functools.cached_property
    def description(self) -> str:
        """The text that python/csrc/jax/call.h documents."""
        tensors: tuple[Operand, ...] = (*self.operands, *self.results)
        described: dict[str, Any] = {
            "function": self.function,
            "tensors": [tensor.name for tensor in tensors],
            "numbers": dict(self.numbers),
            "op": self.op,
            "names": dict(self.names),
        }
        permutations = {tensor.name: tensor.axes for tensor in tensors if tensor.axes is not None}
        if permutations:
            described["permutations"] = permutations
        return json.dumps(described)

    def workspace(self, platform: str, operands: Sequence[Any]) -> Any:
        """The scratch memory of the call for such operands. If the core refuses them, raises its error."""
        tensors = [*operands, *self.results]
        question = {
            "call": self.description,
            "device": platform,
            "tensors": [
                {"dtype": np.dtype(tensor.dtype).name, "shape": tensor.shape, "values": described.values}
                for tensor, described in zip(tensors, (*self.operands, *self.results))
            ],
            "aliases": [(len(operands) + result, operand) for operand, result in self.aliases],
        }
        return workspace(json.dumps(question))


def bind(call: Call, *operands: jax.Array) -> tuple[jax.Array, ...]:
    """The results of a call. Arguments that the core refuses raise its error here, while JAX traces."""
    for array in operands:
        if not all(isinstance(size, int) for size in array.shape):
            raise NotImplementedError(f"{call.op}: an array has the shape {array.shape}, expected numbers alone")
    call.workspace("cpu", operands)
    mesh = explicit_mesh(*operands)
    results: tuple[jax.Array, ...]
    results = _function(call)(*operands) if mesh is None else _on_explicit_mesh(mesh, call, operands)
    return results


def _on_explicit_mesh(mesh: Any, call: Call, operands: Sequence[jax.Array]) -> Any:
    """The call on a mesh with axes of AxisType.Explicit, on which types say how arrays are cut: each device computes
    its rows, and results are cut like the operands."""
    cuts = _cuts(call, [jax.typeof(array).sharding.spec for array in operands])
    place = functools.partial(_sharding, mesh, cuts=cuts)
    local = jax.shard_map(
        _local(call, mesh, cuts),
        mesh=mesh,
        in_specs=tuple(place(tensor).spec for tensor in call.operands),
        out_specs=tuple(place(tensor).spec for tensor in call.results),
        axis_names=set(mesh.explicit_axes),
        check_vma=False,
    )
    return local(*(jax.sharding.reshard(array, place(tensor)) for array, tensor in zip(operands, call.operands)))


def explicit_mesh(*arrays: jax.Array) -> Any:
    """The mesh of the arrays, if it has axes of AxisType.Explicit."""
    for array in arrays:
        mesh = jax.typeof(array).sharding.mesh
        if mesh.explicit_axes:
            return mesh
    return None


def alike(*arrays: Any) -> tuple[Any, ...]:
    """The arrays, made to vary over the same mesh axes inside of jax.shard_map. Therefore JAX sums the gradients of an
    array that all devices share."""
    axes = varying(*arrays)
    return tuple(vary(array, axes) for array in arrays)


def vary(array: Any, axes: frozenset[str]) -> Any:
    missing = () if array is None else tuple(sorted(axes - varying(array)))
    return jax.lax.pcast(array, missing, to="varying") if missing else array


def varying(*arrays: Any) -> frozenset[str]:
    """The mesh axes over which the arrays vary, inside of jax.shard_map."""
    return frozenset[str]().union(*(jax.typeof(array).mat.varying for array in arrays if array is not None))


# -------------------------------------------------------------------------------------------------------- the primitive

_call_p = Primitive("eaves_call")
_call_p.multiple_results = True


@_call_p.def_abstract_eval  # type: ignore[untyped-decorator]
def _(*operands: Any, call: Call) -> list[Any]:
    inside: dict[str, Any] = {}
    if operands and operands[0].mat.varying:  # inside of jax.shard_map
        whole = jax.sharding.NamedSharding(operands[0].sharding.mesh, jax.sharding.PartitionSpec())
        inside = {"manual_axis_type": operands[0].mat, "sharding": whole}
    return [jax.core.ShapedArray(result.shape, _dtype_outside(result.dtype), **inside) for result in call.results]


@_call_p.def_impl  # type: ignore[untyped-decorator]
def _(*operands: jax.Array, call: Call) -> Any:
    with jax.disable_jit(False):  # only a compiled program can run
        return _program(call)(*operands)


@functools.lru_cache(maxsize=4096)
def _program(call: Call) -> Any:
    return jax.jit(lambda *arrays: _call_p.bind(*arrays, call=call))


def _dtype_outside(dtype: Any) -> Any:
    """int32 for the core's int64 classes, because JAX has int64 only if it is enabled; any other dtype as it is."""
    return np.dtype(np.int32) if dtype == np.int64 else np.dtype(dtype)


def _lower(context: Any, *operands: Any, call: Call, platform: str) -> list[Any]:
    needed, buffer = call.workspace(platform, context.avals_in)
    written = [jax.core.ShapedArray(result.shape, np.dtype(result.dtype)) for result in call.results]
    scratch = [jax.core.ShapedArray((buffer,), np.dtype(np.uint8))] if buffer else []
    aliases = {operand: result for operand, result in call.aliases}
    target = PRODUCTS_TARGET if call.function.startswith("linear_") else ROWS_TARGET
    rule = jax.ffi.ffi_lowering(target, operand_output_aliases=aliases)
    results = rule(
        context.replace(avals_out=written + scratch), *operands, call=call.description, workspace_bytes=np.int64(needed)
    )
    return [
        _as_int32(result, each.shape) if each.dtype == np.int64 else result
        for result, each in zip(results, call.results)
    ]


def _as_int32(classes: Any, shape: tuple[int, ...]) -> Any:
    wanted = ir.RankedTensorType.get(shape, mlir.dtype_to_ir_type(np.dtype(np.int32)))
    return stablehlo.ConvertOp(wanted, classes).result


for _platform in ("cpu", "cuda"):
    mlir.register_lowering(_call_p, functools.partial(_lower, platform=_platform), platform=_platform)


# -------------------------------------------------------------------------------------------------------------- batches


@functools.lru_cache(maxsize=4096)
def _function(call: Call) -> Any:
    """The call as a function of its operands, with its rules."""
    batched = custom_vmap(_partitioned(call))

    @batched.def_vmap
    def _(axis_size: int, in_batched: Sequence[bool], *operands: jax.Array) -> tuple[Any, Any]:
        is_one_call = all(result.per_row for result in call.results) and all(
            tensor.per_row or not is_batched for tensor, is_batched in zip(call.operands, in_batched)
        )
        if is_one_call:
            outputs = _as_more_rows(call, axis_size, in_batched, operands)
        else:  # one by one
            axes = [0 if is_batched else None for is_batched in in_batched]
            outputs = jax.vmap(sequential_vmap(functools.partial(bind, call)), axes)(*operands)
        return outputs, (True,) * len(call.results)

    once = jax.custom_jvp(batched)

    @once.defjvp
    def _(*_: Any) -> Any:
        raise NotImplementedError(f"{call.op}: there is no second derivative; use JAX's own functions for one")

    return jax.jit(once, inline=True)


def _as_more_rows(call: Call, size: int, in_batched: Sequence[bool], operands: Sequence[jax.Array]) -> Any:
    """The call with the batch as the first axis of the rows, or merged into the first one if the core fixes their
    number."""
    arrays = [
        array if is_batched or not tensor.per_row else jnp.broadcast_to(array, (size, *array.shape))
        for tensor, array, is_batched in zip(call.operands, operands, in_batched)
    ]
    if call.has_fixed_rank:
        merged = [
            array.reshape(-1, *array.shape[2:]) if tensor.per_row else array
            for tensor, array in zip(call.operands, arrays)
        ]
        results = [dataclasses.replace(each, shape=(size * each.shape[0], *each.shape[1:])) for each in call.results]
        outputs = bind(dataclasses.replace(call, results=tuple(results)), *merged)
        return tuple(output.reshape(size, *each.shape) for output, each in zip(outputs, call.results))
    factor = f"rbatch{sum(name.startswith('rbatch') for name in call.results[0].factors)}"

    def more(tensor: Any, **changes: Any) -> Any:
        if not tensor.per_row:
            return tensor
        before, behind = tensor.factors[: tensor.batch_axis], tensor.factors[tensor.batch_axis :]
        return dataclasses.replace(tensor, factors=(*before, factor, *behind), **changes)

    of_all = dataclasses.replace(
        call,
        operands=tuple(map(more, call.operands)),
        results=tuple(more(result, shape=(size, *result.shape)) for result in call.results),
    )
    return bind(of_all, *(jnp.moveaxis(each, 0, of.batch_axis) for of, each in zip(call.operands, arrays)))


# -------------------------------------------------------------------------------------------------------------- devices


def _partitioned(call: Call) -> Any:
    """The call, cut over devices along its rows: each device computes its rows, and sums over rows are summed over
    devices."""

    local = call.run
    partitioned = custom_partitioning(local)
    tensors: tuple[Operand, ...] = (*call.operands, *call.results)
    # Shardy expects factors in the order in which a rule names them.
    factors = tuple(dict.fromkeys(factor for tensor in tensors for factor in tensor.factors))
    kept = {factor for result in call.results for factor in result.factors}

    def partition(mesh: Any, operand_shapes: Any, result_shapes: Any) -> Any:
        if mesh.empty:  # jax.set_mesh with uncut arrays: JAX gives no mesh, each device computes all
            return mesh, local, *(tuple(each.sharding for each in shapes) for shapes in (result_shapes, operand_shapes))
        cuts = _cuts(call, [shape.sharding.spec for shape in operand_shapes])
        placed = (tuple(_sharding(mesh, each, cuts) for each in tensors) for tensors in (call.results, call.operands))
        return mesh, _local(call, mesh, cuts), *placed

    def side(of: Sequence[Operand]) -> str:
        return ", ".join(" ".join(tensor.factors) for tensor in of)

    partitioned.def_partition(
        partition=partition,
        sharding_rule=f"{side(call.operands)} -> {side(call.results)}",
        reduction_factors=tuple(each for each in factors if each.startswith("r") and each not in kept),
        need_replication_factors=tuple(each for each in factors if not each.startswith("r")),
    )
    return partitioned


def _cuts(call: Call, specs: Sequence[Any]) -> dict[str, Any]:
    """The mesh axes that cut each factor of the rows, given how the operands are cut. An axis cuts one factor only."""
    cuts: dict[str, Any] = {}
    used: set[str] = set()
    for tensor, spec in zip(call.operands, specs):
        for factor, axis in zip(tensor.factors, spec):
            names = set(_names(axis))
            if factor.startswith("r") and names and factor not in cuts and not names & used:
                cuts[factor] = axis
                used |= names
    return cuts


def _sharding(mesh: Any, tensor: Operand, cuts: Mapping[str, Any]) -> Any:
    spec = jax.sharding.PartitionSpec(*(cuts.get(factor) for factor in tensor.factors))
    return jax.sharding.NamedSharding(mesh, spec)


def _local(call: Call, mesh: Any, cuts: Mapping[str, Any]) -> Any:
    """The function of each device: it computes its own rows, and sums the sums over rows over the devices."""
    parts = []
    for result in call.results:
        shape = tuple(size // _devices(mesh, cuts.get(each)) for size, each in zip(result.shape, result.factors))
        parts.append(dataclasses.replace(result, shape=shape))
    own = dataclasses.replace(call, results=tuple(parts))

    def function(*operands: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(
            _sum_over(output, [axis for factor, axis in cuts.items() if factor not in result.factors])
            for output, result in zip(_function(own)(*operands), call.results)
        )

    return function


def _names(axis: Any) -> tuple[str, ...]:
    return () if axis is None else (axis,) if isinstance(axis, str) else tuple(axis)


def _devices(mesh: Any, axis: Any) -> int:
    return math.prod(mesh.shape[name] for name in _names(axis))


def _sum_over(array: jax.Array, axes: Sequence[Any]) -> jax.Array:
    names = [name for axis in axes for name in _names(axis)]
    if not names:
        return array
    # In float32, because a 16-bit sum over devices would be rounded once for each device.
    wide = array.astype(jnp.promote_types(array.dtype, jnp.float32))
    total: jax.Array = jax.lax.psum(wide, tuple(names)).astype(array.dtype)
    return total


def row_factors(count: int) -> tuple[str, ...]:
    return tuple(f"r{axis}" for axis in range(count))


# ----------------------------------------------------------------------------------------------- construction of a call


Arrays = dict[Operand, Any]
"""The operands of a call with their arrays; what is None is left out."""


def call_core(
    op: str, function: str, arrays: Arrays, results: Sequence[Result], kind: type[Call] = Call, **more: Any
) -> tuple[jax.Array, ...]:
    """The results of a function of the core; `more` has further fields of the Call."""
    present = {operand: array for operand, array in arrays.items() if array is not None}
    return bind(kind(op, function, tuple(present), tuple(results), **more), *alike(*present.values()))


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Wanted:
    """The arrays that want a gradient."""

    each: tuple[bool, ...]

    def by_place(self, gradients: Sequence[jax.Array]) -> list[jax.Array | None]:
        """The computed gradients, each at its array's place."""
        left = iter(gradients)
        return [next(left) if is_wanted else None for is_wanted in self.each]


def given(cotangent: Any) -> jax.Array | None:
    """A cotangent; None if it is known to be 0."""
    return None if isinstance(cotangent, SymbolicZero) else cotangent
