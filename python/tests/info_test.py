"""`python -m eaves info`: its report on this installation, as text and as JSON, and the problems that it finds."""

import copy
import importlib
import json
import os
import re
import subprocess
import sys
from importlib.metadata import entry_points, requires, version
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement

import eaves
from eaves import _info
from eaves._replacement import INTEGRATIONS
from eaves._torch import library as _library
from integrations import installed


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "eaves", *arguments], capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    """The JSON from a process of its own."""
    result = run("info", "--json")
    assert result.returncode == 0, result.stdout + result.stderr
    return json.loads(result.stdout)


def test_the_json_has_the_keys_that_are_documented(report: dict[str, Any]) -> None:
    assert set(report) == {"python", "package", "torch", "jax", "trainers", "extension", "problems", "matches"}
    assert set(report["package"]) == {"version", "target"}
    assert set(report["torch"]) == {"version", "cuda", "threads", "gpus"}
    documented = {"version", "commit", "compiler", "backends", "cpu", "cuda", "gpus", "missing"}
    assert set(report["extension"]) == documented
    documentation = _info.collect.__doc__ + _info.extension.__doc__
    assert all(name in documentation for name in documented | set(report) | set(report["torch"]))


def test_the_json_says_what_is_here(report: dict[str, Any]) -> None:
    assert report["torch"]["version"] == torch.__version__
    assert report["torch"]["cuda"] == torch.version.cuda
    assert report["python"] == sys.version.split()[0]
    assert report["extension"]["version"] == eaves.__version__
    assert report["package"]["target"] == _library.TORCH_TARGET
    assert f'torch>={_library.TORCH_TARGET}; extra == "torch"' in requires("eaves")
    assert "cpu" in report["extension"]["backends"]
    assert len(report["torch"]["gpus"]) == (torch.cuda.device_count() if torch.cuda.is_available() else 0)


def test_the_extras_allow_every_version_of_a_library_that_is_known() -> None:
    requirements = {each.name: each for each in map(Requirement, requires("eaves"))}
    for integration in INTEGRATIONS.values():
        if integration.package in requirements:
            allowed = requirements[integration.package].specifier
            assert [series for series in integration.known if f"{series}.0" not in allowed] == []
    assert "trl" in requirements and version("transformers") in requirements["transformers"].specifier


def test_it_says_whether_the_library_for_jax_is_built(report: dict[str, Any]) -> None:
    pytest.importorskip("jaxlib", reason="jaxlib is not installed")
    assert report["jax"] == {"version": version("jax"), "library": True}
    from eaves.jax._library import JAX_TARGET

    assert f'jax>={JAX_TARGET}; extra == "jax"' in requires("eaves")
    lines = run("info").stdout.splitlines()
    assert f"jax       {version('jax')}, eaves.jax is built" in lines
    without = {**copy.deepcopy(_info.collect()), "jax": {"version": None, "library": False}}
    assert "it has no eaves.jax" in _info.text(without)


def test_the_self_test_compares_every_family_of_kernels_with_the_oracles() -> None:
    result = run("info", "--self-test")
    assert result.returncode == 0 and result.stderr == "", result.stdout + result.stderr
    assert "differs" not in result.stdout and result.stdout.startswith(run("info").stdout)
    families = {line.split("|")[2].strip() for line in result.stdout.splitlines() if line.startswith("| cpu ")}
    assert families == {"logsumexp", "cross_entropy", "product", "linear_cross_entropy", "lrpe_cosine"}


def test_a_self_test_that_differs_is_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_info, "self_test", lambda: ("| cpu | logsumexp | differs |\n", 1))
    monkeypatch.setattr(sys, "argv", ["eaves", "info", "--self-test"])
    assert importlib.import_module("eaves.__main__").main() == 1
    assert "| differs |" in capsys.readouterr().out


def test_without_torch_it_says_what_eaves_jax_can_do(report: dict[str, Any]) -> None:
    pytest.importorskip("jaxlib", reason="jaxlib is not installed")
    program = (
        "import runpy, sys\nsys.modules['torch'] = None  # as if it were not installed\n"
        "sys.argv = ['eaves', 'info', *sys.argv[1:]]\nrunpy.run_module('eaves', run_name='__main__')"
    )
    found, text = (
        subprocess.run([sys.executable, "-c", program, *option], capture_output=True, text=True, check=True).stdout
        for option in (["--json"], [])
    )
    without = {"torch": None, "trainers": {}, "package": {**report["package"], "target": None}}
    assert json.loads(found) == {**report, **without}
    assert "torch     not installed" in text and f"eaves     {eaves.__version__}" in text


def test_the_version_is_an_option_and_an_unknown_command_is_one_sentence() -> None:
    found, unknown = run("--version"), run("run")
    assert (found.returncode, found.stdout) == (0, f"{eaves.__version__}\n")
    assert (unknown.returncode, unknown.stdout, unknown.stderr.count("\n")) == (2, "", 1)
    assert unknown.stderr.startswith("eaves: argument info|bench: invalid choice: 'run' (choose from ")


