"""A call of linear_cross_entropy: its arguments, checked here, and the way that it takes."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from eaves._algorithm import suits_speed_of
from eaves._arguments import output_names, reduction_of
from eaves._autograd.linear_cross_entropy import OP, Recompute, Speed, forward
from eaves._parallel import linear_cross_entropy as ranks
from eaves._parallel.agreement import agree_on_placements, with_agreement
from eaves._parallel.dtensor import (
    Local,
    local_classes,
    local_rows,
    local_shard,
    local_target,
    told,
    told_to_ranks,
)
from eaves._parallel.fully_shard import is_hook_of_fully_shard, needs_whole_head, with_whole_head
from eaves._parallel.shard import (
    Shard,
    ShardArguments,
    check_reduce_dtype,
    refuse_shard_of_whole_head,
    refuse_without_group,
    rows_of,
    shard_arguments,
    shard_of,
    without_padding,
)
from eaves._torch.checks import (
    accumulator_dtype,
    check_bool,
    check_shape,
    given,
    index_of,
    is_distributed,
    name_of,
    refuse_gradient,
    said,
)
from eaves._torch.head import (
    algorithm_of,
    as_multiplied,
    check_algorithm,
    check_grad_weight_out,
    check_overlap,
    checked_head,
    refuse_zero3,
    wide_weight,
)
from eaves._torch.library import EXTENSION
from eaves._torch.linear_cross_entropy_rules import OF_BIAS, OF_INPUT, OF_WEIGHT
from eaves._torch.operator import apply
from eaves._torch.operator import call as call_operator
from eaves._torch.options import (
    check_class_dtype,
    check_input,
    check_soft,
    limit_of,
    normalizer_of,
    numbers_of,
    row_weight_of,
    shape_of,
    weight_of,
)
from eaves._torch.outputs import (
    ENTROPY,
    LOSS_OUTPUTS,
    LSE,
    NONE,
    CrossEntropyOutput,
    kept_for_backward,
    output_of,
    wanted_outputs,
)
from eaves._torch.transforms import OUTSIDE, is_exporting, is_transforming, needs_autograd, uncompiled

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_NAMES = ("hidden", "head", "bias")
_ask = suits_speed_of(ctypes.CDLL(str(EXTENSION)))
_DTYPES = {dtype: name_of(dtype).encode() for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)}


class LinearCrossEntropyCall(NamedTuple):
    """The arguments of eaves.linear_cross_entropy, as they were passed."""

    input: Tensor
    linear_weight: Any  # a Tensor or a torch.nn.Linear
    target: Tensor
    linear_bias: Tensor | None = None
    weight: Tensor | None = None
    reduction: str = "mean"
    ignore_index: int | None = -100
    label_smoothing: float = 0
    options: object = None
    softcap: float | None = None
    scale: float | None = None
    z_loss: float = 0
    row_weight: Tensor | None = None
    normalizer: Tensor | float | None = None
    outputs: str | Sequence[str] = ()
    algorithm: str = "auto"
    workspace_bytes: int | None = None
    skip_ignored: bool = False
    grad_weight_dtype: torch.dtype | None = None
    grad_weight_out: Tensor | None = None
    group: ProcessGroup | Shard | None = None
    classes: int | None = None
    # Of callers within eaves: lse and entropy get no gradient, and "auto" may be "speed".
    has_constant_outputs: bool = False
    op: str = OP  # that errors name, with its names of arguments


def loss_of_head(call: LinearCrossEntropyCall) -> Tensor | CrossEntropyOutput:
    if isinstance(call.linear_weight, torch.nn.Linear):
        weight, bias = tensors_of_linear(call.op, call.group, "head", call.linear_weight, "bias", call.linear_bias)
        call = call._replace(linear_weight=weight, linear_bias=bias)
    if call.group is not None or is_distributed(call.linear_weight):
        return _over_ranks(call)
    if call.classes is not None:
        call = _without_padding(call)
    return computed(call)


def tensors_of_linear(
    op: str, group: object, name: str, linear: torch.nn.Linear, bias_name: str, bias: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """The weight and the bias of a torch.nn.Linear that was passed as the head. Other ranks learn of an error."""

    def found(_: object = None) -> tuple[Tensor, Tensor | None]:
        if not _multiplies_by_its_weight(linear):
            raise TypeError(
                said(op, f"`{name}` is a {type(linear).__name__} with hooks, or a forward of its own, expected a ")
                + "product with its weight alone; pass the tensor that it multiplies by"
            )
        if linear.bias is not None and bias is not None:
            raise ValueError(said(op, f"`{name}` is a torch.nn.Linear with a bias; leave `{bias_name}` out"))
        return linear.weight, bias if linear.bias is None else linear.bias

    return told_to_ranks(op, group, linear.weight, found)


def _multiplies_by_its_weight(linear: torch.nn.Linear) -> bool:
    """True if the module's call is a product with its weight, and nothing else."""
    kind = getattr(type(linear), "_eaves_class", type(linear))  # of a head that eaves.hf has patched
    hooks = [*linear._forward_pre_hooks.values(), *linear._forward_hooks.values()]
    hooks += [*linear._backward_pre_hooks.values(), *linear._backward_hooks.values()]
    is_plain = kind.forward is torch.nn.Linear.forward and "forward" not in vars(linear)
    return is_plain and all(map(is_hook_of_fully_shard, hooks))


