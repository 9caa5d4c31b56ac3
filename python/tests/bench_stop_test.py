"""Tests of `python -m eaves.bench` when it is stopped: what was measured is written, and says so."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bench_toy import CPU, EAVES, QUICK, TOY, exp_sum, provider, small_flush, toy  # noqa: F401
from eaves.bench import page, results
from eaves.bench.__main__ import main
from eaves.bench.benchmark import Provider
from eaves.bench.device import device_name

DEVICE = results.folder_name(device_name(CPU), is_gpu=False)


def _stops_at_64(x: Tensor) -> Tensor:
    """As Ctrl-C does, in the second row."""
    if x.shape[1] == 64:
        raise KeyboardInterrupt
    return exp_sum(x)


STOPS_AT_64 = provider("eaves", _stops_at_64)


@pytest.fixture(autouse=True)
def no_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are most of a page's time."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "eaves.bench.plot", raising=False)
    monkeypatch.delattr("eaves.bench.plot", raising=False)


# ----------------------------------------------------------------------------------------------------- the real program


_SLOW = """
import sys, time
from bench_toy import exp_sum, provider, toy
from eaves.bench.__main__ import main

def slow(x):
    if x.shape[1] == 64:
        words = "begins"
        while True:
            try:
                print(words, flush=True)
                while True:
                    time.sleep(0.01)
            except KeyboardInterrupt:
                if sys.argv[1] != "stubborn":
                    raise
                words = "goes on"
    return exp_sum(x)

argv = ["--device", "cpu", "--warm-up-ms", "0", "--repetitions", "2", *sys.argv[2:]]
sys.exit(main(argv, [toy(provider("eaves", slow))]))
"""


def start(*words: str) -> subprocess.Popen[str]:
    """The program, in its second row."""
    command = [sys.executable, "-c", _SLOW, *words]
    folder = Path(__file__).parent
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    while (line := process.stdout.readline()) != "begins\n":
        assert line, process.communicate()
    return process


def test_a_run_that_is_interrupted_writes_what_it_has_measured(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    process = start("once", "toy", "--json", str(path))
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert err == f"eaves.bench: stopped; what was measured, 1 row, is in {path}\n"
    result = json.loads(path.read_text())
    assert result["stopped"] is True and [row["shape"]["n"] for row in result["rows"]] == [8, 8]
    assert "toy, forward, n 8" in out and "peak memory" in out and "backward" not in out
    assert process.returncode == 130 and list(tmp_path.iterdir()) == [path]


def test_a_run_into_a_folder_that_is_terminated_writes_what_it_has_measured(tmp_path: Path) -> None:
    process = start("once", "--results", str(tmp_path))
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()  # as Ctrl-C ends `| tee`
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 130
    folder = tmp_path / DEVICE
    assert process.stderr.read() == f"eaves.bench: stopped; what was measured, 1 row, is in {folder}\n"
    assert json.loads((folder / "toy_autograd.stopped.json").read_text())["stopped"] is True


def test_a_second_signal_ends_a_run_at_once_but_two_in_a_row_are_one(tmp_path: Path) -> None:
    process = start("stubborn", "toy", "--json", str(tmp_path / "result.json"))
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)
    assert process.stdout is not None and process.stdout.readline() == "goes on\n"
    time.sleep(1)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60)[1] == "eaves.bench: stopped at once\n"
    assert process.returncode == 130 and list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------------------------------------------------------- a toy


def test_what_is_written_nowhere_is_said_to_be(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(TOY, [toy(STOPS_AT_64)]) == 130
    err = capsys.readouterr().err
    assert err == "eaves.bench: stopped; what was measured, 1 row, is above, and in no file without --json\n"


@pytest.mark.parametrize("argv", [TOY, [*TOY, "--shape", "rows=16,n=8"]])
def test_a_signal_that_a_provider_takes_for_a_failure_still_stops_and_an_old_file_stays(
    argv: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def swallows(x: Tensor) -> Tensor:
        try:
            signal.raise_signal(signal.SIGTERM)
        except KeyboardInterrupt as error:
            raise RuntimeError("the compiler failed") from error
        return torch.empty(0)

    path = tmp_path / "result.json"
    path.write_text("old")
    to_file = [] if "--shape" in argv else ["--json", str(path)]
    assert main([*argv, *to_file], [toy(EAVES, provider("peer", swallows))]) == 130
    assert capsys.readouterr().err == "eaves.bench: stopped before a row was measured; nothing is written\n"
    assert path.read_text() == "old"


def test_a_folder_keeps_what_was_measured_before_and_no_page_shows_the_rest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [*QUICK, "--results", str(tmp_path), "--protocol", "autograd", "--replace"]
    assert main(argv, [toy(EAVES, name=name) for name in ("first", "second")]) == 0
    folder = tmp_path / DEVICE
    complete = (folder / "second_autograd.json").read_bytes()
    stopped = [toy(EAVES, name="first"), toy(STOPS_AT_64, name="second"), toy(EAVES, name="third")]
    assert main(argv, stopped) == 130
    assert capsys.readouterr().err.endswith(f"eaves.bench: stopped; what was measured, 5 rows, is in {folder}\n")
    files = sorted(path.name for path in folder.iterdir() if path.suffix == ".json")
    assert files == ["first_autograd.json", "second_autograd.json", "second_autograd.stopped.json"]
    assert (folder / "second_autograd.json").read_bytes() == complete
    assert main(["--page", str(folder)], stopped) == 0
    assert "- second_autograd.stopped.json is not shown: the run was stopped\n" in (folder / page.DETAILS).read_text()
    # And where such a file has been given the name of a complete one.
    (folder / "second_autograd.stopped.json").replace(folder / "second_autograd.json")
    assert main(["--page", str(folder)], stopped) == 0
    assert "- second_autograd.json is not shown: the run was stopped\n" in (folder / page.DETAILS).read_text()


@pytest.fixture
def resuming(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The words of a run that may go on: of a build whose sources are committed."""
    info = results._info.extension()
    monkeypatch.setattr(results._info, "extension", lambda: info | {"commit": 40 * "0"})
    return [*QUICK, "--results", str(tmp_path), "--protocol", "autograd", "--resume", "--replace"]


