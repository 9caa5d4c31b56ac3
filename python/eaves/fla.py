"""FLA (flash-linear-attention, flame) with eaves' losses, through FLA's own table of backends.

    import eaves.fla              in every process that trains, before FLA's models or after
    eaves.fla.uninstall()         as it was; FLA_EAVES=0 in the environment does the same
    with eaves.fla.install():     until the end of the block

Three functions of FLA 0.6 get a backend: fused_linear_cross_entropy_fwd and its _bwd (models with
fuse_linear_cross_entropy=True, FusedLinearCrossEntropyLoss), and cross_entropy_loss (FusedCrossEntropyLoss). FLA asks a
backend before each call; options and dtypes that eaves refuses, FLA computes itself, with a warning. FLA's `num_chunks`
is not read: the device says how much is computed at once.
"""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eaves._calls.cross_entropy import CrossEntropyCall, loss_of_logits
from eaves._replacement import INTEGRATIONS
from eaves._torch.checks import accumulator_dtype, is_distributed
from eaves._torch.options import RESULT_DTYPES, numbers_of
from eaves.functional.linear_cross_entropy import linear_cross_entropy

__all__ = ["install", "is_active", "uninstall"]

_OP = "eaves.fla"

INTEGRATIONS["fla"].check_version()
_backends = import_module("fla.backends")
_of_head = import_module("fla.modules.fused_linear_cross_entropy.ops")
_of_logits = import_module("fla.modules.fused_cross_entropy.ops")


class _Eaves(_backends.BaseBackend):  # type: ignore[misc, name-defined] # of any type
    backend_type, package_name, env_var, priority = "eaves", "eaves", "FLA_EAVES", 1
    is_installed = False

    @classmethod
    def is_available(cls) -> bool:
        return cls.is_installed


def install() -> contextlib.AbstractContextManager[Any]:
    """Lets FLA compute its losses with eaves. Importing this module does it.

    Returns:
        A context manager, whose end calls uninstall().

    Raises:
        RuntimeError: FLA_DISABLE_BACKEND_DISPATCH=1 is in the environment.
    """
    if inspect.unwrap(_of_head.fused_linear_cross_entropy_fwd) is _of_head.fused_linear_cross_entropy_fwd:
        raise RuntimeError(f"{_OP}: FLA calls no backends (FLA_DISABLE_BACKEND_DISPATCH=1); nothing was replaced")
    _Eaves.is_installed = True
    block = contextlib.ExitStack()
    block.callback(uninstall)
    return block


def uninstall() -> None:
    _Eaves.is_installed = False


def is_active() -> bool:
    """Whether FLA asks eaves before it computes a loss itself."""
    return _Eaves.is_installed and _Eaves().is_enabled()


# ------------------------------------------------------------------------------------------------------- loss of a head


class _HeadCall(NamedTuple):
    """The arguments of fused_linear_cross_entropy_fwd of FLA 0.6."""

    x: Tensor  # [N, D]
    target: Tensor  # [N]
    weight: Tensor  # [V, D]
    bias: Tensor | None = None  # [V]
    ignore_index: int = -100
    label_smoothing: float = 0.0
    logit_scale: float = 1.0
    logit_softcapping: float | None = None
    num_chunks: int = 8
    reduction: str = "mean"
    use_l2warp: bool = False
    l2_penalty_factor: float = 1e-4
    accumulate_grad_in_fp32: bool = True
    process_group: Any = None


def _fused_linear_cross_entropy_fwd(*arguments: Any, **keywords: Any) -> tuple[Tensor | None, ...]:
    """The loss, and the gradients for an upstream gradient of 1: FLA calls this in the forward of its Function."""
    call = _HeadCall(*arguments, **keywords)
    x, weight, bias = call.x.detach(), call.weight.detach(), None if call.bias is None else call.bias.detach()
    # FLA passes contiguous copies, which require no gradient; a parameter that requires none is frozen.
    is_frozen = isinstance(call.weight, torch.nn.Parameter) and not call.weight.requires_grad
    learned = [each for each in (x, bias, None if is_frozen else weight) if each is not None]
    if torch.is_inference_mode_enabled() or any(map(Tensor.is_inference, learned)):
        learned = []  # autograd takes none of them
    with torch.enable_grad():
        for each in learned:
            each.requires_grad_()
        loss = linear_cross_entropy(
            x, weight, call.target.long(), linear_bias=bias, ignore_index=call.ignore_index, reduction=call.reduction,
            label_smoothing=call.label_smoothing, scale=call.logit_scale, softcap=call.logit_softcapping,
            algorithm="speed", group=call.process_group,
            grad_weight_dtype=accumulator_dtype(x.dtype) if call.accumulate_grad_in_fp32 else None,
        )  # fmt: skip
    if learned:
        torch.autograd.backward(loss)
    # FLA saves a gradient of rows and head for the backward; that of a frozen one is an empty tensor.
    nothing = x.detach()[:0]
    gradients = [None if each is None else nothing if each.grad is None else each.grad for each in (x, weight, bias)]
    return loss.detach(), *gradients


