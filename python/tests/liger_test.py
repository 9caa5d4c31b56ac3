"""eaves.liger: arguments, outputs and gradients of Liger's functions, against its definitions in float64 and against
its own kernels; what is replaced when; and the libraries that call Liger."""

import contextlib
import importlib
import sys
from collections.abc import Iterator
from importlib.metadata import version
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import eaves
from integrations import installed
from liger_cases import (
    CLASSES,
    DEVICE,
    ROWS,
    cases,
    chunked_loss,
    formula,
    functional,
    in_float64,
    known,
    step,
    tensors,
)
from watch import watched

HEAD = "LigerFusedLinearCrossEntropyFunction"
LIGER = tuple(map(int, version("liger-kernel").split(".")[:3]))


pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of Triton's interpreter


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    eaves.liger.uninstall()


def upstream_of(case: dict[str, Any]) -> Tensor | float:
    return torch.linspace(-1, 2, ROWS, device=DEVICE) if case["reduction"] == "none" else 0.7


# ------------------------------------------------------------------------------------------------------ cross entropies


def test_the_linear_cross_entropy_is_liger_s_definition() -> None:
    rows, head, bias, targets = tensors()
    for case in cases((False, True), (False, True)):
        leaves = {"input": rows, "weight": head, "bias": bias if case.pop("bias") else None}
        labels = targets.clamp(min=0) if case["ignore_index"] == 3 else targets
        function = functional.liger_fused_linear_cross_entropy
        case = known(function, case)
        with eaves.liger.install(), watched() as calls:
            found = step(function, leaves, upstream_of(case), target=labels, **case)
        assert any("linear_cross_entropy" in name for name, *_ in calls)
        found.matches(step(formula, in_float64(leaves), upstream_of(case), target=labels, **in_float64(case)))


def test_the_cross_entropy_is_liger_s_definition() -> None:
    rows, head, _, targets = tensors()
    logits = rows @ head.T
    for case in cases():
        labels = targets.clamp(min=0) if case["ignore_index"] == 3 else targets
        class_weight = case.pop("ce_weight")
        function = functional.liger_cross_entropy
        case = known(function, case)
        with eaves.liger.install(), watched() as calls:
            found = step(function, {"input": logits}, upstream_of(case), target=labels, weight=class_weight, **case)
        assert any("cross_entropy" in name for name, *_ in calls)
        case = in_float64({**case, "ce_weight": class_weight})
        found.matches(step(formula, {"input": logits.double()}, upstream_of(case), target=labels, **case))


# Before 0.8.2 the head's gradient of "none" is wrong; before 0.8.4 a soft cap counts classes beyond the last one.
@pytest.mark.parametrize("reduction", ("mean", "sum", "none") if LIGER >= (0, 8, 2) else ("mean", "sum"))
def test_liger_s_own_kernels_give_the_same(reduction: str) -> None:
    rows, head, bias, targets = tensors()
    leaves = {"input": rows, "weight": head, "bias": bias}
    case = {
        "target": targets, "reduction": reduction, "ce_weight": torch.linspace(0.2, 2, CLASSES, device=DEVICE),
        "lse_square_scale": 0.03, "label_smoothing": 0.2, "softcap": 3.0 if LIGER >= (0, 8, 4) else None,
        "return_z_loss": True, "return_token_accuracy": True, "return_predicted_tokens": True,
        "use_token_scaling": True,
    }  # fmt: skip
    case = known(functional.liger_fused_linear_cross_entropy, case)
    theirs = step(functional.liger_fused_linear_cross_entropy, leaves, **case)
    with eaves.liger.install():
        step(functional.liger_fused_linear_cross_entropy, leaves, **case).matches(theirs)
    case["weight"] = case.pop("ce_weight")
    case = known(functional.liger_cross_entropy, case)
    theirs = step(functional.liger_cross_entropy, {"input": (rows @ head.T)}, **case)
    with eaves.liger.install():
        step(functional.liger_cross_entropy, {"input": (rows @ head.T)}, **case).matches(theirs)


def test_the_cross_entropy_writes_over_logits_as_liger_does() -> None:
    rows, head, _, targets = tensors()
    with eaves.liger.install():
        for needs_gradient in (True, False):
            logits = (rows @ head.T).requires_grad_(needs_gradient) * 1
            before = logits.detach().clone()
            functional.liger_cross_entropy(logits, targets)
            assert torch.equal(logits.detach(), before) == (not needs_gradient)


