"""Tests of the declarations of `python benchmarks`: each operator's rows, bytes and inputs, and the calls of its
providers."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from bench import accuracy, linear_log_prob, run, verify
from bench.benchmark import Mode, Operator, Provider, Request, Row
from bench.calls import PROTOCOLS, moved
from bench.harness import CASE, Harness
from bench.operators import OPERATORS
from bench_toy import CPU, PROGRAM, small_flush  # noqa: F401

RESULTS = PROGRAM / "results"
GPU = torch.device("cuda")
BY_NAME = {operator.name: operator for operator in OPERATORS}
each_operator = pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.name)


def provider(op: str, name: str) -> Provider:
    (found,) = [each for each in BY_NAME[op].providers if each.name == name]
    return found


def row_of(op: str, mode: Mode, size: int = 0, device: str = "cpu", dtype: str = "bf16", **options: Any) -> Row:
    """Returns the first row of the quick sweep that has the options."""
    rows = BY_NAME[op].rows(Request("quick", device, dtype, has_dtype=True))
    fitting = [row for row in rows if row.mode == mode and size in (0, list(row.shape.values())[-1])]
    return next(row for row in fitting if options.items() <= row.options.items())


# ----------------------------------------------------------------------------------------------------------------- rows


def words(row: Any) -> str:
    return json.dumps([row[key] for key in CASE], sort_keys=True)


MEASURED_ON: dict[str, tuple[str, ...]] = {"linear_kl_div": ("nvidia-h200",)}  # others: files of an H100 and a CPU


@pytest.mark.parametrize(
    ("operator", "device"),
    [(each, on) for each in OPERATORS for on in MEASURED_ON.get(each.name, ("nvidia-h100-80gb-hbm3", "intel-xeon"))],
    ids=lambda each: getattr(each, "name", each),
)
def test_every_committed_row_is_declared_with_the_bytes_and_products_that_it_was_measured_by(
    operator: Operator, device: str
) -> None:
    """Covers the files of `eaves bench` and of both protocols. A file's GB/s times its ms are the bytes of the row."""
    device_type = "cuda" if device.startswith("nvidia") else "cpu"
    declared = {
        words(row.case): row
        for sweep in ("quick", "published")
        for row in operator.rows(Request(sweep, device_type, "bf16", has_dtype=False))  # type: ignore[arg-type]
    }
    for protocol in (*PROTOCOLS, "kernel"):
        name = operator.name if protocol == "kernel" else f"{operator.name}_{protocol}"
        path = RESULTS / device / f"{name}.json"
        measured = [row for row in json.loads(path.read_text())["rows"] if row["ms"]] if path.exists() else []
        # The kernels' files also have rows that only `eaves bench` measures.
        if protocol == "kernel":
            measured = [row for row in measured if words(row) in declared]
        if protocol == "autograd":
            assert measured
        for entry in measured:
            row = declared[words(entry)]
            if row.flops:
                assert entry["tflops"] * entry["ms"] * 1e9 == pytest.approx(row.flops)
            else:
                assert entry["gbps"] * entry["ms"] * 1e6 == pytest.approx(sum(moved(protocol, row)))


@each_operator
def test_the_inputs_of_a_row_are_its_bytes(operator: Operator) -> None:
    """A call's inputs hold the bytes that it reads, and each set has other numbers. (The forward keeps the lse, so a
    backward reads more.)"""
    for row in operator.rows(Request("quick", "cpu", "bf16", has_dtype=False)):
        if row.read_bytes + row.write_bytes < 2**21:
            inputs, again, other = (row.make_inputs(CPU, seed) for seed in (3, 3, 4))
            arguments = sum(each.nbytes for each in inputs.arguments)
            assert arguments == row.read_bytes if row.mode != "bwd" else arguments + inputs.grad_out.nbytes > 0
            assert all(torch.equal(a, b) for a, b in zip(inputs.arguments, again.arguments))
            assert not torch.equal(inputs.arguments[0], other.arguments[0])
            gradients = sum(each.nbytes for each in inputs.differentiable)
            assert row.gradient_bytes in (0, gradients) and (row.gradient_bytes == 0) == (row.mode == "fwd")


def test_gradients_that_arrive_are_1_where_a_loss_is_trained_and_random_alone() -> None:
    for op in ("cross_entropy", "linear_cross_entropy"):
        assert float(row_of(op, "fwd+bwd").make_inputs(CPU, 2).grad_out) == 1
        alone = [float(row_of(op, "bwd").make_inputs(CPU, seed).grad_out) for seed in (2, 4)]
        assert alone[0] != alone[1] and 1 not in alone


