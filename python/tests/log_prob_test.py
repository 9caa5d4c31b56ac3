"""eaves.log_prob and eaves.linear_log_prob against the formula in float64, at the vocabularies and temperatures of
post-training. The tests of the losses check the kernels."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import eaves
from comparison import FLOATING_POINT, CrossEntropyOracle, assert_within
from cross_entropy_test import each
from eaves._calls import log_prob as calls
from linear_cross_entropy_cases import LinearOracle, assert_gradients, bytes_of_half
from pairwise import pairwise

IGNORED = -100


def rows_and_head(
    rows: tuple[int, ...], tokens: int, dtype: torch.dtype, device: torch.device, features: int = 24
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    chosen = torch.randint(tokens, rows, generator=generator).to(device)
    return normal(*rows, features), normal(tokens, features), chosen


def by_the_formula(
    logits: Tensor, tokens: Tensor, temperature: float = 1.0, softcap: float | None = None, scale: float = 1.0
) -> Tensor:
    """The log-probabilities in float64, for rows that count."""
    z = logits.double() * scale
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    return torch.log_softmax(z / temperature, -1).gather(-1, tokens.long().unsqueeze(-1)).squeeze(-1)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7},
    {"temperature": 3.0, "softcap": 2.0},
    {"temperature": 0.5, "softcap": 4.0, "scale": 1.5},
    {"scale": 0.25},
]


def of_the_losses(options: dict[str, Any]) -> dict[str, Any]:
    """The same options for an oracle of the losses: the temperature divides after the cap."""
    temperature = options.get("temperature", 1.0)
    cap = options.get("softcap")
    return {
        "reduction": "none",
        "scale": options.get("scale", 1.0) / temperature,
        "softcap": None if cap is None else cap / temperature,
    }


@each("options", OPTIONS)
def test_outputs_and_gradients_match_the_oracle(options: dict[str, Any], device: torch.device) -> None:
    algorithms = ("auto", "speed", "memory", "recompute", "keep", "keep none", "keep half")
    for dtype, algorithm in pairwise(FLOATING_POINT, algorithms):
        hidden, head, tokens = rows_and_head((4, 7), 129, dtype, device)
        keep_bytes = {"keep none": 0, "keep half": bytes_of_half(hidden, head)}.get(algorithm)
        tokens[0, 2] = IGNORED
        hidden, head = hidden.requires_grad_(), head.requires_grad_()
        bias = torch.linspace(-1, 1, 129, device=device).to(dtype)
        oracle = LinearOracle(hidden, head, tokens, bias, **of_the_losses(options))
        bounds = oracle.bounds(torch.float64 if dtype == torch.float64 else torch.float32)
        out = eaves.linear_log_prob(
            hidden, head, tokens, bias=bias, outputs=("entropy", "is_top1"), algorithm=algorithm.split()[0],
            keep_bytes=keep_bytes, **options,
        )  # fmt: skip
        assert_within(-out.log_prob, bounds["loss"], f"{dtype} {options}")
        assert_within(out.entropy, bounds["entropy"], f"{dtype} {options}")
        assert torch.equal(out.is_top1.cpu(), (oracle.z.argmax(-1) == tokens.cpu()))
        upstream = torch.linspace(-1, 2, 28, dtype=out.log_prob.dtype, device=device).reshape(4, 7)
        grads = torch.autograd.grad(out.log_prob, (hidden, head), upstream, retain_graph=True)
        assert_gradients((*grads, None), oracle.gradients(-upstream), dtype, f"{algorithm} {options}")
        grads = torch.autograd.grad((out.log_prob, out.entropy), (hidden, head), (upstream, upstream))
        exact = oracle.gradients(-upstream, None, upstream)
        assert_gradients((*grads, None), exact, dtype, f"entropy {algorithm} {options}")


@each("options", OPTIONS)
def test_of_logits_they_match_the_oracle(options: dict[str, Any], device: torch.device) -> None:
    for dtype, is_in_place in pairwise(FLOATING_POINT, (False, True)):
        logits = rows_and_head((6,), 1, dtype, device, 257)[0]
        tokens = torch.tensor([0, 256, 3, IGNORED, 77, 12], device=device, dtype=torch.int32)
        oracle = CrossEntropyOracle(logits, tokens, **of_the_losses(options))
        leaf = logits.clone().requires_grad_()
        out = eaves.log_prob(leaf * 1, tokens, outputs=("entropy", "is_top1"), inplace_backward=is_in_place, **options)
        assert_within(-out.log_prob, oracle.loss, f"{dtype} {options}")
        is_top1 = (oracle.argmax == tokens.cpu()) & (tokens.cpu() != IGNORED)
        assert torch.equal(out.is_top1.cpu(), is_top1)
        # The upstream gradients are powers of two, because in place 16 bits would be rounded once more otherwise.
        upstream = torch.tensor([-1, 0.5, 2, 1, -0.25, -4], dtype=out.log_prob.dtype, device=device)
        (grad,) = torch.autograd.grad(out.log_prob, leaf, upstream)
        assert_within(grad, oracle.gradient(dtype, -upstream), f"{dtype} {options} in place {is_in_place}")


def test_sums_of_squares_and_mean_logits_are_there_and_0_of_ignored_rows(device: torch.device) -> None:
    hidden, head, _ = rows_and_head((6,), 257, torch.float32, device)
    tokens = torch.tensor([0, 256, 3, IGNORED, 77, 12], device=device)
    logits = hidden.double() @ head.double().T / 0.7
    counts = tokens != IGNORED
    named: dict[str, Any] = {"outputs": ("sum_sq", "mean_logit"), "temperature": 0.7}
    for out in (eaves.linear_log_prob(hidden, head, tokens, **named),
                eaves.log_prob(hidden @ head.T, tokens, **named)):  # fmt: skip
        assert out._fields == ("log_prob", "sum_sq", "mean_logit")
        for found, expected in ((out.sum_sq, logits.softmax(-1).square().sum(-1)), (out.mean_logit, logits.mean(-1))):
            torch.testing.assert_close(found.double(), expected * counts, rtol=2e-5, atol=2e-6)
    log_prob, mean_logit = eaves.log_prob(hidden @ head.T, tokens, outputs=["mean_logit"], temperature=0.7)
    assert torch.equal(log_prob, out.log_prob) and torch.equal(mean_logit, out.mean_logit)
    assert type(eaves.log_prob(hidden @ head.T, tokens, outputs=())) is Tensor


def test_a_linear_module_is_a_head_with_its_bias(device: torch.device) -> None:
    hidden, _, tokens = rows_and_head((4, 7), 33, torch.float32, device)
    for has_bias in (False, True):
        linear = torch.nn.Linear(24, 33, has_bias, device)
        for each_tokens in (tokens, tokens.unsqueeze(-1)):
            found = eaves.linear_log_prob(hidden, linear, each_tokens)
            expected = eaves.linear_log_prob(hidden, linear.weight, each_tokens, bias=linear.bias)
            assert torch.equal(found, expected)
            grads = (torch.autograd.grad(out.sum(), list(linear.parameters())) for out in (found, expected))
            assert all(map(torch.equal, *grads))
    bias = torch.linspace(-1, 1, 33, device=device)  # a bias beside a module without one
    linear = torch.nn.Linear(24, 33, False, device)
    expected = eaves.linear_log_prob(hidden, linear.weight, tokens, bias=bias)
    assert torch.equal(eaves.linear_log_prob(hidden, linear, tokens, bias=bias), expected)


# ----------------------------------------------------------------------------------------------------------- edge cases


def test_the_entropy_of_an_ignored_row_is_0_and_has_no_gradient(device: torch.device) -> None:
    hidden, head, tokens = rows_and_head((5,), 33, torch.float32, device)
    tokens[2] = IGNORED
    hidden.requires_grad_()
    upstream = torch.ones(5, device=device)
    upstream[2] = math.nan
    for out in (
        eaves.linear_log_prob(hidden, head, tokens, outputs="entropy"),
        eaves.log_prob(hidden @ head.T, tokens, outputs="entropy"),
    ):
        (grad,) = torch.autograd.grad(out.entropy, hidden, upstream)
        assert out.entropy[2] == 0 and (grad[2] == 0).all() and grad.isfinite().all()


def test_a_token_that_is_ignored_by_its_class_is_no_top_token(device: torch.device) -> None:
    logits = torch.tensor([[1.0, 0.0], [1.0, 0.0]], device=device)
    out = eaves.log_prob(logits, torch.tensor([0, 1], device=device), ignore_index=0, outputs="is_top1")
    assert out.log_prob[0] == 0 and out.is_top1.tolist() == [False, False]


# ------------------------------------------------------------------------------------------------------- a frozen head


def calls_of(function: Callable[[], object]) -> list[str]:
    """The names of the extension's operators that `function` calls."""
    with torch.profiler.profile() as profile:
        function()
    names = sorted((event.time_range.start, event.name) for event in profile.events() or ())
    return [name.removeprefix("eaves::linear_cross_entropy_") for _, name in names if name.startswith("eaves::")]