@pytest.mark.parametrize("is_leaf", (False, True))
@pytest.mark.parametrize("parts_of", (lambda x: x.chunk(2), lambda x: (x[:4], x[4:]), lambda x: (x.view(ROWS, -1),)))
def test_the_cross_entropy_of_parts_of_logits(parts_of: Any, is_leaf: bool) -> None:
    rows, head, _, targets = tensors()
    leaf = (rows @ head.T).requires_grad_()
    exact = torch.nn.functional.cross_entropy(leaf, targets, reduction="sum")
    (gradient,) = torch.autograd.grad(exact, leaf)
    with eaves.liger.install():
        parts = parts_of(leaf if is_leaf else leaf * 1)
        losses = [
            functional.liger_cross_entropy(part, labels, reduction="sum")
            for part, labels in zip(parts, targets.split([len(part) for part in parts]), strict=True)
        ]
    torch.testing.assert_close(sum(losses), exact)
    torch.testing.assert_close(torch.autograd.grad(sum(losses), leaf)[0], gradient)


def test_a_frozen_body_leaves_the_head_its_gradient() -> None:
    rows, head, _, targets = tensors()
    weight = head.clone().requires_grad_()
    with eaves.liger.install():
        functional.liger_fused_linear_cross_entropy(rows, weight, targets).backward()
    exact = head.double().requires_grad_()
    torch.nn.functional.cross_entropy(rows.double() @ exact.T, targets).backward()
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad.double(), exact.grad, rtol=1e-5, atol=1e-6)


def test_under_autocast_the_gradient_of_a_float32_head_is_not_rounded() -> None:
    rows, head, _, targets = tensors()
    weight = head.clone().requires_grad_()
    with eaves.liger.install(), torch.autocast(DEVICE.type, torch.bfloat16):
        loss = functional.liger_fused_linear_cross_entropy(rows, weight, targets)
    loss.backward()
    assert loss.dtype == torch.float32 and weight.grad is not None
    assert not torch.equal(weight.grad, weight.grad.bfloat16().float())


def test_rows_of_16_bits_have_a_loss_of_32() -> None:
    rows, head, _, targets = tensors(torch.bfloat16)
    exact = torch.nn.functional.cross_entropy(rows.double() @ head.double().T, targets)
    with eaves.liger.install():
        loss = functional.liger_fused_linear_cross_entropy(rows, head, targets)
        of_logits = functional.liger_cross_entropy((rows @ head.T), targets)
        nothing = functional.liger_fused_linear_cross_entropy(rows, head, torch.full_like(targets, -100))
    assert loss.dtype == of_logits.dtype == torch.float32
    assert abs(loss - exact) < 1e-5 and abs(of_logits - exact) < 2e-2 and nothing == 0


@pytest.mark.parametrize("dtype", (torch.int16, torch.int32))
def test_targets_may_be_other_integers_than_int64(dtype: torch.dtype) -> None:
    rows, head, _, targets = tensors()
    with eaves.liger.install():
        for function, arguments in (
            (functional.liger_fused_linear_cross_entropy, (rows, head)),
            (functional.liger_cross_entropy, (rows @ head.T,)),
        ):
            assert torch.equal(function(*arguments, targets.to(dtype)), function(*arguments, targets))


def test_an_accumulation_in_float64_is_refused() -> None:
    rows, head, _, targets = tensors()
    with eaves.liger.install(), pytest.raises(NotImplementedError, match=r"accum_dtype is torch\.float64"):
        functional.liger_fused_linear_cross_entropy(rows, head, targets, accum_dtype=torch.float64)


@pytest.mark.skipif(LIGER < (0, 8, 2), reason="this Liger has no scaled cross entropy")
@pytest.mark.parametrize("selected", (None, [3, 0, 3, 20]) if LIGER >= (0, 8, 5) else (None,))
@pytest.mark.parametrize("has_entropy", (False, True))
def test_the_scaled_cross_entropy_is_liger_s_own(selected: list[int] | None, has_entropy: bool) -> None:
    rows, head, _, targets = tensors()
    targets[5] = 4
    ids = None if selected is None else torch.tensor(selected, device=DEVICE)

    def run(dtype: torch.dtype) -> list[Tensor]:
        given = {"_input": rows.to(dtype).requires_grad_(), "weight": head.to(dtype).requires_grad_()}
        function = sys.modules["liger_kernel.ops"].LigerFusedLinearScaledCrossEntropyFunction
        ignored = targets.where(targets >= 0, 3)  # 3 is one of the selected tokens too
        more: dict[str, Any] = {} if ids is None else {"selected_token_ids": ids}
        more |= {"temperature": 0.7, "ignore_index": 3, "return_entropy": has_entropy}
        out = function.apply(**given, target=ignored, **more)
        out = [out] if isinstance(out, Tensor) else list(out)
        assert len(out) == 1 + has_entropy + (ids is not None)
        upstream = torch.linspace(1, 2, ROWS, device=DEVICE)
        gradients = torch.autograd.grad(
            sum(torch.einsum("r...,r->", each, upstream) for each in out), [*given.values()]
        )
        return [each.detach() for each in (*out, *gradients)]

    try:
        theirs = run(torch.float32)
    except ImportError as error:  # on a GPU from Hopper on Liger's own kernel needs the CuTe DSL
        if "CuTe DSL" not in str(error):
            raise
        pytest.skip(str(error))
    with eaves.liger.install():
        ours = run(torch.float32)
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our, their, rtol=1e-4, atol=1e-4)


