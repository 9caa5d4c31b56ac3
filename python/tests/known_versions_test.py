"""The versions of the table in _replacement.py, beside every other place that names them: docs/trainers.md, the matrix
of tools/test_integrations, .ci/run, and the packages that pyproject.toml installs for tests. info_test.py compares the
extras.
"""

import re
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from packaging.requirements import Requirement

from eaves._replacement import INTEGRATIONS

ROOT = Path(__file__).parents[2]
TITLES = {"automodel": "NeMo-Automodel", "hf": "transformers", "megatron": "Megatron-Core", "torch": "PyTorch"}
ON_NO_INDEX = {"nemo_rl", "prime_rl"}  # their tests run with sources


def tool() -> Any:
    loader = SourceFileLoader("test_integrations", str(ROOT / "tools" / "test_integrations"))
    module = sys.modules[loader.name] = ModuleType(loader.name)  # where dataclasses look
    module.__file__ = loader.path
    loader.exec_module(module)
    return sys.modules.pop(loader.name)


def runs() -> dict[str, tuple[str, str]]:
    """Library and version of each line of the matrix whose first package is a library of the table."""
    libraries = {each.package: each.library for each in INTEGRATIONS.values()}
    found = {}
    for name, line in tool().MATRIX.items():
        package, version = re.findall(r"(\S+)==(\S+)", line.packages)[0]
        if package in libraries:
            found[name] = libraries[package], version
    return found


@pytest.mark.parametrize("library", INTEGRATIONS)
def test_the_page_names_the_versions_of_the_table(library: str) -> None:
    page = (ROOT / "docs" / "trainers.md").read_text()
    words = r"[-_ ]".join(library.split("_"))
    (section,) = re.findall(rf"^## {TITLES.get(library, words)}\n((?:(?!^## ).*\n)*)", page, re.M | re.I)
    number = r"\d+(?:\.\d+)*"
    (named,) = re.findall(rf"^Known versions: ({number}(?:(?:, | and | to ){number})*)", section, re.M)
    known = INTEGRATIONS[library].known
    assert named in (f"{known[0]} to {known[-1]}", " and ".join(", ".join(known).rsplit(", ", 1)))


def test_other_pages_name_the_versions_of_trl_and_transformers() -> None:
    known = INTEGRATIONS["trl"].known
    assert f"[TRL {known[0]} to {known[-1]}](docs/trainers.md#trl)" in (ROOT / "README.md").read_text()
    (extra,) = re.findall(r'^hf = .*"transformers(\S+)"', (ROOT / "pyproject.toml").read_text(), re.M)
    for page, words in (("huggingface", f"transformers (`{extra}`)"), ("quickstart", f'"transformers{extra}"')):
        assert words in (ROOT / "docs" / f"{page}.md").read_text()


def test_tests_run_every_version_of_the_table_and_no_other() -> None:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 reads no TOML")
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    installed = [Requirement(each) for group in groups.values() for each in group if isinstance(each, str)]
    for library, integration in INTEGRATIONS.items():
        if library in ON_NO_INDEX:
            continue
        run = {integration.series_of(version) for each, version in runs().values() if each == library}
        for each in installed:
            if each.name == integration.package:
                run |= {series for series in integration.known if f"{series}.0" in each.specifier}
        assert run == set(integration.known), library


@pytest.mark.skipif(not (ROOT / ".ci").exists(), reason="the tests do not run in a clone")
def test_ci_runs_a_line_of_each_library() -> None:
    (command,) = re.findall(r"^tools/test_integrations ((?:.*\\\n)*.*)$", (ROOT / ".ci" / "run").read_text(), re.M)
    lines = command.replace("\\\n", " ").split()
    assert set(lines) <= set(tool().MATRIX)
    of_library = {name: library for name, (library, _) in runs().items()}
    assert {of_library[each] for each in lines} == set(of_library.values())
