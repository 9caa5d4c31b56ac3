"""`eaves run linear_cross_entropy` and eaves.linear_cross_entropy on the head of a model of real text: both are right.

The model is the smallest there is, trained here for a moment: the embedding of a word says which word comes next. Its
tensors go through a safetensors file, as those of any model would.
"""

import json
import subprocess
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

import eaves
from comparison import assert_within
from cross_entropy_program_test import PROGRAM, read_safetensors, write_safetensors
from cross_entropy_test import each
from linear_cross_entropy_cases import LinearOracle, assert_gradients

FEATURES = 24


def words_of_python() -> list[str]:
    """The license and the documentation that every Python brings along."""
    import argparse
    import inspect
    import logging
    import this
    import unittest

    zen = "".join(this.d.get(letter, letter) for letter in this.s)
    texts = [zen, *(inspect.getdoc(module) or "" for module in (argparse, logging, unittest, json, subprocess))]
    texts += [inspect.getsource(module) for module in (argparse, logging)]
    return " ".join(texts).split()[:6000]


@cache
def trained_model() -> tuple[Tensor, Tensor, Tensor, float, float]:
    """Hidden states, head and next words of the text, and the loss before and after training."""
    words = words_of_python()
    vocabulary = {word: index for index, word in enumerate(sorted(set(words)))}
    tokens = torch.tensor([vocabulary[word] for word in words])
    torch.manual_seed(5)
    embedding = torch.randn(len(vocabulary), FEATURES).requires_grad_()
    head = (0.1 * torch.randn(len(vocabulary), FEATURES)).requires_grad_()
    optimizer = torch.optim.Adam([embedding, head], lr=0.05)
    losses = []
    for _ in range(25):
        optimizer.zero_grad()
        loss = eaves.linear_cross_entropy(embedding[tokens[:-1]], head, tokens[1:])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    hidden = embedding[tokens[:-1]].detach()[:400]
    return hidden, head.detach(), tokens[1:401], losses[0], losses[-1]


def test_the_model_learns_the_text() -> None:
    _, head, _, before, after = trained_model()
    assert len(head) > 1000
    assert after < 0.7 * before, f"{before} before, {after} after"


@each("dtype", [torch.bfloat16, torch.float32])
def test_the_package_computes_what_the_formula_says(dtype: torch.dtype) -> None:
    hidden, head, target, _, _ = trained_model()
    x, w = hidden.to(dtype).requires_grad_(), head.to(dtype).requires_grad_()
    target = target.clone()
    target[:50] = -100
    oracle = LinearOracle(x, w, target)
    for algorithm in ("speed", "recompute"):
        loss = eaves.linear_cross_entropy(x, w, target, algorithm=algorithm)
        assert_within(loss, oracle.bounds(torch.float32)["loss"])
        assert_gradients([*torch.autograd.grad(loss, (x, w)), None], oracle.gradients(), dtype)


@each("dtype", [torch.bfloat16, torch.float32])
@each("algorithm", ["speed", "recompute"])
def test_the_program_computes_what_the_formula_says(dtype: torch.dtype, algorithm: str, tmp_path: Path) -> None:
    if not PROGRAM.exists():
        pytest.skip(
            f"the program is not built: {PROGRAM.name} is not where it is expected, and EAVES_PROGRAM is not set"
        )
    hidden, head, target, _, _ = trained_model()
    x, w = hidden.to(dtype), head.to(dtype)
    target = torch.where(torch.arange(len(target)) < 50, -100, target)
    path, output = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    row_weight = torch.linspace(0.5, 2, len(target))
    write_safetensors(path, {"x": x, "weight": w, "targets": target, "of_rows": row_weight})
    command = [PROGRAM, "run", "linear_cross_entropy", "--input", path, "--output", output, "--backward"]
    command += ["--tensor", "x", "--linear-weight", "weight", "--target", "targets", "--row-weight", "of_rows"]
    command += ["--sum-sq", "--mean-logit"]
    result = subprocess.run([*command, "--algorithm", algorithm], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    written = read_safetensors(output)
    oracle = LinearOracle(x, w, target, row_weight=row_weight)
    for name in ("loss", "sum_sq", "mean_logit"):
        assert_within(written[name], oracle.bounds(torch.float32)[name])
    assert_gradients([written["grad_x"], written["grad_weight"], None], oracle.gradients(), dtype)
