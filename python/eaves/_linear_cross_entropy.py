"""linear_cross_entropy for torch tensors: the public function and module, and their autograd. Fake implementations and
batching rules are in _linear_cross_entropy_rules.py.

There are two ways to the gradients, two torch.autograd.Functions here. `_Recompute` keeps the arguments and two numbers
for each row, and computes the logits again in the backward. `_Speed` computes gradients in the forward, for an upstream
gradient of 1, and multiplies them in the backward by the one that came; "memory" is that in smaller chunks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NoReturn, overload

import torch
from torch import Tensor

from eaves import _linear_cross_entropy_ranks as ranks
from eaves._fully_shard import needs_whole_head, with_whole_head
from eaves._head_chunks import gradients_of, refuse_zero3
from eaves._linear_cross_entropy_rules import (
    GRADIENTS,
    OF_BIAS,
    OF_INPUT,
    OF_WEIGHT,
    WIDE_WEIGHT,
    ForwardTensors,
    Options,
    by_name,
    in_places,
)
from eaves._loss import (
    ENTROPY,
    LSE,
    NONE,
    CrossEntropyOutput,
    LossModule,
    check_class_dtype,
    check_input,
    check_soft,
    for_backward,
    in_order,
    keep_outputs,
    kept_for_backward,
    limit_of,
    module_of,
    normalizer_of,
    numbers_of,
    output_of,
    reduction_of,
    refuse_unknown,
    row_weight_of,
    shape_of,
    upstream_of,
    wanted_outputs,
    weight_of,
)
from eaves._operator import (
    OUTSIDE,
    accumulator_dtype,
    apply,
    binds_quickly,
    call,
    check_bool,
    check_device,
    check_dtype_of,
    check_not_packed,
    check_shape,
    check_tensor,
    dispatch,
    give_derivative,
    index_of,
    is_batched,
    is_exporting,
    is_transforming,
    name_of,
    needs_autograd,
    refuse_gradient,
    refuse_lost_derivatives,
    uncompiled,
)
from eaves._ranks import (
    Local,
    Shard,
    agree_on_placements,
    check_reduce_dtype,
    is_distributed,
    local_classes,
    local_rows,
    local_shard,
    local_target,
    refuse_without_group,
    rows_of,
    shard_of,
    told,
    with_agreement,
    without_padding,
)

_forward = torch.ops.eaves.linear_cross_entropy_forward.default
_forward_backward = torch.ops.eaves.linear_cross_entropy_forward_backward.default
_backward = torch.ops.eaves.linear_cross_entropy_backward.default
_backward_accumulate = torch.ops.eaves.linear_cross_entropy_backward_accumulate.default
_rescale = torch.ops.eaves.linear_cross_entropy_rescale.default
_rescale_rows = torch.ops.eaves.cross_entropy_rescale.default
_algorithm = torch.ops.eaves.linear_cross_entropy_algorithm.default

_OP = "linear_cross_entropy"

_SPEED = 0  # enum LinearCrossEntropyAlgorithm of include/eaves/linear_cross_entropy.h
_ALGORITHMS = ("auto", "speed", "memory", "recompute")

# A keyword of callers within eaves, who take lse and entropy as numbers without a gradient: "auto" may be speed then.
CONSTANT_OUTPUTS: dict[str, Any] = {"_constant_outputs": True}


if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from typing_extensions import Unpack

    from eaves._loss import HeadGroupKeywords, LossKeywords

    class _ModuleKeywords(LossKeywords, total=False):
        ignore_index: int | None
        algorithm: str
        workspace_bytes: int | None
        skip_ignored: bool
        grad_weight_dtype: torch.dtype | None

    class _Keywords(_ModuleKeywords, HeadGroupKeywords, total=False):
        linear_bias: Tensor | None
        weight: Tensor | None
        options: object
        row_weight: Tensor | None
        normalizer: Tensor | float | None
        grad_weight_out: Tensor | None

    class _AllModuleKeywords(_ModuleKeywords, total=False):
        return_lse: bool
        return_argmax: bool
        return_entropy: bool
        return_z_loss: bool
        return_sum_sq: bool
        return_mean_logit: bool


@overload
def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    return_lse: Literal[False] = False,
    return_argmax: Literal[False] = False,
    return_entropy: Literal[False] = False,
    return_z_loss: Literal[False] = False,
    return_sum_sq: Literal[False] = False,
    return_mean_logit: Literal[False] = False,
    **keywords: Unpack[_Keywords],
) -> Tensor: ...


@overload
def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    return_lse: bool = False,
    return_argmax: bool = False,
    return_entropy: bool = False,
    return_z_loss: bool = False,
    return_sum_sq: bool = False,
    return_mean_logit: bool = False,
    **keywords: Unpack[_Keywords],
) -> CrossEntropyOutput: ...


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = -100,
    label_smoothing: float = 0,
    options: object = None,
    softcap: float | None = None,
    scale: float | None = None,
    z_loss: float = 0,
    row_weight: Tensor | None = None,
    normalizer: Tensor | float | None = None,
    return_lse: bool = False,
    return_argmax: bool = False,
    return_entropy: bool = False,
    return_z_loss: bool = False,
    return_sum_sq: bool = False,
    return_mean_logit: bool = False,
    algorithm: str = "auto",
    workspace_bytes: int | None = None,
    skip_ignored: bool = False,
    grad_weight_dtype: torch.dtype | None = None,
    grad_weight_out: Tensor | None = None,
    group: ProcessGroup | Shard | None = None,
    first_class: int | None = None,
    classes: int | None = None,
    sequence_parallel: bool = False,
    reduce_input_grad: bool = True,
    reduce_dtype: torch.dtype | None = None,
    **unknown: object,
) -> Tensor | CrossEntropyOutput:
    """The loss of a model's head, cross_entropy(input @ linear_weight.T + linear_bias, target), and its gradients,
    without ever holding all the logits; takes the calls of torch.nn.functional.linear_cross_entropy (PyTorch 2.13), on
    every PyTorch that eaves has.

    For a row x of `input` and V classes, with what eaves.cross_entropy does with logits z:

        z    = linear_weight @ x + linear_bias          in float32, whatever the dtype of input
        loss = eaves.cross_entropy(z, target)

    Probabilities are computed from the product's float32 sums, not from logits rounded to 16 bits. What the gradient of
    the logits is rounded to, once, is the dtype of `input`, as the factor of two products that it is.

    The ways to the gradients, the same up to rounding:

        speed   The forward computes the gradients too, chunk by chunk: three matrix products. Between forward and
                backward they wait, as large as input and linear_weight. The backward multiplies them by the upstream
                gradient; where that is 1, as after loss.backward(), nothing is read or written. A second backward over
                the same graph computes them again.
        memory  The same in smaller chunks: on a GPU as fast with few classes, with many up to 1.5 times the time, in
                160 MiB of scratch memory up to 139,264 classes, 24 MiB and 1 KiB a class beyond. Where a chunk has no
                room for 384 rows: recompute.
        recompute  The forward keeps two numbers a row, and the backward computes the logits again: four products. No
                gradient waits between them, and that of linear_weight is rounded for fewer chunks.

    Rows that are ignored, and rows of weight 0, are left out before the first product: on the CPU always, on a GPU with
    `skip_ignored`.

    Source: the chunks, Liger Kernel (P. Hsu et al., arXiv:2410.10989); the logits computed again, Cut Cross-Entropy
    (E. Wijmans et al., arXiv:2411.09009).

    Args:
        input: [..., D], any strides, on the CPU or a CUDA GPU; float16, bfloat16, float32 or float64.
        linear_weight: [V, D], in the dtype of input. Without unit stride along one of its axes it is copied.
        target: of each row a class, int32 or int64: the shape of input without D. Or probabilities: [..., V], in the
            dtype of input or float32; those of 16 bits, and those whose rows do not lie at one distance, are copied.
        linear_bias: [V], in the dtype of input or float32.
        weight: of each class, [V], in the dtype of input or float32. It gets no gradient.
        reduction: "none" (the losses of the rows), "sum" or "mean".
        ignore_index: rows with this target have loss 0 and gradient 0, and count in no mean. May be a class. None, as
            PyTorch 2.13 has it, is -100.
        label_smoothing: e, 0 to 1.
        options: torch.nn.LinearCrossEntropyOptions, or None: taken and not read, because how much is computed at once
            follows from `workspace_bytes`.
        softcap: None, or a positive number that the logits are bounded by.
        scale: None, or a positive number that the logits are multiplied by, before the softcap. For a temperature T,
            which divides after it, pass scale=1/T, and with a softcap of c softcap=c/T.
        z_loss: the weight of lse^2 in the loss; not negative.
        row_weight: r of eaves.cross_entropy, one number for each row: the shape of input without D. A row of weight 0
            (of a bool mask: False) does not count, as one that is ignored. With "sum" and "mean" the gradients stay
            three matrix products. In float16 weights are factors of these products' 16-bit factor: those beyond 1e4
            overflow, smaller ones than 1e-4 lose digits.
        normalizer: with "mean", what the sum is divided by instead of the weights of the rows: a number, or a tensor
            with one element on the device of input, which is not waited for (the tokens of all micro-batches and
            ranks, for instance). It gets no gradient. Not negative; a tensor on a GPU is not checked. With 0 gradients
            are 0.
        return_lse: whether to return lse, [rows...], float32; it is differentiable.
        return_argmax: whether to return the class of each row's largest logit, [rows...], int64.
        return_entropy: whether to return the entropy of each row's softmax in nats, [rows...], float32; it is
            differentiable.
        return_z_loss: whether to return the part z_loss * lse^2 of the loss, in the loss's shape; not differentiable.
        return_sum_sq: whether to return sum_v p_v^2 of each row's softmax, [rows...], float32; not differentiable.
        return_mean_logit: whether to return the mean of each row's z', [rows...], float32; not differentiable. Not with
            probabilities as the target, nor with weight and label_smoothing together.
        algorithm: "speed", "memory", "recompute", or "auto": speed where the workspace has room for it, but for calls
            with return_lse, return_entropy or grad_weight_out, and else recompute. "speed" is speed for those too;
            where lse or entropy turn out to have a gradient, or a second derivative is asked for, the backward computes
            the logits again. Always recompute are calls with reduction "none", but where input alone has a gradient (a
            frozen head: two products instead of three), because what multiplies the rows comes with the backward; with
            float16, whose gradients would underflow before a loss scale multiplies them; and under torch.vmap and
            torch.func. Under torch.compile, "auto" is speed where workspace_bytes is not given.
        workspace_bytes: the most scratch memory that a call should take, in bytes; None: what suits the device. Where
            it is too little for the smallest chunk, the call takes what that needs.
        skip_ignored: on a GPU, whether to leave out rows that are ignored or of weight 0 before anything is multiplied.
            The call then waits once for the device, for their number; a CUDA graph cannot wait, so all are computed
            there.
        grad_weight_dtype: of a product of 16 bits, what the chunks' parts of linear_weight's gradient are added up in:
            float32, rounded once to the dtype of linear_weight at the end, which needs a tensor of its shape in
            float32; or the dtype of the product. None: float32 where linear_weight is float32 (under torch.autocast),
            and the gradient is not rounded at all; else the dtype of linear_weight.
        grad_weight_out: None, or a tensor of linear_weight's shape, in the product's dtype or the loss's, features with
            unit stride, in memory that no other argument has: each backward adds the gradient of linear_weight to it
            (main_grad of Megatron), and linear_weight gets none from this call. Nothing is added where linear_weight
            requires no gradient. With "recompute" the products add to it, else the backward adds what the forward
            computed.
        group: None, or the torch.distributed.ProcessGroup whose ranks have the head in pieces: linear_weight,
            linear_bias, weight and a target of probabilities are this rank's classes, padding among them, and each rank
            calls with the same rows, targets of classes and options. All ranks get the same loss and outputs, bit for
            bit, and the gradient of their own piece. Pieces may have different sizes, none too. Where linear_weight is
            a DTensor with Shard(0) on one axis of its mesh, that axis is the group; input and target may be DTensors on
            that mesh then. A parameter that fully_shard has cut is no such piece: unless rows are cut too
            (sequence_parallel), it is gathered, and its gradient reduced as its module says.
        first_class: the first class of this rank; None: the pieces follow each other in the order of ranks.
        classes: how many classes there are in all. Rows of linear_weight and probabilities beyond are padding, which is
            neither multiplied nor counted, and has gradient 0. None: all are classes. Without a group too.
        sequence_parallel: whether input has this rank's part of the rows, along the first axis, the same number on each
            rank; target and row_weight have all rows. input's gradient is that of this rank's rows.
        reduce_input_grad: whether the gradient of input is summed over the ranks. False: each rank gets its own part of
            the sum.
        reduce_dtype: in which dtype the parts are computed and summed: that of input or of the loss. None: that of
            input, but of float16 float32.

    Returns:
        The loss: float32, or float64 for a float64 input; of shape [], or with reduction="none" of shape [rows...],
        contiguous. With any return_*: CrossEntropyOutput(loss, lse, argmax, entropy, z_loss, sum_sq, mean_logit), None
        for what was not asked for. "rows..." is the shape of input without D. Rows that are ignored or of weight 0 have
        all outputs 0.

        Gradients have the dtypes of their tensors: of input, linear_weight and linear_bias, each computed only where it
        requires one: a frozen head costs no product for its weight, a frozen body none for input.

    Raises:
        ValueError: a shape, dtype, device or number is not as above; input and linear_weight have two dtypes; on the
            CPU a target that is no class and not ignore_index. (On a GPU its loss and gradient are NaN, or with
            EAVES_CHECK_TARGETS=1 in the environment the same error.)
        TypeError: an argument is of the wrong Python type.
        NotImplementedError: a dtype, layout or device that eaves does not have; a DTensor whose classes are not cut
            over one axis of its mesh; a derivative of second order, in forward mode, or of target, weight, row_weight
            or normalizer; grad_weight_out under torch.vmap, torch.func or torch.compile with fullgraph=True (else such
            a call is not compiled); a linear_weight of more than two axes (PyTorch's K-dimensional loss), or that
            DeepSpeed's ZeRO-3 has in pieces; with a group torch.vmap and torch.func.
        RuntimeError: of torch.distributed, where a rank has ended or does not call, after the time-out of the group.
        torch.OutOfMemoryError: torch's allocator has no memory for a result or the workspace.

    With a group, ranks compare their arguments before they exchange anything else: an error of one, or a difference, is
    an error on all. (On a GPU targets that differ make the rows' loss and gradient NaN. Probabilities are not
    compared.) While a CUDA graph is captured they cannot: make the same call once before. "auto" is speed where
    workspace_bytes is not given.

    Under torch.autocast input and linear_weight are cast to its dtype, as those of F.linear are; a float32 linear_bias
    is not. The loss is float32 still, and gradients have the dtypes of the tensors that were passed: that of a float32
    linear_weight is not rounded to 16 bits, unless grad_weight_dtype says so.

    Differences from torch.nn.functional.linear_cross_entropy: the loss of 16-bit tensors is float32; without rows, or
    with all of them ignored, the mean is 0 with gradient 0, not NaN; input may have any number of axes; the classes of
    probabilities are the last axis; no derivative with respect to probabilities.

    Example:
        >>> import torch, eaves
        >>> hidden = torch.tensor([[1.0, 0.0], [0.0, 2.0], [1.0, 1.0]], requires_grad=True)
        >>> head = torch.tensor([[2.0, 0.0], [0.0, 0.5], [-1.0, 0.0]])
        >>> target = torch.tensor([0, 2, -100])
        >>> loss = eaves.linear_cross_entropy(hidden, head, target)
        >>> loss.detach()
        tensor(0.8606)
        >>> loss.backward()
        >>> hidden.grad
        tensor([[-0.1772,  0.0285],
                [ 0.6060,  0.1440],
                [ 0.0000,  0.0000]])
    """
    are_constant = unknown == CONSTANT_OUTPUTS
    shard: Shard | None = None
    if isinstance(group, Shard):
        shard = group
    elif group is not None or is_distributed(linear_weight):
        over_ranks: Tensor | CrossEntropyOutput = _of_shard(
            input, linear_weight, target, linear_bias, group, first_class, classes, sequence_parallel,
            reduce_input_grad, reduce_dtype, weight=weight, reduction=reduction, ignore_index=ignore_index,
            label_smoothing=label_smoothing, options=options, softcap=softcap, scale=scale, z_loss=z_loss,
            row_weight=row_weight, normalizer=normalizer, return_lse=return_lse, return_argmax=return_argmax,
            return_entropy=return_entropy, return_z_loss=return_z_loss, return_sum_sq=return_sum_sq,
            return_mean_logit=return_mean_logit, algorithm=algorithm, workspace_bytes=workspace_bytes,
            skip_ignored=skip_ignored, grad_weight_dtype=grad_weight_dtype, grad_weight_out=grad_weight_out, **unknown,
        )  # fmt: skip
        return over_ranks
    elif (first_class, sequence_parallel, reduce_input_grad, reduce_dtype) != (None, False, True, None):
        refuse_without_group(_OP)
    elif classes is not None:
        refuse_zero3(_OP, linear_weight=linear_weight)
        is_soft = isinstance(target, Tensor) and target.is_floating_point() and target.dim() != 0
        soft = target.movedim(-1, 0) if is_soft else None
        linear_weight, linear_bias, weight, grad_weight_out, soft = without_padding(
            _OP, classes, linear_weight, linear_bias, weight, grad_weight_out, soft
        )
        target = target if soft is None else soft.movedim(0, -1)
    if unknown and not are_constant:
        refuse_unknown(_OP, unknown, linear_cross_entropy)
    is_compiling = torch.compiler.is_compiling()
    if is_compiling and grad_weight_out is not None:
        torch._dynamo.skip_frame(msg=f"{_OP}: grad_weight_out is written in the backward, so {OUTSIDE}")
    result_dtype = check_input(_OP, input, target, "what is multiplied")
    check_tensor(_OP, "linear_weight", linear_weight)
    check_device(_OP, "linear_weight", linear_weight, "input", input)
    if linear_bias is not None:
        check_tensor(_OP, "linear_bias", linear_bias)
        check_device(_OP, "linear_bias", linear_bias, "input", input)
    if grad_weight_out is not None:  # as they were passed: some are converted, and the caller's memory is what counts
        read = {
            "input": input, "linear_weight": linear_weight, "linear_bias": linear_bias, "target": target,
            "weight": weight, "row_weight": row_weight, "normalizer": normalizer,
        }  # fmt: skip
    device = input.device.type
    is_autocast = device in ("cpu", "cuda") and torch.is_autocast_enabled(device)
    if is_autocast:
        input, linear_weight, linear_bias = _autocast(input, linear_weight, linear_bias)
        result_dtype = accumulator_dtype(input.dtype)
    linear_weight = _checked_weight(input, linear_weight, is_autocast, shard is not None)
    columns, rows = linear_weight.shape[0], input.shape[:-1] if shard is None else rows_of(_OP, shard, input)
    if linear_bias is not None:
        linear_bias = _checked_bias(input, linear_bias, columns)
    target = _checked_target(input, target, rows, columns, result_dtype)
    if shard is not None:
        check_reduce_dtype(_OP, shard, input)
    refuse_gradient(_OP, "target", target)
    mode = reduction_of(_OP, reduction)
    ignore_index = -100 if ignore_index is None else index_of(_OP, "ignore_index", ignore_index)
    if weight is not None:
        weight = weight_of(_OP, weight, input, columns, "linear_weight")
    if row_weight is not None:
        row_weight = row_weight_of(_OP, row_weight, input, rows, result_dtype)
    if normalizer is not None:
        normalizer = normalizer_of(_OP, normalizer, mode, result_dtype, input.device)
    _check_options(options)
    check_bool(_OP, "skip_ignored", skip_ignored)
    way = _algorithm_of(algorithm)
    limit = 0 if workspace_bytes is None else limit_of(_OP, workspace_bytes)
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
            has_factors=target.is_floating_point() or (weight is not None and may_smooth),
        )
    wide = wide_weight(input.dtype, linear_weight.dtype, grad_weight_dtype)
    if grad_weight_out is not None:
        wide = check_grad_weight_out(
            grad_weight_out, input.dtype, linear_weight, grad_weight_dtype, result_dtype, is_compiling
        )
        check_overlap(grad_weight_out, read)

    tensors = (input, linear_weight, linear_bias, target, weight, row_weight, normalizer)
    settings = (ignore_index, mode, numbers, skip_ignored)  # those of Options but the limit
    gradients = _wanted_gradients(input, linear_weight, linear_bias)
    # Without gradients torch.func and forward mode may follow the call.
    if not gradients and (is_compiling or not needs_autograd(*_given(input, linear_weight, linear_bias))):
        computed = wanted
        arguments = (*_as_multiplied(tensors), *settings, limit, computed)
        if shard is None:
            outputs = call(_OP, _forward, *arguments, number_tensor=number_tensor)
        else:
            outputs = call(_OP, ranks.forward, *arguments, 0, *shard, number_tensor=number_tensor)
    else:
        # With class weights a block of classes without the target does not know the target's weight.
        computed = kept_for_backward(wanted, mode, target.is_floating_point() or weight is not None)
        followed = wanted & ~(LSE | ENTROPY) if are_constant else wanted  # the others have no gradient
        allowed = limit
        if way == "memory" and limit == 0 and input.is_cuda:  # the same on all ranks, whose shards may differ
            allowed = _small_workspace(columns if shard is None else 0)
        function: type[torch.autograd.Function] = _Recompute
        if gradients and _is_speedy(
            way, input, linear_weight, target, mode, followed, allowed, grad_weight_out, gradients, shard
        ):
            function, limit = _Speed, allowed
        else:
            gradients = 0
        run = apply if grad_weight_out is None else uncompiled(_OP, apply)
        outputs = run(
            _OP, function, *tensors, *settings, limit, grad_weight_out, computed, wanted, followed, gradients | wide,
            number_tensor, shard,
        )  # fmt: skip
    if wanted == 0:
        loss: Tensor = outputs[0]
        return loss
    return output_of(outputs, computed, wanted)


@module_of(
    linear_cross_entropy,
    *("linear_bias", "options", "row_weight", "normalizer", "grad_weight_out"),
    *("group", "first_class", "classes", "sequence_parallel", "reduce_input_grad", "reduce_dtype"),
)
class LinearCrossEntropyLoss(LossModule):
    """eaves.linear_cross_entropy as a module: the options are given once, and `weight`, that of the classes, goes where
    the module goes. The head is given with each call: it is often the embedding's, or another module's.

    (torch.nn.LinearCrossEntropyLoss of PyTorch 2.13 has a head of its own; that is this module and a torch.nn.Linear.)

    Args:
        weight, ignore_index, reduction, label_smoothing, softcap, scale, z_loss, return_lse, return_argmax,
            return_entropy, return_z_loss, return_sum_sq, return_mean_logit, algorithm, workspace_bytes, skip_ignored,
            grad_weight_dtype: as in eaves.linear_cross_entropy. They are checked when the module is called.

    Example:
        >>> import torch, eaves
        >>> criterion = eaves.LinearCrossEntropyLoss(label_smoothing=0.1)
        >>> head = torch.nn.Linear(4, 3)
        >>> loss = criterion(torch.zeros(2, 4), head.weight, torch.tensor([0, 2]), 0 * head.bias)
        >>> loss.detach()
        tensor(1.0986)
    """

    if TYPE_CHECKING:

        def __init__(self, weight: Tensor | None = None, **keywords: Unpack[_AllModuleKeywords]) -> None: ...

    def forward(
        self,
        input: Tensor,
        linear_weight: Tensor,
        target: Tensor,
        linear_bias: Tensor | None = None,
        *,
        row_weight: Tensor | None = None,
        normalizer: Tensor | float | None = None,
        grad_weight_out: Tensor | None = None,
        **of_group: Unpack[HeadGroupKeywords],
    ) -> Any:
        """eaves.linear_cross_entropy(input, linear_weight, target, linear_bias=linear_bias, ...) with the options of
        the module."""
        return linear_cross_entropy(
            input,
            linear_weight,
            target,
            linear_bias=linear_bias,
            weight=self.weight,
            row_weight=row_weight,
            normalizer=normalizer,
            grad_weight_out=grad_weight_out,
            **of_group,
            **self._options(),
        )


# ----------------------------------------------------------------------------------------------------------- arguments


def _of_shard(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    group: ProcessGroup | None,
    *of_shard: Any,
    **options: Any,
) -> Any:
    """The call with tensors of this rank, and a Shard for its group. The ranks of a group learn of each other's errors
    before they wait for each other."""
    function: Any = linear_cross_entropy
    names = ("first_class", "classes", "sequence_parallel", "reduce_input_grad", "reduce_dtype")
    given = dict(zip(names, of_shard, strict=True))
    if needs_whole_head(linear_weight, group, given["sequence_parallel"]):
        options.update(given)
        return with_whole_head(
            _OP,
            lambda input, weight, bias: function(input, weight, target, linear_bias=bias, **options),
            {"input": input},
            {"linear_weight": linear_weight, "linear_bias": linear_bias},
        )
    is_cut = is_distributed(linear_weight)
    head: Local | None = None
    if is_cut and group is None:
        head = told(_OP, linear_weight, lambda: local_shard(_OP, "linear_weight", linear_weight, 0))

    def run(group: ProcessGroup) -> Any:
        if is_cut and head is None:
            raise ValueError(f"{_OP}: linear_weight is a DTensor, which knows its group; leave group out")
        tensors = [input, target, linear_weight, linear_bias, options.pop("weight")]
        if head is not None:
            is_summed = of_shard[3] is False
            agree_on_placements(_OP, group, input=input, target=target)
            rows = local_rows(_OP, "input", input, head, is_summed)
            tensors = [rows, local_target(_OP, target, head, -1)] + [
                local_classes(_OP, name, each)
                for name, each in zip(("linear_weight", "linear_bias", "weight"), tensors[2:])
            ]
        rows, targets, weight, bias, class_weight = tensors
        shard = shard_of(_OP, group, *of_shard)
        return function(rows, weight, targets, linear_bias=bias, weight=class_weight, group=shard, **options)

    group = group if head is None else head.group
    return with_agreement(_OP, group, run)


def _autocast(input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """As torch.autocast casts what F.linear gets: floating-point numbers, but for float64. A head or a bias in float32
    stays as it is: the bias is added in float32, and the head is cast where it is multiplied (`_as_multiplied`), or
    autograd would round its gradient."""
    dtype = torch.get_autocast_dtype(input.device.type)

    def cast(tensor: Tensor, *but_for: torch.dtype) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype not in but_for else tensor

    input = cast(input, torch.float64)
    if input.dtype == torch.float64:  # refused further down, in the dtypes that were passed
        return input, linear_weight, linear_bias
    linear_weight = cast(linear_weight, torch.float64, torch.float32)
    return input, linear_weight, None if linear_bias is None else cast(linear_bias, torch.float64, torch.float32)


def _as_multiplied(tensors: tuple[Any, ...]) -> tuple[Any, ...]:
    """The tensors of a call with the head in the dtype of input."""
    dtype = tensors[0].dtype
    return tensors if tensors[1].dtype == dtype else (tensors[0], tensors[1].to(dtype), *tensors[2:])


def _checked_weight(input: Tensor, linear_weight: Tensor, is_autocast: bool, may_be_empty: bool) -> Tensor:
    """The weight as the core takes it, but for the dtype under torch.autocast."""
    if input.dim() == 0:
        raise ValueError(f"{_OP}: input has no axes, expected at least one, of the features")
    features = input.shape[-1]
    if features == 0:
        raise ValueError(f"{_OP}: input has shape {shape_of(input)}, expected at least one feature")
    check_not_packed(_OP, "linear_weight", linear_weight)
    refuse_zero3(_OP, linear_weight=linear_weight)
    if linear_weight.dim() > 2:
        raise NotImplementedError(
            f"{_OP}: linear_weight has shape {shape_of(linear_weight)}, expected [classes, {features}]; of a loss of "
            "several axes call it once for each head"
        )
    if linear_weight.dim() != 2 or linear_weight.shape[1] != features:
        raise ValueError(
            f"{_OP}: linear_weight has shape {shape_of(linear_weight)}, expected [classes, {features}] (features as "
            f"input {shape_of(input)})"
        )
    if linear_weight.shape[0] == 0 and not may_be_empty:
        raise ValueError(f"{_OP}: linear_weight has shape {shape_of(linear_weight)}, expected at least one class")
    is_cast = is_autocast and linear_weight.dtype == torch.float32 and input.dtype != torch.float64
    if linear_weight.dtype != input.dtype and not is_cast:
        raise ValueError(
            f"{_OP}: linear_weight has dtype {name_of(linear_weight.dtype)}, expected that of input, "
            f"{name_of(input.dtype)}; convert one of them, or call it under torch.autocast, which converts both"
        )
    if linear_weight.layout != torch.strided or linear_weight.is_contiguous() or _is_matrix(linear_weight):
        return linear_weight  # the core refuses other layouts
    return linear_weight.contiguous()


def _is_matrix(weight: Tensor) -> bool:
    """Does it have unit stride along one axis, and no line that lies over the next?"""
    (rows, columns), (row, column) = weight.shape, weight.stride()
    is_row_major = (column == 1 or columns == 1) and (row >= columns or rows == 1)
    return is_row_major or ((row == 1 or rows == 1) and (column >= rows or columns == 1))


def _checked_bias(input: Tensor, linear_bias: Tensor, classes: int) -> Tensor:
    refuse_zero3(_OP, linear_bias=linear_bias)
    check_dtype_of(_OP, "linear_bias", linear_bias, (input.dtype, torch.float32), "that of input, or float32")
    check_shape(_OP, "linear_bias", linear_bias, [classes], "one per class of linear_weight")
    return linear_bias.contiguous()


def _checked_target(
    input: Tensor, target: Tensor, rows: Sequence[int], classes: int, result_dtype: torch.dtype
) -> Tensor:
    """The target as the core takes it."""
    if not target.is_floating_point():
        check_class_dtype(_OP, target, input)
        if target.shape != tuple(rows):
            check_shape(_OP, "target", target, rows, f"one per row of input {shape_of(input)}")
        return target
    check_soft(_OP, target, input, [*rows, classes], "one per class of linear_weight")
    if target.dtype not in (torch.float32, torch.float64):
        target = target.to(result_dtype)
    return target if target.dim() <= 2 and target.stride(-1) == 1 else target.contiguous()


def _check_options(options: object) -> None:
    if options is not None and type(options).__name__ != "LinearCrossEntropyOptions":
        raise TypeError(f"{_OP}: options is {options!r}, expected a torch.nn.LinearCrossEntropyOptions or None")


def check_constant_options(
    linear_weight: Tensor,
    *,
    skip_ignored: object,
    algorithm: object,
    workspace_bytes: object,
    grad_weight_dtype: object,
) -> None:
    """The checks of a call, for options that are given before there is one."""
    check_bool(_OP, "skip_ignored", skip_ignored)
    check_algorithm(algorithm, workspace_bytes)
    multiplied = linear_weight.dtype
    if multiplied == torch.float32 and grad_weight_dtype in (torch.float16, torch.bfloat16):
        multiplied = grad_weight_dtype  # under torch.autocast
    wide_weight(multiplied, linear_weight.dtype, grad_weight_dtype)


def check_algorithm(algorithm: object, workspace_bytes: object) -> None:
    """The checks of a call, of these two."""
    _algorithm_of(algorithm)
    if workspace_bytes is not None:
        limit_of(_OP, workspace_bytes)


def _algorithm_of(algorithm: object) -> str:
    if not isinstance(algorithm, str) or algorithm not in _ALGORITHMS:
        error = ValueError if isinstance(algorithm, str) else TypeError
        raise error(f"{_OP}: algorithm is {algorithm!r}, expected one of {', '.join(_ALGORITHMS)}")
    return algorithm


def wide_weight(multiplied: torch.dtype, passed: torch.dtype, grad_weight_dtype: object) -> int:
    """The bit that says that the gradient of the weight is summed in the dtype of the loss. `multiplied` is the dtype
    of the product's factors, `passed` that of the head."""
    if grad_weight_dtype is None:
        return WIDE_WEIGHT if passed != multiplied else 0
    if not isinstance(grad_weight_dtype, torch.dtype):
        raise TypeError(f"{_OP}: grad_weight_dtype is {grad_weight_dtype!r}, expected a torch.dtype or None")
    wide = accumulator_dtype(multiplied)
    if grad_weight_dtype not in (multiplied, wide):
        raise ValueError(
            f"{_OP}: grad_weight_dtype is {name_of(grad_weight_dtype)}, expected "
            + " or ".join(dict.fromkeys(map(name_of, (multiplied, wide))))
        )
    return WIDE_WEIGHT if grad_weight_dtype != multiplied else 0


def check_grad_weight_out(
    out: Tensor,
    multiplied: torch.dtype,
    linear_weight: Tensor,
    grad_weight_dtype: object,
    wide: torch.dtype,
    is_compiling: bool,
) -> int:
    """May the gradient of the weight be added to it? Returns the bit of its dtype."""
    check_tensor(_OP, "grad_weight_out", out)
    if is_compiling or is_transforming():
        raise NotImplementedError(
            f"{_OP}: grad_weight_out is written in the backward, which torch.compile, torch.vmap and torch.func cannot "
            "follow; leave it out"
        )
    if grad_weight_dtype is not None:
        raise ValueError(f"{_OP}: grad_weight_dtype is given beside grad_weight_out, whose dtype says it; expected one")
    check_dtype_of(_OP, "grad_weight_out", out, (multiplied, wide), "that of linear_weight, or that of the loss")
    if out.is_neg():
        raise ValueError(f"{_OP}: grad_weight_out is negated lazily and cannot be added to; pass one that is not")
    check_shape(_OP, "grad_weight_out", out, linear_weight.shape, "that of linear_weight")
    check_device(_OP, "grad_weight_out", out, "linear_weight", linear_weight)
    (classes, features), (of_class, of_feature) = out.shape, out.stride()
    if (of_feature != 1 and features != 1) or (of_class < features and classes != 1):
        raise ValueError(f"{_OP}: grad_weight_out has strides {list(out.stride())}, expected features with unit stride")
    refuse_gradient(_OP, "grad_weight_out", out)
    return WIDE_WEIGHT if out.dtype != multiplied else 0


def check_overlap(out: Tensor, read: Mapping[str, object]) -> None:
    """What a call reads may not be where its backward adds; the speedy one adds with torch, which does not look."""
    for name, tensor in read.items():
        if isinstance(tensor, Tensor) and _shares_memory(out, tensor):
            raise ValueError(f"{_OP}: grad_weight_out overlaps {name}, expected memory of its own")


def _shares_memory(out: Tensor, other: Tensor) -> bool:
    """Whether a byte of `out`, a matrix with unit stride, is one of `other` too. Columns of one buffer are told apart;
    what else is entangled counts as shared."""
    if other.layout != torch.strided or out.device != other.device or other.numel() == 0:
        return False
    if "meta" in (out.untyped_storage().device.type, other.untyped_storage().device.type):
        return False  # of a fake tensor, which has no bytes
    begin, other_begin = out.data_ptr(), other.data_ptr()
    if begin == 0 or other_begin == 0:
        return False  # of a subclass that keeps its bytes elsewhere
    run, row = out.shape[1] * out.itemsize, out.stride(0) * out.itemsize
    axes = [(size - 1, stride * other.itemsize) for size, stride in zip(other.shape, other.stride())]
    distance = other_begin - begin
    last = distance + sum(steps * stride for steps, stride in axes) + other.itemsize
    if last <= 0 or distance >= (out.shape[0] - 1) * row + run:
        return False
    # From row to row of `out` the same again: where in a row does `other` lie?
    row = max(row, run)
    extent = sum(steps * stride for steps, stride in axes if stride % row) + other.itemsize
    return not (run <= distance % row and distance % row + extent <= row)


def _given(*tensors: Tensor | None) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor is not None]


