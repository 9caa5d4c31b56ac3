"""What a trainer gains: tokens per second and peak memory of a small language model that trains, with a library's own
loss and with eaves in its place, turned on as docs/trainers.md says.

    python benchmarks doors --json doors.json

The model has the sizes of Qwen3-0.6B, with fewer layers and random weights in bf16; the tokens are random. A line is a
process of its own with transformers' Trainer (bf16=True, AdamW, one GPU). All import their libraries at once, and then
take turns. The losses of the first step have to agree, else the exit code is 1. A line whose library is missing or
fails says why, and the others go on. Axolotl itself does not run: its line has the model as Axolotl's plugin of eaves
leaves it, and gradient checkpointing.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import statistics
import tempfile
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils._python_dispatch import TorchDispatchMode

import eaves
from eaves._command_line import say

from . import results, tables
from .benchmark import PROGRAM, InvalidArgument, check_names, reason
from .device import find_device, now_ms, synchronize

FILE = "doors.json"
WARM_UP_STEPS = 5  # Triton compiles, and the optimizer allocates
TOLERANCE = 5e-4
"""Relative tolerance of the loss of the first step: libraries round logits to 16 bits, and Liger's kernels round the
hidden states."""


class Sizes(NamedTuple):
    hidden: int
    layers: int
    classes: int
    batch: int
    length: int


SIZES = {"cuda": Sizes(1024, 8, 151936, 2, 4096), "cpu": Sizes(32, 1, 512, 2, 16)}


class Door(NamedTuple):
    words: str
    theirs: str
    ours: str
    module: str
    """What the line imports before the turns begin."""

    turn_on: Callable[[Any], object]
    """Gets the model, before Trainer does."""

    options: Mapping[str, Any] = {}
    """Fields of TrainingArguments."""


DOORS = {
    "trainer": Door("Trainer", "transformers", "eaves.hf.install()", "transformers", lambda _: eaves.hf.install()),
    "liger": Door(
        "Trainer, `use_liger_kernel`", "Liger", "eaves.liger.install()", "liger_kernel.transformers",
        lambda _: eaves.liger.install(), {"use_liger_kernel": True},
    ),
    "axolotl": Door(
        "Axolotl's way, `gradient_checkpointing`", "transformers", "eaves.hf.patch(model)", "transformers",
        lambda model: eaves.hf.patch(model),
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
    ),
    "fla": Door(
        "`FusedLinearCrossEntropyLoss`", "FLA", "import eaves.fla", "fla.modules",
        lambda _: import_module("eaves.fla"),
    ),
}  # fmt: skip


# ----------------------------------------------------------------------------------------------------------- a process


def _model(sizes: Sizes, device: torch.device) -> Any:
    transformers: Any = import_module("transformers")
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=sizes.classes, hidden_size=sizes.hidden, intermediate_size=3 * sizes.hidden, use_cache=False,
        num_hidden_layers=sizes.layers, num_attention_heads=16, num_key_value_heads=8, head_dim=sizes.hidden // 8,
        tie_word_embeddings=True, pad_token_id=None, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    with device:
        return transformers.Qwen3ForCausalLM(config).to(torch.bfloat16)


def _call_loss_of_fla(model: Any) -> None:
    """The forward of FLA's own language models, around another body."""
    criterion = import_module("fla.modules").FusedLinearCrossEntropyLoss()

    def forward(input_ids: Tensor, labels: Tensor, **_: Any) -> dict[str, Tensor]:
        hidden = model.model(input_ids).last_hidden_state
        return {"loss": criterion(hidden, pad(labels[:, 1:], (0, 1), value=-100), model.lm_head.weight)}

    model.forward = forward


