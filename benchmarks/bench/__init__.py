"""The benchmark, `python benchmarks`: measures eaves beside the installed libraries, in one process.

`benchmark.py` defines the terms (row, operator, provider). `logsumexp.py` is an operator in these terms, and one line
in `operators.py`; a peer is one `Provider` in the operator's file. `timing.py` has the one loop that times anything.
`harness.py` measures a row and returns the lines of the result file, one for each provider. Tables, pictures and pages
are made from such lines: `tables.py` has the tables and sentences, `plot.py` the pictures, `page.py` the pages.
`run.py` goes through the rows, `results.py` has the files, `submission.py` all of them in one. `jax.py` measures from
JAX, `ranks.py` on several processes, and `accuracy.py` measures errors.
"""
