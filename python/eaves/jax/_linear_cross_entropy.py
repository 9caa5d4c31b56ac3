"""linear_cross_entropy and linear_log_prob for JAX arrays: a model's head and its loss, without all the logits."""

# mypy: disallow-untyped-calls=False

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from eaves._words import renamed
from eaves.jax import _shards
from eaves.jax._call import Call, Result, alike, bind, row_factors
from eaves.jax._loss import (
    CLASS_DTYPES,
    MEAN,
    NAMES,
    NONE,
    SUM,
    Arrays,
    CrossEntropyOutput,
    add_saved,
    constant,
    divisor_of,
    given,
    is_soft,
    labels_of,
    loss_results,
    normalizer_of,
    number_of,
    options_of,
    output_of,
    reduced,
    reduction_of,
    result_dtype,
    returned,
    row_weight_of,
    share_of,
    target_weights,
    wanted_outputs,
)
from eaves.jax._shards import STATISTICS, Shard, align, local_labels, merge, shard_of, without_ignore_index

_OP = "linear_cross_entropy"
_NAMES = (*NAMES, ("x", "hidden"), ("weight", "head"), ("targets", "labels"), ("class_weight", "weight"))
_LARGEST = {"argmax", "sum_sq"}  # what a shard has to be told before it computes
_LAYOUTS = ("vd", "dv")
_ALGORITHMS = ("auto", "speed", "recompute")


class LogProbOutput(NamedTuple):
    """What linear_log_prob gives with any of its return_* arguments; None for what was not asked for."""

    log_prob: jax.Array
    entropy: jax.Array | None = None
    is_top1: jax.Array | None = None


