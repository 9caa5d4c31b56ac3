"""eaves.linear_log_prob_loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from eaves._arguments import answers_missing, refuse_unknown
from eaves._calls.linear_log_prob_loss import LogProbLossCall, loss_of_log_probs
from eaves._calls.log_prob import LogProbCall


@answers_missing
def linear_log_prob_loss(
    hidden: Tensor,
    head: Tensor | torch.nn.Linear,
    tokens: Tensor,
    fn: Callable[[Tensor, Any, slice], Tensor],
    *,
    entropy: bool = False,
    boundaries: Sequence[int] | Tensor | None = None,
    bias: Tensor | None = None,
    temperature: float | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    ignore_index: int = -100,
    keep_bytes: int | None = None,
    workspace_bytes: int | None = None,
    skip_ignored: bool = False,
    grad_weight_dtype: torch.dtype | None = None,
    **unknown: object,
) -> Tensor:
    """Any loss of the log-probabilities of tokens (GRPO, PPO, CISPO, DPO, GSPO, focal weights), with three matrix
    products in bounded memory: the sum of fn over chunks of rows.

    For each chunk, eaves.linear_log_prob computes the log-probabilities and entropies, autograd takes fn's derivative
    with respect to them, and the chunk's gradients follow before the next chunk begins. So the forward computes the
    gradients, and the backward multiplies them by dL/d(loss). The result equals fn of all rows if fn is a sum over
    entries of the first axis, or over the sequences of `boundaries`.

    Args:
        hidden: [N, ..., D], as in eaves.linear_log_prob, but not float16: gradients would underflow before a loss scale
            multiplies them. Chunks are parts of the first axis: they never cut a sequence of [B, T, D], nor a pair of
            [B // 2, 2, T, D]. If fn is a sum over tokens, hidden.flatten(0, 1) allows chunks to end anywhere.
        head, bias: as in eaves.linear_log_prob; no DTensor.
        tokens: int32 or int64, [N, ...].
        fn: fn(log_prob, entropy, rows) returns the sum of the losses of hidden[rows], a tensor of shape []. For a mean,
            divide by a number of the whole batch: a mean() within fn is the mean of one chunk, and the result would
            depend on the number of chunks. log_prob has the shape of tokens[rows], float32 (float64 for float64);
            entropy likewise, or None without `entropy`; rows is a slice of the first axis, for the rows of advantages,
            masks and old log-probabilities. Gradients reach log_prob and entropy alone: other tensors of fn get none.
        entropy: whether fn gets entropies.
        boundaries: None, or the cu_seqlens of packed sequences, [0, ..., N]: chunks end only there. The call waits for
            a tensor on a GPU.
        temperature, softcap, scale, ignore_index: as in eaves.linear_log_prob. Ignored tokens have log_prob 0.
        keep_bytes: the bytes that a chunk may keep, one number for each logit; they set the number of tokens of a
            chunk, at least 128. None: 600 MiB. If one entry of the first axis has more tokens, the logits beyond
            keep_bytes are computed twice.
        workspace_bytes, skip_ignored, grad_weight_dtype: as in eaves.linear_cross_entropy. Each chunk rounds the sum of
            the head's gradient, unless grad_weight_dtype is torch.float32.

    Returns:
        The sum of fn's losses, a scalar. It has one backward.

    Raises:
        ValueError, TypeError, NotImplementedError, torch.OutOfMemoryError: as in eaves.linear_log_prob. ValueError: fn
            returns no scalar. NotImplementedError: a second derivative. RuntimeError: a second backward.

    Example:
        >>> import torch, eaves
        >>> hidden, head = torch.tensor([[1.0, 0.0], [0.0, 2.0]]), torch.tensor([[2.0, 0.0], [0.0, 0.5], [-1.0, 0.0]])
        >>> advantages = torch.tensor([1.0, -0.5])
        >>> eaves.linear_log_prob_loss(
        ...     hidden, head, torch.tensor([0, 2]), lambda log_prob, _, rows: -(advantages[rows] * log_prob).sum()
        ... )
        tensor(-0.6059)
    """
    if unknown:
        refuse_unknown("linear_log_prob_loss", unknown, linear_log_prob_loss)
    of_rows = LogProbCall(
        "linear_log_prob_loss", None, hidden, head, bias, tokens, temperature, softcap, scale, ignore_index,
        keep_bytes=keep_bytes, workspace_bytes=workspace_bytes, skip_ignored=skip_ignored,
        grad_weight_dtype=grad_weight_dtype,
    )  # fmt: skip
    return loss_of_log_probs(LogProbLossCall(of_rows, fn, entropy, boundaries))
