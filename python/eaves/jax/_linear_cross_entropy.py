"""linear_cross_entropy for JAX arrays: a model's head and its loss, without all the logits."""

# mypy: disallow-untyped-calls=False

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from eaves._arguments import LOSS_OUTPUTS, NONE, answers_missing, output_names, reduction_of, refuse_unknown
from eaves.jax._call import Arrays, Result, Wanted, row_factors
from eaves.jax._library import suits_speed
from eaves.jax._loss import CrossEntropyOutput, Loss, LossArrays, Numbers, loss_of
from eaves.jax._options import is_soft, number_of, options_of, result_dtype
from eaves.jax._shards import Shard, shard_of

_OP = "linear_cross_entropy"
_LAYOUTS = ("vd", "dv")
_ALGORITHMS = ("auto", "speed", "recompute")


@answers_missing
def linear_cross_entropy(
    hidden: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    *,
    head_layout: str = "vd",
    bias: jax.Array | None = None,
    class_weight: jax.Array | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    scale: float | None = None,
    z_loss: float = 0.0,
    row_weight: jax.Array | None = None,
    normalizer: jax.Array | float | None = None,
    outputs: str | Sequence[str] = (),
    algorithm: str = "auto",
    workspace_bytes: int | None = None,
    grad_head_dtype: Any = None,
    axis_name: str | None = None,
    **unknown: object,
) -> jax.Array | CrossEntropyOutput:
    """The loss of a model's head, cross_entropy(hidden @ head.T + bias, targets), without ever holding all the logits.

    Probabilities are computed from the product's float32 sums, not from logits rounded to 16 bits. Without a gradient a
    call is one matrix product; gradients of the mean and the sum are computed with the loss, in three.

    Args:
        hidden: [..., D]; float16, bfloat16, float32 or float64.
        head: [V, D], or [D, V] with head_layout="dv", in the dtype of hidden. Either is read as it lies; the gradient
            of a [D, V] head is transposed once.
        targets: of each row a class, int32 or int64: the shape of hidden without D. Or probabilities: [..., V].
        head_layout: "vd" or "dv".
        bias: [V], in the dtype of hidden or float32.
        class_weight: of each class, [V], in the dtype of hidden or float32.
        reduction, ignore_index, label_smoothing, softcap, scale, z_loss, row_weight, normalizer, outputs: as in
            cross_entropy.
        algorithm: "speed", gradients with the loss: three products. "recompute": the backward computes the logits
            again, four products and little memory in between. "auto": as linear_cross_entropy of PyTorch chooses from
            the sizes, the outputs and workspace_bytes, for JAX's default backend. The gradients are always recomputed
            in float16, with axis_name, and with reduction "none" unless only hidden has one.
        workspace_bytes: the most scratch memory that a call should take; None: what suits the device.
        grad_head_dtype: what the chunks' parts of the head's gradient are added up in: None, the dtype of head, or
            float32, rounded once at the end.
        axis_name: JAX's counterpart of `group`: inside of jax.shard_map, the axis of the mesh that the classes are cut
            over. head, bias and class_weight are this device's, and everything else is the same on all devices of the
            axis.

    Returns:
        As cross_entropy. Of rows that are ignored or of weight 0 all outputs are 0; on the CPU they are left out before
        the first product.

    Raises:
        As cross_entropy.

    Derivatives, of first order, are those of loss, lse and entropy with respect to hidden, head and bias; those that
    are not needed are not computed. The other outputs count as constant; a derivative with respect to another argument
    is a NotImplementedError.

    Example:
        >>> import jax, jax.numpy as jnp, eaves.jax
        >>> hidden, head = jnp.array([[1.0, 0.0], [0.0, 2.0]]), jnp.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
        >>> print(eaves.jax.linear_cross_entropy(hidden, head, jnp.array([0, 1])).round(4))
        0.8103
    """
    if unknown:
        refuse_unknown(_OP, unknown, linear_cross_entropy)
    return loss_of_head(
        HeadCall(
            _OP, hidden, head, targets, head_layout, bias, class_weight, reduction, ignore_index, label_smoothing,
            softcap, scale, z_loss, row_weight, normalizer, output_names(_OP, outputs, LOSS_OUTPUTS), algorithm,
            workspace_bytes, grad_head_dtype, axis_name,
        )
    )  # fmt: skip