class _Calls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes whether an operator of eaves is called."""

    found = False

    def __torch_dispatch__(self, operator: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        self.found |= str(operator).startswith("eaves.")
        return operator(*arguments, **(options or {}))


def train(name: str, with_eaves: bool, sizes: Sizes, device: torch.device, steps: int) -> dict[str, Any]:
    """The numbers of a line."""
    transformers: Any = import_module("transformers")
    is_gpu = device.type == "cuda"
    calls: Any = _Calls()  # type: ignore[no-untyped-call]
    moments: list[float] = []

    class Clock(transformers.TrainerCallback):  # type: ignore[misc] # of any type
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 0:
                calls.__enter__()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 1:
                calls.__exit__(None, None, None)
            synchronize(device)
            if is_gpu and state.global_step == WARM_UP_STEPS:
                torch.cuda.reset_peak_memory_stats()
            moments.append(now_ms())

    model = _model(sizes, device)
    if name == "fla":
        _call_loss_of_fla(model)
    if with_eaves:
        DOORS[name].turn_on(model)
    ids = torch.randint(sizes.classes, (4 * sizes.batch, sizes.length), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[:, 0] = -100  # nothing predicts it, but Trainer would divide by it too
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder, max_steps=WARM_UP_STEPS + steps, per_device_train_batch_size=sizes.batch, learning_rate=1e-4,
            bf16=True, use_cpu=not is_gpu, logging_first_step=True, logging_steps=WARM_UP_STEPS + steps, report_to=[],
            logging_nan_inf_filter=False, save_strategy="no", disable_tqdm=True, seed=0, **DOORS[name].options,
        )  # fmt: skip
        data = [{"input_ids": row, "labels": label} for row, label in zip(ids, labels)]
        trainer = transformers.Trainer(model, arguments, train_dataset=data, callbacks=[Clock()])
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    if calls.found != with_eaves:
        raise RuntimeError(f"eaves was {'not ' * with_eaves}called")
    first, later = (each["loss"] for each in trainer.state.log_history if "loss" in each)
    if not math.isfinite(first + later):
        raise RuntimeError(f"the loss is {first} in the first step and {later} in the others, expected finite numbers")
    times = [after - before for before, after in zip(moments[WARM_UP_STEPS - 1 :], moments[WARM_UP_STEPS:])]
    ms = statistics.median(times)
    return {
        "ms": ms, "ms_min": min(times), "ms_max": max(times),
        "tokens_per_second": 1e3 * sizes.batch * sizes.length / ms,
        "peak_mib": torch.cuda.max_memory_allocated() / 2**20 if is_gpu else None,
        "first_loss": first, "later_loss": later,
    }  # fmt: skip


def _in_a_process(connection: Any, name: str, *settings: Any) -> None:
    try:
        os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")  # on several GPUs Trainer would use all
        for module in (DOORS[name].module, "transformers.trainer", "transformers.models.qwen3.modeling_qwen3"):
            import_module(module)
        connection.send(None)
        connection.recv()  # its turn
        connection.send(train(name, *settings))
    except Exception as error:  # another package's code: whatever it raises, the others go on
        connection.send({"skipped": reason(error)})


# ----------------------------------------------------------------------------------------------------------- all lines


def measure(names: Sequence[str], seconds: float, *settings: Any) -> Iterator[dict[str, Any]]:
    """The lines of these doors, one after the other; one that takes more than so many seconds is ended."""
    context, lines = multiprocessing.get_context("spawn"), []
    for name in names:
        for loss in (DOORS[name].theirs, DOORS[name].ours):
            connection, theirs = context.Pipe()
            arguments = (theirs, name, loss == DOORS[name].ours, *settings)
            process = context.Process(target=_in_a_process, args=arguments, daemon=True)
            process.start()
            theirs.close()
            lines.append((process, connection, {"door": name, "loss": loss}))
    # Imports take most of a line's time and several cores, so no process is timed meanwhile.
    imported = [answer(process, connection, seconds) for process, connection, _ in lines]
    for (process, connection, row), failed in zip(lines, imported):
        yield row | (failed or answer(process, connection, seconds, is_turn=True))
        process.join(10)  # its memory is free before the next one's turn
        process.kill()


def answer(process: Any, connection: Any, seconds: float, is_turn: bool = False) -> Any:
    """What a process sends, or why it sends nothing."""
    try:
        if is_turn:
            connection.send(None)
        if connection.poll(seconds):
            return connection.recv()
        process.kill()
        return {"skipped": f"it took more than {seconds:g} s"}
    except (EOFError, OSError):
        process.join(10)
        return {"skipped": f"its process ended with exit code {process.exitcode}"}


def disagreement(rows: Sequence[Mapping[str, Any]]) -> str:
    """The lines whose loss of the first step is not the first line's, in a sentence, or nothing."""
    losses = {f"{row['door']}, {row['loss']}": row["first_loss"] for row in rows if "first_loss" in row}
    expected = next(iter(losses.values()), 0.0)
    wrong = [f"{loss:.4f} ({name})" for name, loss in losses.items() if not abs(loss / expected - 1) <= TOLERANCE]
    return f"doors: the loss of the first step is {', '.join(wrong)}, expected {expected:.4f}" if wrong else ""


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Markdown."""
    lines, skipped = [["trainer", "loss", "tokens/s", "MiB", "loss of the first step"]], []
    for row in rows:
        names, numbers = [DOORS[row["door"]].words, row["loss"]], ["-"] * 3
        if "skipped" in row:
            skipped.append(f"- {', '.join(names)}: {tables.code(row['skipped'])}")
        else:
            peak = "-" if row["peak_mib"] is None else f"{row['peak_mib']:.0f}"
            numbers = [f"{float(tables.three(row['tokens_per_second'])):.0f}", peak, f"{row['first_loss']:.4f}"]
        lines.append(names + numbers)
    return tables.markdown(lines, left=2) + skipped + [""] * bool(skipped)


def section(folder: Path) -> list[str]:
    """The lines of a device's page, if it has results."""
    if not (folder / FILE).exists():
        return []
    found = json.loads((folder / FILE).read_bytes())
    sizes = ", ".join(f"{name} {size}" for name, size in found["sizes"].items())
    versions = ", ".join(f"{package} {version}" for package, version in found["versions"].items())
    measured = [row for row in found["rows"] if "ms" in row]
    spread = max((max(row["ms_max"] / row["ms"] - 1, 1 - row["ms_min"] / row["ms"]) for row in measured), default=0.0)
    return [
        "## Trainers", "",
        "A model with the sizes of Qwen3-0.6B, but fewer than its 28 layers, and with random weights trains with",
        "transformers' Trainer in bf16: tokens per second by the median step, and the peak that PyTorch allocates. The",
        "head's share of a step is larger than in the whole model. Axolotl itself does not run: its line has the model",
        "as `eaves.axolotl.EavesPlugin` leaves it. Each line is a process of its own, and all its steps lie within",
        f"{spread:.0%} of the median. From [{FILE}]({FILE}), by `{PROGRAM} doors`: {sizes}.", "",
        *table(found["rows"]), f"Commit {found['commit'][:12]}, {found['date'][:10]}, {versions}.", "",
    ]  # fmt: skip


