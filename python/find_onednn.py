"""Prints where the package onednn-cpu-gomp has oneDNN's library, then its licences, separated by semicolons."""

from importlib.metadata import files

_WANTED = ("libdnnl.so.3", "LICENSE", "THIRD-PARTY-PROGRAMS")

_found = {file.name: file.locate() for file in files("onednn-cpu-gomp") or []}
print(";".join(str(_found[name]) for name in _WANTED))
