"""Which tracers and transforms of torch are active: torch.compile, torch.export, torch.func, autograd."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling


def uncompiled(op: str, function: Callable[..., Any], when: str = "") -> Callable[..., Any]:
    """The function, hidden from torch.compile together with all functions that it calls. Otherwise a frame that cannot
    be compiled runs as it is, but torch.compile tries again to compile each frame that it calls, and a side effect of a
    backward would be lost there."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and to load it would take seconds
        return function
    if is_compiling():
        # torch.compiler.disable breaks the graph too, but fullgraph=True would not say whose call it is.
        torch._dynamo.graph_break(msg=f"{op}: {when}{OUTSIDE}")
    disabled: Callable[..., Any] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return disabled


OUTSIDE = "this operator runs outside of the graph that torch.compile makes; leave fullgraph=True out"


# These functions are not public. If a later PyTorch lacks the first or the last, calls take the longer way and cost
# more.
is_transforming: Callable[[], bool] = getattr(torch._C, "_are_functorch_transforms_active", lambda: True)
_is_legacy_batched: Callable[[Tensor], bool] = getattr(
    torch._C._functorch, "is_legacy_batchedtensor", lambda tensor: False
)
is_in_dispatch_mode: Callable[[], int] = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 1)


def is_batched(upstream: Tensor) -> bool:
    """Whether the gradients that a backward computes may have a batch, by torch.func or by is_grads_batched."""
    return is_transforming() or _is_legacy_batched(upstream)


def is_exporting() -> bool:
    # torch.compiler.is_exporting() is True in all that PyTorch 2.11 compiles.
    return bool(getattr(torch.compiler, "_is_exporting_flag", False))


def needs_function(*tensors: Tensor) -> bool:
    """Whether a call has to go through its autograd.Function: if a derivative depends on it, and always under
    torch.compile. A program of torch.export never does, because it would keep only the forward of the Function: its
    operator has a derivative of its own, see `give_derivative`."""
    if is_compiling():
        return not is_exporting()
    return needs_autograd(*tensors)


def needs_autograd(*tensors: Tensor) -> bool:
    """Whether a call has to go through its autograd.Function because a derivative may depend on it."""
    if is_transforming() or getattr(forward_ad, "_current_level", 0) >= 0:
        return True  # under torch.func a tensor may depend on others without requires_grad
    if torch.is_grad_enabled():
        for tensor in tensors:  # any() costs more
            if tensor.requires_grad:
                return True
    return False