def linear_cross_entropy(
    hidden: jax.Array,
    head: jax.Array,
    labels: jax.Array,
    *,
    head_layout: str = "vd",
    bias: jax.Array | None = None,
    weight: jax.Array | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    scale: float | None = None,
    z_loss: float = 0.0,
    row_weight: jax.Array | None = None,
    normalizer: jax.Array | float | None = None,
    return_lse: bool = False,
    return_argmax: bool = False,
    return_entropy: bool = False,
    return_z_loss: bool = False,
    return_sum_sq: bool = False,
    return_mean_logit: bool = False,
    algorithm: str = "auto",
    workspace_bytes: int | None = None,
    grad_head_dtype: Any = None,
    axis_name: str | None = None,
) -> jax.Array | CrossEntropyOutput:
    """The loss of a model's head, cross_entropy(hidden @ head.T + bias, labels), without ever holding all the logits.

    Probabilities are computed from the product's float32 sums, not from logits rounded to 16 bits. Without a gradient a
    call is one matrix product; gradients of the mean and the sum are computed with the loss, in three.

    Args:
        hidden: [..., D]; float16, bfloat16, float32 or float64.
        head: [V, D], or [D, V] with head_layout="dv", in the dtype of hidden. Either is read as it lies; the gradient
            of a [D, V] head is transposed once.
        labels: of each row a class, int32 or int64: the shape of hidden without D. Or probabilities: [..., V].
        head_layout: "vd" or "dv".
        bias: [V], in the dtype of hidden or float32.
        weight: of each class, [V], in the dtype of hidden or float32.
        reduction, ignore_index, label_smoothing, softcap, scale, z_loss, row_weight, normalizer, return_*: as in
            cross_entropy.
        algorithm: "speed", gradients with the loss: three products. "recompute": the backward computes the logits
            again, four products and little memory in between. "auto": speed, but recompute for calls with return_lse
            or return_entropy. Of reduction "none", and in float16, the gradients are always recomputed.
        workspace_bytes: the most scratch memory that a call should take; None: what suits the device.
        grad_head_dtype: what the chunks' parts of the head's gradient are added up in: None, the dtype of head, or
            float32, rounded once at the end.
        axis_name: inside of jax.shard_map, the axis of the mesh that the classes are cut over: head, bias and weight
            are this device's, and everything else is the same on all devices of the axis.

    Returns:
        The loss: float32, or float64 for a float64 hidden. With any return_*: a CrossEntropyOutput. Of rows that are
        ignored or of weight 0 all outputs are 0; on the CPU they are left out before the first product.

    Raises:
        ValueError: an array or a number is not as above; on the CPU also a label that is no class, when the call runs.
        NotImplementedError: a dtype or a shape that eaves does not have.

    Derivatives, of first order, are those of loss, lse and entropy with respect to hidden, head and bias; those that
    are not needed are not computed. The other outputs count as constant; a derivative with respect to another argument
    is a NotImplementedError.

    Example:
        >>> import jax, jax.numpy as jnp, eaves.jax
        >>> hidden, head = jnp.array([[1.0, 0.0], [0.0, 2.0]]), jnp.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
        >>> print(eaves.jax.linear_cross_entropy(hidden, head, jnp.array([0, 1])).round(4))
        0.8103
    """
    hidden, head = jnp.asarray(hidden), jnp.asarray(head)
    bias = None if bias is None else jnp.asarray(bias)
    mode = reduction_of(_OP, reduction)
    if head_layout not in _LAYOUTS:
        raise ValueError(f'{_OP}: head_layout is {head_layout!r}, expected "vd" or "dv"')
    if algorithm not in _ALGORITHMS:
        raise ValueError(f'{_OP}: algorithm is {algorithm!r}, expected "auto", "speed" or "recompute"')
    if hidden.ndim == 0:
        raise ValueError(f"{_OP}: hidden has no axis, expected [..., features]")
    features = hidden.shape[-1]
    if head.ndim != 2 or head.shape[1 if head_layout == "vd" else 0] != features:
        expected = f"[classes, {features}]" if head_layout == "vd" else f"[{features}, classes]"
        raise ValueError(f'{_OP}: head has shape {list(head.shape)}, expected {expected} (head_layout "{head_layout}")')
    rows, dtype = hidden.shape[:-1], result_dtype(hidden)
    labels = labels_of(_OP, labels, (*rows, head.shape[0 if head_layout == "vd" else 1]))
    if grad_head_dtype is not None and jnp.dtype(grad_head_dtype) not in (head.dtype, dtype):
        raise ValueError(f"{_OP}: grad_head_dtype is {grad_head_dtype}, expected {head.dtype} or {dtype}")
    options = options_of(
        _OP, ignore_index, label_smoothing=label_smoothing, softcap=softcap, scale=scale, z_loss=z_loss
    )
    if workspace_bytes is not None:
        limit = number_of(_OP, "workspace_bytes", workspace_bytes, operator.index)
        if not 0 < limit < 2**63:
            raise ValueError(f"{_OP}: workspace_bytes is {limit}, expected a positive number of bytes")
        options = (*options, ("workspace_limit", limit))
    wanted = wanted_outputs(return_lse, return_argmax, return_entropy, return_z_loss, return_sum_sq, return_mean_logit)
    row_weights = row_weight_of(_OP, row_weight, rows, dtype)
    divisor = normalizer_of(_OP, normalizer, mode, dtype)
    if weight is not None:
        weight = constant(_OP, "weight", jnp.asarray(weight))
    if is_soft(labels):
        labels = constant(_OP, "labels", labels.astype(dtype))
    shard, weights_of = None, target_weights
    whole: Sequence[Any]
    if axis_name is None:
        head, bias, weight, *whole = alike(head, bias, weight, hidden, labels, row_weights, divisor)
        hidden, labels, row_weights, divisor = whole
    else:
        own = head.shape[0 if head_layout == "vd" else 1]
        shard = shard_of(_OP, axis_name, "head", head, own, labels, wanted)
        weights_of = functools.partial(_shards.target_weights, shard)
        # The sum of hidden's gradient over the devices is the derivative of its getting to them.
        (head, bias, weight, hidden), (labels, row_weights, divisor) = align(
            axis_name, (head, bias, weight, hidden), (labels, row_weights, divisor)
        )
    is_fast = algorithm == "speed" or (algorithm == "auto" and not (return_lse or return_entropy))
    setting = _Setting(
        options=options,
        wanted=wanted,
        is_transposed=head_layout == "dv",
        mode=mode,
        with_gradients=is_fast and mode != NONE and hidden.dtype != jnp.float16 and shard is None,
        grad_head_dtype=None if grad_head_dtype is None else jnp.dtype(grad_head_dtype),
        ignore_index=int(ignore_index),
        shard=shard,
    )
    if mode == MEAN and divisor is None:
        divisor = divisor_of(labels, weight, row_weights, ignore_index, dtype, rows, weights_of)
    loss, outputs = _loss(setting)(hidden, head, bias, labels, weight, row_weights, divisor)
    if "z_loss" in outputs:
        outputs["z_loss"] = reduced(outputs["z_loss"], mode, divisor)
    return output_of(loss, outputs)


