"""eaves.fla through FLA's own table of backends, against the formulas in float64. FLA's own kernels are Triton's: they
are the oracle where Triton runs (on a GPU, or on a CPU with TRITON_INTERPRET=1). Without Triton, FLA is imported with
empty modules in its place."""

import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import eaves
from cross_entropy_test import each
from eaves._replacement import INTEGRATIONS
from eaves._torch.linear_cross_entropy_rules import OF_BIAS, OF_HEAD, OF_HIDDEN
from hf_models import gradients_asked_for
from integrations import StandIns, installed, run_recipe
from pairwise import pairwise
from ranks import Ranks, here
from watch import watched

if INTEGRATIONS["fla"].version() is None:
    pytest.skip("fla-core is not installed", allow_module_level=True)


HAS_TRITON = importlib.util.find_spec("triton") is not None
if not HAS_TRITON:
    StandIns("triton").start()

import_module("eaves.fla")
FusedLinearCrossEntropyLoss = import_module("fla.modules").FusedLinearCrossEntropyLoss
of_head = import_module("fla.modules.fused_linear_cross_entropy.ops")
of_logits = import_module("fla.modules.fused_cross_entropy.ops")

ROWS, FEATURES, CLASSES = 37, 16, 131  # more rows than one vector has, none a multiple of it
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}  # of gradients in bfloat16, which are rounded to it


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    eaves.fla.install()
    yield
    eaves.fla.install()


def inputs(dtype: torch.dtype, device: torch.device, has_bias: bool = True) -> list[Tensor]:
    """hidden, head, bias: leaves, the same each time."""
    generator = torch.Generator().manual_seed(5)
    shapes = [(ROWS, FEATURES), (CLASSES, FEATURES), (CLASSES,)][: 3 if has_bias else 2]
    made = [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]
    return [each.requires_grad_() for each in made]


def targets(device: torch.device, ignore_index: int = -100) -> Tensor:
    made = torch.randint(0, CLASSES, (ROWS,), generator=torch.Generator().manual_seed(7))
    made[::5] = ignore_index
    return made.to(device)


def formula(logits: Tensor, target: Tensor, scale: float, softcap: float | None, **options: Any) -> Tensor:
    logits = logits * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return functional.cross_entropy(logits, target, **options)


def assert_close(found: Tensor, expected: Tensor, tolerance: float) -> None:
    assert found.shape == expected.shape
    assert (found.double() - expected.double()).norm() <= tolerance * expected.double().norm().clamp(min=1e-6)


# ------------------------------------------------------------------------------------------------------- loss of a head


@each("dtype", (torch.float32, torch.bfloat16))
def test_the_loss_of_a_head_and_its_gradients_are_the_formula(dtype: torch.dtype, device: torch.device) -> None:
    for has_bias, reduction, smoothing, scale, softcap, in_fp32, ignore_index, factor in pairwise(
        (False, True), ("mean", "sum"), (0.0, 0.2), (1.0, 0.3), (None, 4.0), (True, False), (-100, 3), (1.0, -0.5)
    ):
        given, target = inputs(dtype, device, has_bias), targets(device, ignore_index)
        criterion = FusedLinearCrossEntropyLoss(
            ignore_index, smoothing, scale, softcap, reduction=reduction, accumulate_grad_in_fp32=in_fp32
        )
        loss = criterion(given[0].view(1, ROWS, FEATURES), target.view(1, ROWS), *given[1:])
        assert loss.dtype == torch.float32 and loss.shape == ()
        (factor * loss).backward()

        exact = [each.detach().double().requires_grad_() for each in given]
        expected = formula(
            functional.linear(*exact), target, scale, softcap, ignore_index=ignore_index, label_smoothing=smoothing,
            reduction=reduction,
        )  # fmt: skip
        (factor * expected).backward()
        assert_close(loss.detach(), expected.detach(), 1e-5)  # of float32 sums, whatever the dtype is
        for ours, theirs in zip(given, exact, strict=True):
            assert ours.grad is not None and theirs.grad is not None and ours.grad.dtype == dtype
            assert_close(ours.grad, theirs.grad, TOLERANCE[dtype])


