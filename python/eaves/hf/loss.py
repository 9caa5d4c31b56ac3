"""The loss of a patched model and its metrics. It replaces the losses of transformers' language models."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from eaves._calls.linear_cross_entropy import LinearCrossEntropyCall, computed, loss_of_head
from eaves._parallel.collectives import named_group
from eaves._parallel.dtensor import local_shard
from eaves._parallel.shard import Shard, ShardArguments
from eaves._torch.checks import is_distributed
from eaves._torch.rows import counts_of
from eaves.functional.cross_entropy import cross_entropy
from eaves.hf.deferred_logits import DeferredLogits
from eaves.hf.head import OFFLOADED, current_call

METRICS = ("accuracy", "entropy")
_OUTPUT_OF_METRIC = {"accuracy": "argmax", "entropy": "entropy"}


def causal_lm_loss(
    options: dict[str, Any],
    logits: Any,
    labels: Tensor | None,
    vocab_size: int,
    num_items_in_batch: Tensor | float | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **_: object,
) -> Tensor:
    """ForCausalLMLoss of transformers. Like it, ignores other keywords."""
    if shift_labels is None:
        assert labels is not None
        shift_labels = torch.nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    return _loss(options, logits, shift_labels, vocab_size, num_items_in_batch, ignore_index)


def masked_lm_loss(
    options: dict[str, Any],
    logits: Any,
    labels: Tensor,
    vocab_size: int,
    num_items_in_batch: Tensor | float | None = None,
    ignore_index: int = -100,
    **_: object,
) -> Tensor:
    """ForMaskedLMLoss of transformers."""
    return _loss(options, logits, labels, vocab_size, num_items_in_batch, ignore_index)


def cross_entropy_of_model(
    options: dict[str, Any],
    num_items_in_batch: Tensor | float | None,
    logits: DeferredLogits,
    target: Tensor,
    *,
    ignore_index: int,
    reduction: str,
    **others: Any,  # weight, size_average, reduce, label_smoothing
) -> Tensor | None:
    """torch.nn.functional.cross_entropy as a model's forward calls it; None if it asks for more than a mean."""
    is_plain = reduction == "mean" and not others.pop("label_smoothing", 0) and set(others.values()) <= {None}
    if not is_plain or len(logits.shape) != 2 or target.is_floating_point():
        return None
    return _loss(options, logits, target, logits.shape[-1], num_items_in_batch, ignore_index)


def _loss(
    options: dict[str, Any],
    logits: Any,
    target: Tensor,
    vocab_size: int,
    num_items_in_batch: Tensor | float | None,
    ignore_index: int,
) -> Tensor:
    current_call.has_loss = True
    target = target.reshape(-1).to(logits.device)
    if isinstance(num_items_in_batch, Tensor):
        num_items_in_batch = num_items_in_batch.to(logits.device)
    metrics = current_call.metrics
    shared: dict[str, Any] = {
        "ignore_index": ignore_index,
        "normalizer": num_items_in_batch,
        "outputs": tuple(_OUTPUT_OF_METRIC[name] for name in metrics),
    }
    of_head = dict(options)
    shared |= {name: of_head.pop(name) for name in ("label_smoothing", "z_loss") if name in of_head}
    if isinstance(logits, DeferredLogits):
        name, is_parallel = of_head.pop("group", None), of_head.pop("sequence_parallel", False)
        is_in_pieces = name is not None
        is_of_head = logits.is_deferred and not logits.is_kept
        if is_of_head and (is_in_pieces or logits.shape[-1] == vocab_size):
            weight, bias = logits.head.weight, logits.bias
            if weight.is_meta and not logits.hidden.is_meta:
                raise NotImplementedError(f"eaves.hf: {OFFLOADED}")
            if of_head.get("grad_weight_dtype") is None and weight.dtype in (torch.bfloat16, torch.float16):
                of_head["grad_weight_dtype"] = torch.float32
            if is_parallel:  # gathered hidden states are [ranks, batch, positions of a rank]
                ranks = _ranks_of(weight) if not is_in_pieces else found_groups[name]
                batch, positions = logits.hidden.shape[:2]
                if target.numel() == batch * ranks * positions:  # otherwise the call refuses it, on all ranks
                    target = target.view(batch, ranks, positions).movedim(1, 0).reshape(-1)
            call = LinearCrossEntropyCall(
                logits.hidden.flatten(0, -2), weight, target, bias, scale=logits.scale, softcap=logits.softcap,
                has_constant_outputs=True, **shared, **of_head,
            )  # fmt: skip
            is_cut = is_in_pieces or is_parallel
            out: Any = _loss_of_pieces(call, name, vocab_size, is_parallel) if is_cut else loss_of_head(call)
            return _measured(out, metrics, target, ignore_index)
        logits = logits.tensor("a vocabulary of another size" if logits.is_deferred else "the loss")
    out = cross_entropy(logits.reshape(-1, vocab_size), target, **shared)
    return _measured(out, metrics, target, ignore_index)


found_groups: dict[str, int] = {}  # the number of ranks of each group, by its name


def _loss_of_pieces(call: LinearCrossEntropyCall, name: str | None, vocab_size: int, sequence_parallel: bool) -> Any:
    """The loss of a head in pieces, over the group of this name or the mesh of a DTensor. torch.compile does not trace
    named_group(), so a compiled call uses the number of ranks that an earlier call or patch() stored."""
    if name is None:
        if not is_distributed(call.head):
            raise ValueError(
                "eaves.hf: patch() got sequence_parallel=True without a group, and the head is no DTensor; pass group="
            )
        return loss_of_head(call._replace(group=Shard(sequence_parallel=sequence_parallel)))
    if torch.compiler.is_compiling() and name in found_groups:
        return computed(call, ShardArguments(call.op, name, found_groups[name], -1, vocab_size, sequence_parallel))
    group = named_group(name)
    found_groups[name] = group.size()
    shard = Shard(group, sequence_parallel=sequence_parallel)
    return loss_of_head(call._replace(group=shard, classes=vocab_size))


def _ranks_of(weight: Any) -> int:
    """The number of ranks that share a DTensor's classes."""
    return local_shard("eaves.hf", "the head", weight, 0).group.size() if is_distributed(weight) else 1


def _measured(out: Any, metrics: dict[str, Tensor | None], target: Tensor, ignore_index: int) -> Tensor:
    """The loss. Fills in the metrics."""
    if isinstance(out, Tensor):
        return out
    counts = counts_of(target, ignore_index)
    number = counts.sum().clamp(min=1)
    if "accuracy" in metrics:
        metrics["accuracy"] = ((out.argmax == target) & counts).sum().to(torch.float32) / number
    if "entropy" in metrics:
        # The entropy of logits has a number for ignored rows too.
        metrics["entropy"] = (out.entropy.detach().where(counts, 0).sum() / number).to(torch.float32)
    loss: Tensor = out.loss
    return loss
