"""linear_kl_div: the KL divergence of two heads, a student's and a teacher's, in chunks of rows (_head_chunks.py).

Gradients are computed in the forward, for an upstream gradient of 1, added up in float32 over the chunks, and rounded
once, in the backward, when the upstream gradient has multiplied them. Where each row has its own upstream gradient, and
in a second backward, the backward computes each chunk again.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eaves._fully_shard import is_fully_sharded, with_whole_head
from eaves._head_chunks import (
    Head,
    add_gradients,
    checked_head,
    cut,
    gradients_of,
    logits_of,
    of_rows,
    refuse_zero3,
    workspace_of,
)
from eaves._loss import (
    CLASS_DTYPES,
    MEAN,
    NONE,
    RANGES,
    normalizer_of,
    reduction_of,
    refuse_unknown,
    shape_of,
)
from eaves._operator import (
    accumulator_dtype,
    apply,
    call,
    check_device,
    check_dtype_of,
    check_shape,
    check_tensor,
    explain,
    index_of,
    is_exporting,
    is_transforming,
    needs_autograd,
    number_of,
    refuse_gradient,
    uncompiled,
    value_for_message,
)

_rescale = torch.ops.eaves.cross_entropy_rescale.default

_OP = "linear_kl_div"
_STUDENT, _TEACHER = (
    ("input", "linear_weight", "linear_bias"),
    ("teacher_input", "teacher_weight", "teacher_bias"),
)

_NO_SECOND_DERIVATIVE = f"{_OP}: there is no second derivative; use torch.nn.functional.linear and kl_div for one"


def linear_kl_div(
    input: Tensor,
    linear_weight: Tensor,
    teacher_input: Tensor,
    teacher_weight: Tensor,
    *,
    target: Tensor | None = None,
    linear_bias: Tensor | None = None,
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

    For a row x of `input`, the row y of `teacher_input` beside it, and V classes:

        s = softmax((linear_weight @ x + linear_bias) / temperature)          the student's probabilities
        t = softmax((teacher_weight @ y + teacher_bias) / temperature)        the teacher's

        "forward"    KL(t || s) = sum_v t_v * (log t_v - log s_v)
        "reverse"    KL(s || t) = sum_v s_v * (log s_v - log t_v)
        "jsd"        beta * KL(t || m) + (1 - beta) * KL(s || m),  m = beta * t + (1 - beta) * s

    and 0 * log 0 is 0. No divergence is below 0. It is not multiplied by temperature^2, as G. Hinton et al.
    (arXiv:1503.02531) do where a loss of the classes stands beside it.

    beta belongs to the teacher, in the weight and in the mixture, as in TRL's GKDTrainer and in Liger. At 0 and 1 this
    "jsd" is 0; those two give KL(t || s) for 0 and KL(s || t) for 1, which are "forward" and "reverse" here, and so 0
    and 1 are refused.

    Everything is computed in float32 (float64 where input is float64): logits are float32 sums of the products. What
    the gradient of the student's logits is rounded to, once, is the dtype of `input`, as the factor of two products
    that it is. The gradient of linear_weight is added up in float32 and rounded once.

    With "sum" and "mean" the forward computes the gradients too, and keeps them in float32: four matrix products, three
    with a frozen head, two where no gradient is wanted. A second backward over the same graph computes them again, and
    with "none" the first does too: six products.

    Source: generalised knowledge distillation, R. Agarwal et al., arXiv:2306.13649, equation 1; the chunks, Liger
    Kernel (P. Hsu et al., arXiv:2410.10989).

    Args:
        input: the student's hidden states, [..., D], any strides, on the CPU or a CUDA GPU; float16, bfloat16, float32
            or float64.
        linear_weight: the student's head, [V, D], in the dtype of input. A parameter that fully_shard has cut is
            gathered, and its gradient reduced as its module says; teacher_weight is gathered too.
        teacher_input: the teacher's hidden states, [..., E], any strides; the shape of input but for E. One that
            requires a gradient is refused: compute it under torch.no_grad().
        teacher_weight: the teacher's head, [V, E], in the dtype of teacher_input, which need not be that of input. It
            gets no gradient, nor does teacher_bias; either may be a parameter that requires one.
        target: None, or of each row a class, int32 or int64: the shape of input without D. It is only compared with
            ignore_index. (Rows that do not count are multiplied all the same; to spare that, index the rows first.)
        linear_bias, teacher_bias: [V], in the dtype of the head or float32. With a teacher_bias of -inf (a class that
            the teacher masks) "forward" and "jsd" are finite. "reverse" is infinite then, and its gradient NaN, unless
            the student masks the class too.
        divergence: "forward", "reverse" or "jsd".
        beta: between 0 and 1, read by "jsd" alone.
        temperature: None, or a positive number that both heads' logits are divided by.
        ignore_index: rows with this target have divergence 0 and gradient 0, and count in no mean.
        reduction: "none" (the divergences of the rows), "sum" or "mean", over the rows that count.
        normalizer: with "mean", what the sum is divided by instead of the number of rows that count: a number, or a
            tensor with one element on the device of input, which is not waited for. It gets no gradient. Not negative;
            a tensor on a GPU is not checked.
        workspace_bytes: how much scratch memory the chunks are cut for, in bytes; None: 512 MiB on a GPU, 32 MiB on the
            CPU. The least is one row of V classes. The gradients, in float32, come on top.

    Returns:
        The divergence: float32, or float64 for a float64 input; of shape [], or with reduction="none" of shape
        [rows...], contiguous. Without rows that count it is 0, with gradient 0. Gradients have the dtypes of their
        tensors: of input, linear_weight and linear_bias, each computed only where it requires one.

    Raises:
        ValueError: a shape, dtype, device or number is not as above; the two heads have different numbers of classes.
        TypeError: an argument is of the wrong Python type.
        NotImplementedError: a dtype, layout or device that eaves does not have, another DTensor; a derivative of second
            order, in forward mode, or of teacher_input or normalizer; torch.vmap, torch.func and torch.export.
        torch.OutOfMemoryError: torch's allocator has no memory for a result or the workspace.

    Under torch.autocast input, teacher_input and both heads are cast to its dtype, as those of F.linear are; gradients
    have the dtypes of the tensors that were passed, and that of a float32 linear_weight is not rounded to 16 bits.
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
        refuse_unknown(_OP, unknown, linear_kl_div)
    if is_fully_sharded(linear_weight) or is_fully_sharded(teacher_weight):
        return _with_whole_heads(
            (input, linear_weight, linear_bias), (teacher_input, teacher_weight, teacher_bias), target=target,
            divergence=divergence, beta=beta, temperature=temperature, ignore_index=ignore_index, reduction=reduction,
            normalizer=normalizer, workspace_bytes=workspace_bytes,
        )  # fmt: skip
    if is_exporting() or is_transforming():
        raise NotImplementedError(f"{_OP}: it does not work inside of torch.export, torch.vmap and torch.func")
    student = checked_head(_OP, _STUDENT, input, linear_weight, linear_bias, "input", input)
    teacher = checked_head(_OP, _TEACHER, teacher_input, teacher_weight, teacher_bias, "input", input)
    rows, classes = input.shape[:-1], linear_weight.shape[0]
    check_shape(
        _OP, "teacher_input", teacher_input, [*rows, teacher_input.shape[-1]], f"rows as input {shape_of(input)}"
    )
    if teacher_weight.shape[0] != classes:
        raise ValueError(
            f"{_OP}: teacher_weight has shape {shape_of(teacher_weight)}, expected [{classes}, "
            f"{teacher_input.shape[-1]}] (classes as linear_weight {shape_of(linear_weight)}); where one vocabulary is "
            "the other and padding, cut the larger head and its bias"
        )
    refuse_gradient(_OP, "teacher_input", teacher_input)
    counts = None if target is None else _counts(target, input, index_of(_OP, "ignore_index", ignore_index))
    dtype = accumulator_dtype(student.input.dtype)
    mode = reduction_of(_OP, reduction)
    if normalizer is not None:
        normalizer = normalizer_of(_OP, normalizer, mode, dtype, input.device)
        # As the core's, which this loss does not call: of a GPU it is not known here.
        if normalizer.device.type == "cpu" and not torch.compiler.is_compiling() and normalizer.item() < 0:
            raise ValueError(f"{_OP}: normalizer is {normalizer.item()}, expected a number that is not negative")
    settings = _settings(divergence, beta, temperature, student, teacher, workspace_bytes)

    try:
        teacher_tensors = [None if each is None else each.detach() for each in teacher]
        tensors = (*student, *teacher_tensors, counts)
        if needs_autograd(*[each for each in student if each is not None]):
            found: Tensor = uncompiled(_OP, apply)(_OP, _Divergence, *tensors, settings, mode)
        else:
            found = uncompiled(_OP, _forward)(*tensors, settings, mode)
    except (TypeError, RuntimeError) as error:
        explain(_OP, error, linear_weight=linear_weight, teacher_weight=teacher_weight)
        raise
    if mode == NONE:
        return found.view(rows)
    return _mean(found, normalizer, counts, rows) if mode == MEAN else found


# ----------------------------------------------------------------------------------------------------------- arguments


def _with_whole_heads(student: tuple[Any, ...], teacher: tuple[Any, ...], **options: Any) -> Tensor:
    """The call with heads that fully_shard has cut, each as a forward of its module."""

    def whole(of: tuple[Any, ...], names: tuple[str, ...], run: Callable[..., Tensor]) -> Tensor:
        return with_whole_head(_OP, run, {names[0]: of[0]}, dict(zip(names[1:], of[1:])))

    return whole(
        student,
        _STUDENT,
        lambda x, weight, bias: whole(
            teacher,
            _TEACHER,
            lambda y, of_teacher, its_bias: linear_kl_div(
                x, weight, y, of_teacher, linear_bias=bias, teacher_bias=its_bias, **options
            ),
        ),
    )


class _Settings(NamedTuple):
    divergence: str
    beta: float
    temperature: float
    chunk: int  # rows
    block: int  # classes of a head, or of its gradient, that are converted at once


def _counts(target: Tensor, input: Tensor, ignore_index: int) -> Tensor:
    """Which rows count: [rows, 1]."""
    check_tensor(_OP, "target", target)
    check_device(_OP, "target", target, "input", input)
    check_dtype_of(_OP, "target", target, CLASS_DTYPES, "classes")
    check_shape(_OP, "target", target, input.shape[:-1], f"one per row of input {shape_of(input)}")
    # int32 classes would be compared with the last 32 bits of ignore_index.
    return (target.to(torch.int64) != ignore_index).reshape(-1, 1)


def _settings(
    divergence: str,
    beta: float,
    temperature: float | None,
    student: Head,
    teacher: Head,
    workspace_bytes: int | None,
) -> _Settings:
    if not isinstance(divergence, str) or divergence not in _OF_ROWS:
        error = ValueError if isinstance(divergence, str) else TypeError
        raise error(f'{_OP}: divergence is {divergence!r}, expected "forward", "reverse" or "jsd"')
    between = 'a number between 0 and 1, neither of them; what others have there is "forward" for 0, "reverse" for 1'
    beta = number_of(_OP, "beta", beta, 0, 1, between)
    if divergence == "jsd" and not 0 < beta < 1:
        raise ValueError(f"{_OP}: beta is {value_for_message(beta)}, expected {between}")
    divisor = 1.0 if temperature is None else number_of(_OP, "temperature", temperature, *RANGES["scale"])
    limit = workspace_of(_OP, workspace_bytes, student.input.device)
    rows, classes = student.input.shape[0], student.weight.shape[0]
    # "jsd" has one number more for each class, and a bias a mark.
    of_class = (4 if divergence == "jsd" else 3) * accumulator_dtype(student.input.dtype).itemsize + 1
    return _Settings(divergence, beta, divisor, *cut(rows, classes, classes * of_class, limit, student, teacher))


def _mean(total: Tensor, normalizer: Tensor | None, counts: Tensor | None, rows: torch.Size) -> Tensor:
    """The sum over the rows divided by what it is divided by. Over 0 it is as in the other losses: infinite, but for
    0 / 0, which is 0; and the gradient is 0."""
    if normalizer is None and counts is None:
        return total * (1 / max(1, math.prod(rows)))
    divisor = counts.sum() if normalizer is None and counts is not None else normalizer
    assert divisor is not None
    divisor = divisor.reshape(()).to(total.dtype)
    is_zero = divisor == 0
    mean = torch.where(is_zero, 0, total * (1 / divisor.masked_fill(is_zero, 1)))
    return torch.where(is_zero & (total.detach() != 0), math.inf, mean)


# ------------------------------------------------------------------------------------------------------ rows of a chunk
#
# From log-probabilities of student and teacher, [rows, V], both of which are written over: the divergence of each row,
# and the gradient of the student's logits divided by temperature. Of "jsd" that is one of (1 - beta) * logits.


def _forward_kl(log_s: Tensor, log_t: Tensor, settings: _Settings, masks: bool) -> tuple[Tensor, Tensor]:
    t = log_t.exp()
    divergence = _weighted_(log_t.sub_(log_s), t, masks).sum(1)
    return divergence, log_s.exp_().sub_(t)


def _reverse_kl(log_s: Tensor, log_t: Tensor, settings: _Settings, masks: bool) -> tuple[Tensor, Tensor]:
    s = log_s.exp()
    return _centred(log_s.sub_(log_t), s, masks)


def _jsd(log_s: Tensor, log_t: Tensor, settings: _Settings, masks: bool) -> tuple[Tensor, Tensor]:
    beta = settings.beta
    log_m, other = log_t + math.log(beta), log_s + math.log1p(-beta)
    torch.logaddexp(log_m, other, out=log_m)
    t = torch.exp(log_t, out=other)
    of_teacher = _weighted_(log_t.sub_(log_m), t, masks).sum(1)
    s = torch.exp(log_s, out=other)
    of_student, grad = _centred(log_s.sub_(log_m), s, masks)
    return beta * of_teacher + (1 - beta) * of_student, grad


def _weighted_(log_ratio: Tensor, p: Tensor, masks: bool) -> Tensor:
    """p * log_ratio in place of log_ratio; 0 where p is 0. Only where a class may be masked is the ratio infinite."""
    product = log_ratio.mul_(p)
    return product.masked_fill_(p == 0, 0) if masks else product


def _centred(log_ratio: Tensor, s: Tensor, masks: bool) -> tuple[Tensor, Tensor]:
    """sum s * log_ratio, and its gradient s * (log_ratio - that sum)."""
    product = _weighted_(log_ratio, s, masks)
    total = product.sum(1)
    return total, product.addcmul_(s, total.unsqueeze(1), value=-1)


_OF_ROWS: dict[str, Callable[[Tensor, Tensor, _Settings, bool], tuple[Tensor, Tensor]]] = {
    "forward": _forward_kl,
    "reverse": _reverse_kl,
    "jsd": _jsd,
}


# ------------------------------------------------------------------------------------------------------------- the call


def _compute(
    student: Head,
    teacher: Head,
    counts: Tensor | None,
    settings: _Settings,
    wanted: tuple[bool, bool, bool],
    factor: Tensor | None = None,
) -> tuple[Tensor, list[Tensor | None]]:
    """The divergences of the rows, and the gradients of the student's tensors that are wanted, in the dtype of sums, of
    the rows' sum, or where there is a `factor`, [rows, 1], of its product with it; without _constant(settings)."""
    dtype = accumulator_dtype(student.input.dtype)
    rows = student.input.shape[0]
    divergences = student.input.new_empty(rows, dtype=dtype)
    gradients = [
        student.input.new_zeros(each.shape, dtype=dtype) if wants and each is not None else None
        for each, wants in zip(student, wanted)
    ]
    with torch.no_grad(), torch.autocast(student.input.device.type, enabled=False):
        student, teacher = student.as_multiplied(), teacher.as_multiplied()
        for begin in range(0, rows, max(1, settings.chunk)):
            chunk = slice(begin, begin + settings.chunk)
            of_student, of_teacher = (
                each._replace(input=of_rows(each.input, chunk, counts)) for each in (student, teacher)
            )
            divergences[chunk], grad = _of_chunk(of_student, of_teacher, settings)
            if any(wanted):
                if factor is not None:
                    grad.mul_(factor[chunk])
                if counts is not None:
                    grad.masked_fill_(~counts[chunk], 0)
                grad_input, grad_weight, grad_bias = gradients
                of_chunk = None if grad_input is None else grad_input[chunk]
                add_gradients(grad, of_student, of_chunk, grad_weight, grad_bias, settings.block)
            del grad  # before the next chunk
        divergences.clamp_(min=0)  # of rounding; a NaN stays
        if counts is not None:
            divergences.masked_fill_(~counts.squeeze(1), 0)
    return divergences, gradients


