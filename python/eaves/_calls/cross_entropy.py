"""A call of cross_entropy: its arguments, their checks, and the choice of its implementation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

from eaves._arguments import output_names, reduction_of
from eaves._autograd.cross_entropy import OP, CrossEntropy, mean_of_plain_call, run_forward
from eaves._autograd.in_place import (
    RETURNED_IN_PLACE,
    InPlaceInBackward,
    in_place_in_forward,
    in_place_of_plain_call,
    refuse_in_place,
)
from eaves._parallel.agreement import agree_on_placements
from eaves._parallel.dtensor import Local, local_classes, local_targets, over_ranks, refuse_in_place_of_dtensor
from eaves._parallel.shard import Shard, ShardArguments, without_padding
from eaves._torch.checks import (
    check_bool,
    check_device,
    check_shape,
    check_tensor,
    index_of,
    is_distributed,
    name_in,
    refuse_gradient,
    said,
)
from eaves._torch.cross_entropy_rules import row_shape
from eaves._torch.operator import apply, is_eager
from eaves._torch.options import (
    RESULT_DTYPES,
    check_class_dtype,
    check_probabilities,
    class_weight_of,
    normalizer_of,
    numbers_of,
    refuse_numbers,
    row_weight_of,
    shape_of,
)
from eaves._torch.outputs import (
    LOSS_OUTPUTS,
    OF_IGNORED_ROWS,
    Z_LOSS,
    CrossEntropyOutput,
    kept_for_backward,
    output_of,
    wanted_outputs,
)
from eaves._torch.transforms import needs_function

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class CrossEntropyCall(NamedTuple):
    """The arguments of eaves.cross_entropy, as they were passed, under the core's names."""

    logits: Tensor
    targets: Tensor
    class_weight: Tensor | None = None
    ignore_index: int = -100
    reduction: str = "mean"
    label_smoothing: float = 0
    softcap: float | None = None
    scale: float | None = None
    z_loss: float = 0
    row_weight: Tensor | None = None
    normalizer: Tensor | float | None = None
    inplace_backward: bool = False
    outputs: str | Sequence[str] = ()
    class_dim: int | None = None
    group: ProcessGroup | Shard | None = None
    classes: int | None = None
    op: str = OP  # the function whose names errors use
    # For callers within eaves: with inplace_backward the backward writes the gradient.
    keeps_logits: bool = False

    @property
    def with_classes(self) -> tuple[str, Any]:
        return "logits", self.logits

    def class_axis(self) -> int:
        if self.class_dim is not None:
            return index_of(self.op, "class_dim", self.class_dim)
        logits: Any = self.logits  # the last axis, or the second if the second is cut
        is_second = logits.dim() > 2 and any(placement.is_shard(1) for placement in logits.placements)
        return 1 if is_second else -1

    def of_rank(self, cut: Local) -> CrossEntropyCall:
        refuse_in_place_of_dtensor(self.op, self.logits, self.inplace_backward)
        agree_on_placements(self.op, cut.group, targets=self.targets)
        return self._replace(
            logits=cut.tensor,
            targets=local_targets(self.op, self.targets, cut, cut.class_axis),
            class_weight=local_classes(self.op, "class_weight", self.class_weight),
            class_dim=cut.class_axis,
        )


def loss_of_logits(call: CrossEntropyCall) -> Tensor | CrossEntropyOutput:
    if not is_compiling() and _is_plain(call):
        loss = mean_of_plain_call(call.logits, call.targets) if not call.inplace_backward else _in_place_plainly(call)
        if loss is not None:
            return loss
    if call.group is not None or is_distributed(call.logits):
        return over_ranks(call, _computed)
    return _computed(call)


def _in_place_plainly(call: CrossEntropyCall) -> Tensor | None:
    logits, targets = call.logits, call.targets
    if not torch.is_grad_enabled() or not logits.requires_grad:
        return mean_of_plain_call(logits, targets)
    if call.keeps_logits or targets.is_floating_point() or logits.dtype == torch.float16:
        return None
    return in_place_of_plain_call(logits, targets)


def _is_plain(call: CrossEntropyCall) -> bool:
    """True for a call of one matrix with default options. The operator has the same defaults."""
    (
        logits, targets, class_weight, ignore_index, reduction, label_smoothing, softcap, scale, z_loss, row_weight,
        normalizer, inplace_backward, outputs, class_dim, group, classes,
    ) = call[:16]  # fmt: skip
    return (
        class_weight is row_weight is normalizer is softcap is scale is None
        and class_dim is classes is None
        and group is None
        and type(ignore_index) is int
        and ignore_index == -100
        and reduction == "mean"
        and type(label_smoothing) in (int, float)
        and label_smoothing == 0
        and type(z_loss) in (int, float)
        and z_loss == 0
        and (inplace_backward is False or inplace_backward is True)
        and type(outputs) is tuple
        and not outputs
        and is_eager(logits, targets)
        and logits.dim() <= 2  # classes on the last axis
    )


