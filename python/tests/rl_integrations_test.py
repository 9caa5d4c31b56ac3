"""eaves.skyrl, eaves.nemo_rl and eaves.prime_rl against the formula in float64, and against the libraries' own
functions. A module with the same arguments replaces a library that is not installed."""

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor, distributed

import eaves
from cross_entropy_test import each
from integrations import Foreign, installed, run_recipe
from log_prob_test import by_the_formula, rows_and_head
from pairwise import pairwise
from ranks import Ranks

MEGATRON = "vocab_start_index, vocab_end_index, chunk_size, tp_group, inference_only"


def function(name: str, arguments: str) -> str:
    return (
        f"import torch\n\n\nclass {name}(torch.autograd.Function):\n"
        f"    @staticmethod\n    def forward(ctx, {arguments}):\n        pass\n"
    )


LIBRARIES = {
    "skyrl": Foreign(
        "0.3.0",
        {
            "skyrl.backends.skyrl_train.distributed.megatron.model_utils": "def _fused_lm_head_logprob_apply("
            f"backend, hidden, weight, target, {MEGATRON}):\n    pass\n"
        },
        ("megatron.core.parallel_state",),
    ),
    "nemo_rl": Foreign(
        "0.7.0",
        {
            "nemo_rl.distributed.model_utils": function(
                "ChunkedDistributedHiddenStatesToLogprobs",
                f"tensor_parallel_hidden_states, target, output_weight_layer, {MEGATRON}=False",
            )
        },
        ("megatron.core",),  # of 0.6
    ),
    "prime_rl": Foreign(
        "0.8.0",
        {
            "prime_rl.trainer.models.layers.lm_head": function(
                "_SequenceChunkedLogProbEntropyFn", "hidden, weight, labels, inv_temperature, chunk_size"
            ),
            "prime_rl.trainer.models.layers.lm_head_gemma": function(
                "_GemmaChunkedLogProbEntropyFn", "hidden, weight, labels, inv_temperature, chunk_size, softcap"
            ),
        },
        ("prime_rl.utils.logger", "prime_rl.utils.vlm"),
    ),
}
NAMES = {
    "skyrl": ("_fused_lm_head_logprob_apply",),
    "nemo_rl": ("ChunkedDistributedHiddenStatesToLogprobs",),
    "prime_rl": ("_SequenceChunkedLogProbEntropyFn", "_GemmaChunkedLogProbEntropyFn"),
}


def functions_of(library: str) -> list[Any]:
    """The functions that the library calls now."""
    modules = map(importlib.import_module, LIBRARIES[library].modules)
    return [getattr(module, name) for module, name in zip(modules, NAMES[library], strict=True)]


# ------------------------------------------------------------------------------------- SkyRL and NeMo RL, over ranks


