"""The two pages of a device, drawn only from the result files in its folder. README.md has an operator's longest rows,
its pictures, and the rows in which a peer is ahead; details.md has every other row. `python benchmarks page` draws all.
"""

from __future__ import annotations

import json
import os
import re
from argparse import ArgumentParser
from collections.abc import Callable, Container, Sequence
from pathlib import Path
from typing import Any

from eaves._command_line import say

from . import doors, plot, results, submission, tables
from .benchmark import PROGRAM, InvalidArgument, Operator, Provider
from .calls import PROTOCOLS
from .operators import OPERATORS
from .tables import MODES, QUANTITIES, Kind, Table

PAGE = "README.md"
DETAILS = "details.md"

_HEAD = """\
`limit` is a plain kernel that streams the same bytes, in the same run; where an operator multiplies matrices, these
products, whole. MiB is the peak of memory with inputs and outputs counted, for `limit` these alone."""

_REST = f"""\
[Where a peer is faster](#where-a-peer-is-faster) has the rows that eaves loses; [{DETAILS}]({DETAILS}) has every other
row: other shapes and options, {{}}. Drawn by `{PROGRAM} page`."""

_ABOUT = """\
Every number of an operator is from one process, the implementations taking turns, each with cold caches: the median of
the times in milliseconds, and the peak of memory. Before it is timed, what each one computes is compared with what
eaves computes.

- `eaves / limit` is 1 at the limit.
- `best peer / eaves` is the best of the others by eaves: above 1 eaves is faster, or takes less memory.
- "busy, fastest ..." names a time whose median is more than twice its fastest repetition, because the machine was busy
  with something else. Sentences above the tables leave such rows out.
- On a GPU the call of a row "in graph" was captured in a CUDA graph; its time is the time of the replay.
- A peak of less than nine tenths of inputs and outputs is not shown: something else was freed meanwhile.
- Protocol `autograd`: a backward is `torch.autograd.grad(out, inputs, grad_out)`.
- Protocol `accumulate`, as in the [tables that xopes published](../../../docs/published.md): a backward is
  `out.backward(grad_out)`, and `.grad` is never cleared, so that every call also adds its gradient to the one before,
  and the limit streams these bytes too."""

_SLOWER = f"""\
Every row of both pages, by both protocols, where `best peer / eaves` is below {1 - tables.NOISE:.2f}."""

_AS_GOOD = f"""\
The rows where a peer takes less time or less memory, by more than {100 * tables.NOISE:.0f} %, and at most
{100 * tables.NOISE:.0f} % more of the other. The provider `eaves` is the default, `eaves-<algorithm>` is called with
that `algorithm`. The backward of linear_cross_entropy by itself is `recompute` in the line `eaves`, because the default
has computed the gradients by then."""


_OTHERS: dict[str, tuple[str, str, Callable[[Any], dict[str, str]]]] = {
    "jax": (
        "From JAX",
        "`limit` is the matrix products alone, `eaves-pytorch` is called from PyTorch; memory excludes the arguments",
        plot.of_jax,
    ),
    "train_language_model": ("A model that trains", "its losses, step by step", plot.of_training),
}
"""Heading, words and pictures of the files of other programs."""


class Folder:
    """The result files of a device."""

    def __init__(self, path: Path, operators: Sequence[Operator]) -> None:
        self.path, self.operators = path, operators
        self.files = results.read(path, [operator.name for operator in operators])
        self.tables = {name: tables.tables(content["rows"]) for name, content in self.files.items()}

    def of(self, operator: Operator, protocol: str) -> list[Table]:
        return self.tables.get(results.file_name(operator.name, protocol), [])


def draw(path: Path, operators: Sequence[Operator]) -> None:
    """Draws the pages and their pictures."""
    folder = Folder(path, operators)
    if not folder.files:
        example = results.file_name(operators[0].name, PROTOCOLS[0])
        raise InvalidArgument(f'page: "{path}" has no result file, expected for example {example}')
    results.check_folder("page", path / "plots")
    for name, text in texts(folder).items():
        results.write(path / name, text)
    say(f"# wrote {path / PAGE}, {DETAILS}, plots/")


