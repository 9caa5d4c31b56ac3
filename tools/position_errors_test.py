"""tools/position_errors, at the positions that its result stands for: eaves keeps the result to the rounding of its
dtype a million positions on, and a formula in bfloat16 keeps nothing of it."""

import importlib.machinery
import importlib.util
import io
import json
import tempfile
import unittest
from contextlib import redirect_stdout
from pathlib import Path
from unittest import mock

PROGRAM = Path(__file__).resolve().parent / "position_errors"


def load():
    """The program as a module: its name has no ending."""
    loader = importlib.machinery.SourceFileLoader("position_errors", str(PROGRAM))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


try:
    import torch

    program, missing = load(), ""
except ModuleNotFoundError as error:  # a build without the Python package
    program, missing = None, f"no module {error.name}"

FAR = 1_000_000


@unittest.skipIf(missing, missing)
class PositionErrors(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.positions = [1, FAR]
        cls.rows = program.measure(torch.device("cpu"), cls.positions)

    def row(self, dtype, way, position=FAR):
        [row] = [row for row in self.rows if (row["dtype"], row["position"], row["way"]) == (dtype, position, way)]
        return row

    def test_eaves_is_within_a_unit_in_the_last_place_far_away(self):
        self.assertLess(self.row("bf16", "eaves")["units_in_last_place"], 1.0)
        # In float32 it is the unit of a number in [1, 2): where the result is small beside x, its own are finer.
        self.assertLess(self.row("fp32", "eaves")["share_of_x"], 2.0**-23)

    def test_the_formula_in_float32_is_as_good(self):
        self.assertLess(self.row("bf16", "torch, float32")["units_in_last_place"], 1.0)

    def test_the_formula_in_bfloat16_has_lost_the_angle(self):
        for dtype in program.DTYPES:
            self.assertGreater(self.row(dtype, "torch, bfloat16")["units_in_last_place"], 100.0)
            self.assertGreater(self.row(dtype, "torch, bfloat16")["share_of_x"], 1.0)
        # It is there that it goes wrong, and not everywhere.
        self.assertLess(self.row("bf16", "torch, bfloat16", position=1)["share_of_x"], 0.1)

    def test_the_table_has_a_line_for_each_power_of_ten(self):
        lines = program.table(self.rows, self.positions).splitlines()
        self.assertEqual([line.split("|")[1].strip() for line in lines[2:]], ["1", "1000000"])
        self.assertEqual({line.count("|") for line in lines}, {2 + len(program.WAYS) * len(program.DTYPES)})

    def test_the_files_are_written(self):
        with tempfile.TemporaryDirectory() as folder:
            endings = {"json": "json", "table": "txt", "plot": "png"}
            files = {kind: Path(folder, f"errors.{ending}") for kind, ending in endings.items()}
            words = [word for kind, file in files.items() for word in (f"--{kind}", str(file))]
            with mock.patch.object(program, "POSITIONS", self.positions), redirect_stdout(io.StringIO()):
                program.main(words)
            result = json.loads(files["json"].read_text())
            self.assertEqual(len(result["rows"]), len(self.rows))
            self.assertTrue(files["table"].read_text().startswith("| position |"))
            self.assertTrue(files["plot"].read_bytes().startswith(b"\x89PNG"))


if __name__ == "__main__":
    unittest.main()
