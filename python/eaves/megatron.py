"""The head of Megatron-Core's GPTModel with eaves, through the model's own hook.

    model(tokens, positions, mask, labels=labels, output_processor=eaves.megatron.output_processor)
    model(tokens, positions, mask, labels=labels, output_processor=eaves.megatron.log_prob_processor)
    eaves.megatron.install()           the first of them in every call of GPTModel that has labels and no hook
    eaves.megatron.uninstall()         as it was
    with eaves.megatron.install():     both

`output_processor_context` is a dict of options, or None. The model's output layer says how tensor-parallel ranks share
the vocabulary, whether they share the sequence, and whether the gradient is added to `main_grad`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from eaves._arguments import answers_unknown
from eaves._parallel.shard import Shard
from eaves._replacement import Installed, replacement_of
from eaves._torch.checks import accumulator_dtype, check_bool, index_of
from eaves._torch.head import check_algorithm
from eaves._torch.options import numbers_of
from eaves.functional.linear_cross_entropy import linear_cross_entropy
from eaves.functional.log_prob import linear_log_prob

__all__ = ["install", "is_active", "log_prob_processor", "output_processor", "uninstall"]

_OP = "eaves.megatron"

replacement = replacement_of("megatron")


def output_processor(
    *,
    hidden_states: Tensor,
    output_layer: Any,
    output_weight: Tensor | None = None,
    labels: Tensor | None = None,
    loss_mask: Tensor | None = None,
    context: Mapping[str, Any] | None = None,
    **others: Any,
) -> Tensor:
    """The loss of each token, as GPTModel.forward returns it; without labels the logits.

    The loss is that of Megatron's vocab_parallel_cross_entropy, from the product's float32 sums (Megatron's come from
    logits rounded to 16 bits). With mup, logits are scaled as the model scales them. A token whose `loss_mask` is 0 has
    loss 0 and gradient 0.

    Args:
        hidden_states: [positions, batch, D]; with sequence parallelism this rank's positions.
        output_layer: the model's ColumnParallelLinear: its weight ([this rank's classes, D], the padding of the
            vocabulary among them, which Megatron's softmax counts too), bias, group, sequence parallelism. With
            gradient_accumulation_fusion the gradient of the weight is added to its main_grad, in that dtype; else it is
            summed in float32 and rounded once.
        output_weight: the embedding's weight where it is the head.
        labels: [batch, all positions]; one of -100 (`ignore_index`) does not count.
        loss_mask: None, or [batch, all positions]; a place with 0 does not count.
        context: None, or options of eaves.linear_cross_entropy: label_smoothing, softcap, z_loss, ignore_index,
            algorithm, workspace_bytes, keep_bytes, skip_ignored. `label_smoothing` is Megatron's: it is spread over the
            classes that are not the label.

    Returns:
        float32 [batch, all positions].

    Raises:
        NotImplementedError: defer_embedding_wgrad_compute, or a weight that is gathered for each call.
        ValueError, TypeError: as eaves.linear_cross_entropy.
    """
    if labels is None:
        logits, _ = output_layer(
            hidden_states, weight=output_weight, runtime_gather_output=others.get("runtime_gather_output")
        )
        logits = others["scale_logits"](logits) if "scale_logits" in others else logits
        return logits.transpose(0, 1).contiguous()  # type: ignore[no-any-return]
    options = dict(context or {})
    target = labels.transpose(0, 1)
    if loss_mask is not None:
        target = target.masked_fill(loss_mask.view_as(labels).transpose(0, 1) == 0, options.get("ignore_index", -100))

    def loss_of(hidden: Tensor) -> tuple[Any, None]:
        hidden, head = _head_of(hidden, output_layer, output_weight, others.get("config"))
        classes = head["linear_weight"].shape[0] * head.pop("ranks")
        if smoothing := options.pop("label_smoothing", 0):
            options["label_smoothing"] = smoothing * classes / (classes - 1)
        return linear_cross_entropy(hidden, target=target, reduction="none", **head, **options), None

    loss: Tensor = _in_place_of_forward(output_layer, loss_of, hidden_states)
    return loss.transpose(0, 1).contiguous()


def log_prob_processor(
    *,
    hidden_states: Tensor,
    output_layer: Any,
    output_weight: Tensor | None = None,
    labels: Tensor | None = None,
    loss_mask: Tensor | None = None,
    context: Mapping[str, Any] | None = None,
    **others: Any,
) -> Any:
    """The log-probability of each label, for post-training: eaves.linear_log_prob in the place of the logits.

    Args:
        labels: [batch, all positions], the tokens whose log-probabilities are wanted: those that come next.
        loss_mask: not read: rollouts are scored at every position.
        context: None, or options of eaves.linear_log_prob: temperature, softcap, outputs, ignore_index, algorithm,
            workspace_bytes, keep_bytes, skip_ignored.
        hidden_states, output_layer, output_weight: as in output_processor.

    Returns:
        float32 [batch, all positions]; with `outputs` eaves.LogProbOutput, each of that shape.

    Raises:
        NotImplementedError, ValueError, TypeError: as output_processor; ValueError without labels.
    """
    if labels is None:
        raise ValueError("eaves.megatron: log_prob_processor needs labels, the tokens that are scored")
    tokens = labels.transpose(0, 1)

    def log_prob_of(hidden: Tensor) -> tuple[Any, None]:
        hidden, head = _head_of(hidden, output_layer, output_weight, others.get("config"))
        del head["ranks"]
        weight, bias = head.pop("linear_weight"), head.pop("linear_bias")
        return linear_log_prob(hidden, weight, tokens, bias=bias, **head, **(context or {})), None

    out = _in_place_of_forward(output_layer, log_prob_of, hidden_states)
    if isinstance(out, Tensor):
        return out.transpose(0, 1).contiguous()
    return type(out)(*(None if each is None else each.transpose(0, 1).contiguous() for each in out))


def _in_place_of_forward(layer: Any, compute: Callable[[Tensor], tuple[Any, None]], hidden: Tensor) -> Any:
    """The result of compute(hidden) in a call of the layer, whose hooks run: in one of them Megatron's
    DistributedDataParallel waits for the weight (overlap_param_gather)."""
    own = {name: value for name, value in vars(layer).items() if name == "forward"}
    layer.forward = compute
    try:
        return layer(hidden)[0]
    finally:
        del layer.forward
        vars(layer).update(own)


def _head_of(hidden: Tensor, layer: Any, shared: Tensor | None, config: Any) -> tuple[Tensor, dict[str, Any]]:
    """Hidden states, and what both functions take from the output layer; and how many ranks have it."""
    if getattr(layer.config, "defer_embedding_wgrad_compute", False):
        raise NotImplementedError(
            "eaves.megatron: defer_embedding_wgrad_compute puts off the product of the head's gradient, which eaves "
            "computes with the others; leave it False"
        )
    if getattr(layer, "gtp_remat_size", 1) > 1:
        raise NotImplementedError(
            "eaves.megatron: this output layer gathers its weight for each call (gtp_remat), "
            "which eaves does not support"
        )
    weight: Tensor = layer.weight if shared is None else shared
    ranks = layer.tp_group.size() if layer.tp_group is not None else 1
    found: dict[str, Any] = {
        "linear_weight": weight,
        "linear_bias": None if layer.skip_bias_add else layer.bias,
        "scale": config.mup_output_mult if getattr(config, "use_mup", False) else None,
        "ranks": ranks,
    }
    if ranks > 1:
        is_cut = layer.sequence_parallel and not layer.explicit_expert_comm
        found["group"] = Shard(
            layer.tp_group, sequence_parallel=is_cut, reduce_input_grad=is_cut or not layer.disable_grad_reduce
        )
    main_grad = getattr(weight, "main_grad", None)
    is_fused = layer.gradient_accumulation_fusion and main_grad is not None and not hasattr(weight, "__fsdp_param__")
    if is_fused and weight.requires_grad and torch.is_grad_enabled():
        found["grad_weight_out"] = main_grad
        hidden = _AfterHead.apply(hidden, weight)  # type: ignore[no-untyped-call]
    else:  # rounded once, as by one product
        found["grad_weight_dtype"] = accumulator_dtype(weight.dtype)
    return hidden, found


class _AfterHead(torch.autograd.Function):
    """Hidden states in front of a head whose gradient is in main_grad once theirs is there. Megatron's hook of the
    weight wants a gradient to be called, adds it where zero_out_wgrad says so, and throws it away: zeros."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.weight = weight
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor]:
        ctx.weight.grad_added_to_main_grad = True
        return upstream, torch.zeros_like(ctx.weight)


