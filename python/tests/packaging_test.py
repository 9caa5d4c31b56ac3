"""The wheel in dist/ that `make wheel` made: its contents, and that it works with nothing but Python and PyTorch. Also
the source archive, from which the same package is built again."""

import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
CACHE = ROOT / "build" / "wheel" / "CMakeCache.txt"
WHEELS = sorted((ROOT / "dist").glob("eaves-*.whl"))
LIMIT_MB = 95  # package indices accept 100 without asking
# The libraries that a wheel may need from the system: PyTorch's, which it has loaded (tools/wheel leaves them out), and
# the C and C++ runtimes.
SYSTEM = {"libc10.so", "libtorch_cpu.so", "libc.so.6", "libdl.so.2", "libgcc_s.so.1", "libm.so.6", "libpthread.so.0"}
SYSTEM |= {"librt.so.1", "libstdc++.so.6", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}

pytestmark = pytest.mark.skipif(not WHEELS or not CACHE.exists(), reason="dist/ holds no wheel of this clone")

SMOKE = """
import torch, eaves
x = torch.randn(4, 10, requires_grad=True)
head = torch.randn(7, 10, requires_grad=True)
target = torch.tensor([0, 3, -100, 6])
loss = eaves.linear_cross_entropy(x, head, target)
loss.backward()
same = torch.nn.functional.cross_entropy(x.detach() @ head.detach().T, target)
torch.testing.assert_close(loss.detach(), same)
assert x.grad.abs().sum() > 0 and head.grad.abs().sum() > 0
torch.testing.assert_close(eaves.logsumexp(x, -1), torch.logsumexp(x, -1))
print(eaves.__file__)
"""


def version() -> str:
    text = (ROOT / "include" / "eaves" / "version.h").read_text()
    (found,) = re.findall(r'#define EAVES_VERSION "(.*)"', text)
    assert found == ".".join(re.findall(r"#define EAVES_VERSION_[A-Z]+ (\d+)", text))
    return str(found)


def pyproject() -> dict[str, Any]:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 reads no TOML")
    return dict(tomllib.loads((ROOT / "pyproject.toml").read_text()))


def test_every_place_names_the_version() -> None:
    number = version()
    assert f"Version {number}" in (ROOT / "README.md").read_text()
    assert re.search(r"^## \[(.*)\]", (ROOT / "CHANGELOG.md").read_text(), re.M)[1] == number  # type: ignore[index]


def test_the_recipe_for_conda_names_the_versions_of_the_wheel() -> None:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    recipe, ours = yaml.safe_load((ROOT / "conda" / "recipe.yaml").read_text()), pyproject()
    assert recipe["context"]["version"] == version()
    assert (recipe["about"]["license"], recipe["about"]["license_file"]) == ("Apache-2.0", "LICENSE")
    assert recipe["about"]["summary"] == ours["project"]["description"]
    needs, extras = recipe["requirements"], ours["project"]["optional-dependencies"]
    torch, jax, build = (
        each[0].replace(">=", " >=") for each in (extras["torch"], extras["jax"], ours["build-system"]["requires"])
    )
    assert needs["run_constraints"] == [jax, f"py{torch}"]
    python = f"python {ours['project']['requires-python']}"
    assert {jax.replace("jax", "jaxlib"), f"py{torch}", build, python} <= set(needs["host"])
    assert f"cmake {ours['tool']['scikit-build']['cmake']['version']}" in needs["build"]


def test_the_wheel_requires_nothing_and_names_its_licence() -> None:
    with zipfile.ZipFile(WHEELS[0]) as archive:
        (metadata,) = (archive.read(name).decode() for name in archive.namelist() if name.endswith("/METADATA"))
    requirements = re.findall("^Requires-Dist: (.*)", metadata, re.M)
    assert requirements and all("; extra == " in each for each in requirements)
    assert "\nLicense-Expression: Apache-2.0\nLicense-File: LICENSE\n" in metadata


def run(*command: str | Path, **options: object) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stdout + done.stderr
    return str(done.stdout)


