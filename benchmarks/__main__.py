"""`python benchmarks`: measures eaves beside other libraries, and draws the pages of results/. See `--help`."""

import sys

from bench.program import main  # Python puts the folder that it runs on the import path

if __name__ == "__main__":
    sys.exit(main())
