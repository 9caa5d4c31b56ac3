"""eaves.hf: tiny models of the architectures in docs/huggingface.md, patched, against the same models before."""

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import eaves.hf
from hf_models import (
    BATCH,
    LENGTH,
    OF_TINY_MODELS,
    VOCABULARY,
    assert_same_step,
    batch,
    refuse_logits,
    step,
    transformers,
)

pytestmark = OF_TINY_MODELS

PAGE = Path(__file__).parents[2] / "docs" / "huggingface.md"

# Mixtures of experts, and states of recurrent layers, have float32 sums that depend on the order.
TOLERANCE = 1e-4

# Each configuration gets the fields that it has. Some names belong to one architecture alone.
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "head_dim": 16,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64, "initializer_range": 0.3,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "image_token_id": 130,
    "attention_dropout": 0.0, "hidden_dropout": 0.0, "dropout": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
    "attn_pdrop": 0.0, "residual_dropout": 0.0,
    "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, "n_inner": 40, "ffn_dim": 40, "rotary_dim": 8,
    "word_embed_proj_dim": 32,
    # mixtures of experts
    "n_routed_experts": 4, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
    "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24, "topk_group": 1, "q_lora_rank": 16,
    "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16, "output_router_logits": True,
    "router_aux_loss_coef": 0.5,
    # recurrent layers
    "state_size": 4, "mamba_d_state": 4, "mamba_n_heads": 4, "mamba_d_head": 16,
    # images, and embeddings of each layer
    "depth": 2, "embed_dim": 32, "image_size": 16, "patch_size": 8, "projection_dim": 32, "num_heads": 2,
    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY, "num_kv_shared_layers": 0,
    "mm_tokens_per_image": 4,
}  # fmt: skip

_MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}}

LANGUAGE = "language models"
EXPERTS = "mixtures of experts"
VISION = "vision-language models"

# The class, and the fields of its configuration beside the sizes.
KNOWN: dict[str, dict[str, dict[str, Any]]] = {
    LANGUAGE: {
        "ApertusForCausalLM": {},
        "BambaForCausalLM": {"attn_layer_indices": [1]},
        "BloomForCausalLM": {},
        "CohereForCausalLM": {},
        "Cohere2ForCausalLM": {},
        "Exaone4ForCausalLM": {},
        "FalconForCausalLM": {"head_dim": None},
        "FalconH1ForCausalLM": {"mamba_d_ssm": 64},
        "FalconMambaForCausalLM": {},
        "GemmaForCausalLM": {},
        "Gemma2ForCausalLM": {},
        "Gemma3ForCausalLM": {},
        "Gemma3nForCausalLM": {},
        "GlmForCausalLM": {},
        "Glm4ForCausalLM": {},
        "GPT2LMHeadModel": {},
        "GPTBigCodeForCausalLM": {},
        "GPTJForCausalLM": {},
        "GPTNeoXForCausalLM": {},
        "GraniteForCausalLM": {},
        "HeliumForCausalLM": {},
        "HyperCLOVAXForCausalLM": {},
        "JambaForCausalLM": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2},
        "Lfm2ForCausalLM": {},
        "LlamaForCausalLM": {},
        "MambaForCausalLM": {},
        "Mamba2ForCausalLM": {"num_heads": 4, "n_groups": 1},
        "MistralForCausalLM": {},
        "NanoChatForCausalLM": {},
        "NemotronForCausalLM": {},
        "OlmoForCausalLM": {},
        "Olmo2ForCausalLM": {},
        "Olmo3ForCausalLM": {},
        "OPTForCausalLM": {},
        "PhiForCausalLM": {},
        "Phi3ForCausalLM": {},
        "Qwen2ForCausalLM": {},
        "Qwen3ForCausalLM": {},
        "SeedOssForCausalLM": {},
        "SmolLM3ForCausalLM": {},
        "StableLmForCausalLM": {},
        "Starcoder2ForCausalLM": {},
        "Zamba2ForCausalLM": {
            "layers_block_type": ["linear_attention", "hybrid"],
            "n_mamba_heads": 4,
            "adapter_rank": 4,
        },
    },
    EXPERTS: {
        "DeepseekV2ForCausalLM": {},
        "DeepseekV3ForCausalLM": {"head_dim": 8},
        "Dots1ForCausalLM": {"n_shared_experts": 1},
        "Ernie4_5_MoeForCausalLM": {},
        "FlexOlmoForCausalLM": {},
        "Glm4MoeForCausalLM": {},
        "GptOssForCausalLM": {},
        "GraniteMoeForCausalLM": {},
        "GraniteMoeHybridForCausalLM": {"layer_types": ["mamba", "attention"]},
        "HunYuanMoEV1ForCausalLM": {},
        "Llama4ForCausalLM": {},
        "MiniMaxForCausalLM": {},
        "MixtralForCausalLM": {},
        "OlmoeForCausalLM": {},
        "PhimoeForCausalLM": {},
        "Qwen2MoeForCausalLM": {},
        "Qwen3MoeForCausalLM": {},
        "Qwen3NextForCausalLM": {
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
        },
    },
    VISION: {
        "AriaForConditionalGeneration": {},
        "AyaVisionForConditionalGeneration": {},
        "Gemma3ForConditionalGeneration": {},
        "Glm4vForConditionalGeneration": {"text_config": _MROPE, "vision_config": {"out_hidden_size": 32}},
        "GotOcr2ForConditionalGeneration": {},
        "Idefics2ForConditionalGeneration": {"perceiver_config": {"resampler_n_latents": 4}},
        "Idefics3ForConditionalGeneration": {},
        "InternVLForConditionalGeneration": {},
        "LlavaForConditionalGeneration": {},
        "LlavaNextForConditionalGeneration": {},
        "LlavaOnevisionForConditionalGeneration": {},
        "Mistral3ForConditionalGeneration": {},
        "MllamaForConditionalGeneration": {},
        "PaliGemmaForConditionalGeneration": {},
        "Qwen2VLForConditionalGeneration": {"text_config": _MROPE, "vision_config": {"hidden_size": 32}},
        "Qwen2_5_VLForConditionalGeneration": {"text_config": _MROPE, "vision_config": {"out_hidden_size": 32}},
        "Qwen3VLForConditionalGeneration": {
            "text_config": _MROPE,
            "vision_config": {"out_hidden_size": 32, "deepstack_visual_indexes": [0]},
        },
        "SmolVLMForConditionalGeneration": {},
    },
}