def _without_padding(call: LinearCrossEntropyCall) -> LinearCrossEntropyCall:
    assert call.classes is not None
    refuse_zero3(call.op, head=call.linear_weight)
    target = call.target
    is_soft = isinstance(target, Tensor) and target.is_floating_point() and target.dim() != 0
    soft = target.movedim(-1, 0) if is_soft else None
    linear_weight, linear_bias, weight, grad_weight_out, soft = without_padding(
        call.op, call.classes, call.linear_weight, call.linear_bias, call.weight, call.grad_weight_out, soft
    )
    return call._replace(
        linear_weight=linear_weight, linear_bias=linear_bias, weight=weight, grad_weight_out=grad_weight_out,
        target=target if soft is None else soft.movedim(0, -1), classes=None,
    )  # fmt: skip


def _over_ranks(call: LinearCrossEntropyCall) -> Tensor | CrossEntropyOutput:
    """The call with tensors of this rank. The ranks of a group learn of each other's errors before they wait for each
    other."""
    op, linear_weight, shard = call.op, call.linear_weight, shard_of(call.group)
    if needs_whole_head(linear_weight, shard.group, shard.sequence_parallel):
        if shard != Shard():
            refuse_shard_of_whole_head(op)
        return with_whole_head(
            op,
            lambda input, weight, bias: loss_of_head(
                call._replace(input=input, linear_weight=weight, linear_bias=bias, group=None)
            ),
            {"hidden": call.input},
            {"head": linear_weight, "bias": call.linear_bias},
        )
    is_cut = is_distributed(linear_weight)
    head: Local | None = None
    if is_cut and shard.group is None:
        head = told(op, linear_weight, lambda: local_shard(op, "head", linear_weight, 0))
    elif shard.group is None:
        refuse_without_group(op)

    def run(group: ProcessGroup) -> Tensor | CrossEntropyOutput:
        if is_cut and head is None:
            raise ValueError(said(op, "`head` is a DTensor, which knows its group; leave group out"))
        local = call
        if head is not None:
            agree_on_placements(op, group, hidden=call.input, targets=call.target)
            local = call._replace(
                input=local_rows(op, "hidden", call.input, head, shard.reduce_input_grad is False),
                target=local_target(op, call.target, head, -1),
                linear_weight=local_classes(op, "head", linear_weight),
                linear_bias=local_classes(op, "bias", call.linear_bias),
                weight=local_classes(op, "class_weight", call.weight),
            )
        return computed(local, shard_arguments(op, group, shard, call.classes))

    return with_agreement(op, shard.group if head is None else head.group, run)


def computed(call: LinearCrossEntropyCall, shard: ShardArguments | None = None) -> Tensor | CrossEntropyOutput:
    """The loss of a call whose tensors are this rank's."""
    tensors, settings, number_tensor, limit, wanted, names, wide = _checked(call, shard)
    input, linear_weight, linear_bias, target, weight, _, _ = tensors
    gradients = _wanted_gradients(input, linear_weight, linear_bias)
    # Without gradients torch.func and forward mode may follow the call.
    if not gradients and (
        torch.compiler.is_compiling() or not needs_autograd(*given(input, linear_weight, linear_bias))
    ):
        bits = wanted
        arguments = (*as_multiplied(tensors), *settings, limit, bits)
        if shard is None:
            outputs = call_operator(call.op, forward, *arguments, number_tensor=number_tensor)
        else:
            outputs = call_operator(call.op, ranks.forward, *arguments, 0, *shard, number_tensor=number_tensor)
    else:
        # With class weights a block of classes without the target does not know the target's weight.
        bits = kept_for_backward(wanted, settings[1], target.is_floating_point() or weight is not None)
        followed = wanted & ~(LSE | ENTROPY) if call.has_constant_outputs else wanted
        grad_weight_out, allowed = call.grad_weight_out, limit
        if call.algorithm == "memory" and limit == 0 and input.is_cuda:  # as on all ranks, whose shards may differ
            allowed = _small_workspace(linear_weight.shape[0] if shard is None else 0)
        function: type[torch.autograd.Function] = Recompute
        if gradients and _is_speed(call, tensors, settings[1], gradients, followed, allowed, shard):
            function, limit = Speed, allowed
        else:
            gradients = 0
        run = apply if grad_weight_out is None else uncompiled(call.op, apply)
        outputs = run(
            call.op, function, *tensors, *settings, limit, grad_weight_out, bits, wanted, followed, gradients | wide,
            number_tensor, shard, call.op,
        )  # fmt: skip
    if not names:
        loss: Tensor = outputs[0]
        return loss
    return output_of(outputs, bits, names)


