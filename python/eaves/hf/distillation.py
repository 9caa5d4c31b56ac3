"""The loss of TRL's GKDTrainer from hidden states, without the logits of student and teacher.

Both models run unchanged, except that their heads return DeferredLogits, which record the scale and the soft cap that
each model's forward applies.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

from eaves.functional.linear_kl_div import linear_kl_div
from eaves.hf.adapters import inner_linear
from eaves.hf.deferred_logits import DeferredLogits
from eaves.hf.head import DefersLogits, check_head, has_hooks_of_results, logits_of_adapter
from eaves.hf.outputs import finished


def gkd_loss(theirs: Callable[..., Any], workspace_bytes: int | None) -> Callable[..., Any]:
    """GKDTrainer.compute_loss of TRL. `theirs` is TRL's own; it serves Liger's loss, and heads that eaves cannot
    read."""

    def compute_loss(
        self: Any, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        models = model, self.teacher_model
        heads = [head_of(each, self.accelerator) for each in models]
        needs_logits = return_outputs and self.compute_metrics is not None
        has_liger = getattr(self, "use_liger_gkd_loss", False)  # up to TRL 1.13
        if needs_logits or has_liger or any(head is None for head in heads):
            if not needs_logits:
                reason = "use_liger_kernel chooses Liger's" if has_liger else "eaves does not take the head of a model"
                warnings.warn(f"eaves.trl: this {type(self).__name__} keeps its own loss: {reason}", stacklevel=2)
            return theirs(self, model, inputs, return_outputs, num_items_in_batch)
        self.teacher_model.eval()
        columns = {name: inputs[name] for name in ("input_ids", "attention_mask")}
        with deferred(heads[0]):
            outputs = model(**columns)
        with torch.no_grad(), deferred(heads[1]):
            teacher_outputs = self.teacher_model(**columns)
        student, teacher = outputs.logits, teacher_outputs.logits
        labels = inputs["labels"][:, 1:]
        if all(isinstance(each, DeferredLogits) and each.is_deferred for each in (student, teacher)):
            loss = linear_kl_div(
                student.hidden[:, :-1], student.head.weight, teacher.hidden[:, :-1], teacher.head.weight,
                bias=student.bias, teacher_bias=teacher.bias, scale=student.scale, softcap=student.softcap,
                teacher_scale=teacher.scale, teacher_softcap=teacher.softcap, targets=labels, skip_ignored=True,
                divergence="jsd", beta=self.beta, normalizer=num_items_in_batch, workspace_bytes=workspace_bytes,
            )  # fmt: skip
        else:  # a model uses its logits for more than the loss
            logits = [
                each.tensor("the loss") if isinstance(each, DeferredLogits) else each for each in (student, teacher)
            ]
            loss = self.generalized_jsd_loss(
                *(each[:, :-1] for each in logits), labels=labels, beta=self.beta, num_items_in_batch=num_items_in_batch
            )
        return (loss, finished(outputs, heads[0], {}, True)) if return_outputs else loss

    return compute_loss


def head_of(model: Any, accelerator: Any) -> Any:
    """The head, if eaves.hf.patch accepts it. None: it does not, or a wrapper of the model has to see every use of the
    parameters."""
    unwrapped = accelerator.unwrap_model(model)
    if unwrapped is not model:
        is_ddp = isinstance(model, torch.nn.parallel.DistributedDataParallel)
        if not is_ddp or model.find_unused_parameters or unwrapped is not model.module:
            return None
    base = unwrapped.get_base_model() if hasattr(unwrapped, "get_base_model") else unwrapped
    head = base.get_output_embeddings()
    if head is None or "forward" in vars(head) or has_hooks_of_results(head) or hasattr(head.weight, "ds_id"):
        return None
    if not isinstance(head, DefersLogits):
        try:
            check_head(base, head)
        except NotImplementedError:
            return None
    return head


@contextlib.contextmanager
def deferred(head: Any) -> Iterator[None]:
    """Makes the head return DeferredLogits in the block."""
    forward = head.forward
    if inner_linear(head) is head:
        own = SimpleNamespace(weight=head.weight, bias=head.bias, product=forward)
        head.forward = lambda hidden: DeferredLogits(own, hidden)
    else:
        head.forward = lambda hidden: logits_of_adapter(head, forward, hidden)
    try:
        yield
    finally:
        del head.forward
