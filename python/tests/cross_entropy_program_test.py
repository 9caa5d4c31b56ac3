"""`eaves run cross_entropy` on a safetensors file, and eaves.cross_entropy on the same tensors: both are right.

The program is build/release/eaves of this clone, or what EAVES_PROGRAM names.
"""

import json
import os
import struct
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

import eaves
from comparison import CrossEntropyOracle, assert_within
from cross_entropy_test import each, every_output, targets_of
from layouts import random_tensor

PROGRAM = Path(os.environ.get("EAVES_PROGRAM", Path(__file__).parents[2] / "build" / "release" / "eaves"))

NAMES = {
    torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32", torch.float64: "F64",
    torch.int32: "I32", torch.int64: "I64",
}  # fmt: skip


def write_safetensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """The format: the header's length in 8 bytes, the header as JSON, the tensors one after the other."""
    header, data = {}, b""
    for name, tensor in tensors.items():
        flat = tensor.contiguous().view(-1)
        end = len(data) + flat.numel() * flat.element_size()
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [len(data), end]}
        data += bytes(flat.view(torch.uint8).tolist())
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def read_safetensors(path: Path) -> dict[str, Tensor]:
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    dtypes = {name: dtype for dtype, name in NAMES.items()}
    tensors = {}
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            flat = torch.frombuffer(bytearray(data[begin:end]), dtype=dtypes[entry["dtype"]])
            tensors[name] = flat.view(entry["shape"])
    return tensors


def run(path: Path, *options: str) -> dict[str, Tensor]:
    """What the program writes of the tensors in `path`."""
    if not PROGRAM.exists():
        pytest.skip(
            f"the program is not built: {PROGRAM.name} is not where it is expected, and EAVES_PROGRAM is not set"
        )
    output = path.with_name("out.safetensors")
    command = [PROGRAM, "run", "cross_entropy", "--input", path, "--output", output, *options]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return read_safetensors(output)


@each("dtype", [torch.bfloat16, torch.float32])
@each("reduction", ["none", "sum", "mean"])
def test_the_program_and_the_package_compute_what_the_formula_says(
    dtype: torch.dtype, reduction: str, tmp_path: Path
) -> None:
    logits = random_tensor((4, 129, 3), dtype, "cpu", 3.0)
    target = targets_of(logits, 1)
    target = torch.where(target == -100, -7, target)
    # With smoothing there are weights, or a mean logit.
    weight = torch.linspace(0.5, 2, 129).to(dtype) if dtype == torch.bfloat16 else None
    row_weight = torch.linspace(0.5, 2, 12).view(4, 3)
    path = tmp_path / "in.safetensors"
    given = {"logits": logits, "classes": target, "weights": weight, "of_rows": row_weight}
    write_safetensors(path, {name: tensor for name, tensor in given.items() if tensor is not None})
    options = {"label_smoothing": 0.1, "softcap": 20.0, "z_loss": 0.01}
    written = run(
        path,
        *("--tensor", "logits", "--target", "classes", "--row-weight", "of_rows", "--class-axis", "1"),
        *("--ignore-index", "-7", "--reduction", reduction, "--backward", "--argmax", "--entropy", "--sum-sq"),
        *(("--mean-logit",) if weight is None else ("--weight", "weights")),
        *(part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", str(value))),
    )
    oracle = CrossEntropyOracle(
        logits, target, weight, class_dim=1, ignore_index=-7, reduction=reduction, row_weight=row_weight, **options
    )
    leaf = logits.clone().requires_grad_()
    out = eaves.cross_entropy(
        leaf, target, weight, ignore_index=-7, reduction=reduction, row_weight=row_weight, **options,
        **every_output(target, weight, **options),
    )  # fmt: skip
    bounds = oracle.bounds()
    if weight is not None:
        del bounds["mean_logit"]
    for name, bound in bounds.items():
        assert_within(written[name], bound, f"the program's {name}")
        assert_within(getattr(out, name), bound, f"the package's {name}")
    assert torch.equal(written["argmax"], oracle.argmax) and torch.equal(out.argmax, oracle.argmax)
    (grad,) = torch.autograd.grad(out.loss, leaf, torch.ones_like(out.loss))
    for gradient in (written["grad_logits"], grad):
        assert_within(gradient, oracle.gradient(dtype))


def test_the_format_is_read_as_it_is_written(tmp_path: Path) -> None:
    tensors = {"x": random_tensor((2, 3), torch.bfloat16), "t": torch.arange(3), "number": torch.tensor(2.5)}
    write_safetensors(tmp_path / "file.safetensors", tensors)
    for name, tensor in read_safetensors(tmp_path / "file.safetensors").items():
        assert tensor.dtype == tensors[name].dtype and torch.equal(tensor, tensors[name])
