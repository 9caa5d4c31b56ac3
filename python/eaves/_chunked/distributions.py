"""Records that divergence.py and its callers pass around: the two distributions over the classes in a chunk of rows,
and the numbers of the rows."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from eaves._chunked.head import OverRanks

Number = Tensor | float  # a Tensor has one number for each row, [rows, 1]

RESTS = ("class", "renormalize", "zero", "ignore")


class Logits(NamedTuple):
    """One of the two distributions in a chunk. Its logits are z, with u = values + bias:

    z = softcap * tanh(scale * u / softcap) / temperature      (no softcap: scale * u / temperature)
    """

    values: Tensor  # [rows, V], float32 or float64; a teacher's may have 16 bits
    bias: Tensor | None = None  # [V]
    scale: float = 1.0
    softcap: float | None = None
    kind: str = "logits"  # a teacher also has "log_probs", u = values, and "probs", u = log(values)


class TopK(NamedTuple):
    """A teacher's likeliest tokens, prepared for the student's logits. An empty place has no probability."""

    log_t: Tensor  # [rows, K], or [rows, K + 1] with the rest as a class; in the dtype of sums
    missing: Tensor  # [rows, K], log s of a place without a class: -inf in an empty place, else NaN
    has_class: Tensor  # [rows, K]; False: an empty place, or a token that no rank has
    is_own: Tensor  # [rows, K]: a column of this rank's logits is the token
    columns: Tensor  # [rows, K], int64; a place without a column repeats the row's first one, if there is one
    first: Tensor  # [rows, 1], int64: the place of the row's first column
    rest: str  # one of RESTS

    def of_rows(self, rows: Any) -> TopK:
        """The chosen rows."""
        return TopK(*[each[rows] if isinstance(each, Tensor) else each for each in self])  # type: ignore[arg-type]


class TermsOfTopK(NamedTuple):
    """The terms of a teacher's top K in a chunk. All ranks have the same numbers, but for u."""

    u: Tensor  # [rows, K]: the student's values and bias in the columns
    outside: Tensor  # [rows]: the gradient of a class outside of the K, divided by s_v
    gradient: Tensor  # [rows, K]


class DivergenceSettings(NamedTuple):
    divergence: str  # a name in DIVERGENCES
    beta: float  # for "jsd", in ]0, 1[
    has_entropy: bool = False
    has_hard_loss: bool = False
    over_ranks: OverRanks | None = None


class RowStatistics(NamedTuple):
    """Numbers of the rows, [rows], in the dtype of sums. An lse is two numbers, [rows, 2]: the largest logit, and the
    logarithm of the sum of exp(z - largest)."""

    divergence: Tensor
    lse: Tensor  # of the student
    teacher_lse: Tensor | None  # None for a TopK
    centre: Tensor
    entropy: Tensor | None  # of the student, in nats
    hard_lse: Tensor | None  # of the student at temperature 1
    hard_loss: Tensor | None  # the student's cross entropy of the targets at temperature 1
    top_k: TermsOfTopK | None = None  # last, because _compute of kl_div.py collects every other field of all chunks


class RowFactors(NamedTuple):
    """The upstream gradients of the rows' statistics, each [rows, 1] or one number; None: no gradient."""

    divergence: Number | None
    lse: Number | None = None
    entropy: Number | None = None
    hard_loss: Number | None = None