def texts(folder: Folder) -> dict[str, str]:
    """The pages and pictures by their names."""
    pictures = _pictures(folder)
    drawn = {PAGE: _page(folder, pictures), DETAILS: _details(folder)}
    return {name: "\n".join(lines).rstrip("\n") + "\n" for name, lines in drawn.items()} | pictures


def _pictures(folder: Folder) -> dict[str, str]:
    found: dict[str, str] = {}
    for operator in folder.operators:
        if tables_of := folder.of(operator, PROTOCOLS[0]):
            head = folder.files[results.file_name(operator.name, PROTOCOLS[0])]
            device = f"{head['device']}, eaves {head['versions']['eaves']}, torch {head['versions']['torch']}"
            found |= plot.of_operator(operator.name, tables_of, device)
    for name, (_, _, draw_it) in _OTHERS.items():
        if (path := folder.path / f"{name}.json").exists():
            found |= draw_it(json.loads(path.read_bytes()))
    return {f"plots/{name}.svg": text for name, text in found.items()}


def _device(folder: Folder) -> str:
    return next(iter(folder.files.values()))["device"] if folder.files else "no device"


def _page(folder: Folder, pictures: Container[str]) -> list[str]:
    accumulates = any(folder.of(each, "accumulate") for each in folder.operators)
    rest = "memory by size, and protocol `accumulate`" if accumulates else "and memory by size"
    lines = [f"# {_device(folder)}: eaves beside its peers", "", _HEAD, "", _REST.format(rest), ""]
    for operator in folder.operators:
        found = folder.of(operator, PROTOCOLS[0])
        if found:
            chosen, cases = tables.headline(found)
            lines += [f"## {operator.name}", ""]
            shared = [word for word in cases[0].words.split(", ") if all(word in case.words for case in cases)]
            modes = "; ".join(MODES.get(table.mode, table.mode) for table in chosen).capitalize()
            lines += [f"{modes}: {', '.join(shared)}.", ""]
            lines += tables.markdown(tables.headline_table(found))
            measured = {name for table in found for name in table.names("ms")}
            lines += [line for each in operator.providers if each.name in measured and each.note
                      for line in (each.note, "")]  # fmt: skip
            lines += _images(pictures, operator.name)
            lines += [f"- {sentence}" for sentence in tables.summary(found)] + [""]
            lines += [line for table in chosen if table.is_curve for line in _table(table, "ms", "")]
    lines += doors.section(folder.path)
    for name, (heading, words, _) in _OTHERS.items():
        if images := _images(pictures, name):
            lines += [f"## {heading}", "", f"From [{name}.json]({name}.json): {words}.", "", *images]
    everything = [table for each in folder.tables.values() for table in each]
    for heading, words, rows in (
        ("Where a peer is faster", _SLOWER, tables.slower(everything)),
        ("Where a peer is at least as good in time and memory", _AS_GOOD, tables.as_good(everything)),
    ):
        shown = tables.markdown(rows, left=len(rows[0])) if len(rows) > 1 else ["There is no such row.", ""]
        lines += [f"## {heading}", "", words, "", *shown]
    return [*lines, "## How it was measured", "", _ABOUT, "", *_files(folder)]


def _table(table: Table, kind: Kind, protocol: str) -> list[str]:
    heading = f"#### {QUANTITIES[kind]}, protocol {protocol}" if protocol else f"### {table.title}; {QUANTITIES[kind]}"
    return [heading, "", *tables.markdown_table(table, kind)]


def _images(pictures: Container[str], name: str) -> list[str]:
    files = {f"plots/{name}.svg": name, f"plots/{name}-time.svg": f"{name}: time by size"}
    return [line for file, words in files.items() if file in pictures for line in (f"![{words}]({file})", "")]


