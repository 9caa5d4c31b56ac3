"""linear_kl_div for JAX arrays: the divergence of a student's head from its teacher, without all the logits."""

# mypy: disallow-untyped-calls=False

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from eaves._arguments import (
    KL_DIV_OUTPUTS,
    NONE,
    KlDivOutputs,
    answers_missing,
    check_teacher_options,
    check_temperature_of_top_k,
    output_names,
    reduction_of,
    refuse_unknown,
)
from eaves.jax import _reductions
from eaves.jax._call import Operand, Result, Wanted, call_core, row_factors, vary, varying
from eaves.jax._divergence import DIVERGENCES, RESTS, TEACHERS, Divergence, Settings
from eaves.jax._linear_cross_entropy import checked_head
from eaves.jax._loss import Loss, reduced_loss
from eaves.jax._options import CLASS_DTYPES, constant, normalizer_of, number_of, result_dtype, row_weight_of
from eaves.jax._shards import shard_of

_OP = "linear_kl_div"


class KlDivOutput(KlDivOutputs[jax.Array], Protocol):
    """The named tuple that linear_kl_div returns with `outputs`: the loss, then these outputs in the order of their
    names."""


@answers_missing
def linear_kl_div(
    hidden: jax.Array,
    head: jax.Array,
    teacher_hidden: jax.Array | None = None,
    teacher_head: jax.Array | None = None,
    *,
    teacher_logits: jax.Array | None = None,
    teacher_log_probs: jax.Array | None = None,
    teacher_probs: jax.Array | None = None,
    teacher_tokens: jax.Array | None = None,
    teacher_rest: str = "class",
    targets: jax.Array | None = None,
    head_layout: str = "vd",
    bias: jax.Array | None = None,
    teacher_bias: jax.Array | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    teacher_scale: float | None = None,
    teacher_softcap: float | None = None,
    temperature: jax.Array | float | None = None,
    row_weight: jax.Array | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    normalizer: jax.Array | float | None = None,
    divergence: str = "forward",
    beta: float = 0.5,
    hard_weight: float | None = None,
    outputs: str | Sequence[str] = (),
    workspace_bytes: int | None = None,
    axis_name: str | None = None,
    **unknown: object,
) -> jax.Array | KlDivOutput:
    """The divergence of a student's head from its teacher, for distillation, without ever holding all the logits.

    The student has the probabilities s = softmax(z' / T), with its logits z' after scale and softcap; the teacher has
    t:

        "forward"            KL(t || s) = sum_v t_v * (log t_v - log s_v)
        "reverse"            KL(s || t)
        "jsd"                beta * KL(t || m) + (1 - beta) * KL(s || m),  m = beta * t + (1 - beta) * s
        "total_variation"    sum_v |s_v - t_v| / 2

    Args:
        hidden: the student's hidden states, [..., D]; float16, bfloat16, float32 or float64.
        head: [V, D], or [D, V] with head_layout="dv", in the dtype of hidden.
        teacher_hidden, teacher_head: the teacher's hidden states and head, [..., E] and [V, E] (or [E, V]), in a dtype
            of their own.
        teacher_logits, teacher_log_probs, teacher_probs: numbers of each class in place of the teacher's head,
            [..., V], of any floating-point type. T divides them as logits, including log-probabilities and the
            logarithms of probabilities (for a top K see teacher_rest).
        teacher_tokens: the teacher's top K tokens, [..., K], int32 or int64, each at most once in a row (otherwise the
            row's result is undefined). teacher_log_probs are then the log-probabilities of these tokens, [..., K]. A
            token below 0, or a log-probability of -inf, is padding; a row of padding alone has divergence 0.
        teacher_rest: how the probability outside of the top K counts. "class": as one more class of both.
            "renormalize": teacher and student each add up to 1 over the K. "zero": only the teacher does, and is 0
            elsewhere; "reverse" is refused. "ignore": the sum over the K of both as they are, which may be negative.
            "class" and "ignore" take no temperature other than 1, because the rest at another temperature is unknown:
            pass log-probabilities served at the temperature T and scale=1/T (with a softcap c also softcap=c/T).
            "renormalize" and "zero" take any temperature.
        targets: None, or a class for each row. They are compared with ignore_index, and are the classes of the hard
            loss.
        bias, teacher_bias: [V], in the dtype of the hidden states or float32.
        scale, softcap, teacher_scale, teacher_softcap: like scale and softcap of linear_cross_entropy. The teacher's
            two need teacher_hidden or teacher_logits; teacher_bias needs teacher_hidden.
        temperature: T, a positive number; or an array with one number for each row, the shape of hidden without D, with
            axes that may be 1 or missing at the end; None: 1.
        row_weight, ignore_index, reduction, normalizer: as in linear_cross_entropy.
        beta: from 0 to 1, for "jsd", the teacher's weight. At the limits it selects another divergence: 0 is "forward",
            1 is "reverse".
        hard_weight: None, or a number. A row's loss is then its divergence + hard_weight times the cross entropy of its
            target, which the temperature does not divide.
        outputs: the names of more outputs, one or a sequence of them, each a number for each row: "divergence" and
            "hard_loss", without row_weight; "entropy" of s; "lse" of z' / T; the constant "teacher_lse", not with a top
            K.
        workspace_bytes: the scratch memory that sets the size of the chunks; None: 512 MiB on a GPU, 32 MiB on the CPU.
        axis_name: as in linear_cross_entropy: head, bias, teacher_head, teacher_bias, and teacher values of [..., V]
            have this device's classes.

    Returns:
        The loss: float32, or float64 for a float64 hidden. With outputs, a named tuple: the loss, then the outputs in
        the order of their names. Ignored rows and rows of weight 0 have 0 everywhere.

    Raises:
        As in cross_entropy. A target that is no class makes the loss NaN.

    With "mean" and "sum" the gradients are computed with the loss: four matrix products, three with a frozen head. With
    "none", and for a gradient of an output, the backward computes the logits again. The teacher has no derivative.

    Example:
        >>> import jax.numpy as jnp, eaves.jax
        >>> hidden, teacher_hidden = jnp.array([[1.0, 0.0], [0.0, 2.0]]), jnp.eye(2, 3)
        >>> head, teacher_head = jnp.array([[2.0, 0.0], [0.0, 0.5], [-1.0, 0.0]]), 2 * jnp.eye(3)
        >>> loss = eaves.jax.linear_kl_div(hidden, head, teacher_hidden, teacher_head, temperature=2.0)
        >>> print(f"{loss:.4f}")
        0.0249
    """
    if unknown:
        refuse_unknown(_OP, unknown, linear_kl_div)
    hidden, head, bias = checked_head(_OP, hidden, head, bias, head_layout)
    _check_dtypes(hidden, head, bias)
    mode, names = reduction_of(_OP, reduction), output_names(_OP, outputs, KL_DIV_OUTPUTS)
    rows, dtype, classes = hidden.shape[:-1], result_dtype(hidden), head.shape[head_layout.index("v")]
    bias = None if bias is None else _of_shape("bias", bias, (classes,), "one per class")
    divergence, beta = _divergence_of(divergence, beta)
    if teacher_rest not in RESTS:
        raise ValueError(f"{_OP}: teacher_rest is {teacher_rest!r}, expected {_listed(RESTS)}")
    array_of_temperature = None
    if temperature is not None and jnp.ndim(temperature) > 0:
        array_of_temperature = _of_rows("temperature", temperature, rows).astype(dtype)
    given = (teacher_hidden, teacher_logits, teacher_log_probs, teacher_probs)
    teacher = _teacher_of(dict(zip(TEACHERS, given)), teacher_head, teacher_tokens, (*rows, classes), head_layout)
    if teacher_rest == "zero" and teacher_tokens is not None and divergence == "reverse":
        raise ValueError(
            f'{_OP}: divergence is "reverse", which is infinite if the teacher is 0 outside of its top K; expected '
            'teacher_rest="class" or "renormalize"'
        )
    if teacher_tokens is not None:
        is_one = array_of_temperature is None and _positive("temperature", temperature) == 1
        check_temperature_of_top_k(_OP, teacher_rest, is_one)
    if "teacher_lse" in names and teacher_tokens is not None:
        raise ValueError(f'{_OP}: outputs has "teacher_lse", which a top K does not determine; leave it out')
    kind = next(name for name in TEACHERS if name in teacher)
    of_teacher = {"teacher_scale": teacher_scale, "teacher_softcap": teacher_softcap}
    check_teacher_options(_OP, kind, teacher_bias=teacher_bias, **of_teacher)
    if teacher_bias is not None:
        teacher["teacher_bias"] = _of_shape("teacher_bias", teacher_bias, (classes,), "one per class")
    index = number_of(_OP, "ignore_index", ignore_index, operator.index)
    weight = row_weight_of(_OP, row_weight, rows, dtype)
    targets = _targets_of(targets, rows, hard_weight is not None or "hard_loss" in names)
    settings = Settings(
        divergence=divergence, beta=beta, teacher=kind, rest=teacher_rest if teacher_tokens is not None else "",
        temperature=_positive("temperature", temperature) if array_of_temperature is None else None,
        scale=_positive("scale", scale), teacher_scale=_positive("teacher_scale", teacher_scale),
        softcap=None if softcap is None else _positive("softcap", softcap),
        teacher_softcap=None if teacher_softcap is None else _positive("teacher_softcap", teacher_softcap),
        is_transposed=head_layout == "dv", axis_name=axis_name, limit=_limit_of(workspace_bytes),
    )  # fmt: skip
    shard = shard_of(_OP, axis_name, "head", head, classes)
    loss = _Loss(
        op=_OP, options=(), outputs=names, mode=mode, shard=shard, settings=settings,
        hard_weight=_hard_weight_of(hard_weight),
    )  # fmt: skip
    more = _Arrays(
        _counts_of(targets, index, weight), targets, weight, normalizer_of(_OP, normalizer, mode, dtype),
        None if array_of_temperature is None else constant(_OP, "temperature", array_of_temperature),
        {name: constant(_OP, name, each) if name != "teacher_tokens" else each for name, each in teacher.items()},
    )  # fmt: skip
    axes = varying(hidden, head, bias, *jax.tree.leaves(more))
    found: jax.Array | KlDivOutput
    found = reduced_loss(loss, tuple(vary(each, axes) for each in (hidden, head, bias)), more, mode)
    return found


