"""The list of all operators that the benchmark knows, in the order of the pages."""

from __future__ import annotations

from . import cross_entropy, linear_cross_entropy, linear_kl_div, linear_log_prob, logsumexp, lrpe_cosine

OPERATORS = (
    linear_cross_entropy.OPERATOR,
    linear_log_prob.OPERATOR,
    linear_kl_div.OPERATOR,
    cross_entropy.OPERATOR,
    logsumexp.OPERATOR,
    lrpe_cosine.OPERATOR,
)
