"""The shared code of the losses for JAX: the forward, its derivatives, and the same over a vocabulary in shards."""

# mypy: disallow-untyped-calls=False

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from eaves._arguments import MEAN, NONE, SUM, CrossEntropyOutputs, named_outputs
from eaves.jax import _options, _reductions
from eaves.jax._call import Arrays, Operand, Result, Wanted, call_core, given, row_factors, vary, varying
from eaves.jax._options import is_soft, result_dtype
from eaves.jax._shards import STATISTICS, Shard, shard_of, target_weights

_LSE_FACTORS = ("high_and_low",)

Numbers = tuple[tuple[str, Any], ...]


class CrossEntropyOutput(CrossEntropyOutputs[jax.Array], Protocol):
    """The named tuple that a loss returns with `outputs`: the loss, then these outputs in the order of their names."""


class LossArrays(NamedTuple):
    """The arrays that a loss takes beside logits or a head. `divisor` is the divisor of the mean; at first it is the
    user's normalizer."""

    targets: Any
    class_weight: Any = None
    row_weight: Any = None
    divisor: Any = None

    def checked(self, op: str, like: jax.Array, rows: tuple[int, ...], probabilities: Any, mode: int) -> LossArrays:
        """The arrays in the form that the core takes. `like` gives the dtype; `probabilities` is the shape of soft
        targets."""
        dtype = result_dtype(like)
        targets = _options.targets_of(op, self.targets, probabilities)
        weight = None if self.class_weight is None else jnp.asarray(self.class_weight)
        return LossArrays(
            _options.constant(op, "targets", targets) if is_soft(targets) else targets,
            None if weight is None else _options.constant(op, "class_weight", weight),
            _options.row_weight_of(op, self.row_weight, rows, dtype),
            _options.normalizer_of(op, self.divisor, mode, dtype),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loss:
    """The parts of a loss that are known while JAX traces. `inputs` are the arrays with derivatives: logits, or hidden
    states, head and bias. `mode` is the reduction of the differentiable function; with `inplace` its backward writes
    over the first input. `names` are pairs of an argument's name in the core and in the user's function, if they
    differ."""

    op: str  # the function that the user called
    options: Numbers
    outputs: tuple[str, ...]
    mode: int
    names: tuple[tuple[str, str], ...] = _options.NAMES
    shard: Shard | None = None
    inplace: bool = False
    axis: int = -1

    core: ClassVar[str]  # the prefix of the loss's functions in the core
    cut: ClassVar[tuple[str, int]]  # name and place of the input that axis_name cuts
    skips_ignored: ClassVar[bool]  # the core leaves ignored rows out, without statistics
    differentiable: ClassVar[tuple[str, ...]] = ("lse", "entropy")  # outputs with a derivative
    named: ClassVar[str] = "CrossEntropyOutput"

    def shape(self, inputs: Any) -> tuple[int, ...]:
        """The shape of the logits, which have the classes on `axis`."""
        raise NotImplementedError

    def rows(self, inputs: Any) -> tuple[int, ...]:
        """The shape of the rows."""
        shape = self.shape(inputs)
        return tuple(size for index, size in enumerate(shape, -len(shape)) if index != self.axis)

    def arrays(self, inputs: Any, more: LossArrays) -> Arrays:
        """The operands that all calls have in common."""
        raise NotImplementedError

    def gradients(self, inputs: Any, wants: Wanted) -> list[Result]:
        raise NotImplementedError

    def needs_target_mass(self, more: LossArrays) -> bool:
        raise NotImplementedError

    def saved(self, more: LossArrays) -> tuple[str, ...]:
        """The outputs that the backward needs."""
        return ("lse", "target_mass") if self.needs_target_mass(more) else ("lse",)

    def is_speed(self, inputs: Any, more: LossArrays, wants: Wanted) -> bool:
        """True if the forward computes the gradients too."""
        return False

    def numbers(self, mode: int) -> Numbers:
        """The numbers of a call with this reduction. In a shard's call the targets mark ignored rows by IGNORED."""
        if self.shard is None:
            return (("reduction", mode), *self.options)
        options = (each for each in self.options if each[0] != "ignore_index")
        return (("reduction", mode), *options, ("classes", self.shard.classes))

    def statistics_numbers(self, names: Sequence[str]) -> Numbers:
        """The numbers of a shard's call for statistics."""
        return (*self.numbers(NONE), ("is_for_mean_logit", "mean_logit" in names))

    @property
    def ignore_index(self) -> int:
        index: int = dict(self.options).get("ignore_index", _options.IGNORED)
        return index

    def divisor(self, more: LossArrays, rows: tuple[int, ...], dtype: Any) -> Any:
        """The divisor of the mean: the weights of the rows that count."""
        targets, weight, row_weight, _ = more
        weights = jnp.ones(rows, dtype) if row_weight is None else row_weight
        if is_soft(targets):
            return _reductions.as_divisor(_reductions.total(weights))
        counts = targets != self.ignore_index
        if weight is None and row_weight is None:
            return counts.sum().astype(dtype)
        if row_weight is not None:
            counts &= row_weight != 0  # for any class weight
        if weight is not None:
            weights = weights * target_weights(self.shard, targets, weight.astype(dtype))
        return _reductions.as_divisor(_reductions.total(jnp.where(counts, weights, 0)))

    def forward(
        self, inputs: Any, more: LossArrays, names: Sequence[str], wants: Wanted | None = None
    ) -> tuple[dict[str, jax.Array], list[jax.Array]]:
        """The rows' losses and the outputs of these names; with `wants` also the gradients of the reduced loss."""
        if self.shard is not None:
            return self.of_shards(self.shard, inputs, more, names), []
        arrays, rows, dtype = self.arrays(inputs, more), self.rows(inputs), result_dtype(inputs[0])
        results, function = _results(names, rows, dtype), f"{self.core}_forward"
        if wants is not None:
            function += "_backward"
            share = _reductions.share_of(jnp.ones((), dtype), more.divisor)
            arrays[Operand("grad_loss", row_factors(len(rows)))] = jnp.broadcast_to(share, rows)
            results += self.gradients(inputs, wants)
        written = call_core(self.op, function, arrays, results, numbers=self.numbers(NONE), names=self.names)
        return dict(zip(names, written)), list(written[len(names) :])

    def of_shards(self, shard: Shard, inputs: Any, more: LossArrays, names: Sequence[str]) -> dict[str, jax.Array]:
        """The forward of a vocabulary that is cut over devices."""
        rows, dtype = self.rows(inputs), result_dtype(inputs[0])
        factors = row_factors(len(rows))
        own = more._replace(targets=shard.targets(more.targets, self.ignore_index, self.skips_ignored), row_weight=None)
        result = Result("statistics", (*factors, "k"), shape=(*rows, STATISTICS), dtype=dtype)
        numbers = self.statistics_numbers(names)
        function, arrays = f"{self.core}_shard_forward", self.arrays(inputs, own)
        (statistics,) = call_core(self.op, function, arrays, [result], numbers=numbers, names=self.names)
        arrays = {
            Operand("statistics", ("s", *factors, "k"), batch_axis=1): shard.gathered(statistics),
            Operand("targets", factors): more.targets,
            Operand("row_weight", factors): more.row_weight,
        }
        numbers = (
            ("reduction", NONE),
            *self.options,
            ("classes", shard.classes),
            ("has_class_weight", more.class_weight is not None),
            ("skips_ignored", self.skips_ignored),
        )
        results = _results(names, rows, dtype)
        written = call_core(self.op, "cross_entropy_merge", arrays, results, numbers=numbers, names=self.names)
        if not self.skips_ignored or more.row_weight is None:
            return dict(zip(names, written))
        is_nothing = more.row_weight == 0
        return {
            name: jnp.where(is_nothing[..., None] if name == "lse" else is_nothing, 0, each)
            for name, each in zip(names, written)
        }

    def backward(
        self, inputs: Any, more: LossArrays, kept: dict[str, Any], wants: Wanted, upstream: Sequence[Any]
    ) -> list[Any]:
        """The gradients of the inputs that want one. `upstream` has the gradients of the loss and of the differentiable
        outputs; each may be None."""
        grad_loss, grad_lse, grad_entropy = upstream
        rows, is_per_row = self.rows(inputs), self.mode == NONE
        factors = row_factors(len(rows))
        if self.shard is not None:
            more = more._replace(targets=self.shard.targets(more.targets, self.ignore_index))
        if grad_loss is None:
            grad_loss = jnp.zeros(rows if is_per_row else (), kept["lse"].dtype)
        grad_loss = _reductions.share_of(grad_loss, more.divisor)
        arrays = self.arrays(inputs, more) | {
            Operand("grad_loss", factors if is_per_row else (), per_row=is_per_row): grad_loss,
            Operand("grad_lse", factors): grad_lse,
            Operand("grad_entropy", factors): grad_entropy,
            Operand("lse", (*factors, *_LSE_FACTORS)): kept["lse"],
            Operand("entropy", factors): kept["entropy"] if grad_entropy is not None else None,
            Operand("target_mass", factors): kept["target_mass"],
        }
        numbers = self.numbers(NONE if is_per_row else SUM)
        gradients = call_core(
            self.op, f"{self.core}_backward", arrays, self.gradients(inputs, wants),
            numbers=numbers, names=self.names, aliases=((0, 0),) if self.inplace else (),
        )  # fmt: skip
        return wants.by_place(gradients)

    def as_inputs(self, gradients: Sequence[Any], inputs: Any) -> tuple[Any, ...]:
        """The gradients, converted to the dtypes of the inputs."""
        return tuple(None if each is None else each.astype(of.dtype) for each, of in zip(gradients, inputs))


def _results(names: Sequence[str], rows: tuple[int, ...], dtype: Any) -> list[Result]:
    """The results of these names, each with a number for each row; lse has the two numbers that the backward needs."""
    factors = row_factors(len(rows))
    return [
        Result(name, (*factors, *_LSE_FACTORS), shape=(*rows, 2), dtype=jnp.dtype(dtype))
        if name == "lse"
        else Result(name, factors, shape=rows, dtype=jnp.dtype("int64" if name == "argmax" else dtype))
        for name in names
    ]


@functools.cache
def _differentiable(loss: Loss) -> Any:
    """(inputs, other arrays) -> the loss, reduced by its mode, and the outputs for the user by name."""

    def split(written: dict[str, jax.Array], divisor: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
        outputs = {name: written[name][..., 0] if name == "lse" else written[name] for name in loss.outputs}
        return _reductions.reduced(written["loss"], loss.mode, divisor), outputs

    @jax.custom_vjp
    def function(inputs: Any, more: LossArrays) -> Any:
        return split(loss.forward(inputs, more, ("loss", *loss.outputs))[0], more.divisor)

    def forward_rule(*primals: Any) -> Any:
        inputs, more = jax.tree.map(lambda primal: primal.value, primals)
        wants = Wanted(tuple(primal is not None and primal.perturbed for primal in primals[0]))
        names = tuple(dict.fromkeys(("loss", *loss.outputs, *loss.saved(more))))
        is_speed = loss.is_speed(inputs, more, wants)
        outputs, found = loss.forward(inputs, more, names, wants if is_speed else None)
        gradients = wants.by_place(found) if is_speed else None
        kept = {name: outputs.get(name) for name in ("lse", "entropy", "target_mass")}
        return split(outputs, more.divisor), (inputs, more, kept, gradients, wants)

    def backward_rule(residuals: Any, cotangents: Any) -> Any:
        inputs, more, kept, gradients, wants = residuals
        grad_loss, *of_outputs = map(given, (cotangents[0], *map(cotangents[1].get, loss.differentiable)))
        has_outputs = any(each is not None for each in of_outputs)
        if grad_loss is None and not has_outputs:
            return None, None
        if gradients is not None and not has_outputs:
            assert grad_loss is not None
            factor = grad_loss[..., None] if loss.mode == NONE else grad_loss  # only hidden has a gradient
            gradients = [None if each is None else _scaled(each, factor) for each in gradients]
        else:
            gradients = loss.backward(inputs, more, kept, wants, (grad_loss, *of_outputs))
        return loss.as_inputs(gradients, inputs), None

    function.defvjp(forward_rule, backward_rule, symbolic_zeros=True)
    return function


def _scaled(gradient: jax.Array, factor: Any) -> jax.Array:
    """gradient * factor, but zeros stay 0 for any factor, because their rows may not count."""
    scaled = (gradient * factor).astype(gradient.dtype)  # in float32; XLA leaves out a factor that is known to be 1
    return jnp.where(gradient == 0, gradient, scaled)


def loss_of(loss: Loss, inputs: tuple[Any, ...], more: LossArrays, mode: int, axis_name: str | None) -> Any:
    """The reduced loss; with outputs a named tuple, in which only loss, lse and entropy have derivatives."""
    rows, shape, (name, place) = loss.rows(inputs), loss.shape(inputs), loss.cut
    targets, class_weight, row_weight, divisor = more.checked(loss.op, inputs[0], rows, shape, mode)
    shard = shard_of(loss.op, axis_name, name, inputs[place], shape[loss.axis], targets, loss.outputs)
    # Inputs and class weights are this device's; the other arrays are the same along axis_name. Both vary over the
    # other mesh axes.
    axes = varying(*inputs, targets, class_weight, row_weight, divisor)
    of_whole = axes if shard is None else axes - {shard.axis_name}
    targets, row_weight, divisor = (vary(each, of_whole) for each in (targets, row_weight, divisor))
    more = LossArrays(targets, vary(class_weight, axes), row_weight, divisor)
    return reduced_loss(dataclasses.replace(loss, shard=shard), tuple(vary(each, axes) for each in inputs), more, mode)


def reduced_loss(loss: Loss, inputs: tuple[Any, ...], more: Any, mode: int) -> Any:
    """The loss of checked arguments."""
    rows, divisor = loss.rows(inputs), more.divisor
    if mode == MEAN and divisor is None:
        divisor = loss.divisor(more, rows, result_dtype(inputs[0]))
    value, outputs = _differentiable(loss)(inputs, more._replace(divisor=divisor if loss.mode == MEAN else None))
    if loss.mode != mode:
        value = _reductions.reduced(value, mode, divisor)
    if not loss.outputs:
        return value
    if "z_loss" in outputs:
        outputs["z_loss"] = _reductions.reduced(outputs["z_loss"], mode, divisor)
    found = [
        outputs[name] if name in loss.differentiable else jax.lax.stop_gradient(outputs[name]) for name in loss.outputs
    ]
    return named_outputs(loss.named, ("loss", *loss.outputs), (value, *found))