class _Arrays(NamedTuple):
    """All arrays but the student's. `counts` marks the rows that count; None: all rows."""

    counts: Any
    targets: Any
    row_weight: Any
    divisor: Any
    temperature: Any
    teacher: dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Loss(Loss):
    """linear_kl_div; its inputs are hidden states, head and bias."""

    settings: Settings
    hard_weight: float = 0.0

    differentiable = ("divergence", "hard_loss", "entropy", "lse")
    named = "KlDivOutput"

    def rows(self, inputs: Any) -> tuple[int, ...]:
        rows: tuple[int, ...] = inputs[0].shape[:-1]
        return rows

    def saved(self, more: Any) -> tuple[str, ...]:
        return ()

    def is_speed(self, inputs: Any, more: Any, wants: Wanted) -> bool:
        return self.mode != NONE

    def divisor(self, more: Any, rows: tuple[int, ...], dtype: Any) -> Any:
        if more.row_weight is None and more.counts is None:
            return jnp.asarray(math.prod(rows), dtype)
        if more.row_weight is None:
            return more.counts.sum().astype(dtype)
        return _reductions.as_divisor(_reductions.total(jnp.where(more.counts, more.row_weight, 0)))

    def forward(
        self, inputs: Any, more: Any, names: Sequence[str], wants: Wanted | None = None
    ) -> tuple[dict[str, jax.Array], list[jax.Array]]:
        """The gradients are first the gradients of the sum, rounded, and then of the mean."""
        weight = jnp.ones(self.rows(inputs), result_dtype(inputs[0])) if more.row_weight is None else more.row_weight
        upstream = {"divergence": weight, "hard_loss": self.hard_weight * weight if self.hard_weight else None}
        terms = [name for name, each in upstream.items() if each is not None]
        asked = tuple(dict.fromkeys((*terms, *(name for name in names if name != "loss"))))
        outputs, gradients = self.call(inputs, more, asked, wants, {} if wants is None else upstream)
        loss = outputs["divergence"]
        if self.hard_weight:
            loss += self.hard_weight * outputs["hard_loss"]
        outputs["loss"] = loss if more.row_weight is None else jnp.where(more.counts, more.row_weight * loss, 0)
        if "lse" in outputs:
            outputs["lse"] = outputs["lse"][..., None]
        if more.divisor is not None and gradients:
            share = _reductions.share_of(jnp.ones((), weight.dtype), more.divisor)
            gradients = [each * share for each in gradients]
        return outputs, gradients

    def backward(
        self, inputs: Any, more: Any, kept: dict[str, Any], wants: Wanted, upstream: Sequence[Any]
    ) -> list[Any]:
        grad_loss, *of_outputs = upstream
        factors = dict(zip(self.differentiable, of_outputs))
        if grad_loss is not None:
            rows, dtype = self.rows(inputs), result_dtype(inputs[0])
            share = jnp.broadcast_to(_reductions.share_of(grad_loss, more.divisor), rows).astype(dtype)
            share = share if more.row_weight is None else share * more.row_weight
            for name, factor in (("divergence", 1.0), ("hard_loss", self.hard_weight)):
                if factor:
                    factors[name] = factor * share + (0 if factors[name] is None else factors[name])
        return wants.by_place(self.call(inputs, more, (), wants, factors)[1])

    def call(
        self, inputs: Any, more: Any, names: tuple[str, ...], wants: Wanted | None, upstream: dict[str, Any]
    ) -> tuple[dict[str, Any], list[Any]]:
        """The outputs of the rows by name, and the wanted gradients."""
        hidden, head, bias = inputs
        rows, dtype = self.rows(inputs), jnp.dtype(result_dtype(hidden))
        of_rows = row_factors(len(rows))
        layout, of_teacher = (("d", "v"), ("e", "v")) if self.settings.is_transposed else (("v", "d"), ("v", "e"))
        of_class = {"teacher_logits": "v", "teacher_log_probs": "k" if self.settings.rest else "v"}
        of_class |= {"teacher_probs": "v", "teacher_tokens": "k", "teacher_hidden": "e"}
        arrays = {
            Operand("hidden", (*of_rows, "d")): hidden,
            Operand("head", layout, per_row=False): head,
            Operand("bias", ("v",), per_row=False): bias,
            Operand("counts", of_rows): more.counts,
            Operand("targets", of_rows): more.targets if {"hard_loss"} & {*names, *upstream} else None,
            Operand("temperature", of_rows): more.temperature,
            Operand("teacher_head", of_teacher, per_row=False): more.teacher.get("teacher_head"),
            Operand("teacher_bias", ("v",), per_row=False): more.teacher.get("teacher_bias"),
        }
        arrays |= {Operand(name, (*of_rows, axis)): more.teacher.get(name) for name, axis in of_class.items()}
        arrays |= {Operand(f"upstream_{name}", of_rows): each for name, each in upstream.items()}
        results = [Result(name, of_rows, shape=rows, dtype=dtype) for name in names]
        wanted = (False, False, False) if wants is None else wants.each
        places = (("hidden", (*of_rows, "d")), ("head", layout), ("bias", ("v",)))
        results += [
            Result(f"grad_{name}", factors, per_row=name == "hidden", shape=of.shape, dtype=dtype)
            for (name, factors), of, is_wanted in zip(places, inputs, wanted)
            if is_wanted
        ]
        if not results:
            return {}, []
        if self.settings.axis_name is None:
            found = call_core(_OP, _OP, arrays, results, Divergence, settings=self.settings)
        else:  # the sums over the axis are equal on all devices, and no array is cut further
            present = {operand: array for operand, array in arrays.items() if array is not None}
            own = Divergence(_OP, _OP, tuple(present), tuple(results), settings=self.settings)
            found = own.run(*present.values())
        return dict(zip(names, found)), list(found[len(names) :])


