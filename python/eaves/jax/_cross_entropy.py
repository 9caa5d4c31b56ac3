"""cross_entropy for JAX arrays, and its gradient."""

# mypy: disallow-untyped-calls=False

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from eaves._arguments import LOSS_OUTPUTS, NONE, answers_missing, output_names, reduction_of, refuse_unknown
from eaves.jax._call import Arrays, Operand, Result, Wanted, row_factors
from eaves.jax._loss import CrossEntropyOutput, Loss, LossArrays, Numbers, loss_of
from eaves.jax._options import axis_of, is_soft, options_of

_OP = "cross_entropy"


@answers_missing
def cross_entropy(
    logits: jax.Array,
    targets: jax.Array,
    class_weight: jax.Array | None = None,
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
    outputs: str | Sequence[str] = (),
    axis_name: str | None = None,
    **unknown: object,
) -> jax.Array | CrossEntropyOutput:
    """The loss of classifying each row of `logits`, and its gradient, with the formula and options of the PyTorch
    function.

        z'   = softcap * tanh(scale * z / softcap)                    (no softcap: scale * z)
        lse  = log sum_v exp(z'_v)
        loss = (1 - e) * w_t * (lse - z'_t) + e / V * sum_v w_v * (lse - z'_v) + z_loss * lse^2
        mean = sum(r * loss) / sum(r * w_t over the rows that are not ignored)

    Args:
        logits: [..., V], or with the classes on `axis`; float16, bfloat16, float32 or float64.
        targets: a class for each row, int32 or int64: the shape of logits without the class axis. Or probabilities: the
            shape of logits, in its dtype or float32.
        class_weight: w above, one number for each class, [V], in the dtype of logits or float32.
        axis: the axis of the classes.
        ignore_index: rows with this target have loss 0 and gradient 0, and count in no mean.
        reduction: "none" (the losses of the rows), "sum" or "mean".
        label_smoothing: e, 0 to 1.
        softcap, scale: None, or positive numbers.
        z_loss: the weight of lse^2 in the loss.
        row_weight: r above, one number for each row. A row of weight 0 has loss 0 and gradient 0 for any logits.
        normalizer: with "mean", the divisor of the sum in place of the weights of the rows. It must not be negative; an
            array is not checked.
        inplace_backward: whether the gradient may be written over the logits. If the program still needs the logits,
            XLA copies them first.
        outputs: the names of more outputs, one or a sequence of them: "lse", "argmax", "entropy", "z_loss", "sum_sq",
            "mean_logit", as in eaves.cross_entropy. Each has a number for each row, "z_loss" the shape of the loss.
        axis_name: JAX's counterpart of `group`: inside of jax.shard_map, the mesh axis that cuts the classes. logits
            and class_weight are this device's; everything else is the same on all devices of the axis.

    Returns:
        The loss: float32, or float64 for float64 logits. With outputs, a named tuple: the loss, then the outputs in the
        order of their names, so that `loss, lse = cross_entropy(..., outputs="lse")`.

    Raises:
        ValueError: an array or a number is not as above; on the CPU also a target that is no class, when the call runs.
            (On a GPU the loss and gradient of that row are NaN.)
        TypeError: a number is not known while JAX traces; `outputs` are no names; a keyword belongs to another
            function.
        NotImplementedError: a dtype or a shape that eaves does not have.

    Loss, lse and entropy have first derivatives with respect to logits. The other outputs count as constant; a
    derivative with respect to another argument is a NotImplementedError.

    Example:
        >>> import jax.numpy as jnp, eaves.jax
        >>> logits = jnp.array([[2.0, 0.0, -1.0], [0.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
        >>> print(eaves.jax.cross_entropy(logits, jnp.array([0, 2, -100])).round(4))
        0.8606
    """
    if unknown:
        refuse_unknown(_OP, unknown, cross_entropy)
    logits = jnp.asarray(logits)
    options = options_of(
        _OP, ignore_index, label_smoothing=label_smoothing, softcap=softcap, scale=scale, z_loss=z_loss
    )
    loss = _Loss(
        op=_OP, options=options, outputs=output_names(_OP, outputs, LOSS_OUTPUTS), mode=NONE, inplace=inplace_backward,
        axis=axis_of(_OP, "logits", logits, axis),
    )  # fmt: skip
    more, mode = LossArrays(targets, class_weight, row_weight, normalizer), reduction_of(_OP, reduction)
    found: jax.Array | CrossEntropyOutput = loss_of(loss, (logits,), more, mode, axis_name)
    return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Loss(Loss):
    """cross_entropy; its inputs are the logits. The losses of the rows have derivatives, and are reduced afterwards, so
    jax.vmap of a gradient stays one call."""

    core = _OP
    cut = ("logits", 0)
    skips_ignored = False

    def shape(self, inputs: Any) -> tuple[int, ...]:
        shape: tuple[int, ...] = inputs[0].shape
        return shape

    def needs_target_mass(self, more: LossArrays) -> bool:
        has_factors = "label_smoothing" in dict(self.options) or self.shard is not None
        return is_soft(more.targets) or (more.class_weight is not None and has_factors)

    def numbers(self, mode: int) -> Numbers:
        return (*super().numbers(mode), ("class_axis", self.axis))

    def factors(self, logits: jax.Array) -> tuple[str, ...]:
        of_rows, place = row_factors(logits.ndim - 1), self.axis + logits.ndim
        return (*of_rows[:place], "v", *of_rows[place:])

    def arrays(self, inputs: Any, more: LossArrays) -> Arrays:
        (logits,) = inputs
        of_rows, of_logits = row_factors(logits.ndim - 1), self.factors(logits)
        return {
            Operand("logits", of_logits): logits,
            Operand("targets", of_logits if is_soft(more.targets) else of_rows): more.targets,
            Operand("class_weight", ("v",), per_row=False): more.class_weight,
            Operand("row_weight", of_rows): more.row_weight,
        }

    def gradients(self, inputs: Any, wants: Wanted) -> list[Result]:
        (logits,) = inputs
        return [Result("grad_logits", self.factors(logits), shape=logits.shape, dtype=logits.dtype)]