def test_the_head_s_gradient_is_added_up_in_float32_unless_fla_is_told_otherwise(any_device: torch.device) -> None:
    # So many rows of one sign that a sum in bfloat16 stands still.
    hidden = torch.ones(4096, 8, dtype=torch.bfloat16, device=any_device)
    target = torch.zeros(4096, dtype=torch.int64, device=any_device)

    def asked(in_fp32: bool) -> list[tuple[str, int]]:
        head = torch.zeros(16, 8, dtype=torch.bfloat16, device=any_device, requires_grad=True)
        criterion = FusedLinearCrossEntropyLoss(accumulate_grad_in_fp32=in_fp32)
        return gradients_asked_for(lambda: criterion(hidden, target, head))

    ((_, wide),) = asked(True)
    ((_, narrow),) = asked(False)
    assert wide != narrow and wide & ~narrow and narrow == wide & (OF_HIDDEN | OF_HEAD)


def test_a_frozen_head_takes_no_product_for_its_gradient(any_device: torch.device) -> None:
    hidden, head, bias = inputs(torch.float32, any_device)
    frozen = torch.nn.Parameter(head.detach(), requires_grad=False)
    criterion = FusedLinearCrossEntropyLoss()
    expected = torch.autograd.grad(2 * criterion(hidden, targets(any_device), head, bias), (hidden, bias))

    ((_, bits),) = gradients_asked_for(lambda: (2 * criterion(hidden, targets(any_device), frozen, bias)).backward())
    assert bits & (OF_HIDDEN | OF_HEAD | OF_BIAS) == OF_HIDDEN | OF_BIAS
    assert frozen.grad is None
    for found, exact in zip((hidden.grad, bias.grad), expected, strict=True):
        assert found is not None
        assert_close(found, exact, 1e-6)


def test_tensors_that_fla_copies_get_their_gradients(any_device: torch.device) -> None:
    hidden, head, bias = inputs(torch.float32, any_device)
    criterion = FusedLinearCrossEntropyLoss()
    expected = torch.autograd.grad(criterion(hidden, targets(any_device), head, bias), (hidden, head))
    strided = [each.detach().T.contiguous().requires_grad_() for each in (hidden, head)]
    found = torch.autograd.grad(
        criterion(strided[0].T, targets(any_device), torch.nn.Parameter(strided[1].T), bias), strided[0]
    )
    assert_close(found[0].T, expected[0], 1e-6)
    found = torch.autograd.grad(criterion(hidden, targets(any_device), strided[1].T, bias), strided[1])
    assert_close(found[0].T, expected[1], 1e-6)


def test_a_second_backward_gives_the_same_gradients(any_device: torch.device) -> None:
    given = inputs(torch.float32, any_device)
    loss = 3 * FusedLinearCrossEntropyLoss()(given[0], targets(any_device), *given[1:])
    first = [each.clone() for each in torch.autograd.grad(loss, given, retain_graph=True)]
    for _ in range(2):
        second = torch.autograd.grad(loss, given, retain_graph=True)
        assert all(map(torch.equal, first, second))
    assert all(map(torch.equal, first, torch.autograd.grad(loss, given)))


def test_no_rows_ignored_rows_autocast_and_inference(any_device: torch.device) -> None:
    hidden, head, bias = inputs(torch.float32, any_device)
    criterion, target = FusedLinearCrossEntropyLoss(), targets(any_device)
    for rows, labels in ((hidden, torch.full_like(target, -100)), (hidden[:0], target[:0])):
        loss = criterion(rows, labels, head, bias)
        assert loss.item() == 0
        assert all(each.abs().max() == 0 for each in torch.autograd.grad(loss, (hidden, head, bias)))
    expected = criterion(hidden, target, head, bias)
    gradients = torch.autograd.grad(expected, (hidden, head))
    for rows in (hidden, hidden.detach().bfloat16().requires_grad_()):  # as layers in front give them
        with torch.autocast(any_device.type, torch.bfloat16):
            loss = criterion(rows, target, head, bias)
        assert loss.dtype == torch.float32 and loss.item() == pytest.approx(expected.item(), rel=1e-2)
        for leaf, found, exact in zip(
            (rows, head), torch.autograd.grad(2 * loss, (rows, head)), gradients, strict=True
        ):
            assert found.dtype == leaf.dtype
            assert_close(found, 2 * exact, 2e-2)
    with torch.inference_mode():
        assert criterion(hidden, target, head, bias).item() == expected.item()
        copies = [hidden.clone(), target, head.clone(), bias.clone()]
    with torch.no_grad():
        assert criterion(*copies).item() == criterion(copies[0], target, head, bias).item() == expected.item()