# ------------------------------------------------------------------------------------------------------------ arguments


def _check_dtypes(hidden: Any, head: Any, bias: Any, whose: str = "") -> None:
    if hidden.dtype not in (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64):
        raise ValueError(f"{_OP}: {whose}hidden has dtype {hidden.dtype}, expected a floating-point type")
    if head.dtype != hidden.dtype:
        raise ValueError(f"{_OP}: {whose}head has dtype {head.dtype}, expected {hidden.dtype} (as {whose}hidden)")
    if bias is not None and bias.dtype not in (hidden.dtype, jnp.float32):
        raise ValueError(f"{_OP}: {whose}bias has dtype {bias.dtype}, expected {hidden.dtype} or float32")


def _listed(names: Sequence[str]) -> str:
    *first, last = (f'"{name}"' for name in names)
    return f"{', '.join(first)} or {last}"


def _divergence_of(divergence: str, beta: float) -> tuple[str, float]:
    if divergence not in DIVERGENCES:
        raise ValueError(f"{_OP}: divergence is {divergence!r}, expected {_listed(DIVERGENCES)}")
    beta = number_of(_OP, "beta", beta)
    if not 0 <= beta <= 1:
        raise ValueError(f"{_OP}: beta is {beta}, expected a number from 0 to 1")
    if divergence == "jsd" and beta in (0, 1):
        return ("reverse" if beta else "forward"), beta
    return divergence, beta


