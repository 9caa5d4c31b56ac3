"""The side-by-side benchmark, `python -m eaves.bench`: eaves next to what else is installed, in one process.

`benchmark.py` has the words (row, operator, provider); `logsumexp.py` is an operator in those words, and one line in
`operators.py`; a peer is one `Provider` in the operator's file. `harness.py` measures a row and returns the lines of
the result file, one for each provider. All that is shown is made from such lines: `tables.py` has the tables and
sentences, `plot.py` the curves, `page.py` the pages. `run.py` goes through the rows, `results.py` has the files.
"""