def tiny_configuration(kind: Any, special: dict[str, Any]) -> Any:
    default = kind()

    def sizes(configuration: Any, own: dict[str, Any]) -> dict[str, Any]:
        found = {name: size for name, size in {**_SIZES, **own}.items() if hasattr(configuration, name)}
        return {name: size for name, size in found.items() if size is not None}

    parts = {name: getattr(default, name) for name in kind.sub_configs if getattr(default, name, None) is not None}
    made = {name: {**sizes(part, special.get(name, {})), "model_type": part.model_type} for name, part in parts.items()}
    own = {name: value for name, value in special.items() if name not in parts}
    return kind(**{**sizes(default, own), **made})


_ONES, _PATCHES = torch.ones(BATCH, LENGTH, dtype=torch.int64), (4 * BATCH, 3 * 2 * 8 * 8)
_GRID = {"image_grid_thw": torch.tensor([[1, 2, 2]] * BATCH), "mm_token_type_ids": _ONES}

# For models with one image in each sequence: its tokens, the shape of the pixels, and the model's other arguments.
IMAGES: dict[str, tuple[int, tuple[int, ...], dict[str, Any]]] = {
    "AyaVisionForConditionalGeneration": (1, (BATCH, 3, 16, 16), {}),
    "Gemma3ForConditionalGeneration": (4, (BATCH, 3, 16, 16), {"token_type_ids": _ONES}),
    "Idefics2ForConditionalGeneration": (4, (BATCH, 1, 3, 16, 16), {}),
    "Idefics3ForConditionalGeneration": (1, (BATCH, 1, 3, 16, 16), {}),
    "InternVLForConditionalGeneration": (1, (BATCH, 3, 16, 16), {}),
    "LlavaForConditionalGeneration": (4, (BATCH, 3, 16, 16), {}),
    "Mistral3ForConditionalGeneration": (1, (BATCH, 3, 16, 16), {"image_sizes": torch.tensor([[16, 16]] * BATCH)}),
    "PaliGemmaForConditionalGeneration": (4, (BATCH, 3, 16, 16), {"token_type_ids": _ONES}),
    "Qwen2VLForConditionalGeneration": (1, _PATCHES, _GRID),
    "Qwen2_5_VLForConditionalGeneration": (1, _PATCHES, _GRID),
    "Qwen3VLForConditionalGeneration": (1, _PATCHES, _GRID),
    "SmolVLMForConditionalGeneration": (1, (BATCH, 1, 3, 16, 16), {}),
}


def with_image(name: str) -> dict[str, Any]:
    tokens, shape, others = IMAGES[name]
    place = slice(4, 4 + tokens)
    arguments = {**batch(), **others, "pixel_values": torch.randn(shape, generator=torch.Generator().manual_seed(1))}
    arguments["input_ids"].clamp_(max=_SIZES["image_token_id"] - 1)[:, place] = _SIZES["image_token_id"]
    arguments["labels"][:, place] = -100
    if "mm_token_type_ids" in others:
        arguments["mm_token_type_ids"] = (arguments["input_ids"] == _SIZES["image_token_id"]).long()
    return arguments


@pytest.mark.parametrize("name", [name for models in KNOWN.values() for name in models])
def test_a_patched_model_trains_as_before_without_logits(name: str) -> None:
    if name == "Qwen3NextForCausalLM" and importlib.util.find_spec("fla") is not None:
        pytest.skip("transformers takes FLA's kernels for this model, which need a GPU")
    kind = getattr(transformers, name)
    (special,) = (models[name] for models in KNOWN.values() if name in models)
    torch.manual_seed(3)
    model = kind(tiny_configuration(kind.config_class, special)).train()
    assert sum(parameter.numel() for parameter in model.parameters()) < 3_000_000
    arguments = with_image(name) if name in IMAGES else batch()
    expected = step(model, **arguments)
    assert (name in IMAGES) == any("vision" in parameter or "visual" in parameter for parameter in expected.gradients)
    eaves.hf.patch(model)
    with refuse_logits():
        actual = step(model, **arguments)
    assert actual.output.logits is None
    assert_same_step(actual, expected, TOLERANCE)


def test_the_page_names_the_models_that_are_tested() -> None:
    (section,) = re.findall(r"^## Models that are known to work\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.M | re.S)
    rows = dict(re.findall(r"^\| ([^|]+) \| (`[^|]+`) \|$", section, re.M))
    assert {kind: re.findall("`([^`]+)`", names) for kind, names in rows.items()} == {
        kind.capitalize(): sorted(map(family_of, models), key=str.lower) for kind, models in KNOWN.items()
    }


def family_of(name: str) -> str:
    return re.sub("For(CausalLM|ConditionalGeneration)$|LMHeadModel$", "", name)
