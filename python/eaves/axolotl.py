"""Axolotl with eaves.hf: the model that Axolotl has loaded, adapters included, computes its loss with eaves.

    plugins:
      - eaves.axolotl.EavesPlugin

in the configuration; the options of EavesArgs stand beside it.
"""

from __future__ import annotations

import warnings
import weakref
from importlib import import_module
from types import MethodType
from typing import Any, Literal

__all__ = ["EavesArgs", "EavesPlugin", "is_active"]

try:
    from eaves._replacement import INTEGRATIONS
    from eaves.hf import patch
    from eaves.hf.trainer import skipping_logits

    INTEGRATIONS["axolotl"].check_version()
    _BasePlugin: Any = import_module("axolotl.integrations.base").BasePlugin
    _pydantic: Any = import_module("pydantic")
except ImportError as error:  # Axolotl up to 0.20 prints an ImportError, and trains without the plugin
    raise RuntimeError(f"eaves.axolotl cannot be imported: {error}") from error

_models: weakref.WeakSet[Any] = weakref.WeakSet()

# Settings of Axolotl that take the loss elsewhere, so that eaves would not be called, or the other way round.
_OTHER_LOSSES = (
    "chunked_cross_entropy", "cut_cross_entropy", "diffusion", "diffusion_decision", "diffusion_lm",
    "flash_attn_cross_entropy", "kd_trainer", "liger_cross_entropy", "liger_fused_linear_cross_entropy", "orpo_alpha",
    "rl", "use_dft", "use_eaft",
)  # fmt: skip
# Modules of trainers whose compute_loss takes the model's loss.
_CALL_THE_MODEL = ("axolotl.core.trainers.base", "transformers.trainer")


class EavesArgs(_pydantic.BaseModel):  # type: ignore[misc] # of any type
    """Settings in Axolotl's configuration: the arguments of eaves.hf.patch with eaves_ before their names, which has
    their defaults. Axolotl refuses a configuration (ValueError) that has another loss too."""

    eaves_algorithm: Literal["auto", "speed", "memory", "recompute"] | None = None
    eaves_skip_ignored: bool | None = None
    eaves_workspace_bytes: int | None = None

    @_pydantic.model_validator(mode="after")  # type: ignore[untyped-decorator]
    def refuse_other_losses(self) -> EavesArgs:
        for name in _OTHER_LOSSES:
            if value := getattr(self, name, None):
                raise ValueError(
                    f"eaves.axolotl: {name} is {value!r}, which computes a loss without eaves: leave it or "
                    "eaves.axolotl.EavesPlugin out"
                )
        return self


class EavesPlugin(_BasePlugin):  # type: ignore[misc] # of any type
    """Calls eaves.hf.patch when Axolotl has loaded the model and its adapters. eaves.hf.unpatch undoes it.

    An evaluation that reads only the loss skips the logits."""

    def get_input_args(self) -> str:
        return "eaves.axolotl.EavesArgs"

    def post_model_load(self, cfg: Any, model: Any) -> None:
        given = {name: cfg.get(name) for name in EavesArgs.model_fields}
        patch(model, **{name.removeprefix("eaves_"): value for name, value in given.items() if value is not None})
        _models.add(model)

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        """A trainer with a loss of its own, of another plugin say, may not call the model's."""
        owner = type(trainer).compute_loss
        if trainer.compute_loss_func is not None or owner.__module__ not in _CALL_THE_MODEL:
            warnings.warn(
                f"eaves.axolotl: this trainer computes its loss in {owner.__module__}.{owner.__qualname__}, or in a "
                "compute_loss_func, which may not call eaves",
                stacklevel=2,
            )
            return
        trainer.prediction_step = MethodType(skipping_logits(type(trainer).prediction_step, owner), trainer)


def is_active() -> bool:
    """Whether a model that Axolotl has loaded computes its loss with eaves."""
    return any(hasattr(model, "_eaves_head") for model in _models)  # eaves.hf.unpatch takes that away