def test_a_run_goes_on_where_one_of_the_same_programs_was_stopped(
    resuming: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(resuming, [toy(EAVES, name="first"), toy(STOPS_AT_64, name="second")]) == 130
    folder = tmp_path / DEVICE
    first, left = folder / "first_autograd.json", folder / "second_autograd.stopped.json"
    rows = json.loads(left.read_text())["rows"]
    of_first = json.loads(first.read_text())["rows"]
    assert main(resuming, [toy(STOPS_AT_64, name="second")]) == 130
    assert json.loads(left.read_text())["rows"] == rows

    assert main(resuming, [toy(EAVES, name="first"), toy(EAVES, name="second")]) == 0
    assert json.loads(first.read_text())["rows"] == of_first
    whole = json.loads((folder / "second_autograd.json").read_text())
    assert not left.exists() and "stopped" not in whole
    assert whole["rows"][: len(rows)] == rows and len(whole["rows"]) == len(of_first)
    # Nor does a run that is stopped again lose what it has not come to.
    kept = [row for row in whole["rows"] if not (row["mode"] == "fwd" and row["shape"]["n"] == 64)]
    assert 0 < len(kept) < len(whole["rows"])
    (folder / "second_autograd.json").unlink()
    left.write_text(json.dumps(whole | {"stopped": True, "rows": kept}))
    assert main(resuming, [toy(STOPS_AT_64, name="second")]) == 130
    after = json.loads(left.read_text())["rows"]
    assert len(after) == len(kept) and all(row in after for row in kept)

    assert main([*TOY, "--resume"], [toy(EAVES)]) == 2
    assert "--resume: is for the result files of a folder" in capsys.readouterr().err


def _ends(x: Tensor) -> Tensor:
    raise SystemExit


def test_each_table_is_kept_before_the_next_begins(resuming: list[str], tmp_path: Path) -> None:
    """A machine may go away without a word."""
    with pytest.raises(SystemExit):
        main(resuming, [toy(Provider("eaves", "torch", lambda module, row: _ends if row.mode == "bwd" else exp_sum))])
    left = tmp_path / DEVICE / "toy_autograd.stopped.json"
    kept = json.loads(left.read_text())
    assert kept["stopped"] is True and {row["mode"] for row in kept["rows"]} == {"fwd"}
    assert main(resuming, [toy(EAVES)]) == 0
    whole = json.loads((tmp_path / DEVICE / "toy_autograd.json").read_text())["rows"]
    assert whole[: len(kept["rows"])] == kept["rows"] and not left.exists()


def test_nothing_is_taken_over_of_other_programs_and_providers(
    resuming: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / DEVICE / "toy_autograd.json"
    assert main(resuming, [toy(EAVES)]) == 0
    before = json.loads(path.read_text())
    assert main(resuming, [toy(EAVES, provider("peer", exp_sum))]) == 0
    assert {row["provider"] for row in json.loads(path.read_text())["rows"]} == {"eaves", "peer", "limit"}
    path.write_text(json.dumps(before | {"commit": "other"}))
    assert main(resuming, [toy(EAVES)]) == 0
    assert json.loads(path.read_text())["rows"] != before["rows"]
    path.with_suffix(".stopped.json").write_text('{"rows": [')
    assert main(resuming, [toy(EAVES)]) == 2
    assert "is no result file of this program" in capsys.readouterr().err