class HeadCall(NamedTuple):
    """The arguments of linear_cross_entropy, and of linear_log_prob with its names."""

    op: str  # the function that the user called
    hidden: Any
    head: Any
    targets: Any
    head_layout: str = "vd"
    bias: Any = None
    class_weight: Any = None
    reduction: str = "none"
    ignore_index: int = -100
    label_smoothing: float = 0.0
    softcap: float | None = None
    scale: float | None = None
    z_loss: float = 0.0
    row_weight: Any = None
    normalizer: Any = None
    outputs: tuple[str, ...] = ()
    algorithm: str = "auto"
    workspace_bytes: int | None = None
    grad_head_dtype: Any = None
    axis_name: str | None = None


def loss_of_head(call: HeadCall) -> jax.Array | CrossEntropyOutput:
    op, algorithm, workspace_bytes = call.op, call.algorithm, call.workspace_bytes
    hidden, head = jnp.asarray(call.hidden), jnp.asarray(call.head)
    bias = None if call.bias is None else jnp.asarray(call.bias)
    mode = reduction_of(op, call.reduction)
    if call.head_layout not in _LAYOUTS:
        raise ValueError(f'{op}: head_layout is {call.head_layout!r}, expected "vd" or "dv"')
    if algorithm not in _ALGORITHMS:
        raise ValueError(f'{op}: algorithm is {algorithm!r}, expected "auto", "speed" or "recompute"')
    if hidden.ndim == 0:
        raise ValueError(f"{op}: hidden has no axis, expected [..., features]")
    is_transposed, features = call.head_layout == "dv", hidden.shape[-1]
    if head.ndim != 2 or head.shape[0 if is_transposed else 1] != features:
        expected = f"[{features}, classes]" if is_transposed else f"[classes, {features}]"
        raise ValueError(
            f'{op}: head has shape {list(head.shape)}, expected {expected} (head_layout "{call.head_layout}")'
        )
    rows, dtype, classes = hidden.shape[:-1], result_dtype(hidden), head.shape[1 if is_transposed else 0]
    grad_head_dtype = None if call.grad_head_dtype is None else jnp.dtype(call.grad_head_dtype)
    if grad_head_dtype not in (None, head.dtype, dtype):
        raise ValueError(f"{op}: grad_head_dtype is {grad_head_dtype}, expected {head.dtype} or {dtype}")
    options = options_of(
        op, call.ignore_index, label_smoothing=call.label_smoothing, softcap=call.softcap, scale=call.scale,
        z_loss=call.z_loss,
    )  # fmt: skip
    if workspace_bytes is not None:
        workspace_bytes = number_of(op, "workspace_bytes", workspace_bytes, operator.index)
        if not 0 < workspace_bytes < 2**63:
            raise ValueError(f"{op}: workspace_bytes is {workspace_bytes}, expected a positive number of bytes")
    more = LossArrays(call.targets, call.class_weight, call.row_weight, call.normalizer)
    more = more.checked(op, hidden, rows, (*rows, classes), mode)
    if is_soft(more.targets):
        more = more._replace(targets=more.targets.astype(dtype))
    shard = shard_of(op, call.axis_name, "head", head, classes, more.targets, call.outputs)
    loss = _Loss(
        op=op, options=options, outputs=call.outputs, shard=shard, mode=mode, is_transposed=is_transposed,
        algorithm=algorithm, grad_head_dtype=grad_head_dtype, workspace_bytes=workspace_bytes,
    )  # fmt: skip
    found: jax.Array | CrossEntropyOutput = loss_of(loss, (hidden, head, bias), more, mode)
    return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Loss(Loss):
    """Its inputs are hidden states, head and bias. The reduced loss has derivatives, because its forward may compute
    them."""

    is_transposed: bool
    algorithm: str
    grad_head_dtype: Any
    workspace_bytes: int | None

    core = _OP
    skips_ignored = True

    def rows(self, inputs: Any) -> tuple[int, ...]:
        shape: tuple[int, ...] = inputs[0].shape[:-1]
        return shape

    def needs_target_mass(self, more: LossArrays) -> bool:
        return is_soft(more.targets) or more.class_weight is not None

    def is_speed(self, inputs: Any, more: LossArrays, wants: Wanted) -> bool:
        """The core's choice for the default backend. A traced call has no device yet."""
        hidden, head, _ = inputs
        if self.algorithm == "recompute" or self.shard is not None:
            return False
        has_grad_hidden_alone = wants.each == (True, False, False)
        if self.algorithm == "speed":
            return (self.mode != NONE or has_grad_hidden_alone) and hidden.dtype != jnp.float16
        features, classes = head.shape if self.is_transposed else head.shape[::-1]
        if 0 in head.shape or not all(isinstance(size, int) for size in (*hidden.shape, *head.shape)):
            return False  # the call refuses it
        has_output_gradients = not {"lse", "entropy"}.isdisjoint(self.outputs)
        return suits_speed(
            hidden.dtype.name.encode(), 0 if jax.default_backend() == "gpu" else -1, self.mode, has_grad_hidden_alone,
            has_output_gradients, False, False, self.workspace_bytes or 0, hidden.size // features, features, classes,
            self.is_transposed, is_soft(more.targets),
        )  # fmt: skip

    def numbers(self, mode: int) -> Numbers:
        limit = () if self.workspace_bytes is None else (("workspace_limit", self.workspace_bytes),)
        most = () if self.shard is None else (("most_classes", self.shard.own),)
        return (*super().numbers(mode), *limit, *most)

    def statistics_numbers(self, names: Sequence[str]) -> Numbers:
        needs_logits = not {"argmax", "sum_sq"}.isdisjoint(names)
        return (*super().statistics_numbers(names), ("is_for_argmax_or_sum_sq", needs_logits))

    def arrays(self, inputs: Any, more: LossArrays) -> Arrays:
        hidden, head, bias = inputs
        of_rows = row_factors(hidden.ndim - 1)
        factors, axes = (("d", "v"), (1, 0)) if self.is_transposed else (("v", "d"), None)
        arrays = Arrays()
        arrays.add("hidden", hidden, (*of_rows, "d"))
        arrays.add("head", head, factors, per_row=False, axes=axes)
        arrays.add("targets", more.targets, (*of_rows, "v") if is_soft(more.targets) else of_rows)
        arrays.add("bias", bias, ("v",), per_row=False)
        arrays.add("class_weight", more.class_weight, ("v",), per_row=False)
        arrays.add("row_weight", more.row_weight, of_rows)
        return arrays

    def gradients(self, inputs: Any, wants: Wanted) -> list[Result]:
        hidden, head, bias = inputs
        of_hidden, of_head, of_bias = wants.each
        features, classes = head.shape if self.is_transposed else head.shape[::-1]
        results = []
        if of_hidden:
            factors = (*row_factors(hidden.ndim - 1), "d")
            results.append(Result("grad_hidden", factors, shape=hidden.shape, dtype=hidden.dtype))
        if of_head:
            dtype = self.grad_head_dtype or head.dtype
            results.append(Result("grad_head", ("v", "d"), per_row=False, shape=(classes, features), dtype=dtype))
        if of_bias:
            dtype = hidden.dtype if bias.dtype == hidden.dtype else result_dtype(hidden)
            results.append(Result("grad_bias", ("v",), per_row=False, shape=(classes,), dtype=dtype))
        return results

    def as_inputs(self, gradients: Sequence[Any], inputs: Any) -> tuple[Any, ...]:
        grad_hidden, grad_head, grad_bias = gradients
        if self.is_transposed and grad_head is not None:
            grad_head = grad_head.T
        return super().as_inputs((grad_hidden, grad_head, grad_bias), inputs)

    def of_shards(self, shard: Shard, inputs: Any, more: LossArrays, names: Sequence[str]) -> dict[str, jax.Array]:
        found = super().of_shards(shard, inputs, more, names)
        if more.row_weight is None:
            return found
        is_nothing = more.row_weight == 0
        return {
            name: jnp.where(is_nothing[..., None] if name == "lse" else is_nothing, 0, each)
            for name, each in found.items()
        }
