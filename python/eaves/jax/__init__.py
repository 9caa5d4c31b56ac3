"""eaves.jax: the operators for JAX arrays, on the CPU and on CUDA GPUs; PyTorch is not needed.

    cross_entropy(logits, targets, class_weight=None, *, reduction="mean", outputs=(), ...)
    linear_cross_entropy(hidden, head, targets, *, head_layout="vd", bias=None, class_weight=None, outputs=(), ...)
    linear_kl_div(hidden, head, teacher_hidden=None, teacher_head=None, *, divergence="forward", outputs=(), ...)
    linear_log_prob(hidden, head, tokens, *, head_layout="vd", bias=None, temperature=None, outputs=(), ...)
    logsumexp(x, axis=None, *, keepdims=False, dtype=None)
    lrpe_cosine(x, theta, *, grid=None, extra_tokens=0, offset=0, positions=None, activation="none", ...)

They work under jax.jit, jax.grad, jax.vmap, jax.checkpoint, jax.lax.scan, jax.shard_map and jax.export.
"""

from eaves.jax._cross_entropy import cross_entropy
from eaves.jax._library import TABLE, TARGETS
from eaves.jax._linear_cross_entropy import linear_cross_entropy
from eaves.jax._linear_kl_div import KlDivOutput, linear_kl_div
from eaves.jax._linear_log_prob import LogProbOutput, linear_log_prob
from eaves.jax._logsumexp import logsumexp
from eaves.jax._loss import CrossEntropyOutput
from eaves.jax._lrpe_cosine import lrpe_cosine

__all__ = [
    "TARGETS",
    "CrossEntropyOutput",
    "KlDivOutput",
    "LogProbOutput",
    "cross_entropy",
    "linear_cross_entropy",
    "linear_kl_div",
    "linear_log_prob",
    "logsumexp",
    "lrpe_cosine",
]

__version__: str = TABLE["version"]
