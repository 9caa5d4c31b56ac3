"""The common contract of the operators that take a head in chunks of rows, linear_kl_div with each reduction and
linear_log_prob of several tokens: repeated backwards, autocast, torch.compile, refused transforms, products and
memory."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import eaves
from chunked_cases import (
    DIVERGENCES,
    DivergenceOracle,
    TokensOracle,
    Watching,
    assert_gradients,
    chosen_tokens,
    heads,
    temperatures,
    uneven,
)
from comparison import assert_agree, assert_within
from cross_entropy_test import REDUCTIONS, each
from layouts import random_tensor
from linear_cross_entropy_cases import assert_gradients as assert_gradients_of

WAYS = (*REDUCTIONS, "tokens")
CLASSES, ROWS = 33, (3, 5)


def result(way: str, x: Tensor, head: Tensor, **options: Any) -> Tensor:
    """Returns the result for 24 features and 33 classes; every third row is ignored."""
    if way == "tokens":
        return eaves.linear_log_prob(x, head, tokens_on(x.device), **options)
    teacher = [each.to(x.dtype) for each in heads(torch.float32, x.device)[2:]]
    return eaves.linear_kl_div(x, head, *teacher, targets=tokens_on(x.device)[..., 1], reduction=way, **options)


def oracle_of(way: str, x: Tensor, head: Tensor, bias: Tensor | None = None) -> DivergenceOracle | TokensOracle:
    if way == "tokens":
        return TokensOracle(x, head, tokens_on(x.device), bias=bias)
    teacher = [each.to(x.dtype) for each in heads(torch.float32, x.device)[2:]]
    return DivergenceOracle(x, head, *teacher, targets=tokens_on(x.device)[..., 1], bias=bias, reduction=way)


def tokens_on(device: torch.device) -> Tensor:
    return chosen_tokens(ROWS, 3, CLASSES, device)


# ------------------------------------------------------------------------------------------------------------ gradients


@each("way", WAYS)
@each("wanted", ((True, False, False), (False, True, False), (False, False, True), (True, False, True)))
def test_only_gradients_that_are_wanted_are_there(wanted: tuple[bool, ...], way: str, device: torch.device) -> None:
    tensors = (*heads(torch.bfloat16, device)[:2], random_tensor((CLASSES,), torch.float32, device))
    x, head, bias = (each.requires_grad_(wants) for each, wants in zip(tensors, wanted, strict=True))
    found = result(way, x, head, bias=bias)
    found.backward(uneven(found))
    assert tuple(each.grad is not None for each in tensors) == wanted
    # The bias gradient sums the logits' gradients before these are rounded.
    assert_gradients([each.grad for each in tensors], oracle_of(way, x, head, bias).gradients(uneven(found)))


@each("way", WAYS)
@each("dtype", (torch.float32, torch.bfloat16))
def test_a_second_backward_gives_the_same(dtype: torch.dtype, way: str, device: torch.device) -> None:
    given = [each.requires_grad_() for each in heads(dtype, device)[:2]]
    found = result(way, *given)
    upstream = uneven(found)
    first = torch.autograd.grad(found, given, upstream, retain_graph=True)
    copies = [each.clone() for each in first]
    if way == "tokens":
        found.mul_(1)  # changes the result in place: the backward must not read it
    (grad, *_) = torch.autograd.grad(found, given, upstream, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"^linear_\w+: there is no second derivative"):
        torch.autograd.grad(grad.sum(), given)
    second = torch.autograd.grad(found, given, upstream)
    assert all(map(torch.equal, copies, second)) and all(map(torch.equal, copies, first))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(found, given, upstream)


@each("way", WAYS)
def test_under_autocast_heads_are_cast_and_a_float32_gradient_is_not_rounded(way: str, device: torch.device) -> None:
    given = [*heads(torch.float32, device)[:2], random_tensor((CLASSES,), torch.float32, device)]
    x, head, bias = (each.requires_grad_() for each in given)
    oracle = oracle_of(way, x.bfloat16(), head.bfloat16(), bias)
    with torch.autocast(device.type, torch.bfloat16):
        found = result(way, x, head, bias=bias)
        gradients = torch.autograd.grad(found, given, uneven(found))
    assert found.dtype == torch.float32 and [each.dtype for each in gradients] == [torch.float32] * 3
    assert_within(found, oracle.bound)
    assert_gradients_of(gradients, oracle.gradients(uneven(found)), torch.bfloat16)
    assert not torch.equal(gradients[1], gradients[1].bfloat16().float())


@each("way", WAYS)
def test_a_backward_under_autocast_computes_in_the_dtype_of_the_call(way: str, device: torch.device) -> None:
    given = [each.requires_grad_() for each in heads(torch.float32, device)[:2]]
    found = result(way, *given)
    exact = oracle_of(way, *given).gradients(uneven(found))
    with torch.autocast(device.type, torch.bfloat16):
        assert_gradients((*torch.autograd.grad(found, given, uneven(found)), None), exact)


@each("way", WAYS)
def test_int32_targets_are_compared_with_all_of_ignore_index(way: str, device: torch.device) -> None:
    x, head, *teacher = heads(torch.float32, device)
    zeros = torch.zeros(*ROWS, 2, dtype=torch.int32, device=device)
    if way == "tokens":
        assert (eaves.linear_log_prob(x, head, zeros, ignore_index=1 << 32) < 0).all()
        return
    all_count = eaves.linear_kl_div(x, head, *teacher, targets=zeros[..., 0], ignore_index=1 << 32, reduction=way)
    assert torch.equal(all_count, eaves.linear_kl_div(x, head, *teacher, reduction=way)) and (all_count > 0).all()


# -------------------------------------------------------------------------------------------------- the rest of PyTorch


@each("name", ("linear_kl_div", "linear_log_prob", "log_prob"))
def test_forward_mode_transforms_and_export_are_refused(name: str, any_device: torch.device) -> None:
    x, head, y, teacher = heads(torch.float32, any_device)
    tokens = chosen_tokens(ROWS, 3, 24, any_device)  # as logits, x has 24 classes
    others, axes = {
        "linear_kl_div": ((head, y, teacher), (0, None, 0, None)),
        "linear_log_prob": ((head, tokens), (0, None, 0)),
        "log_prob": ((tokens,), (0, 0)),
    }[name]

    def function(x: Tensor) -> Tensor:
        return getattr(eaves, name)(x, *others)

    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(NotImplementedError, match=rf"^{name}: there is no forward-mode derivative"):
            function(dual)
    said = "this operator does" if name == "linear_kl_div" else "with several tokens or a temperature for each row"
    for transformed in (
        lambda: torch.func.grad(lambda x: function(x).sum())(x),
        lambda: torch.vmap(getattr(eaves, name), axes)(x, *others),
    ):
        with pytest.raises(NotImplementedError, match=rf"^{name}: {said}.* not work inside of"):
            transformed()
    if name != "linear_kl_div":
        found = function(x.requires_grad_())
        with pytest.raises(
            NotImplementedError, match=rf"^{name}: several tokens .* do not support a batch of gradients"
        ):
            torch.autograd.grad(found, x, torch.ones(2, *found.shape, device=any_device), is_grads_batched=True)

    class Model(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return function(x)

    with pytest.raises(Exception, match=r"does not work inside of torch\.export"):
        torch.export.export(Model(), (x.detach(),), strict=False)


@each("way", ("mean", "tokens"))
@pytest.mark.usefixtures("fresh_compiler")
def test_torch_compile_leaves_it_as_it_is(way: str, any_device: torch.device) -> None:
    given = [each.requires_grad_() for each in heads(torch.float32, any_device)[:2]]

    def loss(x: Tensor, head: Tensor, temperature: Any) -> Tensor:
        return 2 * result(way, 2 * x, head, temperature=temperature).exp().sum()

    compiled = torch.compile(loss, backend="aot_eager")
    for temperature in (0.5, 2.0):
        divisor = temperature if way == "mean" else temperature * temperatures(ROWS, any_device)
        expected = torch.autograd.grad(loss(*given, divisor), given)
        assert_agree(compiled(*given, divisor), loss(*given, divisor))
        for actual, wanted in zip(torch.autograd.grad(compiled(*given, divisor), given), expected, strict=True):
            assert_agree(actual, wanted)
        with torch.no_grad():
            assert_agree(compiled(*given, divisor), loss(*given, divisor))


# ---------------------------------------------------------------------------------------------------------------- costs


@each("case", [
    ("mean", (True, True), 4), ("sum", (True, False), 3), ("mean", (False, True), 3), ("mean", (False, False), 2),
    ("none", (True, True), 6), ("none", (True, False), 5), ("none", (False, False), 2),
    ("tokens", (True, True), 4), ("tokens", (True, False), 3), ("tokens", (False, True), 3),
    ("tokens", (False, False), 1),
])  # fmt: skip
def test_products_are_as_few_as_documented(case: tuple[str, tuple[bool, bool], int], device: torch.device) -> None:
    way, wanted, products = case
    given = [each.requires_grad_(wants) for each, wants in zip(heads(torch.float32, device), wanted)]
    with Watching() as watching:
        found = result(way, *given)
        if any(wanted):
            found.sum().backward()
    assert watching.products == products


@each("case", [*((reduction, divergence) for reduction in ("mean", "none") for divergence in DIVERGENCES),
                ("tokens", None), ("tokens", 4.0)])  # fmt: skip
@each("dtype", (torch.float32, torch.bfloat16))
def test_no_more_memory_is_taken_than_was_asked_for(
    dtype: torch.dtype, case: tuple[str, Any], device: torch.device
) -> None:
    way, option = case
    rows, classes, places, limit = 1000, 2003, 8, 1 << 20
    x, head, *teacher = heads(dtype, device, (rows,), classes, 16, 24)
    given = [x.requires_grad_(), head.requires_grad_()]
    of_gradients = 2 * 4 * (rows * 16 + classes * 16)  # the sums in float32, and the returned gradients
    with Watching() as watching:
        if way == "tokens":
            found = eaves.linear_log_prob(
                *given, chosen_tokens((rows,), places, classes, device), temperature=temperatures((rows,), device),
                softcap=option, workspace_bytes=limit, grad_weight_dtype=torch.float32,
            )  # fmt: skip
            least, largest, of_rows = limit / 4, limit / 4, 100 * rows * places  # a few numbers per place and row
        else:
            bias = torch.zeros(classes, device=device)
            bias[3] = -math.inf
            target = torch.zeros(rows, dtype=torch.int64, device=device)
            found = eaves.linear_kl_div(
                *given, *teacher, targets=target, teacher_bias=bias, bias=bias, divergence=option, reduction=way,
                workspace_bytes=limit,
            )  # fmt: skip
            # The CUDA kernels need the logits of student and teacher for one chunk and, in 16 bits, the gradient of the
            # logits for one chunk or four.
            largest = limit / 2 if device.type == "cuda" else limit / 12
            least, of_rows = limit / 2, 200 * rows + 3 * 4 * classes  # a few numbers per row, and the biases
        found.sum().backward()
    assert least < watching.peak < limit + of_gradients + of_rows
    assert watching.largest <= largest, "a tensor of more than a chunk"


@each("has_temperatures", (False, True))
@each("is_in_place", (False, True))
def test_of_logits_there_is_no_second_tensor_of_their_size_but_for_the_gradient(
    is_in_place: bool, has_temperatures: bool
) -> None:
    rows, classes = 300, 50257  # the logits have 60 MB in float32
    leaf = torch.zeros(rows, classes, requires_grad=True)
    logits = leaf * 1
    tokens = chosen_tokens((rows,), 4, classes, torch.device("cpu"))
    temperature = temperatures((rows,), torch.device("cpu")) if has_temperatures else None
    with Watching() as watching:
        found = eaves.log_prob(logits, tokens, temperature=temperature, inplace_backward=is_in_place)
        torch.autograd.grad(found.sum(), logits)
    assert watching.peak < (0 if is_in_place else logits.nbytes) + (33 << 20)