# --------------------------------------------------------------------------------------------------------- divergences


@pytest.mark.parametrize("beta", (0.0, 0.3, 1.0))
@pytest.mark.parametrize("has_labels", (False, True))
def test_the_linear_jsd_is_liger_s_own(beta: float, has_labels: bool) -> None:
    rows, head, _, targets = tensors()
    torch.manual_seed(5)
    teacher = torch.randn(ROWS, 5, device=DEVICE, requires_grad=True), torch.randn(CLASSES, 5, device=DEVICE)

    def run() -> list[Tensor]:
        given = [rows.clone().requires_grad_(), head.clone().requires_grad_()]
        loss = functional.liger_fused_linear_jsd(
            *given, *teacher, targets if has_labels else None, jsd_beta=beta, temperature=1.3
        )
        return [loss.detach(), *torch.autograd.grad(loss, given)]

    theirs = run()
    with eaves.liger.install():
        ours = run()
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our, their, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    (
        {"weight_hard_loss": 0.3, "weight_soft_loss": 0.6, "beta": 0.2, "return_soft_hard_loss": True},
        {"weight_hard_loss": 0.0, "weight_soft_loss": 1.0, "beta": 1.0, "more_classes": 4},
        {"temperature": 1.7, "has_bias": True, "ignore_index": 3},
        {"beta": 0.0, "weight_hard_loss": 0.0, "has_bias": True, "more_classes": 2},
    ),
)
def test_the_jsd_of_chunked_loss_is_liger_s_own(options: dict[str, Any]) -> None:
    rows, head, bias, targets = tensors()
    options = {"compiled": False, **options}
    torch.manual_seed(5)
    classes, has_bias = CLASSES + options.pop("more_classes", 0), options.pop("has_bias", False)
    teacher = torch.randn(ROWS, 5, device=DEVICE), torch.randn(classes, 5, device=DEVICE)
    teacher_bias = torch.randn(classes, device=DEVICE) if has_bias else None
    labels = targets.clamp(min=0) if options.get("ignore_index") == 3 else targets

    def run() -> list[Tensor]:
        given = [rows.clone().requires_grad_(), head.clone().requires_grad_(), bias.clone().requires_grad_()]
        found = chunked_loss.LigerFusedLinearJSDLoss(**options)(
            given[0], given[1], *teacher, labels, given[2] if has_bias else None, teacher_bias
        )
        found = found if isinstance(found, tuple) else (found,)
        assert len(found) == (3 if options.get("return_soft_hard_loss") else 1)
        gradients = torch.autograd.grad(1.5 * found[0], given[: 2 + has_bias])
        return [each.detach() for each in (*found, *gradients)]

    theirs = run()
    with eaves.liger.install():
        ours = run()
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our, their, rtol=1e-4, atol=1e-5)


def test_what_the_jsd_of_chunked_loss_refuses() -> None:
    rows, head, _, targets = tensors()
    arguments = (rows, head, rows, torch.cat([head, head[:2]]), targets)
    with eaves.liger.install():
        with pytest.raises(NotImplementedError, match=r"weight_hard_loss is 0\.5.* 2 classes more"):
            chunked_loss.LigerFusedLinearJSDLoss()(*arguments)
        with pytest.raises(NotImplementedError, match=r"weight_soft_loss is 0\.0"):
            chunked_loss.LigerFusedLinearJSDLoss(weight_soft_loss=0.0)(rows, head, rows, head, targets)


# --------------------------------------------------------------------------------------------------- replaced functions


def test_every_module_that_imported_liger_s_functions_has_eaves() -> None:
    theirs = getattr(functional, HEAD)
    bound = importlib.import_module("liger_kernel.chunked_loss.functional").liger_fused_linear_jsd
    other = ModuleType("a_trainer")
    other.__dict__.update(function=theirs, apply=theirs.apply, chunked=bound)
    before = dict(other.__dict__)
    sys.modules["a_trainer"] = other
    try:
        installed = eaves.liger.install()
        assert eaves.liger.is_active()
        ours = getattr(functional, HEAD)
        assert ours is not theirs and other.function is ours and other.apply is ours.apply
        assert getattr(sys.modules["liger_kernel.ops"], HEAD) is ours
        assert other.chunked is sys.modules["liger_kernel.chunked_loss.jsd_loss"].LigerFusedLinearJSDFunction.apply
        with installed:
            pass
        assert not eaves.liger.is_active() and other.__dict__ == before
        assert getattr(sys.modules["liger_kernel.ops"], HEAD) is theirs
    finally:
        del sys.modules["a_trainer"]


