"""The first three blocks of docs/quickstart.md are one program, which runs. The last quotes an example."""

import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "quickstart.md"
# tools/check_docs checks the blocks that quote a file.
BLOCKS = re.findall(r"^```python\n(?!# examples/)(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)


def test_the_page_runs_from_top_to_bottom() -> None:
    assert len(BLOCKS) == 3
    names: dict[str, Any] = {}
    for number, block in enumerate(BLOCKS):
        exec(compile(block, f"{PAGE.name}, block {number}", "exec"), names)
    assert [each.shape for each in names["found"]] == [names["hidden"].shape, names["head"].weight.shape]
