"""eaves.verl against the formula, because verl's own function only runs on a GPU. Also verl's import of eaves by
itself."""

import importlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import eaves
from cross_entropy_test import each
from integrations import Foreign, installed, run_recipe
from log_prob_test import rows_and_head
from ranks import Ranks


@pytest.fixture
def verl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A package with verl's name and the replaced module, because the import of verl itself needs ray and more."""
    folder = tmp_path / "verl" / "utils" / "kernel"
    folder.mkdir(parents=True)
    for each_folder in (folder, folder.parent, folder.parent.parent):
        (each_folder / "__init__.py").touch()
    (folder / "linear_cross_entropy.py").write_text("def linear_cross_entropy(*arguments):\n    return 'theirs'\n")
    importer = "from verl.utils.kernel.linear_cross_entropy import linear_cross_entropy\n"
    (folder.parent.parent / "model.py").write_text(importer)
    monkeypatch.syspath_prepend(tmp_path)
    with installed("0.9.1"):
        yield __import__("verl.model").model
    eaves.verl.uninstall()
    for name in [name for name in sys.modules if name.split(".")[0] == "verl"]:
        del sys.modules[name]


@each("algorithm", ("auto", "speed"))
def test_verl_gets_log_probabilities_and_entropies(algorithm: str, verl: Any, device: torch.device) -> None:
    hidden, head, labels = rows_and_head((1, 19), 257, torch.float32, device)
    hidden.requires_grad_()
    with eaves.verl.install(algorithm=algorithm):
        assert eaves.verl.is_active()
        log_prob, entropy = verl.linear_cross_entropy(hidden, head, labels, 0.7, "none")
        with pytest.raises(NotImplementedError, match="reduction is 'mean'"):
            verl.linear_cross_entropy(hidden, head, labels, 0.7, "mean")
    assert verl.linear_cross_entropy() == "theirs" and not eaves.verl.is_active()
    assert log_prob.shape == entropy.shape == (19,)
    logits = hidden.double() @ head.double().T / 0.7
    distribution = torch.distributions.Categorical(logits=logits[0])
    torch.testing.assert_close(log_prob.double(), distribution.log_prob(labels[0]), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy.double(), distribution.entropy(), rtol=1e-5, atol=1e-5)
    (found,) = torch.autograd.grad((log_prob - 0.1 * entropy).sum(), hidden)
    (exact,) = torch.autograd.grad((distribution.log_prob(labels[0]) - 0.1 * distribution.entropy()).sum(), hidden)
    torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-5)


def test_verl_multiplies_what_it_is_given_under_autocast(verl: Any) -> None:
    hidden, head, labels = rows_and_head((5,), 33, torch.float32, torch.device("cpu"))
    with eaves.verl.install(workspace_bytes=1 << 20):
        log_prob, _ = verl.linear_cross_entropy(hidden, head, labels, 1.0, "NONE")
        with torch.autocast("cpu", torch.bfloat16):
            found, _ = verl.linear_cross_entropy(hidden, head, labels)
    assert torch.equal(found, log_prob)


def test_the_gradient_of_verl_s_head_is_rounded_once(verl: Any) -> None:
    hidden, head, labels = rows_and_head((257,), 64, torch.bfloat16, torch.device("cpu"))
    head.requires_grad_()

    def error(workspace_bytes: int | None) -> float:
        with eaves.verl.install(workspace_bytes=workspace_bytes):
            log_prob, _ = verl.linear_cross_entropy(hidden, head, labels)
        (found,) = torch.autograd.grad(log_prob.sum(), head)
        return float((found.double() - exact).norm())

    exact_head = head.detach().double().requires_grad_()
    log_prob = torch.log_softmax(hidden.double() @ exact_head.T, -1)[range(257), labels]
    (exact,) = torch.autograd.grad(log_prob.sum(), exact_head)
    assert error(1 << 13) < 1.15 * error(None)  # chunks of a few rows, and one chunk


