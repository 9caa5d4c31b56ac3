"""examples/python/train_language_model.py: the model learns, and PyTorch's formulas lead it the same way."""

import json
import math
import runpy
import subprocess
import sys
from collections import Counter
from pathlib import Path
from pydoc_data.topics import topics

import pytest

PROGRAM = Path(__file__).parents[2] / "examples" / "python" / "train_language_model.py"


def run_program(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, PROGRAM, *arguments], capture_output=True, text=True, check=False)


def test_both_backends_learn_alike(tmp_path: Path) -> None:
    options = ("--device", "cpu", "--dtype", "float32", "--backend", "both", "--steps", "100", "--batch", "4")
    program = run_program(*options, "--json", str(tmp_path / "runs.json"), "--plot", str(tmp_path / "loss.png"))
    assert program.returncode == 0, program.stderr
    runs = json.loads((tmp_path / "runs.json").read_text())
    ours, torchs = runs
    assert (ours["backend"], torchs["backend"]) == ("eaves", "torch")
    # float32 on both sides; over 100 steps differences in the last place grow.
    assert ours["losses"] == pytest.approx(torchs["losses"], rel=1e-4)
    assert len(ours["losses"]) == 100
    assert ours["held_back_loss"] == pytest.approx(torchs["held_back_loss"], rel=1e-4)
    # The loss falls well below the entropy of single bytes.
    text = "".join(topics[name] for name in sorted(topics)).encode()
    entropy = -sum(count / len(text) * math.log(count / len(text)) for count in Counter(text).values())
    for run in runs:
        assert run["unigram_entropy"] == pytest.approx(entropy, rel=1e-6)
        assert run["losses"][0] > math.log(256) - 0.1, "it starts with nothing learnt"
        assert run["held_back_loss"] < entropy - 0.7
    heading, _, *rows = program.stdout.splitlines()
    assert heading.startswith("| backend | tokens/s |")
    assert [row.split()[1] for row in rows] == ["eaves", "torch"]
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert "100/100" in program.stderr, "the progress bar"


def test_the_committed_table_is_that_of_the_committed_runs() -> None:
    table = runpy.run_path(str(PROGRAM))["table"]
    files = list((PROGRAM.parents[2] / "benchmarks" / "results").glob("*/train_language_model.json"))
    assert files
    for file in files:
        assert table(json.loads(file.read_text())) + "\n" == file.with_suffix(".txt").read_text()


def test_a_loss_that_is_no_number_is_no_success() -> None:
    small = ("--steps", "100", "--batch", "1", "--length", "8", "--width", "8", "--heads", "1", "--layers", "1")
    program = run_program("--device", "cpu", "--lr", "1e30", *small)
    assert program.returncode == 1
    assert "has learnt no more" in program.stderr


def test_two_bytes_a_token_make_65536_classes(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    small = ("--steps", "3", "--batch", "2", "--length", "16", "--width", "16", "--heads", "2", "--layers", "1")
    program = run_program("--device", "cpu", "--dtype", "bfloat16", "--token-bytes", "2", *small, "--json", str(path))
    assert program.returncode == 0, program.stderr
    (run,) = json.loads(path.read_text())
    assert run["vocabulary"] == 65536
    assert run["losses"][0] == pytest.approx(math.log(65536), abs=1.5)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--steps", "1"), "--steps: is 1, expected 2 or more"),
        (("--length", "0"), "--length: is 0, expected 1 or more"),
        (("--width", "30"), "expected a multiple of --heads, 4"),
        (("--lr", "-1"), "--lr: is -1.0, expected 0 or more"),
        (("--plot", "no-such-folder/loss.png"), "--plot: the folder of no-such-folder/loss.png does not exist"),
    ],
)
def test_wrong_arguments_are_refused_by_name(
    arguments: tuple[str, ...], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(PROGRAM), *arguments])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(PROGRAM), run_name="__main__")
    assert stop.value.code == 2
    assert words in capsys.readouterr().err
