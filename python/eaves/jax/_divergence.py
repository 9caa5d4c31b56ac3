"""Divergences of a student's distribution from a teacher's, in chunks of rows, in jax.numpy.

A chunk computes logits, outputs of its rows, and gradients of the student's arrays for upstream gradients of these
outputs. A vocabulary over an axis of a mesh adds sums over that axis; nothing else differs.
"""

# mypy: disallow-untyped-calls=False

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from eaves.jax._call import Call, vary, varying
from eaves.jax._options import result_dtype

DIVERGENCES = ("forward", "reverse", "jsd", "total_variation")
RESTS = ("class", "renormalize", "zero", "ignore")
TEACHERS = ("teacher_hidden", "teacher_logits", "teacher_log_probs", "teacher_probs")

Arrays = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    divergence: str
    beta: float
    teacher: str  # the argument that gives the teacher's distribution
    rest: str
    temperature: float | None  # None: an array has a temperature for each row
    scale: float = 1.0
    softcap: float | None = None
    teacher_scale: float = 1.0
    teacher_softcap: float | None = None
    is_transposed: bool = False  # heads are [features, classes]
    axis_name: str | None = None  # the mesh axis that cuts the classes
    limit: int = 0  # bytes of a chunk


@dataclasses.dataclass(frozen=True)
class Divergence(Call):
    """A call with operands by name for Chunk; `upstream_*` are upstream gradients of rows. The results are outputs of
    rows, and gradients of the student's arrays."""

    settings: Settings | None = None

    def workspace(self, platform: str, operands: Any) -> Any:
        """None, because XLA plans the memory."""

    def run(self, *operands: Any) -> tuple[Any, ...]:
        assert self.settings is not None
        by_name = {of.name: array for of, array in zip(self.operands, operands)}
        names = tuple(result.name for result in self.results)
        rows = by_name["hidden"].shape[:-1]
        shared = {of.name: array for of, array in zip(self.operands, operands) if not of.per_row}
        of_rows = {
            name: array.reshape(-1, *array.shape[len(rows) :]) for name, array in by_name.items() if name not in shared
        }
        found = _in_chunks(self.settings, of_rows, shared, names)
        return tuple(found[result.name].reshape(result.shape).astype(result.dtype) for result in self.results)


