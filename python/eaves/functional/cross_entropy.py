"""cross_entropy and its module for torch tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, overload

from torch import Tensor

from eaves._arguments import answers_missing
from eaves._calls.cross_entropy import CrossEntropyCall, loss_of_logits
from eaves._parallel.dtensor import refuse_unknown
from eaves._torch.outputs import CrossEntropyOutput
from eaves.functional.loss_module import LossModule, module_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from typing_extensions import Unpack

    from eaves._parallel.shard import Shard
    from eaves._torch.options import LossKeywords

    class _ModuleKeywords(LossKeywords, total=False):
        ignore_index: int
        scale: float | None
        inplace_backward: bool
        class_dim: int | None

    class _Keywords(_ModuleKeywords, total=False):
        row_weight: Tensor | None
        normalizer: Tensor | float | None
        group: ProcessGroup | Shard | None
        classes: int | None

    class _AllModuleKeywords(_ModuleKeywords, total=False):
        outputs: str | Sequence[str]


@overload
def cross_entropy(  # type: ignore[overload-overlap]  # () is a sequence of names too
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    outputs: tuple[()] = (),
    **keywords: Unpack[_Keywords],
) -> Tensor: ...


@overload
def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    outputs: str | Sequence[str],
    **keywords: Unpack[_Keywords],
) -> CrossEntropyOutput: ...


@answers_missing
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
    outputs: str | Sequence[str] = (),
    class_dim: int | None = None,
    group: ProcessGroup | Shard | None = None,
    classes: int | None = None,
    **unknown: object,
) -> Tensor | CrossEntropyOutput:
    """The loss of classifying each row of `input`, as torch.nn.functional.cross_entropy, with its gradient.

    For a row of logits z over V classes with target t, smoothing e and class weights w (1 if absent):

        z'   = softcap * tanh(scale * z / softcap)                    (no softcap: scale * z)
        lse  = log sum_v exp(z'_v)
        loss = (1 - e) * w_t * (lse - z'_t) + e / V * sum_v w_v * (lse - z'_v) + z_loss * lse^2
        mean = sum(r * loss) / sum(r * w_t over the rows that are not ignored)

    r is the weight of the row (1 if absent). The other reductions multiply each loss by r too. With probabilities q as
    the target, loss = sum_v w_v * q'_v * (lse - z'_v) + z_loss * lse^2 with q' = (1 - e) * q + e / V, and the mean
    divides by sum(r).

    Forward and backward each read the logits once (M. Milakov, N. Gimelshein, "Online normalizer calculation for
    softmax", arXiv:1805.02867) and compute in float32 whatever the dtype of `input`. The forward keeps for the
    backward: input, target, and two numbers for each row, lse and the remainder of its rounding. Label smoothing: C.
    Szegedy et al., arXiv:1512.00567; z-loss: A. Chowdhery et al., arXiv:2204.02311; soft capping: Gemma 2,
    arXiv:2408.00118.

    Args:
        input: the logits: [..., V], or as in torch [N, V, d1, ...]; any strides, on the CPU or a CUDA GPU; float16,
            bfloat16, float32 or float64.
        target: a class for each row, int32 or int64: the shape of input without the class axis. Or probabilities: the
            shape of input, in its dtype or float32.
        weight: w, one number for each class, [V], in the dtype of input or float32. It gets no gradient.
        ignore_index: rows with this target have loss 0 and gradient 0, and count in no mean. May be a class.
        reduction: "none" (the losses of the rows), "sum" or "mean".
        label_smoothing: e, 0 to 1.
        softcap: None, or a positive number that bounds the logits.
        scale: None, or a positive number that multiplies the logits before the softcap. A temperature T divides them
            after the softcap: for it pass scale=1/T, and with a softcap of c also softcap=c/T.
        z_loss: the weight of lse^2 in the loss; not negative.
        row_weight: r, one number for each row (a mask of tokens, advantages): the shape of input without the class
            axis; any real dtype or bool, converted to the dtype of the loss. A row of weight 0 has loss 0 and gradient
            0 for any logits, and keeps its other outputs. Its target still has to be a class or ignore_index. Weights
            of both signs need "sum" or a normalizer, because the mean's own divisor may be close to 0. It gets no
            gradient.
        normalizer: with "mean", the divisor of the sum in place of the weights of the rows (the tokens of all
            micro-batches and ranks, for instance): a number, or a tensor with one element on the device of input. The
            call does not wait for a tensor. It gets no gradient. It must not be negative; a tensor on a GPU is not
            checked. A normalizer of 0 makes the gradients 0.
        inplace_backward: whether the forward may write the gradient of input over input: half of the memory, and on a
            GPU less time. For float16 the backward writes it, in the time of a call without this option, because a
            gradient that is rounded before a loss scale multiplies it would be 0. Afterwards input (not a leaf) holds
            its gradient in place of the logits. Autograd notices an earlier use that saved the logits, and raises a
            RuntimeError in the backward of a later use, except for a slice or a transposed view. A later use without a
            gradient reads the stored gradient. There is one backward, and lse and entropy have no gradient: a loss term
            built on them has no effect. If input needs no gradient, nothing is written. torch.compile, which plans
            memory itself, ignores the option.
        outputs: the names of more outputs, one or a sequence of them. Each output but "z_loss" is [rows...]; float32,
            or float64 for a float64 input. Ignored rows and rows of weight 0 have them too.
            "lse": differentiable.
            "argmax": the class of the largest logit, int64.
            "entropy": the entropy of the row's softmax, in nats; differentiable.
            "z_loss": the part z_loss * lse^2 of the loss, in the loss's shape.
            "sum_sq": sum_v p_v^2 of the row's softmax.
            "mean_logit": the mean of the row's z'. Not with probabilities as the target, nor with weight and
            label_smoothing together.
        class_dim: the axis of the classes. None: the axis that the shape of target implies. If both axes fit (a target
            of [N, d] for an input of [N, d, d]; probabilities with more than two axes), the call is refused.
        group: None, or the torch.distributed.ProcessGroup whose ranks share the classes: each rank passes its piece of
            input, weight and a target of probabilities, and every rank passes the same class targets and options. All
            ranks get the same loss and outputs, bit for bit, and the gradient of their own logits. Pieces follow each
            other in the order of ranks; their sizes may differ, and a piece may be empty. eaves.Shard(group,
            first_class) gives this rank's first class. If input is a DTensor whose classes are cut over one axis of its
            mesh, that axis is the group. With inplace_backward the backward writes the gradient.
        classes: the number of classes in all, with or without a group. Later logits and probabilities are padding: they
            are not read, and have gradient 0. None: all are classes.

    Returns:
        The loss: float32, or float64 for a float64 input; of shape [], or with reduction="none" of shape [rows...],
        contiguous. With outputs, a named tuple: the loss, then the outputs in the order of their names, so that
        `loss, lse = cross_entropy(..., outputs="lse")`. "rows..." is the shape of input without the class axis. Ignored
        rows have computed outputs like any other row, but with inplace_backward these outputs are 0.

    Raises:
        ValueError: a shape, dtype, device or number is not as above; on the CPU a target that is no class and not
            ignore_index. (On a GPU the loss and gradient of that row are NaN; with EAVES_CHECK_TARGETS=1 in the
            environment it is the same error.)
        TypeError: an argument is of the wrong Python type.
        NotImplementedError: a dtype, layout or device that eaves does not have; a DTensor whose classes are not cut
            over one axis of its mesh; a derivative of second order, in forward mode, or of target, weight, row_weight
            or normalizer; inplace_backward under torch.func; with a group torch.vmap and torch.func.
        RuntimeError: with inplace_backward: input is a leaf that requires a gradient, a second backward, or the
            backward of a later use of input (for float16 and with a group, of a use after the backward). From
            torch.distributed, after the time-out of the group: a rank has ended or does not call.
        torch.OutOfMemoryError: torch's allocator has no memory for a result.

    With a group, ranks compare their arguments before they exchange statistics: an error of one rank, or a difference,
    is an error on all ranks. (On a GPU, targets that differ make the rows' loss and gradient NaN. Probabilities are not
    compared.) Ranks cannot compare while a CUDA graph is captured: make the same call once before.

    Differences from torch.nn.functional.cross_entropy: the loss of 16-bit logits is float32; without rows, or if all of
    them are ignored, the mean is 0 with gradient 0, not NaN; the classes may also be the last axis; targets of uint8
    are refused; probabilities have no derivative; autocast does not change the dtype of input.

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
        >>> eaves.cross_entropy(logits.detach(), target, reduction="none", outputs="argmax").argmax
        tensor([0, 1, 0])
    """
    if unknown:
        refuse_unknown("cross_entropy", unknown, cross_entropy, group, input)
    call = CrossEntropyCall(
        input, target, weight, ignore_index, reduction, label_smoothing, softcap, scale, z_loss, row_weight, normalizer,
        inplace_backward, outputs, class_dim, group, classes,
    )  # fmt: skip
    return loss_of_logits(call)


@module_of(cross_entropy, "row_weight", "normalizer", "group", "classes")
class CrossEntropyLoss(LossModule):
    """eaves.cross_entropy as a module, as torch.nn.CrossEntropyLoss: it takes the options once, and `weight` is a
    buffer that moves with the module.

    Args:
        weight, ignore_index, reduction, label_smoothing, softcap, scale, z_loss, inplace_backward, outputs, class_dim:
            as in eaves.cross_entropy. They are checked when the module is called.

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
        group: ProcessGroup | Shard | None = None,
        classes: int | None = None,
    ) -> Any:
        """eaves.cross_entropy(input, target, ...) with the options of the module."""
        return cross_entropy(
            input, target, self.weight, row_weight=row_weight, normalizer=normalizer, group=group, classes=classes,
            **self._options(),
        )  # fmt: skip