def test_a_second_derivative_is_refused_by_name() -> None:
    logits, head = torch.randn(3, 5, requires_grad=True), torch.randn(4, 5)
    tokens = torch.tensor([0, 1, 2])
    for name, loss in (
        ("log_prob", lambda: eaves.log_prob(logits, tokens)),
        ("log_prob", lambda: eaves.log_prob(logits, tokens.unsqueeze(1))),
        ("linear_log_prob", lambda: eaves.linear_log_prob(logits, head, tokens)),
    ):
        (grad,) = torch.autograd.grad(loss().sum(), logits, create_graph=True)
        with pytest.raises(NotImplementedError, match=f"^{name}: there is no second derivative; use torch"):
            torch.autograd.grad(grad.sum(), logits)


def test_a_frozen_head_takes_two_products(device: torch.device) -> None:
    hidden, head, tokens = rows_and_head((40,), 65, torch.bfloat16, device)
    hidden.requires_grad_()
    upstream = torch.linspace(-1, 2, 40, device=device)

    def gradient(**options: Any) -> Tensor:
        (grad,) = torch.autograd.grad(eaves.linear_log_prob(hidden, head, tokens, **options), hidden, upstream)
        return grad

    # The upstream gradient of each row multiplies the gradients that the forward has computed.
    computed = [name for name in calls_of(gradient) if name != "algorithm"]
    assert computed == ["forward_backward", "eaves::cross_entropy_rescale"]
    assert calls_of(lambda: gradient(algorithm="recompute")) == ["forward", "backward"]
    oracle = LinearOracle(hidden, head, tokens, reduction="none")
    assert_gradients((gradient(), None, None), oracle.gradients(-upstream), torch.bfloat16)