def _checked(call: LinearCrossEntropyCall, shard: ShardArguments | None) -> tuple[Any, ...]:
    """A call's tensors in the order of ForwardTensors; the extension's options, but for the limit of its workspace; the
    number tensor; that limit in bytes, 0 for the device's; the outputs as bits, and by name; the bit of the dtype of
    the head's gradient."""
    (
        input, linear_weight, target, linear_bias, weight, reduction, ignore_index, label_smoothing, options, softcap,
        scale, z_loss, row_weight, normalizer, outputs, algorithm, workspace_bytes, skip_ignored, grad_weight_dtype,
        grad_weight_out,
    ) = call[:20]  # fmt: skip
    op = call.op
    is_compiling = grad_weight_out is not None and torch.compiler.is_compiling()
    if is_compiling:
        torch._dynamo.skip_frame(msg=f"{op}: grad_weight_out is written in the backward, so {OUTSIDE}")
    result_dtype = check_input(op, input, target, "what is multiplied")
    passed = input
    input, linear_weight, linear_bias = checked_head(
        op, _NAMES, input, linear_weight, linear_bias, None, shard is not None
    )
    if input is not passed:  # cast
        result_dtype = accumulator_dtype(input.dtype)
    columns, rows = linear_weight.shape[0], input.shape[:-1] if shard is None else rows_of(shard, input)
    target = _checked_target(op, input, target, rows, columns, result_dtype)
    if shard is not None:
        check_reduce_dtype(op, shard, input)
    refuse_gradient(op, "targets", target)
    mode = reduction_of(op, reduction)
    ignore_index = -100 if ignore_index is None else index_of(op, "ignore_index", ignore_index)
    if weight is not None:
        weight = weight_of(op, weight, input, columns, "head")
    if row_weight is not None:
        row_weight = row_weight_of(op, row_weight, input, rows, result_dtype)
    if normalizer is not None:
        normalizer = normalizer_of(op, normalizer, mode, result_dtype, input.device)
    if options is not None and type(options).__name__ != "LinearCrossEntropyOptions":
        raise TypeError(f"{op}: options is {options!r}, expected a torch.nn.LinearCrossEntropyOptions or None")
    if skip_ignored is not False:
        check_bool(op, "skip_ignored", skip_ignored)
    algorithm_of(op, algorithm)
    limit = 0 if workspace_bytes is None else limit_of(op, workspace_bytes)
    numbers, number_tensor = numbers_of(op, label_smoothing, scale, softcap, z_loss)
    may_smooth = number_tensor is not None or (numbers != () and numbers[0] != 0.0)
    wanted, names = 0, output_names(op, outputs, LOSS_OUTPUTS)
    if names:
        has_factors = target.is_floating_point() or (weight is not None and may_smooth)
        wanted = wanted_outputs(op, names, has_factors)
    wide = wide_weight(op, input.dtype, linear_weight.dtype, grad_weight_dtype)
    if grad_weight_out is not None:
        wide = check_grad_weight_out(
            op, grad_weight_out, input.dtype, linear_weight, grad_weight_dtype, result_dtype, is_compiling
        )
        # As they were passed: some are converted, and the caller's memory counts.
        check_overlap(
            op,
            grad_weight_out,
            {
                "hidden": call.input, "head": call.linear_weight, "bias": call.linear_bias, "targets": call.target,
                "class_weight": call.weight, "row_weight": call.row_weight, "normalizer": call.normalizer,
            },
        )  # fmt: skip
    tensors = (input, linear_weight, linear_bias, target, weight, row_weight, normalizer)
    return tensors, (ignore_index, mode, numbers, skip_ignored), number_tensor, limit, wanted, names, wide


