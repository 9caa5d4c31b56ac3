"""A call of linear_cross_entropy: its arguments, their checks, and the choice of its implementation."""

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
from eaves._autograd.linear_cross_entropy import OP, Keep, Recompute, Speed, result_of_plain_call, run_forward
from eaves._calls.learned_scale import reads_value, with_learned_scale
from eaves._parallel.agreement import agree_on_placements
from eaves._parallel.dtensor import Local, local_classes, local_rows, local_targets, over_ranks, told_to_ranks
from eaves._parallel.fully_shard import is_hook_of_fully_shard
from eaves._parallel.shard import Shard, ShardArguments, check_reduce_dtype, shape_of_rows, shard_of, without_padding
from eaves._torch.checks import (
    check_bool,
    check_device,
    check_shape,
    check_tensor,
    index_of,
    is_distributed,
    name_of,
    refuse_gradient,
    said,
)
from eaves._torch.head import (
    algorithm_of,
    check_algorithm,
    check_grad_weight_out,
    check_overlap,
    checked_head,
    keep_bytes_of,
    refuse_zero3,
    wide_head,
)
from eaves._torch.library import EXTENSION
from eaves._torch.linear_cross_entropy_rules import GRADIENTS, OF_BIAS, OF_HEAD, OF_HIDDEN
from eaves._torch.operator import apply, are_defaults, is_eager
from eaves._torch.options import (
    CLASS_DTYPES,
    RESULT_DTYPES,
    check_class_dtype,
    check_probabilities,
    class_weight_of,
    limit_of,
    normalizer_of,
    numbers_of,
    row_weight_of,
    shape_of,
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

_ask = suits_speed_of(ctypes.CDLL(str(EXTENSION)))
_DTYPES = {dtype: name_of(dtype).encode() for dtype in RESULT_DTYPES}


class LinearCrossEntropyCall(NamedTuple):
    """The arguments of eaves.linear_cross_entropy, as they were passed, under the core's names."""

    hidden: Tensor
    head: Any  # a Tensor or a torch.nn.Linear
    targets: Tensor
    bias: Tensor | None = None
    reduction: str = "mean"
    ignore_index: int | None = -100
    label_smoothing: float = 0
    scale: Tensor | float | None = None
    softcap: float | None = None
    z_loss: float = 0
    # A plain call has the defaults from here on.
    class_weight: Tensor | None = None
    options: object = None
    row_weight: Tensor | None = None
    normalizer: Tensor | float | None = None
    outputs: str | Sequence[str] = ()
    algorithm: str = "auto"
    workspace_bytes: int | None = None
    skip_ignored: bool = False
    grad_weight_dtype: torch.dtype | None = None
    grad_weight_out: Tensor | None = None
    keep_bytes: int | None = None
    group: ProcessGroup | Shard | None = None
    classes: int | None = None
    # For callers within eaves: lse and entropy get no gradient, and "auto" may be "speed".
    has_constant_outputs: bool = False
    op: str = OP  # the function whose names errors use

    @property
    def with_classes(self) -> tuple[str, Any]:
        return "head", self.head

    def class_axis(self) -> int:
        return 0

    def of_rank(self, cut: Local) -> LinearCrossEntropyCall:
        op, is_summed = self.op, shard_of(self.group).reduce_input_grad is False
        agree_on_placements(op, cut.group, hidden=self.hidden, targets=self.targets)
        return self._replace(
            hidden=local_rows(op, "hidden", self.hidden, cut, is_summed),
            targets=local_targets(op, self.targets, cut),
            head=cut.tensor,
            bias=local_classes(op, "bias", self.bias),
            class_weight=local_classes(op, "class_weight", self.class_weight),
        )


def loss_of_head(call: LinearCrossEntropyCall) -> Tensor | CrossEntropyOutput:
    if isinstance(call.head, torch.nn.Linear):
        call = with_tensors_of_linear(call.op, call, "head", "bias")
    if isinstance(call.scale, Tensor):
        check_tensor(call.op, "hidden", call.hidden)
        if call.bias is not None:
            check_tensor(call.op, "bias", call.bias)
        if torch.compiler.is_compiling() and not is_exporting() and reads_value(call):
            return uncompiled(call.op, loss_of_head)(call)  # type: ignore[no-any-return]
        call = with_learned_scale(call)
    if not torch.compiler.is_compiling() and are_defaults(call[_PLAIN_END:], _PLAIN):
        loss = result_plainly(OP, *call[:_PLAIN_END])
        if loss is not None:
            return loss
    if call.group is not None or is_distributed(call.head):
        return over_ranks(call, computed)
    return computed(call)


_PLAIN_END = LinearCrossEntropyCall._fields.index("class_weight")
_PLAIN = [LinearCrossEntropyCall._field_defaults[name] for name in LinearCrossEntropyCall._fields[_PLAIN_END:]]


def result_plainly(
    op: str,
    hidden: Any,
    head: Any,
    targets: Any,
    bias: Any,
    reduction: Any = "none",
    ignore_index: Any = -100,
    *numbers: Any,
) -> Tensor | None:
    """The loss, or the log-probabilities if `op` is linear_log_prob. `numbers` are the arguments of `numbers_of`. None
    if the call is not a plain one (see _torch/operator.py)."""
    if not is_eager(hidden, head) or not is_eager(targets, targets if bias is None else bias):
        return None
    if hidden.is_nested or head.is_nested:  # a nested tensor has no shape
        return None
    dtype, shape, sizes = hidden.dtype, head.shape, hidden.shape
    if dtype not in RESULT_DTYPES or head.dtype != dtype or targets.is_floating_point():
        return None
    if len(shape) != 2 or not sizes or sizes[-1] != shape[1] or 0 in shape:
        return None
    if torch.is_autocast_enabled("cpu" if hidden.is_cpu else "cuda"):
        return None
    try:
        mode = reduction_of(op, reduction)
        ignored = -100 if ignore_index is None else index_of(op, "ignore_index", ignore_index)
        options = (ignored, mode, numbers_of(op, *numbers)[0], False, 0)
    except (TypeError, ValueError):  # the checks report mistakes in the order of the arguments
        return None
    gradients = 0
    if torch.is_grad_enabled():
        if hidden.requires_grad:
            gradients = OF_HIDDEN
        if head.requires_grad:
            gradients |= OF_HEAD
        if bias is not None and bias.requires_grad:
            gradients |= OF_BIAS
    if not gradients:
        return result_of_plain_call(op, options, hidden, head, bias, targets, None)
    is_speed = _suits_speed(
        dtype, hidden.get_device(), sizes, shape, targets.dtype, hidden.is_cuda and head.stride(1) != 1, 0, mode,
        gradients == OF_HIDDEN, False, False,
    )  # fmt: skip
    return result_of_plain_call(op, options, hidden, head, bias, targets, gradients if is_speed else 0)


def with_tensors_of_linear(op: str, call: Any, name: str, bias_name: str) -> Any:
    """The call with the weight and the bias of the torch.nn.Linear that was passed as a head. An error is raised on the
    other ranks too."""
    linear, bias = getattr(call, name), getattr(call, bias_name)

    def found() -> Any:
        if not _multiplies_by_its_weight(linear):
            raise TypeError(
                said(op, f"`{name}` is a {type(linear).__name__} with hooks or a forward of its own, expected a ")
                + "module that only multiplies by its weight; pass the weight as a tensor"
            )
        if linear.bias is not None and bias is not None:
            raise ValueError(said(op, f"`{name}` is a torch.nn.Linear with a bias; leave `{bias_name}` out"))
        return call._replace(**{name: linear.weight, bias_name: bias if linear.bias is None else linear.bias})

    return told_to_ranks(op, getattr(call, "group", None), linear.weight, found)


def _multiplies_by_its_weight(linear: torch.nn.Linear) -> bool:
    """True if the module's call is a product with its weight, and nothing else."""
    kind = getattr(type(linear), "_eaves_class", type(linear))  # eaves.hf has patched this head
    hooks = [*linear._forward_pre_hooks.values(), *linear._forward_hooks.values()]
    hooks += [*linear._backward_pre_hooks.values(), *linear._backward_hooks.values()]
    is_plain = kind.forward is torch.nn.Linear.forward and "forward" not in vars(linear)
    return is_plain and all(map(is_hook_of_fully_shard, hooks))


def _without_padding(call: LinearCrossEntropyCall, classes: int) -> LinearCrossEntropyCall:
    refuse_zero3(call.op, head=call.head)
    targets = call.targets
    is_soft = isinstance(targets, Tensor) and targets.is_floating_point() and targets.dim() != 0
    soft = targets.movedim(-1, 0) if is_soft else None
    head, bias, class_weight, grad_weight_out, soft = without_padding(
        call.op, classes, call.head, call.bias, call.class_weight, call.grad_weight_out, soft
    )
    return call._replace(
        head=head, bias=bias, class_weight=class_weight, grad_weight_out=grad_weight_out,
        targets=targets if soft is None else soft.movedim(0, -1),
    )  # fmt: skip


def computed(call: LinearCrossEntropyCall, shard: ShardArguments | None = None) -> Tensor | CrossEntropyOutput:
    """The loss of a call with this rank's tensors."""
    keeps = call.algorithm == "keep" or call.keep_bytes is not None
    if keeps and torch.compiler.is_compiling() and not is_exporting():
        return uncompiled(call.op, computed)(call, shard)  # type: ignore[no-any-return]
    if call.classes is not None and shard is None:
        call = _without_padding(call, call.classes)
    tensors, options, number_tensor, wanted, names, wide = _checked(call, shard)
    op, out, (hidden, head, bias, targets, class_weight, _, _) = call.op, call.grad_weight_out, tensors
    keep_bytes = keep_bytes_of(op, call.algorithm, call.keep_bytes, shard is not None) if keeps else None
    gradients = 0
    if torch.is_grad_enabled():
        for bit, each in zip(GRADIENTS, (hidden, head, bias)):
            if each is not None and each.requires_grad:
                gradients |= bit
    is_compiling = torch.compiler.is_compiling()
    if gradients and is_exporting():
        gradients = 0  # see needs_function
    # Even if no gradient is wanted, torch.func or forward mode may follow the call.
    if not gradients and (is_compiling or not needs_autograd()):
        bits = wanted
        results: Sequence[Tensor] = run_forward(tensors, (*options, bits, 0, number_tensor, shard, op, None))
    else:
        # With class weights a block of classes without the target does not know the target's weight.
        bits = kept_for_backward(wanted, options[1], targets.is_floating_point() or class_weight is not None)
        followed = wanted & ~(LSE | ENTROPY) if call.has_constant_outputs else wanted
        limit = options[4]
        if call.algorithm == "memory" and limit == 0 and hidden.is_cuda:  # all ranks need one limit
            limit = _small_workspace(head.shape[0] if shard is None else 0)
        function: type[torch.autograd.Function] = Recompute
        if gradients and _is_speed(call, tensors, options[1], gradients, followed, limit, shard):
            function, options, keep_bytes = Speed, (*options[:4], limit), None
        else:
            gradients = 0
            if not is_compiling and is_transforming():
                keep_bytes = None
            if keep_bytes is not None:
                function = Keep
        run = apply if out is None else uncompiled(op, apply)
        results = run(
            op, function, *tensors, *options, bits, gradients | wide, number_tensor, shard, op, keep_bytes, out, wanted,
            followed,
        )  # fmt: skip
    if not names:
        loss: Tensor = results[0]
        return loss
    return output_of(results, bits, names)


def _checked(call: LinearCrossEntropyCall, shard: ShardArguments | None) -> tuple[Any, ...]:
    """A call's tensors; its options in the order of the extension, with 0 for the device's own limit of the workspace;
    the number tensor; the outputs as bits, and by name; the bit of the dtype of the head's gradient."""
    (
        hidden, head, targets, bias, reduction, ignore_index, label_smoothing, scale, softcap, z_loss, class_weight,
        options, row_weight, normalizer, outputs, algorithm, workspace_bytes, skip_ignored, grad_weight_dtype,
        grad_weight_out,
    ) = call[:20]  # fmt: skip
    op = call.op
    is_compiling = grad_weight_out is not None and torch.compiler.is_compiling()
    if is_compiling:
        torch._dynamo.skip_frame(msg=f"{op}: grad_weight_out is written in the backward, and {OUTSIDE}")
    hidden, head, bias = checked_head(op, hidden, head, bias, may_be_empty=shard is not None)
    check_tensor(op, "targets", targets)
    if targets.device != hidden.device:
        check_device(op, "targets", targets, "hidden", hidden)
    dtype, columns = hidden.dtype, head.shape[0]
    result_dtype, rows = RESULT_DTYPES[dtype], hidden.shape[:-1] if shard is None else shape_of_rows(shard, hidden)
    if targets.is_floating_point():
        check_probabilities(op, targets, dtype, [*rows, columns], "one per class of `head`")
        if targets.dtype not in (torch.float32, torch.float64):
            targets = targets.to(result_dtype)
        if targets.dim() > 2 or targets.stride(-1) != 1:
            targets = targets.contiguous()
    elif targets.dtype not in CLASS_DTYPES:
        check_class_dtype(op, targets, dtype)
    elif targets.shape != rows:
        check_shape(op, "targets", targets, rows, f"one per row of `hidden` {shape_of(hidden)}")
    if shard is not None:
        check_reduce_dtype(op, shard, dtype)
    refuse_gradient(op, "targets", targets)
    mode = reduction_of(op, reduction)
    ignore_index = -100 if ignore_index is None else index_of(op, "ignore_index", ignore_index)
    if class_weight is not None:
        class_weight = class_weight_of(op, class_weight, hidden, columns, "head")
    if row_weight is not None:
        row_weight = row_weight_of(op, row_weight, hidden, rows, result_dtype)
    if normalizer is not None:
        normalizer = normalizer_of(op, normalizer, mode, result_dtype, hidden.device)
    if options is not None and type(options).__name__ != "LinearCrossEntropyOptions":
        raise TypeError(f"{op}: options is {options!r}, expected a torch.nn.LinearCrossEntropyOptions or None")
    if skip_ignored is not False:
        check_bool(op, "skip_ignored", skip_ignored)
    algorithm_of(op, algorithm)
    limit = 0 if workspace_bytes is None else limit_of(op, workspace_bytes)
    assert not isinstance(scale, Tensor)  # see loss_of_head
    numbers, number_tensor = numbers_of(op, label_smoothing, scale, softcap, z_loss)
    may_smooth = number_tensor is not None or (numbers != () and numbers[0] != 0.0)
    wanted, names = 0, output_names(op, outputs, LOSS_OUTPUTS)
    if names:
        has_factors = targets.is_floating_point() or (class_weight is not None and may_smooth)
        wanted = wanted_outputs(op, names, has_factors)
    wide = wide_head(op, dtype, head.dtype, grad_weight_dtype)
    if grad_weight_out is not None:
        wide = check_grad_weight_out(op, grad_weight_out, dtype, head, grad_weight_dtype, result_dtype, is_compiling)
        # The check gets the tensors as the caller passed them: some are converted, and the caller's memory counts.
        check_overlap(op, grad_weight_out, call._replace(grad_weight_out=None)._asdict())
    tensors = (hidden, head, bias, targets, class_weight, row_weight, normalizer)
    return tensors, (ignore_index, mode, numbers, skip_ignored, limit), number_tensor, wanted, names, wide


def check_constant_options(
    head: Tensor, *, skip_ignored: object, algorithm: object, workspace_bytes: object, grad_weight_dtype: object
) -> None:
    """The checks of a call, for options that a module gets before its first call."""
    check_bool(OP, "skip_ignored", skip_ignored)
    check_algorithm(OP, algorithm, workspace_bytes)
    multiplied = head.dtype
    if multiplied == torch.float32 and grad_weight_dtype in (torch.float16, torch.bfloat16):
        multiplied = grad_weight_dtype  # under torch.autocast
    wide_head(OP, multiplied, head.dtype, grad_weight_dtype)


def _small_workspace(classes: int) -> int:
    """The same as linear_cross_entropy_small_workspace() of the header."""
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
    if algorithm in ("recompute", "keep") or (not is_compiling and is_transforming()):
        return False
    hidden, head, _, targets, _, _, _ = tensors
    has_output_gradients = followed & (LSE | ENTROPY) != 0
    # The backward can multiply the rows of the hidden states' gradient by their factors. It cannot do this for the
    # gradients of head and bias, which are sums over rows.
    has_grad_hidden_alone = gradients == OF_HIDDEN and (shard is None or not shard.sequence_parallel)
    if algorithm == "speed":
        is_possible = (mode != NONE or has_grad_hidden_alone) and hidden.dtype != torch.float16
        return is_possible and not (is_compiling and has_output_gradients)  # a graph computes nothing again
    if algorithm == "memory" and (is_compiling or shard is not None):
        limit = 0  # the limit sets the workspace, not the choice
    accumulates = call.grad_weight_out is not None
    if not is_compiling and shard is None:
        try:
            return _suits_speed(
                hidden.dtype, hidden.get_device(), hidden.shape, head.shape, targets.dtype,
                hidden.is_cuda and head.stride(1) != 1, limit, mode, has_grad_hidden_alone, has_output_gradients,
                accumulates,
            )  # fmt: skip
        except TypeError:  # a size is a symbol of make_fx, which has no hash
            pass
    facts = (mode, has_grad_hidden_alone, has_output_gradients, accumulates, shard is not None)
    return _suits_speed_of_any_size(hidden.dtype, *facts, 1 if limit != 0 else 0)  # not a symbol of a graph


@lru_cache(maxsize=4096)  # the question costs a small call 2 us
def _suits_speed(
    dtype: torch.dtype,
    device: int,
    hidden: torch.Size,
    head: torch.Size,
    targets: torch.dtype,
    is_transposed: bool,
    limit: int,
    *options: Any,
) -> bool:
    is_soft = targets.is_floating_point
    return _ask(
        _DTYPES[dtype], device, *options, False, limit, math.prod(hidden[:-1]), *head[::-1], is_transposed, is_soft
    )


def _suits_speed_of_any_size(dtype: torch.dtype, *facts: Any) -> bool:
    """_suits_speed without sizes: a graph must not depend on sizes, and all ranks of a shard have to make the same
    choice."""
    return _ask(_DTYPES[dtype], -1, *facts, -1, 1, 1, False, False)


# A graph cannot ask. torch.compiler.assume_constant_result sets this attribute too, but loads torch._dynamo.
_suits_speed_of_any_size._dynamo_marked_constant = True  # type: ignore[attr-defined]