def test_a_frozen_head_gives_every_backward_the_same(device: torch.device) -> None:
    hidden, head, tokens = rows_and_head((40,), 65, torch.float32, device)
    hidden.requires_grad_()
    out = eaves.linear_log_prob(hidden, head, tokens, outputs="entropy", algorithm="speed")
    upstream = torch.linspace(-1, 2, 40, device=device)
    first, second = (
        torch.autograd.grad(out.log_prob, hidden, upstream, retain_graph=True)[0].clone() for _ in range(2)
    )
    assert torch.equal(first, second)
    # If the entropy has a gradient too, the backward computes the logits again for all gradients.
    oracle = LinearOracle(hidden, head, tokens, reduction="none")
    (grad,) = torch.autograd.grad((out.log_prob, out.entropy), hidden, (upstream, upstream))
    assert_gradients((grad, None, None), oracle.gradients(-upstream, None, upstream), torch.float32)


@each("is_compiled", (False, True))
@each("ignore_index", (7, 2**32 + 7))
def test_a_frozen_head_gives_ignored_rows_no_gradient(
    ignore_index: int, is_compiled: bool, any_device: torch.device
) -> None:
    hidden, head, tokens = rows_and_head((6,), 65, torch.float32, any_device)
    hidden.requires_grad_()
    for dtype in (torch.int32, torch.int64):
        tokens = torch.tensor([7, 3, 7, 64, 8, 0], dtype=dtype, device=any_device)

        def function(x: Tensor, tokens: Tensor = tokens) -> Tensor:
            return eaves.linear_log_prob(x, head, tokens, ignore_index=ignore_index, algorithm="speed")

        if is_compiled:
            function = torch.compile(function, backend="aot_eager", fullgraph=True)
        upstream = torch.linspace(-1, 2, 6, device=any_device)
        is_ignored = tokens == 7 if ignore_index == 7 else torch.zeros_like(tokens, dtype=torch.bool)
        (grad,) = torch.autograd.grad(function(hidden), hidden, upstream.masked_fill(is_ignored, math.nan))
        oracle = LinearOracle(hidden, head, tokens.long(), ignore_index=ignore_index, reduction="none")
        assert_gradients((grad, None, None), oracle.gradients(-upstream), torch.float32)
        assert (grad[is_ignored] == 0).all()


