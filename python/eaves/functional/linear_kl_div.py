"""linear_kl_div for torch tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from eaves._arguments import answers_missing, refuse_unknown
from eaves._calls.linear_kl_div import KlDivCall, divergence_of


@answers_missing
def linear_kl_div(
    hidden: Tensor,
    head: Tensor | torch.nn.Linear,
    teacher_hidden: Tensor,
    teacher_head: Tensor | torch.nn.Linear,
    *,
    targets: Tensor | None = None,
    bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    divergence: str = "forward",
    beta: float = 0.5,
    temperature: float | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    normalizer: Tensor | float | None = None,
    workspace_bytes: int | None = None,
    **unknown: object,
) -> Tensor:
    """The divergence of a student's head from a teacher's, for distillation, and its gradients, without ever holding
    all the logits of either.

    For a row x of `hidden`, the row y of `teacher_hidden` beside it, and V classes:

        s = softmax((head @ x + bias) / temperature)          the student's probabilities
        t = softmax((teacher_head @ y + teacher_bias) / temperature)        the teacher's

        "forward"    KL(t || s) = sum_v t_v * (log t_v - log s_v)
        "reverse"    KL(s || t) = sum_v s_v * (log s_v - log t_v)
        "jsd"        beta * KL(t || m) + (1 - beta) * KL(s || m),  m = beta * t + (1 - beta) * s

    and 0 * log 0 is 0. No divergence is below 0. It is not multiplied by temperature^2, as G. Hinton et al.
    (arXiv:1503.02531) do where a loss of the classes stands beside it.

    beta belongs to the teacher, in the weight and in the mixture, as in TRL's GKDTrainer and in Liger. At 0 and 1 this
    "jsd" is 0; those two give KL(t || s) for 0 and KL(s || t) for 1, which are "forward" and "reverse" here, and so 0
    and 1 are refused.

    Everything is computed in float32 (float64 where hidden is float64): logits are float32 sums of the products. What
    the gradient of the student's logits is rounded to, once, is the dtype of `hidden`, as the factor of two products
    that it is. The gradient of head is added up in float32 and rounded once.

    With "sum" and "mean" the forward computes the gradients too, and keeps them in float32: four matrix products, three
    with a frozen head, two where no gradient is wanted. A second backward over the same graph computes them again, and
    with "none" the first does too: six products.

    Source: generalised knowledge distillation, R. Agarwal et al., arXiv:2306.13649, equation 1; the chunks, Liger
    Kernel (P. Hsu et al., arXiv:2410.10989).

    Args:
        hidden: the student's hidden states, [..., D], any strides, on the CPU or a CUDA GPU; float16, bfloat16, float32
            or float64.
        head: the student's head, [V, D], in the dtype of hidden; or a torch.nn.Linear, whose bias is taken too.
            A parameter that fully_shard has cut is gathered, and its gradient reduced as its module says;
            teacher_head is gathered too.
        teacher_hidden: the teacher's hidden states, [..., E], any strides; the shape of hidden but for E. One that
            requires a gradient is refused: compute it under torch.no_grad().
        teacher_head: the teacher's head, [V, E], in the dtype of teacher_hidden, which need not be that of hidden; or a
            torch.nn.Linear. It gets no gradient, nor does teacher_bias; either may be a parameter that requires one.
        targets: None, or of each row a class, int32 or int64: the shape of hidden without D. It is only compared with
            ignore_index. (Rows that do not count are multiplied all the same; to spare that, index the rows first.)
        bias, teacher_bias: [V], in the dtype of the hidden states or float32. With a teacher_bias of -inf (a
            class that the teacher masks) "forward" and "jsd" are finite. "reverse" is infinite then, and its gradient
            NaN, unless the student masks the class too.
        divergence: "forward", "reverse" or "jsd".
        beta: between 0 and 1, read by "jsd" alone.
        temperature: None, or a positive number that both heads' logits are divided by.
        ignore_index: rows with this class have divergence 0 and gradient 0, and count in no mean.
        reduction: "none" (the divergences of the rows), "sum" or "mean", over the rows that count.
        normalizer: with "mean", what the sum is divided by instead of the number of rows that count: a number, or a
            tensor with one element on the device of hidden, which is not waited for. It gets no gradient. Not negative;
            a tensor on a GPU is not checked.
        workspace_bytes: how much scratch memory the chunks are cut for, in bytes; None: 512 MiB on a GPU, 32 MiB on the
            CPU. The least is one row of V classes. The gradients, in float32, come on top.

    Returns:
        The divergence: float32, or float64 for float64 hidden states; of shape [], or with reduction="none" of shape
        [rows...], contiguous. Without rows that count it is 0, with gradient 0. Gradients have the dtypes of their
        tensors: of hidden, head and bias, each computed only where it requires one.

    Raises:
        ValueError: a shape, dtype, device or number is not as above; the two heads have different numbers of classes.
        TypeError: an argument is of the wrong Python type.
        NotImplementedError: a dtype, layout or device that eaves does not have, another DTensor; a derivative of second
            order, in forward mode, or of teacher_hidden or normalizer; torch.vmap, torch.func and torch.export.
        torch.OutOfMemoryError: torch's allocator has no memory for a result or the workspace.

    Under torch.autocast hidden, teacher_hidden and both heads are cast to its dtype, as those of F.linear are;
    gradients have the dtypes of the tensors that were passed, and that of a float32 head is not rounded to 16 bits.
    torch.compile leaves the call as it is (a graph break; with fullgraph=True an error). Products of float32 tensors on
    a GPU are as exact as torch.backends.cuda.matmul allows.

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
    """
    if unknown:
        refuse_unknown("linear_kl_div", unknown, linear_kl_div)
    call = KlDivCall(
        hidden, head, bias, teacher_hidden, teacher_head, teacher_bias, targets, divergence, beta,
        temperature, ignore_index, reduction, normalizer, workspace_bytes,
    )  # fmt: skip
    return divergence_of(call)