def test_an_installation_whose_parts_fit_has_no_problems(report: dict[str, Any]) -> None:
    assert report["matches"] is True
    assert report["problems"] == []


def test_the_text_names_torch_python_and_the_backends(report: dict[str, Any]) -> None:
    result = run("info")
    assert result.returncode == 0, result.stderr
    assert torch.__version__ in result.stdout
    assert report["python"] in result.stdout
    assert eaves.__version__ in result.stdout
    lines = {line.split()[0]: line for line in result.stdout.splitlines() if not line.startswith(" ")}
    for backend in report["extension"]["backends"]:
        assert backend in lines["backends"]
    for sentence in report["extension"]["missing"]:
        assert sentence in result.stdout


@pytest.mark.parametrize("name", INTEGRATIONS)
def test_the_text_says_of_each_library_whether_it_is_active(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    integration = INTEGRATIONS[name]

    def said(version: str | None, is_active: bool) -> str:
        monkeypatch.setattr(integration, "is_active", lambda: is_active)
        with installed(version):
            text = _info.text(_info.collect())
        return re.findall(rf"^{name} +(.*)", text, re.M)[-1]  # the version of torch has a line before

    known = f"{integration.known[-1]}.9"
    assert said(None, False) == "not installed"
    assert said("99.0", False) == f"99.0, which eaves.{name} does not support"
    assert said(known, False) == f"{known}, active {integration.turned_on}"
    assert said(known, True) == f"{known}, active in this process"


def test_both_say_the_same_gpus(report: dict[str, Any], cuda: torch.device) -> None:
    names = [gpu["name"] for gpu in report["extension"]["gpus"]]
    assert names == report["torch"]["gpus"] == [torch.cuda.get_device_name(i) for i in range(len(names))]
    assert names


def test_an_extension_of_another_version_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_info, "version", lambda name: "0.0.1")
    found = _info.collect()
    assert found["matches"] is False
    assert any("0.0.1" in problem and eaves.__version__ in problem for problem in found["problems"])
    assert found["problems"][0] in _info.text(found)


GPU = {"index": 0, "name": "a GPU", "compute_capability": "9.0"}


@pytest.mark.parametrize(
    ("of_torch", "backends", "of_extension", "said"),
    [
        (["a GPU"], ["cpu"], [], ["without CUDA"]),
        (["a GPU"], ["cpu", "cuda"], [], ["a GPU that eaves cannot use.*The driver is too old."]),
        (["a GPU"], ["cpu", "cuda"], [GPU], []),
        ([], ["cpu", "cuda"], [], []),
        ([], ["cpu"], [], []),
    ],
)
def test_a_gpu_that_the_extension_does_not_use_is_a_problem_with_its_reason(
    of_torch: list[str], backends: list[str], of_extension: list[dict[str, Any]], said: list[str]
) -> None:
    found = copy.deepcopy(_info.collect())
    found["torch"]["gpus"] = of_torch
    found["extension"] |= {"backends": backends, "gpus": of_extension, "missing": ["The driver is too old."]}
    for problem, sentence in zip(_info._problems(found), said, strict=True):
        assert re.search(sentence, problem)


def test_what_does_not_fit_together_ends_in_exit_status_1() -> None:
    program = """
import runpy, sys
from eaves import _info
_info.version = lambda name: "0.0.1"
sys.argv = ["eaves", *sys.argv[1:]]
runpy.run_module("eaves", run_name="__main__")
"""
    for arguments in (["info"], ["info", "--json"]):
        result = subprocess.run(
            [sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False
        )
        assert result.returncode == 1, result.stderr
        assert "0.0.1" in result.stdout and "Traceback" not in result.stderr


def test_a_reader_that_leaves_is_no_failure_and_a_full_disk_is() -> None:
    reader, lost = os.pipe()
    os.close(reader)
    with open("/dev/full", "w") as full:
        for output, code, said in ((lost, 0, ""), (full, 1, "eaves: standard output cannot be written: ")):
            for argument in ("info", "--help"):
                command = [sys.executable, "-m", "eaves", argument]
                result = subprocess.run(command, stdout=output, stderr=subprocess.PIPE, text=True, check=False)
                assert result.returncode == code
                assert result.stderr.startswith(said) and (said or not result.stderr), result.stderr
    os.close(lost)


def test_the_program_of_the_wheel_is_the_same_as_the_module() -> None:
    (program,) = entry_points(group="console_scripts", name="eaves")
    assert program.load() is importlib.import_module("eaves.__main__").main


def test_without_torch_and_jax_it_says_which_to_install() -> None:
    program = (
        "import runpy, sys\nsys.modules |= {'torch': None, 'jax': None}\n"
        "sys.argv = ['eaves', 'info']\nrunpy.run_module('eaves', run_name='__main__')"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert result.stderr == "eaves: PyTorch and JAX are not installed: pip install torch, or jax for eaves.jax\n"


def test_a_command_that_is_not_there_is_refused_with_those_that_are() -> None:
    result = run("nonsense")
    assert result.returncode == 2
    assert "info" in result.stderr and "bench" in result.stderr and "Traceback" not in result.stderr
