"""The error for an extension that cannot be loaded: the versions, or the file and the loader's reason."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import eaves
from eaves._torch import library as _library


@pytest.mark.parametrize("version", ["2.9.1", "2.9.0+cu128", "1.13.1"])  # as strings, 2.9 comes behind 2.10
def test_a_torch_that_is_too_old_is_refused_with_both_versions(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    with pytest.raises(ImportError) as caught:
        _library._load()
    message = str(caught.value)
    assert f"PyTorch {_library.TORCH_TARGET} or newer" in message and f"but {version} is installed" in message


@pytest.mark.parametrize("version", [_library.TORCH_TARGET + ".0", "2.110.0a0+git1234567", "3.0.0"])
def test_the_oldest_torch_and_every_newer_one_are_accepted(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    assert _library._load() == eaves.__version__


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        pytest.param(None, "is missing, because", id="absent"),
        pytest.param(b"no library at all " * 100, "cannot be loaded: .*invalid ELF header", id="text"),
        pytest.param(b"\x7fELF", "cannot be loaded: .*too short", id="cut short"),
    ],
)
def test_an_extension_that_does_not_load_is_named_with_the_reason(
    content: bytes | None, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "eaves_torch.so"
    if content is not None:
        path.write_bytes(content)
    monkeypatch.setattr(_library, "EXTENSION", path)
    with pytest.raises(ImportError) as caught:
        _library._load()
    message = str(caught.value)
    assert message.startswith(f"eaves: {path} ") and "\n" not in message
    assert re.search(reason, message), message


@pytest.mark.parametrize(
    ("name", "needs"),
    [
        ("cross_entropy", "PyTorch, which is not installed: pip install torch (eaves.jax has the operators for JAX)"),
        ("hf", "PyTorch, which is not installed: pip install torch (eaves.jax has the operators for JAX)"),
        ("jax", "JAX, which is not installed: pip install jax"),
    ],
)
def test_a_name_whose_framework_is_not_installed_says_which_to_install(name: str, needs: str) -> None:
    program = (
        "import sys\nsys.modules |= {'torch': None, 'jax': None}\n"
        f"import eaves\nassert eaves.__version__ == '{eaves.__version__}'\neaves.{name}"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.stderr.splitlines()[-1] == f"ImportError: eaves.{name} needs {needs}"
