"""linear_cross_entropy for JAX arrays: a model's head and its loss, without all the logits."""

# mypy: disallow-untyped-calls=False

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from eaves._arguments import LOSS_OUTPUTS, NONE, answers_missing, output_names, reduction_of, refuse_unknown
from eaves.jax._call import Arrays, Operand, Result, Wanted, row_factors
from eaves.jax._library import suits_speed
from eaves.jax._loss import CrossEntropyOutput, Loss, LossArrays, Numbers, loss_of
from eaves.jax._options import is_soft, number_of, options_of, result_dtype

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

    Probabilities are computed from the product's float32 sums, not from logits rounded to 16 bits. A call without a
    gradient takes one matrix product. The gradients of a mean or a sum are computed with the loss, in three products.

    Args:
        hidden: [..., D]; float16, bfloat16, float32 or float64.
        head: [V, D], or [D, V] with head_layout="dv", in the dtype of hidden. The call reads either layout in place,
            and transposes the gradient of a [D, V] head once.
        targets: a class for each row, int32 or int64: the shape of hidden without D. Or probabilities: [..., V].
        head_layout: "vd" or "dv".
        bias: [V], in the dtype of hidden or float32.
        class_weight: one number for each class, [V], in the dtype of hidden or float32.
        reduction, ignore_index, label_smoothing, softcap, scale, z_loss, row_weight, normalizer, outputs: as in
            cross_entropy.
        algorithm: "speed" computes the gradients with the loss: three products. "recompute" computes the logits again
            in the backward: four products, and little memory in between. "auto" chooses as linear_cross_entropy of
            PyTorch does, from the sizes, the outputs and workspace_bytes, for JAX's default backend. The backward
            always recomputes in float16, with axis_name, and with reduction "none" unless only hidden has a gradient.
        workspace_bytes: the most scratch memory that a call should take; None: a default that suits the device.
        grad_head_dtype: the dtype of the sum over chunks of the head's gradient: None, the dtype of head; or float32,
            rounded once at the end.
        axis_name: JAX's counterpart of `group`: inside of jax.shard_map, the mesh axis that cuts the classes. head,
            bias and class_weight are this device's; everything else is the same on all devices of the axis.

    Returns:
        As in cross_entropy. All outputs of ignored rows and of rows of weight 0 are 0; on the CPU these rows are left
        out before the first product.

    Raises:
        As in cross_entropy.

    Loss, lse and entropy have first derivatives with respect to hidden, head and bias; only the gradients that are
    needed are computed. The other outputs count as constant; a derivative with respect to another argument is a
    NotImplementedError.

    Example:
        >>> import jax, jax.numpy as jnp, eaves.jax
        >>> hidden, head = jnp.array([[1.0, 0.0], [0.0, 2.0]]), jnp.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
        >>> print(eaves.jax.linear_cross_entropy(hidden, head, jnp.array([0, 1])).round(4))
        0.8103
    """
    if unknown:
        refuse_unknown(_OP, unknown, linear_cross_entropy)
    options = options_of(
        _OP, ignore_index, label_smoothing=label_smoothing, softcap=softcap, scale=scale, z_loss=z_loss
    )
    loss = HeadLoss(
        op=_OP, options=options, outputs=output_names(_OP, outputs, LOSS_OUTPUTS), mode=reduction_of(_OP, reduction),
        head_layout=head_layout, algorithm=algorithm, grad_head_dtype=grad_head_dtype, workspace_bytes=workspace_bytes,
    )  # fmt: skip
    more = LossArrays(targets, class_weight, row_weight, normalizer)
    return loss_of_head(loss, hidden, head, bias, more, axis_name)


def loss_of_head(
    loss: HeadLoss, hidden: Any, head: Any, bias: Any, more: LossArrays, axis_name: str | None
) -> jax.Array | CrossEntropyOutput:
    """The loss, after the checks of the head and its options."""
    op, layout, algorithm, workspace_bytes = loss.op, loss.head_layout, loss.algorithm, loss.workspace_bytes
    hidden, head, bias = checked_head(op, hidden, head, bias, layout)
    if algorithm not in _ALGORITHMS:
        raise ValueError(f'{op}: algorithm is {algorithm!r}, expected "auto", "speed" or "recompute"')
    grad_head_dtype = None if loss.grad_head_dtype is None else jnp.dtype(loss.grad_head_dtype)
    if grad_head_dtype not in (None, head.dtype, dtype := result_dtype(hidden)):
        raise ValueError(f"{op}: grad_head_dtype is {grad_head_dtype}, expected {head.dtype} or {dtype}")
    if workspace_bytes is not None:
        workspace_bytes = number_of(op, "workspace_bytes", workspace_bytes, operator.index)
        if not 0 < workspace_bytes < 2**63:
            raise ValueError(f"{op}: workspace_bytes is {workspace_bytes}, expected a positive number of bytes")
    loss = dataclasses.replace(loss, grad_head_dtype=grad_head_dtype, workspace_bytes=workspace_bytes)
    found: jax.Array | CrossEntropyOutput = loss_of(loss, (hidden, head, bias), more, loss.mode, axis_name)
    return found


def checked_head(
    op: str, hidden: Any, head: Any, bias: Any, layout: str, names: tuple[str, str] = ("hidden", "head")
) -> tuple[Any, Any, Any]:
    """The three as arrays, with shapes that can be multiplied."""
    hidden, head = jnp.asarray(hidden), jnp.asarray(head)
    if layout not in _LAYOUTS:
        raise ValueError(f'{op}: head_layout is {layout!r}, expected "vd" or "dv"')
    if hidden.ndim == 0:
        raise ValueError(f"{op}: {names[0]} has no axis, expected [..., features]")
    features = hidden.shape[-1]
    if head.ndim != 2 or head.shape[layout.index("d")] != features:
        expected = f"[{features}, classes]" if layout == "dv" else f"[classes, {features}]"
        raise ValueError(f'{op}: {names[1]} has shape {list(head.shape)}, expected {expected} (head_layout "{layout}")')
    return hidden, head, None if bias is None else jnp.asarray(bias)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadLoss(Loss):
    """A loss with a head; its inputs are hidden states, head and bias. The reduced loss has derivatives, because its
    forward may compute them."""

    head_layout: str
    algorithm: str = "auto"
    grad_head_dtype: Any = None
    workspace_bytes: int | None = None

    core = _OP
    cut = ("head", 1)
    skips_ignored = True

    @property
    def is_transposed(self) -> bool:
        return self.head_layout == "dv"

    def shape(self, inputs: Any) -> tuple[int, ...]:
        hidden, head, _ = inputs
        return (*hidden.shape[:-1], head.shape[self.head_layout.index("v")])

    def needs_target_mass(self, more: LossArrays) -> bool:
        return is_soft(more.targets) or more.class_weight is not None

    def is_speed(self, inputs: Any, more: LossArrays, wants: Wanted) -> bool:
        """The core's choice for JAX's default backend, because a traced call has no device yet."""
        hidden, head, _ = inputs
        if self.algorithm == "recompute" or self.shard is not None:
            return False
        has_grad_hidden_alone = wants.each == (True, False, False)
        if self.algorithm == "speed":
            return (self.mode != NONE or has_grad_hidden_alone) and hidden.dtype != jnp.float16
        if 0 in head.shape or not all(isinstance(size, int) for size in (*hidden.shape, *head.shape)):
            return False  # the call refuses it
        has_output_gradients = not {"lse", "entropy"}.isdisjoint(self.outputs)
        features, classes = hidden.shape[-1], self.shape(inputs)[-1]
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
        targets, of_targets = more.targets, of_rows
        if is_soft(targets):
            targets, of_targets = targets.astype(result_dtype(hidden)), (*of_rows, "v")
        return {
            Operand("hidden", (*of_rows, "d")): hidden,
            Operand("head", factors, per_row=False, axes=axes): head,
            Operand("targets", of_targets): targets,
            Operand("bias", ("v",), per_row=False): bias,
            Operand("class_weight", ("v",), per_row=False): more.class_weight,
            Operand("row_weight", of_rows): more.row_weight,
        }

    def gradients(self, inputs: Any, wants: Wanted) -> list[Result]:
        hidden, head, bias = inputs
        of_hidden, of_head, of_bias = wants.each
        features, classes = hidden.shape[-1], self.shape(inputs)[-1]
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
