"""The tensors that a forward keeps for its backward (algorithm="keep"), and losses as functions of
log-probabilities."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import eaves
from eaves._autograd.linear_cross_entropy import Keep

N, D, V = 40, 16, 71
CPU = torch.device("cpu")


def tensors(
    device: torch.device, dtype: torch.dtype = torch.float32, classes: int = V
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, D, generator=generator).to(device, dtype).requires_grad_()
    head = (0.5 * torch.randn(classes, D, generator=generator)).to(device, dtype).requires_grad_()
    tokens = torch.randint(classes, (N,), generator=generator)
    tokens[::7] = -100
    return hidden, head, tokens.to(device)


def gradients(device: torch.device, loss_of: Any, **keywords: Any) -> list[Tensor]:
    hidden, head, tokens = tensors(device)
    return list(torch.autograd.grad(loss_of(hidden, head, tokens, **keywords), [hidden, head]))


def weighted(hidden: Tensor, head: Tensor, tokens: Tensor, **keywords: Any) -> Tensor:
    log_prob, entropy = eaves.linear_log_prob(hidden, head, tokens, outputs="entropy", **keywords)
    weights = torch.linspace(-1, 2, N, device=hidden.device)
    return (weights * log_prob + 0.1 * entropy).sum()


KEPT_ROWS = [0, 17, N]
ROW_BYTES = 4 * 96  # float32, 71 classes up to whole cache lines


@pytest.mark.parametrize("rows", [*KEPT_ROWS, None])
def test_gradients_are_those_of_recompute(device: torch.device, rows: int | None) -> None:
    expected = gradients(device, weighted, algorithm="recompute")
    keep_bytes = None if rows is None else rows * ROW_BYTES
    for keywords in ({"algorithm": "keep"}, {"algorithm": "auto"}):
        if keywords["algorithm"] == "auto" and keep_bytes is None:
            continue  # that call recomputes
        found = gradients(device, weighted, keep_bytes=keep_bytes, **keywords)
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_every_reduction_and_option(device: torch.device, reduction: str) -> None:
    def loss_of(hidden: Tensor, head: Tensor, tokens: Tensor, **keywords: Any) -> Tensor:
        loss = eaves.linear_cross_entropy(
            hidden, head, tokens, reduction=reduction, label_smoothing=0.1, softcap=5.0, z_loss=1e-2, skip_ignored=True,
            **keywords,
        )  # fmt: skip
        return (loss * torch.linspace(1, 2, loss.numel(), device=device).view_as(loss)).sum()

    torch.testing.assert_close(
        gradients(device, loss_of, algorithm="keep"), gradients(device, loss_of, algorithm="recompute")
    )


@pytest.mark.parametrize("classes", [50257, 129920, 151665, 248319])
@pytest.mark.parametrize("entropy", [False, True])
def test_gradients_of_large_vocabularies_are_as_exact_as_those_of_recompute(
    cuda: torch.device, classes: int, entropy: bool
) -> None:
    rows, features = 384, 256
    generator = torch.Generator(cuda).manual_seed(1)

    def normal(*shape: int, deviation: float = 1.0) -> Tensor:
        drawn = torch.randn(shape, generator=generator, device=cuda) * deviation
        return drawn.to(torch.bfloat16).requires_grad_()

    hidden, head = normal(rows, features), normal(classes, features, deviation=1.3 / features**0.5)
    tokens = torch.randint(classes, (rows,), generator=generator, device=cuda)
    tokens[::7] = -100
    weights = torch.randn(rows, generator=generator, device=cuda) * (torch.arange(rows, device=cuda) % 3 != 0)

    def loss_of(log_prob: Tensor, entropies: Tensor, _: slice) -> Tensor:
        loss = (weights * log_prob).sum()
        return loss + 0.01 * (weights * entropies).sum() if entropy else loss

    exact = torch.autograd.grad(reference(hidden, head, tokens, loss_of), [hidden, head])

    def errors(**keywords: Any) -> list[float]:
        log_prob, entropies = eaves.linear_log_prob(hidden, head, tokens, outputs="entropy", **keywords)
        found = torch.autograd.grad(loss_of(log_prob, entropies, slice(0, rows)), [hidden, head])
        return [
            float((each.double() - of.double()).norm() / of.double().norm())
            for each, of in zip(found, exact, strict=True)
        ]

    recompute = errors(algorithm="recompute")
    row_bytes = 2 * (-(classes + 4) // 64 * -64)
    for keep_bytes in (0, 128 * row_bytes, 256 * row_bytes, None):
        for found, least in zip(errors(algorithm="keep", keep_bytes=keep_bytes), recompute, strict=True):
            assert 0 < found <= 1.25 * least < 4e-3, (keep_bytes, found, least)


def saved_elements(loss_of: Any) -> int:
    """The number of elements of the largest tensor that the graph of a call saves."""
    largest = 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal largest
        largest = max(largest, tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss_of()
    return largest


@pytest.mark.parametrize("rows", KEPT_ROWS)
def test_keep_bytes_bounds_what_the_graph_holds(rows: int) -> None:
    hidden, head, tokens = tensors(CPU)
    kept = saved_elements(lambda: eaves.linear_log_prob(hidden, head, tokens, keep_bytes=rows * ROW_BYTES))
    assert kept == max(rows * 96, V * D)


def test_a_second_backward_is_right(device: torch.device) -> None:
    for with_entropy in (False, True):
        hidden, head, tokens = tensors(device)
        log_prob, entropy = eaves.linear_log_prob(hidden, head, tokens, outputs="entropy", algorithm="keep")
        loss = (log_prob + entropy if with_entropy else log_prob).sum()
        first = torch.autograd.grad(loss, [hidden, head], retain_graph=True)
        torch.testing.assert_close(torch.autograd.grad(loss, [hidden, head]), first)


def test_with_checkpoints_and_tensors_moved_by_hooks(device: torch.device) -> None:
    expected = gradients(device, weighted, algorithm="keep")

    def checkpointed(*arguments: Tensor) -> Tensor:
        return checkpoint(lambda *tensors: weighted(*tensors, algorithm="keep"), *arguments, use_reentrant=False)

    torch.testing.assert_close(gradients(device, checkpointed), expected)
    with torch.autograd.graph.save_on_cpu():
        torch.testing.assert_close(gradients(device, weighted, algorithm="keep"), expected)


@pytest.mark.parametrize("is_forward_captured", [False, True])
def test_cuda_graphs_of_both_or_of_the_backward(cuda: torch.device, is_forward_captured: bool) -> None:
    hidden, head, tokens = tensors(cuda)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()

    def forward() -> Tensor:
        return eaves.linear_log_prob(hidden, head, tokens, algorithm="keep", skip_ignored=True).sum()

    with torch.cuda.stream(stream):
        loss = forward()
        expected = torch.autograd.grad(loss, [hidden, head], retain_graph=True)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        found = torch.autograd.grad(forward() if is_forward_captured else loss, [hidden, head], retain_graph=True)
    graph.replay()
    torch.testing.assert_close(found, expected)


def test_transforms_recompute(device: torch.device) -> None:
    hidden, head, tokens = tensors(device)
    per_row = torch.func.jacrev(lambda x: eaves.linear_log_prob(x, head, tokens, algorithm="keep"))(hidden)
    expected = torch.autograd.functional.jacobian(lambda x: eaves.linear_log_prob(x, head, tokens), hidden)
    torch.testing.assert_close(per_row, expected)
    log_prob = eaves.linear_log_prob(hidden, head, tokens, algorithm="keep")
    batched = torch.autograd.grad(log_prob, hidden, torch.eye(N, device=device), is_grads_batched=True)[0]
    torch.testing.assert_close(batched, expected)


def test_torch_compile_leaves_calls_alone_whose_numbers_change() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(weighted, backend="eager")
    for temperature in (0.5, 0.7, 0.9):
        expected = gradients(CPU, weighted, temperature=temperature)
        torch.testing.assert_close(gradients(CPU, compiled, temperature=temperature, algorithm="keep"), expected)


def test_rows_in_another_order_are_computed_again(device: torch.device) -> None:
    # A hook may return a tensor with other strides.
    storage = torch.randn(8, 5, D, device=device)
    _, head, tokens = tensors(device)
    tokens = tokens.view(5, 8)
    for hidden in (storage.transpose(0, 1), storage.transpose(0, 1).contiguous()):
        hidden = hidden.detach().requires_grad_()
        expected = torch.autograd.grad(eaves.linear_log_prob(hidden, head, tokens).square().sum(), [hidden, head])
        for unpacked in (lambda each: each, lambda each: each.clone(memory_format=torch.contiguous_format)):
            with torch.autograd.graph.saved_tensors_hooks(lambda each: each, unpacked):
                loss = eaves.linear_log_prob(hidden, head, tokens, algorithm="keep").square().sum()
            torch.testing.assert_close(torch.autograd.grad(loss, [hidden, head]), expected)


def test_an_exported_program_computes_again() -> None:
    class Step(torch.nn.Module):
        def forward(self, hidden: Tensor, head: Tensor, tokens: Tensor) -> Tensor:
            return eaves.linear_log_prob(hidden, head, tokens, algorithm="keep")

    arguments = tensors(CPU)
    for strict in (False, True):
        program = torch.export.export(Step(), arguments, strict=strict)
        torch.testing.assert_close(program.module()(*arguments), eaves.linear_log_prob(*arguments))


def test_torch_compile_leaves_the_call_alone() -> None:
    compiled = torch.compile(weighted, backend="eager")
    torch.testing.assert_close(gradients(CPU, compiled, algorithm="keep"), gradients(CPU, weighted))
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="this operator runs outside of the graph"):
        gradients(CPU, torch.compile(weighted, backend="eager", fullgraph=True), algorithm="keep")


def test_the_gradient_of_the_head_is_added_to_a_tensor(device: torch.device) -> None:
    hidden, head, tokens = tensors(device)
    out = torch.ones_like(head)
    loss = eaves.linear_log_prob(hidden, head, tokens, algorithm="keep", grad_weight_out=out).sum()
    loss.backward()
    expected = torch.autograd.grad(eaves.linear_log_prob(hidden, head, tokens).sum(), head)[0]
    torch.testing.assert_close(out, 1 + expected)


def test_speed_where_it_suits_before_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("kept")

    monkeypatch.setattr(Keep, "forward", staticmethod(refuse))
    hidden, head, tokens = tensors(CPU)
    loss = eaves.linear_cross_entropy(hidden, head, tokens, keep_bytes=1 << 20)
    expected = eaves.linear_cross_entropy(hidden, head, tokens)
    torch.testing.assert_close(*(torch.autograd.grad(each, [hidden, head]) for each in (loss, expected)))
    with pytest.raises(AssertionError, match="kept"):
        eaves.linear_cross_entropy(hidden, head, tokens, reduction="none", keep_bytes=1 << 20)


def test_there_is_no_second_derivative() -> None:
    hidden, head, tokens = tensors(CPU)
    loss = eaves.linear_log_prob(hidden, head, tokens, algorithm="keep").sum()
    (gradient,) = torch.autograd.grad(loss, hidden, create_graph=True)
    with pytest.raises(NotImplementedError, match="linear_log_prob: there is no second derivative"):
        gradient.sum().backward()


@pytest.mark.parametrize(
    ("error", "sentence", "keywords"),
    [
        (ValueError, "keep_bytes is 5, expected None with algorithm", {"algorithm": "speed", "keep_bytes": 5}),
        (ValueError, "keep_bytes is -1, expected a number of bytes from 0", {"keep_bytes": -1}),
        (TypeError, "keep_bytes", {"algorithm": "keep", "keep_bytes": 0.5}),
        (NotImplementedError, 'algorithm is "keep"', {"algorithm": "keep", "temperature": torch.ones(N)}),
        (NotImplementedError, "keep_bytes is given", {"keep_bytes": 5, "temperature": torch.ones(N)}),
    ],
)
def test_refusals(error: type[Exception], sentence: str, keywords: dict[str, Any]) -> None:
    hidden, head, tokens = tensors(CPU)
    with pytest.raises(error, match=sentence):
        eaves.linear_log_prob(hidden, head, tokens, **keywords)


# ------------------------------------------------------------------------------------------------ linear_log_prob_loss


def policy_loss(log_prob: Tensor, entropy: Tensor | None, rows: slice) -> Tensor:
    """The loss of GRPO, with a clipped ratio and an entropy."""
    index = torch.arange(N, device=log_prob.device)[rows].view(-1, *[1] * (log_prob.dim() - 1))
    advantages = ((index % 5) - 2.0).expand_as(log_prob)
    ratio = (log_prob - log_prob.detach() - 0.1 * (index % 3 - 1)).exp()
    loss = -torch.minimum(ratio * advantages, ratio.clamp(0.9, 1.1) * advantages).sum()
    return loss if entropy is None else loss - 0.01 * entropy.sum()


def reference(hidden: Tensor, head: Tensor, tokens: Tensor, fn: Any, temperature: float = 1.0) -> Tensor:
    """The loss from all logits, in float64."""
    logits = (hidden.double() @ head.double().T / temperature).log_softmax(-1)
    counts = tokens != -100
    log_prob = logits.gather(-1, tokens.clamp(min=0).unsqueeze(-1)).squeeze(-1) * counts
    return fn(log_prob, -(logits.exp() * logits).sum(-1) * counts, slice(0, len(tokens)))  # type: ignore[no-any-return]


def assert_as_reference(
    device: torch.device, fn: Any, entropy: bool, shape: tuple[int, ...] = (), **keywords: Any
) -> None:
    hidden, head, tokens = tensors(device)
    hidden = hidden.detach().reshape(*(shape or (N,)), D).requires_grad_()
    tokens = tokens.reshape(shape or (N,))
    expected_fn = fn if entropy else lambda log_prob, _, rows: fn(log_prob, None, rows)
    expected = reference(hidden, head, tokens, expected_fn)
    found = eaves.linear_log_prob_loss(hidden, head, tokens, fn, entropy=entropy, **keywords)
    torch.testing.assert_close(found, expected.to(found.dtype))
    torch.testing.assert_close(
        torch.autograd.grad(3 * found, [hidden, head]),
        tuple(each.to(hidden.dtype) for each in torch.autograd.grad(3 * expected, [hidden, head])),
    )


@pytest.fixture
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes chunks multiples of 16 rows instead of 128, for a small keep_bytes."""
    monkeypatch.setattr("eaves._calls.linear_log_prob_loss._ROWS", 16)


