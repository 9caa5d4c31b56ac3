"""Tests of `python -m eaves.bench` when it is stopped: what was measured is written, and says so."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench_toy import CPU, QUICK, TOY, Eaves, Peer, small_flush, toy  # noqa: F401
from eaves.bench import harness, results
from eaves.bench.__main__ import main
from eaves.bench.benchmark import Forward, Operator, Row
from eaves.bench.device import device_name

DEVICE = results.folder_name(device_name(CPU), is_gpu=False)
PAGE = "README.md"


class StopsAt64(Eaves):
    """As Ctrl-C does, in the second row."""

    def forward(self, row: Row) -> Forward:
        if row.axis_value == 64:
            raise KeyboardInterrupt
        return super().forward(row)


def hidden_files(folder: Path) -> list[Path]:
    return list(folder.rglob(".*"))


# ----------------------------------------------------------------------------------------------------- the real program


def start(*words: str) -> subprocess.Popen[str]:
    """The program, once it has printed its first table. A second is still to come: each is warmed up for a second."""
    argv = ["--provider", "eaves", "--device", "cpu", "--repetitions", "2", "--warm-up-ms", "1000", *words]
    command = [sys.executable, "-m", "eaves.bench", *argv]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    while "-speed-" not in (line := process.stdout.readline()):
        assert line, process.communicate()
    while process.stdout.readline().strip():
        pass
    return process


def test_a_run_that_is_interrupted_writes_what_it_has_measured(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    process = start("logsumexp", "--json", str(path))
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    result = json.loads(path.read_text())
    rows = len(result["rows"]) // 2  # of eaves and of the limit
    assert result["stopped"] is True
    assert rows >= 2
    assert err == f"eaves.bench: stopped; what was measured, {rows} rows, is in {path}\n"
    assert "logsumexp-memory-fwd-" in out and out.endswith("\n")
    assert process.returncode == 130
    assert hidden_files(tmp_path) == []


def test_a_run_into_a_folder_that_is_terminated_writes_what_it_has_measured(tmp_path: Path) -> None:
    process = start("--results", str(tmp_path))
    assert process.stdout is not None
    process.stdout.close()  # as Ctrl-C ends `| tee`
    process.send_signal(signal.SIGTERM)
    process.wait(timeout=60)
    assert process.stderr is not None
    folder = tmp_path / DEVICE
    sentences = [line for line in process.stderr if not line.startswith("# ")]
    result = json.loads((folder / "logsumexp_autograd.stopped.json").read_text())
    rows = len(result["rows"]) // 2
    assert sentences == [f"eaves.bench: stopped; what was measured, {rows} rows, is in {folder}\n"]
    assert result["stopped"] is True
    assert process.returncode == 130
    assert hidden_files(tmp_path) == []


_STUBBORN = """
import sys, time
from bench_toy import Eaves, toy
from eaves.bench.__main__ import main

class Stubborn(Eaves):
    def forward(self, row):
        words = "begins"
        while True:
            try:
                print(words, flush=True)
                while True:
                    time.sleep(0.01)
            except KeyboardInterrupt:
                words = "goes on"

sys.exit(main(["toy", "--device", "cpu", "--warm-up-ms", "0", "--json", sys.argv[1]], [toy(Stubborn())]))
"""


def test_a_second_signal_ends_a_run_at_once_but_two_in_a_row_are_one(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _STUBBORN, str(tmp_path / "result.json")]
    folder = Path(__file__).parent
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    while process.stdout.readline() not in ("begins\n", ""):
        pass
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "goes on\n"
    time.sleep(1)
    assert process.poll() is None
    assert len(hidden_files(tmp_path)) == 1
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60)[1] == "eaves.bench: stopped at once\n"
    assert process.returncode == 130
    assert hidden_files(tmp_path) == []


# ---------------------------------------------------------------------------------------------------------------- a toy


@pytest.fixture(autouse=True)
def no_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    """Curves are most of a page's time."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "eaves.bench.plot", raising=False)
    monkeypatch.delattr("eaves.bench.plot", raising=False)
    monkeypatch.setattr(harness.gc, "collect", lambda: 0)


def test_a_row_that_was_not_finished_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "result.json"
    assert main([*TOY, "--json", str(path)], [toy(StopsAt64())]) == 130
    out, err = capsys.readouterr()
    assert err == f"eaves.bench: stopped; what was measured, 1 row, is in {path}\n"
    assert [row["shape"]["n"] for row in json.loads(path.read_text())["rows"]] == [8, 8]
    assert "toy-memory-fwd-dim16-fp32:" in out and "toy-speed-bwd" not in out
    assert [each.name for each in tmp_path.iterdir()] == ["result.json"]