@each("is_frozen", (False, True))
def test_torch_compile_gives_the_same(is_frozen: bool, any_device: torch.device) -> None:
    hidden, head, tokens = rows_and_head((10,), 65, torch.float32, any_device)
    tokens[3] = IGNORED
    hidden.requires_grad_()
    head.requires_grad_(not is_frozen)

    def ratio(temperature: float) -> Tensor:
        log_prob = eaves.linear_log_prob(hidden, head, tokens, temperature=temperature)
        return (log_prob - log_prob.detach()).exp().sum()

    wanted = [hidden] if is_frozen else [hidden, head]
    compiled = torch.compile(ratio, backend="aot_eager", fullgraph=True)
    for temperature in (0.5, 0.7, 0.9):
        expected = torch.autograd.grad(ratio(temperature), wanted)
        torch.testing.assert_close(torch.autograd.grad(compiled(temperature), wanted), expected)


def test_outputs_compile_in_the_order_of_their_names(any_device: torch.device, fresh_compiler: None) -> None:
    logits, tokens = torch.linspace(-2, 2, 24, device=any_device).view(4, 6), torch.arange(4, device=any_device)

    def function(logits: Tensor) -> Any:
        return eaves.log_prob(logits, tokens, outputs=("is_top1", "entropy"))

    found, expected = torch.compile(function, backend="aot_eager", fullgraph=True)(logits), function(logits)
    assert found._fields == expected._fields == ("log_prob", "is_top1", "entropy")
    assert all(map(torch.equal, found, expected))


# -------------------------------------------------------------------------------------------- arguments of the losses


def given_to(monkeypatch: pytest.MonkeyPatch, loss: str, call: Callable[[], object]) -> dict[str, Any]:
    """The arguments with which `call` calls the loss."""
    given: dict[str, Any] = {}
    original = getattr(calls, loss)

    def spy(of_loss: Any) -> Any:
        given.update(of_loss._asdict())
        return original(of_loss)

    monkeypatch.setattr(calls, loss, spy)
    call()
    return given