def _wanted_gradients(input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None) -> int:
    if not torch.is_grad_enabled() or is_exporting():  # see needs_function
        return 0
    bits = OF_INPUT if input.requires_grad else 0
    bits |= OF_WEIGHT if linear_weight.requires_grad else 0
    return bits | (OF_BIAS if linear_bias is not None and linear_bias.requires_grad else 0)


def _small_workspace(classes: int) -> int:
    """linear_cross_entropy_small_workspace() of the header."""
    return max(160 << 20, (24 << 20) + 1024 * classes)


def _is_speedy(
    way: str,
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    mode: int,
    followed: int,
    limit: int,
    grad_weight_out: Tensor | None,
    gradients: int,
    shard: Shard | None,
) -> bool:
    """Are gradients computed in the forward? As the documentation of `algorithm` says."""
    if way == "recompute" or input.dtype == torch.float16:
        return False
    if mode == NONE and (gradients != OF_INPUT or (shard is not None and shard.sequence_parallel)):
        return False
    has_gradients_of_outputs = bool(followed & (LSE | ENTROPY))
    if torch.compiler.is_compiling() or (shard is not None and way == "auto"):
        # Of a shard the core would have to be asked for the largest.
        # A graph is compiled for the outputs that may have a gradient, not for those that have one. And it should not
        # depend on sizes, which the core would have to be asked for.
        is_speed = way != "auto" or (limit == 0 and (shard is None or grad_weight_out is None))
        return is_speed and not has_gradients_of_outputs
    if is_transforming():
        return False
    if way == "speed":
        return True
    if has_gradients_of_outputs or grad_weight_out is not None:
        return False
    if shard is not None:  # "memory": the same on all ranks, whose shards may differ
        return True
    # Head and logits have at most 2^20 elements: the scratch memory of every device has room for them, and to ask would
    # cost a small call 7 us.
    if limit == 0 and 0 < input.numel() * linear_weight.numel() <= 2**20:
        return True
    return bool(call(_OP, _algorithm, input, linear_weight, target, limit) == _SPEED)


