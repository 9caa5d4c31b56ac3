"""Patches the model of each transformers Trainer when the Trainer is made.

Two methods of Trainer are replaced. `__init__` patches the model, and each model that model_init makes later.
`prediction_step` skips the logits if an evaluation reads only the loss.
"""

from __future__ import annotations

import functools
import inspect
import warnings
import weakref
from importlib import import_module
from typing import Any

import torch

from eaves._arguments import check_options
from eaves._replacement import Installed, replacement_of
from eaves.hf.models import base_of, checked_options, is_patched_model, patch

replacement = replacement_of("hf")


def install(**options: Any) -> Installed:
    """Makes every transformers.Trainer from now on, TRL's and other subclasses too, patch its model.

    If eaves.hf.patch refuses a model, the model stays as it is, and a warning says why. A model that is patched already
    keeps its options. With `label_smoothing_factor` Trainer takes the labels away and computes the loss from all
    logits; a patched model gets the factor as its `label_smoothing` instead. An evaluation that reads only the loss
    (`prediction_loss_only`, or a Trainer without compute_metrics) skips the logits, unless skip_logits is False.

    Args:
        options: the options of eaves.hf.patch. A trainer that reads the logits of a training step needs
            skip_logits=False.

    Returns:
        A context manager that undoes the installation at its end. Models that were patched meanwhile stay patched; use
        eaves.hf.unpatch.

    Raises:
        ImportError: transformers is not installed, or cannot be imported.
        RuntimeError: eaves does not know this version, or other code has replaced one of the methods.
        ValueError, TypeError: an option is not valid for eaves.hf.patch.
    """
    check_options("eaves.hf.install", options, patch)
    bound = inspect.signature(patch).bind(None, **options)
    bound.apply_defaults()
    checked_options(torch.empty(0), {name: bound.arguments[name] for name in bound.kwargs})
    return replacement.install(functools.partial(_methods, options))


uninstall, is_active = replacement.uninstall, replacement.is_active


def _methods(options: dict[str, Any], theirs: tuple[Any, ...]) -> tuple[Any, ...]:
    their_init, their_prediction_step = theirs

    @functools.wraps(their_init)
    def init(self: Any, *arguments: Any, **keywords: Any) -> None:
        their_init(self, *arguments, **keywords)
        patch_model_of(self, self.model, options)
        if self.model_init is not None:  # on the instance, because train() calls it even after uninstall()
            self.call_model_init = functools.partial(_made_model, self, self.call_model_init, options)

    return init, skipping_logits(their_prediction_step)


def skipping_logits(their_prediction_step: Any, *losses: Any) -> Any:
    """A method prediction_step that skips the logits if only the loss is read. `losses` are methods compute_loss of
    subclasses of Trainer that take the model's loss and read no logits."""

    @functools.wraps(their_prediction_step)
    def prediction_step(
        self: Any, model: Any, inputs: Any, prediction_loss_only: bool, *arguments: Any, **keywords: Any
    ) -> Any:
        if prediction_loss_only and _may_skip_logits(self, inputs, losses):
            inputs = {**inputs, "skip_logits": True}
        return their_prediction_step(self, model, inputs, prediction_loss_only, *arguments, **keywords)

    return prediction_step


def _made_model(trainer: Any, make: Any, options: dict[str, Any], *arguments: Any, **keywords: Any) -> Any:
    model = make(*arguments, **keywords)
    patch_model_of(trainer, model, options)
    return model


# For each model with the label_smoothing of a Trainer: its own label_smoothing, and the options with the Trainer's.
_own_smoothing: weakref.WeakKeyDictionary[Any, tuple[float, dict[str, Any]]] = weakref.WeakKeyDictionary()


def patch_model_of(trainer: Any, model: Any, options: dict[str, Any]) -> None:
    arguments = trainer.args
    try:
        base: Any = base_of(model, "patch")
        _refuse_liger(arguments)
        if not is_patched_model(base):
            patch(model, **options)
    except (NotImplementedError, TypeError) as error:
        reason = str(error).removeprefix("patch: ")
        warnings.warn(f"eaves.hf: the model of this {type(trainer).__name__} is not patched: {reason}", stacklevel=3)
        return
    of_model, with_smoothing = _own_smoothing.get(base, (0.0, None))
    if base._eaves_options is not with_smoothing:  # patched again since then
        of_model = base._eaves_options["label_smoothing"]
    smoothing = 0.0 if trainer.compute_loss_func is not None else arguments.label_smoothing_factor
    if smoothing and of_model not in (0, smoothing):
        raise ValueError(
            f"eaves.hf: label_smoothing_factor is {smoothing}, and the model was patched with "
            f"label_smoothing={of_model}; pass one of them"
        )
    base._eaves_options = {**base._eaves_options, "label_smoothing": smoothing or of_model}
    _own_smoothing[base] = of_model, base._eaves_options
    if smoothing:
        trainer.label_smoother = None


def _refuse_liger(arguments: Any) -> None:
    kernels = getattr(arguments, "liger_kernel_config", None) or {}
    if arguments.use_liger_kernel and kernels.get("fused_linear_cross_entropy", True):
        raise NotImplementedError(
            "use_liger_kernel puts Liger's loss into the model; leave it out of TrainingArguments, or pass "
            'liger_kernel_config={"fused_linear_cross_entropy": False}'
        )


def _may_skip_logits(trainer: Any, inputs: Any, losses: tuple[Any, ...]) -> bool:
    try:
        base: Any = base_of(trainer.model, "patch")
    except TypeError:
        return False
    losses = (import_module("transformers.trainer").Trainer.compute_loss, *losses)
    computes_loss = (
        trainer.label_smoother is not None
        or trainer.compute_loss_func is not None
        or getattr(trainer.compute_loss, "__func__", None) not in losses  # may take the labels away, or read logits
    )
    has_choice = is_patched_model(base) and base._eaves_skip_logits is None
    return has_choice and not computes_loss and inputs.get("labels") is not None
