"""`python -m eaves bench`: the table of one operator beside PyTorch, and the refused arguments. The tests claim nothing
about speed."""

import subprocess
import sys

import pytest
import torch

from eaves import __main__, _bench

SHAPES = {
    "logsumexp": "rows=4,n=100",
    "cross_entropy": "v=100,rows=4",
    "linear_cross_entropy": "rows=4,dim=8,v=100",
    "linear_log_prob": "rows=4,dim=8,v=100",
    "lrpe_cosine": "batch=2,length=5,heads=3,dim=8",
}
QUICK = ["--device", "cpu", "--repetitions", "2"]


def main(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["eaves", "bench", *words])
    try:
        return __main__.main()
    except SystemExit as ended:
        return int(ended.code or 0)


@pytest.mark.parametrize("name", _bench.OPERATORS)
def test_eaves_and_the_formula_compute_the_same_from_inputs_of_the_shape(name: str) -> None:
    operator = _bench.OPERATORS[name]
    sizes = dict(part.split("=") for part in SHAPES[name].split(","))
    inputs = operator.make_inputs(torch.float32, *(int(sizes[key]) for key in operator.sizes))
    ours, formula = (_bench.Step(function, inputs) for function in (operator.ours, operator.formula))
    out, expected = ours.forward(), formula.forward()
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    for gradient, wanted in zip(ours.backward(out), formula.backward(expected), strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", _bench.OPERATORS)
def test_the_table_has_times_and_memory_of_each_implementation(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # A real torch.compile takes seconds.
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    assert main(monkeypatch, name, "--shape", SHAPES[name], *QUICK) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == f"{name}, {SHAPES[name]}, bf16; milliseconds"
    assert lines[2].split() == ["forward", "backward", "step", "MiB", "/", "eaves"]
    table = [line.split() for line in lines[3:6]]
    assert [line[0] for line in table] == ["eaves", "torch", "torch.compile"] and table[0][-1] == "1.00"
    assert all(float(number) >= 0 for line in table for number in line[1:])


def test_torch_compile_takes_part(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(monkeypatch, "logsumexp", "--shape", "rows=4,n=100", *QUICK) == 0
    out = capsys.readouterr().out
    assert "\ntorch.compile" in out and "skipped" not in out


def test_who_fails_is_left_out_with_a_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*tensors: object) -> torch.Tensor:
        raise RuntimeError("\nthere is no compiler\nand this is the second line")

    monkeypatch.setattr(torch, "compile", lambda function, **options: fail)
    assert main(monkeypatch, "logsumexp", "--shape", "rows=4,n=100", *QUICK) == 0
    out = capsys.readouterr().out
    assert "torch.compile is skipped: there is no compiler\n" in out and "\ntorch  " in out


@pytest.mark.parametrize("what", ["the inputs", "every step"])
def test_a_shape_that_does_not_fit_is_one_sentence_and_exit_code_1(
    what: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = "rows=4,n=100" if what == "every step" else "rows=1000000,n=1000000000"  # 2 PB

    def fail(step: object) -> None:
        raise torch.OutOfMemoryError("tried to allocate")

    monkeypatch.setattr(_bench.Step, "run", fail)
    assert main(monkeypatch, "logsumexp", "--shape", shape, *QUICK) == 1
    out, err = capsys.readouterr()
    assert err == f"eaves: logsumexp, {shape}: does not fit in memory\n"
    assert ("torch.compile is skipped: does not fit in memory\n" in out) == (what == "every step")


def test_a_busy_machine_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    times = iter([(1.0, 1.0), (5.0, 1.0), (4.0, 1.0)])
    monkeypatch.setattr(_bench, "time_in_turns", lambda steps, *_: {"eaves": [*times]})
    assert main(monkeypatch, "logsumexp", "--shape", "rows=4,n=100", *QUICK) == 0
    assert capsys.readouterr().out.endswith("Other programs slowed down eaves. Measure again on a quiet machine.\n")


def test_the_peak_is_what_is_alive_beside_what_was_there(device: torch.device) -> None:
    held = torch.ones(2**20, device=device)
    peak = _bench.peak_of_call(lambda: held.exp().exp(), device)
    assert peak == pytest.approx(2 * held.nbytes, rel=0.01)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["nonsense", "--shape", "rows=1,n=1"], "invalid choice: 'nonsense' (choose from"),
        (
            ["logsumexp"],
            "--shape: is missing, expected rows=..,n=.. with positive numbers, such as rows=4096,n=131072 (",
        ),
        (["logsumexp", "--shape", "rows=3"], '--shape: is "rows=3", expected rows=..,n=.. with positive numbers'),
        (["logsumexp", "--shape", "rows=3,n=0"], '--shape: is "rows=3,n=0", expected rows=..,n=..'),
        (["logsumexp", "--shape", "rows=3,n=2,n=4"], '--shape: is "rows=3,n=2,n=4", expected rows=..,n=..'),
        (["logsumexp", "--shape", "rows=3,n=2", "--repetitions", "0"], "--repetitions: is 0, expected 1 or more"),
        (["logsumexp", "--shape", "rows=3,n=2", "--threads", "0"], "--threads: is 0, expected 1 or more"),
        (["logsumexp", "--treads", "2"], "unknown option --treads; did you mean --threads?"),
        (["logsumexp", "--treads=2"], "unknown option --treads; did you mean --threads?"),
        (["logsumexp", "--thread", "2"], "unknown option --thread; did you mean --threads?"),  # no abbreviation
        (["logsumexp", "--xyz"], "unknown option --xyz ("),
        (["logsumexp", "other"], 'unexpected argument "other"'),
    ],
)
def test_a_wrong_argument_is_one_sentence_and_exit_code_2(
    words: list[str], sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(monkeypatch, *words) == 2
    out, err = capsys.readouterr()
    assert sentence in err and err.startswith("eaves bench: ") and err.count("\n") == 1 and out == ""
    assert err.endswith("(see eaves bench --help)\n")


def test_without_a_gpu_cuda_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(monkeypatch, "logsumexp", "--shape", "rows=3,n=2", "--device", "cuda") == 2
    assert "--device: is cuda, but PyTorch finds no GPU; expected cpu" in capsys.readouterr().err


def test_the_help_fits_80_columns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(monkeypatch, "--help") == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80 and all(name in out for name in _bench.OPERATORS)


def test_it_is_a_command_of_the_package() -> None:
    command = [sys.executable, "-m", "eaves", "bench", "logsumexp", "--treads", "2"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (2, "") and "did you mean --threads?" in result.stderr