def _in_chunks(settings: Settings, of_rows: Arrays, shared: Arrays, names: tuple[str, ...]) -> dict[str, Any]:
    hidden, head = of_rows["hidden"], shared["head"]
    rows, classes = hidden.shape[0], head.shape[1 if settings.is_transposed else 0]
    dtype, axes = result_dtype(hidden), varying(*of_rows.values(), *shared.values())
    bytes_of_row = max(1, 4 * classes * dtype.itemsize)  # student, teacher, and two intermediate numbers
    chunks = max(1, math.ceil(rows / max(1, settings.limit // bytes_of_row)))
    size = math.ceil(rows / chunks)
    of_rows = {**of_rows, "counts": of_rows.get("counts", jnp.ones(rows, bool))}

    def cut(array: Any) -> Any:
        padded = jnp.pad(array, ((0, size * chunks - rows), *((0, 0),) * (array.ndim - 1)))
        return padded.reshape(chunks, size, *array.shape[1:])

    def step(sums: Any, of_chunk: Any) -> Any:
        outputs, gradients = Chunk(settings, {**of_chunk, **shared}).compute(names)
        sums = {name: each + gradients.pop(name) for name, each in sums.items()}
        return sums, {**outputs, **gradients}

    sums = {
        name: vary(jnp.zeros(shared[name.removeprefix("grad_")].shape, dtype), axes)
        for name in names
        if name in ("grad_head", "grad_bias")
    }
    if chunks == 1:
        sums, found = step(sums, of_rows)
        return {**sums, **found}
    sums, found = jax.lax.scan(step, sums, {name: cut(array) for name, array in of_rows.items()})
    return {**sums, **{name: each.reshape(-1, *each.shape[2:])[:rows] for name, each in found.items()}}


class Chunk:
    """One chunk. Arrays are [rows, ...]; classes are this device's."""

    def __init__(self, settings: Settings, arrays: Arrays) -> None:
        self.settings, self.arrays, self.dtype = settings, arrays, result_dtype(arrays["hidden"])
        self.counts = arrays["counts"][:, None]
        self.hidden = jnp.where(self.counts, arrays["hidden"], 0)
        temperature = settings.temperature
        self.temperature = arrays["temperature"][:, None] if temperature is None else temperature
        u = _product(self.hidden, arrays["head"], settings.is_transposed).astype(self.dtype)
        if (bias := arrays.get("bias")) is not None:
            u += bias.astype(self.dtype)
        self.logits = _transformed(u, settings.scale, settings.softcap)
        self.slope = None if settings.softcap is None else _slope(u, settings.scale, settings.softcap)
        self.tempered = _transformed(u, settings.scale, settings.softcap, self.temperature)
        self.lse = self._lse(self.tempered)
        self.log_s = self.tempered - self.lse
        self.s = jnp.exp(self.log_s)

    def compute(self, names: tuple[str, ...]) -> tuple[dict[str, Any], dict[str, Any]]:
        """The outputs of the rows, and the gradients; both are 0 for rows that do not count."""
        outputs, gradients = {"lse": self.lse}, []
        for name, term in (("divergence", self._divergence), ("entropy", self._entropy), ("hard_loss", self._hard)):
            upstream = self.arrays.get(f"upstream_{name}")
            if name in names or upstream is not None:
                outputs[name], gradient, tempered = term()
                gradients.append((upstream, gradient, tempered))
        if "teacher_lse" in names:
            outputs["teacher_lse"] = self.teacher_lse
        gradients.append((self.arrays.get("upstream_lse"), lambda: self.s, True))
        found = {name: jnp.where(self.counts, outputs[name], 0)[:, 0] for name in names if name in outputs}
        return found, self._gradients(names, gradients)

    # Terms of the loss. Each returns a number for each row, a function that computes its gradient by the logits, and
    # whether these logits are tempered.

    def _divergence(self) -> Any:
        if "teacher_tokens" in self.arrays:
            rows, gradient = self._of_top_tokens()
        else:
            log_t, self.teacher_lse = self._teacher()
            terms, of_log_s = _terms(self.settings, self.log_s, log_t)
            mass = -1 if self.settings.divergence == "forward" else self._sum(of_log_s)  # -sum t, which is 1
            rows, gradient = self._sum(terms), lambda: of_log_s - self.s * mass
        if self.settings.rest != "ignore":
            rows = jnp.maximum(rows, 0)  # rounding may make it negative
        return rows, gradient, True

    def _entropy(self) -> Any:
        entropy = -self._sum(_weighted(self.s, self.log_s))
        return entropy, lambda: -_weighted(self.s, self.log_s + entropy), True

    def _hard(self) -> Any:
        """The cross entropy, without the temperature."""
        targets = jnp.where(self.counts[:, 0], self.arrays["targets"], 0)[:, None]
        lse = self.lse if self.settings.temperature == 1 else self._lse(self.logits)
        place, is_own = self._places(targets)
        target_logit = self._at(self.logits, targets)

        def gradient() -> Any:
            return _added(jnp.exp(self.logits - lse), place, jnp.where(is_own, -1.0, 0.0))

        return lse - target_logit, gradient, False

    # the teacher

    def _teacher(self) -> tuple[Any, Any]:
        """The teacher's log-probabilities, [rows, V], and the lse of its logits."""
        settings, arrays = self.settings, self.arrays
        given = arrays[settings.teacher]
        if settings.teacher == "teacher_hidden":
            given = _product(given, arrays["teacher_head"], settings.is_transposed)
        u = given.astype(self.dtype)
        if (bias := arrays.get("teacher_bias")) is not None:
            u += bias.astype(self.dtype)
        if settings.teacher == "teacher_probs":
            u = jnp.log(u)
        is_probability = settings.teacher in ("teacher_probs", "teacher_log_probs")
        scale, softcap = (1.0, None) if is_probability else (settings.teacher_scale, settings.teacher_softcap)
        z = _transformed(u, scale, softcap, self.temperature)
        lse = self._lse(z)
        return z - lse, lse

    def _of_top_tokens(self) -> tuple[Any, Any]:
        """The divergence by the teacher's top tokens, [rows, K], and their log-probabilities."""
        settings, tokens = self.settings, self.arrays["teacher_tokens"]
        log_t = self.arrays["teacher_log_probs"].astype(self.dtype)
        is_token = (tokens >= 0) & (log_t > -jnp.inf)
        has_tokens = is_token.any(1, keepdims=True)
        tokens = jnp.where(is_token, tokens, 0)
        place, is_own = self._places(tokens)
        is_own &= is_token
        log_t = jnp.where(is_token, log_t, -jnp.inf)
        of_tokens = jnp.where(is_token, self._at(self.tempered, tokens), -jnp.inf)
        rest: Any = None
        if settings.rest == "renormalize":
            log_s = of_tokens - _lse(of_tokens)
        elif settings.rest == "ignore":
            log_s = of_tokens - self.lse
        else:
            beyond = self.tempered.shape[1]
            rest = self.tempered.at[_rows_of(place), jnp.where(is_own, place, beyond)].set(-jnp.inf, mode="drop")
            rest_lse = self._lse(rest)
            log_s = jnp.append(of_tokens, rest_lse, 1) - self.lse
        if settings.rest == "class":  # at temperature 1, like "ignore"
            of_rest = jnp.log(jnp.maximum(1 - jnp.exp(log_t).sum(1, keepdims=True), jnp.finfo(self.dtype).eps))
            log_t = jnp.append(log_t, of_rest, 1)
        elif settings.rest != "ignore":
            log_t = _transformed(log_t, 1.0, None, self.temperature)
            log_t -= _lse(log_t)
        if settings.rest == "zero":
            log_t = jnp.append(log_t, jnp.full_like(log_t[:, :1], -jnp.inf), 1)
        elif settings.rest == "class":
            log_t = log_t.at[:, -1:].set(jnp.where(rest_lse == -jnp.inf, -jnp.inf, log_t[:, -1:]))
        terms, of_log_s = _terms(settings, log_s, log_t)
        if settings.divergence == "reverse" and settings.rest == "ignore":
            of_log_s += jnp.exp(log_s)  # cancels only if the probabilities add up to 1
        is_whole = settings.divergence == "forward" and settings.rest != "ignore"
        mass = -1 if is_whole else of_log_s.sum(1, keepdims=True)

        def gradient() -> Any:
            of_tokens = of_log_s[:, : tokens.shape[1]]
            if settings.rest == "renormalize":
                of_tokens, dense = of_tokens - jnp.exp(log_s) * mass, jnp.zeros_like(self.s)
            else:
                dense = -self.s * mass
            if rest is not None:
                dense += _weighted(jnp.exp(rest - _finite(rest_lse)), of_log_s[:, -1:])
            return jnp.where(has_tokens, _added(dense, place, jnp.where(is_own, of_tokens, 0)), 0)

        return jnp.where(has_tokens, terms.sum(1, keepdims=True), 0), gradient

    # the gradients

    def _gradients(self, names: tuple[str, ...], terms: Any) -> dict[str, Any]:
        settings, (head, hidden) = self.settings, (self.arrays["head"], self.hidden)
        if not {"grad_hidden", "grad_head", "grad_bias"} & set(names):
            return {}
        grad = jnp.zeros_like(self.logits)
        for is_tempered in (True, False):
            for upstream, gradient, tempered in terms:
                if upstream is not None and tempered == is_tempered:
                    grad += _weighted(upstream[:, None], gradient())
            if is_tempered and settings.temperature != 1:
                grad /= self.temperature
        if self.slope is not None:
            grad *= self.slope
        grad = jnp.where(self.counts, grad * settings.scale, 0)
        found = {}
        if "grad_bias" in names:
            found["grad_bias"] = grad.sum(0)
        grad = grad.astype(hidden.dtype)
        if "grad_hidden" in names:
            found["grad_hidden"] = _product(grad, head, not settings.is_transposed)
        if "grad_head" in names:
            factors = (hidden, grad) if settings.is_transposed else (grad, hidden)
            found["grad_head"] = _product(factors[0].T, factors[1], True)
        return found

    # sums over classes, and over their mesh axis

    def _sum(self, of_classes: Any) -> Any:
        total = of_classes.sum(1, keepdims=True)
        return total if self.settings.axis_name is None else jax.lax.psum(total, self.settings.axis_name)

    def _lse(self, z: Any) -> Any:
        return _lse(z, self.settings.axis_name)

    def _places(self, classes: Any) -> tuple[Any, Any]:
        """The places of classes, [rows, K], on this device, and whether the device has each."""
        own = self.logits.shape[1]
        first = 0 if self.settings.axis_name is None else own * jax.lax.axis_index(self.settings.axis_name)
        place = classes - first
        return jnp.clip(place, 0, own - 1), (place >= 0) & (place < own)

    def _at(self, z: Any, classes: Any) -> Any:
        """The logits of classes, [rows, K]; NaN for a number that is no class."""
        place, is_own = self._places(classes)
        found = jnp.where(is_own, jnp.take_along_axis(z, place, 1), 0)
        axis, count = self.settings.axis_name, z.shape[1]
        if axis is not None:
            found, count = jax.lax.psum(found, axis), count * jax.lax.axis_size(axis)
        return jnp.where((classes >= 0) & (classes < count), found, jnp.nan)


def _product(x: jax.Array, head: jax.Array, is_transposed: bool) -> jax.Array:
    """x @ head.T, or x @ head, in sums of at least float32."""
    dtype = result_dtype(x)
    return jax.lax.dot_general(
        x, head, (((1,), (0 if is_transposed else 1,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if x.dtype == dtype else None, preferred_element_type=dtype,
    )  # fmt: skip


def _transformed(u: Any, scale: float, softcap: float | None, temperature: Any = 1.0) -> Any:
    """Scaled and soft-capped logits, divided by the temperature. The last factor includes the temperature: XLA may
    merge two factors of a student but not of its teacher, and equal heads would then have different logits."""
    if softcap is not None:
        return softcap / temperature * jnp.tanh(u * (scale / softcap))
    factor = scale / temperature
    return u if isinstance(factor, float) and factor == 1 else u * factor


def _slope(u: Any, scale: float, softcap: float) -> Any:
    """The soft cap's slope; 1 - tanh^2 would cancel."""
    return jnp.cosh(u * (scale / softcap)) ** -2.0


def _lse(z: Any, axis_name: str | None = None) -> Any:
    """log sum exp over the classes, [rows, 1]."""
    largest = z.max(1, keepdims=True)
    largest = _finite(largest if axis_name is None else jax.lax.pmax(largest, axis_name))
    total = jnp.exp(z - largest).sum(1, keepdims=True)
    return largest + jnp.log(total if axis_name is None else jax.lax.psum(total, axis_name))


def _finite(z: Any) -> Any:
    """z with 0 in place of -inf, the maximum of a row that has no class with mass."""
    return jnp.where(z == -jnp.inf, 0, z)


def _weighted(weight: Any, number: Any) -> Any:
    """weight * number; 0 if the weight is 0, for any number."""
    return jnp.where(weight == 0, 0, weight * number)


def _rows_of(place: Any) -> Any:
    return jnp.arange(place.shape[0])[:, None]


def _added(dense: Any, place: Any, values: Any) -> Any:
    return dense.at[_rows_of(place), place].add(values.astype(dense.dtype))


def _terms(settings: Settings, log_s: Any, log_t: Any) -> tuple[Any, Any]:
    """For each class its part of the divergence, and the divergence's derivative by log s. The derivative may lack a
    multiple of s, which cancels for distributions that add up to 1."""
    s, t, beta = jnp.exp(log_s), jnp.exp(log_t), settings.beta
    ratio = jnp.where(log_s == log_t, 0, log_t - log_s)  # both may be -inf
    if settings.divergence == "forward":
        return _weighted(t, ratio), -t
    if settings.divergence == "reverse":
        of_student = _weighted(s, -ratio)
        return of_student, of_student
    if settings.divergence == "total_variation":
        return abs(s - t) / 2, s * jnp.sign(s - t) / 2
    # log m - max(log s, log t): exactly 0 for equal ones, unlike log m - log s.
    is_below = ratio <= 0
    near = jnp.log1p(jnp.where(is_below, beta, 1 - beta) * jnp.expm1(-abs(ratio)))
    of_student = (1 - beta) * _weighted(s, -jnp.where(is_below, near, near + ratio))
    of_teacher = beta * _weighted(t, -jnp.where(is_below, near - ratio, near))
    return of_student + of_teacher, of_student
