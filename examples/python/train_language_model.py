"""Trains a small language model on text that comes with Python: positions by eaves.lrpe_cosine, head and loss by
eaves.linear_cross_entropy. `--backend torch` trains the same model with PyTorch's formulas of the two, not compiled,
`--backend both` one after the other. Two minutes at most on two CPU cores; uses the GPU where there is one.

Prints a Markdown table: tokens per second, the loss on text that was held back, and on a GPU the peak of its memory.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import eaves
from eaves import _info

WARM_UP_STEPS = 10  # for compilation, allocation and clocks; not timed
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Backend:
    """The two functions in which the models differ."""

    # x [batch, length, heads, features], angles [heads, features] -> [batch, length, heads, 2 * features].
    encode: Callable[[Tensor, Tensor], Tensor]
    # Rows [..., width], head [vocabulary, width], targets [...] -> the mean loss.
    loss: Callable[[Tensor, Tensor, Tensor], Tensor]


def torch_encode(x: Tensor, theta: Tensor) -> Tensor:
    angle = torch.arange(x.shape[1], device=x.device, dtype=torch.float32)[:, None, None] * theta
    return torch.cat([x * angle.cos().to(x.dtype), x * angle.sin().to(x.dtype)], dim=-1)


def torch_loss(hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, head).flatten(0, -2).float(), targets.flatten())


BACKENDS = {
    "eaves": Backend(encode=eaves.lrpe_cosine, loss=eaves.linear_cross_entropy),
    "torch": Backend(encode=torch_encode, loss=torch_loss),
}


class Block(nn.Module):
    """Causal attention with queries and keys encoded by their positions, then a network of two layers."""

    theta: Tensor

    def __init__(self, width: int, heads: int, backend: Backend) -> None:
        super().__init__()
        self.heads, self.backend = heads, backend
        features = width // heads
        self.attention_norm, self.network_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.network = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        theta = 10000 ** -(torch.arange(features, dtype=torch.float32) / features)
        self.register_buffer("theta", theta.repeat(heads, 1))

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.unbind(-3)  # [batch, length, heads, features]
        q, k = self.backend.encode(q, self.theta), self.backend.encode(k, self.theta)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=v.shape[-1] ** -0.5)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return x + self.network(self.network_norm(x))


class LanguageModel(nn.Module):
    """Tokens [batch, length] and the tokens after them -> the loss, for eaves without logits in between."""

    def __init__(self, vocabulary: int, arguments: argparse.Namespace, backend: Backend) -> None:
        super().__init__()
        width = arguments.width
        self.dtype, self.loss = DTYPES[arguments.dtype], backend.loss
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.Sequential(*(Block(width, arguments.heads, backend) for _ in range(arguments.layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Parameter(torch.randn(vocabulary, width) / math.sqrt(width))
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(tokens.device.type, self.dtype, enabled=self.dtype != torch.float32):
            hidden = self.norm(self.blocks(self.embedding(tokens)))
        return self.loss(hidden.to(self.dtype), self.head.to(self.dtype), targets)


def text_as_tokens(token_bytes: int) -> Tensor:
    """Python's own documentation of its language, one token for every `token_bytes` bytes."""
    text = "".join(topics[name] for name in sorted(topics)).encode()
    values = torch.frombuffer(bytearray(text[: len(text) // token_bytes * token_bytes]), dtype=torch.uint8).long()
    return (values.view(-1, token_bytes) * 256 ** torch.arange(token_bytes)).sum(-1)


def unigram_entropy(tokens: Tensor) -> float:
    """The loss, in nats, of a model that knows only how frequent each token is."""
    share = torch.bincount(tokens).double() / len(tokens)
    return torch.special.entr(share).sum().item()


def draw_batch(tokens: Tensor, batch: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Pieces of the text, [batch, length], and the next token of each place."""
    starts = torch.randint(len(tokens) - length, (batch,), generator=generator)
    pieces = tokens[starts[:, None] + torch.arange(length + 1)]
    return pieces[:, :-1], pieces[:, 1:]


def train(name: str, tokens: Tensor, arguments: argparse.Namespace) -> dict[str, Any]:
    """One run: its configuration, its losses and its speed."""
    device = torch.device(arguments.device)
    is_gpu = device.type == "cuda"
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    held_back = max(len(tokens) // 20, arguments.length + 1)
    learnt, held_back_tokens = tokens[:-held_back], tokens[-held_back:]
    model = LanguageModel(256**arguments.token_bytes, arguments, BACKENDS[name]).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, arguments.lr, total_steps=arguments.steps, pct_start=0.1)

    def to_device(pair: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        return tuple(part.pin_memory().to(device, non_blocking=True) if is_gpu else part for part in pair)

    def now() -> float:
        if is_gpu:
            torch.cuda.synchronize()
        return time.perf_counter()

    losses = []  # tensors, because reading one in each step would make the GPU wait
    warm_up = min(WARM_UP_STEPS, arguments.steps - 1)
    begin = 0.0
    for step in progress(range(arguments.steps), name):
        if step == warm_up:
            begin = now()
            if is_gpu:
                torch.cuda.reset_peak_memory_stats()
        batch = to_device(draw_batch(learnt, arguments.batch, arguments.length, generator))
        loss = model(*batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.detach())
    seconds = now() - begin
    peak = torch.cuda.max_memory_allocated() / 2**20 if is_gpu else None

    with torch.no_grad():
        batches = [draw_batch(held_back_tokens, arguments.batch, arguments.length, generator) for _ in range(8)]
        held_back_loss = torch.stack([model(*to_device(batch)) for batch in batches]).mean().item()
    timed_tokens = (arguments.steps - warm_up) * arguments.batch * arguments.length
    return {
        "backend": name,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "device": torch.cuda.get_device_name() if is_gpu else "cpu",
        "commit": _info.extension()["commit"],
        **{key: value for key, value in vars(arguments).items() if key not in ("backend", "device", "json", "plot")},
        "vocabulary": 256**arguments.token_bytes,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "versions": {"eaves": eaves.__version__, "torch": torch.__version__, "python": platform.python_version()},
        "tokens_per_second": timed_tokens / seconds,
        "peak_mib": peak,
        "unigram_entropy": unigram_entropy(tokens),
        "held_back_loss": held_back_loss,
        "losses": torch.stack(losses).tolist(),
    }


def progress(steps: range, name: str) -> Any:
    try:
        from tqdm import tqdm
    except ImportError:
        return steps
    return tqdm(steps, desc=name, unit="step")


def draw(runs: list[dict[str, Any]], path: str) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for run, width in zip(runs, (4, 1.5)):  # two widths, so that both lines show if one covers the other
        axes.plot(range(1, len(run["losses"]) + 1), run["losses"], label=run["backend"], linewidth=width)
    axes.axhline(runs[0]["unigram_entropy"], color="k", linestyle="--", label="entropy of single tokens")
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per token)")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


def table(runs: list[dict[str, Any]]) -> str:
    lines = ["| backend | tokens/s | peak MiB | first loss | held-back loss | entropy of single tokens |"]
    lines.append("|---|---:|---:|---:|---:|---:|")
    for run in runs:
        peak = "-" if run["peak_mib"] is None else f"{run['peak_mib']:.0f}"
        losses = (run["losses"][0], run["held_back_loss"], run["unigram_entropy"])
        cells = [run["backend"], f"{run['tokens_per_second']:.0f}", peak, *(f"{loss:.3f}" for loss in losses)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def parse_arguments() -> argparse.Namespace:
    description = (__doc__ or "").partition("\n\n")[0]
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    has_gpu = torch.cuda.is_available()
    add("--backend", choices=[*BACKENDS, "both"], default="eaves", help="whose encoding and loss")
    add("--device", choices=["cpu", "cuda"], default="cuda" if has_gpu else "cpu", help="where to train")
    add("--dtype", choices=list(DTYPES), default="bfloat16" if has_gpu else "float32", help="of activations and logits")
    add("--steps", type=int, default=200, help="of the optimizer, at least 2")
    add("--batch", type=int, default=16, help="sequences in a step")
    add("--length", type=int, default=128, help="tokens of a sequence")
    add("--width", type=int, default=128, help="features of a token, a multiple of --heads")
    add("--heads", type=int, default=4, help="of the attention")
    add("--layers", type=int, default=2, help="blocks of attention and network")
    add("--token-bytes", type=int, choices=[1, 2], default=1, help="1: 256 classes, 2: 65,536")
    add("--lr", type=float, default=3e-3, help="the highest learning rate")
    add("--json", metavar="FILE", help="write the runs to this file")
    add("--plot", metavar="FILE", help="draw the losses into this picture; needs matplotlib")
    arguments = parser.parse_args()
    least = {"steps": 2, "batch": 1, "length": 1, "width": 1, "heads": 1, "layers": 1}
    for name, value in least.items():
        if getattr(arguments, name) < value:
            parser.error(f"--{name}: is {getattr(arguments, name)}, expected {value} or more")
    if arguments.lr < 0:
        parser.error(f"--lr: is {arguments.lr}, expected 0 or more")
    if arguments.device == "cuda" and not has_gpu:
        parser.error("--device: is cuda, but PyTorch finds no GPU")
    for name in ("json", "plot"):
        path = getattr(arguments, name)
        if path is not None and not Path(path).absolute().parent.is_dir():
            parser.error(f"--{name}: the folder of {path} does not exist")
    if arguments.width % arguments.heads != 0:
        parser.error(f"--width: is {arguments.width}, expected a multiple of --heads, {arguments.heads}")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    tokens = text_as_tokens(arguments.token_bytes)
    names = list(BACKENDS) if arguments.backend == "both" else [arguments.backend]
    runs = [train(name, tokens, arguments) for name in names]
    print(table(runs))
    if arguments.json is not None:
        Path(arguments.json).write_text(json.dumps(runs, indent=1, allow_nan=False) + "\n")
    if arguments.plot is not None:
        draw(runs, arguments.plot)
    # A loss that is NaN fails too: it is not below the entropy.
    if arguments.steps >= 100 and not all(run["held_back_loss"] < run["unigram_entropy"] for run in runs):
        raise SystemExit("the model has learnt no more than how frequent the tokens are")


if __name__ == "__main__":
    main()
