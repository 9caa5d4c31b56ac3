"""Tests of what `python -m eaves.bench cross_entropy` measures: tables, bytes, inputs, and what each provider calls."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from bench_toy import CPU, QUICK, small_flush  # noqa: F401
from eaves.bench.__main__ import main
from eaves.bench.benchmark import Inputs, Mode, Provider, Request, Row, Table
from eaves.bench.cross_entropy import OPERATOR
from eaves.bench.harness import Harness, HarnessOptions
from eaves.bench.protocol import Protocol
from eaves.bench.providers import Availability, TorchCompile
from eaves.bench.report import title

GPU = torch.device("cuda")
LENGTHS = [1024 << i for i in range(8)]

BATCH = 256
ALL = {"reduction": "mean", "label_smoothing": 0.1, "softcap": 30, "z_loss": 1e-4, "weight": True}


def tables_of(sweep: str, device: torch.device, dtype: str | None = None) -> list[Table]:
    return OPERATOR.tables(Request(sweep, device, dtype or "bf16", has_dtype=dtype is not None))  # type: ignore[arg-type]


def row_of(mode: Mode, classes: int = 1024, dtype: str = "bf16", **options: object) -> Row:
    """Of the quick sweep on a CPU."""
    wanted = {"reduction": "mean"} | options | ({"in_place": True} if mode == "fwd+bwd" else {})
    rows = [row for table in tables_of("quick", CPU, dtype) if table.mode == mode for row in table.rows]
    (found,) = [row for row in rows if row.axis_value == classes and dict(row.options) == wanted]
    return found


def provider(name: str) -> Provider:
    (found,) = [each for each in OPERATOR.providers if each.name == name]
    return found


# --------------------------------------------------------------------------------------------------------------- tables


def test_the_seed_sweep_is_the_published_tables() -> None:
    tables = tables_of("seed", GPU)
    assert [title(table, kind) for table in tables for kind in ("speed", "memory")] == [
        "cross_entropy-speed-fwd-batch4096-bf16-ls0.0-mean",
        "cross_entropy-memory-fwd-batch4096-bf16-ls0.0-mean",
        "cross_entropy-speed-bwd-batch4096-bf16-ls0.0-mean",
        "cross_entropy-memory-bwd-batch4096-bf16-ls0.0-mean",
    ]
    for table in tables:
        assert table.axis_name == "v" and [row.axis_value for row in table.rows] == LENGTHS
        assert [dict(row.shape) for row in table.rows] == [{"batch": 4096, "v": v} for v in LENGTHS]
        assert table.is_curve and not any(row.in_place for row in table.rows)


def test_the_quick_sweep_also_has_both_directions_in_place_a_sum_options_and_float32() -> None:
    tables = tables_of("quick", GPU)
    assert [f"{table.mode} {table.title_suffix}" for table in tables] == [
        "fwd batch4096-bf16-ls0.0-mean",
        "bwd batch4096-bf16-ls0.0-mean",
        "fwd+bwd batch4096-bf16-ls0.0-mean-in-place",
        "fwd+bwd batch4096-bf16-ls0.0-sum-in-place",
        "fwd batch4096-bf16-ls0.1-mean",
        "bwd batch4096-bf16-ls0.1-mean",
        "fwd+bwd batch4096-bf16-ls0.1-mean-in-place",
        "fwd batch4096-fp32-ls0.0-mean",
        "bwd batch4096-fp32-ls0.0-mean",
        "fwd+bwd batch4096-fp32-ls0.0-mean-in-place",
    ]
    assert [dict(row.options) for row in tables[4].rows] == [{"reduction": "mean", "label_smoothing": 0.1}, ALL]
    assert all(row.in_place == (table.mode == "fwd+bwd") for table in tables for row in table.rows)
    assert [table.dtype for table in tables_of("quick", GPU, "fp16")] == ["fp16"] * 7


def test_on_a_cpu_the_quick_sweep_has_fewer_rows_of_logits() -> None:
    assert {row.shape["batch"] for table in tables_of("quick", CPU) for row in table.rows} == {BATCH}
    assert {row.shape["batch"] for table in tables_of("seed", CPU) for row in table.rows} == {4096}


@pytest.mark.parametrize(("dtype", "element", "result"), [("bf16", 2, 4), ("fp32", 4, 4), ("fp64", 8, 8)])
def test_the_bytes_are_what_has_to_be_moved(dtype: str, element: int, result: int) -> None:
    """`element` bytes of a logit, `result` bytes of a loss and what is kept beside it, 8 bytes of a target."""
    logits, targets, loss, lse, divisor = 256 * 1024 * element, 256 * 8, result, 256 * result, result
    forward, backward, both = (row_of(mode, dtype=dtype) for mode in ("fwd", "bwd", "fwd+bwd"))
    assert (forward.read_bytes, forward.write_bytes) == (logits + targets, loss + lse + divisor)
    assert (backward.read_bytes, backward.write_bytes) == (logits + targets + loss + lse + divisor, logits)
    assert (both.read_bytes, both.write_bytes) == (logits + targets, logits + loss)
    assert [row.gradient_bytes for row in (forward, backward, both)] == [0, logits, logits]


def test_a_sum_has_no_divisor() -> None:
    logits, targets, loss = 256 * 8192 * 2, 256 * 8, 4
    row = row_of("fwd+bwd", 8192, reduction="sum")
    assert (row.read_bytes, row.write_bytes) == (logits + targets, logits + loss)


def test_class_weights_are_read_too() -> None:
    with_weights = row_of("fwd", 32768, **{key: value for key, value in ALL.items() if key != "reduction"})
    assert with_weights.read_bytes - row_of("fwd", 32768).read_bytes == 32768 * 4


def test_the_rows_that_the_program_has_too_have_its_bytes() -> None:
    """`eaves bench` wrote the file; GB/s by ms are the bytes of a row."""
    path = Path(__file__).parents[2] / "benchmarks/results/nvidia-h200/cross_entropy.json"
    if not path.exists():
        pytest.skip(f"{path.name} has not been measured yet")
    of_program = {
        json.dumps([row["mode"], row["dtype"], row["shape"], row["options"]]): row["gbps"] * row["ms"] * 1e6
        for row in json.loads(path.read_text())["rows"]
    }
    here = {
        json.dumps([table.mode, table.dtype, dict(row.shape), dict(row.options)]): row.read_bytes + row.write_bytes
        for table in tables_of("quick", GPU)
        for row in table.rows
    }
    both = of_program.keys() & here.keys()
    assert len(both) >= 24  # the published lengths by three modes
    assert {case: here[case] for case in both} == pytest.approx({case: of_program[case] for case in both})


# --------------------------------------------------------------------------------------------------------------- inputs


def test_inputs_are_normal_logits_and_targets_that_are_classes() -> None:
    inputs = row_of("fwd").make_inputs(CPU, 3)
    logits, targets = inputs.arguments
    assert logits.shape == (256, 1024) and logits.dtype == torch.bfloat16
    assert inputs.differentiable == (logits,)
    assert abs(float(logits.detach().float().std()) - 1) < 0.01
    assert targets.shape == (256,) and targets.dtype == torch.int64
    assert 0 <= int(targets.min()) < 32 and 992 <= int(targets.max()) < 1024  # 256 of them: near both ends
    for again, same in ((row_of("bwd").make_inputs(CPU, 3), True), (row_of("bwd").make_inputs(CPU, 4), False)):
        assert [torch.equal(a, b) for a, b in zip(inputs.arguments, again.arguments)] == [same, same]


def test_the_upstream_gradient_is_random_alone_and_1_together() -> None:
    alone = [row_of("bwd").make_inputs(CPU, seed).grad_out for seed in (2, 4)]
    assert all(each.shape == () and each.dtype == torch.float32 for each in alone)
    assert float(alone[0]) != float(alone[1])
    assert float(row_of("fwd+bwd").make_inputs(CPU, 2).grad_out) == 1


def test_weights_are_between_a_half_and_one_and_a_half() -> None:
    row = row_of("fwd", 32768, label_smoothing=0.1, softcap=30, z_loss=1e-4, weight=True)
    inputs = row.make_inputs(CPU, 1)
    weight = inputs.arguments[2]
    assert weight.shape == (32768,) and weight.dtype == torch.float32 and not weight.requires_grad
    assert 0.5 <= float(weight.min()) < 0.51 and 1.49 < float(weight.max()) <= 1.5


# ------------------------------------------------------------------------------------------------------------ providers


def small_inputs(options: dict[str, Any]) -> Inputs:
    generator = torch.Generator().manual_seed(1)
    arguments = [
        torch.randn(5, 7, dtype=torch.float64, generator=generator).mul_(40).requires_grad_(),
        torch.randint(7, (5,), generator=generator),
    ]
    if options.get("weight"):
        arguments.append(torch.rand(7, dtype=torch.float64, generator=generator) + 0.5)
    return Inputs(tuple(arguments), torch.ones((), dtype=torch.float64))


def exact_loss(options: dict[str, Any], logits: Tensor, targets: Tensor, weight: Tensor | None = None) -> Tensor:
    """The formula of include/eaves/cross_entropy.h, row by row."""
    losses, divisor = [], 0.0
    smoothing = options.get("label_smoothing", 0.0)
    weight = torch.ones(7, dtype=torch.float64) if weight is None else weight
    for z, t in zip(logits, targets):
        z = options["softcap"] * torch.tanh(z / options["softcap"]) if "softcap" in options else z
        lse = z.exp().sum().log()
        smooth = (weight * (lse - z)).sum() / 7
        nll = weight[t] * (lse - z[t])
        losses.append((1 - smoothing) * nll + smoothing * smooth + options.get("z_loss", 0.0) * lse**2)
        divisor += float(weight[t])
    total = torch.stack(losses).sum()
    return total / divisor if options["reduction"] == "mean" else total


@pytest.mark.parametrize(
    "options",
    [{"reduction": "mean"}, {"reduction": "sum"}, {"reduction": "mean", "label_smoothing": 0.1}, ALL,
     {"reduction": "sum", "z_loss": 1e-4}],
)  # fmt: skip
def test_torch_computes_the_formula(options: dict[str, Any]) -> None:
    row = Row(7, {"batch": 5, "v": 7}, options, 0, 0, 0, lambda device, seed: small_inputs(options))
    inputs = small_inputs(options)
    out, exact = provider("torch").forward(row)(*inputs.arguments), exact_loss(options, *inputs.arguments)
    torch.testing.assert_close(out, exact)
    for computed, wanted in zip(*(torch.autograd.grad(loss, inputs.differentiable) for loss in (out, exact))):
        torch.testing.assert_close(computed, wanted)


def called(monkeypatch: pytest.MonkeyPatch, target: str) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """The arguments of each call of the function, which then returns 3."""
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def function(*arguments: Any, **keywords: Any) -> Tensor:
        calls.append((arguments, keywords))
        return torch.tensor(3.0)

    monkeypatch.setattr(target, function, raising=False)
    return calls


@pytest.mark.parametrize("in_place", [False, True])
def test_eaves_is_one_call_of_its_function(monkeypatch: pytest.MonkeyPatch, in_place: bool) -> None:
    calls = called(monkeypatch, "eaves.cross_entropy")
    options = ALL | ({"in_place": True} if in_place else {})
    row = Row(7, {}, options, 0, 0, 0, lambda device, seed: small_inputs(options), in_place=in_place)
    arguments = small_inputs(options).arguments
    assert float(provider("eaves").forward(row)(*arguments)) == 3
    keywords = {"reduction": "mean", "label_smoothing": 0.1, "softcap": 30, "z_loss": 1e-4}
    assert calls == [(arguments, keywords | {"inplace_backward": in_place})]


def test_torch_is_one_call_of_its_function_where_it_has_all(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = called(monkeypatch, "torch.nn.functional.cross_entropy")
    logits, targets = small_inputs({}).arguments
    row = row_of("fwd", 32768, label_smoothing=0.1)
    assert float(provider("torch").forward(row)(logits, targets)) == 3
    assert calls == [((logits, targets, None), {"reduction": "mean", "label_smoothing": 0.1})]


def test_torch_compile_compiles_what_torch_calls() -> None:
    compiled = provider("torch.compile")
    assert isinstance(compiled, TorchCompile) and type(compiled._eager) is type(provider("torch"))


# Peers run on GPUs alone: here stands in for each what its package has under the same name.


def pretend_installed(monkeypatch: pytest.MonkeyPatch, module: str, **names: object) -> None:
    monkeypatch.setitem(sys.modules, module.split(".")[0], SimpleNamespace())
    monkeypatch.setitem(sys.modules, module, SimpleNamespace(**names))


@pytest.mark.parametrize("name", ["liger", "fla", "quack"])
def test_a_peer_that_is_not_installed_is_missing(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for package in ("liger_kernel", "fla", "quack"):
        monkeypatch.setitem(sys.modules, package, None)  # so that its import fails
    on_gpu, on_cpu = Availability(GPU), Availability(CPU)
    assert on_gpu.installed([provider(name)]) == on_cpu.installed([provider(name)]) == []
    assert on_cpu.missing == {name: "needs a GPU"}
    assert list(on_gpu.missing) == [name] and on_gpu.missing[name]


def test_liger_is_one_call_of_its_function(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def apply(*arguments: Any) -> tuple[Tensor, None, None, None]:
        calls.append(arguments)
        return torch.tensor(3.0), None, None, None

    pretend_installed(monkeypatch, "liger_kernel.ops", LigerCrossEntropyFunction=SimpleNamespace(apply=apply))
    options = {key: value for key, value in ALL.items() if key != "reduction"}
    row = row_of("fwd+bwd", 32768, **options)
    logits, targets, weight = small_inputs(ALL).arguments
    assert Availability(GPU).installed([provider("liger")]) == [provider("liger")]
    assert float(provider("liger").forward(row)(logits, targets, weight)) == 3
    # _input, target, weight, ignore_index, lse_square_scale, label_smoothing, reduction, softcap
    assert calls == [(logits, targets, weight, -100, 1e-4, 0.1, "mean", 30.0)]
    assert isinstance(calls[0][-1], float)  # of an integer the kernel would be compiled for an integer


def test_liger_has_no_direction_alone() -> None:
    assert provider("liger").lacks(row_of("fwd+bwd")) == ""
    for mode in ("fwd", "bwd"):
        assert provider("liger").lacks(row_of(mode)) == "the forward overwrites the logits with the gradient"


@pytest.mark.parametrize("mode", ["fwd", "bwd", "fwd+bwd"])
def test_fla_is_its_module(monkeypatch: pytest.MonkeyPatch, mode: Mode) -> None:
    pretend_installed(monkeypatch, "fla.modules", FusedCrossEntropyLoss=lambda **keywords: lambda *_: keywords)
    assert Availability(GPU).installed([provider("fla")]) == [provider("fla")]
    row = row_of(mode, 32768, label_smoothing=0.1)
    assert provider("fla").forward(row)() == {
        "reduction": "mean",
        "label_smoothing": 0.1,
        "lse_square_scale": 0.0,
        "logit_softcapping": None,
        "inplace_backward": mode == "fwd+bwd",
    }
    assert provider("fla").lacks(row) == ""
    assert provider("fla").lacks(row_of(mode, 32768, **{k: v for k, v in ALL.items() if k != "reduction"})) == (
        "no class weights"
    )


def quack_function(logits: Tensor, targets: Tensor, **keywords: Any) -> Any:
    return logits, targets, keywords


def quack_in_place(logits: Tensor, targets: Tensor, **keywords: Any) -> tuple[Tensor, Tensor]:
    """What its kernel computes: the losses, and the gradient of their sum over the logits."""
    assert keywords == {"weight": None, "return_dx": True, "inplace_backward": True} and not logits.requires_grad
    losses = torch.nn.functional.cross_entropy(logits.float(), targets, reduction="none")
    gradient = torch.softmax(logits.float(), -1)
    gradient[torch.arange(len(targets)), targets] -= 1
    return losses, logits.copy_(gradient)


@pytest.mark.parametrize("mode", ["fwd", "bwd", "fwd+bwd"])
def test_quack_is_one_call_of_its_function(monkeypatch: pytest.MonkeyPatch, mode: Mode) -> None:
    pretend_installed(monkeypatch, "quack.cross_entropy", cross_entropy=quack_function)
    assert Availability(GPU).installed([provider("quack")]) == [provider("quack")]
    logits, targets = small_inputs({}).arguments
    expected = {"weight": None, "reduction": "mean", "inplace_backward": mode == "fwd+bwd"}
    assert provider("quack").forward(row_of(mode))(logits, targets) == (logits, targets, expected)
    assert provider("quack").lacks(row_of(mode)) == ""
    smoothed = row_of(mode, 32768, **{key: value for key, value in ALL.items() if key != "reduction"})
    assert provider("quack").lacks(smoothed) == "no label smoothing, no softcap, no z-loss"


def test_quack_is_its_one_kernel_for_a_sum_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_installed(monkeypatch, "quack.cross_entropy", cross_entropy_fwd=quack_in_place)
    harness = Harness(HarnessOptions(CPU, Protocol("autograd"), repetitions=1))
    row = row_of("fwd+bwd", 8192, reduction="sum")
    columns = harness.measure("fwd+bwd", row, [provider("torch"), provider("quack")], provider("torch")).columns
    assert columns["quack"].skipped == "" and columns["quack"].timing is not None


# ---------------------------------------------------------------------------------------------------------- the program


def test_cross_entropy_is_measured_side_by_side(tmp_path: Path) -> None:
    """Rows up to 1 MiB, so one length backward and one forward more."""
    path = tmp_path / "result.json"
    argv = ["cross_entropy", *QUICK, "--provider", "eaves", "--provider", "torch", "--dtype", "bf16"]
    assert main([*argv, "--max-bytes", "1100K", "--json", str(path)]) == 0
    rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"]
    for mode, lengths in (("fwd", [1024, 2048]), ("bwd", [1024]), ("fwd+bwd", [1024])):
        for name in ("eaves", "torch", "limit"):
            measured = [row for row in rows if (row["mode"], row["provider"]) == (mode, name) and row["ms"] is not None]
            assert [row["shape"]["v"] for row in measured] == lengths, name


def test_on_a_gpu_eaves_and_torch_agree(cuda: torch.device) -> None:
    """Every mode and option once, at the smallest vocabulary that has it. What a peer computes is not tested here:
    where it is wrong, or fails, its cell says so."""
    eaves, pytorch = provider("eaves"), provider("torch")
    harness = Harness(HarnessOptions(cuda, Protocol("autograd"), repetitions=1))
    for table in tables_of("quick", cuda):
        for row in table.rows[:1] if table.is_curve else table.rows:
            columns = harness.measure(table.mode, row, [eaves, pytorch], eaves).columns
            assert [column.skipped for column in columns.values()] == ["", "", ""], (table.title_suffix, table.mode)