@pytest.mark.usefixtures("few_rows")
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("keep_bytes", [None, 0, 16 * ROW_BYTES])
def test_a_loss_of_tokens_is_that_of_all_logits(device: torch.device, entropy: bool, keep_bytes: int | None) -> None:
    assert_as_reference(device, policy_loss, entropy, keep_bytes=keep_bytes)


def ratio_of_sequences(log_prob: Tensor, _: Tensor | None, rows: slice) -> Tensor:
    """GSPO: one ratio for each sequence, [B, T]."""
    ratio = (log_prob - log_prob.detach() + 0.1).mean(-1).exp()
    return -(ratio * torch.arange(1.0, 9.0, device=log_prob.device)[rows]).sum()


def preference(log_prob: Tensor, _: Tensor | None, rows: slice) -> Tensor:
    """DPO of pairs, [B, 2, T]."""
    chosen, rejected = log_prob.sum(-1).unbind(1)
    return -torch.nn.functional.logsigmoid(0.1 * (chosen - rejected)).sum()


@pytest.mark.usefixtures("few_rows")
@pytest.mark.parametrize(("fn", "shape"), [(ratio_of_sequences, (8, 5)), (preference, (4, 2, 5))])
def test_sequences_and_pairs_are_never_cut(device: torch.device, fn: Any, shape: tuple[int, ...]) -> None:
    assert_as_reference(device, fn, False, shape, keep_bytes=16 * ROW_BYTES)


