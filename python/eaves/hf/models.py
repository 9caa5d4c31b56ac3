"""patch, unpatch and patched: they exchange the class of a model and of its head."""

from __future__ import annotations

import contextlib
import functools
import inspect
import warnings
import weakref
from collections.abc import Collection, Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from eaves._arguments import answers_unknown
from eaves._calls.linear_cross_entropy import check_constant_options
from eaves._torch.checks import check_bool
from eaves._torch.options import numbers_of
from eaves.hf.head import (
    DefersLogits,
    change_class,
    check_head,
    current_call,
    defer_logits,
    has_hook_of_accelerate,
    release_copies,
    release_head,
    users,
)
from eaves.hf.loss import METRICS, causal_lm_loss, cross_entropy_of_model, found_groups, masked_lm_loss
from eaves.hf.outputs import finished

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


_Model = TypeVar("_Model", bound=torch.nn.Module)


@answers_unknown
def patch(
    model: _Model,
    *,
    skip_logits: bool | None = None,
    skip_ignored: bool = True,
    label_smoothing: float = 0,
    z_loss: float = 0,
    algorithm: str = "auto",
    workspace_bytes: int | None = None,
    grad_weight_dtype: torch.dtype | None = None,
    metrics: Collection[str] = (),
    group: ProcessGroup | str | None = None,
    sequence_parallel: bool = False,
) -> _Model:
    """Lets a language model of transformers compute its loss with eaves, in place.

    The forward gets one more keyword, `skip_logits`. True: with labels, the loss is eaves.linear_cross_entropy of
    hidden states and head, and `logits` of the output is None. False: the output has logits, and with labels the loss
    is eaves.cross_entropy of them. None, the default: the `skip_logits` of patch decides. Calls without labels, and so
    generation, do not change.

    The loss equals transformers' loss. ForCausalLMLoss shifts the labels, or takes `shift_labels`. ForMaskedLMLoss, and
    a forward that calls torch.nn.functional.cross_entropy itself (BERT, T5, BART), do not shift them. Labels of -100 do
    not count. `num_items_in_batch` divides the sum; it is a number, or a tensor that nothing waits for. Three things
    differ. The loss is computed from the product's float32 sums, in float32 (for a float64 model in float64). It is 0,
    not NaN, if no label counts. `num_items_in_batch` also counts in BERT, T5 and BART (but not in BartForCausalLM and
    similar models, because Trainer counts the labels of a shifted loss for them).

    In the output of a call without logits, `logits` is None. Reading it warns, and the warning names the way out.

    With `metrics`, outputs of calls with labels have numbers about the labels that count in this call: `accuracy`, the
    share of labels that are the class of the largest logit (the first of equal ones), and `entropy`, the mean entropy
    of the softmax, in nats. They are float32 tensors of shape [] without a gradient, 0 if no label counts. They are
    computed with the loss from the same product, and nothing waits for them. In evaluation mode with logits they are
    attributes of the output but no items, because Trainer takes every item for logits. An output that is no ModelOutput
    of transformers (a tuple, with return_dict=False) has no metrics; if eaves did not compute the loss, they are None.

    For a model over several ranks: a head that tensor parallelism has cut (a DTensor, as from transformers' tp_plan, or
    `group`) stays in pieces. A head that has its own fully_shard group stays whole until the backward
    (set_reshard_after_forward(False)), so it is gathered once. With DeepSpeed's ZeRO-3, which hooks into the head, the
    head computes logits.

    If the model, or a hook of the head, uses the logits for more than factors, a soft cap, a bias and the loss, the
    call computes them after all, with a warning. The output still has no logits.

    Args:
        model: a transformers.PreTrainedModel, or a PEFT model, whose base model is patched. Patching a patched model
            again sets new options.
        skip_logits: the default for calls with labels: True, False, or None, which means True in training mode. A
            trainer that reads the logits of a training step needs False.
        skip_ignored: on a GPU, whether to leave out ignored labels before the first product. The call then waits once
            for the device, for their number. On the CPU they are always left out.
        label_smoothing, z_loss: as in eaves.linear_cross_entropy, for every loss of the model, with logits or without.
        algorithm, workspace_bytes: as in eaves.linear_cross_entropy.
        grad_weight_dtype: as in eaves.linear_cross_entropy, except that None, the default, means float32 for a 16-bit
            head too: its gradient is summed in float32 and rounded once. The sum takes a float32 tensor of the head's
            shape during the backward, with algorithm "speed" from the forward on. The head's dtype (torch.bfloat16,
            say) avoids this tensor.
        metrics: any of "accuracy" and "entropy".
        group: for a head in pieces that is no DTensor: the ranks that share it, or the name of their group; else None.
            The head's rows are this rank's classes, in the order of ranks, with padding after the vocabulary's classes.
            Such a model cannot return logits.
        sequence_parallel: as in eaves.linear_cross_entropy: hidden states are this rank's part of the rows, and labels
            have all rows.

    Returns:
        The model.

    Raises:
        TypeError, ValueError: the model is not a model of transformers; an option is not valid for
            eaves.linear_cross_entropy, or is no metric.
        NotImplementedError: the loss is neither ForCausalLMLoss nor ForMaskedLMLoss; the head is not a torch.nn.Linear,
            alone or in LoRA, modules_to_save or trainable tokens of PEFT (it is quantised, say, or has DoRA); the
            forward takes no labels; the forward of model or head was replaced on the instance (except by tensor
            parallelism of transformers).
    """
    base: Any = base_of(model, "patch")
    head = base.get_output_embeddings()
    is_patched = is_patched_model(base)
    if not is_patched:
        _check_model(base)
    if not isinstance(head, DefersLogits):
        check_head(base, head, group is not None)
    given: dict[str, Any] = {
        "skip_logits": skip_logits,
        "skip_ignored": skip_ignored,
        "label_smoothing": label_smoothing,
        "z_loss": z_loss,
        "algorithm": algorithm,
        "workspace_bytes": workspace_bytes,
        "grad_weight_dtype": grad_weight_dtype,
        "metrics": metrics,
        "group": group,
        "sequence_parallel": sequence_parallel,
    }
    options = checked_options(head.weight, given)
    skip_logits, metrics = options.pop("skip_logits"), options.pop("metrics")

    if not is_patched:
        original: Any = type(base)
        change_class(base, _patched_class(original))
    _take_head(base, head, group is not None)
    base._eaves_skip_logits = skip_logits
    base._eaves_metrics = metrics
    base._eaves_options = options
    return model


