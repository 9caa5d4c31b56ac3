"""PyTorch's own head with a loss, torch.nn.LinearCrossEntropyLoss and F.linear_cross_entropy, computed by eaves.

    eaves.torch.install()           in every process that trains
    eaves.torch.uninstall()         undoes it
    with eaves.torch.install():     both

`eaves.torch.is_active()` is True while installed. `python -m eaves info` says whether eaves knows this PyTorch.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from eaves._arguments import answers_unknown
from eaves._replacement import Installed, replacement_of
from eaves._torch.head import check_algorithm
from eaves.functional.linear_cross_entropy import linear_cross_entropy

__all__ = ["install", "is_active", "uninstall"]

replacement = replacement_of("torch")


@answers_unknown
def install(*, algorithm: str = "auto", workspace_bytes: int | None = None, keep_bytes: int | None = None) -> Installed:
    """Replaces torch.nn.functional.linear_cross_entropy, which the module calls, by eaves.linear_cross_entropy.

    The loss of 16-bit tensors is float32, and the mean of no rows is 0. `workspace_bytes` sets the size of the chunks,
    not the chunk sizes in `options`. Their acc_policy "accurate" or "balanced" sums the head's gradient in float32.
    PyTorch's own function still computes, with a warning outside of torch.compile, a K-dimensional loss, probabilities
    that require a gradient or come with an ignore_index, and tensors on devices other than the CPU and CUDA GPUs.

    Args:
        algorithm, workspace_bytes, keep_bytes: as in eaves.linear_cross_entropy.

    Returns:
        A context manager that undoes the installation at its end. A second install sets new options.

    Raises:
        RuntimeError: eaves does not know this PyTorch, or other code has replaced the function.
        ValueError, TypeError: an option is not valid for eaves.linear_cross_entropy.
    """
    options = {"algorithm": algorithm, "workspace_bytes": workspace_bytes, "keep_bytes": keep_bytes}
    check_algorithm("linear_cross_entropy", **options)
    return replacement.install(lambda theirs: (_ours(theirs[0], options),))


uninstall, is_active = replacement.uninstall, replacement.is_active


def _ours(theirs: Callable[..., Tensor], of_install: dict[str, Any]) -> Callable[..., Tensor]:
    @functools.wraps(theirs)  # torch.compile asks the functions of torch.nn.functional for their names
    def ours(input: Tensor, linear_weight: Tensor, target: Tensor, *, options: Any = None, **keywords: Any) -> Any:
        reason = None
        if linear_weight.dim() != 2:
            reason = "a K-dimensional loss"
        elif input.device.type not in ("cpu", "cuda"):
            reason = f"a tensor on {input.device}"
        elif target.is_floating_point() and target.requires_grad:
            reason = "probabilities that require a gradient"
        elif target.is_floating_point() and keywords.get("ignore_index") is not None:
            reason = "probabilities with an ignore_index"
        if reason:
            if not torch.compiler.is_compiling():
                warnings.warn(f"eaves.torch: PyTorch's own function computes this loss, of {reason}", stacklevel=2)
            return theirs(input, linear_weight, target, options=options, **keywords)
        if target.dtype == torch.uint8:
            target = target.long()
        is_wide = options is not None and options.acc_policy in ("accurate", "balanced")
        if not is_wide or input.dtype not in (torch.float16, torch.bfloat16):
            return linear_cross_entropy(input, linear_weight, target, options=options, **of_install, **keywords)
        return linear_cross_entropy(
            input, linear_weight, target, options=options, grad_weight_dtype=torch.float32, **of_install, **keywords
        )

    return ours
