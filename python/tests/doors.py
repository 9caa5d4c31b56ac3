"""For tests of the libraries that can train with eaves: the recipes of docs/trainers.md."""

import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "trainers.md"


def recipe(title: str, language: str = "python") -> str:
    """The block in a language of the section with this title."""
    block = rf"^## {re.escape(title)}\n(?:(?!^## ).)*?^```{language}\n(.*?)^```"
    found = re.findall(block, PAGE.read_text(), re.M | re.S)
    assert len(found) == 1, title
    return str(found[0])


def run_recipe(title: str, **given: Any) -> dict[str, Any]:
    """Runs that block with these names; returns all names that stand behind it."""
    names: dict[str, Any] = dict(given)
    exec(compile(recipe(title), f"{PAGE.name}: {title}", "exec"), names)
    return names
