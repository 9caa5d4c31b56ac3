"""Every check of tools/check_docs can fail: the tests put each kind of defect into a small tree, and find it."""

import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

CHECK_DOCS = Path(__file__).resolve().parent / "check_docs"
PAGE = "# Page\n\n## First `one`\n\ntext\n\n| a |\n|---|\n| 1 |\n\n| b |\n|---|\n\n## Second\n\nno table\n"
TABLE = "| a |\n|---|\n| 1 |"


class CheckDocs(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name)
        subprocess.run(["git", "init", "--quiet", self.root], check=True)
        self.put(".gitignore", "/build/\n")
        self.put("src/ops/a/a.cpp", "int main() {\n  int a = 1;\n  return a;\n}\n")
        self.put("docs/page.md", PAGE)
        self.put("docs/lines.txt", "| 1 |\n")
        self.put("build/release/eaves", "#!/bin/sh\necho eaves 0.1.0\n").chmod(0o755)

    def put(self, name, text):
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def check(self, text, *options):
        self.put("README.md", text)
        done = subprocess.run([sys.executable, str(CHECK_DOCS), "--root", str(self.root), *options], text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        return done.returncode, done.stdout

    def assert_sound(self, text, *options):
        code, output = self.check(text, *options)
        self.assertEqual(code, 0, output)
        return output

    def assert_defect(self, text, line, expected):
        code, output = self.check(text)
        self.assertEqual(code, 1, output)
        self.assertIn(f"README.md:{line}: ", output)
        self.assertIn(expected, output)
        self.assertIn(" 1 defects", output)

    def test_links(self):
        self.assert_sound("[a](docs/page.md) [b](docs/page.md#first-one) [c](https://example.org/x) `[d](none)`")
        self.assert_defect("\n[a](docs/none.md)", 2, "links to docs/none.md, which does not exist")
        self.assert_defect("[a](docs/page.md#none)", 1, "no such heading")

    def test_paths(self):
        self.assert_sound("`src/ops/a/a.cpp`, `ops/a/a.cpp`, `a.cpp`, `src/ops/<op>/<op>.cpp`, `src/ops/a/`, `README.md`,"
                          " `build/none/x.txt`, `and/or/`, `1/2`, `x.json`\n```sh no-run: slow\n`src/none.cpp`\n```")
        for path in ("src/none.cpp", "none.cpp", "src/none/", "src/ops/<op>/<op>_none.cpp"):
            self.assert_defect(f"\n`{path}`", 2, "which does not exist")

    def test_examples_are_run_in_a_copy(self):
        output = self.assert_sound("```sh\neaves info\nbuild/release/eaves info\necho x > README.md\n```\n"
                                   "```sh\ngrep -q x README.md\n```\n```sh no-run: needs a GPU\nexit 1\n```\n")
        self.assertIn("2 examples run, 1 not run (needs a GPU)", output)
        self.assertIn("eaves info", (self.root / "README.md").read_text())
        self.assert_defect("\n```sh\necho before; false; echo after\n```", 2, "the example fails with 1")
        self.assert_defect("```sh\nfalse | cat\n```", 1, "the example fails with 1")
        self.assert_defect("```sh no-run\nfalse\n```", 1, "needs its reason")

    def test_a_missing_program_is_said(self):
        (self.root / "build/release/eaves").unlink()
        self.assertIn("run make build first", self.check("")[1])

    def test_quotes(self):
        self.assert_sound("```cpp\n// src/ops/a/a.cpp\nint a = 1;\nreturn a;\n```\n```cpp\n// a thought\nint b;\n```")
        for lines in ("int a = 2;", "int main() {\n  return a;"):
            self.assert_defect(f"```cpp\n// src/ops/a/a.cpp\n{lines}\n```", 1, "not a part of it")
        self.assert_defect("```cpp\n// src/none.cpp\nint a;\n```", 1, "quotes src/none.cpp")

    def test_tables_and_texts_are_those_of_their_files(self):
        for source, shown in (("from: docs/page.md#first-one", TABLE), ("text: docs/lines.txt", "| 1 |")):
            begin, end = f"<!-- {source} -->\n", "\n<!-- end -->\n"
            self.assert_sound(begin + shown + end)
            self.assert_defect(begin + shown.replace("1", "2") + end, 1, "--write")
            self.assert_sound(begin + "old" + end, "--write")
            self.assertEqual((self.root / "README.md").read_text(), begin + shown + end)
        begin = "<!-- from: docs/page.md#wide columns 1 3 -->\n"
        self.put("docs/page.md", "# Wide\n| a | b | c |\n|---|---:|--:|\n| 1 | 2 | 3 |\n| 4 | 5 | - |\n")
        self.assert_sound(f"{begin}| a | c |\n|---|--:|\n| 1 | 3 |\n<!-- end -->\n", "README.md")
        self.assert_defect(f"{begin.replace('3', '4')}<!-- end -->\n", 1, "there is no docs/page.md#wide, columns 1 4")
        for source in ("from: docs/none.md#a", "from: docs/page.md#none", "from: docs/page.md#second", "text: none.txt"):
            self.assert_defect(f"<!-- {source} -->\n<!-- end -->\n", 1, "there is no ")

    def test_a_marker_without_its_end_or_of_no_kind_is_found(self):
        for text in ("<!-- text: docs/lines.txt -->\n| 1 |\n", "<!-- page: docs -->\n<!-- end -->\n"):
            self.assert_defect(text, "?", "with its end")

    def test_pages_of_results_are_checked_and_a_page_may_be_chosen(self):
        self.put("benchmarks/results/h200/README.md", "[curves](plots/none.png)\n")
        self.assertIn("benchmarks/results/h200/README.md:1: links to plots/none.png", self.check("")[1])
        self.assert_sound("", "README.md")

    def assert_words(self, name, text, expected):
        self.put(name, text)
        code, output = self.check(text if name == "README.md" else "")
        self.assertEqual(code, 1, output)
        self.assertRegex(output, expected)
        self.assertIn(" 1 defects", output)

    def test_a_group_has_few_pronouns(self):
        self.assert_sound("What is there: what was there, and what will be.\n")
        self.assert_words("README.md", "what what what what", r'README.md: 4.0 of 1,000 are "what", at most 3: .* README.md')
        self.assert_sound("```sh no-run: slow\nwhat\n```\n| what |\n|---|\n`what` [what](docs/page.md) what what")
        for name, text, expected in (
            ("docs/b.md", "those of those", r'docs: 2.0 of 1,000 are "those"'),
            ("src/b.cpp", "// where, where\n/// where, where\n", r'comments of C\+\+: 4.0 of 1,000 are "where".* src/b.cpp'),
            ("a/b.py", '"""what what\n\nwhat what"""  # what\nwhat = "what"\n', r'comments of Python: 5.0 .* "what"'),
            ("a/tests/b.py", "# those those those\n", r'comments of Python tests: 3.0 of 1,000 are "those"'),
            ("CHANGELOG.md", "where where where where\n", r'CHANGELOG.md: 4.0 of 1,000 are "where"'),
            ("tools/b", "#!/bin/sh\n# what what\necho what  # what what\n", r'comments of tools: 4.0 of 1,000 are "what"'),
            ("tools/c", '#!/usr/bin/env python3\n"""those"""  # those\n', r'comments of tools: 2.0 of 1,000 are "those"'),
            ("cmake/b.cmake", "# where where\nset(where)  # where where\n", r'comments of tools: 4.0 of 1,000 are "where"'),
        ):
            self.assert_words(name, text, expected)
            (self.root / name).unlink()

    def test_a_long_group_is_measured_by_its_length(self):
        self.assert_sound("what four other words here. " * 12 + "word " * 5000)

    def test_few_sentences_open_with_of(self):
        self.assert_sound("Of course. - Of this. A sentence of many words.\n")
        self.assert_words("README.md", "Of one. Of two: Of three.", r'3.0 of 1,000 are sentences that open with "Of", at most 2')

    def test_words_of_a_chosen_page_and_of_results_are_not_counted(self):
        self.put("benchmarks/results/h200/README.md", "what " * 9)
        self.put("src/b.cpp", "// what what what what\n")
        self.assert_sound("what what what what", "README.md")
        (self.root / "src/b.cpp").unlink()
        self.assert_sound("")


if __name__ == "__main__":
    unittest.main()