def test_every_option_arrives_at_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, head, tokens = rows_and_head((4, 7), 7, torch.bfloat16, torch.device("cpu"))
    of_both = {"softcap": 30.0, "scale": 2.0, "ignore_index": 3}
    outputs = {"outputs": ("is_top1", "entropy")}
    of_loss = {**of_both, "reduction": "none", "outputs": ("argmax", "entropy")}
    of_head: dict[str, Any] = {
        "algorithm": "recompute", "workspace_bytes": 1 << 20, "skip_ignored": True, "grad_weight_dtype": torch.float32,
    }  # fmt: skip
    given = given_to(
        monkeypatch, "loss_of_head",
        lambda: eaves.linear_log_prob(hidden, head, tokens, **outputs, **of_both, **of_head),
    )  # fmt: skip
    assert given.items() >= {**of_loss, **of_head}.items()
    out = torch.zeros(7, 24)
    call = given_to(
        monkeypatch, "loss_of_head",
        lambda: eaves.linear_log_prob(hidden, head.requires_grad_(), tokens, grad_weight_out=out),
    )  # fmt: skip
    assert call["grad_weight_out"] is out
    # The shape of these logits does not say which axis has the classes.
    logits = (hidden @ head.detach().T).requires_grad_() * 1
    given = given_to(
        monkeypatch, "loss_of_logits",
        lambda: eaves.log_prob(logits, tokens, inplace_backward=True, **outputs, **of_both),
    )  # fmt: skip
    assert given.items() >= {**of_loss, "inplace_backward": True, "class_dim": -1}.items()


def test_an_ignored_row_has_no_negative_zero_and_no_log_probability_is_above_0(device: torch.device) -> None:
    logits = torch.tensor([[0.0, 60.0, 0.0], [0.0, 60.0, 0.0]], device=device)
    found = eaves.log_prob(logits, torch.tensor([IGNORED, 1], device=device))
    assert not torch.signbit(found[0]) and found[1] <= 0


# ----------------------------------------------------------------------------------------------------- batch invariance


# Rows, classes, features and a limit of the workspace. There are more classes than a block has, more rows than a chunk
# has, and on a CPU a row that several threads would share.
SIZES_OF_ROWS = {
    "cpu": ((300, 1031, 64, 1 << 18), (200, 131072, 8, 1 << 24)),
    "cuda": ((3000, 50257, 512, 64 << 20), (9000, 257, 64, 36 << 20)),
}


@each("size", (0, 1))
@each("dtype", (torch.float32, torch.bfloat16))
def test_a_row_does_not_depend_on_the_rows_beside_it(
    dtype: torch.dtype, size: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EAVES_BATCH_INVARIANT", "1")
    rows, vocabulary, features, limit = SIZES_OF_ROWS[device.type][size]
    hidden, head, tokens = rows_and_head((rows,), vocabulary, dtype, device, features)
    tokens[::7] = IGNORED
    upstream = torch.full((rows,), 1.3, device=device)
    upstream[100:133] = 0.7  # the cut has one upstream gradient, all rows have two

    def results(begin: int, end: int, options: dict[str, Any]) -> list[Tensor]:
        x = hidden[begin:end].clone().requires_grad_()
        out: Any = eaves.linear_log_prob(x, head, tokens[begin:end], **options)
        entropy = out.entropy.sum() if options["algorithm"] == "recompute" else 0
        grads = torch.autograd.grad((upstream[begin:end] * out.log_prob).sum() + entropy, x)
        return [*(each.detach() for each in out), *grads]

    # On Hopper, if the largest logit is not asked for, the product itself consumes the logits.
    with_top1 = ("entropy", "is_top1")
    for algorithm, outputs, fused in (
        ("recompute", "entropy", "1"), ("recompute", with_top1, "0"), ("speed", "entropy", "1"),
        ("speed", with_top1, "0"),
    ):  # fmt: skip
        monkeypatch.setenv("EAVES_FUSED_PRODUCT", fused)
        for options in ({}, {"workspace_bytes": limit}):
            named = {"algorithm": algorithm, "outputs": outputs, **options}
            whole = results(0, rows, named)
            # The cuts are multiples of no block, and in one of them (1 to 7) no row is ignored.
            for begin, end in ((0, 1), (1, 7), (100, 133), (36, 100), (7, 140), (100, rows)):
                for part, all_rows in zip(results(begin, end, named), whole, strict=True):
                    assert torch.equal(part, all_rows[begin:end]), f"rows {begin} to {end} {named}"
