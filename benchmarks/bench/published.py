"""Draws the tables that xopes published in their published form: titles, rows, order, units and digits. published.txt
has these tables, the provider of each column (`=`), and the reason that a column differs from the published one (`~`).

    python benchmarks published linear_cross_entropy

Each measured row is kept in a result file and is not measured again. `--from-results` measures nothing and draws the
tables of such files.
"""

from __future__ import annotations

import json
import re
import timeit
from argparse import ArgumentParser
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from eaves._command_line import say

from . import results, run
from .benchmark import InvalidArgument, Operator, Provider, Request, Row, check_names
from .calls import moved
from .device import device_name, find_device
from .harness import CASE, LIMIT, Entry, Harness
from .operators import OPERATORS
from .tables import EAVES, aligned, code, three

PROTOCOL = "accumulate"
INTRODUCTION, *_PARTS = re.split(r"^(?=## )", Path(__file__).with_suffix(".txt").read_text(), flags=re.M)

_XOPES: dict[str, Callable[[Any, Row], Any]] = {
    "linear_cross_entropy": lambda function, row: lambda x, weight, target: function(x, target, weight),
    "logsumexp": lambda function, row: lambda x: function(x, -1),
    "md_lrpe_cosine": lambda function, row: (
        lambda x, theta: function(x, theta, shape=tuple(row.options["grid"]), l=row.options.get("extra_tokens", 0))
    ),
}
"""How xopes' own functions are called."""

Columns = dict[str, Sequence[float | None]]
"""The numbers of a table's rows by the names of columns; -1: the provider fails, None: not measured."""


class Table(NamedTuple):
    title: str
    axis: str
    sizes: Sequence[float]
    published: Columns


class Document(NamedTuple):
    name: str
    card: str
    notation: Mapping[str, str]
    """By column the name of a provider, the source of a function of xopes, or "- " and why there is neither."""

    causes: Mapping[str, str]
    """Why a column differs, by a pattern of title and column; the first that fits."""

    tables: Sequence[Table]
    operator: Operator

    def providers(self) -> dict[str, Provider]:
        """The providers by their columns."""
        found = {provider.name: provider for provider in self.operator.providers}
        for source in self.notation.values():
            if ":" in source:
                found[source] = Provider(source, source, _XOPES[self.name], ("xopes",), needs_gpu=True)
        columns = {EAVES: EAVES, **self.notation}
        return {column: found[source] for column, source in columns.items() if source in found}

    def rows(self) -> list[Row]:
        titles = {table.title for table in self.tables}
        rows = self.operator.rows(Request("published", "cuda", "bf16", has_dtype=False))
        return [row for row in rows if title(row.case, "speed") in titles]


def documents() -> dict[str, Document]:
    """The documents by their names, in their order."""
    operators, found = {each.name: each for each in OPERATORS}, {}
    for part in _PARTS:
        name, card = re.findall(r"^## (\w+), .* (\w+)$", part, re.M)[0]
        tables = []
        for heading, text in re.findall(r"^(\S+):\n((?:.+\n)+)", part, re.M):
            head, *lines = text.splitlines()
            axis, *names = re.split(r"\s{2,}", head.strip())
            sizes, *columns = zip(*(map(float, line.split()[1:]) for line in lines))
            tables.append(Table(heading, axis, sizes, dict(zip(names, columns))))
        notation, causes = (dict(re.findall(rf"^(.+?) {sign} (.+)$", part, re.M)) for sign in "=~")
        found[name] = Document(name, card, notation, causes, tables, operators[name.removeprefix("md_")])
    return found


def title(case: Mapping[str, Any], quantity: str) -> str:
    """The title of the table that has a row's "speed" or "memory"."""
    name, options = case["op"], case["options"]
    sizes = [f"{key}{size}" for key, size in case["shape"].items() if key not in ("n", "v")]
    before, behind = [], []
    if name == "linear_cross_entropy":
        name = "lce"
    elif name == "cross_entropy":
        behind = [f"ls{options.get('label_smoothing', 0.0)}", options["reduction"]]
    elif "grid" in options:
        name, behind = f"md_{name}", [f"{len(options['grid'])}d", f"l{options.get('extra_tokens', 0)}"]
    elif name == "lrpe_cosine":
        before = [f"act_{options.get('activation', 'none')}"]
        before += [f"dim_{options['activation_dim']}"] if "activation_dim" in options else []
    return "-".join([name, quantity, case["mode"], *sizes, *before, case["dtype"], *behind])


# -------------------------------------------------------------------------------------------------------------- drawing


def _key(case: Mapping[str, Any]) -> str:
    return json.dumps([case[key] for key in CASE], sort_keys=True)


