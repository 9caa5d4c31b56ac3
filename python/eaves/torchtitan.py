"""torchtitan with eaves.linear_cross_entropy in place of its chunked loss.

    --override.imports eaves.torchtitan.fused_loss
    --override.imports 'eaves.torchtitan.fused_loss={"z_loss": 1e-4}'

torchtitan's trainer hands its `lm_head` to every ChunkedLossWrapper, and the model returns hidden states. FusedLoss is
one; its call is a forward of `lm_head`, so FSDP2's hooks gather the head and reduce its gradient. The import of this
module needs torchtitan, in a version that eaves knows. `eaves.torchtitan.is_active()` says whether a FusedLoss lives.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from eaves._parallel.shard import Shard
from eaves._replacement import Counted, module_of
from eaves._torch.checks import accumulator_dtype, is_distributed
from eaves._torch.head import check_algorithm
from eaves._torch.options import numbers_of
from eaves.functional.linear_cross_entropy import linear_cross_entropy

__all__ = ["FusedLoss", "fused_loss", "is_active"]

integration = module_of("torchtitan")
_losses: Any = import_module("torchtitan.components.loss")  # behind the check of its version
_overrides: Any = import_module("torchtitan.config.override")

is_active = integration.has_objects


class FusedLoss(Counted, _losses.ChunkedLossWrapper):  # type: ignore[misc]
    """A ChunkedLossWrapper of CrossEntropyLoss that holds no logits, of any length of the sequence.

    `num_chunks` is not read: `workspace_bytes` says how much is computed at once. The gradients are computed
    with the loss, and wait for the backward, whose factor multiplies them.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(_losses.ChunkedLossWrapper.Config):  # type: ignore[misc]
        z_loss: float = 0
        algorithm: str = "auto"
        workspace_bytes: int | None = None

    _counted_by = integration

    def __init__(self, config: Any, *, compile_config: Any = None) -> None:
        super().__init__(config)
        if compile_config is not None and compile_config.enable and "loss" in compile_config.components:
            _losses.logger.info("eaves.torchtitan: torch.compile does not change the loss, which is one operator")
        self._options = {name: getattr(config, name) for name in ("z_loss", "algorithm", "workspace_bytes")}

    def set_lm_head(self, lm_head: torch.nn.Module) -> None:
        self._of_head = _options_of(lm_head)
        super().set_lm_head(lm_head)

    def __call__(
        self, pred: Tensor, labels: Tensor, global_valid_tokens: Tensor | None = None, **loss_inputs: Any
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of this rank's rows, and no metrics.

        Args:
            pred: [B, L, D], hidden states.
            labels: [B, L], the classes; -100 does not count.
            global_valid_tokens: the labels that count in all ranks and micro-batches, which divide the sum, or None.
            loss_inputs: for other losses (positions): CrossEntropyLoss reads none.
        """
        head: Any = self.lm_head
        if head is None:
            raise RuntimeError("eaves.torchtitan: no head is known; call set_lm_head(model.lm_head) first")

        def loss_of(hidden: Tensor) -> Any:
            hidden, weight, targets, bias, group = _of_this_rank(hidden, head.weight, labels, head.bias)
            return linear_cross_entropy(
                hidden, weight, targets, linear_bias=bias, ignore_index=_losses.IGNORE_INDEX, group=group,
                reduction="sum" if global_valid_tokens is None else "mean", normalizer=global_valid_tokens,
                grad_weight_dtype=accumulator_dtype(hidden.dtype),
                **self._of_head, **self._options,
            )  # fmt: skip

        spmd = _losses.spmd
        is_type_checking = spmd.is_type_checking()
        with spmd.no_typecheck():
            loss: Tensor = _called_with_forward(head, loss_of, pred)
            if is_type_checking:
                spmd.assert_type(loss, {"dp": spmd.P, "cp": spmd.P, "tp": spmd.I})
        return loss, {}


def _called_with_forward(module: Any, forward: Any, *arguments: Any) -> Any:
    """The module's call with another forward, between its hooks."""
    if hasattr(module, "unshard"):
        module.unshard()  # if the call gathers instead, FSDP2 keeps an event that no CUDA graph can wait for
    own = vars(module).get("forward")  # torchtitan's Module.parallelize puts one there
    module.forward = forward
    try:
        return module(*arguments)
    finally:
        del module.forward
        if own is not None:
            module.forward = own


def _of_this_rank(hidden: Any, weight: Any, labels: Any, bias: Any) -> tuple[Any, Any, Any, Any, Shard | None]:
    """The tensors, and the ranks that have the vocabulary in pieces if tensors do not say so. torchtitan adds up these
    ranks' parts of the gradient of the hidden states."""
    if _losses.get_spmd_backend() == "spmd_types":
        is_cut = _losses.spmd_mesh_size("tp") > 1
        group = Shard(_losses.current_spmd_mesh().get_group("tp"), reduce_input_grad=False) if is_cut else None
        return hidden, weight, labels, bias, group
    if not is_distributed(labels):
        return hidden, weight, labels, bias, None
    # "full_dtensor": all tensors are on the mesh of all axes. Along an axis that cuts rows, FSDP2 adds up the gradient.
    mesh, rows, partial = labels.device_mesh, labels.placements, _losses.Partial()
    cut = [axis for axis, each in enumerate(weight.placements) if each.is_shard() and mesh.size(axis) > 1]
    of_hidden = [partial if axis in cut else each for axis, each in enumerate(rows)]
    of_head = [partial if cut_rows.is_shard() else each for cut_rows, each in zip(rows, weight.placements)]
    return (
        hidden.redistribute(placements=rows).to_local(grad_placements=of_hidden),
        weight.to_local(grad_placements=of_head),
        labels.to_local(),
        None if bias is None else bias.to_local(grad_placements=of_head),
        Shard(mesh.get_group(cut[0]), reduce_input_grad=False) if cut else None,
    )


def _options_of(head: torch.nn.Module) -> dict[str, Any]:
    """Scale and soft cap of the head, as options of linear_cross_entropy."""
    is_replaced = "forward" in vars(head) and not getattr(head, "_parallelized", False)
    forward = None if is_replaced else getattr(type(head), "forward", None)
    if forward is torch.nn.Linear.forward:
        return {}
    muse_glimmer = sys.modules.get("torchtitan.models.muse_glimmer.model")
    if muse_glimmer is not None and forward is muse_glimmer.SoftCappedLinear.forward:
        of: Any = head
        return {"scale": of.output_multiplier, "softcap": of.output_soft_cap_temp}
    raise NotImplementedError(
        f"eaves.torchtitan: lm_head is a {type(head).__name__} with a forward of its own, expected a product with its "
        "weight and bias; leave --override.imports eaves.torchtitan.fused_loss out"
    )


@_overrides.override(  # type: ignore[untyped-decorator]
    target=_losses.ChunkedLossWrapper.Config, description="eaves.linear_cross_entropy: no logits"
)
def fused_loss(config: Any, *, z_loss: float = 0, algorithm: str = "auto", workspace_bytes: int | None = None) -> Any:
    """The configuration of FusedLoss in place of that of torchtitan's ChunkedLossWrapper.

    Args:
        z_loss, algorithm, workspace_bytes: as in eaves.linear_cross_entropy.

    Raises:
        NotImplementedError: the configuration is of another wrapper, or wraps another loss than CrossEntropyLoss.
        ValueError, TypeError: an option is none of eaves.linear_cross_entropy.
    """
    for given, expected in ((config, _losses.ChunkedLossWrapper), (config.loss_fn, _losses.CrossEntropyLoss)):
        if type(given) is not expected.Config:
            raise NotImplementedError(
                f"eaves.torchtitan: the loss is a {type(given).__qualname__}, expected {expected.Config.__qualname__}"
            )
    check_algorithm("linear_cross_entropy", algorithm=algorithm, workspace_bytes=workspace_bytes, keep_bytes=None)
    numbers_of("linear_cross_entropy", z_loss=z_loss)
    options = {"z_loss": z_loss, "algorithm": algorithm, "workspace_bytes": workspace_bytes}
    return _overrides.derive(config, FusedLoss.Config, **options)
