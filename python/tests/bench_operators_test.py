"""Tests of what the operators of `python benchmarks` declare: rows, bytes, inputs, and how providers are called."""

from __future__ import annotations

import json
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
    """Of the quick sweep, the first that has the options."""
    rows = BY_NAME[op].rows(Request("quick", device, dtype, has_dtype=True))
    fitting = [row for row in rows if row.mode == mode and size in (0, list(row.shape.values())[-1])]
    return next(row for row in fitting if options.items() <= row.options.items())


# ----------------------------------------------------------------------------------------------------------------- rows


def words(row: Any) -> str:
    return json.dumps([row[key] for key in CASE], sort_keys=True)


@pytest.mark.parametrize("device", ["nvidia-h100-80gb-hbm3", "intel-xeon"])
@each_operator
def test_every_committed_row_is_declared_with_the_bytes_and_products_that_it_was_measured_by(
    operator: Operator, device: str
) -> None:
    """The files of `eaves bench` and of both protocols; GB/s by ms are the bytes of a row."""
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
        if protocol == "kernel":  # which has more rows, of kernels alone
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
def test_a_named_dtype_is_the_only_one(operator: Operator) -> None:
    for device in ("cpu", "cuda"):
        assert {row.dtype for row in operator.rows(Request("quick", device, "fp16", has_dtype=True))} == {"fp16"}


