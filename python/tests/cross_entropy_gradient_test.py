"""eaves.cross_entropy and autograd: tensors kept for the backward, arguments with a gradient, and overwritten logits.
cross_entropy_test.py checks the numbers of every option."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import eaves
from comparison import FLOATING_POINT, CrossEntropyOracle, assert_within
from cross_entropy_test import (
    EVERYTHING,
    OPTIONS,
    REDUCTIONS,
    each,
    probabilities_of,
    targets_of,
    upstream,
)
from layouts import expanded_along_the_first_axis, padded_rows, random_tensor
from operators import Stop
from pairwise import pairwise


@each("name", ["lse", "entropy"])
@each("reduction", REDUCTIONS)
def test_lse_and_entropy_have_a_gradient_without_the_loss(name: str, reduction: str, device: torch.device) -> None:
    logits = random_tensor((9, 33), torch.float32, device, 2.0).requires_grad_()
    target = targets_of(logits)
    result = getattr(eaves.cross_entropy(logits, target, reduction=reduction, outputs=name), name)
    (grad,) = torch.autograd.grad(result, logits, upstream(result))
    oracle = CrossEntropyOracle(logits, target, reduction=reduction)
    assert_within(grad, oracle.gradient(torch.float32, 0.0, **{f"grad_{name}": upstream(result)}))
    assert grad[target == -100].any(), "ignored rows have an lse and an entropy"


def test_argmax_and_z_loss_have_no_gradient(device: torch.device) -> None:
    logits = random_tensor((9, 33), torch.float32, device).requires_grad_()
    out = eaves.cross_entropy(logits, targets_of(logits), z_loss=0.1, outputs=("argmax", "z_loss"))
    assert out.loss.requires_grad and not out.argmax.requires_grad and not out.z_loss.requires_grad


@each("options", [{}, OPTIONS[-1]])  # the oracle's tests cover the others
def test_finite_differences_agree(options: dict[str, Any], device: torch.device) -> None:
    # The tensor is small because each element costs two calls. gradcheck also runs the backward under torch.vmap.
    logits = random_tensor((3, 2, 4), torch.float64, device, 2.0).requires_grad_()
    weights = (None, torch.tensor([0.5, 1.0, 0.0, 2.0], dtype=torch.float64, device=device))
    targets = (targets_of(logits), probabilities_of(logits.detach()))
    for weight, target, reduction in pairwise(weights, targets, REDUCTIONS):

        def function(x: Tensor, t: Tensor = target, w: Tensor | None = weight, r: str = reduction) -> Any:
            out = eaves.cross_entropy(x, t, w, class_dim=-1, reduction=r, outputs=("lse", "entropy"), **options)
            return out.loss, out.lse, out.entropy

        assert torch.autograd.gradcheck(function, logits, check_batched_grad=True)


def test_a_dense_input_gets_a_gradient_that_lies_as_it_does(device: torch.device) -> None:
    # Otherwise autograd would copy the gradient before it becomes input.grad.
    for logits, class_dim in (
        (random_tensor((4, 6), torch.float32, device), -1),
        (random_tensor((4, 6), torch.float32, device).t(), -1),
        (random_tensor((2, 5, 4, 3), torch.float32, device).to(memory_format=torch.channels_last), 1),
    ):
        leaf = logits.detach().requires_grad_()
        eaves.cross_entropy(leaf, targets_of(leaf, class_dim), class_dim=class_dim).backward()
        assert leaf.grad.stride() == leaf.stride()


# --------------------------------------------------------------------------------------------------- autograd's corners


def test_only_the_arguments_and_two_numbers_a_row_are_kept_for_the_backward(device: torch.device) -> None:
    for dtype in FLOATING_POINT:
        logits = random_tensor((64, 1000), dtype, device).requires_grad_()
        target = targets_of(logits)
        kept: list[Tensor] = []

        def keep(tensor: Tensor, kept: list[Tensor] = kept) -> Tensor:
            kept.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            eaves.cross_entropy(logits, target).backward()
        inputs = {logits.data_ptr(), target.data_ptr()}
        assert inputs == {t.data_ptr() for t in kept} & inputs, "the tensors themselves, not copies"
        besides = [t for t in kept if t.data_ptr() not in inputs]
        # lse takes two numbers a row, and the mean's divisor one.
        number = 8 if dtype == torch.float64 else 4
        assert sum(t.untyped_storage().nbytes() for t in besides) == (64 * 2 + 1) * number


# --------------------------------------------------------------------------------------------------------- in place


def test_the_gradient_in_place_reaches_the_leaf_behind_the_logits(device: torch.device) -> None:
    x = random_tensor((9, 20), torch.float32, device)
    weights = [random_tensor((20, 33), torch.float32, device).requires_grad_() for _ in range(2)]
    target = torch.arange(9, device=device)
    eaves.cross_entropy(x @ weights[0], target).backward()
    eaves.cross_entropy(x @ weights[1], target, inplace_backward=True).backward()
    torch.testing.assert_close(weights[1].grad, weights[0].grad)


def test_an_upstream_gradient_in_float32_is_not_rounded_before_it_multiplies(device: torch.device) -> None:
    # In bfloat16 the factor would round to 1 + 2^-7. In place the gradient is rounded before and after the product.
    factor = 1 + 2**-8 + 2**-9
    leaf = random_tensor((20, 300), torch.bfloat16, device).requires_grad_()
    target = targets_of(leaf)
    for reduction in ("sum", "none"):
        gradients = []
        for number in (1.0, factor):
            logits = leaf * 1
            loss = eaves.cross_entropy(logits, target, reduction=reduction, inplace_backward=True)
            gradients.append(torch.autograd.grad(loss, logits, torch.full_like(loss, number))[0])
        assert torch.equal(gradients[1], (gradients[0].float() * factor).bfloat16())
        assert not torch.equal(gradients[1], gradients[0] * torch.tensor(factor).bfloat16().item())


def test_in_place_outputs_are_those_of_the_forward_but_for_ignored_rows(device: torch.device) -> None:
    leaf = random_tensor((9, 33), torch.float32, device).requires_grad_()
    target = targets_of(leaf)
    expected: Any = eaves.cross_entropy(leaf, target, z_loss=0.1, outputs=EVERYTHING)
    actual: Any = eaves.cross_entropy(leaf * 1, target, z_loss=0.1, inplace_backward=True, outputs=EVERYTHING)
    ignored = target == -100
    for name, a, e in zip(expected._fields, actual, expected, strict=True):
        assert a.requires_grad == (name == "loss")
        if a.dim():
            assert not a[ignored].any()
            a, e = a[~ignored], e[~ignored]
        torch.testing.assert_close(a, e)
    out: Any = eaves.cross_entropy(leaf * 1, target, inplace_backward=True, outputs=("sum_sq", "lse"))
    assert out._fields == ("loss", "sum_sq", "lse") and torch.equal(out.lse, actual.lse)


def test_float16_in_place_is_written_in_the_backward(device: torch.device) -> None:
    leaf = random_tensor((9, 33), torch.float16, device).requires_grad_()
    target = targets_of(leaf)
    logits = leaf * 1
    out = eaves.cross_entropy(logits, target, inplace_backward=True, outputs=("lse", "argmax"))
    assert torch.equal(logits, leaf)  # the forward writes nothing
    plain = eaves.cross_entropy(leaf, target, outputs=("lse", "argmax"))
    counts = target != -100
    assert torch.equal(out.loss, plain.loss) and torch.equal(out.lse[counts], plain.lse[counts])
    assert torch.equal(out.argmax[counts], plain.argmax[counts]) and not out.lse[~counts].any()
    assert out.loss.requires_grad and not out.lse.requires_grad
    (grad,) = torch.autograd.grad(out.loss, logits)
    assert torch.equal(grad, torch.autograd.grad(plain.loss, leaf)[0])
    assert torch.equal(logits.detach(), grad)


@each("dtype", [torch.float32, torch.float16])
def test_autograd_notices_who_uses_logits_that_were_written_over(dtype: torch.dtype, device: torch.device) -> None:
    leaf = random_tensor((9, 33), dtype, device).requires_grad_()
    logits = leaf * 1
    # The other use comes before the loss, and its backward after the loss has overwritten the logits.
    if dtype == torch.float16:
        other = logits.sin().sum()
        loss = eaves.cross_entropy(logits, targets_of(leaf), inplace_backward=True)
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            other.backward()
        return
    for rows in (slice(9), slice(8)):  # the whole tensor, and a slice of it
        logits = leaf * 1
        other = logits.square().sum()  # its backward reads logits
        loss = eaves.cross_entropy(logits[rows], targets_of(leaf[rows]), inplace_backward=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            (loss + other).backward()


def whole(logits: Tensor) -> Tensor:
    return logits


def in_rows(logits: Tensor) -> Tensor:
    return logits.view(-1, logits.shape[-1])


def in_place_of(logits: Tensor, **options: Any) -> Any:
    return eaves.cross_entropy(logits, targets_of(logits.detach()), class_dim=-1, inplace_backward=True, **options)


USED_AFTERWARDS = r"^cross_entropy: a tensor with a gradient was computed from input after a call with inplace_backward"


@each("shape_of_call", [whole, in_rows])
@each("shape_of_use", [whole, in_rows])
def test_what_uses_logits_after_they_were_written_over_has_no_backward(
    shape_of_call: Callable[[Tensor], Tensor], shape_of_use: Callable[[Tensor], Tensor], device: torch.device
) -> None:
    leaf = random_tensor((3, 9, 33), torch.float32, device).requires_grad_()
    for use in (lambda z: (2 * z).sum(), lambda z: z[..., 1].square().sum(), lambda z: eaves.logsumexp(z, -1).mean()):
        for is_alone in (False, True):
            logits = leaf * 1
            given, used = shape_of_call(logits), shape_of_use(logits)
            loss = in_place_of(given)
            after = use(used)
            with pytest.raises(RuntimeError, match=USED_AFTERWARDS):
                (after if is_alone else loss + after).backward()
    assert leaf.grad is None


def test_a_use_after_the_backward_has_none_either(device: torch.device) -> None:
    logits = random_tensor((9, 33), torch.float32, device).requires_grad_() * 1
    in_place_of(logits).backward()
    with pytest.raises(RuntimeError, match=USED_AFTERWARDS):
        (2 * logits).sum().backward()


def test_a_second_loss_of_logits_that_were_written_over_has_no_backward(device: torch.device) -> None:
    leaf = random_tensor((9, 33), torch.float32, device).requires_grad_()
    for is_in_place in (False, True):
        for is_alone in (False, True):
            logits = leaf * 1
            first = in_place_of(logits)
            second = eaves.cross_entropy(logits, targets_of(leaf), inplace_backward=is_in_place)
            with pytest.raises(RuntimeError, match=f"{USED_AFTERWARDS}|modified by an inplace operation"):
                (second if is_alone else first + second).backward()
    assert leaf.grad is None


def test_what_has_no_gradient_reads_the_gradient_of_logits_that_were_written_over(device: torch.device) -> None:
    leaf = random_tensor((9, 33), torch.float32, device).requires_grad_()
    logits = leaf * 1
    loss = in_place_of(logits)
    with torch.no_grad():
        read = 1 * logits
    (loss + 0 * logits.detach().sum()).backward()
    assert torch.equal(leaf.grad, read)


@each("shape_of_call", [whole, in_rows])
def test_uses_before_logits_are_written_over_keep_their_gradient(
    shape_of_call: Callable[[Tensor], Tensor], device: torch.device
) -> None:
    leaf = random_tensor((3, 9, 33), torch.float32, device).requires_grad_()
    (expected,) = torch.autograd.grad(in_place_of(leaf * 1), leaf)
    logits = leaf * 1
    before = (2 * logits).sum()  # its backward does not read the logits
    (grad,) = torch.autograd.grad(in_place_of(shape_of_call(logits)) + before, leaf)
    torch.testing.assert_close(grad, expected + 2)


@each("shape_of_call", [whole, in_rows])
def test_the_gradient_of_logits_in_place_can_be_had(
    shape_of_call: Callable[[Tensor], Tensor], device: torch.device
) -> None:
    leaf = random_tensor((3, 9, 33), torch.float32, device).requires_grad_()
    (expected,) = torch.autograd.grad(in_place_of(leaf * 1), leaf)
    logits = leaf * 1
    (grad,) = torch.autograd.grad(in_place_of(shape_of_call(logits)), logits)
    assert torch.equal(grad, expected) and grad.data_ptr() == logits.data_ptr()
    for is_asked_before in (False, True):
        logits, seen = leaf * 1, []
        if is_asked_before:
            logits.retain_grad()
            logits.register_hook(seen.append)
        loss = in_place_of(shape_of_call(logits))
        if not is_asked_before:
            logits.retain_grad()
            logits.register_hook(seen.append)
        loss.backward()
        assert torch.equal(logits.grad, expected) and torch.equal(seen[0], expected) and len(seen) == 1


def test_hooks_may_change_the_gradient_of_logits_in_place(device: torch.device) -> None:
    leaf = random_tensor((9, 33), torch.float32, device).requires_grad_()
    (expected,) = torch.autograd.grad(in_place_of(leaf * 1), leaf)
    logits = leaf * 1
    logits.register_hook(lambda grad: 3 * grad)
    loss = in_place_of(logits)
    logits.register_hook(lambda grad: 2 * grad)
    torch.testing.assert_close(torch.autograd.grad(loss, leaf)[0], 6 * expected)


def test_the_rest_of_a_tensor_may_be_used_after_a_slice_of_it_was_written_over(device: torch.device) -> None:
    leaf = random_tensor((3, 9, 33), torch.float32, device).requires_grad_()

    def loss_of(is_in_place: bool) -> Tensor:
        logits = leaf * 1
        target = targets_of(logits[:, :8].detach())
        loss = eaves.cross_entropy(logits[:, :8], target, class_dim=-1, inplace_backward=is_in_place)
        return loss + logits[:, 8].square().sum()

    actual, expected = (torch.autograd.grad(loss_of(is_in_place), leaf)[0] for is_in_place in (True, False))
    torch.testing.assert_close(actual, expected)


def test_logits_can_be_given_again_after_a_call_in_place_that_was_refused(device: torch.device) -> None:
    if device.type != "cpu":
        pytest.skip("the host does not wait for a GPU, which refuses no class")
    leaf = random_tensor((9, 33), torch.float32, device).requires_grad_()
    logits = leaf * 1
    with pytest.raises(ValueError, match=r"^cross_entropy: target\[0\] is 99"):
        eaves.cross_entropy(logits, torch.full((9,), 99), inplace_backward=True)
    (grad,) = torch.autograd.grad(in_place_of(logits), leaf)
    assert torch.equal(grad, torch.autograd.grad(in_place_of(leaf * 1), leaf)[0])


@each("dtype", [torch.float32, torch.float16])
def test_a_backward_in_place_can_be_compiled(
    dtype: torch.dtype, any_device: torch.device, fresh_compiler: None
) -> None:
    leaf = random_tensor((9, 33), dtype, any_device).requires_grad_()
    (expected,) = torch.autograd.grad(in_place_of(leaf * 1), leaf)
    loss = in_place_of(leaf * 1)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
        loss.backward()
    torch.testing.assert_close(leaf.grad, expected)


def test_float16_logits_may_be_used_until_the_backward_writes_over_them(device: torch.device) -> None:
    leaf = random_tensor((9, 33), torch.float16, device).requires_grad_()
    gradients = []
    for is_in_place in (True, False):
        logits = leaf * 1
        loss = eaves.cross_entropy(logits, targets_of(leaf), inplace_backward=is_in_place)
        gradients.append(torch.autograd.grad(loss + logits.square().sum(), leaf)[0])
    assert torch.equal(*gradients)


@each("dtype", [torch.float32, torch.float16])
def test_logits_in_place_that_were_changed_before_the_backward_are_noticed(
    dtype: torch.dtype, device: torch.device
) -> None:
    leaf = random_tensor((9, 33), dtype, device).requires_grad_()
    logits = leaf * 1
    loss = eaves.cross_entropy(logits, targets_of(leaf), inplace_backward=True)
    logits.detach().zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@each("dtype", [torch.float32, torch.float16])
def test_in_place_logits_that_share_memory_are_refused_in_the_forward(dtype: torch.dtype, device: torch.device) -> None:
    row = random_tensor((33,), dtype, device).requires_grad_() * 1
    with pytest.raises(ValueError, match=r"^cross_entropy: input has .*share memory"):
        eaves.cross_entropy(row.expand(9, 33), torch.zeros(9, dtype=torch.int64, device=device), inplace_backward=True)


def test_in_place_logits_that_are_negated_lazily_are_refused(device: torch.device) -> None:
    logits = torch._neg_view(random_tensor((9, 33), torch.float32, device).requires_grad_() * 1)
    with pytest.raises(ValueError, match=r"^cross_entropy: input is negated lazily"):
        eaves.cross_entropy(logits, targets_of(logits), inplace_backward=True)


# How the test asks for a backward in place, and the error's message.
REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"is_grads_batched": True}, NotImplementedError, "^cross_entropy: inplace_backward does not support a batch of"),
    ({"create_graph": True}, NotImplementedError, r"^cross_entropy: with inplace_backward .*create_graph"),
    ({"second": 1.0}, RuntimeError, r"(^cross_entropy: with inplace_backward there is one)|(modified by)"),
    ({"second": 2.0}, RuntimeError, r"(^cross_entropy: with inplace_backward there is one)|(modified by)"),
]


@pytest.mark.parametrize(("asked", "kind", "sentence"), REFUSED)
@each("dtype", [torch.float32, torch.float16])
def test_a_backward_in_place_is_one_of_one_gradient(
    dtype: torch.dtype, asked: dict[str, Any], kind: type[Exception], sentence: str, device: torch.device
) -> None:
    logits = random_tensor((9, 33), dtype, device).requires_grad_() * 1
    loss = eaves.cross_entropy(logits, targets_of(logits), inplace_backward=True)
    upstreams = torch.full((2,) if "is_grads_batched" in asked else (), asked.get("second", 1.0), device=device)
    if "second" in asked:
        torch.autograd.grad(loss, logits, upstreams, retain_graph=True)
        asked = {}
    with pytest.raises(kind, match=sentence):
        torch.autograd.grad(loss, logits, upstreams, **asked)


def test_a_leaf_a_view_of_one_and_shared_memory_are_not_written_over(device: torch.device) -> None:
    leaf = random_tensor((9, 33), torch.float32, device).requires_grad_()
    target = targets_of(leaf)
    before = leaf.detach().clone()
    for logits in (leaf, leaf[:], leaf.view(9, 33)):
        with pytest.raises(RuntimeError, match=r"^cross_entropy: input is a leaf that requires a gradient"):
            eaves.cross_entropy(logits, target, inplace_backward=True)
    for logits in (
        expanded_along_the_first_axis(leaf * 1),
        (leaf * 1).view(-1).unfold(0, 33, 33)[:, :33].expand(9, 33),
    ):
        if logits.stride(0) == 0:
            with pytest.raises(ValueError, match=r"^cross_entropy: .*(own|overlap|share|same)"):
                eaves.cross_entropy(logits, target, inplace_backward=True)
    assert torch.equal(leaf.detach(), before)


def test_padding_beside_logits_in_place_is_left_alone(device: torch.device) -> None:
    leaf = padded_rows(random_tensor((9, 33), torch.float32, device)).requires_grad_()
    wide = torch.nn.functional.pad(leaf, (0, 3), value=7.0) * 1
    logits = wide[:, :33]
    target = targets_of(leaf)
    loss = eaves.cross_entropy(logits, target, inplace_backward=True)
    (grad,) = torch.autograd.grad(loss, leaf)
    assert_within(grad, CrossEntropyOracle(leaf, target).gradient(torch.float32))
    assert (wide.detach()[:, 33:] == 7.0).all()


def test_transforms_refuse_to_write_over_logits(device: torch.device) -> None:
    logits = random_tensor((9, 33), torch.float32, device)
    target = targets_of(logits)
    with pytest.raises(
        NotImplementedError, match=r"^cross_entropy: inplace_backward does not work inside of torch\.vmap"
    ):
        torch.func.grad(lambda x: eaves.cross_entropy(x * 1, target, inplace_backward=True))(logits)


def test_a_compiled_call_ignores_in_place(any_device: torch.device, fresh_compiler: None) -> None:
    leaf = random_tensor((9, 33), torch.float32, any_device).requires_grad_()
    target = targets_of(leaf)

    def function(x: Tensor) -> Tensor:
        return eaves.cross_entropy(x * 2, target, inplace_backward=True)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    (actual,) = torch.autograd.grad(compiled(leaf), leaf)
    torch.testing.assert_close(actual, torch.autograd.grad(function(leaf), leaf)[0])


# ---------------------------------------------------------------------------------------------------------------- edges


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}], ids=str)
def test_without_an_upstream_gradient_there_is_none(options: dict[str, Any], device: torch.device) -> None:
    logits = random_tensor((3, 7), torch.float32, device).requires_grad_()
    Stop.apply(eaves.cross_entropy(logits * 1, targets_of(logits), **options)).backward()  # type: ignore[no-untyped-call]
    assert logits.grad is None


@pytest.mark.parametrize("wrong", [{"label_smoothing": False}, {"z_loss": torch.tensor(0.0)}], ids=str)
def test_a_number_that_is_none_is_refused_whatever_it_equals(wrong: dict[str, Any], device: torch.device) -> None:
    with pytest.raises(TypeError, match="expected"):
        eaves.cross_entropy(torch.zeros(2, 3, device=device), torch.zeros(2, dtype=torch.int64, device=device), **wrong)