def installed(wheel: Path, folder: Path) -> Path:
    """The Python of a fresh environment that holds this wheel, and sees PyTorch beside it."""
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    packages = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    run(sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", packages, wheel)
    # After its own packages, so that this eaves is found and not the tests' one.
    (packages / "torch.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def check_that_it_works(python: Path, folder: Path) -> str:
    """Runs the package without a compiler, in a folder outside of the tree. Returns the output of `info`."""
    environment = {"PATH": str(folder / "empty"), "HOME": str(folder)}
    info = run(python, "-m", "eaves", "info", cwd=folder, env=environment)
    file = run(python, "-c", SMOKE, cwd=folder, env=environment).strip()
    assert Path(file).is_relative_to(python.parents[1]), "the package of the wheel, and no other"
    words = ("-m", "eaves", "bench", "logsumexp", "--shape", "rows=4,n=100", "--device", "cpu", "--repetitions", "2")
    assert re.search(r"^eaves .* 1\.00$", run(python, *words, cwd=folder, env=environment), re.M)
    return info


def test_there_is_one_wheel_for_every_python_and_its_name_says_which_systems() -> None:
    (wheel,) = WHEELS
    tag = rf"py3-none-manylinux_\d+_\d+_{platform.machine()}"
    assert re.fullmatch(rf"eaves-{re.escape(version())}-{tag}\.whl", wheel.name)


def test_the_wheel_is_small() -> None:
    assert WHEELS[0].stat().st_size < LIMIT_MB * 10**6


def test_the_libraries_that_the_wheel_needs_are_inside(tmp_path: Path) -> None:
    with zipfile.ZipFile(WHEELS[0]) as archive:
        libraries = [name for name in archive.namelist() if ".so" in Path(name).name]
        archive.extractall(tmp_path, libraries)
    assert {"eaves/libeaves.so", "eaves/eaves_torch.so", "eaves/eaves_jax.so"} <= set(libraries)
    inside = {Path(name).name for name in libraries}
    for library in libraries:
        needed = set(re.findall(r"\(NEEDED\).*\[(.*)\]", run("readelf", "-d", tmp_path / library)))
        assert needed <= inside | SYSTEM, f"{library} needs {needed - inside - SYSTEM}"


def test_the_licences_of_others_are_inside() -> None:
    with zipfile.ZipFile(WHEELS[0]) as archive:
        names = [Path(name).name for name in archive.namelist()]
    assert "nlohmann-json-copyright" in names
    for library, licence in {"libhwy": "copyright", "libdnnl": "LICENSE", "libgomp": "copyright"}.items():
        is_inside = any(name.startswith(library) and ".so" in name for name in names)
        assert f"{library}-{licence}" in names or not is_inside, library


def test_the_wheel_works_in_a_fresh_environment_without_a_compiler(tmp_path: Path) -> None:
    python = installed(WHEELS[0], tmp_path / "venv")
    assert check_that_it_works(python, tmp_path).startswith(f"eaves     {version()} ")


def settings() -> Iterator[str]:
    """The configuration of the wheel in dist/, so that no code is compiled a second time."""
    for name, value in re.findall(r"^(EAVES_CUDA|EAVES_CUDA_TARGETS):\w+=(.+)$", CACHE.read_text(), re.MULTILINE):
        yield f"-Ccmake.define.{name}={value}"


def test_the_source_archive_builds_the_same_package(tmp_path: Path) -> None:
    pytest.importorskip("build.__main__", reason="build is not installed")
    build = (sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tmp_path / "dist"))
    run(*build, "--sdist", ROOT)
    (archive,) = (tmp_path / "dist").glob("*.tar.gz")
    assert archive.name == f"eaves-{version()}.tar.gz"
    shutil.unpack_archive(archive, tmp_path)
    tree = tmp_path / archive.name.removesuffix(".tar.gz")
    # With CUTLASS below the tree, as here: ccache then knows the objects.
    if (ROOT / ".venv").exists():
        (tree / ".venv").symlink_to(ROOT / ".venv")
    environment = {**os.environ, "CMAKE_BUILD_PARALLEL_LEVEL": str(os.cpu_count())}
    run(*build, "--wheel", *settings(), tree, env=environment)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as ours, zipfile.ZipFile(WHEELS[0]) as released:
        names = [
            {name for name in each.namelist() if name.startswith("eaves/") and not name.endswith("/")}
            for each in (ours, released)
        ]
    assert names[0] == names[1]
    check_that_it_works(installed(wheel, tmp_path / "venv"), tmp_path)