@each_operator
def test_the_inputs_of_a_row_are_its_bytes(operator: Operator) -> None:
    """What a call reads is among its inputs, and each set has other numbers. (The lse is kept by the forward.)"""
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
    ("op", "mode", "options", "count"),
    [
        ("linear_cross_entropy", "fwd+bwd", {"data": "dense"}, 3),
        ("linear_log_prob", "fwd+bwd", {"entropy": True}, 3),
        ("linear_log_prob", "fwd", {"entropy": True}, 1),
        ("linear_log_prob", "fwd+bwd", {"frozen_head": True}, 2),
    ],
    ids=str,
)
def test_the_limit_is_the_products_with_the_gradient_of_the_row(
    op: str, mode: Mode, options: dict[str, Any], count: int, monkeypatch: pytest.MonkeyPatch
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
    x, weight, _ = inputs.arguments
    assert len(products) == count and row.flops == 2 * count * x.numel() * len(weight)
    exact = verify.results(row, provider(op, "torch").forward(row), inputs)
    del exact["out"]
    for product, gradient in zip(products, [matmul(x, weight.t()), *exact.values()], strict=True):
        torch.testing.assert_close(product, gradient)


# ------------------------------------------------------------------------------------------ who computes the same thing


@each_operator
def test_who_runs_here_agrees_on_each_option(operator: Operator) -> None:
    """Each mode and option once, in the first row that has it: the smallest."""
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
    """What a peer computes is not tested here: where it is wrong, or fails, its cell says so."""
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


def test_torch_compile_compiles_what_torch_calls_anew_for_each_row(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[Any] = []
    monkeypatch.setattr(torch, "compile", lambda function, **options: events.append(options) or function)
    monkeypatch.setattr(torch.compiler, "reset", lambda: events.append("reset"))
    row, x = row_of("logsumexp", "fwd"), torch.randn(3, 8)
    found = [provider("logsumexp", "torch.compile").forward(row)(x) for _ in range(2)]
    assert all(torch.equal(each, torch.logsumexp(x, -1)) for each in found)
    assert events == 2 * ["reset", {"fullgraph": True, "dynamic": False}]


def test_the_workspace_is_the_argument_of_eaves_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr("eaves.linear_cross_entropy", lambda *_, **keywords: calls.append(keywords))
    row = row_of("linear_cross_entropy", "fwd+bwd", device="cuda", workspace_mib=256)
    able = [each for each in BY_NAME["linear_cross_entropy"].providers if not each.lacks(row)]
    assert [each.name for each in able] == ["eaves"]
    able[0].forward(row)(*[torch.zeros(1)] * 3)
    assert calls == [{"linear_bias": None, "algorithm": "auto", "workspace_bytes": 256 * 2**20}]


# Peers run on GPUs alone: a stand-in has the name that the package has.


def pretend_installed(monkeypatch: pytest.MonkeyPatch, module: str, **names: object) -> None:
    package = module.split(".")[0]
    monkeypatch.setitem(sys.modules, package, sys.modules.get(package, SimpleNamespace()))
    monkeypatch.setitem(sys.modules, module, SimpleNamespace(**names))


class Recorded:
    """A function, or an autograd.Function's `apply`, that keeps its arguments and returns what it is told."""

    def __init__(self, result: Any) -> None:
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self.result = result

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        self.calls.append((arguments, keywords))
        return self.result

    apply = __call__


X, WEIGHT, TARGET = torch.zeros(2, 4096), torch.zeros(4, 4096), torch.zeros(2)
SCALED = "LigerFusedLinearScaledCrossEntropyFunction"
LIGERS_OTHERS = (None, -100, 0.0, 0.0, "mean", None, False, None, False, False, False, None, None)
CE, LCE, LLP = "cross_entropy", "linear_cross_entropy", "linear_log_prob"


@pytest.mark.parametrize(
    ("op", "name", "source", "arguments", "keywords"),
    [
        # _input, target, weight, ignore_index, lse_square_scale, label_smoothing, reduction, softcap: a float, because
        # a kernel for integers is another
        (CE, "liger", "liger_kernel.ops:LigerCrossEntropyFunction",
         (X, TARGET, WEIGHT, -100, 1e-4, 0.1, "mean", 30.0), {}),
        (CE, "quack", "quack.cross_entropy:cross_entropy", (X, TARGET),
         {"weight": WEIGHT, "reduction": "mean", "inplace_backward": True}),
        (LCE, "liger", "liger_kernel.ops:LigerFusedLinearCrossEntropyFunction", (X, WEIGHT, TARGET, None), {}),
        # chunk_mem_const is the 18th of version 0.8.5.
        (LCE, "liger-larger", "liger_kernel.ops:LigerFusedLinearCrossEntropyFunction",
         (X, WEIGHT, TARGET, None, *LIGERS_OTHERS, 4), {}),
        (LCE, "liger-scaled", f"liger_kernel.ops.fused_linear_scaled_cross_entropy:{SCALED}", (X, WEIGHT, TARGET), {}),
        (LCE, "cut-cross-entropy", "cut_cross_entropy:linear_cross_entropy", (X, WEIGHT, TARGET), {}),
        # As many rows as there are features are an error of its version 0.6.5.
        (LCE, "quack", "quack.linear_cross_entropy:chunked_linear_cross_entropy", (X, WEIGHT, TARGET),
         {"chunk_size": 3072}),
        # hidden, weight, bias, targets, temperature, chunk_size, softcap, logit_scale, outputs
        (LLP, "trl", "trl.kernels.chunked_logprob:ChunkedLogProbFunction",
         (X, WEIGHT, None, TARGET, 1.0, 32768, None, 1.0, ("entropy",)), {}),
        # hidden, weight, labels, temperature, reduction
        (LLP, "verl", "bench.verl_kernel:linear_cross_entropy", (X, WEIGHT, TARGET, 1.0, "none"), {}),
    ],
    ids=lambda value: value if isinstance(value, str) and ":" not in value else "",
)  # fmt: skip
def test_a_peer_is_one_call(
    monkeypatch: pytest.MonkeyPatch, op: str, name: str, source: str, arguments: Any, keywords: Any
) -> None:
    result = (torch.full((2,), 3.0), torch.full((2,), 3.0))
    recorded = Recorded(result if op == LLP or name == "liger" else result[0])
    module, _, attribute = source.partition(":")
    pretend_installed(monkeypatch, module, **{attribute: recorded})
    peer = provider(op, name)
    assert run.installed([peer], GPU) == [peer] and (run.installed([peer], CPU) == []) == peer.needs_gpu
    tensors = (X, TARGET, WEIGHT) if op == CE else (X, WEIGHT, TARGET)
    row = row_of(op, "fwd+bwd", **({"weight": True} if op == CE else {}))
    assert torch.equal(peer.forward(row)(*tensors).unique(), torch.tensor([3.0]))
    ((found, found_keywords),) = recorded.calls
    assert [id(each) if isinstance(each, Tensor) else each for each in found] == [
        id(each) if isinstance(each, Tensor) else each for each in arguments
    ]
    assert [type(each) for each in found] == [type(each) for each in arguments]
    assert found_keywords == keywords


def test_fla_is_its_module(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = Recorded(torch.full((), 3.0))
    modules = {"FusedCrossEntropyLoss": lambda **keywords: lambda *_: keywords,
               "FusedLinearCrossEntropyLoss": lambda: recorded}  # fmt: skip
    pretend_installed(monkeypatch, "fla.modules", **modules)
    keywords: Any = provider(CE, "fla").forward(row_of(CE, "bwd", label_smoothing=0.1))()
    assert keywords == {"reduction": "mean", "label_smoothing": 0.1, "lse_square_scale": 0.0,
                        "logit_softcapping": None, "inplace_backward": False}  # fmt: skip
    assert float(provider(LCE, "fla").forward(row_of(LCE, "fwd+bwd"))(X, WEIGHT, TARGET)) == 3
    assert [id(each) for each in recorded.calls[0][0][:3]] == [id(X), id(TARGET), id(WEIGHT)]


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
        "liger": ["no entropy", "no entropy", ""],
    }
    able = [each.name for each in BY_NAME[LCE].providers if not each.lacks(row_of(LCE, "bwd"))]
    assert able == ["eaves", "torch", "torch.compile", "liger-scaled", "cut-cross-entropy"]


def test_quack_is_its_one_kernel_for_a_sum_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def kernel(logits: Tensor, targets: Tensor, **keywords: Any) -> tuple[Tensor, Tensor]:
        """The losses, and the gradient of their sum over the logits."""
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


def test_the_chunks_of_pytorch_are_missing_before_version_2_13(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.nn, "LinearCrossEntropyOptions", raising=False)
    assert run.installed([provider("linear_cross_entropy", "torch-chunked")], CPU) == []


def test_errors_are_those_against_float64() -> None:
    inputs = accuracy.make_inputs(20, 16, 33, 1.3, CPU)
    leaves = [each.detach().double().requires_grad_() for each in (*inputs.arguments[:2], inputs.arguments[3])]
    logits = torch.nn.functional.linear(leaves[0], leaves[1], leaves[2])
    loss = torch.nn.functional.cross_entropy(logits, inputs.arguments[2])
    for found, wanted in zip(accuracy.exact(inputs, True), (loss, *torch.autograd.grad(loss, leaves)), strict=True):
        torch.testing.assert_close(found, wanted.detach())
    entries = accuracy.measure("1.3", inputs, [provider("linear_cross_entropy", name) for name in ("eaves", "torch")])
    assert [entry["provider"] for entry in entries] == ["eaves", "torch"]
    assert all(0 < entry[name] < 0.02 for entry in entries for name in accuracy.RESULTS)
    assert entries[0]["loss"] < 1e-5
    assert accuracy.table(entries).count("\n") == 3
