"""What the benchmark of linear_cross_entropy declares: rows, products, data and who is called how; and its errors."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from bench_cross_entropy_test import QUICK
from eaves.bench import linear_cross_entropy_accuracy as accuracy
from eaves.bench.__main__ import main
from eaves.bench.benchmark import Mode, Provider, Request, Row, Table
from eaves.bench.harness import Harness, HarnessOptions
from eaves.bench.linear_cross_entropy import OPERATOR
from eaves.bench.protocol import Protocol
from eaves.bench.providers import Availability

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def provider(name: str) -> Provider:
    return next(each for each in OPERATOR.providers if each.name == name)


def tables_of(sweep: str, device: torch.device, dtype: str = "bf16", has_dtype: bool = True) -> list[Table]:
    return OPERATOR.tables(Request(sweep, device, dtype, has_dtype))  # type: ignore[arg-type]


def row_of(mode: Mode, data: str = "seed") -> Row:
    return next(
        table.rows[0]
        for table in tables_of("quick", CPU, "fp32")
        if table.mode == mode and table.rows[0].options["data"] == data
    )


def test_the_seed_sweep_is_the_published_table() -> None:
    (table,) = tables_of("seed", GPU)
    assert (table.title_op, table.mode, table.title_suffix) == ("lce", "fwd+bwd", "batch12288-dim4096-bf16")
    assert [row.axis_value for row in table.rows] == [2**power for power in range(10, 18)]
    assert {(row.shape["batch"], row.shape["dim"]) for row in table.rows} == {(12288, 4096)}


def test_options_are_arguments_and_titles_are_those_of_the_program() -> None:
    tables = tables_of("quick", CPU, "fp32")
    assert {key for table in tables for row in table.rows for key in row.options} == {"data"}
    ends = {table.rows[0].options["data"]: table.title_suffix.partition("-fp32")[2] for table in tables}
    assert ends == {"seed": "", "dense": "-data_dense"}


def test_flops_are_those_of_the_products_of_a_mode() -> None:
    one = 2 * 512 * 1024 * 1024
    assert [row_of(mode).flops for mode in ("fwd", "bwd", "fwd+bwd")] == [one, 2 * one, 3 * one]


def test_dense_logits_have_the_deviation_that_they_say() -> None:
    for data, deviation in (("seed", 32.0), ("dense", 1.3)):
        x, weight, _ = row_of("fwd", data).make_inputs(CPU, 2).arguments
        assert float(weight.std()) == pytest.approx(1.0, rel=0.02), "as the program's"
        assert float((x @ weight.t()).std()) == pytest.approx(deviation, rel=0.02)


def test_the_limit_is_the_products_with_the_gradient_of_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = row_of("fwd+bwd", "dense").make_inputs(CPU, 2)
    products: list[Tensor] = []
    matmul = torch.matmul

    def recording(a: Tensor, b: Tensor, *, out: Tensor | None = None) -> Tensor:
        result = matmul(a, b, out=out)
        if out is not None:
            products.append(result)
        return result

    monkeypatch.setattr(torch, "matmul", recording)
    limit = row_of("fwd+bwd", "dense").make_limit
    assert limit is not None
    limit(inputs)()
    x, weight, target = inputs.arguments
    loss = torch.nn.functional.cross_entropy(matmul(x, weight.t()), target)
    exact = torch.autograd.grad(loss, (x, weight))
    assert len(products) == 3
    for product, gradient in zip(products[1:], exact, strict=True):
        torch.testing.assert_close(product, gradient)


@pytest.mark.parametrize("name", ["eaves", "eaves-memory", "torch", "torch-chunked"])
def test_who_runs_here_agrees_with_torch(name: str) -> None:
    if name == "torch-chunked" and not hasattr(torch.nn.functional, "linear_cross_entropy"):
        pytest.skip("this PyTorch has no linear_cross_entropy")
    harness = Harness(HarnessOptions(CPU, Protocol("autograd"), repetitions=1, warm_up_ms=1))
    for mode in ("fwd", "bwd", "fwd+bwd"):
        row = row_of(mode, "dense")
        measured = harness.measure(mode, row, [provider("torch"), provider(name)], provider("torch"))
        lacking = provider(name).lacks(row)
        assert measured.columns[name].skipped == (f"not supported: {lacking}" if lacking else "")
        assert measured.columns["limit"].timing is not None


def test_only_a_backward_that_computes_again_is_measured_alone() -> None:
    alone = row_of("bwd")
    able = [each.name for each in OPERATOR.providers if not each.lacks(alone)]
    assert able == ["eaves", "torch", "torch.compile", "liger-scaled", "cut-cross-entropy"]


def pretend_installed(monkeypatch: pytest.MonkeyPatch, module: str, **names: object) -> None:
    monkeypatch.setitem(sys.modules, module.split(".")[0], SimpleNamespace())
    monkeypatch.setitem(sys.modules, module, SimpleNamespace(**names))


def test_peers_are_one_call_of_their_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def function(*arguments: Any, **_: Any) -> Tensor:
        calls.append(arguments)
        return torch.zeros(1)

    modules = {
        "liger": ("liger_kernel.ops", {"LigerFusedLinearCrossEntropyFunction": SimpleNamespace(apply=function)}),
        "liger-scaled": (
            "liger_kernel.ops.fused_linear_scaled_cross_entropy",
            {"LigerFusedLinearScaledCrossEntropyFunction": SimpleNamespace(apply=function)},
        ),
        "cut-cross-entropy": ("cut_cross_entropy", {"linear_cross_entropy": function}),
        "fla": ("fla.modules", {"FusedLinearCrossEntropyLoss": lambda: function}),
        "quack": ("quack.linear_cross_entropy", {"chunked_linear_cross_entropy": function}),
    }
    row = row_of("fwd+bwd")
    for name, (module, names) in modules.items():
        pretend_installed(monkeypatch, module, **names)
        assert Availability(GPU).installed([provider(name)]) == [provider(name)]
        calls.clear()
        x, weight, target = torch.zeros(2, 3), torch.zeros(4, 3), torch.zeros(2)
        provider(name).forward(row)(x, weight, target)
        order = (x, target, weight) if name == "fla" else (x, weight, target)
        assert [[id(argument) for argument in call[:3]] for call in calls] == [[id(tensor) for tensor in order]], name


def test_the_chunks_of_quack_are_not_as_many_rows_as_there_are_features(monkeypatch: pytest.MonkeyPatch) -> None:
    chunks: list[int] = []

    def function(*arguments: Any, chunk_size: int) -> Tensor:
        chunks.append(chunk_size)
        return torch.zeros(1)

    pretend_installed(monkeypatch, "quack.linear_cross_entropy", chunked_linear_cross_entropy=function)
    forward = provider("quack").forward(row_of("fwd+bwd"))
    for features in (64, 4096):
        forward(torch.zeros(2, features), torch.zeros(4, features), torch.zeros(2))
    assert chunks == [4096, 3072]


def test_it_is_measured_side_by_side(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    argv = ["linear_cross_entropy", *QUICK, "--provider", "eaves", "--provider", "torch", "--dtype", "fp32"]
    assert main([*argv, "--device", "cpu", "--max-bytes", "7M", "--json", str(path)]) == 0
    rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"]
    measured = [row for row in rows if row["ms"] is not None]
    assert {row["provider"] for row in measured} == {"eaves", "torch", "limit"}
    assert all(row["tflops"] > 0 and "gbps" not in row for row in measured)


def test_errors_are_those_against_float64(tmp_path: Path) -> None:
    case = accuracy.Case(20, 16, 33, 1.3)
    inputs = case.inputs(CPU)
    leaves = [each.detach().double().requires_grad_() for each in (*inputs.arguments[:2], inputs.arguments[3])]
    loss = torch.nn.functional.cross_entropy(
        torch.nn.functional.linear(leaves[0], leaves[1], leaves[2]), inputs.arguments[2]
    )
    for found, wanted in zip(accuracy.exact(inputs, True), (loss, *torch.autograd.grad(loss, leaves)), strict=True):
        torch.testing.assert_close(found, wanted.detach())
    rows = accuracy.measure(case, [provider("eaves"), provider("torch")], CPU)
    assert [row["provider"] for row in rows] == ["eaves", "torch"]
    assert all(0 < float(str(row[name])) < 0.02 for row in rows for name in accuracy.RESULTS)
    assert float(str(rows[0]["loss"])) < 1e-5
    assert accuracy.table(rows).count("\n") == 3
