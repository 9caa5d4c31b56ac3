"""A call of cross_entropy: its arguments, checked here, and the way that it takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from eaves._arguments import output_names, reduction_of
from eaves._autograd.cross_entropy import OP, CrossEntropy, PlainMean, forward, run_forward
from eaves._autograd.in_place import RETURNED_IN_PLACE, InPlaceInBackward, in_place_in_forward, refuse_in_place
from eaves._parallel.agreement import agree_on_placements, with_agreement
from eaves._parallel.dtensor import Local, local_classes, local_shard, local_target, refuse_in_place_of_dtensor, told
from eaves._parallel.shard import (
    Shard,
    ShardArguments,
    check_shard_of_logits,
    refuse_without_group,
    shard_arguments,
    shard_of,
    without_padding,
)
from eaves._torch.checks import check_bool, check_shape, index_of, is_distributed, name_in, refuse_gradient, said
from eaves._torch.operator import apply, call_plainly
from eaves._torch.options import (
    check_class_dtype,
    check_input,
    check_soft,
    normalizer_of,
    numbers_of,
    row_weight_of,
    shape_of,
    weight_of,
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
    """The arguments of eaves.cross_entropy, as they were passed."""

    input: Tensor
    target: Tensor
    weight: Tensor | None = None
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
    op: str = OP  # that errors name, with its names of arguments


def loss_of_logits(call: CrossEntropyCall) -> Tensor | CrossEntropyOutput:
    if not torch.compiler.is_compiling() and _is_plain(call):
        mean: Tensor | None = call_plainly(forward, PlainMean, call.input, call.target)
        if mean is not None:
            return mean
    if call.group is not None or is_distributed(call.input):
        return _over_ranks(call)
    return _computed(call, None)


def _is_plain(call: CrossEntropyCall) -> bool:
    """True for a call of one matrix with the defaults, which are the operator's too."""
    (
        input, _, weight, ignore_index, reduction, label_smoothing, softcap, scale, z_loss, row_weight, normalizer,
        inplace_backward, outputs, class_dim, group, classes,
    ) = call[:16]  # fmt: skip
    return (
        type(input) is Tensor
        and input.dim() <= 2
        and weight is row_weight is normalizer is softcap is scale is None
        and class_dim is classes is None
        and group is None
        and type(ignore_index) is int
        and ignore_index == -100
        and reduction == "mean"
        and type(label_smoothing) in (int, float)
        and label_smoothing == 0
        and type(z_loss) in (int, float)
        and z_loss == 0
        and inplace_backward is False
        and type(outputs) is tuple
        and not outputs
    )


def _over_ranks(call: CrossEntropyCall) -> Tensor | CrossEntropyOutput:
    """The call with tensors of this rank. The ranks of a group learn of each other's errors before they wait for each
    other."""
    op, input, shard = call.op, call.input, shard_of(call.group)
    is_cut, axis = is_distributed(input), -1
    logits: Local | None = None
    if is_cut and shard.group is None:
        # By the logits alone: a wrong target of one rank has to be an error on all ranks.
        def cut() -> tuple[int, Local]:
            axis = _cut_axis(input) if call.class_dim is None else index_of(op, "class_dim", call.class_dim)
            return axis, local_shard(op, "logits", input, axis)

        axis, logits = told(op, input, cut)
    elif shard.group is None:
        refuse_without_group(op)

    def run(group: ProcessGroup) -> Tensor | CrossEntropyOutput:
        if is_cut and logits is None:
            raise ValueError(said(op, "`logits` is a DTensor, which knows its group; leave group out"))
        local = call
        if logits is not None:
            refuse_in_place_of_dtensor(op, "logits", input, call.inplace_backward)
            agree_on_placements(op, group, targets=call.target)
            local = call._replace(
                input=logits.tensor,
                target=local_target(op, call.target, logits, axis),
                weight=local_classes(op, "class_weight", call.weight),
                class_dim=axis,
            )
        check_shard_of_logits(op, shard)
        return _computed(local, shard_arguments(op, group, shard, call.classes))

    return with_agreement(op, shard.group if logits is None else logits.group, run)