def test_a_model_of_fla_has_eaves_loss(any_device: torch.device) -> None:
    models = pytest.importorskip("fla.models", reason="flash-linear-attention is not installed")
    with pytest.warns(UserWarning, match="fuse_linear_cross_entropy"):  # of FLA, about rounded logits
        configuration = models.GLAConfig(
            hidden_size=FEATURES, num_hidden_layers=1, num_heads=2, vocab_size=CLASSES,
            fuse_linear_cross_entropy=True, fuse_cross_entropy=False,
        )  # fmt: skip
    model = models.GLAForCausalLM(configuration).to(any_device)
    hidden = torch.randn(2, 9, FEATURES, device=any_device)
    labels = torch.randint(0, CLASSES, (2, 9), device=any_device)
    labels[0, :3] = -100
    for items in (None, 23):
        with watched("eaves.linear_cross_entropy_forward_backward") as calls:
            loss, logits = model._compute_logits_and_loss(hidden, labels, num_items_in_batch=items)
        rows, target = model.lm_head(hidden)[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        expected = functional.cross_entropy(rows, target, reduction="sum") / (items or (target != -100).sum())
        assert logits is None and len(calls) == 1
        assert loss.item() == pytest.approx(expected.item(), rel=1e-5)


def test_the_recipe_is_the_loss_of_the_head(any_device: torch.device) -> None:
    hidden, target = inputs(torch.float32, any_device)[0], targets(any_device)
    head = torch.nn.Linear(FEATURES, CLASSES, device=any_device)
    names = run_recipe("FLA", hidden=hidden, labels=target, head=head)
    expected = functional.cross_entropy(head(hidden), target)
    assert names["loss"].item() == pytest.approx(expected.item(), rel=1e-6)
    assert head.weight.grad is not None
    assert_close(head.weight.grad, torch.autograd.grad(expected, head.weight)[0], 1e-5)


@each("dtype", (torch.int16, torch.int32))
def test_targets_may_be_other_integers_than_int64(dtype: torch.dtype, any_device: torch.device) -> None:
    hidden, head = inputs(torch.float32, any_device, False)
    target, logits = targets(any_device), torch.randn(ROWS, CLASSES, device=any_device)
    with watched() as calls:
        found = FusedLinearCrossEntropyLoss()(hidden[None], target.to(dtype)[None], head)
    assert any("linear_cross_entropy" in name for name, *_ in calls)
    assert torch.equal(found, FusedLinearCrossEntropyLoss()(hidden[None], target[None], head))
    losses = [of_logits.cross_entropy_loss(logits, each_target)[0] for each_target in (target.to(dtype), target)]
    assert torch.equal(*losses)


# ------------------------------------------------------------------------------------------------------ loss of logits


@each("dtype", (torch.float32, torch.bfloat16))
def test_the_loss_of_logits_and_its_gradient_are_the_formula(dtype: torch.dtype, device: torch.device) -> None:
    for smoothing, scale, z_loss, softcap, ignore_index, in_place in pairwise(
        (0.0, 0.2), (1.0, 0.3), (0.0, 1e-2), (None, 4.0), (-100, 3), (False, True)
    ):
        leaf = (3 * torch.randn(ROWS, CLASSES, generator=torch.Generator().manual_seed(3))).to(device, dtype)
        target, upstream = targets(device, ignore_index), torch.linspace(-1, 2, ROWS, device=device)
        logits = leaf.requires_grad_().clone()
        before = logits.detach().clone()
        loss, of_z = of_logits.cross_entropy_loss(
            logits, target, smoothing, scale, z_loss, softcap, ignore_index, inplace_backward=in_place
        )
        assert loss.dtype == of_z.dtype == torch.float32 and not of_z.requires_grad
        assert torch.equal(logits, before)  # FLA's models read them behind the loss
        (gradient,) = torch.autograd.grad(loss, logits, upstream)
        assert (gradient.data_ptr() == logits.data_ptr()) == in_place

        exact = before.double().requires_grad_()
        capped = exact * scale if softcap is None else softcap * torch.tanh(exact * scale / softcap)
        z = torch.where(target == ignore_index, 0, z_loss * capped.logsumexp(-1) ** 2)
        options = {"ignore_index": ignore_index, "label_smoothing": smoothing, "reduction": "none"}
        expected = functional.cross_entropy(capped, target, **options) + z
        (exact_gradient,) = torch.autograd.grad(expected, exact, upstream.double())
        assert_close(loss.detach(), expected.detach(), 1e-6)
        assert_close(of_z, z.detach(), 1e-6)
        assert_close(gradient, exact_gradient, TOLERANCE[dtype])


@each(
    "of_leaf",
    (
        lambda leaf: leaf,
        lambda leaf: leaf.view(1, ROWS, CLASSES).view(ROWS, CLASSES),
        lambda leaf: (2 * leaf[:1]).expand(ROWS, CLASSES),
        lambda leaf: (2 * leaf).T.contiguous().T,
    ),
)
def test_logits_that_may_not_be_written_over_are_not(
    of_leaf: Callable[[Tensor], Tensor], any_device: torch.device
) -> None:
    leaf = torch.randn(ROWS, CLASSES, device=any_device, requires_grad=True)
    logits, target = of_leaf(leaf), targets(any_device)
    before = logits.detach().clone()
    of_logits.cross_entropy_loss(logits, target, inplace_backward=True)[0].sum().backward()
    assert torch.equal(logits, before)
    expected = torch.autograd.grad(functional.cross_entropy(of_leaf(leaf), target, reduction="sum"), leaf)
    assert leaf.grad is not None
    assert_close(leaf.grad, expected[0], 1e-5)


# ------------------------------------------------------------------------------------------------------------ a group


def losses_of_pieces(group: Any, given: list[Tensor], target: Tensor) -> list[Tensor]:
    """The losses of the head and of logits over this rank's classes, and their gradients."""
    hidden, head, bias = given
    rank, size = torch.distributed.get_rank(group), CLASSES // torch.distributed.get_world_size(group)
    rows = slice(rank * size, (rank + 1) * size)
    mine = [hidden.detach(), head.detach()[rows], bias.detach()[rows]]
    logits = functional.linear(*mine).requires_grad_()
    mine = [each.clone().requires_grad_() for each in mine]
    loss = FusedLinearCrossEntropyLoss(process_group=group, label_smoothing=0.1)(mine[0], target.to(here()), *mine[1:])
    losses, z = of_logits.cross_entropy_loss(logits, target.to(here()), 0.1, 1.0, 1e-2, process_group=group)
    gradients = torch.autograd.grad(2 * loss, mine)
    return [loss.detach(), *gradients, losses.detach(), z, *torch.autograd.grad(losses.sum(), logits)]


@pytest.fixture
def two_ranks() -> Iterator[Ranks]:
    started = Ranks(2)  # each imports FLA, which takes seconds
    yield started
    started.close()


def test_a_group_has_the_vocabulary_in_pieces(two_ranks: Ranks) -> None:
    device = torch.device("cpu")
    given, target = inputs(torch.float32, device), targets(device)
    count = 2
    given = [given[0], *(each.detach()[: CLASSES // count * count] for each in given[1:])]
    target = target.clamp(max=CLASSES // count * count - 1)
    whole = [each.detach().double().requires_grad_() for each in given]
    logits = functional.linear(*whole)
    loss = functional.cross_entropy(logits, target, label_smoothing=0.1)
    z = torch.where(target == -100, 0, 1e-2 * logits.logsumexp(-1) ** 2)
    losses = functional.cross_entropy(logits, target, label_smoothing=0.1, reduction="none") + z
    of_hidden, of_weight, of_bias = torch.autograd.grad(2 * loss, whole, retain_graph=True)
    (of_rows,) = torch.autograd.grad(losses.sum(), logits)
    for rank, found in enumerate(two_ranks.run(losses_of_pieces, given, target)):
        pieces = [each.chunk(count)[rank] for each in (of_weight, of_bias)]
        expected = [loss, of_hidden, *pieces, losses, z, of_rows.chunk(count, 1)[rank]]
        for ours, exact in zip(found, expected, strict=True):
            assert_close(ours, exact.detach(), 1e-5)


# ------------------------------------------------------------------------------------------- calls that stay with FLA


class OfFla(Exception):
    """FLA's own function was called."""


@pytest.fixture
def of_fla(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """The loss of a head as FLA's models call it, which raises OfFla where eaves does not compute it."""

    def reached(*_: Any, **__: Any) -> None:
        raise OfFla

    monkeypatch.setattr(of_head, "triton", SimpleNamespace(cdiv=reached))
    given, target = inputs(torch.float32, torch.device("cpu")), targets(torch.device("cpu"))
    return lambda **options: of_head.fused_linear_cross_entropy_loss(given[0], target, *given[1:], **options)


@each(
    "options",
    (
        {"use_l2warp": True},
        {"logit_scale": -1.0},
        {"logit_softcapping": 0.0},
        {"label_smoothing": 2.0},
        {"reduction": "none"},
    ),
)
def test_fla_computes_what_eaves_does_not_and_says_so(options: dict[str, Any], of_fla: Callable[..., None]) -> None:
    name = next(iter(options)).removeprefix("logit_").removesuffix("ping")
    said = f"eaves.fla: {name} is .*; FLA computes this call itself"
    with pytest.warns(UserWarning, match=said), pytest.raises(OfFla):
        of_fla(**options)


def test_fla_computes_what_is_on_another_device(of_fla: Callable[..., None]) -> None:
    head = torch.zeros(CLASSES, FEATURES, device="meta")
    with pytest.warns(UserWarning, match="a Tensor of torch.float32 on meta"), pytest.raises(OfFla):
        of_head.fused_linear_cross_entropy_fwd(head, torch.zeros(CLASSES, dtype=torch.int64, device="meta"), head)


# --------------------------------------------------------------------------------------------------------- installation


def test_it_is_undone_by_uninstall_by_the_end_of_a_block_and_by_the_environment(
    of_fla: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    integration = INTEGRATIONS["fla"]

    def assert_active(is_active: bool) -> None:
        assert eaves.fla.is_active() is integration.is_active() is is_active
        if is_active:
            of_fla()
        else:
            with pytest.raises(OfFla):
                of_fla()

    assert_active(True)
    eaves.fla.uninstall()
    assert_active(False)
    with eaves.fla.install():
        assert_active(True)
    assert_active(False)
    eaves.fla.uninstall()
    eaves.fla.install()
    monkeypatch.setenv("FLA_EAVES", "0")
    assert_active(False)
    assert "after import eaves.fla" in integration.turned_on


def test_fla_without_backends_is_loud(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "fused_linear_cross_entropy_fwd"
    monkeypatch.setattr(of_head, name, inspect.unwrap(getattr(of_head, name)))  # FLA_DISABLE_BACKEND_DISPATCH=1
    with pytest.raises(RuntimeError, match="FLA_DISABLE_BACKEND_DISPATCH"):
        eaves.fla.install()


def test_an_unknown_version_is_loud(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "eaves.fla")
    sentence = r"fla-core has version 0\.5\.2, expected 0\.6\.x; nothing was replaced"
    with installed("0.5.2"), pytest.raises(RuntimeError, match=sentence):
        import_module("eaves.fla")


# ---------------------------------------------------------------------------------------------------- FLA's own kernels


@pytest.mark.skipif(
    not HAS_TRITON or not (torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"),
    reason="Triton runs no kernels here",
)
def test_fla_s_own_kernels_give_the_same(any_device: torch.device) -> None:
    target = targets(any_device)

    def of_the_head(**options: Any) -> list[Tensor]:
        given = inputs(torch.float32, any_device)
        loss = of_head.fused_linear_cross_entropy_loss(given[0], target, *given[1:], **options)
        return [loss.detach(), *torch.autograd.grad(loss * 0.5, given)]

    def of_the_logits(**options: Any) -> list[Tensor]:
        leaf = torch.randn(ROWS, CLASSES, generator=torch.Generator().manual_seed(3)).to(any_device).requires_grad_()
        logits = leaf.clone()
        loss, z = of_logits.cross_entropy_loss(logits, target, **options)
        before = logits.detach().clone()
        (gradient,) = torch.autograd.grad(loss, leaf, torch.linspace(-1, 2, ROWS, device=any_device))
        return [loss.detach(), z, before, gradient, logits.detach()]

    for run, options in (
        (of_the_head, {}),
        (of_the_head, {"reduction": "sum", "label_smoothing": 0.1, "logit_scale": 0.5}),
        (of_the_logits, {"lse_square_scale": 1e-2}),
        (of_the_logits, {"inplace_backward": True, "label_smoothing": 0.1, "logit_scale": 0.5}),
    ):
        found = run(**options)
        eaves.fla.uninstall()
        expected = run(**options)
        eaves.fla.install()
        for ours, theirs in zip(found, expected, strict=True):
            assert_close(ours, theirs, 1e-5)
