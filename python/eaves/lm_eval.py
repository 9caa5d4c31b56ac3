"""lm-evaluation-harness: log-likelihoods of a model of transformers without its logits.

    results = lm_eval.simple_evaluate(eaves.lm_eval.HFLM(pretrained="..."), tasks=[...])

Only the rows of continuations are multiplied by the head.
"""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from eaves._replacement import Counted, module_of
from eaves.functional.cross_entropy import cross_entropy
from eaves.functional.linear_cross_entropy import linear_cross_entropy
from eaves.hf import distillation
from eaves.hf.deferred_logits import DeferredLogits

integration = module_of("lm_eval")
_huggingface: Any = import_module("lm_eval.models.huggingface")
_utils: Any = import_module("lm_eval.models.utils")

__all__ = ["HFLM", "is_active"]


class _Unwrapped:
    """In the place of an accelerator, of a model that is not wrapped."""

    unwrap_model = staticmethod(lambda model: model)


is_active = integration.has_objects


class HFLM(Counted, _huggingface.HFLM):  # type: ignore[misc]
    """lm-eval's HFLM, with its arguments. Log-likelihoods are float32 sums, also of 16-bit models, whatever
    `softmax_dtype` is. Requests with the same inputs share one row of the batch, whatever `logits_cache` is. HFLM's own
    computation, with all logits, is that of encoder-decoders and of a head that eaves.hf.patch refuses."""

    _counted_by = integration

    def _loglikelihood_tokens(
        self, requests: Any, disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        """Of (text, context, continuation), the latter two in tokens: the log-probability of the continuation, and
        whether each of its tokens is the likeliest."""
        head = distillation.head_of(self.model, _Unwrapped) if self.backend == "causal" else None
        if head is None:
            reason = "eaves does not take the head" if self.backend == "causal" else "the model is an encoder-decoder"
            warnings.warn(f"eaves.lm_eval: lm-eval computes these answers, with all logits: {reason}", stacklevel=2)
            theirs: list[tuple[float, bool]] = super()._loglikelihood_tokens(requests, disable_tqdm, override_bs)
            return theirs
        places: dict[tuple[int, ...], list[int]] = {}
        for place, (_, context, continuation) in enumerate(requests):
            inputs = (context + continuation)[-(self.max_length + 1) :][:-1]
            places.setdefault(tuple(inputs), []).append(place)
        longest_first = sorted(places, key=len, reverse=True)
        is_auto = self.batch_size == "auto" and not override_bs
        size = (override_bs or 0) if self.batch_size == "auto" else self.batch_size
        self.batch_sizes: dict[int, int] = {}
        batches = _utils.Collator.get_chunks(
            [("", list(inputs[:1]), list(inputs)) for inputs in longest_first], n=size,
            fn=self._batch_scheduler if is_auto else None,
        )  # fmt: skip
        answers: list[Any] = [None] * len(requests)
        progress = _huggingface.tqdm(total=len(requests), disable=disable_tqdm or self.rank != 0)
        for batch in batches:
            of_batch = [(row, place) for row, (*_, inputs) in enumerate(batch) for place in places[tuple(inputs)]]
            lengths = [len(requests[place][2]) for _, place in of_batch]
            tokens = torch.tensor([token for _, place in of_batch for token in requests[place][2]], device=self.device)
            log_probs, is_top1 = self._of_tokens(head, [inputs for *_, inputs in batch], of_batch, lengths, tokens)
            for (_, place), log_prob, top1 in zip(
                of_batch, torch.split(log_probs, lengths), torch.split(is_top1, lengths)
            ):
                answers[place] = float(log_prob.sum()), bool(top1.all())
                if requests[place][0] is not None:
                    self.cache_hook.add_partial("loglikelihood", requests[place][0], answers[place])
            progress.update(len(of_batch))
        progress.close()
        return answers

    def _of_tokens(
        self, head: Any, inputs: list[list[int]], of_batch: list[tuple[int, int]], lengths: list[int], tokens: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The log-probability of each token, and whether it is the likeliest; `of_batch` has the row of each request,
        whose last `lengths` tokens they are."""
        longest = len(inputs[0])
        padded = torch.tensor([each + [0] * (longest - len(each)) for each in inputs], device=self.device)
        with torch.no_grad(), distillation.deferred(head):
            logits = self._model_call(padded)
        before = logits.shape[1] - longest  # virtual tokens of a prompt that was tuned
        if isinstance(logits, DeferredLogits) and not logits.is_deferred:
            logits = logits.tensor("log-probabilities")
        is_deferred = isinstance(logits, DeferredLogits)
        rows = logits.hidden if is_deferred else logits
        ends = [before + len(inputs[row]) for row, _ in of_batch]
        chosen = torch.cat([rows[row, end - n : end] for (row, _), end, n in zip(of_batch, ends, lengths)])
        dtype = self.mixed_precision_dtype
        with torch.no_grad(), torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None):
            if is_deferred:
                out: Any = linear_cross_entropy(
                    chosen, logits.head.weight, tokens, linear_bias=logits.bias, scale=logits.scale,
                    softcap=logits.softcap, reduction="none", outputs="argmax",
                )  # fmt: skip
            else:
                out = cross_entropy(chosen, tokens, reduction="none", outputs="argmax")
        return -out.loss, out.argmax == tokens
