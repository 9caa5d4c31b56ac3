"""linear_kl_div for torch tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, overload

import torch
from torch import Tensor

from eaves._arguments import answers_missing
from eaves._calls.kl_div_arguments import KlDivCall
from eaves._calls.linear_kl_div import divergence_of
from eaves._parallel.dtensor import refuse_unknown
from eaves._torch.outputs import KlDivOutput

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from typing_extensions import TypedDict, Unpack

    from eaves._parallel.shard import Shard

    class _Keywords(TypedDict, total=False):
        teacher_logits: Tensor | None
        teacher_log_probs: Tensor | None
        teacher_probs: Tensor | None
        teacher_tokens: Tensor | None
        teacher_rest: str
        targets: Tensor | None
        bias: Tensor | None
        teacher_bias: Tensor | None
        scale: float | None
        softcap: float | None
        teacher_scale: float | None
        teacher_softcap: float | None
        temperature: Tensor | float | None
        row_weight: Tensor | None
        skip_ignored: bool
        ignore_index: int
        reduction: str
        normalizer: Tensor | float | None
        divergence: str
        beta: float
        hard_weight: float | None
        group: ProcessGroup | Shard | None
        classes: int | None
        grad_weight_out: Tensor | None
        workspace_bytes: int | None


@overload
def linear_kl_div(  # type: ignore[overload-overlap]  # () is a sequence of names too
    hidden: Tensor,
    head: Tensor | torch.nn.Linear,
    teacher_hidden: Tensor | None = None,
    teacher_head: Tensor | torch.nn.Linear | None = None,
    *,
    outputs: tuple[()] = (),
    **keywords: Unpack[_Keywords],
) -> Tensor: ...


@overload
def linear_kl_div(
    hidden: Tensor,
    head: Tensor | torch.nn.Linear,
    teacher_hidden: Tensor | None = None,
    teacher_head: Tensor | torch.nn.Linear | None = None,
    *,
    outputs: str | Sequence[str],
    **keywords: Unpack[_Keywords],
) -> KlDivOutput: ...


@answers_missing
def linear_kl_div(
    hidden: Tensor,
    head: Tensor | torch.nn.Linear,
    teacher_hidden: Tensor | None = None,
    teacher_head: Tensor | torch.nn.Linear | None = None,
    *,
    teacher_logits: Tensor | None = None,
    teacher_log_probs: Tensor | None = None,
    teacher_probs: Tensor | None = None,
    teacher_tokens: Tensor | None = None,
    teacher_rest: str = "class",
    targets: Tensor | None = None,
    bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    teacher_scale: float | None = None,
    teacher_softcap: float | None = None,
    temperature: Tensor | float | None = None,
    row_weight: Tensor | None = None,
    skip_ignored: bool = False,
    ignore_index: int = -100,
    reduction: str = "mean",
    normalizer: Tensor | float | None = None,
    divergence: str = "forward",
    beta: float = 0.5,
    hard_weight: float | None = None,
    outputs: str | Sequence[str] = (),
    group: ProcessGroup | Shard | None = None,
    classes: int | None = None,
    grad_weight_out: Tensor | None = None,
    workspace_bytes: int | None = None,
    **unknown: object,
) -> Tensor | KlDivOutput:
    """The divergence of a student's head from a teacher, for distillation, and its gradients, without ever holding all
    the logits.

    For a row x of `hidden`, the same row y of `teacher_hidden`, and V classes:

        u = head @ x + bias
        z = softcap * tanh(scale * u / softcap)        (no softcap: scale * u)
        s = softmax(z / temperature)                   the student's probabilities
        t                                              the teacher's, from teacher_head and y in the same way

        "forward"            KL(t || s) = sum_v t_v * (log t_v - log s_v)
        "reverse"            KL(s || t) = sum_v s_v * (log s_v - log t_v)
        "jsd"                beta * KL(t || m) + (1 - beta) * KL(s || m),  m = beta * t + (1 - beta) * s
        "total_variation"    1/2 * sum_v |s_v - t_v|

    with 0 * log 0 = 0. A divergence is never negative (except with "ignore"); two equal distributions have divergence 0
    and gradient 0. G. Hinton et al. (arXiv:1503.02531) multiply the divergence by temperature^2; this function does
    not.

    beta belongs to the teacher, in the weight and in the mixture, as in TRL's GKDTrainer and in Liger. As there, beta 0
    selects "forward" and beta 1 selects "reverse", although "jsd" itself tends to 0 at both ends.

    With `hard_weight` the loss of a row is the divergence + hard_weight * cross entropy of its target. The cross
    entropy has the logits z, without the temperature, from the same products. The mix (1 - a) * cross entropy + a * T^2
    * divergence of Hinton et al. and of DistillKit is a * T^2 times this loss with hard_weight = (1 - a) / (a * T^2).

    All computation is in float32 (float64 for float64 hidden states): logits are float32 sums of the products. The
    gradient of the student's logits is rounded once, to the dtype of `hidden`, because it is a factor of two products.
    The gradient of head is summed in float32 and rounded once.

    With "sum" and "mean" the forward computes the gradients too, and keeps them in float32: four matrix products, three
    with a frozen head, two without gradients. With "none", with a gradient of one of the outputs, and in a second
    backward, the backward computes the logits again: two products more. A teacher without a head saves one product each
    time.

    Source: generalised knowledge distillation, R. Agarwal et al., arXiv:2306.13649, equation 1; the chunks, Liger
    Kernel (P. Hsu et al., arXiv:2410.10989).

    Args:
        hidden: the student's hidden states, [..., D], any strides, on the CPU or a CUDA GPU; float16, bfloat16, float32
            or float64.
        head: the student's head, [V, D], in the dtype of hidden; or a torch.nn.Linear, whose bias the call uses too.
            The call gathers a parameter that fully_shard has cut, and reduces its gradient as its module says; it
            gathers teacher_head too.
        teacher_hidden: the teacher's hidden states, [..., E], any strides; the shape of hidden except for E. Compute it
            under torch.no_grad(): teacher tensors that require a gradient are refused, except teacher_head and
            teacher_bias.
        teacher_head: the teacher's head, [V, E], in the dtype of teacher_hidden, which may differ from the dtype of
            hidden; or a torch.nn.Linear. teacher_head and teacher_bias get no gradient, even if they are parameters
            that require one.
        teacher_logits, teacher_log_probs, teacher_probs: numbers of each class in place of the teacher's head,
            [..., V], in any floating-point dtype: t = softmax(logits / temperature), softmax(log_probs / temperature),
            or softmax(log(probs) / temperature). Rows that do not count may hold any values.
        teacher_tokens: with teacher_log_probs of the same shape, [..., K], the top K tokens of a served teacher, int32
            or int64, each at most once in a row. A place with a token below 0, or with the log-probability -inf, is
            padding; a row of padding has divergence 0.
        teacher_rest: how the mass outside of these K tokens counts.
            "class"        The rest is one class of both student and teacher, so the divergence is over K + 1 classes
                           (TRL with loss_add_tail, DistillKit's symmetric_uniform).
            "renormalize"  Both are divided by their mass in the K; a student's mass elsewhere costs nothing (TRL
                           without loss_add_tail).
            "zero"         The teacher is divided by its mass in the K, and is 0 elsewhere; the student stays whole
                           (DistillKit's zero). Not with "reverse", which would be infinite.
            "ignore"       The sum over the K alone, of undivided probabilities (verl). It may be negative.
            "renormalize" and "zero" are exact at any temperature, which divides the log-probabilities. "class" and
            "ignore" take no temperature other than 1, because the rest at another temperature is unknown. For a
            temperature T pass log-probabilities served at T, scale=1/T and no temperature (with a softcap c also
            softcap=c/T); a hard loss then has the temperature T too. The rest counts as at least the epsilon of the
            dtype of sums, float32 or float64.
        targets: None, or a class for each row, int32 or int64: the shape of hidden without D. Without a hard loss the
            call only compares targets with ignore_index.
        bias, teacher_bias: [V], in the dtype of the hidden states or float32. A class that the teacher masks (-inf)
            leaves "forward" and "jsd" finite. It makes "reverse" infinite, with a gradient of NaN, unless the student
            masks it too. A class that the student alone masks makes "forward" infinite if the teacher has mass there.
        scale, softcap, teacher_scale, teacher_softcap: None, or positive numbers, as in eaves.linear_cross_entropy. The
            teacher's two need teacher_hidden or teacher_logits.
        temperature: None, or a positive number. Or a tensor with one number for each row, in any floating-point dtype:
            the shape of hidden without D, with axes that may be 1 or missing at the end, as in eaves.log_prob. For a
            top K see teacher_rest.
        row_weight: None, or a factor of each row's loss, the shape of hidden without D. A row of weight 0 (of a bool
            mask: False) does not count, as an ignored row. It gets no gradient.
        skip_ignored: on a GPU, whether to leave rows that do not count out of the products. The call then waits once
            for the device, for the number of rows; it leaves none out while a CUDA graph is captured. On the CPU they
            are always left out.
        ignore_index: rows with this target do not count: divergence, outputs and gradient are 0.
        reduction: "none" (the losses of the rows), "sum" or "mean", over the rows that count; with row_weight, divided
            by the sum of the weights.
        normalizer: with "mean", the divisor of the sum instead: a number, or a tensor with one element on the device of
            hidden. The call does not wait for a tensor. It gets no gradient. It must not be negative; a tensor on a GPU
            is not checked.
        divergence: "forward", "reverse", "jsd" or "total_variation".
        beta: between 0 and 1; only "jsd" reads it.
        hard_weight: None, or the weight of the cross entropy of `targets`; not negative.
        outputs: the names of more outputs, one or a sequence of them, each [rows...] in the dtype of the loss, without
            row_weight.
            "divergence": of each row; differentiable.
            "hard_loss": the cross entropy of each row's target; differentiable. It needs targets, and no hard_weight.
            "entropy": of s, in nats; differentiable.
            "lse": log sum exp of the student's z / temperature; differentiable.
            "teacher_lse": the same of the teacher. Not with a top K.
        group: None, or the torch.distributed.ProcessGroup whose ranks share the classes, as in
            eaves.linear_cross_entropy. Each rank passes its classes of head and bias, and the same classes of the
            teacher's head and bias or of the teacher's values. Every rank passes the same hidden states, top-K tokens
            and arguments of the rows. Or an eaves.Shard; with sequence_parallel both hidden states are this rank's
            rows. If head is a DTensor with Shard(0) on one axis of its mesh, that axis is the group; the other tensors
            may then be DTensors on that mesh.
        classes: the number of classes of both. Later rows of either head, and later columns of teacher values, are
            padding: they are neither multiplied nor counted, and have gradient 0. None: all are classes. With a group
            the pieces of both have the same sizes.
        grad_weight_out: None, or a tensor of head's shape; each backward adds the gradient of head to it, as in
            eaves.linear_cross_entropy.
        workspace_bytes: the scratch memory that sets the size of the chunks, in bytes. None: 32 MiB on the CPU; on a
            GPU 512 MiB, or the bytes of a 16-bit head if that is more. A chunk has at least one row of V classes. The
            gradients, in float32, come on top, and up to 26 bytes for each row and token of a top K.

    Returns:
        The loss: float32, or float64 for float64 hidden states; of shape [], or with reduction="none" of shape
        [rows...], contiguous. With outputs, a named tuple: the loss, then the outputs in the order of their names. If
        no row counts, the loss is 0 with gradient 0. The gradients of hidden, head and bias have the dtypes of their
        tensors; each is computed only if its tensor requires one.

    Raises:
        ValueError: a shape, dtype, device or number is not as above; student and teacher differ in the number of
            classes; on the CPU, in a row that counts, a target or a token that is no class, or a token twice. On a GPU
            a row with a wrong target or token is NaN; a token twice in a row is not found, and the result is undefined.
        TypeError: an argument is of the wrong Python type.
        NotImplementedError: a dtype, layout or device that eaves does not have; a DTensor other than the ones above; a
            derivative of second order, in forward mode, or with respect to the teacher, row_weight, temperature or
            normalizer; torch.vmap, torch.func and torch.export.
        torch.OutOfMemoryError: torch's allocator has no memory for a result or the workspace.

    torch.autocast casts hidden, teacher_hidden and both heads to its dtype, as for F.linear; gradients have the dtypes
    of the passed tensors, and the gradient of a float32 head is not rounded to 16 bits. torch.compile leaves the call
    out of the graph (a graph break; with fullgraph=True an error). Products of float32 tensors on a GPU are as exact as
    torch.backends.cuda.matmul allows.

    Example:
        >>> import torch, eaves
        >>> hidden, teacher_hidden = torch.tensor([[1.0, 0.0], [0.0, 2.0]], requires_grad=True), torch.eye(2, 3)
        >>> head, teacher_head = torch.tensor([[2.0, 0.0], [0.0, 0.5], [-1.0, 0.0]]), 2 * torch.eye(3)
        >>> loss = eaves.linear_kl_div(hidden, head, teacher_hidden, teacher_head, temperature=2.0)
        >>> loss.detach()
        tensor(0.0249)
        >>> loss.backward()
        >>> hidden.grad
        tensor([[ 0.0441,  0.0024],
                [ 0.0155, -0.0155]])
        >>> tokens, log_probs = torch.tensor([[0, 1], [1, 2]]), torch.tensor([[0.7, 0.2], [0.6, 0.3]]).log()
        >>> eaves.linear_kl_div(hidden.detach(), head, teacher_tokens=tokens, teacher_log_probs=log_probs)
        tensor(0.0608)
    """
    if unknown:
        refuse_unknown("linear_kl_div", unknown, linear_kl_div, group, head)
    call = KlDivCall(
        hidden, head, teacher_hidden, teacher_head, teacher_logits, teacher_log_probs, teacher_probs, teacher_tokens,
        teacher_rest, targets, bias, teacher_bias, scale, softcap, teacher_scale, teacher_softcap, temperature,
        row_weight, skip_ignored, ignore_index, reduction, normalizer, divergence, beta, hard_weight, outputs, group,
        classes, grad_weight_out, workspace_bytes,
    )  # fmt: skip
    return divergence_of(call)
