"""cross_entropy for torch tensors: the public function and module, and their autograd. Fake implementations and
batching rules are in _cross_entropy_rules.py, a vocabulary over the ranks of a group in _cross_entropy_ranks.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NoReturn, overload

import torch
from torch import Tensor

from eaves import _cross_entropy_ranks as ranks
from eaves import _cross_entropy_rules  # noqa: F401  # registers them
from eaves._head_chunks import gradients_of
from eaves._loss import (
    DIVISOR,
    LSE,
    MEAN,
    OF_IGNORED_ROWS,
    RETURNED,
    TARGET_MASS,
    Z_LOSS,
    CrossEntropyOutput,
    LossModule,
    check_class_dtype,
    check_input,
    check_soft,
    for_backward,
    in_order,
    keep_outputs,
    kept_for_backward,
    module_of,
    normalizer_of,
    numbers_of,
    output_of,
    pick,
    reduction_of,
    refuse_unknown,
    row_weight_of,
    shape_of,
    upstream_of,
    wanted_outputs,
    weight_of,
)
from eaves._operator import (
    apply,
    binds_quickly,
    call,
    call_plainly,
    check_bool,
    check_shape,
    dispatch,
    give_derivative,
    index_of,
    is_batched,
    is_transforming,
    needs_function,
    refuse_gradient,
    refuse_lost_derivatives,
    run_plainly,
)
from eaves._ranks import (
    Local,
    Shard,
    agree_on_placements,
    check_reduce_dtype,
    is_distributed,
    local_classes,
    local_shard,
    local_target,
    refuse_in_place_of_dtensor,
    refuse_without_group,
    shard_of,
    told,
    with_agreement,
    without_padding,
)

_forward = torch.ops.eaves.cross_entropy_forward.default
_forward_backward = torch.ops.eaves.cross_entropy_forward_backward.default
_rescale = torch.ops.eaves.cross_entropy_rescale.default
_backward = torch.ops.eaves.cross_entropy_backward.default
_backward_in_place = torch.ops.eaves.cross_entropy_backward_in_place.default

_OP = "cross_entropy"
_NO_SECOND = f"{_OP}: there is no second derivative; use torch.nn.functional.cross_entropy where one is needed"

_RETURNED_IN_PLACE = sum(RETURNED)  # what is not wanted has a place there too


if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from typing_extensions import Unpack

    from eaves._loss import GroupKeywords, LossKeywords

    class _ModuleKeywords(LossKeywords, total=False):
        ignore_index: int
        inplace_backward: bool
        class_dim: int | None

    class _Keywords(_ModuleKeywords, GroupKeywords, total=False):
        row_weight: Tensor | None
        normalizer: Tensor | float | None

    class _AllModuleKeywords(_ModuleKeywords, total=False):
        return_lse: bool
        return_argmax: bool
        return_entropy: bool
        return_z_loss: bool
        return_sum_sq: bool
        return_mean_logit: bool


@overload
def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    return_lse: Literal[False] = False,
    return_argmax: Literal[False] = False,
    return_entropy: Literal[False] = False,
    return_z_loss: Literal[False] = False,
    return_sum_sq: Literal[False] = False,
    return_mean_logit: Literal[False] = False,
    **options: Unpack[_Keywords],
) -> Tensor: ...


@overload
def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    return_lse: bool = False,
    return_argmax: bool = False,
    return_entropy: bool = False,
    return_z_loss: bool = False,
    return_sum_sq: bool = False,
    return_mean_logit: bool = False,
    **options: Unpack[_Keywords],
) -> CrossEntropyOutput: ...


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0,
    softcap: float | None = None,
    scale: float | None = None,
    z_loss: float = 0,
    row_weight: Tensor | None = None,
    normalizer: Tensor | float | None = None,
    inplace_backward: bool = False,
    return_lse: bool = False,
    return_argmax: bool = False,
    return_entropy: bool = False,
    return_z_loss: bool = False,
    return_sum_sq: bool = False,
    return_mean_logit: bool = False,
    class_dim: int | None = None,
    group: ProcessGroup | Shard | None = None,
    first_class: int | None = None,
    classes: int | None = None,
    **unknown: object,
) -> Tensor | CrossEntropyOutput:
    """The loss of classifying each row of `input`, as torch.nn.functional.cross_entropy, with its gradient.

    For a row of logits z over V classes with target t, smoothing e and class weights w (1 where absent):

        z'   = softcap * tanh(scale * z / softcap)                    (no softcap: scale * z)
        lse  = log sum_v exp(z'_v)
        loss = (1 - e) * w_t * (lse - z'_t) + e / V * sum_v w_v * (lse - z'_v) + z_loss * lse^2
        mean = sum(r * loss) / sum(r * w_t over the rows that are not ignored)

    with the weights r of the rows (1 where absent), which with the other reductions multiply each loss too.
    With probabilities q as the target: loss = sum_v w_v * q'_v * (lse - z'_v) + z_loss * lse^2 with
    q' = (1 - e) * q + e / V, and the mean divides by sum(r).

    Forward and backward each read the logits once (M. Milakov, N. Gimelshein, "Online normalizer calculation for
    softmax", arXiv:1805.02867), in float32 whatever the dtype of `input`. For the backward are kept: input, target, and
    two numbers for each row, lse and the rest that its rounding lost. Label smoothing: C. Szegedy et al.,
    arXiv:1512.00567; z-loss: A. Chowdhery et al., arXiv:2204.02311; soft capping: Gemma 2, arXiv:2408.00118.

    Args:
        input: the logits: [..., V], or as in torch [N, V, d1, ...]; any strides, on the CPU or a CUDA GPU; float16,
            bfloat16, float32 or float64.
        target: of each row a class, int32 or int64: the shape of input without the axis of the classes. Or
            probabilities: the shape of input, in its dtype or float32.
        weight: of each class, [V], in the dtype of input or float32. It gets no gradient.
        ignore_index: rows with this target have loss 0 and gradient 0, and count in no mean. May be a class.
        reduction: "none" (the losses of the rows), "sum" or "mean".
        label_smoothing: e, 0 to 1.
        softcap: None, or a positive number that the logits are bounded by.
        scale: None, or a positive number that the logits are multiplied by, before the softcap. For a temperature T,
            which divides after it, pass scale=1/T, and with a softcap of c softcap=c/T.
        z_loss: the weight of lse^2 in the loss; not negative.
        row_weight: r, one number for each row (a mask of tokens, advantages): the shape of input without the axis of
            the classes; any real dtype or bool, converted to that of the loss. A row of weight 0 has loss 0 and
            gradient 0, whatever it holds, and its other outputs; its target has to be a class all the same, or
            ignore_index. Weights of both signs go with "sum" or a normalizer: the mean's own divisor
            may be next to 0. It gets no gradient.
        normalizer: with "mean", what the sum is divided by instead of the weights of the rows: a number, or a tensor
            with one element on the device of input, which is not waited for (the tokens of all micro-batches and
            ranks, for instance). It gets no gradient. Not negative; a tensor on a GPU is not checked. With 0 gradients
            are 0.
        inplace_backward: whether the gradient of input may be written over input, in the forward: half of the memory,
            and on a GPU less time. Of float16 the backward writes it, in the time of a call without this option,
            because a gradient that is rounded before a loss scale multiplies it would be 0. Afterwards input (not a
            leaf) holds its gradient and no logits any more: autograd notices an earlier use that
            saved them, and the backward of a later use is a RuntimeError, but not of a slice or a transposed view; a
            later use without a gradient reads the gradient that lies there. There is one backward, and lse and entropy
            have no gradient: a term of the loss that is made of them changes nothing. Nothing is written if no gradient
            of input is wanted. torch.compile, which plans memory itself, ignores it.
        return_lse: whether to return lse, [rows...], float32; it is differentiable.
        return_argmax: whether to return the class of each row's largest logit, [rows...], int64.
        return_entropy: whether to return the entropy of each row's softmax in nats, [rows...], float32; it is
            differentiable.
        return_z_loss: whether to return the part z_loss * lse^2 of the loss, in the loss's shape; not differentiable.
        return_sum_sq: whether to return sum_v p_v^2 of each row's softmax, [rows...], float32; not differentiable.
        return_mean_logit: whether to return the mean of each row's z', [rows...], float32; not differentiable. Not with
            probabilities as the target, nor with weight and label_smoothing together.
        class_dim: the axis of the classes. None: what the shape of target says; where it says both (a target of [N, d]
            for an input of [N, d, d]; probabilities with more than two axes), the call is refused.
        group: None, or the torch.distributed.ProcessGroup whose ranks have the classes in pieces: input, weight and a
            target of probabilities are this rank's, and each rank calls with the same targets of classes and options.
            All ranks get the same loss and outputs, bit for bit, and the gradient of their own logits. Pieces may have
            different sizes, none too. Where input is a DTensor whose classes are cut over one axis of its mesh, that
            axis is the group. With inplace_backward the backward writes the gradient.
        first_class: the first class of this rank; None: the pieces follow each other in the order of ranks.
        classes: how many classes there are in all. Logits and probabilities beyond are padding, which is not read, and
            has gradient 0. None: all are classes. Without a group too.

    Returns:
        The loss: float32, or float64 for a float64 input; of shape [], or with reduction="none" of shape [rows...],
        contiguous. With any return_*: CrossEntropyOutput(loss, lse, argmax, entropy, z_loss, sum_sq, mean_logit), None
        for what was not asked for (torch.vmap takes no None as a result: return what you need of it). "rows..." is the
        shape of input without the classes. What is returned per row beside the loss is there for ignored rows too, but
        with inplace_backward it is 0; for rows of weight 0 it is there always.

    Raises:
        ValueError: a shape, dtype, device or number is not as above; on the CPU a target that is no class and not
            ignore_index. (On a GPU its loss and gradient are NaN, or with EAVES_CHECK_TARGETS=1 in the environment the
            same error.)
        TypeError: an argument is of the wrong Python type.
        NotImplementedError: a dtype, layout or device that eaves does not have, a DTensor whose classes are not cut
            over one axis of its mesh; a derivative of second order, in forward mode, or of target, weight, row_weight
            or normalizer; inplace_backward under torch.func; with a group torch.vmap and torch.func.
        RuntimeError: with inplace_backward, input is a leaf that requires a gradient, a second backward, or the
            backward of a later use of input (of float16 and with a group, of a use after the backward); of
            torch.distributed, where a rank has ended or does not call, after the time-out of the group.
        torch.OutOfMemoryError: torch's allocator has no memory for a result.

    With a group, ranks compare their arguments before they exchange statistics: an error of one, or a difference, is an
    error on all. (On a GPU targets that differ make the rows' loss and gradient NaN. Probabilities are not compared.)
    While a CUDA graph is captured they cannot: make the same call once before.

    Differences from torch.nn.functional.cross_entropy: the loss of 16-bit logits is float32; without rows, or with all
    of them ignored, the mean is 0 with gradient 0, not NaN; classes may also be the last axis; targets of uint8 are
    refused; no derivative with respect to probabilities; under autocast the dtype stays that of input.

    Example:
        >>> import torch, eaves
        >>> logits = torch.tensor([[2.0, 0.0, -1.0], [0.0, 1.0, 0.0], [0.0, 0.0, 0.0]], requires_grad=True)
        >>> target = torch.tensor([0, 2, -100])
        >>> loss = eaves.cross_entropy(logits, target)
        >>> loss.detach()
        tensor(0.8606)
        >>> loss.backward()
        >>> logits.grad
        tensor([[-0.0781,  0.0571,  0.0210],
                [ 0.1060,  0.2881, -0.3940],
                [ 0.0000,  0.0000,  0.0000]])
        >>> eaves.cross_entropy(logits.detach(), target, reduction="none", return_argmax=True).argmax
        tensor([0, 1, 0])
    """
    is_compiling = torch.compiler.is_compiling()
    if (
        not is_compiling
        and type(input) is Tensor
        and input.dim() <= 2
        and weight is row_weight is normalizer is softcap is scale is class_dim is None
        and return_lse
        is return_argmax
        is return_entropy
        is return_z_loss
        is return_sum_sq
        is return_mean_logit
        is False
        and inplace_backward is False
        and reduction == "mean"
        and type(ignore_index) is int
        and ignore_index == -100
        and type(label_smoothing) in (int, float)
        and label_smoothing == 0
        and type(z_loss) in (int, float)
        and z_loss == 0
        and group is None
        and first_class is classes is None
        and not unknown
    ):
        # The defaults of the operator are those above.
        mean: Tensor | None = call_plainly(_forward, _PlainMean, input, target)
        if mean is not None:
            return mean

    shard: Shard | None = None
    if isinstance(group, Shard):
        shard = group
    elif group is not None or is_distributed(input):
        over_ranks: Tensor | CrossEntropyOutput = _of_shard(
            input, target, weight, class_dim, group, first_class, classes, ignore_index=ignore_index,
            reduction=reduction, label_smoothing=label_smoothing, softcap=softcap, scale=scale, z_loss=z_loss,
            row_weight=row_weight, normalizer=normalizer, inplace_backward=inplace_backward, return_lse=return_lse,
            return_argmax=return_argmax, return_entropy=return_entropy, return_z_loss=return_z_loss,
            return_sum_sq=return_sum_sq, return_mean_logit=return_mean_logit, **unknown,
        )  # fmt: skip
        return over_ranks
    elif first_class is not None:
        refuse_without_group(_OP)
    if unknown:
        refuse_unknown(_OP, unknown, cross_entropy)
    result_dtype = check_input(_OP, input, target, "logits")
    is_soft = target.is_floating_point()
    if shard is not None:
        check_reduce_dtype(_OP, shard, input)
    axis = class_axis(input, target, is_soft, class_dim)
    if classes is not None:
        soft = target.movedim(axis, 0) if is_soft else None
        input, weight, soft = without_padding(_OP, classes, input.movedim(axis, 0), weight, soft)
        input, target = input.movedim(0, axis), target if soft is None else soft.movedim(0, axis)
    if input.shape[axis] == 0 and shard is None and not is_soft and target.numel() != 0:
        raise ValueError(f"{_OP}: input has shape {shape_of(input)}, expected at least one class")
    mode = reduction_of(_OP, reduction)
    ignore_index = index_of(_OP, "ignore_index", ignore_index)

    if weight is not None:
        weight = weight_of(_OP, weight, input, input.shape[axis])
    if row_weight is not None:
        rows = [size for index, size in enumerate(input.shape) if index != axis % input.dim()]
        row_weight = row_weight_of(_OP, row_weight, input, rows, result_dtype)
    if normalizer is not None:
        normalizer = normalizer_of(_OP, normalizer, mode, result_dtype, input.device)
    numbers, number_tensor = numbers_of(_OP, label_smoothing, scale, softcap, z_loss)
    may_smooth = number_tensor is not None or (numbers != () and numbers[0] != 0.0)
    wanted = 0
    if not (
        return_lse is return_argmax is return_entropy is return_z_loss is return_sum_sq is return_mean_logit is False
    ):
        wanted = wanted_outputs(
            _OP,
            return_lse,
            return_argmax,
            return_entropy,
            return_z_loss,
            return_sum_sq,
            return_mean_logit,
            has_factors=is_soft or (weight is not None and may_smooth),
        )
        if wanted & ~Z_LOSS:
            wanted |= OF_IGNORED_ROWS
    if inplace_backward is not False:
        check_bool(_OP, "inplace_backward", inplace_backward)

    arguments = (input, target, weight, row_weight, normalizer, axis, ignore_index, mode, numbers)
    if not needs_function(input, target):
        computed = wanted
        outputs = _run_forward((*arguments, computed), shard, number_tensor)
    else:
        refuse_gradient(_OP, "target", target)
        needs_target_mass = is_soft or (weight is not None and (may_smooth or shard is not None))
        if not inplace_backward or is_compiling:
            computed = kept_for_backward(wanted, mode, needs_target_mass)
            outputs = apply(_OP, _CrossEntropy, *arguments, computed, wanted, number_tensor, shard)
        else:
            refuse_in_place(input)
            wanted &= ~OF_IGNORED_ROWS
            if input.dtype == torch.float16 or shard is not None:
                computed = kept_for_backward(wanted, mode, needs_target_mass)
                outputs = apply(_OP, _InPlaceInBackward, *arguments, computed, shard)
            else:
                computed = _RETURNED_IN_PLACE
                outputs = _in_place_in_forward(*arguments, wanted)
    if wanted == 0:
        loss: Tensor = outputs[0]
        return loss
    return output_of(outputs, computed, wanted)


@module_of(cross_entropy, "row_weight", "normalizer", "group", "first_class", "classes")
class CrossEntropyLoss(LossModule):
    """eaves.cross_entropy as a module, as torch.nn.CrossEntropyLoss: the options are given once, and `weight` goes
    where the module goes.

    Args:
        weight, ignore_index, reduction, label_smoothing, softcap, scale, z_loss, inplace_backward, return_lse,
            return_argmax, return_entropy, return_z_loss, return_sum_sq, return_mean_logit, class_dim: as in
            eaves.cross_entropy. They are checked when the module is called.

    Example:
        >>> import torch, eaves
        >>> criterion = eaves.CrossEntropyLoss(label_smoothing=0.1)
        >>> criterion(torch.zeros(2, 3), torch.tensor([0, 2]))
        tensor(1.0986)
    """

    if TYPE_CHECKING:

        def __init__(self, weight: Tensor | None = None, **options: Unpack[_AllModuleKeywords]) -> None: ...

    def forward(
        self,
        input: Tensor,
        target: Tensor,
        *,
        row_weight: Tensor | None = None,
        normalizer: Tensor | float | None = None,
        **of_group: Unpack[GroupKeywords],
    ) -> Any:
        """eaves.cross_entropy(input, target, ...) with the options of the module."""
        return cross_entropy(
            input, target, self.weight, row_weight=row_weight, normalizer=normalizer, **of_group, **self._options()
        )


# ----------------------------------------------------------------------------------------------------------- arguments


def class_axis(input: Tensor, target: Tensor, is_soft: bool, class_dim: int | None) -> int:
    """The axis of the classes, counted from the end, so that a batch in front changes nothing. Also: the target has the
    shape and the dtype that go with it."""
    rank = input.dim()
    if rank == 0:
        raise ValueError(f"{_OP}: input has no axes, expected at least one, of the classes")
    if class_dim is None:
        axis = -1 if rank <= 2 else _axis_of_shapes(input, target, is_soft)
    else:
        axis = index_of(_OP, "class_dim", class_dim)
        if not -rank <= axis < rank:
            raise ValueError(f"{_OP}: class_dim is {axis}, expected {-rank} to {rank - 1} (input has {rank} axes)")
        axis = axis if axis < 0 else axis - rank
    if is_soft:
        check_soft(_OP, target, input, input.shape, "as input")
        return axis
    check_class_dtype(_OP, target, input)
    shape = input.shape
    rows = shape[:-1] if axis == -1 else shape[:axis] + shape[axis + 1 :]
    if target.shape != rows:
        check_shape(_OP, "target", target, rows, f"one per row of input {list(shape)}")
    return axis


def _axis_of_shapes(input: Tensor, target: Tensor, is_soft: bool) -> int:
    """Whether the classes are torch's axis 1 or the last one."""
    shape = input.shape
    if is_soft:
        raise ValueError(
            f"{_OP}: input has shape {list(shape)} and target has probabilities, which do not say where the classes "
            "are: pass class_dim=1 (as torch) or class_dim=-1"
        )
    last, second = shape[:-1], shape[:1] + shape[2:]
    if target.shape == last:
        if last == second:
            raise ValueError(
                f"{_OP}: target has shape {shape_of(target)}, which fits classes on axis 1 and on the last axis of "
                f"input {list(shape)}: pass class_dim=1 (as torch) or class_dim=-1"
            )
        return -1
    if target.shape == second:
        return 1 - input.dim()
    raise ValueError(
        f"{_OP}: target has shape {shape_of(target)}, expected {list(last)} (one per row of input {list(shape)}), or "
        f"{list(second)} where the classes are axis 1"
    )


def _of_shard(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None,
    class_dim: int | None,
    group: ProcessGroup | None,
    *of_shard: Any,
    **options: Any,
) -> Any:
    """The call with tensors of this rank, and a Shard for its group. The ranks of a group learn of each other's errors
    before they wait for each other."""
    is_cut, axis = is_distributed(input), -1
    logits: Local | None = None
    if is_cut and group is None:
        # By the logits alone: what is wrong with a rank's target has to be an error on all of them.
        def cut() -> tuple[int, Local]:
            axis = _cut_axis(input) if class_dim is None else index_of(_OP, "class_dim", class_dim)
            return axis, local_shard(_OP, "input", input, axis)

        axis, logits = told(_OP, input, cut)

    def run(group: ProcessGroup) -> Any:
        if is_cut and logits is None:
            raise ValueError(f"{_OP}: input is a DTensor, which knows its group; leave group out")
        tensors = (input, target, weight)
        if logits is not None:
            refuse_in_place_of_dtensor(_OP, "input", input, options.get("inplace_backward"))
            agree_on_placements(_OP, group, target=target)
            of_weight = local_classes(_OP, "weight", weight)
            tensors = (logits.tensor, local_target(_OP, target, logits, axis), of_weight)
        shard = shard_of(_OP, group, *of_shard)
        function: Any = cross_entropy
        return function(*tensors, class_dim=class_dim if logits is None else axis, group=shard, **options)

    group = group if logits is None else logits.group
    return with_agreement(_OP, group, run)


def _cut_axis(input: Any) -> int:
    """Where a DTensor of logits has its classes: on the last axis, or the second if that is cut."""
    is_second = input.dim() > 2 and any(placement.is_shard(1) for placement in input.placements)
    return 1 if is_second else -1


def refuse_in_place(input: Tensor) -> None:
    """What autograd would not allow to write over, and what it cannot follow."""
    if is_transforming():
        raise NotImplementedError(
            f"{_OP}: inplace_backward does not go with torch.vmap and torch.func, which may use input again; leave it "
            "out"
        )
    # The core says the same of what it writes, but of float16 it writes in the backward.
    if torch._debug_has_internal_overlap(input) == 1:
        raise ValueError(
            f"{_OP}: input has shape {shape_of(input)} and strides {list(input.stride())}, so that elements share "
            "memory; expected an address for each, because inplace_backward writes it"
        )
    if not torch.compiler.is_compiling() and input.is_neg():
        raise ValueError(f"{_OP}: input is negated lazily, and inplace_backward writes it; pass input.resolve_neg()")
    base = input._base if input._is_view() else None
    if input.requires_grad and (input.is_leaf or (base is not None and base.is_leaf and base.requires_grad)):
        raise RuntimeError(
            f"{_OP}: input is a leaf that requires a gradient, or a view of one, and inplace_backward would write over "
            "it; leave inplace_backward out, or pass a tensor that was computed from it"
        )


# ------------------------------------------------------------------------------------------------------------ autograd


def _run_forward(
    arguments: tuple[Any, ...], shard: Shard | None, number_tensor: Tensor | None = None
) -> tuple[Tensor, ...]:
    """The loss and its outputs, and of a shard its Place."""
    if shard is None:
        return tuple(call(_OP, _forward, *arguments, number_tensor=number_tensor))
    return tuple(call(_OP, ranks.forward, *arguments, *shard, number_tensor=number_tensor))


@binds_quickly
class _CrossEntropy(torch.autograd.Function):
    """input -> the loss, and the outputs that the bits `computed` name, of which the user gets those of `wanted`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        input: Tensor,
        target: Tensor,
        weight: Tensor | None,
        row_weight: Tensor | None,
        normalizer: Tensor | None,
        axis: int,
        ignore_index: int,
        mode: int,
        numbers: Sequence[float],
        computed: int,
        wanted: int,
        number_tensor: Tensor | None,
        shard: Shard | None,
    ) -> tuple[Tensor, ...]:
        arguments = (input, target, weight, row_weight, normalizer, axis, ignore_index, mode, numbers, computed)
        return _run_forward(arguments, shard, number_tensor)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.options = inputs[5:9]
        computed, wanted, number_tensor, shard = inputs[9:]
        place = None if shard is None else output[-1]
        ctx.save_for_backward(*inputs[:4], *keep_outputs(ctx, output, computed, wanted), number_tensor, place)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        nothing = (None,) * 12
        upstream = upstream_of(ctx, grads)
        if not upstream:
            return None, *nothing
        input, target, weight, row_weight, *saved, number_tensor, place = ctx.saved_tensors
        axis, ignore_index, mode, numbers = ctx.options
        upstream, saved = for_backward(upstream, saved, mode)
        if place is not None:
            arguments = (*upstream, input, target, weight, row_weight, *saved, *ctx.options, place)
            differentiable = [tensor for tensor in (input, *upstream) if tensor is not None]
            (grad_input,) = gradients_of(
                lambda: (call(_OP, ranks.backward, *arguments, number_tensor=number_tensor),), _NO_SECOND,
                differentiable,
            )  # fmt: skip
            return grad_input, *nothing
        grad_input = dispatch(
            _OP, [tensor for tensor in (input, *upstream) if tensor is not None], _Gradient, _backward,
            *upstream, input, target, weight, row_weight, *saved, axis, ignore_index, mode, numbers,
            number_tensor=number_tensor,
        )  # fmt: skip
        return grad_input, *nothing


_PLAIN = (-1, -100, MEAN, ())  # class axis, ignore_index, reduction and numbers of a call without options
_KEPT_PLAINLY = kept_for_backward(0, MEAN, False)


class _PlainMean(torch.autograd.Function):
    """_CrossEntropy of a call without options and outside of torch.func. There is less of it to run, which small calls
    show."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, target: Tensor) -> Tensor:
        loss, lse, divisor = run_plainly(_forward, input, target, None, None, None, *_PLAIN, _KEPT_PLAINLY)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(input, target, lse, divisor)
        result: Tensor = loss
        return result

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor | None) -> tuple[Tensor | None, None]:
        if grad_loss is None:
            return None, None
        input, target, lse, divisor = ctx.saved_tensors
        tensors = (grad_loss, None, None, input, target, None, None, lse, None, None, divisor)
        return dispatch(_OP, (input, grad_loss), _Gradient, _backward, *tensors, *_PLAIN), None


@binds_quickly
class _Gradient(torch.autograd.Function):
    """The gradient, which has no derivative itself."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        grad_loss: Tensor,
        grad_lse: Tensor | None,
        grad_entropy: Tensor | None,
        input: Tensor,
        target: Tensor,
        weight: Tensor | None,
        row_weight: Tensor | None,
        lse: Tensor,
        entropy: Tensor | None,
        target_mass: Tensor | None,
        divisor: Tensor | None,
        axis: int,
        ignore_index: int,
        mode: int,
        numbers: Sequence[float],
        number_tensor: Tensor | None,
    ) -> Tensor:
        result: Tensor = call(
            _OP, _backward, grad_loss, grad_lse, grad_entropy, input, target, weight, row_weight, lse, entropy,
            target_mass, divisor, axis, ignore_index, mode, numbers, number_tensor=number_tensor,
        )  # fmt: skip
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Any) -> NoReturn:
        raise NotImplementedError(_NO_SECOND)


class _InPlaceInForward(torch.autograd.Function):
    """Forward and backward in one pass, which leaves the gradient for an upstream gradient of 1 where the logits were.

    The logits are an input that is written over, and no output: a backward of an operator that read them before has to
    fail, which the version counter sees to, and not to differentiate through this function. Behind the arguments of the
    extension is a list, into which the backward puts the gradients that it has handed out.
    """

    @staticmethod
    def forward(ctx: Any, input: Tensor, *arguments_and_list: Any) -> tuple[Tensor, ...]:
        *arguments, ctx.handed_out = arguments_and_list
        outputs: tuple[Tensor, ...] = tuple(call(_OP, _forward_backward, input, *arguments))
        torch.autograd.graph.increment_version(input)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*outputs[1:])
        ctx.save_for_backward(input)
        ctx.axis, ctx.is_used = arguments[4], False
        return outputs

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        nothing = (None,) * 10
        if grad_loss is None:
            return None, *nothing
        (grad_input,) = _of_only_backward(ctx, grad_loss)
        call(_OP, _rescale, grad_input, grad_loss, ctx.axis)  # reads and writes nothing where grad_loss is 1
        if not torch.compiler.is_compiling():
            ctx.handed_out.append(_contents_of(grad_input))
        return grad_input, *nothing


class _WrittenOver(torch.autograd.Function):
    """The logits from here on: in the graph their earlier uses are in front of it, their later uses behind it, beside
    the loss."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        ctx.mark_dirty(logits)
        return logits

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def _in_place_in_forward(input: Tensor, *arguments: Any) -> Any:
    """Of logits that are a whole tensor, or all of one in another shape, the gradient may be that of the loss alone. Of
    other views that would cost a copy of the gradient, and they are left as they are."""
    whole = input._base if input._is_view() else input
    handed_out: list[tuple[int, int]] = []
    if whole is None or not whole.requires_grad or (whole is not input and not _is_all_of(input, whole)):
        return apply(_OP, _InPlaceInForward, input, *arguments, handed_out)
    apply(_OP, _WrittenOver, whole)
    logits = input if whole is input else whole.view(input.shape)  # a new view, whose backward is a view
    outputs = apply(_OP, _InPlaceInForward, logits, *arguments, handed_out)

    def check(grad: Tensor) -> None:
        if not torch.compiler.is_compiling() and _contents_of(grad) not in handed_out:
            raise RuntimeError(
                f"{_OP}: something that was computed from input after a call with inplace_backward has a gradient, and "
                "is computed from the gradient that was written over input; leave inplace_backward out"
            )

    # The first of its hooks, so that others may change the gradient.
    whole.register_hook(check)  # type: ignore[no-untyped-call]
    return outputs


def _is_all_of(view: Tensor, base: Tensor) -> bool:
    is_as_large = view.dtype == base.dtype and view.numel() == base.numel() and view.is_contiguous()
    return is_as_large and base.is_contiguous() and view.storage_offset() == base.storage_offset()


def _contents_of(tensor: Tensor) -> tuple[int, int]:
    """The storage of a tensor, and the number of changes to it."""
    return tensor.untyped_storage()._cdata, tensor._version


class _InPlaceInBackward(torch.autograd.Function):
    """The gradient where the logits were, but written in the backward, where the upstream gradient is known: in float16
    most of a mean's gradient would be 0 before a loss scale multiplies it."""

    @staticmethod
    def forward(ctx: Any, *arguments_and_shard: Any) -> tuple[Tensor, ...]:
        *arguments, shard = arguments_and_shard
        outputs = _run_forward(tuple(arguments), shard)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*outputs[1:])
        ctx.options, computed, ctx.is_used = arguments[5:9], arguments[9], False
        kept = [pick(outputs, computed, bit) for bit in (LSE, TARGET_MASS, DIVISOR)]
        ctx.save_for_backward(*arguments[:4], *kept, None if shard is None else outputs[-1])
        return outputs

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        nothing = (None,) * 10
        if grad_loss is None:
            return None, *nothing
        grad_input, target, weight, row_weight, lse, *kept, place = _of_only_backward(ctx, grad_loss)
        upstream = (grad_loss, None, None)
        arguments = (*upstream, grad_input, target, weight, row_weight, lse, None, *kept, *ctx.options)
        if place is None:
            call(_OP, _backward_in_place, *arguments)
        else:
            call(_OP, ranks.backward_in_place, *arguments, place)
        torch.autograd.graph.increment_version(grad_input)
        return grad_input, *nothing


