"""The benchmark, `python benchmarks`: eaves beside the libraries that are installed, in one process.

`benchmark.py` has the words (row, operator, provider); `logsumexp.py` is an operator in those words, and one line in
`operators.py`; a peer is one `Provider` in the operator's file. `timing.py` has the one loop that times anything.
`harness.py` measures a row and returns the lines of the result file, one for each provider. Tables, curves and pages
are made from such lines: `tables.py` has the tables and sentences, `plot.py` the curves, `page.py` the pages. `run.py`
goes through the rows, `results.py` has the files. `jax.py` measures from JAX, `ranks.py` on several processes, and
`accuracy.py` the errors beside the times.
"""
