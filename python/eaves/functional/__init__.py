"""The public functions and modules for torch tensors. A file named after each has its signature, docstring and call."""

from eaves._parallel.shard import Shard as Shard
from eaves._torch.library import __version__ as __version__
from eaves._torch.outputs import CrossEntropyOutput as CrossEntropyOutput
from eaves._torch.outputs import KlDivOutput as KlDivOutput
from eaves._torch.outputs import LogProbOutput as LogProbOutput
from eaves.functional.cross_entropy import CrossEntropyLoss as CrossEntropyLoss
from eaves.functional.cross_entropy import cross_entropy as cross_entropy
from eaves.functional.linear_cross_entropy import LinearCrossEntropyLoss as LinearCrossEntropyLoss
from eaves.functional.linear_cross_entropy import linear_cross_entropy as linear_cross_entropy
from eaves.functional.linear_kl_div import linear_kl_div as linear_kl_div
from eaves.functional.linear_log_prob_loss import linear_log_prob_loss as linear_log_prob_loss
from eaves.functional.log_prob import linear_log_prob as linear_log_prob
from eaves.functional.log_prob import log_prob as log_prob
from eaves.functional.logsumexp import logsumexp as logsumexp
from eaves.functional.lrpe_cosine import LRPECosine as LRPECosine
from eaves.functional.lrpe_cosine import lrpe_cosine as lrpe_cosine
