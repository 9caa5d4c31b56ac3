"""eaves: fused operators for training sequence models, forward and backward, at the limit of the hardware.

    cross_entropy(input, target, weight=None, *, ignore_index=-100, reduction="mean", ...)
    linear_cross_entropy(input, linear_weight, target, *, linear_bias=None, weight=None, reduction="mean", ...)
    linear_kl_div(hidden, head, teacher_hidden=None, teacher_head=None, *, divergence="forward", ...)
    linear_log_prob(hidden, head, tokens, *, bias=None, temperature=None, outputs=(), ...)
    linear_log_prob_loss(hidden, head, tokens, fn, *, entropy=False, boundaries=None, ...)
    log_prob(logits, tokens, *, temperature=None, outputs=(), ...)
    logsumexp(x, dim, keepdim=False, *, dtype=None)
    lrpe_cosine(x, theta, *, grid=None, extra_tokens=0, offset=0, positions=None, activation="none", ...)
    automodel.LinearCrossEntropy, axolotl.EavesPlugin, torchtitan.fused_loss    for the configuration of these trainers
    hf.patch(model, *, ...)    a language model of transformers; hf.install(), of every Trainer
    import eaves.fla    FLA's losses
    jax    the operators for JAX
    levanter.cross_entropy    for Levanter's table of kernels, by eaves.jax
    liger.install()    Liger's losses, behind every use_liger_kernel
    lm_eval.HFLM    lm-evaluation-harness' model of transformers
    megatron.install()    the head of Megatron-Core's GPTModel
    nemo_rl.install(), prime_rl.install(), skyrl.install(), trl.install(), verl.install()    their trainers
    sentence_transformers.MultipleNegativesRankingLoss    a loss of sentence-transformers
    torch.install()    torch.nn.LinearCrossEntropyLoss

CPU and CUDA tensors; autograd, torch.compile, torch.func and CUDA graphs work with them. `python -m eaves info` says
what this installation can do, `python -m eaves bench` measures it beside PyTorch.
"""

import sys
import typing

__all__ = [
    "CrossEntropyLoss",
    "CrossEntropyOutput",
    "KlDivOutput",
    "LRPECosine",
    "LinearCrossEntropyLoss",
    "LogProbOutput",
    "Shard",
    "__version__",
    "cross_entropy",
    "linear_cross_entropy",
    "linear_kl_div",
    "linear_log_prob",
    "linear_log_prob_loss",
    "log_prob",
    "logsumexp",
    "lrpe_cosine",
]

if typing.TYPE_CHECKING:
    from eaves import automodel as automodel
    from eaves import axolotl as axolotl
    from eaves import hf as hf
    from eaves import jax as jax
    from eaves import levanter as levanter
    from eaves import liger as liger
    from eaves import lm_eval as lm_eval
    from eaves import megatron as megatron
    from eaves import nemo_rl as nemo_rl
    from eaves import prime_rl as prime_rl
    from eaves import sentence_transformers as sentence_transformers
    from eaves import skyrl as skyrl
    from eaves import torch as torch
    from eaves import torchtitan as torchtitan
    from eaves import trl as trl
    from eaves import verl as verl
    from eaves.functional import (
        CrossEntropyLoss,
        CrossEntropyOutput,
        KlDivOutput,
        LinearCrossEntropyLoss,
        LogProbOutput,
        LRPECosine,
        Shard,
        __version__,
        cross_entropy,
        linear_cross_entropy,
        linear_kl_div,
        linear_log_prob,
        linear_log_prob_loss,
        log_prob,
        logsumexp,
        lrpe_cosine,
    )
else:
    # Neither PyTorch nor JAX is imported for the other: modules and operators are, when they are first asked for. With
    # PyTorch already there, its operators are registered at once, because a saved program may be about to call them.

    # Not fla: its import installs eaves in FLA, which a look at an attribute must not.
    _MODULES = (
        "automodel", "axolotl", "hf", "jax", "levanter", "liger", "lm_eval", "megatron", "nemo_rl", "prime_rl",
        "sentence_transformers", "skyrl", "torch", "torchtitan", "trl", "verl",
    )  # fmt: skip

    def __getattr__(name: str) -> typing.Any:
        import importlib.metadata
        import importlib.util

        if name == "__version__" and importlib.util.find_spec("torch") is None:
            return importlib.metadata.version("eaves")
        try:
            if name in _MODULES:
                return importlib.import_module(f"eaves.{name}")
            if name in __all__:
                functional = importlib.import_module("eaves.functional")
                globals().update({each: getattr(functional, each) for each in __all__})
                return globals()[name]
        except ModuleNotFoundError as error:
            if error.name == "torch":
                way_out = "PyTorch, which is not installed: pip install torch (eaves.jax has the operators for JAX)"
            elif error.name in ("jax", "jaxlib"):
                way_out = "JAX, which is not installed: pip install jax"
            else:
                raise
            raise ImportError(f"eaves.{name} needs {way_out}") from error
        raise AttributeError(f"module 'eaves' has no attribute '{name}'")

    def __dir__() -> list[str]:
        # Modules that were imported, and no others: help() asks for each name, and most imports need another library.
        return sorted({*__all__, *(name for name in globals() if name in _MODULES or name.startswith("__"))})

    if sys.modules.get("torch") is not None:
        __getattr__(__all__[0])
