"""cross_entropy for JAX arrays, and its gradient."""

# mypy: disallow-untyped-calls=False

from __future__ import annotations

import dataclasses
import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp

from eaves.jax import _shards
from eaves.jax._call import Call, Result, alike, bind, row_factors
from eaves.jax._loss import (
    MEAN,
    NAMES,
    NONE,
    Arrays,
    CrossEntropyOutput,
    add_saved,
    constant,
    divisor_of,
    given,
    is_soft,
    labels_of,
    loss_results,
    normalizer_of,
    number_of,
    options_of,
    output_of,
    reduced,
    reduction_of,
    result_dtype,
    returned,
    row_weight_of,
    target_weights,
    wanted_outputs,
)
from eaves.jax._shards import STATISTICS, Shard, align, local_labels, merge, shard_of, without_ignore_index

_OP = "cross_entropy"
_NAMES = (*NAMES, ("targets", "labels"))


def cross_entropy(
    logits: jax.Array,
    labels: jax.Array,
    weight: jax.Array | None = None,
    *,
    axis: int = -1,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    scale: float | None = None,
    z_loss: float = 0.0,
    row_weight: jax.Array | None = None,
    normalizer: jax.Array | float | None = None,
    inplace_backward: bool = False,
    return_lse: bool = False,
    return_argmax: bool = False,
    return_entropy: bool = False,
    return_z_loss: bool = False,
    return_sum_sq: bool = False,
    return_mean_logit: bool = False,
    axis_name: str | None = None,
) -> jax.Array | CrossEntropyOutput:
    """The loss of classifying each row of `logits`, and its gradient; formula and options of the PyTorch function.

        z'   = softcap * tanh(scale * z / softcap)                    (no softcap: scale * z)
        lse  = log sum_v exp(z'_v)
        loss = (1 - e) * w_t * (lse - z'_t) + e / V * sum_v w_v * (lse - z'_v) + z_loss * lse^2
        mean = sum(r * loss) / sum(r * w_t over the rows that are not ignored)

    Args:
        logits: [..., V], or with the classes on `axis`; float16, bfloat16, float32 or float64.
        labels: of each row a class, int32 or int64: the shape of logits without the classes. Or probabilities, in the
            shape of logits, in its dtype or float32.
        weight: of each class, [V], in the dtype of logits or float32; w above.
        axis: that of the classes.
        ignore_index: rows with this label have loss 0 and gradient 0, and count in no mean.
        reduction: "none" (the losses of the rows), "sum" or "mean".
        label_smoothing: e, 0 to 1.
        softcap, scale: None, or positive numbers.
        z_loss: the weight of lse^2 in the loss.
        row_weight: r above, one number for each row. A row of weight 0 has loss 0 and gradient 0, whatever it holds.
        normalizer: with "mean", the divisor of the sum instead of the weights of the rows. Not negative; an array is
            not checked.
        inplace_backward: whether the gradient may be written over the logits. Where something else needs these still,
            XLA copies them first.
        return_lse, return_argmax, return_entropy, return_z_loss, return_sum_sq, return_mean_logit: further outputs, a
            number for each row; lse and entropy have derivatives.
        axis_name: inside of jax.shard_map, the axis of the mesh that the classes are cut over: logits and weight are
            this device's, and everything else is the same on all devices of the axis.

    Returns:
        The loss: float32, or float64 for float64 logits. With any return_*: a CrossEntropyOutput.

    Raises:
        ValueError: an array or a number is not as above; on the CPU also a label that is no class, when the call runs.
            (On a GPU its loss and gradient are NaN.)
        NotImplementedError: a dtype or a shape that eaves does not have.

    Derivatives, of first order, are those of loss, lse and entropy with respect to logits. The other outputs count as
    constant; a derivative with respect to another argument is a NotImplementedError.

    Example:
        >>> import jax.numpy as jnp, eaves.jax
        >>> logits = jnp.array([[2.0, 0.0, -1.0], [0.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
        >>> print(eaves.jax.cross_entropy(logits, jnp.array([0, 2, -100])).round(4))
        0.8606
    """
    logits = jnp.asarray(logits)
    labels = labels_of(_OP, labels, logits.shape)
    mode = reduction_of(_OP, reduction)
    axis = number_of(_OP, "axis", axis, operator.index)
    if not -logits.ndim <= axis < logits.ndim:
        raise ValueError(
            f"{_OP}: axis is {axis}, expected {-logits.ndim} to {logits.ndim - 1} (logits has {logits.ndim} axes)"
        )
    axis = axis - logits.ndim if axis >= 0 else axis
    rows = tuple(size for index, size in enumerate(logits.shape) if index != axis + logits.ndim)
    dtype = result_dtype(logits)
    options = options_of(
        _OP, ignore_index, label_smoothing=label_smoothing, softcap=softcap, scale=scale, z_loss=z_loss
    )
    wanted = wanted_outputs(return_lse, return_argmax, return_entropy, return_z_loss, return_sum_sq, return_mean_logit)
    row_weights = row_weight_of(_OP, row_weight, rows, dtype)
    divisor = normalizer_of(_OP, normalizer, mode, dtype)
    if weight is not None:
        weight = constant(_OP, "weight", jnp.asarray(weight))
    if is_soft(labels):
        labels = constant(_OP, "labels", labels)
    shard, weights_of = None, target_weights
    if axis_name is None:
        logits, weight, labels, row_weights, divisor = alike(logits, weight, labels, row_weights, divisor)
    else:
        shard = shard_of(_OP, axis_name, "logits", logits, logits.shape[axis], labels, wanted)
        weights_of = functools.partial(_shards.target_weights, shard)
        (logits, weight), (labels, row_weights, divisor) = align(
            axis_name, (logits, weight), (labels, row_weights, divisor)
        )
    setting = _Setting(options, wanted, axis, inplace_backward, label_smoothing != 0, int(ignore_index), shard)
    loss, outputs = _rows(setting)(logits, labels, weight, row_weights)
    if mode == MEAN and divisor is None:
        divisor = divisor_of(labels, weight, row_weights, ignore_index, dtype, rows, weights_of)
    if "z_loss" in outputs:
        outputs["z_loss"] = reduced(outputs["z_loss"], mode, divisor)
    return output_of(reduced(loss, mode, divisor), outputs)