def columns_of(document: Document, columns: Mapping[str, str], entries: Sequence[Entry], device: str) -> list[Columns]:
    """For each table the columns of these providers and, on the same card, the published ones."""
    found = {
        (title(entry, quantity), float([*entry["shape"].values()][-1]), entry["provider"]): -1.0
        if entry["ms"] is None else entry.get(kind)
        for quantity, kind in (("speed", "ms"), ("memory", "peak_mib")) for entry in entries
    }  # fmt: skip
    drawn: list[Columns] = []
    for table in document.tables:
        drawn.append({column: [found.get((table.title, size, name)) for size in table.sizes]
                      for column, name in columns.items()})  # fmt: skip
        if document.card in device:
            drawn[-1].update({f"published {column}": numbers for column, numbers in table.published.items()})
    return drawn


def digits(column: Sequence[float | None]) -> list[str]:
    """The numbers as pandas prints them: six decimals without the zeros that all have at the end; "-" for no number."""
    texts = ["-" if number is None else f"{number:.6f}" for number in column]
    while set(texts) != {"-"} and all(re.search(r"^-$|\.\d+0$", text) for text in texts):
        texts = [text[:-1] or text for text in texts]
    return texts


def text_of(table: Table, columns: Columns) -> str:
    """The table as pandas prints it."""
    lines = [["", *map(str, range(len(table.sizes)))], [table.axis, *digits(table.sizes)]]
    lines += [[column, *digits(numbers)] for column, numbers in columns.items()]
    return f"{table.title}:\n{aligned(list(zip(*lines)))}"


def differences(document: Document, table: Table, columns: Columns) -> list[str]:
    """A line for each column that is anywhere off by more than a tenth of the published one."""
    lines = []
    for column in document.notation:
        pairs = zip(table.sizes, columns.get(column, ()), columns.get(f"published {column}", ()))
        ratios = [(size, here / there) for size, here, there in pairs if here and there and min(here, there) > 0]
        if any(abs(ratio - 1) > 0.1 for _, ratio in ratios):
            first, last = (f"{three(ratio)} at {table.axis} {size:.0f}" for size, ratio in (ratios[0], ratios[-1]))
            causes = [each for part, each in document.causes.items() if re.search(part, f"{table.title} {column}")]
            cause = [*causes, "the cause is not known"][0]
            lines.append(f"- `{column}` is {first} and {last} times the published number: {cause}.")
    return lines


