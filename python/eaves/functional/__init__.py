"""The public functions and modules for torch tensors, each in the file of its name: signature, docstring, one call."""

from eaves._parallel.shard import Shard
from eaves._torch.library import __version__
from eaves._torch.outputs import CrossEntropyOutput, LogProbOutput
from eaves.functional.cross_entropy import CrossEntropyLoss, cross_entropy
from eaves.functional.linear_cross_entropy import LinearCrossEntropyLoss, linear_cross_entropy
from eaves.functional.linear_kl_div import linear_kl_div
from eaves.functional.log_prob import linear_log_prob, log_prob
from eaves.functional.logsumexp import logsumexp
from eaves.functional.lrpe_cosine import LRPECosine, lrpe_cosine

__all__ = [
    "CrossEntropyLoss",
    "CrossEntropyOutput",
    "LRPECosine",
    "LinearCrossEntropyLoss",
    "LogProbOutput",
    "Shard",
    "__version__",
    "cross_entropy",
    "linear_cross_entropy",
    "linear_kl_div",
    "linear_log_prob",
    "log_prob",
    "logsumexp",
    "lrpe_cosine",
]
