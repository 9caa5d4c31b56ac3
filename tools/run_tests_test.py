"""tools/run_tests on made-up programs: its progress lines and its counts."""

import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

RUN_TESTS = Path(__file__).resolve().parent / "run_tests"
GOOGLE = 'add_test(google sh -c "echo \'[       OK ] A.b (3 ms)\'; echo \'[  SKIPPED ] A.c (0 ms)\'")\n'
PYTEST = """add_test(pytest sh -c "echo '.... [ 40%]'; sleep 1; echo '4 passed, 1 skipped in 1.00s'")\n"""
FAILS = "add_test(fails sh -c \"echo '3: why it fails'; exit 1\")\n"


class RunTests(unittest.TestCase):
    def run_on(self, programs):
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "CTestTestfile.cmake").write_text(programs)
            impatient = Path(folder) / "run_tests"
            source = RUN_TESTS.read_text()
            self.assertIn("SECONDS_OF_SILENCE = 30", source)
            impatient.write_text(source.replace("SECONDS_OF_SILENCE = 30", "SECONDS_OF_SILENCE = 0.2"))
            result = subprocess.run([sys.executable, impatient, folder], capture_output=True, text=True)
        return result.returncode, result.stdout

    def test_it_says_what_runs_and_counts_tests_and_not_programs(self):
        status, out = self.run_on(GOOGLE + PYTEST)
        self.assertEqual(status, 0, out)
        self.assertIn("      still running: pytest 40 %\n", out)
        self.assertNotIn("A.b", out)
        self.assertEqual(out.splitlines()[-1], "Tests: 5 passed, 0 failed, 2 skipped.")

    def test_it_shows_what_a_program_that_fails_has_printed(self):
        status, out = self.run_on(GOOGLE + FAILS)
        self.assertEqual(status, 1)
        self.assertIn("\n3: why it fails\n", out)
        self.assertNotIn("A.b", out)
        self.assertEqual(out.splitlines()[-1], "Tests: 1 passed, 1 failed, 1 skipped.")

    def test_it_counts_the_tests_that_a_gpu_would_run(self):
        skips = "echo 'a.cpp:1: Skipped'; echo 'no GPU: no driver'; echo '[  SKIPPED ] A.d (0 ms)'"
        few = "echo 'SKIPPED [3] b_test.py:1: no GPU'; echo 'SKIPPED [2] b_test.py:2: JAX is not installed'"
        programs = f'add_test(cpp sh -c "{skips}")\nadd_test(py sh -c "{few}; echo \'1 passed, 5 skipped in 1.00s\'")\n'
        status, out = self.run_on(programs)
        self.assertEqual(status, 0, out)
        self.assertIn("\nskipped 3: no GPU\n", out)
        end = "Tests: 1 passed, 0 failed, 6 skipped, 4 of them because this machine has no usable GPU."
        self.assertEqual(out.splitlines()[-1], end)

    def test_without_a_program_it_fails(self):
        self.assertEqual(self.run_on("")[0], 1)


if __name__ == "__main__":
    unittest.main()
