"""Every check of tools/check_docs can fail: each kind of defect is put into a small tree, and is found."""

import json
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

CHECK_DOCS = Path(__file__).resolve().parent / "check_docs"

# Stands for the program: knows info, bench and run, and the options below.
PROGRAM = """#!/bin/sh
case "$*" in
  --help) echo "info bench run --version" ;;
  "info --help") echo "--json" ;;
  "bench --help") echo "--sweep --device" ;;
  "run --help" | "run logsumexp --help") echo "--input --output" ;;
  info) echo "eaves 0.1.0" ;;
  *) exit 2 ;;
esac
"""


def row(provider, ms, n, mode="fwd"):
    return {"op": "logsumexp", "mode": mode, "dtype": "bf16", "shape": {"batch": 4, "n": n}, "options": {},
            "provider": provider, "ms": ms, "gbps": 4000.0}


RESULTS = {"schema": 1, "rows": [row("eaves", 0.21, 8), row("limit", 0.2, 8), row("eaves", 0.5, 8, "bwd")]}
TABLE = """| shape | eaves ms | limit ms | eaves / limit | GB/s |
|---|---:|---:|---:|---:|
| batch 4, n 8 | 0.2100 | 0.2000 | 1.050 | 4000 |"""


class CheckDocs(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name)
        self.put("Makefile", "build:\n\ntest: build\n")
        self.put("include/eaves/logsumexp.h", "void logsumexp_forward();\n")
        self.put("src/ops/logsumexp/logsumexp.cpp", "// here\n")
        self.put("src/core/check.h", "")
        self.put("examples/cpp/a.cpp", "int main() {\n  int a = 1;\n  return a;\n}\n")
        self.put("results/a.json", json.dumps(RESULTS))
        self.put("docs/other.md", "# A heading, with `code`\n")
        self.put(".gitignore", "/build/\n")
        self.put("build/release/eaves", PROGRAM).chmod(0o755)

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

    def assert_sound(self, text):
        code, output = self.check(text)
        self.assertEqual(code, 0, output)
        return output

    def assert_defect(self, text, expected):
        code, output = self.check(text)
        self.assertEqual(code, 1, output)
        self.assertIn(expected, output)
        self.assertIn("README.md:", output)
        self.assertIn(" 1 defects", output)

    def test_a_missing_program_is_said(self):
        (self.root / "build/release/eaves").unlink()
        code, output = self.check("")
        self.assertEqual(code, 1)
        self.assertIn("run make build first", output)

    def test_links(self):
        self.assert_sound("[a](docs/other.md) [b](docs/other.md#a-heading-with-code) [c](https://example.org/x)")
        self.assert_defect("[a](docs/none.md)", "links to docs/none.md, which does not exist")
        self.assert_defect("[a](docs/other.md#none)", "no such heading")

    def test_paths(self):
        self.assert_sound("`src/core/check.h`, `core/check.h`, `check.h`, `src/ops/<op>/<op>.cpp`, `<op>.cpp`, `src/ops/`,"
                          " `src/ops/<op>/<op>*.cpp`,"
                          " `build/release/eaves`, `and/or`, `1/2`")
        self.assert_defect("`src/core/none.h`", "names the file src/core/none.h")
        self.assert_defect("`core/none.h`", "names the file core/none.h")
        self.assert_defect("`none.h`", "names the file none.h")
        self.assert_defect("`src/none/`", "names the file src/none/")
        self.assert_defect("`src/ops/<op>/<op>_none.cpp`", "_none.cpp, which does not exist")
        self.assert_defect("```\nsrc/none/ what it is\n```", "names the file src/none/")

    def test_make_targets(self):
        self.assert_sound("`make test`, `make test CUDA=OFF`")
        self.assert_defect("`make none`", "make none")
        self.assert_defect("```sh no-run: slow\nmake none\n```", "make none")

    def test_commands_options_and_operators(self):
        self.assert_sound("`eaves info --json`, `build/release/eaves bench logsumexp --sweep seed`, `eaves --version`,"
                          " `eaves run logsumexp --input x`, `eaves bench [operator...]`, `--sweep`")
        self.assert_defect("`eaves none`", "names eaves none, a command")
        self.assert_defect("`eaves bench --none`", "the option --none, which eaves bench does not have")
        self.assert_defect("`eaves info --sweep`", "the option --sweep, which eaves info does not have")
        self.assert_defect("`eaves bench none`", "the operator none")
        self.assert_defect("`eaves run none --input x`", "the operator none")
        self.assert_defect("`--none`", "the option --none")
        self.assert_defect("```sh no-run: needs a GPU\nbuild/release/eaves bench \\\n --none\n```", "--none")

    def test_python_modules_and_their_options(self):
        help_text = 'case "$2 $3" in "eaves info"|"eaves.bench --help") echo "--json --plot" ;; *) exit 1 ;; esac'
        self.put(".venv/bin/python", f"#!/bin/sh\n{help_text}\n").chmod(0o755)
        self.assert_sound("`python -m eaves.bench logsumexp --plot plots`, `.venv/bin/python -m eaves info --json`,"
                          " `python -m pytest --none`, `--plot`")
        self.assert_defect("`python -m eaves.bench --none`", "the option --none, which python -m eaves.bench")
        self.assert_defect("`python -m eaves.bench none`", "the operator none")
        self.assert_defect("`python -m eaves none`", "names python -m eaves none, which does not run")

    def test_functions(self):
        self.assert_sound("`logsumexp_forward`")
        self.assert_defect("`none_forward`", "names none_forward")
        self.assert_defect("```cpp\neaves::none_backward({});\n```", "names none_backward")

    def test_examples_are_run_in_a_copy(self):
        output = self.assert_sound("```sh\neaves info\nbuild/release/eaves info\necho x > README.md\n```\n"
                                   "```sh\ngrep -q x README.md\n```\n```sh no-run: needs a GPU\nexit 1\n```\n")
        self.assertIn("2 examples run, 1 not run (needs a GPU)", output)
        self.assertIn("eaves info", (self.root / "README.md").read_text())
        self.assert_defect("```sh\necho before; false; echo after\n```", "the example fails with 1")
        self.assert_defect("```sh\nfalse | cat\n```", "the example fails with 1")
        self.assert_defect("```sh no-run\nmake test\n```", "and the reason")

    def test_quotes(self):
        self.assert_sound("```cpp\n// examples/cpp/a.cpp\nint main() {\n  int a = 1;\n```")
        self.assert_sound("```cpp\n// examples/cpp/a.cpp\nint a = 1;\nreturn a;\n```")
        self.assert_sound("```cpp\n// a thought\nint b;\n```")
        self.assert_defect("```cpp\n// examples/cpp/a.cpp\nint a = 2;\n```", "not a part of it")
        self.assert_defect("```cpp\n// examples/cpp/a.cpp\nint main() {\n  return a;\n```", "not a part of it")
        self.assert_defect("```cpp\n// examples/cpp/none.cpp\nint a;\n```", "quotes examples/cpp/none.cpp")

    def test_tables(self):
        begin, end = "<!-- table: results/a.json mode=fwd -->\n", "\n<!-- end -->\n"
        self.assert_sound(begin + TABLE + end)
        self.assert_defect(begin + TABLE.replace("1.050", "1.000") + end, "not what results/a.json says")
        self.assert_defect(begin + end, "not what results/a.json says")
        self.assert_defect(begin + TABLE, "no <!-- end -->")
        self.assert_defect(begin.replace("fwd", "none") + end, "no measured row")
        self.assert_defect(begin.replace("a.json", "none.json") + end, "which does not exist")
        self.put("results/bad.json", "{")
        self.assert_defect(begin.replace("a.json", "bad.json") + end, "no table can be made")

    def test_the_file_of_a_stopped_run_makes_no_table(self):
        self.put("results/stopped.json", json.dumps({"schema": 1, "stopped": True, "rows": RESULTS["rows"]}))
        self.assert_defect("<!-- table: results/stopped.json mode=fwd -->\n<!-- end -->\n",
                           "its run was stopped before the last row")

    def test_tables_of_several_implementations(self):
        rows = [row("eaves", 0.2, 8), row("torch", 0.5, 8), row("other", 0.4, 8), row("limit", 0.1, 8)]
        rows[2].update(ms=None, skipped="out of memory")
        self.put("results/b.json", json.dumps({"protocol": "autograd", "rows": rows}))
        self.check("<!-- table: results/b.json -->\n<!-- end -->\n", "--write")
        written = (self.root / "README.md").read_text()
        self.assertIn("| shape | eaves ms | torch ms | other ms | limit ms | eaves / limit | best peer / eaves |", written)
        self.assertIn("| batch 4, n 8 | 0.2000 | 0.5000 | - | 0.1000 | 2.000 | 2.50 |", written)

    def test_operations_stand_where_they_and_not_bytes_are_counted(self):
        rows = [row("eaves", 0.21, 8), row("limit", 0.2, 8), row("eaves", 0.5, 16)]
        for each, tflops in zip(rows, (612.3, 640.0, 0.257)):
            del each["gbps"]
            each["tflops"] = tflops
        self.put("results/products.json", json.dumps({"schema": 1, "rows": rows}))
        self.check("<!-- table: results/products.json -->\n<!-- end -->\n", "--write")
        written = (self.root / "README.md").read_text()
        self.assertIn("| eaves / limit | TFLOP/s |", written)
        self.assertIn("| 1.050 | 612 |", written)
        self.assertIn("| - | 0.26 |", written)

    def test_a_comma_in_a_filter_means_or(self):
        results = {"schema": 1, "rows": [row("eaves", 0.21, 8), row("limit", 0.2, 8), row("eaves", 0.5, 16),
                                         row("limit", 0.4, 16), row("eaves", 0.9, 32), row("limit", 0.8, 32)]}
        self.put("results/or.json", json.dumps(results))
        code, output = self.check("<!-- table: results/or.json n=8,16 -->\n<!-- end -->\n", "--write")
        self.assertEqual(code, 0, output)
        text = (self.root / "README.md").read_text()
        self.assertIn("n 8 ", text)
        self.assertIn("n 16 ", text)
        self.assertNotIn("n 32 ", text)

    def test_a_case_of_two_tables_stands_once_with_its_first_time(self):
        results = {"schema": 1, "rows": [row("eaves", 0.21, 8), row("limit", 0.2, 8), row("eaves", 0.3, 8),
                                         row("limit", 0.25, 8)]}
        self.put("results/twice.json", json.dumps(results))
        self.check("<!-- table: results/twice.json -->\n<!-- end -->\n", "--write")
        self.assertIn(TABLE, (self.root / "README.md").read_text())
        self.assertNotIn("0.3000", (self.root / "README.md").read_text())

    def test_write_makes_the_tables(self):
        text = "before\n<!-- table: results/a.json mode=fwd -->\nold\n<!-- end -->\nafter\n"
        code, output = self.check(text, "--write")
        self.assertEqual(code, 0, output)
        self.assertEqual((self.root / "README.md").read_text(), text.replace("old", TABLE))
        self.assert_sound((self.root / "README.md").read_text())

    def test_texts(self):
        begin, end = "<!-- text: results/a.txt -->\n", "\n<!-- end -->\n"
        self.put("results/a.txt", "| a |\n|---|\n| 1 |\n")
        self.assert_sound(begin + "| a |\n|---|\n| 1 |" + end)
        self.assert_defect(begin + "| a |\n|---|\n| 2 |" + end, "the text is not what results/a.txt says")
        self.assert_defect(begin.replace("a.txt", "none.txt") + end, "which does not exist")
        self.put("results/a.txt", "no table\n")
        self.assert_sound(begin + "```text\nno table\n```" + end)
        self.assert_defect(begin + "no table" + end, "the text is not what results/a.txt says")

    def test_pages(self):
        begin, end = "<!-- page: benchmarks/results/h200 -->\n", "\n<!-- end -->\n"
        page = "# The page\n\n<!-- summary -->\n| a |\n|---|\n| 1 |\n<!-- end -->\n\n[first](#the-page)\n"
        self.put("benchmarks/results/h200/README.md", page)
        self.assert_sound(begin + "| a |\n|---|\n| 1 |" + end)
        self.assert_defect(begin + "| a |\n|---|\n| 2 |" + end, "the page is not what benchmarks/results/h200 says")
        self.assert_defect(begin.replace("h200", "none") + end, "is of benchmarks/results/none, which does not exist")
        self.assertEqual(self.check(begin + "old" + end, "--write")[0], 0)
        self.assertEqual((self.root / "README.md").read_text(), begin + "| a |\n|---|\n| 1 |" + end)
        self.put("benchmarks/results/h200/README.md", page.replace("<!-- summary -->\n", ""))
        self.assert_defect(begin + end, "no table can be made of benchmarks/results/h200")

    def test_a_page_may_say_a_sentence_below_the_table(self):
        shown = "| a |\n|---|\n| 1 |\n\nNot measured: b in a."
        self.put("benchmarks/results/h200/README.md", f"<!-- summary -->\n{shown}\n<!-- end -->\n")
        begin, end = "<!-- page: benchmarks/results/h200 -->\n", "\n<!-- end -->\n"
        self.assertEqual(self.check(begin + "old" + end, "--write")[0], 0)
        self.assertEqual((self.root / "README.md").read_text(), begin + shown + end)
        self.assert_sound(begin + shown + end)
        self.assert_defect(begin + shown.replace("b in", "c in") + end, "the page is not what")

    def test_a_page_has_a_second_part_that_others_show(self):
        page = "<!-- summary -->\n| a |\n<!-- end -->\n\n<!-- slower -->\n| b |\n|---|\n<!-- end -->\n"
        self.put("benchmarks/results/h200/README.md", page)
        begin, end = "<!-- page: benchmarks/results/h200 slower -->\n", "\n<!-- end -->\n"
        self.assert_sound(begin + "| b |\n|---|" + end)
        self.assert_defect(begin + "| a |" + end, "the page is not what benchmarks/results/h200 says")
        self.assertEqual(self.check(begin + "old" + end, "--write")[0], 0)
        self.assertEqual((self.root / "README.md").read_text(), begin + "| b |\n|---|" + end)
        self.put("benchmarks/results/h200/README.md", page.replace("<!-- slower -->\n", ""))
        self.assert_defect(begin + end, "no table can be made of benchmarks/results/h200")
        self.assert_defect("<!-- table: results/a.json slower -->" + end, "a table has no part slower")
        self.assert_defect(begin.replace("slower", "faster") + end, "<!-- page: FOLDER [slower|as-good] key=value")

    def test_of_a_page_some_lines_may_be_shown(self):
        page = "<!-- as-good -->\n| op | b |\n|---|---|\n| x | 1 |\n| y | 2 |\n\nNot all.\n<!-- end -->\n"
        self.put("benchmarks/results/h200/README.md", page)
        begin, end = "<!-- page: benchmarks/results/h200 as-good op=y,z -->\n", "\n<!-- end -->\n"
        shown = "| op | b |\n|---|---|\n| y | 2 |\n\nNot all."
        self.assert_sound(begin + shown + end)
        self.assert_defect(begin + shown.replace("y", "x").replace("2", "1") + end, "the page is not what")
        self.assert_defect(begin.replace("op=y", "op=w") + end, "no line of the page fits")
        self.assert_defect(begin.replace("op=", "mode=") + end, "no table can be made")

    def test_pages_are_checked_like_documents(self):
        self.put("benchmarks/results/h200/README.md", "[curves](plots/none.png)\n")
        code, output = self.check("")
        self.assertEqual(code, 1, output)
        self.assertIn("benchmarks/results/h200/README.md:1: links to plots/none.png, which does not exist", output)

    def test_new_files_are_there_for_the_examples(self):
        new = "```cpp new\n// include/eaves/new.h\nvoid new_forward();\n```\n"
        self.assert_sound(new + "`include/eaves/new.h` `new_forward`\n```sh\ngrep -q '^void' include/eaves/new.h\n```\n")
        self.assertFalse((self.root / "include/eaves/new.h").exists())
        self.assert_defect("`include/eaves/new.h`", "names the file include/eaves/new.h")
        self.assert_defect("```cpp new\nvoid f();\n```", "the new file's name")
        self.assert_sound("```python new\n# tools/new.py\nprint(1)\n```\n```sh\ngrep -q print tools/new.py\n```\n")
        self.assert_defect("```python new\nprint(1)\n```", "the new file's name")

    def test_columns_that_vary_are_shown(self):
        text = "<!-- table: results/a.json -->\n<!-- end -->\n"
        self.check(text, "--write")
        written = (self.root / "README.md").read_text()
        self.assertIn("| mode | shape |", written)
        self.assertIn("| bwd | batch 4, n 8 | 0.5000 | - | - | 4000 |", written)


if __name__ == "__main__":
    unittest.main()