def test_what_is_written_nowhere_is_said_to_be(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(TOY, [toy(StopsAt64())]) == 130
    err = capsys.readouterr().err
    assert err == "eaves.bench: stopped; what was measured, 1 row, is above, and in no file without --json\n"


def test_before_the_first_row_an_old_file_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "result.json"
    path.write_text("old")

    class StopsAt8(Eaves):
        def forward(self, row: Row) -> Forward:
            raise KeyboardInterrupt

    assert main([*TOY, "--json", str(path)], [toy(StopsAt8())]) == 130
    assert capsys.readouterr().err == "eaves.bench: stopped before a row was measured; nothing is written\n"
    assert path.read_text() == "old"
    assert [each.name for each in tmp_path.iterdir()] == ["result.json"]


def test_a_signal_that_a_provider_takes_for_a_failure_still_stops(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Swallows(Peer):
        def forward(self, row: Row) -> Forward:
            try:
                signal.raise_signal(signal.SIGTERM)
            except KeyboardInterrupt as error:
                raise RuntimeError("the compiler failed") from error
            raise AssertionError("a signal is a KeyboardInterrupt")

    assert main([*TOY, "--json", str(tmp_path / "result.json")], [toy(Eaves(), Swallows())]) == 130
    assert "stopped before a row was measured" in capsys.readouterr().err


def operators_of_a_stopped_run() -> list[Operator]:
    return [
        toy(provider, name=name, modes=("fwd",))
        for name, provider in (("first", Eaves()), ("second", StopsAt64()), ("third", Eaves()))
    ]


def test_a_folder_keeps_what_was_measured_before_and_the_part_that_was_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*QUICK, "--results", str(tmp_path)], operators_of_a_stopped_run()) == 130
    folder = tmp_path / DEVICE
    assert capsys.readouterr().err.endswith(f"eaves.bench: stopped; what was measured, 5 rows, is in {folder}\n")
    files = sorted(path.name for path in folder.iterdir() if path.is_file())
    assert files == [PAGE, "first_autograd.json", "first_seed.json", "second_autograd.stopped.json"]
    assert "stopped" not in json.loads((folder / "first_seed.json").read_text())


def test_a_file_of_a_folder_is_not_replaced_by_that_of_a_stopped_run(tmp_path: Path) -> None:
    argv = [*QUICK, "--results", str(tmp_path), "--protocol", "autograd", "--replace"]
    assert main(argv, [toy(Eaves(), modes=("fwd",))]) == 0
    folder = tmp_path / DEVICE
    complete = (folder / "toy_autograd.json").read_bytes()
    assert main(argv, [toy(StopsAt64(), modes=("fwd",))]) == 130
    assert (folder / "toy_autograd.json").read_bytes() == complete
    assert json.loads((folder / "toy_autograd.stopped.json").read_text())["stopped"] is True


def test_a_page_shows_no_file_of_a_stopped_run(tmp_path: Path) -> None:
    operators = [toy(Eaves(), modes=("fwd",))]
    assert main([*QUICK, "--results", str(tmp_path)], operators) == 0
    folder = tmp_path / DEVICE
    result = json.loads((folder / "toy_autograd.json").read_text())
    kernel = result | {"protocol": "kernel"}
    (folder / "toy.json").write_text(json.dumps(kernel))
    (folder / "stopped.json").write_text(json.dumps(kernel | {"stopped": True}))
    (folder / "toy_autograd.stopped.json").write_text(json.dumps(result | {"stopped": True}))
    (folder / "toy_seed.json").write_text(json.dumps(result | {"protocol": "seed", "stopped": True}))
    assert main(["--page", str(folder)], operators) == 0
    text = (folder / PAGE).read_text()
    assert "From C++, without peers: [toy.json](toy.json)." in text
    assert "- toy_autograd.stopped.json, toy_seed.json, stopped.json are not shown: the run was stopped\n" in text
    assert "](toy_seed.json)" not in text


def test_stopped_is_true_or_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    operators = [toy(Eaves(), modes=("fwd",))]
    assert main([*QUICK, "--results", str(tmp_path)], operators) == 0
    path = tmp_path / DEVICE / "toy_autograd.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"stopped": "yes"}))
    assert main(["--page", str(path.parent)], operators) == 2
    assert 'stopped is "yes", expected true' in capsys.readouterr().err