def _grouped(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    """The names, grouped by the text that they share."""
    groups: dict[str, dict[str, None]] = {}
    for name, common in pairs:
        groups.setdefault(common, {})[f"`{name}`"] = None
    return {common: ", ".join(names) for common, names in groups.items()}


def section(document: Document, columns: Mapping[str, str], entries: Sequence[Entry], drawn: Any) -> list[str]:
    """The document's part of the page."""
    absent = _grouped((column, source[2:] if source.startswith("- ") else "not installed, or not for this device")
                      for column, source in document.notation.items() if column not in columns)  # fmt: skip
    failed = _grouped((column, code(entry["skipped"])) for column, name in columns.items() for entry in entries
                      if (entry["provider"], entry["ms"]) == (name, None))  # fmt: skip
    unknown = _grouped((column, "") for each in drawn for column, numbers in each.items() if None in numbers)
    notes = [f"- Left out: {names} ({why})." for why, names in absent.items()]
    notes += [f"- Not measured yet, in whole or in part: {names}." for names in unknown.values()]
    notes += [f"- -1 of {names}: {why}" for why, names in failed.items()]
    lines = [f"## {document.name}, published for the {document.card}", "", *notes, *[""] * bool(notes)]
    for table, each in zip(document.tables, drawn):
        said = differences(document, table, each)
        lines += ["```text", text_of(table, each), "```", "", *said, *[""] * bool(said)]
    return lines


def draw(chosen: Sequence[Document], folder: Path) -> tuple[str, str]:
    """The page of the folder's result files, and its numbers as CSV."""
    found = results.read(folder, dict.fromkeys(each.operator.name for each in chosen)).values()
    files = [file for file in found if file["protocol"] == PROTOCOL]
    if not files:
        raise InvalidArgument(f'published: "{folder}" has no result file of the protocol {PROTOCOL}')
    device, has_gpu = files[0]["device"], files[0]["cuda"] is not None
    versions = {package: version for file in files for package, version in file["versions"].items()}
    lines = [INTRODUCTION + f"Measured on {device}: {', '.join(map(' '.join, versions.items()))}.", ""]
    numbers = [["title", "size", "column", "number"]]
    for document in chosen:
        columns = {EAVES: EAVES, LIMIT: LIMIT}
        columns |= {column: each.name for column, each in document.providers().items()
                    if versions.keys() >= {*each.packages} and (has_gpu or not each.needs_gpu)}  # fmt: skip
        own = {_key(row.case) for row in document.rows()}
        entries = [entry for file in files for entry in file["rows"] if _key(entry) in own]
        drawn = columns_of(document, columns, entries, device)
        lines += section(document, columns, entries, drawn)
        for table, each in zip(document.tables, drawn):
            for column, values in each.items():
                numbers += [[table.title, f"{size:.0f}", column, "" if value is None else str(value)]
                            for size, value in zip(table.sizes, values)]  # fmt: skip
    return "\n".join(lines), "".join(",".join(line) + "\n" for line in numbers)


# ------------------------------------------------------------------------------------------------------------ measuring

_COMPILE_MS = 6000.0
_PASSES = 4
"""How often a provider moves a row's bytes, on average; PyTorch's formulas do several times."""


def estimated_ms(todo: Sequence[tuple[Row, int]], device: torch.device, repetitions: int) -> float:
    """The estimated time of rows with their numbers of providers: bytes and products at the rates of a copy and a
    product here, and torch.compile's time for each row."""

    def timed_ms(run: Callable[[], object]) -> float:
        wait = torch.zeros((), device=device).item
        return 1e3 * min(timeit.repeat(lambda: [run(), wait()], number=1, repeat=5))

    scale = 4 if device.type == "cuda" else 1
    x, square = (torch.ones(shape, dtype=torch.bfloat16, device=device) for shape in ([scale << 26], [scale << 11] * 2))
    copy_ms, product_ms = timed_ms(x.clone) / (2 * x.nbytes), timed_ms(lambda: square @ square) / (2 * len(square) ** 3)
    total = 0.0
    for row, providers in todo:
        call_ms = max(_PASSES * sum(moved(PROTOCOL, row)) * copy_ms, row.flops * product_ms)
        total += _COMPILE_MS + providers * call_ms * (10 + max(5, min(repetitions, 1000 / call_ms)))
    return total


def measure(chosen: Sequence[Document], folder: Path, device: torch.device, repetitions: int) -> None:
    """Measures the rows that the folder's files lack."""
    said: dict[str, str] = {}
    present = {each.name: run.installed(each.providers().values(), device, said) for each in chosen}
    packages = [name for each in documents().values() for one in each.providers().values() for name in one.packages]
    head = results.result([], device, PROTOCOL, packages)
    found: dict[str, list[Entry]] = {each.operator.name: [] for each in chosen}
    for name, file in results.read(folder, found).items():
        if any(file[key] != head[key] for key in ("device", "commit", "versions")):
            raise InvalidArgument(f'--results: "{folder / name}" was written by another build, device or package; '
                                  "expected another folder")  # fmt: skip
        if file["rows"]:
            found[file["rows"][0]["op"]] = file["rows"]

    def lacking(document: str, row: Row) -> set[str]:
        names = {LIMIT, *(provider.name for provider in present[document])}
        return names - {entry["provider"] for entry in found[row.op] if _key(entry) == _key(row.case)}

    rows = [(each.name, row) for each in chosen for row in each.rows()]
    todo = [(name, row) for name, row in rows if lacking(name, row)]
    minutes = estimated_ms([(row, 1 + len(present[name])) for name, row in todo], device, repetitions) / 60e3
    say(f"# {head['device']}: {len(todo)} of {len(rows)} rows, about {minutes:.0f} minutes, into {folder}")
    harness, last = Harness(device, PROTOCOL, repetitions), ""
    for name, row in todo:
        if (heading := title(row.case, "speed")) != last:
            say(f"# {heading}")
            harness.timer.warm_up(500)
        last, kept = heading, [entry for entry in found[row.op] if _key(entry) != _key(row.case)]
        found[row.op] = kept + harness.measure(row, present[name], present[name][0])
        file = results.result(found[row.op], device, PROTOCOL, packages)
        results.write(folder / results.file_name(row.op, PROTOCOL), file)


def main(parser: ArgumentParser, argv: Sequence[str]) -> None:
    known = documents()
    add = parser.add_argument
    add("documents", nargs="*", metavar="DOCUMENT", help=f"tables to measure; default: all ({', '.join(known)})")
    add("--device", choices=["cpu", "cuda"], help="default: cuda if PyTorch finds a GPU, else cpu")
    add(
        "--repetitions",
        type=int,
        default=30,
        metavar="N",
        help="repetitions of each row (30); slow rows get fewer, at least 5",
    )
    add("--results", default="build/published", metavar="DIR",
        help="write result files and published.md into the device's folder below DIR (build/published)")  # fmt: skip
    add("--from-results", type=Path, metavar="DIR", help="measure nothing; print the page of the result files in DIR")
    arguments = parser.parse_args(argv)
    check_names("there is no document", arguments.documents, known)
    chosen = [known[name] for name in arguments.documents or known]
    if (folder := arguments.from_results) is None:
        device = find_device(arguments.device)
        name = results.folder_name(device_name(device), device.type == "cuda")
        folder = results.check_folder("--results", Path(arguments.results, name))
        measure(chosen, folder, device, arguments.repetitions)
    text, numbers = draw(chosen, folder)
    if arguments.from_results is None:
        results.write(folder / "published.md", text)
        results.write(folder / "published.csv", numbers)
    say(text.rstrip("\n"))
