"""NeMo-Automodel with eaves.linear_cross_entropy as its loss.

    loss_fn:
      _target_: eaves.automodel.LinearCrossEntropy

Automodel's recipes hand hidden states and the head's weight to every loss of its class LinearCrossEntropy: the main
loss, the losses of multi-token prediction and the hard loss of a distillation. They gather a head of FSDP2 as the class
says. The import of this module needs Automodel, in a version that eaves knows. `eaves.automodel.is_active()` says
whether a loss is alive.
"""

from __future__ import annotations

import contextlib
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from eaves._replacement import Counted, module_of
from eaves._torch.checks import accumulator_dtype
from eaves._torch.head import check_algorithm
from eaves._torch.options import numbers_of
from eaves.functional.linear_cross_entropy import linear_cross_entropy

__all__ = ["LinearCrossEntropy", "is_active"]

integration = module_of("automodel")
_base: Any = import_module("nemo_automodel.components.loss.linear_ce_base")  # behind the check of its version

is_active = integration.has_objects


class LinearCrossEntropy(Counted, _base.LinearCrossEntropy):  # type: ignore[misc]
    """Automodel's FusedLinearCrossEntropy by eaves: the same arguments, but for `impl`.

    The gradient of the head is added up in float32, and rounded once to the dtype of the weight.

    Args:
        ignore_index: a label that does not count; Automodel puts it in place of its own -100.
        logit_softcapping: the bound of the logits; 0 or None: none. Automodel does not pass the model's own
            (`final_logit_softcapping`), nor a bias of the head: the loss is that of a head without.
        reduction: "sum", which `num_label_tokens` and `loss_weights` need; "mean" of the labels that count; or "none".
        z_loss, algorithm, workspace_bytes: as in eaves.linear_cross_entropy.

    Raises:
        ValueError, TypeError: an option is none of eaves.linear_cross_entropy.
    """

    _counted_by = integration

    def __init__(
        self,
        ignore_index: int = -100,
        logit_softcapping: float | None = 0,
        reduction: str = "sum",
        *,
        z_loss: float = 0,
        algorithm: str = "auto",
        workspace_bytes: int | None = None,
    ) -> None:
        super().__init__()
        if reduction not in ("sum", "mean", "none"):
            raise ValueError(f'eaves.automodel: reduction is {reduction!r}, expected "sum", "mean" or "none"')
        check_algorithm("linear_cross_entropy", algorithm=algorithm, workspace_bytes=workspace_bytes, keep_bytes=None)
        numbers_of("linear_cross_entropy", softcap=logit_softcapping or None, z_loss=z_loss)
        self.ignore_index, self.logit_softcapping, self.reduction = ignore_index, logit_softcapping, reduction
        self.options: dict[str, Any] = {
            "z_loss": z_loss,
            "algorithm": algorithm,
            "workspace_bytes": workspace_bytes,
        }

    def forward(
        self,
        hidden_states: Tensor,
        labels: Tensor,
        lm_weight: Tensor,
        num_label_tokens: int | None = None,
        grad_reduce_group: Any = None,
        loss_weights: Tensor | None = None,
    ) -> Tensor:
        """The loss of this rank's rows: float32, of shape [], or with reduction "none" of the labels' shape.

        Args:
            hidden_states: [..., D], or [1, tokens, D] with labels of shape [tokens].
            labels: [...], the classes.
            lm_weight: [V, D], whole, or the DTensor that FSDP2 has cut. A float32 weight is multiplied in a 16-bit
                dtype of the hidden states, and its gradient is not rounded; else the hidden states are cast to the
                dtype of the weight.
            num_label_tokens: the labels that count in all ranks and micro-batches, which divide the sum. With 0 the
                loss and its gradients are 0.
            grad_reduce_group: the ranks with rows of their own, for a head that FSDP2 has cut
                (materialize_lm_weight).
            loss_weights: of each label, as labels, or None. They get no gradient.
        """
        if self.reduction != "sum" and not (num_label_tokens is None and loss_weights is None):
            raise ValueError(
                f"eaves.automodel: reduction is {self.reduction!r}, but num_label_tokens and loss_weights need 'sum'"
            )
        if labels.dim() == 1 and hidden_states.dim() == 3 and len(hidden_states) == 1:
            hidden_states = hidden_states.squeeze(0)
        if loss_weights is not None:
            loss_weights = loss_weights.to(hidden_states.device, torch.float32)
        weight = self.materialize_lm_weight(lm_weight, grad_reduce_group=grad_reduce_group)
        kind, product = hidden_states.device.type, hidden_states.dtype
        autocast: Any = contextlib.nullcontext()
        if weight.dtype != product and not torch.is_autocast_enabled(kind):
            if weight.dtype == torch.float32 and product in (torch.float16, torch.bfloat16):
                autocast = torch.autocast(kind, product)
            else:
                hidden_states = hidden_states.to(weight.dtype)
        is_empty = num_label_tokens is not None and num_label_tokens == 0
        divisor = None if is_empty else num_label_tokens
        with autocast:
            loss: Any = linear_cross_entropy(
                hidden_states, weight, labels.to(hidden_states.device), ignore_index=self.ignore_index,
                reduction=self.reduction if divisor is None else "mean", normalizer=divisor,
                softcap=self.logit_softcapping or None, row_weight=loss_weights,
                grad_weight_dtype=accumulator_dtype(hidden_states.dtype), **self.options,
            )  # fmt: skip
        return loss * 0.0 if is_empty else loss  # type: ignore[no-any-return]