@dataclasses.dataclass(frozen=True)
class _Setting:
    """What is known while JAX traces."""

    options: tuple[tuple[str, Any], ...]
    wanted: tuple[str, ...]
    axis: int
    inplace: bool
    has_smoothing: bool
    ignore_index: int
    shard: Shard | None

    @property
    def numbers(self) -> tuple[tuple[str, Any], ...]:
        numbers = (("reduction", NONE), ("class_axis", self.axis))
        if self.shard is None:
            return (*numbers, *self.options)
        return (*numbers, *without_ignore_index(self.options), ("classes", self.shard.classes))

    def needs_target_mass(self, labels: Any, weight: Any) -> bool:
        return is_soft(labels) or (weight is not None and (self.has_smoothing or self.shard is not None))


@functools.cache
def _rows(setting: _Setting) -> Any:
    """(logits, labels, weight, row_weight) -> the losses of the rows, and the outputs that are wanted by name."""

    def forward(saved: bool, logits: Any, labels: Any, weight: Any, row_weight: Any) -> dict[str, jax.Array]:
        names = dict.fromkeys(("loss", *setting.wanted))
        if saved:
            names["lse"] = None
            if setting.needs_target_mass(labels, weight):
                names["target_mass"] = None
        if setting.shard is not None:
            return _of_shards(setting, setting.shard, logits, labels, weight, row_weight, tuple(names))
        arrays, of_rows = _arrays(setting, logits, labels, weight, row_weight)
        shape = _row_shape(setting, logits)
        results = tuple(loss_results(tuple(names), of_rows, shape, result_dtype(logits)))
        call = Call(_OP, "cross_entropy_forward", tuple(arrays.operands), results, setting.numbers, _NAMES)
        return dict(zip(names, bind(call, *arrays.arrays)))

    def split(outputs: dict[str, jax.Array]) -> tuple[jax.Array, dict[str, jax.Array]]:
        return outputs["loss"], returned(outputs, setting.wanted)

    @jax.custom_vjp
    def function(logits: Any, labels: Any, weight: Any, row_weight: Any) -> Any:
        return split(forward(False, logits, labels, weight, row_weight))

    def forward_rule(*primals: Any) -> Any:
        values = [None if primal is None else primal.value for primal in primals]
        outputs = forward(True, *values)
        kept = {name: outputs.get(name) for name in ("lse", "entropy", "target_mass")}
        return split(outputs), (values, kept)

    def backward_rule(residuals: Any, cotangents: Any) -> Any:
        (logits, labels, weight, row_weight), kept = residuals
        grad_loss, grad_outputs = cotangents
        if setting.shard is not None:
            labels = local_labels(setting.shard, labels, setting.ignore_index)
        arrays, of_rows = _arrays(setting, logits, labels, weight, row_weight)
        grad_loss, grad_lse, grad_entropy = map(given, (grad_loss, *map(grad_outputs.get, ("lse", "entropy"))))
        if grad_loss is None and grad_lse is None and grad_entropy is None:
            return None, None, None, None
        arrays.add("grad_loss", jnp.zeros_like(kept["lse"][..., 0]) if grad_loss is None else grad_loss, of_rows)
        add_saved(arrays, of_rows, kept, grad_lse, grad_entropy)
        result = Result("grad_logits", arrays.operands[0].factors, shape=logits.shape, dtype=logits.dtype)
        call = Call(_OP, "cross_entropy_backward", tuple(arrays.operands), (result,), setting.numbers, _NAMES)
        if setting.inplace:
            call = dataclasses.replace(call, aliases=((0, 0),))
        (grad_logits,) = bind(call, *alike(*arrays.arrays))
        return grad_logits, None, None, None

    function.defvjp(forward_rule, backward_rule, symbolic_zeros=True)
    return function


