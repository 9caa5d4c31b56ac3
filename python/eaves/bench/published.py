"""What the published tables are, in one paragraph for pages, printed tables and --help. cli/bench.cpp says the same."""

TEXT = """\
eaves started from published measurements of other libraries. `--sweep seed` measures the same shapes, `--protocol seed`
the same backward (it accumulates into .grad). In their titles `lce` means linear_cross_entropy and `md_lrpe_cosine`
means lrpe_cosine over a grid."""