@pytest.mark.usefixtures("few_rows")
def test_packed_sequences_are_cut_at_their_boundaries(device: torch.device) -> None:
    boundaries = [0, 3, 22, 22, 30, N]  # one is longer than a chunk

    def of_sequences(log_prob: Tensor, _: Tensor | None, rows: slice) -> Tensor:
        ends = [each - rows.start for each in boundaries if rows.start <= each <= rows.stop]
        assert ends[0] == 0 and ends[-1] == len(log_prob)
        return sum((log_prob[a:b].sum() / 10).square() for a, b in itertools.pairwise(ends))  # type: ignore[return-value]

    for given in (boundaries, torch.tensor(boundaries, device=device)):
        assert_as_reference(device, of_sequences, False, keep_bytes=16 * ROW_BYTES, boundaries=given)


@pytest.mark.usefixtures("few_rows")
def test_what_is_kept_is_bounded_by_default(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    # One sequence of 40 tokens, and chunks with room for 16.
    monkeypatch.setattr("eaves._calls.linear_log_prob_loss._KEEP_BYTES", 16 * ROW_BYTES)
    hidden, head, tokens = tensors(device)

    def run() -> Tensor:
        return eaves.linear_log_prob_loss(
            hidden.unsqueeze(0), head, tokens.unsqueeze(0), lambda log_prob, _, rows: log_prob.sum()
        )

    assert saved_elements(run) <= max(16 * 96, V * D)
    expected = torch.autograd.grad(eaves.linear_log_prob(hidden, head, tokens).sum(), [hidden, head])
    torch.testing.assert_close(torch.autograd.grad(run(), [hidden, head]), expected)


@pytest.mark.usefixtures("few_rows")
def test_the_gradient_of_the_head_in_float32(device: torch.device) -> None:
    hidden, head, tokens = tensors(device, torch.bfloat16)

    def error(dtype: torch.dtype | None) -> float:
        loss = eaves.linear_log_prob_loss(hidden, head, tokens, policy_loss, keep_bytes=0, grad_weight_dtype=dtype)
        exact = reference(hidden, head, tokens, lambda log_prob, _, rows: policy_loss(log_prob, None, rows))
        found, expected = (torch.autograd.grad(each, head)[0] for each in (loss, exact))
        assert found.dtype == torch.bfloat16
        return float((found.double() - expected.double()).norm() / expected.double().norm())

    assert error(torch.float32) <= error(None) * 1.01
    assert error(torch.bfloat16) == error(None) < 0.02
    with pytest.raises(ValueError, match="grad_weight_dtype"):
        error(torch.float64)


def test_autocast_of_a_float32_head(device: torch.device) -> None:
    hidden, head, tokens = tensors(device)
    with torch.autocast(device.type, torch.bfloat16):
        loss = eaves.linear_log_prob_loss(hidden, head, tokens, policy_loss, grad_weight_dtype=torch.float32)
        with pytest.raises(NotImplementedError, match="in float16"), torch.autocast(device.type, torch.float16):
            eaves.linear_log_prob_loss(hidden, head, tokens, policy_loss)
    expected = reference(hidden, head, tokens, lambda log_prob, _, rows: policy_loss(log_prob, None, rows))
    found = torch.autograd.grad(loss, [hidden, head])
    assert [each.dtype for each in found] == [torch.float32] * 2
    torch.testing.assert_close(
        found, tuple(each.float() for each in torch.autograd.grad(expected, [hidden, head])), rtol=0.05, atol=0.05
    )


def test_rows_that_the_loss_does_not_read_get_zeros(device: torch.device) -> None:
    hidden, head, tokens = tensors(device)
    loss = eaves.linear_log_prob_loss(hidden, head, tokens, lambda log_prob, _, rows: log_prob.new_zeros(()))
    assert loss == 0
    assert not any(map(torch.any, torch.autograd.grad(loss, [hidden, head])))


def test_a_frozen_head_a_bias_and_a_linear(device: torch.device) -> None:
    linear = torch.nn.Linear(D, V, device=device)
    hidden, _, tokens = tensors(device)

    def minus(log_prob: Tensor, _: Tensor | None, rows: slice) -> Tensor:
        return -log_prob.sum()

    eaves.linear_log_prob_loss(hidden, linear, tokens, minus).backward()
    expected = eaves.linear_cross_entropy(hidden, linear, tokens, reduction="sum")
    found = (hidden.grad, linear.weight.grad, linear.bias.grad)
    torch.testing.assert_close(found, torch.autograd.grad(expected, [hidden, linear.weight, linear.bias]))
    linear.requires_grad_(False)
    loss = eaves.linear_log_prob_loss(hidden, linear, tokens, minus)
    torch.testing.assert_close(torch.autograd.grad(loss, hidden)[0], hidden.grad)
    with torch.no_grad():
        torch.testing.assert_close(eaves.linear_log_prob_loss(hidden, linear, tokens, minus), loss)


@pytest.mark.parametrize(
    ("error", "sentence", "change"),
    [
        (ValueError, r"fn returned float32 of shape \[40\]", {"fn": lambda log_prob, _, rows: log_prob}),
        (ValueError, "fn returned 1.0", {"fn": lambda *_: 1.0}),
        (ValueError, r"fn returned int64 of shape \[\]", {"fn": lambda *_: torch.tensor(3)}),
        (TypeError, "entropy is 0.01, expected a bool", {"entropy": 0.01}),
        (TypeError, "temperature is a tensor, expected a number", {"temperature": torch.ones(N)}),
        (ValueError, r"linear_log_prob_loss: head has shape \[71\]", {"head": torch.zeros(V)}),
        (TypeError, "linear_log_prob_loss: keep_bytes", {"keep_bytes": "4 GiB"}),
        (
            NotImplementedError,
            "in float16",
            {each: torch.zeros(n, D, dtype=torch.float16) for each, n in (("hidden", N), ("head", V))},
        ),
        (TypeError, "boundaries is of type int", {"boundaries": 40}),
        (TypeError, "boundaries is of type Tensor", {"boundaries": torch.tensor([0.0, 40.0])}),
        (TypeError, "fn is 3", {"fn": 3}),
        (
            TypeError,
            r"fn raised: unsupported operand .*'NoneType'; entropy is None unless the call has entropy=True$",
            {"fn": lambda log_prob, entropy, rows: (log_prob - 0.01 * entropy).sum()},
        ),
        (TypeError, "; entropy is None", {"fn": lambda log_prob, entropy, rows: log_prob.sum() - entropy.sum()}),
        (TypeError, "'NoneType'$", {"fn": lambda *given: given[0] + None, "entropy": True}),
        (ValueError, r"tokens \[39\]", {"tokens": torch.zeros(39, dtype=torch.int64)}),
        (ValueError, r"boundaries begins with \[0, 39\]", {"boundaries": [0, 39]}),
        (ValueError, r"boundaries begins with \[0, 5, 3, 40\]", {"boundaries": [0, 5, 3, 40]}),
        (TypeError, "unexpected keyword argument 'betas'", {"betas": 1}),
    ],
)
def test_refusals_of_the_loss(error: type[Exception], sentence: str, change: dict[str, Any]) -> None:
    hidden, head, tokens = tensors(CPU)
    with pytest.raises(error, match=sentence):
        eaves.linear_log_prob_loss(**{"hidden": hidden, "head": head, "tokens": tokens, "fn": policy_loss} | change)


def test_the_loss_has_one_backward() -> None:
    hidden, head, tokens = tensors(CPU)
    loss = eaves.linear_log_prob_loss(hidden, head, tokens, policy_loss)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="linear_log_prob_loss: the first backward has used up the gradients"):
        loss.backward()