def _take_head(base: Any, head: Any, is_in_pieces: bool) -> None:
    if "_eaves_head" in vars(base):
        release_head(base, head)
    if not isinstance(head, DefersLogits):
        defer_logits(head)
    head._eaves_is_in_pieces = is_in_pieces
    users.setdefault(head, weakref.WeakSet()).add(base)
    release_copies(head)
    base._eaves_head = (head,)  # in a tuple: the model would register a module as its own


def unpatch(model: _Model) -> _Model:
    """Restores a patched model, and returns it.

    Raises:
        TypeError: the model is not a model of transformers.
        ValueError: the model is not patched, or its class has been changed since (torch's fully_shard does).
    """
    base: Any = base_of(model, "unpatch")
    original = getattr(type(base), "_eaves_class", None)
    if original is None:
        raise ValueError(f"unpatch: this {type(base).__name__} is not patched")
    if type(base) is not _patched_class(original):
        raise ValueError(
            f"unpatch: the model's class was changed to {type(base).__name__} after patch; undo that change first"
        )
    release_head(base)
    release_copies(base.get_output_embeddings())
    del base._eaves_head, base._eaves_skip_logits, base._eaves_metrics, base._eaves_options
    change_class(base, original)
    return model


@contextlib.contextmanager
def patched(model: _Model, **options: Any) -> Iterator[_Model]:
    """Patches the model until the end of the block, and then restores its earlier state: unpatched, or with other
    options. The options are the options of `patch`."""
    base: Any = base_of(model, "patch")
    before = None
    if is_patched_model(base):
        before = {"skip_logits": base._eaves_skip_logits, "metrics": base._eaves_metrics, **base._eaves_options}
    patch(model, **options)
    try:
        yield model
    except BaseException:
        with contextlib.suppress(Exception):  # the block's own error is the one to raise
            _restore(model, before)
        raise
    _restore(model, before)


def _restore(model: Any, before: dict[str, Any] | None) -> None:
    if before is not None:
        patch(model, **before)
    elif is_patched_model(base_of(model, "unpatch")):  # the block may have unpatched it
        unpatch(model)


# Checks of the model and the options


