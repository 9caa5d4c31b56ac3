"""linear_cross_entropy and its module for torch tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor

from eaves._arguments import answers_missing
from eaves._calls.linear_cross_entropy import LinearCrossEntropyCall, loss_of_head
from eaves._parallel.dtensor import refuse_unknown
from eaves._torch.outputs import CrossEntropyOutput
from eaves.functional.loss_module import LossModule, module_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from typing_extensions import Unpack

    from eaves._parallel.shard import Shard
    from eaves._torch.options import LossKeywords

    class _ModuleKeywords(LossKeywords, total=False):
        ignore_index: int | None
        scale: Tensor | float | None
        algorithm: str
        workspace_bytes: int | None
        keep_bytes: int | None
        skip_ignored: bool
        grad_weight_dtype: torch.dtype | None

    class _Keywords(_ModuleKeywords, total=False):
        linear_bias: Tensor | None
        weight: Tensor | None
        options: object
        row_weight: Tensor | None
        normalizer: Tensor | float | None
        grad_weight_out: Tensor | None
        group: ProcessGroup | Shard | None
        classes: int | None

    class _AllModuleKeywords(_ModuleKeywords, total=False):
        outputs: str | Sequence[str]


@overload
def linear_cross_entropy(  # type: ignore[overload-overlap]  # () is a sequence of names too
    input: Tensor,
    linear_weight: Tensor | torch.nn.Linear,
    target: Tensor,
    *,
    outputs: tuple[()] = (),
    **keywords: Unpack[_Keywords],
) -> Tensor: ...


@overload
def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor | torch.nn.Linear,
    target: Tensor,
    *,
    outputs: str | Sequence[str],
    **keywords: Unpack[_Keywords],
) -> CrossEntropyOutput: ...


@answers_missing
def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor | torch.nn.Linear,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = -100,
    label_smoothing: float = 0,
    options: object = None,
    softcap: float | None = None,
    scale: Tensor | float | None = None,
    z_loss: float = 0,
    row_weight: Tensor | None = None,
    normalizer: Tensor | float | None = None,
    outputs: str | Sequence[str] = (),
    algorithm: str = "auto",
    workspace_bytes: int | None = None,
    keep_bytes: int | None = None,
    skip_ignored: bool = False,
    grad_weight_dtype: torch.dtype | None = None,
    grad_weight_out: Tensor | None = None,
    group: ProcessGroup | Shard | None = None,
    classes: int | None = None,
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
        linear_weight: [V, D], in the dtype of input, or a torch.nn.Linear, whose bias is linear_bias then. Without unit
            stride along one of its axes it is copied.
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
            which divides after it, pass scale=1/T, and with a softcap of c softcap=c/T. A tensor of one element, on the
            device of input, gets a gradient. If input has 16 bits, the call reads its value, and waits for a GPU; the
            gradient is summed from that of input, which has 16 bits. Else the call multiplies input and linear_bias by
            it, without a check and without waiting. Over ranks it has to be a number.
        z_loss: the weight of lse^2 in the loss; not negative.
        row_weight: r of eaves.cross_entropy, one number for each row: the shape of input without D. A row of weight 0
            (of a bool mask: False) does not count, as one that is ignored. With "sum" and "mean" the gradients stay
            three matrix products. In float16 weights are factors of these products' 16-bit factor: those beyond 1e4
            overflow, smaller ones than 1e-4 lose digits.
        normalizer: with "mean", what the sum is divided by instead of the weights of the rows: a number, or a tensor
            with one element on the device of input, which is not waited for (the tokens of all micro-batches and
            ranks, for instance). It gets no gradient. Not negative; a tensor on a GPU is not checked. With 0 gradients
            are 0.
        outputs: the names of more outputs, one or a sequence of them, as in eaves.cross_entropy.
        algorithm: "speed", "memory", "recompute", or "auto": speed where the workspace has room for it, but for calls
            with the outputs "lse" or "entropy", or with grad_weight_out, and else recompute. "speed" is speed for them
            too; where lse or entropy turn out to have a gradient, or a second derivative is asked for, the backward
            computes the logits again. Always recompute are calls with reduction "none", but where input alone has a
            gradient (a frozen head: two products instead of three), because what multiplies the rows comes with the
            backward; with float16, whose gradients would underflow before a loss scale multiplies them; and under
            torch.vmap and torch.func. Under torch.compile, "auto" is speed where workspace_bytes is not given.
            "keep" is for the calls that "auto" recomputes: the forward keeps a number of each logit, the backward takes
            two products, whatever the loss is. See keep_bytes.
        workspace_bytes: the most scratch memory that a call should take, in bytes; None: what suits the device. Where
            it is too little for the smallest chunk, the call takes what that needs.
        keep_bytes: with "keep", the most that the forward keeps for the backward, in bytes; the logits of other rows
            are computed again. None: what all rows take, 2 bytes for each logit where
            docs/pytorch.md#what-the-forward-keeps says so, else 4. "auto" with keep_bytes is keep where it would be
            recompute. Such calls are not compiled by torch.compile; torch.vmap and torch.func recompute.
        skip_ignored: on a GPU, whether to leave out rows that are ignored or of weight 0 before anything is multiplied,
            and in a backward with reduction "none" rows whose upstream gradients are 0. The call then waits once for
            the device, for their number; a CUDA graph cannot wait, so all are computed there.
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
            bit, and the gradient of their own piece. Pieces may have different sizes, none too. An eaves.Shard says
            more: this rank's first class, whether rows are cut too (sequence parallelism), and how the gradient
            of input is summed. If linear_weight is a DTensor with Shard(0) on one axis of its mesh, that axis is the
            group; input and target may be DTensors on that mesh then. A parameter that fully_shard has cut is no such
            piece: unless rows are cut too, it is gathered, and its gradient reduced as its module says.
        classes: how many classes there are in all. Rows of linear_weight and probabilities beyond are padding, which is
            neither multiplied nor counted, and has gradient 0. None: all are classes. Without a group too.

    Returns:
        The loss: float32, or float64 for a float64 input; of shape [], or with reduction="none" of shape [rows...],
        contiguous. With outputs, a named tuple: the loss, then the outputs in the order of their names, so that
        `loss, lse = linear_cross_entropy(..., outputs="lse")`. "rows..." is the shape of input without D. Rows that are
        ignored or of weight 0 have all outputs 0.

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
    if unknown:
        refuse_unknown("linear_cross_entropy", unknown, linear_cross_entropy, group, linear_weight)
    call = LinearCrossEntropyCall(
        input, linear_weight, target, linear_bias, weight, reduction, ignore_index, label_smoothing, options, softcap,
        scale, z_loss, row_weight, normalizer, outputs, algorithm, workspace_bytes, skip_ignored, grad_weight_dtype,
        grad_weight_out, keep_bytes, group, classes,
    )  # fmt: skip
    return loss_of_head(call)


@module_of(
    linear_cross_entropy, "linear_bias", "options", "row_weight", "normalizer", "grad_weight_out", "group", "classes"
)
class LinearCrossEntropyLoss(LossModule):
    """eaves.linear_cross_entropy as a module: the options are given once, and `weight`, that of the classes, goes where
    the module goes. The head is given with each call: it is often the embedding's, or another module's.

    (torch.nn.LinearCrossEntropyLoss of PyTorch 2.13 has a head of its own; that is this module and a torch.nn.Linear.)

    Args:
        weight, ignore_index, reduction, label_smoothing, softcap, scale, z_loss, outputs, algorithm, workspace_bytes,
            keep_bytes, skip_ignored, grad_weight_dtype: as in eaves.linear_cross_entropy. They are checked when the
            module is called.

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
        linear_weight: Tensor | torch.nn.Linear,
        target: Tensor,
        linear_bias: Tensor | None = None,
        *,
        row_weight: Tensor | None = None,
        normalizer: Tensor | float | None = None,
        grad_weight_out: Tensor | None = None,
        group: ProcessGroup | Shard | None = None,
        classes: int | None = None,
    ) -> Any:
        """eaves.linear_cross_entropy(input, linear_weight, target, linear_bias=linear_bias, ...) with the options of
        the module."""
        return linear_cross_entropy(
            input, linear_weight, target, linear_bias=linear_bias, weight=self.weight, row_weight=row_weight,
            normalizer=normalizer, grad_weight_out=grad_weight_out, group=group, classes=classes, **self._options(),
        )  # fmt: skip
