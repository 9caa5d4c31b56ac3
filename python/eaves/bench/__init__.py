"""The side-by-side benchmark, `python -m eaves.bench`: eaves next to what else is installed, in one process.

Where to look: `benchmark.py` has the words (row, table, operator, provider), `logsumexp.py` is an operator in those
words, `arguments.py` reads the command line, `run.py` goes through the tables, `harness.py` measures, `report.py` and
`plot.py` show, `results.py` keeps, `stored.py` reads again, `page.py` lays out and `summary.py` sums up. An operator is
one such file and one entry in `operators.py`; a peer is one class in the operator's file.
"""