VERL = Foreign("0.9.1", {"verl.utils.kernel.linear_cross_entropy": "def linear_cross_entropy():\n    pass\n"}, ())


def verl_on_a_rank(group: torch.distributed.ProcessGroup) -> tuple[Tensor, ...]:
    hidden, head, labels = rows_and_head((5,), 40, torch.float64, torch.device("cpu"))
    own = head[10 * group.rank() : 10 * group.rank() + 10].requires_grad_()
    hidden.requires_grad_()
    with VERL.imported(), eaves.verl.install():
        called = importlib.import_module(next(iter(VERL.modules))).linear_cross_entropy
        log_prob, entropy = called(hidden, own, labels, 0.7, "none", group)
    (log_prob.sum() - 0.1 * entropy.sum()).backward()
    return log_prob.detach(), entropy.detach(), hidden.grad, own.grad


def test_verl_has_a_vocabulary_in_pieces(verl: Any, cpu_ranks: Ranks) -> None:
    hidden, head, labels = rows_and_head((5,), 40, torch.float64, torch.device("cpu"))
    leaves = [hidden.requires_grad_(), head.requires_grad_()]
    with eaves.verl.install():
        log_prob, entropy = verl.linear_cross_entropy(*leaves, labels, 0.7)
    (log_prob.sum() - 0.1 * entropy.sum()).backward()
    log_probs, entropies, of_hidden, of_head = zip(*cpu_ranks.run(verl_on_a_rank), strict=True)
    for found, expected in (
        (log_probs[0], log_prob), (entropies[3], entropy), (torch.stack(of_hidden).sum(0), hidden.grad),
        (torch.cat(of_head), head.grad),
    ):  # fmt: skip
        torch.testing.assert_close(found, expected.detach())


def test_an_import_installs_eaves_in_verl(verl: Any) -> None:
    sys.modules.pop("eaves.auto.verl", None)
    __import__("eaves.auto.verl")
    assert eaves.verl.is_active() and verl.linear_cross_entropy is not None
    labels = rows_and_head((5,), 33, torch.float32, torch.device("cpu"))
    assert verl.linear_cross_entropy(*labels)[0].shape == (5,)


def test_verl_imports_eaves_by_its_environment(tmp_path: Path) -> None:
    """verl's own wheel, with a module of mocks for ray."""
    if importlib.util.find_spec("verl") is None:
        pytest.skip("verl is not installed")
    (tmp_path / "ray.py").write_text(
        "from unittest import mock\n__path__ = []\n\n\ndef __getattr__(name):\n"
        "    if name.startswith('__'):\n        raise AttributeError(name)\n    return mock.MagicMock()\n"
    )
    program = """
import verl, eaves
from verl.utils.kernel.linear_cross_entropy import LinearCrossEntropy, linear_cross_entropy
assert eaves.verl.is_active() and linear_cross_entropy != LinearCrossEntropy.apply
"""
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    for modules, code in (("eaves.auto.verl", 0), ("", 1)):
        environment = {**os.environ, "PYTHONPATH": paths, "VERL_USE_EXTERNAL_MODULES": modules}
        result = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
        assert result.returncode == code, result.stderr


def test_the_recipe_for_verl(verl: Any) -> None:
    run_recipe("verl")
    assert eaves.verl.is_active()


def test_verl_takes_the_options_that_install_is_given(verl: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    original = eaves.verl.linear_log_prob
    monkeypatch.setattr(eaves.verl, "linear_log_prob", lambda *a, **k: given.update(k) or original(*a, **k))
    with eaves.verl.install(algorithm="recompute", workspace_bytes=1 << 20):
        verl.linear_cross_entropy(*rows_and_head((5,), 33, torch.float32, torch.device("cpu")))
    assert given.items() >= {"algorithm": "recompute", "workspace_bytes": 1 << 20}.items()
    with pytest.raises(ValueError):
        eaves.verl.install(algorithm="fast")