# ------------------------------------------------------------------------------------------------------------ autograd

# The arguments of both Functions: the tensors, the options, and behind them grad_weight_out, the outputs that are
# computed, those that the caller gets, those of them that may have a gradient, the gradients that the forward computes,
# the number tensor, and the Shard.
_TENSORS = slice(len(ForwardTensors._fields))
_OPTIONS = slice(_TENSORS.stop, _TENSORS.stop + len(Options._fields))
_REST = slice(_OPTIONS.stop, _OPTIONS.stop + 7)
_REDUCTION = Options._fields.index("reduction")  # a small call has no time to make Options of the arguments
_NO_SECOND = f"{_OP}: there is no second derivative; use torch.nn.functional.linear and cross_entropy for one"
_NOTHING = (None,) * (_REST.stop - len(GRADIENTS))  # behind the gradients of input, linear_weight and linear_bias


def _save(
    ctx: Any, tensors: tuple[Any, ...], options: tuple[Any, ...], rest: tuple[Any, ...], output: Sequence[Tensor]
) -> None:
    """What a backward needs that computes the logits again."""
    ctx.options = options
    ctx.grad_weight_out, computed, _, followed, gradients, number_tensor, ctx.shard = rest
    ctx.wide, ctx.weight_dtype = gradients & WIDE_WEIGHT, tensors[1].dtype
    ctx.is_of_zero3 = not torch.compiler.is_compiling() and hasattr(tensors[1], "ds_id")
    place = None if ctx.shard is None else output[-1]
    ctx.save_for_backward(*tensors, *keep_outputs(ctx, output, computed, followed), number_tensor, place)


