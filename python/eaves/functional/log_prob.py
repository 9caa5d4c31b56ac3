"""log_prob and linear_log_prob for torch tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, overload

import torch
from torch import Tensor

from eaves._arguments import answers_missing
from eaves._calls.log_prob import LogProbCall, log_probs_of
from eaves._parallel.dtensor import refuse_unknown
from eaves._torch.outputs import LogProbOutput

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from typing_extensions import TypedDict, Unpack

    from eaves._parallel.shard import Shard

    class _OfBoth(TypedDict, total=False):
        temperature: Tensor | float | None
        softcap: float | None
        scale: float | None
        ignore_index: int
        group: ProcessGroup | Shard | None
        classes: int | None

    class _Keywords(_OfBoth, total=False):
        inplace_backward: bool

    class _LinearKeywords(_OfBoth, total=False):
        bias: Tensor | None
        algorithm: str
        workspace_bytes: int | None
        keep_bytes: int | None
        skip_ignored: bool
        grad_weight_dtype: torch.dtype | None
        grad_weight_out: Tensor | None


@overload
def log_prob(  # type: ignore[overload-overlap]  # () is a sequence of names too
    logits: Tensor, tokens: Tensor, *, outputs: tuple[()] = (), **keywords: Unpack[_Keywords]
) -> Tensor: ...


@overload
def log_prob(
    logits: Tensor, tokens: Tensor, *, outputs: str | Sequence[str], **keywords: Unpack[_Keywords]
) -> LogProbOutput: ...


@answers_missing
def log_prob(
    logits: Tensor,
    tokens: Tensor,
    *,
    temperature: Tensor | float | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    ignore_index: int = -100,
    outputs: str | Sequence[str] = (),
    inplace_backward: bool = False,
    group: ProcessGroup | Shard | None = None,
    classes: int | None = None,
    **unknown: object,
) -> Tensor | LogProbOutput:
    """The log-probability of one token, or of K tokens, in each row of logits, with its gradient.

    For a row z over V tokens and a chosen token t:

        z'       = softcap * tanh(scale * z / softcap) / temperature      (no softcap: scale * z / temperature)
        log_prob = z'_t - log sum_v exp(z'_v)

    It is -eaves.cross_entropy(logits, tokens, reduction="none"), computed in float32 whatever the dtype of logits, and
    never above 0. With K tokens for each row, or a temperature for each row, each log-probability follows the same
    formula, and one pass over the logits computes all of them. A token that a row has twice counts twice in the
    gradient:

        dL/dz'_v = sum_k g_k [v == t_k] - p_v * sum_k g_k

    Args:
        logits: [..., V], any strides, on the CPU or a CUDA GPU; float16, bfloat16, float32 or float64.
        tokens: int32 or int64: one token for each row, the shape of logits without V; or K tokens for each row,
            [rows..., K].
        temperature: None, or a positive number that divides the logits after the softcap. Or a tensor with one number
            for each row, in any floating-point dtype: the shape of logits without V, with axes that may be 1 or missing
            at the end ([B] and [B, 1] for logits [B, T, V], [] for all rows). It gets no gradient, and the call does
            not wait for a GPU. Only a tensor on the CPU is checked: on a GPU a row with temperature 0 is NaN or
            infinite, and a negative temperature divides like any other. Ignored rows may have any temperature.
        softcap: None, or a positive number that bounds the logits, before the temperature.
        scale: None, or a positive number that multiplies the logits before the softcap.
        ignore_index: rows with this token have gradient 0, and all their outputs are 0. With K tokens it takes out its
            own place alone; a row is ignored if all its places have this token.
        outputs: the names of more outputs, one or a sequence of them, in the dtype of the log-probabilities.
            "entropy": the entropy of each row's softmax, in nats, [rows...]; differentiable.
            "is_top1": whether each token has the largest logit of its row, the first of equal ones; the shape of
            tokens, bool; False for an ignored token.
            "sum_sq": sum_v p_v^2 of each row's softmax, [rows...].
            "mean_logit": the mean of each row's z', [rows...].
        inplace_backward: whether the call may write the gradient of logits over logits, as in eaves.cross_entropy: the
            entropy then has no gradient. With K tokens, or a temperature for each row, the backward writes it.
        group, classes: as in eaves.cross_entropy, for a vocabulary that is cut over ranks.

    Returns:
        The log-probabilities, in the shape of tokens: float32, or float64 for float64 logits. With outputs, a named
        tuple: first the field log_prob, then the outputs in the order of their names.

    Raises:
        ValueError, TypeError, NotImplementedError, RuntimeError, torch.OutOfMemoryError: as in eaves.cross_entropy.
            With K tokens, or a temperature for each row, NotImplementedError also for torch.vmap, torch.func,
            torch.export and a batch of upstream gradients; torch.compile leaves such a call out of the graph (a graph
            break).

    Example:
        >>> import torch, eaves
        >>> logits = torch.tensor([[2.0, 0.0, -1.0], [0.0, 1.0, 0.0]])
        >>> eaves.log_prob(logits, torch.tensor([0, 2]), outputs="is_top1").is_top1
        tensor([ True, False])
        >>> eaves.log_prob(logits, torch.tensor([[0, 1], [2, -100]]), temperature=torch.tensor([1.0, 2.0]))
        tensor([[-0.1698, -2.1698],
                [-1.2944,  0.0000]])
    """
    if unknown:
        refuse_unknown("log_prob", unknown, log_prob, group, logits)
    call = LogProbCall(
        "log_prob", logits, None, None, None, tokens, temperature, softcap, scale, ignore_index, outputs, group,
        classes, inplace_backward,
    )  # fmt: skip
    return log_probs_of(call)


@overload
def linear_log_prob(  # type: ignore[overload-overlap]  # () is a sequence of names too
    hidden: Tensor,
    head: Tensor | torch.nn.Linear,
    tokens: Tensor,
    *,
    outputs: tuple[()] = (),
    **keywords: Unpack[_LinearKeywords],
) -> Tensor: ...


@overload
def linear_log_prob(
    hidden: Tensor,
    head: Tensor | torch.nn.Linear,
    tokens: Tensor,
    *,
    outputs: str | Sequence[str],
    **keywords: Unpack[_LinearKeywords],
) -> LogProbOutput: ...


@answers_missing
def linear_log_prob(
    hidden: Tensor,
    head: Tensor | torch.nn.Linear,
    tokens: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: Tensor | float | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    ignore_index: int = -100,
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
) -> Tensor | LogProbOutput:
    """The log-probability of one token, or of K tokens, in each row of a model's head, with its gradients, without ever
    holding all the logits: eaves.log_prob(hidden @ head.T + bias, tokens).

    It is -eaves.linear_cross_entropy(hidden, head, tokens, reduction="none"): logits are float32 sums of the product,
    and no log-probability is above 0. A call without gradients takes one matrix product. A call with gradients takes
    four, with algorithm="keep" three, with a frozen head two: see `algorithm`. A call with K tokens for each row, or a
    temperature for each row, is computed in chunks of rows and keeps only numbers of the rows: also four products, with
    a frozen head three.

    Args:
        hidden: [..., D], any strides, on the CPU or a CUDA GPU; float16, bfloat16, float32 or float64.
        head: [V, D], in the dtype of hidden; or a torch.nn.Linear, whose bias is then `bias`.
        tokens: int32 or int64: one token for each row, the shape of hidden without D; or K tokens for each row,
            [rows..., K].
        bias: [V], in the dtype of hidden or float32.
        temperature, softcap, scale, ignore_index, outputs: as in eaves.log_prob.
        algorithm: how gradients are computed, as in eaves.linear_cross_entropy. If head and bias require none, "speed"
            computes the gradient of hidden in the forward: two products instead of three. "auto" does so too, except
            for calls with the output "entropy", because a gradient of the entropy would need the logits again. With K
            tokens, or a temperature for each row, "recompute" is the only algorithm: "auto" and "memory" select it, and
            "speed" and "keep" are refused.
        workspace_bytes, keep_bytes, skip_ignored, grad_weight_dtype, grad_weight_out: as in eaves.linear_cross_entropy.
            With K tokens, or a temperature for each row, workspace_bytes sets the size of the chunks (None: 512 MiB on
            a GPU, 32 MiB on the CPU), and keep_bytes is refused.
        group, classes: as in eaves.linear_cross_entropy, for a head that is cut over ranks.

    Returns:
        As in eaves.log_prob.

    Raises:
        ValueError, TypeError, NotImplementedError, torch.OutOfMemoryError: as in eaves.linear_cross_entropy and in
            eaves.log_prob.

    Example:
        >>> import torch, eaves
        >>> hidden, head = torch.tensor([[1.0, 0.0], [0.0, 2.0]]), torch.tensor([[2.0, 0.0], [0.0, 0.5], [-1.0, 0.0]])
        >>> eaves.linear_log_prob(hidden, head, torch.tensor([0, 2]), temperature=0.5)
        tensor([-0.0206, -2.2395])
    """
    if unknown:
        refuse_unknown("linear_log_prob", unknown, linear_log_prob, group, head)
    call = LogProbCall(
        "linear_log_prob", None, hidden, head, bias, tokens, temperature, softcap, scale, ignore_index, outputs, group,
        classes, algorithm=algorithm, workspace_bytes=workspace_bytes, skip_ignored=skip_ignored,
        grad_weight_dtype=grad_weight_dtype, grad_weight_out=grad_weight_out, keep_bytes=keep_bytes,
    )  # fmt: skip
    return log_probs_of(call)
