"""eaves.torch: PyTorch's module returns the same numbers and gradients, computed by eaves, and is restored."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import eaves
from cross_entropy_test import REDUCTIONS, each, upstream
from integrations import installed, run_recipe
from linear_cross_entropy_cases import allowed_share
from pairwise import pairwise

F = torch.nn.functional
# With a PyTorch that has the function and that eaves.torch does not know, these tests fail in the words of install().
pytestmark = pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="this PyTorch lacks the function")


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    eaves.torch.uninstall()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    original = eaves.torch.linear_cross_entropy
    monkeypatch.setattr(eaves.torch, "linear_cross_entropy", lambda *a, **k: found.append(k) or original(*a, **k))
    return found


def step(module: Any, x: Tensor, target: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    module.zero_grad()
    loss = module(x, target)
    loss.backward(upstream(loss))
    return [loss.detach(), *(each.grad for each in (x, *module.parameters()))]


@each("dtype", (torch.float32, torch.bfloat16))
def test_the_module_gives_the_same(dtype: torch.dtype, device: torch.device, calls: list[dict[str, Any]]) -> None:
    for reduction, has_bias, has_weight, smoothing, ignored, kind, policy in pairwise(
        REDUCTIONS, (False, True), (False, True), (0.0, 0.1), (None, 3), ("rows", "row", "soft"),
        (None, "auto", "accurate"),
    ):  # fmt: skip
        torch.manual_seed(1)
        options = None if policy is None else torch.nn.LinearCrossEntropyOptions(acc_policy=policy)
        module = torch.nn.LinearCrossEntropyLoss(
            16, 37, bias=has_bias, reduction=reduction, label_smoothing=smoothing,
            weight=torch.linspace(0.5, 2, 37, device=device).to(dtype) if has_weight else None,
            ignore_index=None if kind == "soft" else ignored, options=options, dtype=dtype, device=device,
        )  # fmt: skip
        x = torch.randn(11, 16, device=device).to(dtype)
        target = torch.randint(0, 37, (11,), device=device)
        target[2] = 3
        if kind == "row":
            x, target = x[0], target[0]
        elif kind == "soft":
            target = torch.randn(11, 37, device=device).softmax(-1).to(dtype)
        exact = torch.nn.LinearCrossEntropyLoss(
            16, 37, bias=has_bias, reduction=reduction, label_smoothing=smoothing,
            weight=None if module.weight is None else module.weight.double(), ignore_index=module.ignore_index,
            dtype=torch.float64, device=device,
        )  # fmt: skip
        exact.linear.load_state_dict(module.linear.state_dict())
        expected = step(exact, x.double(), target.double() if kind == "soft" else target)
        calls.clear()
        with eaves.torch.install():
            found = step(module, x, target)
        wide = torch.float32 if dtype == torch.bfloat16 and policy == "accurate" else None
        assert [call.get("grad_weight_dtype") for call in calls] == [wide]
        assert len(found) == len(expected)
        torch.testing.assert_close(found[0].double(), expected[0], rtol=2e-6, atol=1e-5)
        for ours, true in zip(found[1:], expected[1:], strict=True):
            assert (ours.double() - true).norm() <= allowed_share(dtype) * true.norm()


def test_classes_may_be_bytes() -> None:
    x, head, target = torch.randn(4, 8), torch.randn(5, 8), torch.tensor([0, 4, 2, 1], dtype=torch.uint8)
    with eaves.torch.install():
        found = F.linear_cross_entropy(x, head, target)
    torch.testing.assert_close(found, F.linear_cross_entropy(x, head, target))


def test_what_eaves_lacks_is_theirs_and_told(calls: list[dict[str, Any]]) -> None:
    torch.manual_seed(1)
    module = torch.nn.LinearCrossEntropyLoss(8, 5, out_features=(2,))
    x, target = torch.randn(4, 8), torch.randint(0, 5, (4, 2))
    given = torch.randn(4, 8), torch.randn(5, 8), torch.randn(4, 5).softmax(-1)
    expected = step(module, x, target)
    with eaves.torch.install():
        with pytest.warns(UserWarning, match="of a K-dimensional loss"):
            found = step(module, x, target)
        for ours, theirs in zip(found, expected, strict=True):
            assert torch.equal(ours, theirs)
        soft = given[2].requires_grad_()
        with pytest.warns(UserWarning, match="of probabilities that require a gradient"):
            F.linear_cross_entropy(*given).backward()
        assert soft.grad is not None
        with (
            pytest.warns(UserWarning, match="of probabilities with an ignore_index"),
            pytest.raises(RuntimeError, match="ignore_index cannot be specified"),
        ):
            F.linear_cross_entropy(given[0], given[1], given[2].detach(), ignore_index=1)
        on_meta = [each.to("meta") for each in (x, given[1], target[:, 0])]
        with pytest.warns(UserWarning, match="of a tensor on meta"):
            assert F.linear_cross_entropy(*on_meta).device.type == "meta"
    assert not calls


def test_install_is_undone_and_the_recipe_runs(calls: list[dict[str, Any]]) -> None:
    original = F.linear_cross_entropy
    assert not eaves.torch.is_active()
    tokens, hidden = torch.randint(0, 131, (6,)), torch.randn(6, 32, requires_grad=True)
    found = run_recipe("PyTorch", hidden=hidden, targets=tokens)
    assert eaves.torch.is_active() and len(calls) == 1 and found["loss"].isfinite() and hidden.grad is not None
    eaves.torch.uninstall()
    assert F.linear_cross_entropy is original and not eaves.torch.is_active()
    with eaves.torch.install(algorithm="recompute"):
        assert eaves.torch.is_active()
        found["head"](hidden, tokens)
        assert calls[-1]["algorithm"] == "recompute"
    assert F.linear_cross_entropy is original
    with pytest.raises(ValueError, match="algorithm is 'fast'"):
        eaves.torch.install(algorithm="fast")


def test_compiled_modules_call_eaves() -> None:
    torch.manual_seed(1)
    module, x, target = torch.nn.LinearCrossEntropyLoss(8, 5), torch.randn(4, 8), torch.randint(0, 5, (4,))
    expected = step(module, x, target)
    with eaves.torch.install():
        found = step(torch.compile(module, backend="eager", fullgraph=True), x, target)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_another_pytorch_is_refused() -> None:
    sentence = r"eaves\.torch: torch has version 2\.99\.0, expected 2\.13\.x or .*; nothing was replaced"
    with installed("2.99.0"), pytest.raises(RuntimeError, match=sentence):
        eaves.torch.install()