def _compute_again(ctx: Any, upstream: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """The gradients from what `_save` kept."""
    *tensors, lse, entropy, target_mass, divisor, number_tensor, place = ctx.saved_tensors
    refuse_zero3(_OP, linear_weight=tensors[1], linear_bias=tensors[2])
    *inputs, _ = _as_multiplied(tuple(tensors))
    input, linear_weight, linear_bias = inputs[:3]
    saved: Sequence[Tensor | None] = (lse, entropy, target_mass, divisor)
    upstream, saved = for_backward(upstream, saved, Options(*ctx.options).reduction)
    bits = sum(bit for bit, needs in zip(GRADIENTS, ctx.needs_input_grad) if needs)
    arguments = (*upstream, *inputs, *saved, *ctx.options)
    if ctx.grad_weight_out is not None and bits & OF_WEIGHT:
        return _accumulate(ctx, arguments, bits & ~OF_WEIGHT, place)
    differentiable = _given(*upstream, input, linear_weight, linear_bias)
    if place is None:
        computed = dispatch(
            _OP, differentiable, _Gradients, _backward, *arguments, bits | ctx.wide, number_tensor=number_tensor
        )
    else:
        arguments = (*arguments, bits | ctx.wide, place, *ctx.shard)
        computed = gradients_of(
            lambda: call(_OP, ranks.backward, *arguments, number_tensor=number_tensor), _NO_SECOND, differentiable
        )
    return _handed_out(ctx, [each if bits & bit else None for each, bit in zip(computed, GRADIENTS)])


def _handed_out(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """Gradients in their places, as autograd wants them."""
    grad_input, grad_weight, grad_bias = grads
    if grad_weight is not None:
        grad_weight = grad_weight.to(ctx.weight_dtype)
    return grad_input, grad_weight, grad_bias, *_NOTHING


def _run_forward(
    tensors: tuple[Any, ...], options: tuple[Any, ...], rest: tuple[Any, ...], gradients: int
) -> list[Tensor]:
    """The loss and its outputs, the gradients that the bits name, and of a shard its Place."""
    _, computed, _, _, _, number_tensor, shard = rest
    arguments = (*_as_multiplied(tensors), *options, computed)
    results: list[Tensor]
    if shard is not None:
        results = call(_OP, ranks.forward, *arguments, gradients, *shard, number_tensor=number_tensor)
    elif gradients:
        results = call(_OP, _forward_backward, *arguments, gradients, number_tensor=number_tensor)
    else:
        results = call(_OP, _forward, *arguments, number_tensor=number_tensor)
    return results


def _split(results: list[Tensor], bits: int, shard: Shard | None) -> tuple[tuple[Tensor, ...], list[Tensor]]:
    """The outputs and the gradients of what _run_forward gave."""
    end = len(results) if shard is None else len(results) - 1
    count = end - bits.bit_count()
    return tuple(results[:count]), results[count:end]


def _accumulate(ctx: Any, arguments: tuple[Any, ...], bits: int, place: Tensor | None) -> tuple[Tensor | None, ...]:
    """The other gradients; that of the weight is added to grad_weight_out."""
    out = ctx.grad_weight_out
    if torch.is_grad_enabled():
        raise NotImplementedError(
            f"{_OP}: with grad_weight_out the gradient has no derivative (create_graph=True); leave it out"
        )
    if place is None:
        grad_input, grad_bias = call(_OP, _backward_accumulate, out, *arguments, bits)
    else:
        grad_input, grad_bias = call(_OP, ranks.backward_accumulate, out, *arguments, bits, place, *ctx.shard)
    torch.autograd.graph.increment_version(out)
    return (grad_input if bits & OF_INPUT else None, None, grad_bias if bits & OF_BIAS else None, *_NOTHING)


@binds_quickly
class _Recompute(torch.autograd.Function):
    """input, linear_weight, linear_bias -> the loss, and the outputs that the bits `computed` name, of which those
    of `followed` may have a gradient. The backward computes the logits again."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        return tuple(_run_forward(arguments[_TENSORS], arguments[_OPTIONS], arguments[_REST], 0))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _save(ctx, inputs[_TENSORS], inputs[_OPTIONS], inputs[_REST], output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        upstream = upstream_of(ctx, grads)
        if not upstream:
            return None, None, None, *_NOTHING
        return _compute_again(ctx, upstream)


@binds_quickly
class _Gradients(torch.autograd.Function):
    """The gradients, which have no derivative themselves."""

    generate_vmap_rule = True

    # One by one, because torch.compile tells by the number of parameters whether the first is ctx.
    @staticmethod
    def forward(
        grad_loss: Tensor,
        grad_lse: Tensor | None,
        grad_entropy: Tensor | None,
        input: Tensor,
        linear_weight: Tensor,
        linear_bias: Tensor | None,
        target: Tensor,
        weight: Tensor | None,
        row_weight: Tensor | None,
        lse: Tensor,
        entropy: Tensor | None,
        target_mass: Tensor | None,
        divisor: Tensor | None,
        ignore_index: int,
        reduction: int,
        numbers: Sequence[float],
        skip_ignored: bool,
        workspace_limit: int,
        gradients: int,
        number_tensor: Tensor | None,
    ) -> tuple[Tensor, ...]:
        return tuple(
            call(
                _OP, _backward, grad_loss, grad_lse, grad_entropy, input, linear_weight, linear_bias, target, weight,
                row_weight, lse, entropy, target_mass, divisor, ignore_index, reduction, numbers, skip_ignored,
                workspace_limit, gradients, number_tensor=number_tensor,
            )
        )  # fmt: skip

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Any) -> NoReturn:
        raise NotImplementedError(_NO_SECOND)


class _Speed(torch.autograd.Function):
    """The same, with the gradients that the bits `gradients` name computed in the forward, for an upstream gradient of
    1. The first backward hands them out; a later one, and one that needs more than a factor, computes again."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        tensors, options, rest = arguments[_TENSORS], arguments[_OPTIONS], arguments[_REST]
        _, _, wanted, _, gradients, _, shard = rest
        results = _run_forward(tensors, options, rest, gradients)
        ctx.bits = gradients & ~WIDE_WEIGHT
        outputs, computed_gradients = _split(results, ctx.bits, shard)
        _save(ctx, tensors, options, rest, results)
        ctx.saves_gradients = torch.compiler.is_compiling()
        if ctx.saves_gradients:
            # Nothing is computed again, and compiled autograd follows saved tensors alone.
            ctx.save_for_backward(*computed_gradients)
        else:
            # Saved tensors are there as long as the graph is, and what is handed out may be written over.
            ctx.gradients = computed_gradients
        # Small calls show what it costs to hand out a tensor that is saved too.
        return outputs if wanted else outputs[:1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        upstream = upstream_of(ctx, grads)
        if not upstream:
            return None, None, None, *_NOTHING
        grad_loss, grad_lse, grad_entropy = upstream
        if torch.compiler.is_compiling():
            if not ctx.saves_gradients:  # compiled autograd of a call that was not compiled
                return _compute_again(ctx, upstream)
            # A graph may run twice, and its saved tensors cannot be written over.
            assert grad_loss is not None
            factor = grad_loss.unsqueeze(-1) if ctx.options[_REDUCTION] == NONE else grad_loss
            # As the operators below do: zeros stay, whatever the factor is.
            scaled = [
                torch.where(each == 0, 0, each.to(factor.dtype) * factor).to(each.dtype) for each in ctx.saved_tensors
            ]
            return _handed_out(ctx, in_places(scaled, ctx.bits))
        is_factor = grad_lse is None and grad_entropy is None and not torch.is_grad_enabled()
        if grad_loss is None or not is_factor or is_batched(grad_loss):
            return _compute_again(ctx, upstream)
        if ctx.is_of_zero3 and (ctx.gradients is None or ctx.bits & OF_WEIGHT):
            refuse_zero3(_OP, linear_weight=ctx.saved_tensors[1])
        computed, ctx.gradients = ctx.gradients, None
        if computed is None:  # a later backward; without the outputs other kernels would run, and last places differ
            rest = (None, ctx.computed, 0, 0, 0, None, ctx.shard)
            results = _run_forward(ctx.saved_tensors[_TENSORS], ctx.options, rest, ctx.bits | ctx.wide)
            _, computed = _split(results, ctx.bits, ctx.shard)
        gradients = in_places(computed, ctx.bits)
        # Neither reads or writes anything if grad_loss is 1.
        if ctx.options[_REDUCTION] == NONE:
            # .data: a selective checkpoint that keeps this tensor raises if its version changes.
            assert gradients[0] is not None
            call(_OP, _rescale_rows, gradients[0].data, grad_loss, -1)
        else:
            call(_OP, _rescale, *gradients, grad_loss)
        if ctx.grad_weight_out is not None and gradients[1] is not None:
            ctx.grad_weight_out.add_(gradients[1])
            gradients[1] = None
        return _handed_out(ctx, gradients)


def _differentiable(*arguments: Any, number_tensor: Tensor | None = None) -> list[Tensor]:
    """linear_cross_entropy_forward by an autograd.Function."""
    tensors, options, (wanted,) = by_name(ForwardTensors, arguments)
    needs_target_mass = tensors.target.is_floating_point() or tensors.weight is not None
    computed = kept_for_backward(wanted, options.reduction, needs_target_mass)
    outputs = apply(_OP, _Recompute, *tensors, *options, None, computed, wanted, wanted, 0, number_tensor, None)
    return in_order(outputs, computed, wanted)


give_derivative(_OP, _forward, _differentiable, "input", "linear_weight", "linear_bias")
refuse_lost_derivatives(_OP, _forward_backward, _backward, _backward_accumulate, _rescale)