def _computed(call: CrossEntropyCall, shard: ShardArguments | None = None) -> Tensor | CrossEntropyOutput:
    """The loss of a call with this rank's tensors."""
    (
        logits, targets, class_weight, ignore_index, reduction, label_smoothing, softcap, scale, z_loss, row_weight,
        normalizer, inplace_backward, outputs, class_dim, _, classes, op, keeps_logits,
    ) = call[:]  # fmt: skip
    check_tensor(op, "logits", logits)
    check_tensor(op, "targets", targets)
    if targets.device != logits.device:
        check_device(op, "targets", targets, "logits", logits)
    result_dtype = RESULT_DTYPES.get(logits.dtype)
    if result_dtype is None:
        refuse_numbers(op, "logits", logits, "logits")
    is_soft = targets.is_floating_point()
    axis = _class_axis(op, logits, targets, is_soft, class_dim)
    if classes is not None and shard is None:
        soft = targets.movedim(axis, 0) if is_soft else None
        logits, class_weight, soft = without_padding(op, classes, logits.movedim(axis, 0), class_weight, soft)
        logits, targets = logits.movedim(0, axis), targets if soft is None else soft.movedim(0, axis)
    if logits.shape[axis] == 0 and shard is None and not is_soft and targets.numel() != 0:
        raise ValueError(said(op, f"`logits` has shape {shape_of(logits)}, expected at least one class"))
    mode = reduction_of(op, reduction)
    ignore_index = index_of(op, "ignore_index", ignore_index)

    if class_weight is not None:
        class_weight = class_weight_of(op, class_weight, logits, logits.shape[axis])
    if row_weight is not None:
        row_weight = row_weight_of(op, row_weight, logits, row_shape(logits, axis), result_dtype)
    if normalizer is not None:
        normalizer = normalizer_of(op, normalizer, mode, result_dtype, logits.device)
    numbers, number_tensor = numbers_of(op, label_smoothing, scale, softcap, z_loss)
    may_smooth = number_tensor is not None or (numbers != () and numbers[0] != 0.0)
    wanted, names = 0, output_names(op, outputs, LOSS_OUTPUTS)
    if names:
        wanted = wanted_outputs(op, names, has_factors=is_soft or (class_weight is not None and may_smooth))
        if wanted & ~Z_LOSS:
            wanted |= OF_IGNORED_ROWS
    if inplace_backward is not False:
        check_bool(op, "inplace_backward", inplace_backward)

    arguments = (logits, targets, class_weight, row_weight, normalizer, axis, ignore_index, mode, numbers)
    if not needs_function(logits, targets):
        computed = wanted
        results = run_forward(op, (*arguments, computed), shard, number_tensor)
    else:
        refuse_gradient(op, "targets", targets)
        needs_target_mass = is_soft or (class_weight is not None and (may_smooth or shard is not None))
        if not inplace_backward or is_compiling():
            computed = kept_for_backward(wanted, mode, needs_target_mass)
            results = apply(op, CrossEntropy, *arguments, computed, wanted, number_tensor, shard, op)
        else:
            refuse_in_place(op, logits)
            wanted &= ~OF_IGNORED_ROWS
            if keeps_logits or logits.dtype == torch.float16 or shard is not None:
                computed = kept_for_backward(wanted, mode, needs_target_mass)
                results = apply(op, InPlaceInBackward, *arguments, computed, shard, op)
            else:
                computed = RETURNED_IN_PLACE
                results = in_place_in_forward(op, *arguments, wanted)
    if not names:
        loss: Tensor = results[0]
        return loss
    return output_of(results, computed, names)


def _class_axis(op: str, logits: Tensor, targets: Tensor, is_soft: bool, class_dim: int | None) -> int:
    """The axis of the classes, counted from the end, so that a batch in front changes nothing. Also checks that shape
    and dtype of the targets fit this axis."""
    rank = logits.dim()
    if rank == 0:
        raise ValueError(said(op, "`logits` has no axes, expected at least the axis of the classes"))
    if class_dim is None:
        axis = -1 if rank <= 2 else _axis_of_shapes(op, logits, targets, is_soft)
    else:
        axis = index_of(op, "class_dim", class_dim)
        if not -rank <= axis < rank:
            expected = f"{-rank} to {rank - 1} (`logits` has {rank} axes)"
            raise ValueError(said(op, f"`class_axis` is {axis}, expected {expected}"))
        axis = axis if axis < 0 else axis - rank
    if is_soft:
        check_probabilities(op, targets, logits.dtype, logits.shape, "as `logits`")
        return axis
    check_class_dtype(op, targets, logits.dtype)
    shape = logits.shape
    rows = shape[:-1] if axis == -1 else shape[:axis] + shape[axis + 1 :]
    if targets.shape != rows:
        check_shape(op, "targets", targets, rows, f"one per row of `logits` {list(shape)}")
    return axis


def _axis_of_shapes(op: str, logits: Tensor, targets: Tensor, is_soft: bool) -> int:
    """Whether the classes are torch's axis 1 or the last one."""
    shape = logits.shape
    if is_soft:
        raise ValueError(
            said(op, f"`targets` holds probabilities in the shape of `logits`, {list(shape)}, so the axis of the ")
            + "classes is ambiguous; pass class_dim=1 (as torch) or class_dim=-1"
        )
    last, second = shape[:-1], shape[:1] + shape[2:]
    if targets.shape == last:
        if last == second:
            raise ValueError(
                said(op, f"`targets` has shape {shape_of(targets)}, so the classes may be axis 1 or the last axis of ")
                + f"{name_in(op, 'logits')} {list(shape)}; pass class_dim=1 (as torch) or class_dim=-1"
            )
        return -1
    if targets.shape == second:
        return 1 - logits.dim()
    expected = f"{list(last)} (one per row of `logits` {list(shape)}), or {list(second)} with the classes on axis 1"
    raise ValueError(said(op, f"`targets` has shape {shape_of(targets)}, expected {expected}"))