def _files(folder: Folder) -> list[str]:
    """A table with the device, the date and the versions of each file."""
    lines = [["measured", "device", "commit", "date", "versions"]]
    for name, head in folder.files.items():
        has_gpu = head["cuda"] is not None
        place = f"CUDA {head['cuda']}, driver {head['driver']}" if has_gpu else head.get("cpu_level", "")
        commit = re.sub(r"^([0-9a-f]{12})[0-9a-f]*", r"\1", head["commit"])
        versions = ", ".join(f"{package} {version}" for package, version in head["versions"].items())
        date = head["date"].replace("T", " ").replace("Z", " UTC")
        lines.append([f"[{name}]({name})", f"{head['device']}, {place}", f"`{commit}`", date, versions])
    kernels = [path.name for path in sorted(folder.path.glob("*.json"))
               if b'"protocol": "kernel"' in path.read_bytes()[:2000]]  # fmt: skip
    links = ", ".join(f"[{name}]({name})" for name in kernels)
    sentences = [f"From C++, without peers: {links}."] if links else []
    if (folder.path / submission.SELF_TEST).exists():
        sentences.append(f"The installation and its self-test: [{submission.SELF_TEST}]({submission.SELF_TEST}).")
    return tables.markdown(lines, left=5) + sentences


def _details(folder: Folder) -> list[str]:
    lines = [f"# {_device(folder)}: every other row", ""]
    lines += [f"[{PAGE}]({PAGE}) has the longest rows, the pictures, and how all was measured.", ""]
    for operator in folder.operators:
        by_protocol = {protocol: folder.of(operator, protocol) for protocol in PROTOCOLS}
        if not any(by_protocol.values()):
            continue
        lines += [f"## {operator.name}", ""]
        on_first = tables.headline(by_protocol[PROTOCOLS[0]])[0]
        for title in dict.fromkeys(table.title for found in by_protocol.values() for table in found):
            lines += [f"### {title}", ""]
            for protocol, found in by_protocol.items():
                for table in (each for each in found if each.title == title):
                    is_shown = table.is_curve and any(table is each for each in on_first)
                    kinds: tuple[Kind, ...] = ("peak_mib", "host_ms") if is_shown else ("ms", "peak_mib")
                    lines += [line for kind in kinds if table.names(kind) for line in _table(table, kind, protocol)]
    return lines + _not_measured(folder)


def _not_measured(folder: Folder) -> list[str]:
    """The missing result files and providers."""
    lines: list[str] = []
    for operator in folder.operators:
        for protocol in PROTOCOLS:
            name = results.file_name(operator.name, protocol)
            content: dict[str, Any] | None = folder.files.get(name)
            if content is None:
                lines.append(f"{operator.name}, protocol {protocol}: there is no result file")
                continue
            measured = {row["provider"] for row in content["rows"] if row["ms"] is not None}
            for provider in (each for each in operator.providers if each.name not in measured):
                skipped = dict.fromkeys(row["skipped"] for row in content["rows"] if row["provider"] == provider.name)
                why = tables.code("; ".join(skipped)) if skipped else _reason(provider, content)
                lines.append(f"{operator.name}, protocol {protocol}, {provider.name}: {why}")
    return ["## Not measured", "", *(f"- {line}" for line in lines or ["nothing"])]


def _reason(provider: Provider, content: dict[str, Any]) -> str:
    """The reason that a provider has no row in a result file, from the facts in the file."""
    if provider.needs_gpu and content["cuda"] is None:
        return "needs a GPU"
    if why := content.get("left_out", {}).get(provider.name):
        return tables.code(why)
    if not content["versions"].keys() >= set(provider.packages):
        return "was not run"
    return "not measured yet, or cannot do these rows"


def main(parser: ArgumentParser, argv: Sequence[str]) -> None:
    """Draws the pages and pictures of folders again, without measuring. Writes the folder of a file of --submit."""
    add = parser.add_argument
    add("paths", nargs="+", type=Path, metavar="DIR|FILE",
        help="folder of result files, such as benchmarks/results/intel-xeon, or a file of --submit")  # fmt: skip
    add("--results", default=results.RESULTS, metavar="DIR", help="write the folder of a file below this one; "
        f"default: {os.path.relpath(results.RESULTS)}")  # fmt: skip
    arguments = parser.parse_args(argv)
    for path in arguments.paths:
        draw(submission.unpack(path, arguments.results, OPERATORS) if path.is_file() else path, OPERATORS)