def linear_log_prob(
    hidden: jax.Array,
    head: jax.Array,
    tokens: jax.Array,
    *,
    head_layout: str = "vd",
    bias: jax.Array | None = None,
    temperature: float | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    ignore_index: int = -100,
    return_entropy: bool = False,
    return_top1: bool = False,
    workspace_bytes: int | None = None,
    axis_name: str | None = None,
) -> jax.Array | LogProbOutput:
    """The log-probability of one token for each row of `hidden`, of the softmax over a head's logits.

        log_prob = z'_t / T - log sum_v exp(z'_v / T)        with the temperature T, behind the softcap

    Args:
        hidden, head, head_layout, bias, workspace_bytes, axis_name: as in linear_cross_entropy.
        tokens: of each row a class, int32 or int64.
        temperature: T, a positive number; None: 1.
        softcap, scale, ignore_index: as in linear_cross_entropy; an ignored row has log-probability 0.
        return_entropy: whether to return the entropy of each row's softmax, in nats; it has a derivative.
        return_top1: whether to return, for each row, if the token is the one with the largest logit.

    Returns:
        [...], float32, or float64 for a float64 hidden. With any return_*: a LogProbOutput.

    Raises:
        As linear_cross_entropy.

    Example:
        >>> import jax.numpy as jnp, eaves.jax
        >>> hidden, head = jnp.array([[1.0, 0.0]]), jnp.zeros((4, 2))
        >>> print(eaves.jax.linear_log_prob(hidden, head, jnp.array([3])).round(4))
        [-1.3863]
    """
    if temperature is not None:
        temperature = number_of("linear_log_prob", "temperature", temperature)
        if not (temperature > 0 and math.isfinite(1 / temperature)):
            raise ValueError(f"linear_log_prob: temperature is {temperature}, expected a positive number")
        scale = (1.0 if scale is None else number_of("linear_log_prob", "scale", scale)) / temperature
        softcap = None if softcap is None else number_of("linear_log_prob", "softcap", softcap) / temperature
    tokens = jnp.asarray(tokens)
    if tokens.dtype not in CLASS_DTYPES:
        raise ValueError(f"linear_log_prob: tokens has dtype {tokens.dtype}, expected int32 or int64")
    if tokens.shape != jnp.shape(hidden)[:-1]:
        raise ValueError(f"linear_log_prob: tokens has shape {list(tokens.shape)}, expected that of hidden's rows")
    try:
        output: Any = linear_cross_entropy(
            hidden, head, tokens, head_layout=head_layout, bias=bias, softcap=softcap, scale=scale, reduction="none",
            ignore_index=ignore_index, return_entropy=return_entropy, return_argmax=return_top1,
            workspace_bytes=workspace_bytes, axis_name=axis_name,
        )  # fmt: skip
    except (TypeError, ValueError, NotImplementedError) as error:
        if not str(error).startswith("linear_cross_entropy: "):
            raise
        names = {"linear_cross_entropy": "linear_log_prob", "labels": "tokens"}
        raise type(error)(renamed(str(error), names)) from None
    if not (return_entropy or return_top1):
        log_prob: jax.Array = 0 - output  # of ignored rows 0, where -output would be -0
        return log_prob
    is_top1 = (output.argmax == tokens) & (tokens != ignore_index) if return_top1 else None
    return LogProbOutput(0 - output.loss, output.entropy, is_top1)


@dataclasses.dataclass(frozen=True)
class _Setting:
    """What is known while JAX traces. `with_gradients`: the forward computes them too."""

    options: tuple[tuple[str, Any], ...]
    wanted: tuple[str, ...]
    is_transposed: bool
    mode: int
    with_gradients: bool
    grad_head_dtype: Any
    ignore_index: int
    shard: Shard | None

    @property
    def numbers(self) -> tuple[tuple[str, Any], ...]:
        if self.shard is None:
            return self.options
        options = without_ignore_index(self.options)
        return (*options, ("classes", self.shard.classes), ("most_classes", self.shard.own))


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Wanted:
    """Of which arrays a gradient is wanted."""

    hidden: bool
    head: bool
    bias: bool

    def by_place(self, gradients: list[jax.Array]) -> list[jax.Array | None]:
        """Those that were computed, each at its array's place."""
        left = iter(gradients)
        return [next(left) if is_wanted else None for is_wanted in (self.hidden, self.head, self.bias)]


