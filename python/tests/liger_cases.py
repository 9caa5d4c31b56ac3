"""For tests of eaves.liger: Liger's functions on any device, its definitions, and its options any two together.

Without a GPU Triton's interpreter runs Liger's kernels. Importing this module turns it on.
"""

import importlib.util
import inspect
import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from pairwise import pairwise

if importlib.util.find_spec("liger_kernel") is None:
    pytest.skip("liger-kernel is not installed", allow_module_level=True)
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton and a kernel are imported

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ROWS, CLASSES, FEATURES = 7, 21, 8


def interpret_triton() -> None:
    """Gives Triton's interpreter two things of compiled kernels: floats as tensors, and two functions of CUDA's
    library."""
    import numpy
    import triton.language as tl
    from triton.language.extra import libdevice
    from triton.runtime import interpreter

    convert = interpreter._implicit_cvt

    def converted(argument: Any) -> Any:
        if not isinstance(argument, float):
            return convert(argument)
        handle = interpreter.TensorHandle(numpy.array([argument], numpy.float32), tl.float32)
        return tl.tensor(handle, tl.float32)

    interpreter._implicit_cvt = converted
    libdevice.tanh = lambda x: 1 - 2 / (tl.exp(2 * x) + 1)
    libdevice.rsqrt = lambda x: 1 / tl.sqrt(x)


if DEVICE.type == "cpu":
    interpret_triton()

functional = importlib.import_module("liger_kernel.transformers.functional")
chunked_loss = importlib.import_module("liger_kernel.chunked_loss")


def tensors(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows, a head, a bias, and targets of which two are -100 and one is 3."""
    torch.manual_seed(3)
    sizes = ((ROWS, FEATURES), (CLASSES, FEATURES), (CLASSES,))
    rows, head, bias = (torch.randn(size, device=DEVICE).to(dtype) for size in sizes)
    return rows, head, bias, torch.tensor([0, -100, 3, 20, -100, 7, 11], device=DEVICE)


class Results(dict[str, Any]):
    def matches(self, other: "Results", tolerance: float = 2e-5) -> None:
        assert self.keys() == other.keys()
        for name, ours in self.items():
            if ours is None or other[name] is None:
                assert ours is other[name], name
                continue
            assert ours.shape == other[name].shape, name
            torch.testing.assert_close(
                ours.double(), other[name].double(), rtol=tolerance, atol=tolerance, equal_nan=True, msg=name
            )


def step(function: Any, leaves: dict[str, Tensor | None], upstream: Tensor | float = 1.0, **options: Any) -> Results:
    """The outputs of a call and the gradients of its leaves."""
    given = {name: None if each is None else each.clone().requires_grad_() for name, each in leaves.items()}
    out = function(**given, **options)
    found = Results(vars(out)) if hasattr(out, "z_loss") else Results(loss=out)
    found["loss"].backward(upstream if isinstance(upstream, Tensor) else torch.full_like(found["loss"], upstream))
    found.update({f"gradient of {name}": each.grad for name, each in given.items() if each is not None})
    found["loss"] = found["loss"].detach()
    return found


def formula(
    input: Tensor, target: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, **options: Any
) -> Any:
    """Liger's definitions, in the dtype of the input: logits are input @ weight.T + bias, or the input."""
    logits = input if weight is None else input @ weight.T
    logits = logits if bias is None else logits + bias
    if options.get("softcap") is not None:
        logits = options["softcap"] * torch.tanh(logits / options["softcap"])
    ignore_index, class_weight = options["ignore_index"], options["ce_weight"]
    counts = target != ignore_index
    z_loss = counts * options["lse_square_scale"] * logits.logsumexp(-1).square()
    smoothing = options["label_smoothing"]
    keywords = {"ignore_index": ignore_index, "reduction": "none"}
    loss = cross_entropy(logits, target, class_weight, label_smoothing=smoothing, **keywords)
    accuracy, tokens = ((logits.argmax(-1) == target) & counts).double(), logits.argmax(-1).where(counts, -1)
    if options["reduction"] == "mean":
        z_loss = z_loss / counts.sum()
        loss = loss / (counts if class_weight is None else class_weight[target.clamp(min=0)] * counts).sum()
    loss = loss + z_loss
    if options.get("use_token_scaling"):
        scale = (-cross_entropy(logits, target, **keywords)).exp().detach()
        loss, z_loss = loss * scale, z_loss * scale
    if options["reduction"] != "none":
        loss, z_loss, accuracy = loss.sum(), z_loss.sum(), accuracy.sum() / counts.sum()
    if not options["return_z_loss"]:
        return loss
    metrics = {"z_loss": z_loss.detach(), "token_accuracy": accuracy, "predicted_tokens": tokens}
    return SimpleNamespace(loss=loss, **known(functional.CrossEntropyOutput, metrics))


def in_float64(values: dict[str, Any]) -> dict[str, Any]:
    floats = (name for name, each in values.items() if isinstance(each, Tensor) and each.is_floating_point())
    return {**values, **{name: values[name].double() for name in floats}}


def known(function: Any, options: dict[str, Any]) -> dict[str, Any]:
    """The options that this Liger has."""
    return {name: each for name, each in options.items() if name in inspect.signature(function).parameters}


def cases(*more: tuple[bool, ...]) -> list[dict[str, Any]]:
    """Options of Liger, any two together."""
    class_weight = torch.linspace(0.2, 2, CLASSES, device=DEVICE)
    return [
        {
            "reduction": reduction, "ce_weight": class_weight if is_weighted else None, "ignore_index": ignore_index,
            "lse_square_scale": z_loss, "label_smoothing": smoothing, "softcap": softcap,
            **dict.fromkeys(("return_z_loss", "return_token_accuracy", "return_predicted_tokens"), returns_all),
            **dict(zip(("use_token_scaling", "bias"), flags)),
        }
        for reduction, is_weighted, ignore_index, z_loss, smoothing, softcap, returns_all, *flags in pairwise(
            ("mean", "sum", "none"), (True, False), (-100, 3), (0.03, 0.0), (0.0, 0.2), (3.0, None),
            (True, False), *more
        )
    ]  # fmt: skip


def without_absent(expected: Results, function: Any, names: tuple[str, ...]) -> Results:
    for name in names:
        if f"return_{name}" not in inspect.signature(function).parameters:
            expected.pop(name, None)
    return expected
