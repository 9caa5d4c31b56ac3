"""Tiny causal language models of transformers, made from configurations, and the results of a training step.

Weights are drawn wide, so that logits are about as large as in a trained model, and a lost soft cap or scale moves the
loss by more than any tolerance.
"""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from watch import Watch, watched

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

# A model that computes its logits after all warns, which is an error here; tests read logits that are None. The tensors
# are tiny: threads would wait for each other longer than they compute.
OF_TINY_MODELS = [
    pytest.mark.filterwarnings("error:eaves.hf", "ignore:this output has no logits"),
    pytest.mark.usefixtures("one_thread"),
]

METRICS = ("accuracy", "entropy")

# For loss and gradients of a patched model in float32, as a share of the largest element of each.
FLOAT32_TOLERANCE = 1e-5

VOCABULARY, FEATURES = 131, 32
BATCH, LENGTH = 2, 11

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": FEATURES,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GPT2_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "n_embd": FEATURES, "n_layer": 2, "n_head": 2, "n_positions": 64,
    "initializer_range": 0.3, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
_NO_DROPOUT = {"attention_dropout": 0.0, "hidden_dropout": 0.0, "dropout": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}

# class, fields of its configuration beside the sizes, the reason for it
_ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"tie_word_embeddings": False}),  # most others are copies of it
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),  # a tied head: the gradients of head and embedding add up
    "phi": ("Phi", {"tie_word_embeddings": False}),  # a bias
    "phi3": ("Phi3", {"tie_word_embeddings": False}),
    "gpt_neox": ("GPTNeoX", {"tie_word_embeddings": False}),
    "opt": ("OPT", {"ffn_dim": 40, "word_embed_proj_dim": FEATURES, "init_std": 0.3}),  # contiguous() of the logits
    "gemma2": ("Gemma2", {"head_dim": 16, "final_logit_softcapping": 3.0}),  # a soft cap: divided, tanh, multiplied
    "cohere": ("Cohere", {"logit_scale": 0.25}),  # multiplied
    "granite": ("Granite", {"logits_scaling": 2.5}),  # divided
    "mixtral": ("Mixtral", {"num_local_experts": 2, "output_router_logits": True, "router_aux_loss_coef": 0.5}),
}
ARCHITECTURES = (*_ARCHITECTURES, "gpt2")


def tiny_model(name: str = "llama", **options: Any) -> Any:
    """A model with the same weights each time, in training mode."""
    torch.manual_seed(3)
    if name == "gpt2":  # the head is tied, and projections are no Linear
        model: Any = transformers.GPT2LMHeadModel(transformers.GPT2Config(**_GPT2_SIZES, **options))
    else:
        family, special = _ARCHITECTURES[name]
        configuration = getattr(transformers, f"{family}Config")(**{**_SIZES, **_NO_DROPOUT, **special, **options})
        model = getattr(transformers, f"{family}ForCausalLM")(configuration)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # biases are 0 at first, and a lost one would not show
                parameter += 0.3 * torch.randn_like(parameter)
    return model.train()


def batch() -> dict[str, Tensor]:
    """Tokens and labels: a prompt that is not learnt, and padding in one of the sequences."""
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(3, VOCABULARY, (BATCH, LENGTH), generator=generator)
    labels = tokens.clone()
    labels[:, :4] = -100
    labels[1, -2:] = -100
    return {"input_ids": tokens, "labels": labels}


class Step(NamedTuple):
    """The results of a forward and a backward."""

    output: Any
    loss: Tensor
    gradients: dict[str, Tensor]


def step(model: Any, **arguments: Any) -> Step:
    model.zero_grad(set_to_none=True)
    output = model(**{**batch(), **arguments})
    output.loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return Step(output, output.loss.detach(), gradients)


def distance(actual: Tensor, expected: Tensor) -> float:
    """The distance of two gradients, as a share of the second's norm."""
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


def assert_same_step(actual: Step, expected: Step, tolerance: float) -> None:
    """Asserts loss and every gradient within `tolerance`, relative to the largest element. A gradient that is 0 up to
    rounding (the bias of keys) is compared relative to the other gradients."""
    assert abs(actual.loss - expected.loss) <= tolerance * abs(expected.loss), (actual.loss, expected.loss)
    assert actual.gradients.keys() == expected.gradients.keys()
    largest = max(gradient.abs().max() for gradient in expected.gradients.values())
    for name, gradient in expected.gradients.items():
        unit = max(gradient.abs().max(), 0.1 * largest)
        worst = (actual.gradients[name] - gradient).abs().max() / unit
        assert worst <= tolerance, f"{name}: {worst:.2e} of its largest element, expected {tolerance:.0e}"


def refuse_logits() -> AbstractContextManager[object]:
    """Fails if an operator returns as many elements as the logits have."""

    def check(operator: str, _: tuple[Any, ...], results: list[Tensor]) -> None:
        for each in results:
            assert each.numel() != BATCH * LENGTH * VOCABULARY, f"{operator} gives {list(each.shape)}"
            assert each.dim() < 2 or each.shape[-1] != VOCABULARY or each.shape == (FEATURES, VOCABULARY), operator

    return Watch(check)


def refuse_waiting() -> AbstractContextManager[object]:
    """Fails if a number is read from a tensor, because that would wait for a GPU."""

    def check(operator: str, *_: object) -> None:
        assert "_local_scalar_dense" not in operator, "a number is read from a tensor"

    return Watch(check)


def operator_calls(run: Callable[[], object]) -> list[tuple[str, tuple[Any, ...], list[Tensor]]]:
    """The operator's name, arguments and results for each call of linear_cross_entropy that returns a gradient."""
    with watched("eaves.linear_cross_entropy_") as calls:
        run()
    return [(name.partition(".")[0], *others) for name, *others in calls if "backward" in name]


def gradients_asked_for(run: Callable[[], object]) -> list[tuple[str, int]]:
    """The name of each such call, and the gradients that it was asked for."""
    return [(name, arguments[-1]) for name, arguments, _ in operator_calls(run)]


def peft_model(**options: Any) -> Any:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    return peft.get_peft_model(tiny_model(), peft.LoraConfig(r=4, **options))


def assert_metrics(output: Any, expected: dict[str, float], tolerance: float = FLOAT32_TOLERANCE) -> None:
    for name, number in expected.items():
        metric = getattr(output, name)
        assert metric.shape == () and metric.dtype == torch.float32 and not metric.requires_grad
        assert metric.item() == pytest.approx(number, rel=tolerance), name
