"""linear_log_prob for JAX arrays: log-probabilities of chosen tokens by a model's head, without all the logits."""

# mypy: disallow-untyped-calls=False

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from eaves._arguments import (
    LOG_PROB_OUTPUTS,
    NONE,
    LogProbOutputs,
    answers_missing,
    named_outputs,
    output_names,
    refuse_unknown,
)
from eaves.jax._linear_cross_entropy import HeadLoss, loss_of_head
from eaves.jax._loss import LossArrays
from eaves.jax._options import CLASS_DTYPES, NAMES, number_of, options_of

_OP = "linear_log_prob"


class LogProbOutput(LogProbOutputs[jax.Array], Protocol):
    """The named tuple that linear_log_prob returns with `outputs`: the log-probabilities, then these outputs in the
    order of their names."""


@answers_missing
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
    outputs: str | Sequence[str] = (),
    workspace_bytes: int | None = None,
    axis_name: str | None = None,
    **unknown: object,
) -> jax.Array | LogProbOutput:
    """The log-probability of one token for each row of `hidden`, under the softmax over a head's logits.

        log_prob = z'_t / T - log sum_v exp(z'_v / T)        with the temperature T, after the softcap

    Args:
        hidden, head, head_layout, bias, workspace_bytes, axis_name: as in linear_cross_entropy.
        tokens: a class for each row, int32 or int64.
        temperature: T, a positive number; None: 1.
        softcap, scale, ignore_index: as in linear_cross_entropy; an ignored row has log-probability 0.
        outputs: the names of more outputs, one or a sequence of them, each a number for each row: "entropy", the
            entropy of the row's softmax in nats, which has a derivative; "is_top1", whether the token has the largest
            logit; "sum_sq", "mean_logit", as in eaves.log_prob.

    Returns:
        [...], float32, or float64 for a float64 hidden. With outputs, a named tuple: first the field log_prob, then the
        outputs in the order of their names.

    Raises:
        As in cross_entropy.

    Example:
        >>> import jax.numpy as jnp, eaves.jax
        >>> hidden, head = jnp.array([[1.0, 0.0]]), jnp.zeros((4, 2))
        >>> print(eaves.jax.linear_log_prob(hidden, head, jnp.array([3])).round(4))
        [-1.3863]
    """
    if unknown:
        refuse_unknown(_OP, unknown, linear_log_prob)
    names = output_names(_OP, outputs, LOG_PROB_OUTPUTS)
    if temperature is not None:
        temperature = number_of(_OP, "temperature", temperature)
        if not (temperature > 0 and math.isfinite(1 / temperature)):
            raise ValueError(f"{_OP}: temperature is {temperature}, expected a positive number")
        scale = _tempered("scale", 1.0 if scale is None else scale, temperature)
        softcap = None if softcap is None else _tempered("softcap", softcap, temperature)
    tokens = jnp.asarray(tokens)
    if tokens.dtype not in CLASS_DTYPES:
        raise ValueError(f"{_OP}: tokens has dtype {tokens.dtype}, expected int32 or int64")
    if tokens.shape != jnp.shape(hidden)[:-1]:
        raise ValueError(
            f"{_OP}: tokens has shape {list(tokens.shape)}, expected {list(jnp.shape(hidden)[:-1])} (one for each row "
            "of hidden)"
        )
    options = options_of(_OP, ignore_index, softcap=softcap, scale=scale)
    loss = HeadLoss(
        op=_OP, options=options, outputs=tuple("argmax" if name == "is_top1" else name for name in names), mode=NONE,
        names=(*NAMES, ("targets", "tokens")), head_layout=head_layout, workspace_bytes=workspace_bytes,
    )  # fmt: skip
    output: Any = loss_of_head(loss, hidden, head, bias, LossArrays(tokens), axis_name)
    if not names:
        log_prob: jax.Array = 0 - output  # 0 for ignored rows, where -output would be -0
        return log_prob
    loss, *found = output
    if "is_top1" in names:
        place = names.index("is_top1")
        found[place] = (found[place] == tokens) & (tokens != ignore_index)
    return named_outputs("LogProbOutput", ("log_prob", *names), (0 - loss, *found))  # type: ignore[no-any-return]


def _tempered(name: str, value: Any, temperature: float) -> float:
    """A number of z', divided by the temperature."""
    number: float = number_of(_OP, name, value)
    if not number > 0:
        raise ValueError(f"{_OP}: {name} is {number}, expected a positive number")
    if number / temperature > float(np.finfo(np.float32).max):
        raise ValueError(
            f"{_OP}: {name} / temperature is {number / temperature}, expected a positive number in the range of float32"
        )
    return number / temperature
