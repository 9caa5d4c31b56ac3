"""Megatron-Core on a CPU: it imports Triton, whose kernels no test runs, and asks CUDA for a device and a generator."""

import contextlib
import os
import sys
import types
import warnings
from typing import Any

import torch
import torch._dynamo
import torch._inductor.compile_fx  # which looks for Triton too
from torch import distributed

from integrations import StandIns


def import_megatron() -> Any:
    """megatron.core, without compiled functions."""
    if "megatron.core" not in sys.modules:
        torch._dynamo.config.disable = True  # type: ignore[assignment]
        with warnings.catch_warnings(), StandIns("triton"):
            warnings.simplefilter("ignore")
            import megatron.core.models.gpt.gpt_model
    import megatron.core

    if not torch.cuda.is_available():
        torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    megatron.core.tensor_parallel.get_cuda_rng_tracker = lambda *_: types.SimpleNamespace(fork=contextlib.nullcontext)
    return megatron.core


def config_of(**options: Any) -> Any:
    core = import_megatron()
    return core.transformer.transformer_config.TransformerConfig(
        num_layers=1, hidden_size=32, num_attention_heads=2, use_cpu_initialization=True, attention_dropout=0.0,
        hidden_dropout=0.0, gradient_accumulation_fusion=False, masked_softmax_fusion=False, bias_dropout_fusion=False,
        **options,
    )  # fmt: skip


def tiny_gpt(classes: int, **options: Any) -> Any:
    """A GPTModel of one layer; `tied` says whether the head is the embedding."""
    core = import_megatron()
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    if not distributed.is_initialized():
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}
        distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    if not core.parallel_state.model_parallel_is_initialized():
        core.parallel_state.initialize_model_parallel()
    tied = options.pop("tied", False)
    torch.manual_seed(3)
    return core.models.gpt.gpt_model.GPTModel(
        config_of(**options), get_gpt_layer_local_spec(), classes, 16, share_embeddings_and_output_weights=tied
    )