def _arrays(
    setting: _Setting, logits: Any, labels: Any, weight: Any, row_weight: Any
) -> tuple[Arrays, tuple[str, ...]]:
    """The operands that forward and backward have in common, and the factors of what has a number for each row."""
    of_rows = row_factors(logits.ndim - 1)
    place = setting.axis + logits.ndim
    of_logits = (*of_rows[:place], "v", *of_rows[place:])
    arrays = Arrays()
    arrays.add("logits", logits, of_logits)
    arrays.add("targets", labels, of_logits if is_soft(labels) else of_rows)
    arrays.add("weight", weight, ("v",), per_row=False)
    arrays.add("row_weight", row_weight, of_rows)
    return arrays, of_rows


def _row_shape(setting: _Setting, logits: Any) -> tuple[int, ...]:
    return tuple(size for index, size in enumerate(logits.shape) if index != setting.axis + logits.ndim)


def _of_shards(
    setting: _Setting, shard: Shard, logits: Any, labels: Any, weight: Any, row_weight: Any, names: tuple[str, ...]
) -> dict[str, jax.Array]:
    """The forward where each device has some of the classes."""
    moved = local_labels(shard, labels, setting.ignore_index)
    arrays, of_rows = _arrays(setting, logits, moved, weight, None)
    shape = (*_row_shape(setting, logits), STATISTICS)
    result = Result("statistics", (*of_rows, "k"), shape=shape, dtype=result_dtype(logits))
    numbers = (*setting.numbers, ("is_for_mean_logit", "mean_logit" in names))
    call = Call(_OP, "cross_entropy_shard_forward", tuple(arrays.operands), (result,), numbers, _NAMES)
    (statistics,) = bind(call, *alike(*arrays.arrays))
    return merge(_OP, _NAMES, shard, statistics, labels, row_weight, setting.options, weight is not None, False, names)