def _positive(name: str, value: Any) -> float:
    """A positive number; 1 for None."""
    number: float = 1.0 if value is None else number_of(_OP, name, value)
    if not number > 0:
        raise ValueError(f"{_OP}: {name} is {number}, expected a positive number")
    return number


def _hard_weight_of(value: float | None) -> float:
    weight: float = 0.0 if value is None else number_of(_OP, "hard_weight", value)
    if weight < 0:
        raise ValueError(f"{_OP}: hard_weight is {weight}, expected a number that is not negative, or None")
    return weight


def _limit_of(workspace_bytes: int | None) -> int:
    if workspace_bytes is None:
        return (512 if jax.default_backend() == "gpu" else 32) << 20
    limit: int = number_of(_OP, "workspace_bytes", workspace_bytes, operator.index)
    if not 0 < limit < 2**63:
        raise ValueError(f"{_OP}: workspace_bytes is {limit}, expected a positive number of bytes")
    return limit


def _of_shape(name: str, array: Any, shape: tuple[int, ...], why: str) -> jax.Array:
    found: jax.Array = jnp.asarray(array)
    if found.shape != shape:
        raise ValueError(f"{_OP}: {name} has shape {list(found.shape)}, expected {list(shape)} ({why})")
    return found


def _of_rows(name: str, array: Any, rows: tuple[int, ...]) -> jax.Array:
    found = jnp.asarray(array)
    shape = (*found.shape, *(1,) * (len(rows) - found.ndim))
    if len(shape) != len(rows) or any(size not in (1, whole) for size, whole in zip(shape, rows)):
        raise ValueError(
            f"{_OP}: {name} has shape {list(found.shape)}, expected {list(rows)} (one per row), or its first axes, "
            "each of full size or of size 1"
        )
    return jnp.broadcast_to(found.reshape(shape), rows)


