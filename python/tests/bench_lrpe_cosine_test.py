"""Tests of what `python -m eaves.bench lrpe_cosine` measures: tables, bytes, inputs, and what each provider calls."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bench_toy import CPU, QUICK, small_flush  # noqa: F401
from eaves.bench.__main__ import main
from eaves.bench.benchmark import Mode, Provider, Request, Row, Table
from eaves.bench.harness import Harness, HarnessOptions
from eaves.bench.lrpe_cosine import OPERATOR
from eaves.bench.protocol import Protocol
from eaves.bench.providers import TorchCompile
from eaves.bench.report import title
from lrpe_cosine_cases import formula

GPU = torch.device("cuda")
LENGTHS = [256 << i for i in range(8)]


def tables_of(sweep: str, device: torch.device, dtype: str | None = None) -> list[Table]:
    return OPERATOR.tables(Request(sweep, device, dtype or "bf16", has_dtype=dtype is not None))  # type: ignore[arg-type]


def row_of(mode: Mode, n: int, dtype: str = "bf16", device: torch.device = GPU, **options: object) -> Row:
    """Of the quick sweep, the first that has it."""
    rows = [row for table in tables_of("quick", device, dtype) if table.mode == mode for row in table.rows]
    return next(row for row in rows if row.axis_value == n and dict(row.options) == options)


def provider(name: str) -> Provider:
    (found,) = [each for each in OPERATOR.providers if each.name == name]
    return found


# --------------------------------------------------------------------------------------------------------------- tables


def test_the_seed_sweep_is_the_published_tables() -> None:
    tables = tables_of("seed", GPU)
    sequence = [f"act_{words}-bf16" for words in ("none", "silu", "softmax-dim_-1", "softmax-dim_-2")]
    grids = [f"bf16-{axes}d-l{extra}" for axes in (1, 2, 3) for extra in (0, 10)]
    assert [title(table, kind) for table in tables for kind in ("speed", "memory")] == [
        f"{op}-{kind}-{mode}-batch12-head12-dim128-{words}"
        for op, all_words in (("lrpe_cosine", sequence), ("md_lrpe_cosine", grids))
        for words in all_words
        for mode in ("fwd", "bwd")
        for kind in ("speed", "memory")
    ]
    for table in tables:
        edges = {"2d": [16, 32, 64, 128], "3d": [4, 8, 16, 32]}
        wanted = next((each for words, each in edges.items() if words in table.title_suffix), LENGTHS)
        assert table.axis_name == "n" and [row.axis_value for row in table.rows] == wanted
        assert [dict(row.shape) for row in table.rows] == [
            {"batch": 12, "head": 12, "dim": 128, "n": n} for n in wanted
        ]
        assert table.is_curve


def test_options_are_those_that_are_not_the_defaults() -> None:
    by_title = {f"{table.mode} {table.title_suffix}": table for table in tables_of("seed", GPU)}
    shape = "batch12-head12-dim128"
    for words, options in (
        (f"{shape}-act_none-bf16", {}),
        (f"{shape}-act_silu-bf16", {"activation": "silu"}),
        (f"{shape}-act_softmax-dim_-1-bf16", {"activation": "softmax", "activation_dim": -1}),
        (f"{shape}-act_softmax-dim_-2-bf16", {"activation": "softmax", "activation_dim": -2}),
        (f"{shape}-bf16-1d-l0", {"grid": [256]}),
        (f"{shape}-bf16-2d-l10", {"grid": [16, 16], "extra_tokens": 10}),
        (f"{shape}-bf16-3d-l0", {"grid": [4, 4, 4]}),
    ):
        for mode in ("fwd", "bwd"):
            assert dict(by_title[f"{mode} {words}"].rows[0].options) == options


def test_the_quick_sweep_also_has_what_the_published_tables_leave_out() -> None:
    seed, quick = tables_of("seed", GPU), tables_of("quick", GPU)
    assert [title(table, "speed") for table in quick[: len(seed)]] == [title(table, "speed") for table in seed]
    more = quick[len(seed) :]
    assert [f"{table.mode} {table.title_suffix}" for table in more] == [
        "fwd batch12-head12-dim128-activations-bf16",
        "bwd batch12-head12-dim128-activations-bf16",
        "bwd batch12-head12-dim128-grad_theta-bf16",
        "fwd batch1-head12-dim128-bf16",
        "bwd batch1-head12-dim128-bf16",
        "fwd layouts-bf16",
        "bwd layouts-bf16",
        "fwd batch12-head12-dim128-act_none-fp32",
        "bwd batch12-head12-dim128-act_none-fp32",
    ]
    assert not {table.dtype for table in tables_of("quick", GPU, "fp16")} - {"fp16"}


def test_on_a_cpu_the_quick_sweep_is_small() -> None:
    rows = [row for table in tables_of("quick", CPU) for row in table.rows]
    assert max(row.read_bytes + row.write_bytes for row in rows) < 16 * 2**20
    assert {row.shape["batch"] for table in tables_of("seed", CPU) for row in table.rows} == {12}


@pytest.mark.parametrize(("dtype", "element", "accumulator"), [("bf16", 2, 4), ("fp32", 4, 4), ("fp64", 8, 8)])
def test_the_bytes_are_what_has_to_be_moved(dtype: str, element: int, accumulator: int) -> None:
    x, theta = 12 * 12 * 8192 * 128 * element, 12 * 128 * element
    lse = 12 * 12 * 2 * 128 * accumulator

    def moved(mode: Mode, **options: object) -> tuple[int, int, int]:
        row = row_of(mode, 8192, dtype, **options)
        return row.read_bytes, row.write_bytes, row.gradient_bytes

    sequence = {"activation": "softmax", "activation_dim": -2}
    assert moved("fwd") == moved("fwd", activation="silu") == (x + theta, 2 * x, 0)
    assert moved("fwd", **sequence) == (x + theta, 2 * x + lse, 0)
    assert moved("bwd") == (2 * x + theta, x, x)
    assert moved("bwd", activation="silu") == (3 * x + theta, x, x)
    assert moved("bwd", **sequence) == (3 * x + theta + lse, x, x)
    assert moved("bwd", grad_theta=True) == (3 * x + theta, x + theta, x + theta)


def test_the_bytes_of_grids() -> None:
    row = row_of("fwd", 16, grid=[16, 16, 16], extra_tokens=10)
    x, theta = 12 * 12 * (16**3 + 10) * 128 * 2, 12 * 42 * 2
    assert (row.read_bytes, row.write_bytes) == (x + theta, 2 * x)


def test_the_rows_that_the_program_has_too_have_its_bytes() -> None:
    """`eaves bench` wrote the file; GB/s by ms are the bytes of a row."""
    path = Path(__file__).parents[2] / "benchmarks/results/nvidia-h200/lrpe_cosine.json"
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
    assert len(both) >= 128  # the published lengths by two modes
    assert {case: here[case] for case in both} == pytest.approx({case: of_program[case] for case in both})


# ------------------------------------------------------------------------------------------------- inputs and providers


def test_inputs_are_normal_tokens_and_the_usual_angles() -> None:
    row = row_of("bwd", 512, device=CPU)
    inputs = row.make_inputs(CPU, 3)
    x, theta = inputs.arguments
    assert x.shape == (1, 12, 512, 128) and x.dtype == torch.bfloat16 and inputs.differentiable == (x,)
    assert abs(float(x.detach().float().std()) - 1) < 0.01
    assert theta.shape == (12, 128) and theta.dtype == torch.bfloat16
    assert float(theta[3, 0]) == 1 and float(theta[3, 64]) == pytest.approx(0.01, rel=1e-2)
    assert inputs.grad_out.shape == (1, 12, 512, 256)
    again = [row.make_inputs(CPU, seed).arguments[0] for seed in (3, 4)]
    assert torch.equal(again[0], x) and not torch.equal(again[1], x)
    of_theta = row_of("bwd", 256, device=CPU, grad_theta=True).make_inputs(CPU, 1)
    assert of_theta.differentiable == of_theta.arguments
    turned = row_of("fwd", 256, device=CPU, layout="bnhd").make_inputs(CPU, 1)
    assert turned.arguments[0].shape == (1, 256, 12, 128) and turned.grad_out.shape == (1, 256, 12, 256)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"activation": "silu"},
    {"activation": "relu", "layout": "bnhd"},
    {"activation": "sigmoid", "extra_tokens": 2},
    {"activation": "softmax", "activation_dim": -1, "grid": [2, 2, 2]},
    {"activation": "softmax", "activation_dim": -2, "grid": [2, 3], "extra_tokens": 2},
    {"activation": "softmax", "activation_dim": -2, "layout": "bnhd"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", ["eaves", "torch"])
def test_providers_compute_the_formula(name: str, options: dict[str, Any]) -> None:
    axes = len(options.get("grid", [1]))
    x = torch.randn((2, 8, 3, 7) if options.get("layout") == "bnhd" else (2, 3, 8, 7), requires_grad=True)
    theta = torch.linspace(1, 0.1, 3 * (7 // axes)).view(3, -1).requires_grad_()
    row = Row(8, {}, options | {"grad_theta": True}, 0, 0, 0, lambda device, seed: None)  # type: ignore[arg-type,return-value]
    results = [
        provider(name).forward(row)(x, theta),
        formula(x.double(), theta.double(), **({"layout": "bhnd"} | options)),
    ]
    upstream = torch.randn(results[0].shape)
    torch.testing.assert_close(results[0].double(), results[1], rtol=1e-4, atol=1e-5)
    grads: list[tuple[Tensor, ...]] = [torch.autograd.grad(r, (x, theta), upstream.to(r.dtype)) for r in results]
    for actual, expected in zip(*grads, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_torchs_angles_are_float32_and_its_result_is_as_x() -> None:
    row = row_of("fwd", 32768)
    x = torch.ones(1, 12, 32768, 1, dtype=torch.bfloat16)
    theta = torch.full((12, 1), 0.3, dtype=torch.bfloat16)
    out = provider("torch").forward(row)(x, theta)
    assert out.dtype == torch.bfloat16
    exact = (theta[0].double() * torch.arange(32768)).cos()
    assert float((out[0, 0, :, 0].double() - exact).abs().max()) < 0.01


def test_torch_puts_halves_together_that_are_as_x() -> None:
    class Halves(TorchDispatchMode):
        dtypes: ClassVar[list[torch.dtype]] = []

        def __torch_dispatch__(self, overload: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
            if overload == torch.ops.aten.cat.default and args[0][0].dim() == 4:
                self.dtypes.extend(half.dtype for half in args[0])
            return overload(*args, **(kwargs or {}))

    x = torch.randn(1, 12, 256, 8, dtype=torch.bfloat16)
    theta = torch.linspace(1, 0.1, 12 * 8, dtype=torch.bfloat16).view(12, 8)
    with Halves() as halves:
        out = provider("torch").forward(row_of("fwd", 256))(x, theta)
    assert halves.dtypes == [torch.bfloat16, torch.bfloat16]
    phi = theta.float()[:, None] * torch.arange(256)[:, None]
    assert torch.equal(out, torch.cat([x * phi.cos(), x * phi.sin()], -1).bfloat16())


def test_torch_compile_compiles_what_torch_calls() -> None:
    compiled = provider("torch.compile")
    assert isinstance(compiled, TorchCompile) and type(compiled._eager) is type(provider("torch"))


# ---------------------------------------------------------------------------------------------------------- the program


def test_lrpe_cosine_is_measured_side_by_side(tmp_path: Path) -> None:
    """The shortest row of a sequence and of a grid; the others cost a test too much."""

    def tables(request: Request) -> list[Table]:
        found = [
            table for table in OPERATOR.tables(request) if table.title_suffix.endswith(("act_none-bf16", "2d-l10"))
        ]
        return [replace(table, rows=table.rows[:1]) for table in found]

    path = tmp_path / "result.json"
    argv = ["lrpe_cosine", *QUICK, "--provider", "eaves", "--provider", "torch", "--dtype", "bf16"]
    assert main([*argv, "--json", str(path)], [replace(OPERATOR, tables=tables)]) == 0
    rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"]
    for mode in ("fwd", "bwd"):
        for name in ("eaves", "torch", "limit"):
            measured = [row for row in rows if (row["mode"], row["provider"]) == (mode, name)]
            assert [row["options"] for row in measured] == [{}, {"grid": [16, 16], "extra_tokens": 10}]
            assert all(row["ms"] is not None for row in measured), [row.get("skipped") for row in measured]


def test_on_a_gpu_eaves_and_torch_agree(cuda: torch.device) -> None:
    """Every mode and option once, at the smallest size that has it."""
    eaves, pytorch = provider("eaves"), provider("torch")
    harness = Harness(HarnessOptions(cuda, Protocol("autograd"), repetitions=1))
    for table in tables_of("quick", cuda):
        for row in table.rows[:1] if table.is_curve else table.rows:
            columns = harness.measure(table.mode, row, [eaves, pytorch], eaves).columns
            assert [column.skipped for column in columns.values()] == ["", "", ""], (table.title_suffix, table.mode)