def test_modules_of_liger_that_were_made_before_call_eaves() -> None:  # as those of VeOmni and prime-rl
    rows, head, bias, targets = tensors()
    transformers = pytest.importorskip("liger_kernel.transformers")
    exact = torch.nn.functional.cross_entropy((rows @ head.T + bias).double(), targets)
    of_head, loss = transformers.LigerFusedLinearCrossEntropyLoss(), transformers.LigerCrossEntropyLoss()
    with eaves.liger.install(), watched() as calls:
        found, of_logits = of_head(head, rows, targets, bias), loss(rows @ head.T + bias, targets)
    torch.testing.assert_close(torch.stack([found, of_logits]).double(), exact.expand(2))
    names = {name.split(".")[0] for name, *_ in calls}
    assert names >= {"linear_cross_entropy_forward", "cross_entropy_forward"}, names


@pytest.mark.skipif(LIGER < (0, 8, 3), reason="this Liger calls one kernel")
def test_it_is_active_only_while_liger_calls_its_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    backends, loss_of = sys.modules["liger_kernel.backends"], importlib.import_module("liger_kernel.functional")
    registry = importlib.import_module("liger_kernel.backends.registry")
    backends.available_impls("cross_entropy")  # registers Liger's own
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))
    backends.register_impl("cross_entropy", impl_name="another")(lambda *_, **__: (torch.zeros(()), None, None, None))
    rows, head, _, targets = tensors()

    def reaches_eaves() -> bool:
        with watched() as calls:
            loss_of.cross_entropy(rows @ head.T, targets)
        return bool(calls)

    with eaves.liger.install(), contextlib.ExitStack() as stack:
        stack.callback(backends.set_impl, None)
        assert eaves.liger.is_active() and reaches_eaves()
        backends.set_impl("another")
        assert not eaves.liger.is_active() and not reaches_eaves()
        with pytest.warns(
            UserWarning, match=r"another kernel, chosen by set_impl .*, so the call does not reach eaves"
        ) as warned:
            eaves.liger.install()
        assert warned[0].filename == __file__
        for name in ("triton", "nvidia-triton"):
            backends.set_impl(name)
            assert eaves.liger.is_active() and reaches_eaves()
        # The later ones go before the earlier ones, and all before set_impl.
        for name in ("BACKEND", "IMPL", "BACKEND_CROSS_ENTROPY", "IMPL_CROSS_ENTROPY"):
            monkeypatch.setenv(f"LIGER_KERNEL_{name}", "another")
            assert not eaves.liger.is_active() and not reaches_eaves()
            monkeypatch.setenv(f"LIGER_KERNEL_{name}", "triton")
            assert eaves.liger.is_active() and reaches_eaves()


def test_under_torch_compile_it_is_eaves_too() -> None:
    rows, head, _, targets = tensors()
    compiled = torch.compile(functional.liger_fused_linear_cross_entropy, fullgraph=True, backend="aot_eager")
    with eaves.liger.install():
        weight = head.clone().requires_grad_()
        loss = compiled(rows, weight, targets, return_token_accuracy=True)
        loss.loss.backward()
    expected = step(functional.liger_fused_linear_cross_entropy, {"input": rows, "weight": head}, target=targets)
    torch.testing.assert_close(loss.loss.detach(), expected["loss"])
    torch.testing.assert_close(weight.grad, expected["gradient of weight"], rtol=1e-5, atol=1e-6)


def test_an_unknown_version_or_argument_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    sentence = r"liger-kernel has version 0\.4\.0, expected 0\.6\.5\.x or .*; nothing was replaced"
    with installed("0.4.0"), pytest.raises(RuntimeError, match=sentence):
        eaves.liger.install()
    theirs = getattr(functional, HEAD)
    monkeypatch.setattr(theirs, "forward", staticmethod(lambda ctx, _input, target, weight: None))
    with pytest.raises(RuntimeError, match=f"eaves.liger: {HEAD} takes input, target, weight, which eaves"):
        eaves.liger.install()
    monkeypatch.undo()
    monkeypatch.setattr(functional, HEAD, object())  # as with LIGER_KERNEL_IMPL
    with pytest.raises(
        RuntimeError, match=f"other code has already replaced .*functional.{HEAD}.*; nothing was replaced"
    ):
        eaves.liger.install()
    monkeypatch.undo()
    assert not eaves.liger.is_active() and getattr(functional, HEAD) is theirs
