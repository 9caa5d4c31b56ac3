"""`python benchmarks`: eaves beside PyTorch and other libraries, and the pages of results/. `--help` says how."""

import sys

from bench.program import main  # Python finds it, because it puts the folder it runs on the path of imports

if __name__ == "__main__":
    sys.exit(main())
