"""tools/test_newest_torch on made-up tests, with the PyTorch of .venv: when it fails."""

import subprocess
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


class TestNewestTorch(unittest.TestCase):
    def run_on(self, *sources):
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            for name in ("tools/test_newest_torch", "pyproject.toml"):
                (root / name).parent.mkdir(exist_ok=True)
                (root / name).write_text((ROOT / name).read_text())
            programs = {".venv/bin/pip": "true", ".venv-newest-torch/bin/python": f'exec {ROOT}/.venv/bin/python "$@"'}
            for name, program in programs.items():
                (root / name).parent.mkdir(parents=True)
                (root / name).write_text(f"#!/bin/sh\n{program}\n")
                (root / name).chmod(0o755)
            packages = subprocess.run(
                ["grep", "-E", "^(pytest|newest-torch) = ", "pyproject.toml"], cwd=root, capture_output=True, text=True
            ).stdout
            (root / ".venv-newest-torch/.eaves-packages").write_text(packages)  # as if they were installed
            files = [f"made_up_{index}_test.py" for index in range(len(sources))]
            for file, source in zip(files, sources):
                (root / file).write_text(f"import pytest\n\n\ndef test_a():\n    {source}\n")
            result = subprocess.run(
                ["bash", "tools/test_newest_torch", *files], cwd=root, capture_output=True, text=True
            )
        return result.returncode, result.stdout + result.stderr

    def test_it_fails_if_no_test_of_a_file_runs(self):
        status, said = self.run_on("pass", "pass")
        self.assertEqual(status, 0, said)
        status, said = self.run_on("pass", "pytest.skip()")
        self.assertEqual(status, 1, said)
        self.assertIn("every test of made_up_1_test.py was skipped", said)


if __name__ == "__main__":
    unittest.main()
