"""The shared helpers of the tests of eaves.jax: JAX arrays from torch's tensors and back, so that the oracles of
comparison.py judge them too."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_NAMES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "int32": torch.int32}


def array_of(tensor: Tensor | None) -> Any:
    """The same numbers for JAX; int64 becomes int32, JAX's default."""
    if tensor is None:
        return None
    if not tensor.is_floating_point():
        return jnp.asarray(tensor.numpy().astype(np.int32))
    return jnp.asarray(tensor.float().numpy()).astype(str(tensor.dtype).removeprefix("torch."))


def tensor_of(array: Any) -> Tensor:
    dtype = _NAMES[np.dtype(array.dtype).name]
    wide = np.float32 if dtype.is_floating_point else np.int32
    return torch.from_numpy(np.array(jnp.asarray(array, wide))).to(dtype)


def assert_same_bits(actual: Any, expected: Any) -> None:
    """Asserts equal bits of two arrays, or of trees of arrays."""
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