def _of_only_backward(ctx: Any, grad_loss: Tensor) -> list[Any]:
    """What was saved, where this is the one backward that there may be."""
    if is_batched(grad_loss):
        raise NotImplementedError(f"{_OP}: with inplace_backward no backward has a batch (is_grads_batched=True)")
    if torch.is_grad_enabled():
        raise NotImplementedError(
            f"{_OP}: with inplace_backward the gradient has no derivative (create_graph=True); leave it out"
        )
    if ctx.is_used:
        raise RuntimeError(
            f"{_OP}: with inplace_backward there is one backward, and this is the second; leave inplace_backward out"
        )
    saved = [None if tensor is None else tensor.detach() for tensor in ctx.saved_tensors]
    ctx.is_used = True
    return saved


def _differentiable(*arguments: Any, number_tensor: Tensor | None = None) -> list[Tensor]:
    """cross_entropy_forward by its autograd.Function."""
    *of_forward, wanted = arguments
    _, target, weight, mode = *of_forward[:3], of_forward[7]
    computed = kept_for_backward(wanted, mode, target.is_floating_point() or weight is not None)
    outputs = apply(_OP, _CrossEntropy, *of_forward, computed, wanted, number_tensor, None)
    return in_order(outputs, computed, wanted)


give_derivative(_OP, _forward, _differentiable, "logits")
refuse_lost_derivatives(_OP, _forward_backward, _rescale, _backward, _backward_in_place)