def problem(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states [S, B, D], a head, tokens [B, S], and the upstream gradients of their log-probabilities."""
    hidden, head, tokens = rows_and_head((8, 2), 40, dtype, torch.device("cpu"))
    return hidden, head, tokens.T.contiguous(), torch.linspace(-1, 2, 16).view(2, 8)


def of_megatron(
    group: distributed.ProcessGroup, library: str, dtype: torch.dtype, is_ours: bool, ignores: bool = False
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Log-probabilities and this rank's gradients of hidden states and head, of eaves or of the library's function.
    `ignores` says whether one token is -100."""
    hidden, head, tokens, upstream = problem(dtype)
    if ignores:
        tokens[0, 2] = -100
    rank, ranks = group.rank(), group.size()
    own = head.chunk(ranks)[rank].clone().requires_grad_()
    rest = (rank * 40 // ranks, (rank + 1) * 40 // ranks, 3, group, False)
    with LIBRARIES[library].imported() as is_real:
        if not is_ours and not is_real:
            return None
        if is_ours:
            getattr(eaves, library).install(workspace_bytes=1 << 20)
        try:
            (called,) = functions_of(library)
            if library == "skyrl":
                leaf = hidden.transpose(0, 1).contiguous().requires_grad_()
                found = called("torch", leaf, own, tokens, *rest)
            else:
                leaf = hidden.chunk(ranks)[rank].clone().requires_grad_()
                found = called.apply(leaf, tokens, own, *rest)
            found.backward(upstream)
        finally:
            getattr(eaves, library).uninstall()
    assert leaf.grad is not None and own.grad is not None
    return found.detach(), leaf.grad, own.grad


@each("library", ("skyrl", "nemo_rl"))
def test_log_probabilities_over_the_ranks_of_megatron(library: str, cpu_ranks: Ranks) -> None:
    for ranks, dtype in pairwise((1, 2, 4), (torch.float64, torch.float32, torch.bfloat16)):
        hidden, head, tokens, upstream = problem(dtype)
        leaves = [hidden.double().requires_grad_(), head.double().requires_grad_()]
        log_prob = by_the_formula((leaves[0] @ leaves[1].T).transpose(0, 1), tokens)
        log_prob.backward(upstream.double())
        exact = [log_prob.detach(), *(each.grad for each in leaves)]
        tolerance = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
        for is_ours in (True, False):
            if not is_ours and dtype == torch.float64:
                continue  # the library computes in float32
            results = cpu_ranks.run(of_megatron, library, dtype, is_ours, ranks=ranks)
            if results[0] is None:
                continue  # the library is not installed
            log_probs, of_hidden, of_head = zip(*results)
            whole = sum(part.double() for part in of_hidden).transpose(0, 1) if library == "skyrl" else None
            found = [log_probs[0], torch.cat(of_hidden) if whole is None else whole, torch.cat(of_head)]
            assert all(torch.equal(each, log_probs[0]) for each in log_probs)
            for ours, wanted in zip(found, exact, strict=True):
                error = (ours.double() - wanted).norm() / wanted.norm()
                assert error <= (tolerance if is_ours else max(tolerance, 1e-4)), (library, ranks, dtype, is_ours)
            assert not is_ours or log_probs[0].dtype == (dtype if dtype == torch.float64 else torch.float32)


@each("library", ("skyrl", "nemo_rl"))
@each("is_ours", (True, False))
def test_a_token_of_minus_100_has_no_gradient(library: str, is_ours: bool, cpu_ranks: Ranks) -> None:
    (result,) = cpu_ranks.run(of_megatron, library, torch.float32, is_ours, True, ranks=1)
    if result is None:
        pytest.skip(f"{library} is not installed")
    log_probs, of_hidden, _ = result
    assert log_probs[0, 2] == 0 and (log_probs < 0).sum() == log_probs.numel() - 1
    of_token = of_hidden[0, 2] if library == "skyrl" else of_hidden[2, 0]
    assert bool(of_token.any()) == (not is_ours)  # theirs is that of the softmax, as of a token that other ranks have


def without_a_graph_and_of_a_padded_piece(group: distributed.ProcessGroup, library: str) -> None:
    hidden, head, tokens, _ = problem(torch.float32)
    head.requires_grad_()
    with LIBRARIES[library].imported(), getattr(eaves, library).install():
        (called,) = functions_of(library)

        def call(end: int) -> Tensor:
            rest = (0, end, 3, group, True)
            if library == "skyrl":
                # SkyRL multiplies in the dtype of the head.
                return called("triton", hidden.transpose(0, 1).double(), head, tokens, *rest)  # type: ignore[no-any-return]
            return called.apply(hidden, tokens, head, *rest)  # type: ignore[no-any-return]

        found = call(40)
        assert not found.requires_grad and found.dtype == torch.float32
        exact = by_the_formula((hidden.double() @ head.detach().double().T).transpose(0, 1), tokens)
        torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)
        with pytest.raises(NotImplementedError, match=rf"{library}: this rank has 39 classes, .* 40 rows"):
            call(39)


@each("library", ("skyrl", "nemo_rl"))
def test_inference_and_what_is_refused(library: str, cpu_ranks: Ranks) -> None:
    cpu_ranks.run(without_a_graph_and_of_a_padded_piece, library, ranks=1)


# ------------------------------------------------------------------------------------------------------------ prime-rl


@each("softcap", (None, 3.0))
@each("dtype", (torch.float32, torch.bfloat16))
def test_prime_rl_has_a_temperature_for_each_token(
    softcap: float | None, dtype: torch.dtype, device: torch.device
) -> None:
    hidden, head, labels = rows_and_head((37,), 131, dtype, device)
    temperature = torch.linspace(0.5, 2, 37, device=device)
    temperature[::2] = 1
    upstream = torch.linspace(-1, 2, 37, device=device)

    def step(call: Any, is_frozen: bool, of: torch.dtype) -> tuple[Tensor, Tensor, list[Tensor]]:
        leaves = [hidden.to(of, copy=True).requires_grad_(), head.to(of, copy=True).requires_grad_(not is_frozen)]
        log_prob, entropy = call(*leaves)
        log_prob.backward(upstream.to(log_prob.dtype))
        return log_prob.detach(), entropy.detach(), [each.grad for each in leaves if each.grad is not None]

    def formula(hidden: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:
        logits = hidden @ head.T if softcap is None else softcap * torch.tanh(hidden @ head.T / softcap)
        distribution = torch.distributions.Categorical(logits=logits / temperature.double().unsqueeze(-1))
        return distribution.log_prob(labels), distribution.entropy()

    with LIBRARIES["prime_rl"].imported() as is_real:

        def called(hidden: Tensor, head: Tensor) -> Any:
            rest = (labels, 1 / temperature, 16)
            plain, gemma = functions_of("prime_rl")
            return plain.apply(hidden, head, *rest) if softcap is None else gemma.apply(hidden, head, *rest, softcap)

        for is_frozen in (False, True):
            exact = step(formula, is_frozen, torch.float64)
            with eaves.prime_rl.install(workspace_bytes=1 << 20):
                found = step(called, is_frozen, dtype)
            for result, tolerance in ((found, 1e-5), *([(step(called, is_frozen, dtype), 1e-4)] if is_real else [])):
                tolerance = tolerance if dtype == torch.float32 else 2e-2
                for ours, wanted in zip((*result[:2], *result[2]), (*exact[:2], *exact[2]), strict=True):
                    assert (ours.double() - wanted).norm() <= tolerance * wanted.norm()


def test_prime_rl_does_not_round_at_temperature_1(device: torch.device) -> None:
    hidden, head, labels = rows_and_head((37,), 131, torch.bfloat16, device)
    with LIBRARIES["prime_rl"].imported(), eaves.prime_rl.install():
        found, _ = functions_of("prime_rl")[0].apply(hidden, head, labels, torch.ones(37, device=device), 16)
    # Logits of 16 bits would be off by 1e-2. A temperature for each row takes another product than none.
    torch.testing.assert_close(found, eaves.linear_log_prob(hidden, head, labels), rtol=1e-5, atol=1e-5)


def test_prime_rl_does_not_round_a_temperature_of_16_bits_again(device: torch.device) -> None:
    """FSDP2 casts all arguments of a model's forward."""
    hidden, head, labels = rows_and_head((37,), 131, torch.bfloat16, device)
    inverse = torch.linspace(0.5, 2, 37, device=device).bfloat16()
    with LIBRARIES["prime_rl"].imported(), eaves.prime_rl.install():
        called = functions_of("prime_rl")[1].apply
        found, wanted = (called(hidden, head, labels, each, 16, 3.0)[0] for each in (inverse, inverse.float()))
    assert torch.equal(found, wanted)


def test_prime_rl_ignores_rows_and_takes_options(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, head, labels = rows_and_head((5,), 33, torch.float32, torch.device("cpu"))
    labels[2] = -100
    given: list[dict[str, Any]] = []
    original = eaves.prime_rl.linear_log_prob
    monkeypatch.setattr(eaves.prime_rl, "linear_log_prob", lambda *a, **k: given.append(k) or original(*a, **k))
    with LIBRARIES["prime_rl"].imported(), eaves.prime_rl.install(algorithm="keep", keep_bytes=1 << 20):
        hidden.requires_grad_()
        for called, rest in zip(functions_of("prime_rl"), ((), (3.0,)), strict=True):
            log_prob, _ = called.apply(hidden, head.requires_grad_(), labels, torch.full((5,), 0.5), 16, *rest)
            assert log_prob[2] == 0 and (log_prob < 0).sum() == 4
            log_prob.sum().backward()
    assert hidden.grad is not None and not hidden.grad[2].any()
    assert given[0].items() >= {"algorithm": "keep", "keep_bytes": 1 << 20, "grad_weight_dtype": torch.float32}.items()
    assert given[1]["softcap"] == 3.0 and "algorithm" not in given[1]


# -------------------------------------------------------------------------------------------------- replaced functions


@each("library", tuple(LIBRARIES))
def test_install_is_undone_and_an_unknown_version_refused(library: str) -> None:
    module = getattr(eaves, library)
    with LIBRARIES[library].imported():
        theirs = functions_of(library)
        assert not module.is_active()
        with module.install():
            assert module.is_active() and all(ours is not their for ours, their in zip(functions_of(library), theirs))
        assert functions_of(library) == theirs and not module.is_active()
        module.install(workspace_bytes=1 << 20)
        module.uninstall()
        assert functions_of(library) == theirs and not module.is_active()
        with pytest.raises(ValueError):
            module.install(workspace_bytes=0)
        unknown = rf"{library}: .* has version 99\.0, expected .*; nothing was replaced"
        with installed("99.0"), pytest.raises(RuntimeError, match=unknown):
            module.install()
        assert functions_of(library) == theirs


@each("library, title", (("skyrl", "SkyRL"), ("nemo_rl", "NeMo RL"), ("prime_rl", "prime-rl")))
def test_the_recipe(library: str, title: str) -> None:
    module = getattr(eaves, library)
    with LIBRARIES[library].imported():
        run_recipe(title)
        assert module.is_active()
        module.uninstall()