def checked_options(weight: Tensor, given: dict[str, Any]) -> dict[str, Any]:
    """The options of patch for a head with this weight."""
    options = dict(given)
    of_call = {name: options[name] for name in ("skip_ignored", "algorithm", "workspace_bytes", "grad_weight_dtype")}
    check_constant_options(weight, **of_call)
    numbers_of("patch", label_smoothing=options["label_smoothing"], z_loss=options["z_loss"])
    group, sequence_parallel = options.pop("group"), options.pop("sequence_parallel")
    check_bool("patch", "sequence_parallel", sequence_parallel)
    if not (group is None or isinstance(group, str) or hasattr(group, "group_name")):
        raise TypeError(
            f"patch: group is a {type(group).__name__}, expected a ProcessGroup or its name; pass sequence_parallel "
            "to patch itself"
        )
    if group is not None or sequence_parallel:
        # The options hold the name, because a ProcessGroup can neither be copied nor pickled.
        if group is not None and not isinstance(group, str):
            found_groups[group.group_name] = group.size()
            group = group.group_name
        options |= {"group": group, "sequence_parallel": sequence_parallel}
    if options["skip_logits"] is not None:
        check_bool("patch", "skip_logits", options["skip_logits"])
    options["metrics"] = _checked_metrics(options["metrics"])
    return options


def base_of(model: Any, operation: str) -> torch.nn.Module:
    """The model of transformers: the model itself, or the model inside PEFT's wrapper."""
    try:
        transformers = import_module("transformers.modeling_utils")
    except ImportError as error:
        raise ImportError(f"eaves.hf needs transformers (pip install eaves[hf]): {error}") from error
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not isinstance(base, transformers.PreTrainedModel):
        raise TypeError(
            f"{operation}: model is a {type(model).__name__}, expected a transformers.PreTrainedModel or a PEFT model "
            "around one; patch it before torch.compile or a wrapper of torch.distributed takes it"
        )
    return base  # type: ignore[no-any-return]


def _losses() -> tuple[Any, Any]:
    """The losses of causal and of masked language models."""
    module = import_module("transformers.loss.loss_utils")
    return module.ForCausalLMLoss, module.ForMaskedLMLoss


def _check_model(model: Any) -> None:
    name = type(model).__name__
    if model.loss_function not in _losses() or not isinstance(type(model).loss_function, property):
        found = getattr(model.loss_function, "__name__", type(model.loss_function).__name__)
        raise NotImplementedError(
            f"patch: the loss of this {name} is {found}, expected ForCausalLMLoss or ForMaskedLMLoss; eaves.hf is for "
            "language models"
        )
    if model.get_output_embeddings() is None:
        raise NotImplementedError(f"patch: this {name} has no head (get_output_embeddings() is None)")
    if "labels" not in inspect.signature(type(model).forward).parameters:
        raise NotImplementedError(f"patch: the forward of this {name} takes no labels")
    if "forward" in vars(model) and not has_hook_of_accelerate(model):
        raise NotImplementedError(
            f"patch: the forward of this {name} was replaced on the instance (accelerate does so for mixed "
            "precision); patch the model before the replacement"
        )


def _checked_metrics(metrics: Any) -> tuple[str, ...]:
    """The metrics in the order of METRICS, checked."""
    names = " and ".join(f'"{name}"' for name in METRICS)
    if isinstance(metrics, str) or not isinstance(metrics, Collection):
        raise TypeError(f"patch: metrics is {metrics!r}, expected a tuple of any of {names}")
    for name in metrics:
        if name not in METRICS:
            raise ValueError(f"patch: metrics has {name!r}, expected any of {names}")
    return tuple(name for name in METRICS if name in metrics)


def is_patched_model(model: torch.nn.Module) -> bool:
    return hasattr(type(model), "_eaves_class")


