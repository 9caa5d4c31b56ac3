"""The rooms of python/eaves: imports between them go one way, and torch.distributed is imported in one of them."""

import ast
import subprocess
import sys
from pathlib import Path

import eaves

ROOT = Path(__file__).parents[2]
PACKAGE = Path(eaves.__file__).parent


def test_imports_between_rooms_go_one_way() -> None:
    lint = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as lint; lint()"]
    result = subprocess.run(
        [*lint, "--config", ROOT / "pyproject.toml", "--no-cache"], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "Contracts: 2 kept, 0 broken." in result.stdout


def imported_at_run_time(path: Path) -> set[str]:
    """The modules that a file imports at run time, without imports for type checkers."""
    tree = ast.parse(path.read_text())
    of_type_checkers = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for statement in node.body
        for inner in ast.walk(statement)
    }
    names = set()
    for node in ast.walk(tree):
        if node in of_type_checkers:
            continue
        if isinstance(node, ast.Import):
            names.update(each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names.update(f"{node.module}.{each.name}" for each in node.names)
    return names


def test_torch_distributed_is_imported_in_one_room() -> None:
    rooms = {
        path.relative_to(PACKAGE).parts[0]
        for path in PACKAGE.rglob("*.py")
        if any(name.startswith("torch.distributed") for name in imported_at_run_time(path))
    }
    assert rooms == {"_parallel"}


MOST_PARAMETERS = 8
PUBLIC = {"hf/models.py: patch"}


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    of = function.args
    return len([*of.posonlyargs, *of.args, *of.kwonlyargs, *filter(None, (of.vararg, of.kwarg))])


def test_no_private_function_has_many_parameters() -> None:
    found = set()
    for path in PACKAGE.rglob("*.py"):
        room, name = path.relative_to(PACKAGE).parts[0], path.relative_to(PACKAGE).as_posix()
        if room in ("functional", "jax"):
            continue
        functions = [("", node) for node in ast.parse(path.read_text()).body]
        for prefix, node in functions:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and parameters(node) > MOST_PARAMETERS:
                found.add(f"{name}: {prefix}{node.name}")
            inner = f"{node.name}." if isinstance(node, ast.ClassDef) else prefix
            functions += [(inner, each) for each in ast.iter_child_nodes(node)]  # type: ignore[misc]
    assert found == PUBLIC
