"""sentence-transformers' MultipleNegativesRankingLoss (InfoNCE with in-batch negatives) on eaves.linear_cross_entropy.

    loss = eaves.sentence_transformers.MultipleNegativesRankingLoss(model)

The documents of a batch are a head and the queries its rows, so that their scores, [queries, documents], are not kept.
"""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from eaves._replacement import Counted, module_of
from eaves.functional.linear_cross_entropy import linear_cross_entropy

integration = module_of("sentence_transformers")
_losses: Any = import_module("sentence_transformers.sentence_transformer.losses")
_util: Any = import_module("sentence_transformers.util")

__all__ = ["MultipleNegativesRankingLoss", "is_active"]

is_active = integration.has_objects


class MultipleNegativesRankingLoss(Counted, _losses.MultipleNegativesRankingLoss):  # type: ignore[misc]
    """The loss of this name in sentence-transformers, with its arguments. Scores are float32 sums of products, and the
    loss is float32.

    Args:
        model, similarity_fct, gather_across_devices, directions, partition_mode, hardness_mode, hardness_strength: as
            in sentence-transformers. Its own computation, with all scores, and a warning, is that of another similarity
            than cos_sim and dot_score, of the directions "query_to_query" and "doc_to_doc", which leave out scores of
            each row, and of a hardness_strength beside a hardness_mode.
        scale: a positive number, or a torch.nn.Parameter of one number, which the trainer learns. Data-parallel ranks
            do not average its gradient.
    """

    _counted_by = integration

    def compute_loss_from_embeddings(self, embeddings: list[Tensor], labels: Tensor) -> Tensor:
        """The loss of embeddings [B, D] of queries, their documents and negatives; `labels` are not read."""
        needing = self._needing_all_scores()
        if needing or len(embeddings) < 2:
            if needing:
                warnings.warn(
                    f"eaves.sentence_transformers: {needing} needs all scores, so the loss runs without eaves",
                    stacklevel=2,
                )
            loss: Tensor = super().compute_loss_from_embeddings(embeddings, labels)
            return loss
        if self.similarity_fct is not _util.dot_score:
            embeddings = [torch.nn.functional.normalize(each, dim=-1) for each in embeddings]
        count, first = embeddings[0].shape[0], 0
        if self.gather_across_devices:
            embeddings = [_util.all_gather_with_grad(each) for each in embeddings]
            first = _util.get_rank() * count
        queries, docs = embeddings[0], torch.cat(embeddings[1:])
        local_queries, local_docs = (each[first : first + count] for each in embeddings[:2])
        own = torch.arange(first, first + count, device=queries.device)
        if "doc_to_query" not in self.directions:
            return linear_cross_entropy(local_queries, docs, own, scale=self.scale)
        if self.partition_mode == "per_direction":
            of_queries = linear_cross_entropy(local_queries, docs, own, scale=self.scale)
            return (of_queries + linear_cross_entropy(local_docs, queries, own, scale=self.scale)) / 2
        rows, of_docs = (
            linear_cross_entropy(x, head, own, scale=self.scale, reduction="none", outputs="lse")
            for x, head in ((local_queries, docs), (local_docs, queries))
        )
        return (rows.loss + torch.nn.functional.softplus(of_docs.lse - rows.lse)).mean()

    def _needing_all_scores(self) -> str | None:
        """The argument that needs all scores at once, if there is one."""
        if self.similarity_fct not in (_util.cos_sim, _util.pytorch_cos_sim, _util.dot_score):
            return "similarity_fct"
        if {"query_to_query", "doc_to_doc"} & set(self.directions):
            return "directions"
        return "hardness_mode" if self.hardness_mode is not None and self.hardness_strength > 0 else None

    def get_config_dict(self) -> dict[str, Any]:
        config: dict[str, Any] = super().get_config_dict()
        return {**config, "scale": self.scale.item()} if isinstance(self.scale, Tensor) else config