@functools.cache
def _patched_class(original: Any) -> Any:
    """A subclass with the original's name, because transformers writes the name into configurations and tables."""
    forward, original_loss = original.forward, original.loss_function.fget
    of_causal, of_masked = _losses()
    # BERT, T5 and BART call torch.nn.functional.cross_entropy in their forwards.
    code = getattr(inspect.unwrap(forward), "__code__", None)
    has_own_loss = code is None or "loss_function" not in code.co_names

    def counts_shifted(self: Any) -> bool:
        """True if Trainer's num_items_in_batch leaves out the first label of each sequence, as ForCausalLMLoss does.
        The loss in BartForCausalLM's forward counts that label, so it ignores the number."""
        return original_loss(self) is of_causal and not getattr(self.config, "is_encoder_decoder", False)

    # Found once, because torch.compile traces each call and would trace inspect.signature.bind.
    place = list(inspect.signature(forward).parameters).index("labels") - 1

    @functools.wraps(forward)  # keeps the signature for Trainer, to which skip_logits would be a column of data
    def patched_forward(self: Any, *args: Any, skip_logits: bool | None = None, **kwargs: Any) -> Any:
        if not is_patched_model(self):  # called by a reference that outlived unpatch
            return forward(self, *args, **kwargs)
        has_labels = (args[place] if len(args) > place else kwargs.get("labels")) is not None
        if skip_logits is None:
            chosen = self._eaves_skip_logits
            skip_logits = has_labels and (self.training if chosen is None else chosen)
        if skip_logits and not has_labels:
            raise ValueError(
                "skip_logits is True, but there are no labels, so the model would compute nothing; pass labels"
            )
        if self.training and not has_labels and kwargs.get("num_items_in_batch") is not None:
            _warn_of_labels(self)
        is_kept = has_own_loss and has_labels and not skip_logits
        head = self.get_output_embeddings() if skip_logits or is_kept else None
        if head is not None and not isinstance(head, DefersLogits):  # resized, adapted or merged after patch
            if torch.compiler.is_compiling():
                raise RuntimeError(
                    f"eaves.hf: the head of this {type(self).__name__} was replaced after patch; call patch again "
                    "before torch.compile"
                )
            is_in_pieces = self._eaves_options.get("group") is not None
            check_head(self, head, is_in_pieces)
            _take_head(self, head, is_in_pieces)
        options = self._eaves_options
        # None until the loss is computed.
        metrics: dict[str, Tensor | None] = dict.fromkeys(self._eaves_metrics if has_labels else ())
        call = current_call
        outer = call.head, call.is_kept, call.cross_entropy, call.metrics, call.has_loss
        call.head, call.is_kept, call.metrics, call.has_loss = head, is_kept, metrics, False
        call.cross_entropy = None
        if has_own_loss:
            items = kwargs.get("num_items_in_batch")
            if items is not None and counts_shifted(self):
                items = None
            call.cross_entropy = functools.partial(cross_entropy_of_model, options, items)
        try:
            output = forward(self, *args, **kwargs)
            if has_labels and not call.has_loss and (options["label_smoothing"] or options["z_loss"]):
                raise NotImplementedError(
                    f"eaves.hf: this {type(self).__name__} computed its loss without eaves, which ignores the "
                    "label_smoothing and z_loss of patch; leave them out"
                )
        finally:
            call.head, call.is_kept, call.cross_entropy, call.metrics, call.has_loss = outer
            if head is not None and not torch.is_grad_enabled() and "_eaves_reshards" in vars(head):
                head.reshard()
        return finished(output, head if skip_logits else None, metrics, bool(skip_logits or self.training))

    def loss_function(self: Any) -> Any:
        chosen, options = original_loss(self), self._eaves_options

        # Functions with the names of transformers' losses, because Unsloth reads the names, and with the parameter
        # num_items_in_batch: without it Axolotl's trainer (from 0.21 on) divides each micro-batch by its own labels.
        def ForCausalLMLoss(
            logits: Any, labels: Any, vocab_size: int, num_items_in_batch: Any = None, *args: Any, **kwargs: Any
        ) -> Tensor:
            return causal_lm_loss(options, logits, labels, vocab_size, num_items_in_batch, *args, **kwargs)

        def ForMaskedLMLoss(
            logits: Any, labels: Any, vocab_size: int, num_items_in_batch: Any = None, *args: Any, **kwargs: Any
        ) -> Tensor:
            return masked_lm_loss(options, logits, labels, vocab_size, num_items_in_batch, *args, **kwargs)

        if chosen is of_causal:
            return ForCausalLMLoss
        return ForMaskedLMLoss if chosen is of_masked else chosen  # a loss that was set after patch

    def reduce(self: Any, protocol: Any) -> Any:
        # Pickle looks classes up by name, which finds the original.
        return _unpickled, (original,), original.__reduce_ex__(self, protocol)[2]

    patched_class = type(
        original.__name__,
        (original,),
        {
            "__module__": original.__module__,
            "__qualname__": original.__qualname__,
            "__doc__": original.__doc__,
            "__reduce_ex__": reduce,
            "_eaves_class": original,
            "forward": patched_forward,
            "loss_function": original.loss_function.getter(loss_function),  # with the original's setter
        },
    )
    return patched_class


def _warn_of_labels(model: Any) -> None:
    if not torch.compiler.is_compiling():
        warnings.warn(
            f"eaves.hf: this {type(model).__name__} computes all logits, because Trainer, its compute_loss_func or "
            "a compute_loss of its subclass takes the labels and computes the loss without eaves; for "
            "label_smoothing_factor call eaves.hf.install() before the Trainer is made, or "
            "eaves.hf.patch(model, label_smoothing=...) in place of the factor",
            stacklevel=3,
        )


def _unpickled(original: type) -> Any:
    patched_class = _patched_class(original)
    return patched_class.__new__(patched_class)
