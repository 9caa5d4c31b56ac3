"""tools/test_integrations on made-up tests: the lines that pass and fail."""

import sys
import tempfile
import unittest
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

TEST_INTEGRATIONS = Path(__file__).resolve().parent / "test_integrations"


class TestIntegrations(unittest.TestCase):
    def passes(self, source):
        loader = SourceFileLoader("test_integrations", str(TEST_INTEGRATIONS))
        integrations = sys.modules[loader.name] = ModuleType(loader.name)  # dataclasses look there
        integrations.__file__ = str(TEST_INTEGRATIONS)
        loader.exec_module(integrations)
        with tempfile.TemporaryDirectory() as folder:
            tests = Path(folder) / "made_up_test.py"
            tests.write_text(f"import pytest\n\n\ndef test_a():\n    {source}\n")
            integrations.MATRIX, integrations.folder_of = {"a": integrations.Line("", str(tests))}, lambda name: folder
            return integrations.test("a")

    def test_a_line_fails_if_no_test_of_it_runs(self):
        self.assertTrue(self.passes("pass"))
        self.assertFalse(self.passes("pytest.skip()"))
        self.assertFalse(self.passes("assert False"))


if __name__ == "__main__":
    unittest.main()