def _targets_of(targets: Any, rows: tuple[int, ...], is_needed: bool) -> jax.Array | None:
    if targets is None:
        if is_needed:
            raise ValueError(f"{_OP}: the hard loss needs targets; pass a class for each row")
        return None
    targets = jnp.asarray(targets)
    if targets.dtype not in CLASS_DTYPES:
        raise ValueError(f"{_OP}: targets has dtype {targets.dtype}, expected int32 or int64")
    return _of_shape("targets", targets, rows, "one per row")


def _counts_of(targets: Any, ignore_index: int, row_weight: Any) -> Any:
    parts = [] if targets is None else [targets != ignore_index]
    parts += [] if row_weight is None else [row_weight != 0]
    return functools.reduce(operator.and_, parts) if parts else None


def _teacher_of(
    given: dict[str, Any], teacher_head: Any, tokens: Any, logits: tuple[int, ...], layout: str
) -> dict[str, jax.Array]:
    """The teacher's arrays by name; `logits`: the shape of logits."""
    teacher = {name: jnp.asarray(each) for name, each in given.items() if each is not None}
    if len(teacher) != 1:
        found = " and ".join(teacher) or "nothing"
        raise ValueError(f"{_OP}: the teacher is given by {found}, expected one of {_listed(TEACHERS)}")
    (name,), (array,), rows = teacher, teacher.values(), logits[:-1]
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise ValueError(f"{_OP}: {name} has dtype {array.dtype}, expected a floating-point type")
    if (teacher_head is None) == (name == "teacher_hidden"):
        raise ValueError(
            f"{_OP}: teacher_hidden and teacher_head are expected together, without another form of the teacher"
        )
    if tokens is not None:
        if name != "teacher_log_probs":
            raise ValueError(f"{_OP}: teacher_tokens is given beside {name}, expected teacher_log_probs")
        tokens = jnp.asarray(tokens)
        if tokens.dtype not in CLASS_DTYPES:
            raise ValueError(f"{_OP}: teacher_tokens has dtype {tokens.dtype}, expected int32 or int64")
        teacher["teacher_tokens"] = tokens
        if tokens.shape[:-1] != rows or tokens.ndim == 0:
            raise ValueError(f"{_OP}: teacher_tokens has shape {list(tokens.shape)}, expected {[*rows, 'K']}")
        _of_shape(name, array, tokens.shape, "as teacher_tokens")
    elif name != "teacher_hidden":
        _of_shape(name, array, logits, "a number for each class of each row")
    else:
        if array.shape[:-1] != rows:
            raise ValueError(
                f"{_OP}: teacher_hidden has shape {list(array.shape)}, expected {[*rows, 'features']} (rows as hidden)"
            )
        _, head, _ = checked_head(_OP, array, teacher_head, None, layout, ("teacher_hidden", "teacher_head"))
        _check_dtypes(array, head, None, "teacher_")
        if head.shape[layout.index("v")] != logits[-1]:
            raise ValueError(
                f"{_OP}: teacher_head has shape {list(head.shape)}, expected {logits[-1]} classes (as head)"
            )
        teacher["teacher_head"] = head
    return teacher