def _computed(call: CrossEntropyCall, shard: ShardArguments | None) -> Tensor | CrossEntropyOutput:
    """The loss of a call whose tensors are this rank's."""
    (
        input, target, weight, ignore_index, reduction, label_smoothing, softcap, scale, z_loss, row_weight, normalizer,
        inplace_backward, outputs, class_dim, _, classes, op,
    ) = call[:]  # fmt: skip
    result_dtype = check_input(op, input, target, "logits")
    is_soft = target.is_floating_point()
    axis = _class_axis(op, input, target, is_soft, class_dim)
    if classes is not None and shard is None:
        soft = target.movedim(axis, 0) if is_soft else None
        input, weight, soft = without_padding(op, classes, input.movedim(axis, 0), weight, soft)
        input, target = input.movedim(0, axis), target if soft is None else soft.movedim(0, axis)
    if input.shape[axis] == 0 and shard is None and not is_soft and target.numel() != 0:
        raise ValueError(said(op, f"`logits` has shape {shape_of(input)}, expected at least one class"))
    mode = reduction_of(op, reduction)
    ignore_index = index_of(op, "ignore_index", ignore_index)

    if weight is not None:
        weight = weight_of(op, weight, input, input.shape[axis])
    if row_weight is not None:
        rows = [size for index, size in enumerate(input.shape) if index != axis % input.dim()]
        row_weight = row_weight_of(op, row_weight, input, rows, result_dtype)
    if normalizer is not None:
        normalizer = normalizer_of(op, normalizer, mode, result_dtype, input.device)
    numbers, number_tensor = numbers_of(op, label_smoothing, scale, softcap, z_loss)
    may_smooth = number_tensor is not None or (numbers != () and numbers[0] != 0.0)
    wanted, names = 0, output_names(op, outputs, LOSS_OUTPUTS)
    if names:
        wanted = wanted_outputs(op, names, has_factors=is_soft or (weight is not None and may_smooth))
        if wanted & ~Z_LOSS:
            wanted |= OF_IGNORED_ROWS
    if inplace_backward is not False:
        check_bool(op, "inplace_backward", inplace_backward)

    arguments = (input, target, weight, row_weight, normalizer, axis, ignore_index, mode, numbers)
    if not needs_function(input, target):
        computed = wanted
        results = run_forward(op, (*arguments, computed), shard, number_tensor)
    else:
        refuse_gradient(op, "targets", target)
        needs_target_mass = is_soft or (weight is not None and (may_smooth or shard is not None))
        if not inplace_backward or torch.compiler.is_compiling():
            computed = kept_for_backward(wanted, mode, needs_target_mass)
            results = apply(op, CrossEntropy, *arguments, computed, wanted, number_tensor, shard, op)
        else:
            refuse_in_place(op, input)
            wanted &= ~OF_IGNORED_ROWS
            if input.dtype == torch.float16 or shard is not None:
                computed = kept_for_backward(wanted, mode, needs_target_mass)
                results = apply(op, InPlaceInBackward, *arguments, computed, shard, op)
            else:
                computed = RETURNED_IN_PLACE
                results = in_place_in_forward(op, *arguments, wanted)
    if not names:
        loss: Tensor = results[0]
        return loss
    return output_of(results, computed, names)


def _class_axis(op: str, input: Tensor, target: Tensor, is_soft: bool, class_dim: int | None) -> int:
    """The axis of the classes, counted from the end, so that a batch in front changes nothing. Also: the target has the
    shape and the dtype that go with it."""
    rank = input.dim()
    if rank == 0:
        raise ValueError(said(op, "`logits` has no axes, expected at least one, of the classes"))
    if class_dim is None:
        axis = -1 if rank <= 2 else _axis_of_shapes(op, input, target, is_soft)
    else:
        axis = index_of(op, "class_dim", class_dim)
        if not -rank <= axis < rank:
            expected = f"{-rank} to {rank - 1} (`logits` has {rank} axes)"
            raise ValueError(said(op, f"`class_axis` is {axis}, expected {expected}"))
        axis = axis if axis < 0 else axis - rank
    if is_soft:
        check_soft(op, target, input, input.shape, "as `logits`")
        return axis
    check_class_dtype(op, target, input)
    shape = input.shape
    rows = shape[:-1] if axis == -1 else shape[:axis] + shape[axis + 1 :]
    if target.shape != rows:
        check_shape(op, "targets", target, rows, f"one per row of `logits` {list(shape)}")
    return axis


def _axis_of_shapes(op: str, input: Tensor, target: Tensor, is_soft: bool) -> int:
    """Whether the classes are torch's axis 1 or the last one."""
    shape = input.shape
    if is_soft:
        raise ValueError(
            said(op, f"`logits` has shape {list(shape)} and `targets` has probabilities, which do not say where the ")
            + "classes are: pass class_dim=1 (as torch) or class_dim=-1"
        )
    last, second = shape[:-1], shape[:1] + shape[2:]
    if target.shape == last:
        if last == second:
            raise ValueError(
                said(op, f"`targets` has shape {shape_of(target)}, which fits classes on axis 1 and on the last axis ")
                + f"of {name_in(op, 'logits')} {list(shape)}: pass class_dim=1 (as torch) or class_dim=-1"
            )
        return -1
    if target.shape == second:
        return 1 - input.dim()
    expected = f"{list(last)} (one per row of `logits` {list(shape)}), or {list(second)} where the classes are axis 1"
    raise ValueError(said(op, f"`targets` has shape {shape_of(target)}, expected {expected}"))


def _cut_axis(input: Any) -> int:
    """The axis of the classes in a DTensor of logits: the last one, or the second if that is cut."""
    is_second = input.dim() > 2 and any(placement.is_shard(1) for placement in input.placements)
    return 1 if is_second else -1