def main(parser: ArgumentParser, argv: Sequence[str]) -> None:
    parser.add_argument("doors", nargs="*", metavar="door", help=f"lines to measure; default: all ({', '.join(DOORS)})")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if PyTorch finds a GPU, else cpu")
    parser.add_argument(
        "--steps", type=int, default=20, help=f"number of timed steps, after {WARM_UP_STEPS} others (20)"
    )
    parser.add_argument("--seconds", type=float, default=60, help="time limit of a line (60)")
    parser.add_argument("--json", metavar="FILE", help=f"also write the results to this file; a page shows {FILE}")
    arguments = parser.parse_args(argv)
    check_names("there is no door", arguments.doors, DOORS)
    if arguments.steps < 1:
        raise InvalidArgument(f"--steps: is {arguments.steps}, expected 1 or more")
    path = arguments.json and results.check_file("--json", arguments.json)
    device = find_device(arguments.device)
    settings, rows = (SIZES[device.type], device, arguments.steps), list[dict[str, Any]]()
    for row in measure(arguments.doors or list(DOORS), arguments.seconds, *settings):
        say(f"# {row['door']}, {row['loss']}: {row.get('skipped') or 'measured'}")
        rows.append(row)
        if path:
            packages = ("transformers", "accelerate", "liger-kernel", "fla-core")
            results.write(path, results.result(rows, device, "doors", packages) | {"sizes": settings[0]._asdict()})
    say("\n".join(table(rows)))
    if found := disagreement(rows):
        raise RuntimeError(found)