@answers_unknown
def install(
    *,
    label_smoothing: float = 0,
    softcap: float | None = None,
    z_loss: float = 0,
    ignore_index: int = -100,
    algorithm: str = "auto",
    workspace_bytes: int | None = None,
    keep_bytes: int | None = None,
    skip_ignored: bool = False,
) -> Installed:
    """Gives GPTModel.forward output_processor, in calls that have labels and no output_processor of their own.

    Args:
        label_smoothing, softcap, z_loss, ignore_index, algorithm, workspace_bytes, keep_bytes, skip_ignored: as in the
            `context` of output_processor.

    Returns:
        A context manager, whose end undoes it. A second install takes new options.

    Raises:
        ImportError: Megatron-Core is not installed, or cannot be imported.
        RuntimeError: it is a version that eaves does not know.
        ValueError, TypeError: an option is none of eaves.linear_cross_entropy.
    """
    numbers_of(_OP, label_smoothing, None, softcap, z_loss)
    index_of(_OP, "ignore_index", ignore_index)
    check_algorithm(_OP, algorithm, workspace_bytes, keep_bytes)
    check_bool(_OP, "skip_ignored", skip_ignored)
    options = {
        "label_smoothing": label_smoothing, "softcap": softcap, "z_loss": z_loss, "ignore_index": ignore_index,
        "algorithm": algorithm, "workspace_bytes": workspace_bytes, "keep_bytes": keep_bytes,
        "skip_ignored": skip_ignored,
    }  # fmt: skip
    return replacement.install(lambda theirs: (_with_processor(theirs[0], options),))


uninstall, is_active = replacement.uninstall, replacement.is_active


def _with_processor(forward: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    @functools.wraps(forward)  # verl asks whether the signature has output_processor
    def with_processor(self: Any, *arguments: Any, **keywords: Any) -> Any:
        labels = keywords.get("labels", arguments[4] if len(arguments) > 4 else None)
        if labels is not None and keywords.get("output_processor") is None:
            keywords |= {"output_processor": output_processor, "output_processor_context": options}
        return forward(self, *arguments, **keywords)

    return with_processor
