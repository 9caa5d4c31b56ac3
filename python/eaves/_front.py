"""The operators for torch tensors, which the package imports when the first of them is asked for."""
# ruff: noqa: F401

from eaves._cross_entropy import CrossEntropyLoss, cross_entropy
from eaves._library import __version__
from eaves._linear_cross_entropy import LinearCrossEntropyLoss, linear_cross_entropy
from eaves._linear_kl_div import linear_kl_div
from eaves._log_prob import LogProbOutput, linear_log_prob, log_prob
from eaves._logsumexp import logsumexp
from eaves._loss import CrossEntropyOutput
from eaves._lrpe_cosine import LRPECosine, lrpe_cosine
