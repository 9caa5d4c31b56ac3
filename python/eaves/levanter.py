"""Levanter's fused cross entropy by eaves.jax: an implementation for the table of its kernels.

    IMPLEMENTATIONS["eaves"] = eaves.levanter.cross_entropy    then implementation="eaves"

The table is in levanter.kernels.pallas.fused_cross_entropy_loss.api. PyTorch is not needed.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from eaves.jax import linear_cross_entropy

__all__ = ["cross_entropy"]


def cross_entropy(
    x: jax.Array,
    labels: jax.Array,
    w: jax.Array,
    *,
    block_sizes: object = None,
    dtype: Any = jnp.float32,
    logit_soft_cap: float | None = None,
    precision: object = None,
    return_argmax: bool = False,
) -> tuple[jax.Array, ...]:
    """linear_softmax_cross_entropy_loss_reference of Levanter, without the logits.

    Args:
        x, labels, w: [B, H], [B] and [H, V].
        block_sizes, precision: accepted and ignored: eaves chooses the chunks, and multiplies float32 in float32.
        dtype: float32, or None, which is float32 too.
        logit_soft_cap: None, or the bound of the logits.
        return_argmax: whether to return the classes of the largest logits.

    Returns:
        Loss and lse, float32 [B], both with gradients, and with return_argmax the classes, int32 [B].

    Raises:
        NotImplementedError: another dtype. Levanter then tries its next implementation.
    """
    if dtype is not None and jnp.dtype(dtype) != jnp.float32:
        raise NotImplementedError(f"eaves.levanter: dtype is {jnp.dtype(dtype).name}, expected float32")
    factors = jnp.promote_types(x.dtype, w.dtype)
    out: Any = linear_cross_entropy(
        x.astype(factors), w.astype(factors), labels, head_layout="dv", softcap=logit_soft_cap, reduction="none",
        outputs=("lse", "argmax") if return_argmax else "lse",
    )  # fmt: skip
    return (out.loss, out.lse, out.argmax.astype(jnp.int32)) if return_argmax else (out.loss, out.lse)
