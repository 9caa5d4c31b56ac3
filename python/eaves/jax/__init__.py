"""eaves.jax: the operators for JAX arrays, on the CPU and on CUDA GPUs; PyTorch is not needed.

    logsumexp(x, axis=None, *, keepdims=False, dtype=None)

They work under jax.jit, jax.grad, jax.vmap, jax.checkpoint, jax.lax.scan, jax.shard_map and jax.export.
"""

from eaves.jax._library import info
from eaves.jax._logsumexp import logsumexp

__all__ = ["logsumexp"]

__version__: str = info()["system"]["version"]