def test_dense_logits_have_the_deviation_that_they_say() -> None:
    for row, deviation in (
        (row_of("linear_cross_entropy", "fwd", dtype="fp32", data="spread"), 32.0),
        (row_of("linear_cross_entropy", "fwd", dtype="fp32", data="dense"), 1.3),
        (row_of("linear_log_prob", "fwd", dtype="fp32"), 1.3),
    ):
        x, weight, _ = row.make_inputs(CPU, 2).arguments
        assert float(weight.std()) == pytest.approx(1.0, rel=0.02), "as the program's"
        assert float((x @ weight.t()).std()) == pytest.approx(deviation, rel=0.02)


@pytest.mark.parametrize(
    ("op", "mode", "options", "of_student", "of_teacher"),
    [
        ("linear_cross_entropy", "fwd+bwd", {"data": "dense"}, 3, 0),
        ("linear_log_prob", "fwd+bwd", {"entropy": True}, 3, 0),
        ("linear_log_prob", "fwd", {"entropy": True}, 1, 0),
        ("linear_log_prob", "fwd+bwd", {"frozen_head": True}, 2, 0),
        ("linear_kl_div", "fwd+bwd", {"divergence": "jsd"}, 3, 1),
        ("linear_kl_div", "fwd", {"divergence": "forward"}, 1, 1),
        ("linear_kl_div", "fwd+bwd", {"top_k": 64}, 3, 0),
    ],
    ids=str,
)
def test_the_limit_is_the_products_with_the_gradient_of_the_row(
    op: str, mode: Mode, options: dict[str, Any], of_student: int, of_teacher: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = row_of(op, mode, dtype="fp32", **options)
    inputs = row.make_inputs(CPU, 2)
    products: list[Tensor] = []
    matmul = torch.matmul

    def recording(a: Tensor, b: Tensor, *, out: Tensor | None = None) -> Tensor:
        result = matmul(a, b, out=out)
        products.extend([result] if out is not None else [])
        return result

    monkeypatch.setattr(torch, "matmul", recording)
    assert row.make_limit is not None
    row.make_limit(inputs)()
    x, weight, *others = inputs.arguments
    teacher = others[:2] if of_teacher else []
    assert len(products) == of_student + of_teacher
    assert row.flops == 2 * len(weight) * (
        of_student * x.numel() + of_teacher * sum(each.numel() for each in teacher[:1])
    )
    exact = verify.results(row, provider(op, "torch").forward(row), inputs)
    del exact["out"]
    expected = [matmul(x, weight.t()), *exact.values(), *([matmul(teacher[0], teacher[1].t())] if teacher else [])]
    for product, gradient in zip(products, expected, strict=True):
        torch.testing.assert_close(product, gradient)


# --------------------------------------------------------------------------------------- providers with the same result


@each_operator
def test_who_runs_here_agrees_on_each_option(operator: Operator) -> None:
    """Runs each mode and option once, in the first row that has it, which is the smallest."""
    here = [each for each in run.installed(operator.providers, CPU) if each.name != "torch.compile"]
    rows: dict[str, Row] = {}
    for row in operator.rows(Request("quick", "cpu", "bf16", has_dtype=False)):
        if "workspace_mib" not in row.options and row.read_bytes + row.write_bytes < 2**26:
            rows.setdefault(
                json.dumps([row.mode, row.dtype, {**row.options, "grid": len(row.options.get("grid", []))}]), row
            )
    assert len(rows) >= 6
    for row in rows.values():
        inputs = row.make_inputs(CPU, 2)
        found = [verify.results(row, each.forward(row), inputs) for each in here if not each.lacks(row)]
        assert [verify.difference(each, found[0], row.tolerance) for each in found] == [""] * len(found), row.case


def test_on_a_gpu_eaves_and_torch_agree(cuda: torch.device) -> None:
    """The results of other libraries are not tested here: if one is wrong or fails, the benchmark says so in its
    cell."""
    for operator in OPERATORS:
        harness, done = Harness(cuda, "autograd", repetitions=1), set()
        both = [each for each in operator.providers if each.name in ("eaves", "torch")]
        for row in operator.rows(Request("quick", "cuda", "bf16", has_dtype=False)):
            case = json.dumps([row.mode, row.dtype, [key for key in row.options if key != "data"]])
            if case not in done:
                done.add(case)
                found = {entry["provider"]: entry.get("skipped", "") for entry in harness.measure(row, both, both[0])}
                assert found["eaves"] == found["limit"] == "", (row.case, found)
                assert "wrong" not in found["torch"], (row.case, found)


# The peers need a GPU, so a stand-in module takes the package's name.


def pretend_installed(monkeypatch: pytest.MonkeyPatch, module: str, **names: object) -> None:
    package = module.split(".")[0]
    monkeypatch.setitem(sys.modules, package, sys.modules.get(package, SimpleNamespace()))
    monkeypatch.setitem(sys.modules, module, SimpleNamespace(**names))


CE, LCE, LLP = "cross_entropy", "linear_cross_entropy", "linear_log_prob"


def test_what_providers_lack_is_named() -> None:
    def lacking(op: str, *rows: Row) -> dict[str, list[str]]:
        found = {each.name: [each.lacks(row) for row in rows] for each in BY_NAME[op].providers}
        return {name: each for name, each in found.items() if any(each)}

    assert lacking(CE, row_of(CE, "fwd+bwd", weight=True), row_of(CE, "fwd")) == {
        "liger": ["", "the forward overwrites the logits with the gradient"],
        "fla": ["no class weights", ""],
        "quack": ["no label smoothing, no softcap, no z-loss", ""],
    }
    assert lacking(LLP, *(row_of(LLP, mode, **options) for mode, options in linear_log_prob.KINDS)) == {
        "eaves-recompute": ["the same as eaves", "the same as eaves", ""],
        **{
            f"eaves-{way}": ["", "the same as eaves", "eaves takes two products"]
            for way in ("keep", "keep-half", "function")
        },
        "liger": ["no entropy", "no entropy", ""],
    }
    able = [each.name for each in BY_NAME[LCE].providers if not each.lacks(row_of(LCE, "bwd"))]
    assert able == ["eaves", "eaves-keep", "torch", "torch.compile", "liger-scaled", "cut-cross-entropy"]


def test_quack_is_its_one_kernel_for_a_sum_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def kernel(logits: Tensor, targets: Tensor, **keywords: Any) -> tuple[Tensor, Tensor]:
        """Returns the losses, and writes the gradient of their sum over the logits."""
        assert keywords == {"weight": None, "return_dx": True, "inplace_backward": True} and not logits.requires_grad
        losses = torch.nn.functional.cross_entropy(logits.float(), targets, reduction="none")
        gradient = torch.softmax(logits.float(), -1)
        gradient[torch.arange(len(targets)), targets] -= 1
        return losses, logits.copy_(gradient)

    pretend_installed(monkeypatch, "quack.cross_entropy", cross_entropy_fwd=kernel)
    providers = [provider("cross_entropy", name) for name in ("torch", "quack")]
    row = row_of("cross_entropy", "fwd+bwd", reduction="sum")
    assert all(entry["ms"] for entry in Harness(CPU, "autograd", repetitions=1).measure(row, providers, providers[0]))


def test_verls_kernel_is_loaded_without_the_packages_around_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "verl" / "utils" / "kernel"
    folder.mkdir(parents=True)
    for package in (folder.parent.parent, folder.parent, folder):
        (package / "__init__.py").write_text("import no_such_module\n")
    (folder / "kernels.py").write_text("NUMBER = 3\n")
    source = "def linear_cross_entropy():\n    from . import kernels\n    return kernels.NUMBER\n"
    (folder / "linear_cross_entropy.py").write_text(source)
    (tmp_path / "verl-0.9.1.dist-info").mkdir()
    (tmp_path / "verl-0.9.1.dist-info" / "METADATA").write_text("Name: verl\nVersion: 0.9.1\n")
    peer = provider("linear_log_prob", "verl")
    before = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "verl"}
    for name in [*before, "bench.verl_kernel"]:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    try:
        assert peer.load()() == 3
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "verl"]:
            del sys.modules[name]
        sys.modules.pop("bench.verl_kernel", None)


@pytest.mark.parametrize("data", accuracy.DATA)
def test_errors_are_those_against_float64(data: str) -> None:
    inputs = accuracy.make_inputs(20, 16, 33, data, CPU)
    entries = accuracy.measure(data, inputs, [provider(LCE, name) for name in ("eaves", "torch")])
    assert [entry["provider"] for entry in entries] == ["eaves", "torch"]
    assert all(0 < entry[name] < 0.02 for entry in entries for name in accuracy.RESULTS)
    assert all(entry[accuracy.CLASSES_LOST] == 0 for entry in entries)
    assert entries[0]["loss"] < 1e-5 and accuracy.table(entries).count("\n") == 3


def test_classes_are_lost_whose_gradient_is_off_by_more_than_half_or_nan() -> None:
    wanted = torch.tensor([[3.0, 4.0], [3.0, 4.0], [0.0, 0.0], [1.0, 0.0]])
    error = torch.tensor([[0.0, 2.5], [0.0, 2.6], [0.0, 0.0], [math.nan, 0.0]])
    assert accuracy.classes_lost(error, wanted) == 0.5
