"""tools/test_doors on made-up tests: which lines pass."""

import sys
import tempfile
import unittest
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

TEST_DOORS = Path(__file__).resolve().parent / "test_doors"


class TestDoors(unittest.TestCase):
    def passes(self, source):
        loader = SourceFileLoader("test_doors", str(TEST_DOORS))
        doors = sys.modules[loader.name] = ModuleType(loader.name)  # where dataclasses look
        doors.__file__ = str(TEST_DOORS)
        loader.exec_module(doors)
        with tempfile.TemporaryDirectory() as folder:
            tests = Path(folder) / "made_up_test.py"
            tests.write_text(f"import pytest\n\n\ndef test_a():\n    {source}\n")
            doors.MATRIX, doors.folder_of = {"a": doors.Line("", str(tests))}, lambda name: folder
            return doors.test("a")

    def test_a_line_fails_if_no_test_of_it_runs(self):
        self.assertTrue(self.passes("pass"))
        self.assertFalse(self.passes("pytest.skip()"))
        self.assertFalse(self.passes("assert False"))


if __name__ == "__main__":
    unittest.main()
