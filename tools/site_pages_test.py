"""tools/site_pages turns headers, notebooks and GitHub's Markdown into pages. tools/site checks the links of the pages."""

import json
import re
import sys
import tempfile
import unittest
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

TOOL = Path(__file__).resolve().parent / "site_pages"
loader = SourceFileLoader("site_pages", str(TOOL))
site_pages = ModuleType(loader.name)
loader.exec_module(site_pages)

HEADER = """// A sum:
//
//   s = a + b
#pragma once

#include <vector>

namespace eaves {

enum class Kind { plain };

// A remark about the next struct.

struct Args {
  int a = 0;

  int b = 0;
};

/// All throw.
int sum(const Args& args,
        int c);

}  // namespace eaves
"""


class SitePages(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def test_a_header_is_its_comment_and_a_section_for_each_declaration(self):
        path = self.folder / "sum.h"
        path.write_text(HEADER)
        page = site_pages.header_page(path)
        self.assertTrue(page.startswith("# eaves/sum.h\n\nA sum:\n\n      s = a + b\n"), page)
        self.assertEqual([line for line in page.splitlines() if line.startswith("## ")], ["## Kind", "## Args", "## sum"])
        self.assertIn("// A remark about the next struct.\n\nstruct Args {\n  int a = 0;\n\n  int b = 0;\n};\n```", page)
        self.assertNotIn("#include", page)

    def test_every_public_name_is_in_a_heading(self):
        for path in (TOOL.parent.parent / "include/eaves").glob("*.h"):
            headings = re.findall("(?m)^## (.*)$", site_pages.header_page(path))
            names = re.findall(r"(?m)^(?:struct|(?:enum )?class) (\w+)|^[\w:]+ (\w+)\(", path.read_text())
            missing = {"".join(name) for name in names} - set(", ".join(headings).split(", "))
            self.assertFalse(missing, path)
            self.assertTrue(all(headings) and headings, path)

    def test_a_notebook_keeps_its_outputs(self):
        cells = [{"cell_type": "markdown", "source": ["# Title"]},
                 {"cell_type": "code", "source": ["print(1)\n", "plot()"], "outputs": [
                     {"output_type": "stream", "text": ["1\n"]},
                     {"output_type": "display_data", "data": {"image/png": "AAAA"}}]}]
        path = self.folder / "book.ipynb"
        path.write_text(json.dumps({"cells": cells}))
        page = site_pages.notebook_page(path)
        self.assertEqual(page, "# Title\n\n```python\nprint(1)\nplot()\n```\n\n```text\n1\n```\n\n"
                               "![output of the cell above](book_1.png)\n")
        self.assertEqual((self.folder / "book_1.png").read_bytes(), b"\0\0\0")

    def test_markdown_of_github_becomes_pythons(self):
        self.assertEqual(site_pages.for_python_markdown("Text:\n- a\n- b\n  c\n- d\n"), "Text:\n\n- a\n- b\n  c\n- d\n")
        self.assertEqual(site_pages.for_python_markdown("```sh no-run: slow\nText:\n- a\n```\n"), "```sh\nText:\n- a\n```\n")
        self.assertEqual(site_pages.for_python_markdown("[a](../include/eaves/a.h) [b](examples/python/b.ipynb)\n"),
                         "[a](../include/eaves/a.md) [b](examples/python/b.md)\n")


if __name__ == "__main__":
    sys.exit(unittest.main())
