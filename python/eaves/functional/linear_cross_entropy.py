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
    without ever holding all the logits. Accepts the calls of torch.nn.functional.linear_cross_entropy (PyTorch 2.13),
    on every version of PyTorch that eaves supports.

    For a row x of `input` and V classes, with the rules of eaves.cross_entropy for the logits z:

        z    = linear_weight @ x + linear_bias          in float32, whatever the dtype of input
        loss = eaves.cross_entropy(z, target)

    Probabilities are computed from the product's float32 sums, not from logits rounded to 16 bits. The gradient of the
    logits is rounded once, to the dtype of `input`, because it is a factor of two products.

    The algorithms for the gradients, equal up to rounding:

        speed      The forward computes the gradients too, chunk by chunk: three matrix products. Until the backward
                   these gradients take as much memory as input and linear_weight. The backward multiplies them by the
                   upstream gradient; if that is 1, as after loss.backward(), the backward reads and writes nothing. A
                   second backward over the same graph computes them again.
        memory     The same in smaller chunks. On a GPU it is as fast for few classes and takes up to 1.5 times the time
                   for many; its scratch memory is 160 MiB up to 139,264 classes, beyond that 24 MiB and 1 KiB a class.
                   If a chunk has no room for 384 rows, it is recompute.
        recompute  The forward keeps two numbers a row, and the backward computes the logits again: four products. No
                   gradient waits between them, and the gradient of linear_weight is rounded for fewer chunks.

    Ignored rows and rows of weight 0 are left out before the first product: on the CPU always, on a GPU with
    `skip_ignored`.

    Sources: Liger Kernel for the chunks (P. Hsu et al., arXiv:2410.10989); Cut Cross-Entropy for the recomputed logits
    (E. Wijmans et al., arXiv:2411.09009).

    Args:
        input: [..., D], any strides, on the CPU or a CUDA GPU; float16, bfloat16, float32 or float64.
        linear_weight: [V, D], in the dtype of input; or a torch.nn.Linear, whose bias is then linear_bias. A tensor
            without unit stride along one of its axes is copied.
        target: a class for each row, int32 or int64: the shape of input without D. Or probabilities: [..., V], in the
            dtype of input or float32. The call copies probabilities of 16 bits, and probabilities whose rows are not
            equally spaced in memory.
        linear_bias: [V], in the dtype of input or float32.
        weight: one number for each class, [V], in the dtype of input or float32. It gets no gradient.
        reduction: "none" (the losses of the rows), "sum" or "mean".
        ignore_index: rows with this target have loss 0 and gradient 0, and count in no mean. May be a class. None,
            which PyTorch 2.13 accepts, means -100.
        label_smoothing: e, 0 to 1.
        options: torch.nn.LinearCrossEntropyOptions, or None. The call accepts and ignores it, because `workspace_bytes`
            sets the size of the chunks.
        softcap: None, or a positive number that bounds the logits.
        scale: None, or a positive number that multiplies the logits before the softcap. A temperature T divides them
            after the softcap: for it pass scale=1/T, and with a softcap of c also softcap=c/T. A tensor of one element,
            on the device of input, gets a gradient. If input has 16 bits, the call reads the tensor's value, waits for
            a GPU to do so, and sums the gradient of scale from the 16-bit gradient of input. Otherwise the call
            multiplies input and linear_bias by the tensor, without a check and without waiting. Over ranks scale has to
            be a number.
        z_loss: the weight of lse^2 in the loss; not negative.
        row_weight: r of eaves.cross_entropy, one number for each row: the shape of input without D. A row of weight 0
            (of a bool mask: False) does not count, as an ignored row. With "sum" and "mean" the gradients still take
            three matrix products. In float16 the weights multiply the 16-bit factor of these products: weights above
            1e4 overflow, weights below 1e-4 lose digits.
        normalizer: with "mean", the divisor of the sum in place of the weights of the rows (the tokens of all
            micro-batches and ranks, for instance): a number, or a tensor with one element on the device of input. The
            call does not wait for a tensor. It gets no gradient. It must not be negative; a tensor on a GPU is not
            checked. A normalizer of 0 makes the gradients 0.
        outputs: the names of more outputs, one or a sequence of them, as in eaves.cross_entropy.
        algorithm: "speed", "memory", "recompute", "keep" or "auto". "auto" is speed if the workspace has room for it,
            and else recompute; it is recompute for calls with the outputs "lse" or "entropy" or with grad_weight_out.
            "memory" falls back to recompute in the same cases. "speed" is speed for these calls too; if lse or entropy
            get a gradient, or a second derivative is wanted, the backward computes the logits again. All three are
            recompute with reduction "none", because the factors of the rows come with the backward, unless input alone
            has a gradient (a frozen head: two products instead of three); with float16, whose gradients would underflow
            before a loss scale multiplies them; and under torch.vmap and torch.func. Under torch.compile, "auto" is
            speed unless workspace_bytes is given. "keep" is for the calls that "auto" recomputes: the forward keeps a
            number of each logit, and the backward takes two products for any loss. See keep_bytes.
        workspace_bytes: the most scratch memory that a call should take, in bytes. None: a default that suits the
            device. If it is too little for the smallest chunk, the call takes the memory of that chunk.
        keep_bytes: with "keep", the most memory that the forward keeps for the backward, in bytes; the backward
            computes the logits of the other rows again. None: enough for all rows, 2 bytes for each logit in the calls
            that docs/algorithms.md#what-the-forward-keeps lists, else 4 (8 for float64). "auto" with keep_bytes is keep
            for the calls that it would recompute. torch.compile leaves such calls out of the graph; under torch.vmap
            and torch.func they recompute. Refused over ranks.
        skip_ignored: on a GPU, whether to leave out ignored rows and rows of weight 0 before the first product, and in
            a backward with reduction "none" also rows with upstream gradients of 0. The call then waits once for the
            device, for the number of rows. A CUDA graph cannot wait, so it computes all rows.
        grad_weight_dtype: for a product of 16 bits, the dtype of the sum over chunks of linear_weight's gradient.
            float32: rounded once to the dtype of linear_weight at the end, with a float32 tensor of its shape. Or the
            dtype of the product. None: float32 if linear_weight is float32 (under torch.autocast), and then the
            gradient is not rounded at all; else the dtype of linear_weight.
        grad_weight_out: None, or a tensor of linear_weight's shape, in the product's dtype or the loss's, with unit
            stride along the features, in memory that no other argument shares. Each backward adds the gradient of
            linear_weight to it (main_grad of Megatron), and linear_weight gets no gradient from this call. If
            linear_weight requires no gradient, nothing is added. With "recompute" the products add to it; otherwise the
            backward adds the gradient that the forward computed.
        group: None, or the torch.distributed.ProcessGroup whose ranks share the head: each rank passes its classes of
            linear_weight, linear_bias, weight and a target of probabilities, padding among them, and every rank passes
            the same rows, class targets and options. All ranks get the same loss and outputs, bit for bit, and the
            gradient of their own piece. The sizes of the pieces may differ, and a piece may be empty. An eaves.Shard
            says more: this rank's first class, whether rows are cut too (sequence parallelism), and how the gradient of
            input is summed. If linear_weight is a DTensor with Shard(0) on one axis of its mesh, that axis is the
            group; input and target may then be DTensors on that mesh. A parameter that fully_shard has cut is not such
            a piece: unless rows are cut too, the call gathers it and reduces its gradient as its module says.
        classes: the number of classes in all, with or without a group. Later rows of linear_weight and later
            probabilities are padding: they are neither multiplied nor counted, and have gradient 0. None: all are
            classes.

    Returns:
        The loss: float32, or float64 for a float64 input; of shape [], or with reduction="none" of shape [rows...],
        contiguous. With outputs, a named tuple: the loss, then the outputs in the order of their names, so that
        `loss, lse = linear_cross_entropy(..., outputs="lse")`. "rows..." is the shape of input without D. All outputs
        of ignored rows and of rows of weight 0 are 0.

        The gradients of input, linear_weight and linear_bias have the dtypes of their tensors. Each is computed only if
        its tensor requires one: a frozen head costs no product for its weight, a frozen body none for input.

    Raises:
        ValueError: a shape, dtype, device or number is not as above; input and linear_weight differ in dtype; on the
            CPU a target that is no class and not ignore_index. (On a GPU the loss and gradient of that row are NaN;
            with EAVES_CHECK_TARGETS=1 in the environment it is the same error.)
        TypeError: an argument is of the wrong Python type.
        NotImplementedError: a dtype, layout or device that eaves does not have; a DTensor whose classes are not cut
            over one axis of its mesh; a derivative of second order, in forward mode, or of target, weight, row_weight
            or normalizer; grad_weight_out under torch.vmap, torch.func or torch.compile with fullgraph=True (else
            torch.compile leaves such a call out of the graph); a linear_weight of more than two axes (PyTorch's
            K-dimensional loss), or one that DeepSpeed's ZeRO-3 has cut; with a group torch.vmap and torch.func.
        RuntimeError: from torch.distributed, after the time-out of the group: a rank has ended or does not call.
        torch.OutOfMemoryError: torch's allocator has no memory for a result or the workspace.

    With a group, ranks compare their arguments before they exchange anything else: an error of one rank, or a
    difference, is an error on all ranks. (On a GPU, targets that differ make the rows' loss and gradient NaN.
    Probabilities are not compared.) Ranks cannot compare while a CUDA graph is captured: make the same call once
    before. With a group "auto" is speed unless workspace_bytes is given.

    torch.autocast casts input and linear_weight to its dtype, as for F.linear; it leaves a float32 linear_bias as it
    is. The loss is still float32, and gradients have the dtypes of the passed tensors: the gradient of a float32
    linear_weight is not rounded to 16 bits, unless grad_weight_dtype says so.

    Differences from torch.nn.functional.linear_cross_entropy: the loss of 16-bit tensors is float32; without rows, or
    if all of them are ignored, the mean is 0 with gradient 0, not NaN; input may have any number of axes; the classes
    of probabilities are the last axis; probabilities have no derivative.

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
        input, linear_weight, target, linear_bias, reduction, ignore_index, label_smoothing, scale, softcap, z_loss,
        weight, options, row_weight, normalizer, outputs, algorithm, workspace_bytes, skip_ignored, grad_weight_dtype,
        grad_weight_out, keep_bytes, group, classes,
    )  # fmt: skip
    return loss_of_head(call)


@module_of(
    linear_cross_entropy, "linear_bias", "options", "row_weight", "normalizer", "grad_weight_out", "group", "classes"
)
class LinearCrossEntropyLoss(LossModule):
    """eaves.linear_cross_entropy as a module: it takes the options once, and the class weights `weight` are a buffer
    that moves with the module. Pass the head with each call, because it often belongs to another module, such as the
    embedding.

    (torch.nn.LinearCrossEntropyLoss of PyTorch 2.13 has a head of its own; use torch.nn.Linear and this module for it.)

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