@functools.cache
def _loss(setting: _Setting) -> Any:
    """(hidden, head, bias, labels, weight, row_weight, divisor) -> the loss, and the outputs that are wanted by name,
    which have a number for each row."""

    def forward(values: Any, saved: bool, wants: _Wanted | None = None) -> tuple[dict[str, jax.Array], list[Any]]:
        """The losses of the rows and outputs; with `wants`, also these gradients."""
        hidden, head, bias, labels, weight, _, divisor = values
        names = dict.fromkeys(("loss", *setting.wanted))
        if saved:
            names["lse"] = None
            if weight is not None or is_soft(labels):
                names["target_mass"] = None
        if setting.shard is not None:
            return _of_shards(setting, setting.shard, values, tuple(names)), []
        arrays = _arrays(setting, values)
        of_rows = row_factors(hidden.ndim - 1)
        results = loss_results(tuple(names), of_rows, hidden.shape[:-1], result_dtype(hidden))
        function = "linear_cross_entropy_forward"
        if wants is not None:
            function += "_backward"
            dtype = result_dtype(hidden)
            factor = share_of(jnp.ones((), dtype), divisor)
            arrays.add("grad_loss", jnp.broadcast_to(factor, hidden.shape[:-1]), of_rows)
            results += _gradients(setting, hidden, head, bias, wants)
        numbers = (("reduction", NONE), *setting.options)
        call = Call(_OP, function, tuple(arrays.operands), tuple(results), numbers, _NAMES)
        written = bind(call, *alike(*arrays.arrays))
        return dict(zip(names, written)), list(written[len(names) :])

    def split(outputs: dict[str, jax.Array], divisor: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
        return reduced(outputs["loss"], setting.mode, divisor), returned(outputs, setting.wanted)

    @jax.custom_vjp
    def function(*values: Any) -> Any:
        return split(forward(values, False)[0], values[-1])

    def forward_rule(*primals: Any) -> Any:
        values = [None if primal is None else primal.value for primal in primals]
        wants = _Wanted(*(primal is not None and primal.perturbed for primal in primals[:3]))
        outputs, gradients = forward(values, True, wants if setting.with_gradients else None)
        kept = {name: outputs.get(name) for name in ("lse", "entropy", "target_mass")}
        waiting: Any = wants.by_place(gradients) if setting.with_gradients else None
        return split(outputs, values[-1]), (values, kept, waiting, wants)

    def backward_rule(residuals: Any, cotangents: Any) -> Any:
        values, kept, waiting, wants = residuals
        _, head, bias, *_ = values
        grad_loss, grad_outputs = cotangents
        grad_loss, grad_lse, grad_entropy = map(given, (grad_loss, *map(grad_outputs.get, ("lse", "entropy"))))
        if grad_loss is None and grad_lse is None and grad_entropy is None:
            return (None,) * len(values)
        gradients: list[Any]
        if waiting is not None and grad_lse is None and grad_entropy is None:
            assert grad_loss is not None
            gradients = [None if each is None else _scaled(each, grad_loss) for each in waiting]
        else:
            gradients = wants.by_place(backward(values, kept, wants, grad_loss, grad_lse, grad_entropy))
        grad_hidden, grad_head, grad_bias = gradients
        if grad_head is not None:
            grad_head = (grad_head.T if setting.is_transposed else grad_head).astype(head.dtype)
        return (grad_hidden, grad_head, None if grad_bias is None else grad_bias.astype(bias.dtype), *(None,) * 4)

    def backward(values: Any, kept: Any, wants: Any, grad_loss: Any, grad_lse: Any, grad_entropy: Any) -> list[Any]:
        hidden, head, bias, labels, _, _, divisor = values
        of_rows = row_factors(hidden.ndim - 1)
        if setting.shard is not None:
            values = [*values]
            values[3] = local_labels(setting.shard, labels, setting.ignore_index)
        arrays = _arrays(setting, values)
        if grad_loss is None:
            grad_loss = jnp.zeros(hidden.shape[:-1] if setting.mode == NONE else (), kept["lse"].dtype)
        grad_loss = share_of(grad_loss, divisor)
        is_per_row = setting.mode == NONE
        arrays.add("grad_loss", grad_loss, of_rows if is_per_row else (), per_row=is_per_row)
        add_saved(arrays, of_rows, kept, grad_lse, grad_entropy)
        results = tuple(_gradients(setting, hidden, head, bias, wants))
        numbers = (("reduction", NONE if is_per_row else SUM), *setting.numbers)
        call = Call(_OP, "linear_cross_entropy_backward", tuple(arrays.operands), results, numbers, _NAMES)
        return list(bind(call, *alike(*arrays.arrays)))

    function.defvjp(forward_rule, backward_rule, symbolic_zeros=True)
    return function


def _arrays(setting: _Setting, values: Any) -> Arrays:
    """The operands that all calls have in common."""
    hidden, head, bias, labels, weight, row_weight, _ = values
    of_rows = row_factors(hidden.ndim - 1)
    arrays = Arrays()
    arrays.add("x", hidden, (*of_rows, "d"))
    factors, axes = (("d", "v"), (1, 0)) if setting.is_transposed else (("v", "d"), None)
    arrays.add("weight", head, factors, per_row=False, axes=axes)
    arrays.add("targets", labels, (*of_rows, "v") if is_soft(labels) else of_rows)
    arrays.add("bias", bias, ("v",), per_row=False)
    arrays.add("class_weight", weight, ("v",), per_row=False)
    arrays.add("row_weight", row_weight, of_rows)
    return arrays


def _gradients(setting: _Setting, hidden: Any, head: Any, bias: Any, wants: _Wanted) -> list[Result]:
    features, classes = head.shape if setting.is_transposed else head.shape[::-1]
    results = []
    if wants.hidden:
        factors = (*row_factors(hidden.ndim - 1), "d")
        results.append(Result("grad_x", factors, shape=hidden.shape, dtype=hidden.dtype))
    if wants.head:
        dtype = setting.grad_head_dtype or head.dtype
        results.append(Result("grad_weight", ("v", "d"), per_row=False, shape=(classes, features), dtype=dtype))
    if wants.bias:
        dtype = hidden.dtype if bias.dtype == hidden.dtype else result_dtype(hidden)
        results.append(Result("grad_bias", ("v",), per_row=False, shape=(classes,), dtype=dtype))
    return results


def _scaled(gradient: Any, factor: Any) -> Any:
    """Zeros of rows that do not count stay, whatever the factor is."""
    scaled = (gradient * factor).astype(gradient.dtype)  # in float32; XLA leaves out a factor that is known to be 1
    return jnp.where(gradient == 0, gradient, scaled)


def _of_shards(setting: _Setting, shard: Shard, values: Any, names: tuple[str, ...]) -> dict[str, jax.Array]:
    """The forward with some of the classes on each device. The core would write no statistics of rows that do
    not count; here each row has a place."""
    hidden, head, bias, labels, weight, row_weight, _ = values
    moved = local_labels(shard, labels, setting.ignore_index, replaces_ignored=True)
    arrays = _arrays(setting, (hidden, head, bias, moved, weight, None, None))
    shape, factors = (*hidden.shape[:-1], STATISTICS), (*row_factors(hidden.ndim - 1), "k")
    result = Result("statistics", factors, shape=shape, dtype=result_dtype(hidden))
    merged = (("is_for_mean_logit", "mean_logit" in names), ("is_for_argmax_or_sum_sq", not _LARGEST.isdisjoint(names)))
    numbers = (("reduction", NONE), *setting.numbers, *merged)
    call = Call(_OP, "linear_cross_entropy_shard_forward", tuple(arrays.operands), (result,), numbers, _NAMES)
    (statistics,) = bind(call, *alike(*arrays.arrays))
    options = tuple(each for each in setting.options if each[0] != "workspace_limit")
    found = merge(_OP, _NAMES, shard, statistics, labels, row_weight, options, weight is not None, True, names)
    if row_weight is None:
        return found
    is_nothing = row_weight == 0
    return {
        name: jnp.where(is_nothing[..., None] if name == "lse" else is_nothing, 0, each) for name, each in found.items()
    }