def _checked_target(
    op: str, input: Tensor, target: Tensor, rows: Sequence[int], classes: int, result_dtype: torch.dtype
) -> Tensor:
    """The target as the core takes it."""
    if not target.is_floating_point():
        check_class_dtype(op, target, input)
        if target.shape != tuple(rows):
            check_shape(op, "targets", target, rows, f"one per row of `hidden` {shape_of(input)}")
        return target
    check_soft(op, target, input, [*rows, classes], "one per class of `head`")
    if target.dtype not in (torch.float32, torch.float64):
        target = target.to(result_dtype)
    return target if target.dim() <= 2 and target.stride(-1) == 1 else target.contiguous()


def check_constant_options(
    linear_weight: Tensor,
    *,
    skip_ignored: object,
    algorithm: object,
    workspace_bytes: object,
    grad_weight_dtype: object,
) -> None:
    """The checks of a call, for options that are given before there is one."""
    check_bool(OP, "skip_ignored", skip_ignored)
    check_algorithm(OP, algorithm, workspace_bytes)
    multiplied = linear_weight.dtype
    if multiplied == torch.float32 and grad_weight_dtype in (torch.float16, torch.bfloat16):
        multiplied = grad_weight_dtype  # under torch.autocast
    wide_weight(OP, multiplied, linear_weight.dtype, grad_weight_dtype)


def _wanted_gradients(input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None) -> int:
    if not torch.is_grad_enabled():
        return 0
    bits = OF_INPUT if input.requires_grad else 0
    if linear_weight.requires_grad:
        bits |= OF_WEIGHT
    if linear_bias is not None and linear_bias.requires_grad:
        bits |= OF_BIAS
    return 0 if bits and is_exporting() else bits  # see needs_function


def _small_workspace(classes: int) -> int:
    """linear_cross_entropy_small_workspace() of the header."""
    return max(160 << 20, (24 << 20) + 1024 * classes)


def _is_speed(
    call: LinearCrossEntropyCall,
    tensors: tuple[Any, ...],
    mode: int,
    gradients: int,
    followed: int,
    limit: int,
    shard: ShardArguments | None,
) -> bool:
    """Whether the forward computes the gradients too, as the documentation of `algorithm` says."""
    algorithm, is_compiling = call.algorithm, torch.compiler.is_compiling()
    if algorithm == "recompute" or (not is_compiling and is_transforming()):
        return False
    input, linear_weight, _, target, _, _, _ = tensors
    has_output_gradients = followed & (LSE | ENTROPY) != 0
    # The backward multiplies rows of the input's gradient by their factors; sums over rows it cannot.
    has_grad_input_alone = gradients == OF_INPUT and (shard is None or not shard.sequence_parallel)
    if algorithm == "speed":
        is_possible = (mode != NONE or has_grad_input_alone) and input.dtype != torch.float16
        return is_possible and not (is_compiling and has_output_gradients)  # a graph computes nothing again
    if algorithm == "memory" and (is_compiling or shard is not None):
        limit = 0  # the workspace, not the choice, follows from the limit
    accumulates = call.grad_weight_out is not None
    if not is_compiling and shard is None:
        try:
            return _suits_speed(
                input.dtype, input.get_device(), input.shape, linear_weight.shape, target.dtype,
                input.is_cuda and linear_weight.stride(1) != 1, limit, mode, has_grad_input_alone,
                has_output_gradients, accumulates,
            )  # fmt: skip
        except TypeError:  # a size is a symbol of make_fx, which has no hash
            pass
    facts = (mode, has_grad_input_alone, has_output_gradients, accumulates, shard is not None)
    return _suits_speed_of_any_size(input.dtype, *facts, 1 if limit != 0 else 0)  # not a symbol of a graph


@lru_cache(maxsize=4096)  # to ask costs a small call 2 us
def _suits_speed(
    dtype: torch.dtype,
    device: int,
    input: torch.Size,
    head: torch.Size,
    target: torch.dtype,
    is_transposed: bool,
    limit: int,
    *options: Any,
) -> bool:
    rows = math.prod(input[:-1])
    is_soft = target.is_floating_point
    return _ask(_DTYPES[dtype], device, *options, False, limit, rows, *head[::-1], is_transposed, is_soft)


def _suits_speed_of_any_size(dtype: torch.dtype, *facts: Any) -> bool:
    """For a graph, which is to depend on no sizes, and a shard, whose choice is to be that of the other ranks."""
    return _ask(_DTYPES[dtype], -1, *facts, -1, 1, 1, False, False)


# As torch.compiler.assume_constant_result does, which would load torch._dynamo: a graph cannot ask.
_suits_speed_of_any_size._dynamo_marked_constant = True  # type: ignore[attr-defined]