def _of_chunk(student: Head, teacher: Head, settings: _Settings) -> tuple[Tensor, Tensor]:
    log_s = torch.log_softmax(_tempered_logits(student, settings), 1)
    log_t = torch.log_softmax(_tempered_logits(teacher, settings).to(log_s.dtype), 1)
    masks = student.bias is not None or teacher.bias is not None
    return _OF_ROWS[settings.divergence](log_s, log_t, settings, masks)


def _tempered_logits(head: Head, settings: _Settings) -> Tensor:
    z = logits_of(head, settings.block)
    return z if settings.temperature == 1 else z.div_(settings.temperature)


def _constant(settings: _Settings) -> float:
    """What all gradients of _compute are multiplied by."""
    return (1 - settings.beta if settings.divergence == "jsd" else 1.0) / settings.temperature


def _forward(*arguments: Any) -> Tensor:
    """Without gradients, from the arguments of _Divergence."""
    *tensors, counts, settings, mode = arguments
    divergences, _ = _compute(Head(*tensors[:3]), Head(*tensors[3:]), counts, settings, (False, False, False))
    return divergences if mode == NONE else divergences.sum()


class _Divergence(torch.autograd.Function):
    """The tensors of student and teacher, which rows count, the settings and the reduction -> the divergences of the
    rows, or their sum."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        *tensors, counts, ctx.settings, ctx.mode = arguments
        ctx.save_for_backward(*tensors, counts)
        wanted = (False, False, False) if ctx.mode == NONE else ctx.needs_input_grad[:3]
        divergences, computed = _compute(Head(*tensors[:3]), Head(*tensors[3:]), counts, ctx.settings, wanted)
        ctx.gradients = None if ctx.mode == NONE else computed
        ctx.dtypes = [None if each is None else each.dtype for each in tensors[:3]]
        ctx.is_of_zero3 = hasattr(tensors[1], "ds_id")
        return divergences if ctx.mode == NONE else divergences.sum()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Any, ...]:
        scaled = upstream * _constant(ctx.settings)
        gradients, ctx.gradients = ctx.gradients, None  # the caller may write over them
        is_computed = gradients is not None and not torch.is_grad_enabled()
        if is_computed and not (ctx.is_of_zero3 and ctx.needs_input_grad[1]):
            return *_finished(gradients, scaled, ctx), *(None,) * 6
        *tensors, counts = ctx.saved_tensors  # once: in a checkpoint they are computed for one reading
        student, teacher = Head(*tensors[:3]), Head(*tensors[3:])
        refuse_zero3(_OP, linear_weight=student.weight, linear_bias=student.bias)
        if is_computed:
            return *_finished(gradients, scaled, ctx), *(None,) * 6

        def compute() -> tuple[Tensor | None, ...]:
            factor = scaled.unsqueeze(1) if ctx.mode == NONE else None
            _, again = _compute(student, teacher, counts, ctx.settings, ctx.needs_input_grad[:3], factor)
            return _finished(again, scaled, ctx)

        differentiable = [upstream, *(each for each in student if each is not None)]
        return *gradients_of(compute, _NO_SECOND_DERIVATIVE, differentiable), *(None,) * 6


def _finished(gradients: list[Tensor | None], scaled: Tensor, ctx: Any) -> tuple[Tensor | None, ...]:
    """Gradients from their sums, rounded once."""
    return tuple(
        None if gradient is None else _rounded(gradient, scaled, ctx.mode, dtype)
        for gradient, dtype in zip(gradients, ctx.dtypes)
    )


def _rounded(gradient: Tensor, scaled: Tensor, mode: int, dtype: torch.dtype) -> Tensor:
    if mode != NONE:
        call(_OP, _rescale, gradient, scaled, -1)  # zeros of rows that do not count stay, whatever came
    return gradient.to(dtype)