def _check_head(*arguments: Any, **keywords: Any) -> None:
    call = _HeadCall(*arguments, **keywords)
    _check(call.label_smoothing, call.logit_scale, call.logit_softcapping, 0, call.x, call.weight)
    if call.use_l2warp:
        raise NotImplementedError(
            f"{_OP}: use_l2warp is True, expected False, because eaves does not have this penalty"
        )
    if call.reduction not in ("mean", "sum"):
        raise ValueError(f'{_OP}: reduction is {call.reduction!r}, expected "mean" or "sum"')


def _fused_linear_cross_entropy_bwd(
    do: Tensor, dx: Tensor, dw: Tensor, db: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The gradients times the upstream gradient, which is read on the device: nothing is written if it is 1. As FLA's,
    in place, but in the first of several backwards over a graph, which would find them multiplied."""
    if torch._C._autograd._get_current_graph_task_keep_graph():
        dx, dw, db = dx.clone(), dw.clone(), None if db is None else db.clone()
    factor = do.to(RESULT_DTYPES[dx.dtype])
    torch.ops.eaves.linear_cross_entropy_rescale(dx.data, dw.data, None if db is None else db.data, factor)
    return dx, dw, db


def _check_gradients(do: Tensor, dx: Tensor, dw: Tensor, db: Tensor | None) -> None:
    _check(0, None, None, 0, dx, dw)


# ------------------------------------------------------------------------------------------------------ loss of logits


class _LogitsCall(NamedTuple):
    """The arguments of cross_entropy_loss of FLA 0.6."""

    logits: Tensor  # [N, V]
    target: Tensor  # [N]
    label_smoothing: float = 0.0
    logit_scale: float = 1.0
    lse_square_scale: float = 0.0
    logit_softcapping: float | None = None
    ignore_index: int = -100
    inplace_backward: bool = False
    process_group: Any = None


def _cross_entropy_loss(*arguments: Any, **keywords: Any) -> tuple[Tensor, Tensor]:
    """The losses of the rows, and the part of them that is the z-loss."""
    call = _LogitsCall(*arguments, **keywords)
    base = call.logits if call.logits._base is None else call.logits._base
    is_writable = not base.is_leaf and call.logits.is_contiguous()  # FLA writes over its own copy of others
    out: Any = loss_of_logits(
        CrossEntropyCall(
            call.logits, call.target.long(), None, call.ignore_index, "none", call.label_smoothing,
            call.logit_softcapping, call.logit_scale, call.lse_square_scale,
            inplace_backward=call.inplace_backward and is_writable, outputs="z_loss", group=call.process_group,
            keeps_logits=True,
        )
    )  # fmt: skip
    return out.loss, out.z_loss


def _check_logits(*arguments: Any, **keywords: Any) -> None:
    call = _LogitsCall(*arguments, **keywords)
    _check(call.label_smoothing, call.logit_scale, call.logit_softcapping, call.lse_square_scale, call.logits)


# -------------------------------------------------------------------------------------------------------- registration


def _check(label_smoothing: float, scale: float | None, softcap: float | None, z_loss: float, *tensors: Tensor) -> None:
    """Raises what eaves says of a call that it does not compute."""
    numbers_of(_OP, label_smoothing, scale, softcap, z_loss)
    for each in tensors:
        if is_distributed(each) or each.device.type not in ("cpu", "cuda") or each.dtype not in RESULT_DTYPES:
            raise NotImplementedError(
                f"{_OP}: a tensor is a {type(each).__name__} of {each.dtype} on {each.device}, expected one of "
                "floating-point numbers on the CPU or a CUDA GPU"
            )


def _verifier(check: Callable[..., None]) -> Callable[..., tuple[bool, str | None]]:
    """FLA only logs a refusal, so that a warning says it too."""

    def verify(*arguments: Any, **keywords: Any) -> tuple[bool, str | None]:
        try:
            check(*arguments, **keywords)
        except (NotImplementedError, TypeError, ValueError) as error:
            warnings.warn(f"{error}; FLA computes this call itself", stacklevel=1)
            return False, str(error)
        return True, None

    return verify


for _module, _ours, _checked in (
    (_of_head, _fused_linear_cross_entropy_fwd, _check_head),
    (_of_head, _fused_linear_cross_entropy_bwd, _check_gradients),
    (_of_logits, _cross_entropy_loss, _check_logits),
):
    _function = getattr(_module, _ours.__name__[1:])
    _backends.register(_function, backend=_Eaves, verifier=_verifier(_checked))(_ours)
install()
