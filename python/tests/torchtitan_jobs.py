"""torchtitan's own trainer on the CPU, for a few steps of its debug model, in processes of gloo.

torchtitan trains on accelerators. Here it is told that the CPU is one, gets numbers in place of a tokenizer and a data
set, and the attention that runs on the CPU. Two modules that it imports and does not use here have stand-ins:
TensorBoard's writer, and Triton's kernels of an expert-parallel dispatcher.
"""

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed.tensor import DTensor

from integrations import StandIns

CLASSES = 2048  # of the debug model
ROWS, LENGTH = 2, 24


def stub_imports() -> None:
    StandIns("torch.utils.tensorboard", "torchtitan.distributed.minimal_async_ep.kernels").start()


def _import_trainer() -> None:
    os.environ["LOCAL_RANK"] = str(distributed.get_rank())
    stub_imports()
    import torchtitan.trainer as trainer

    for name, module in list(sys.modules.items()):
        if name.startswith("torchtitan."):
            for attribute, value in (("device_type", "cpu"), ("device_module", _Cpu)):
                if hasattr(module, attribute):
                    setattr(module, attribute, value)
    trainer.dist_utils.set_pg_timeouts = lambda **_: None  # it calls a barrier of GPUs


class _Cpu:
    """As torch.cuda for what torchtitan asks of it."""

    set_device = reset_peak_memory_stats = empty_cache = staticmethod(lambda *_: None)
    get_device_name = staticmethod(lambda *_: "cpu")
    memory_stats = staticmethod(lambda *_: {})
    device_count = staticmethod(lambda: 1)
    current_device = staticmethod(lambda: 0)
    get_device_properties = staticmethod(lambda *_: SimpleNamespace(name="cpu", total_memory=1 << 30))


def _configuration(arguments: list[str]) -> Any:
    """The debug model's, as torchtitan's command line parses it, with data that needs no files."""
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.components.tokenizer import BaseTokenizer
    from torchtitan.config import ConfigManager
    from torchtitan.models.common.attention import ScaledDotProductAttention

    class Tokens(BaseDataLoader):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseDataLoader.Config):
            pass

        def __init__(self, config: Any, *, dp_rank: int, **_: Any) -> None:
            self._generator = torch.Generator().manual_seed(dp_rank)

        def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
            while True:
                tokens = torch.randint(CLASSES, (ROWS, LENGTH + 1), generator=self._generator)
                labels = tokens[:, 1:].masked_fill(torch.arange(LENGTH) < 3, -100)
                yield {"input": tokens[:, :-1], "positions": torch.arange(LENGTH).expand(ROWS, -1)}, labels

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            pass

    class Tokenizer(BaseTokenizer):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseTokenizer.Config):
            pass

        def __init__(self, config: Any, *, tokenizer_path: str) -> None:
            super().__init__()

        def encode(self, *_: Any, **__: Any) -> list[int]:
            return []

        def decode(self, *_: Any, **__: Any) -> str:
            return ""

        def get_vocab_size(self) -> int:
            return CLASSES

    config: Any = ConfigManager().parse_args(["--module", "llama3", "--config", "llama3_debugmodel", *arguments])
    config.dataloader, config.tokenizer = Tokens.Config(), Tokenizer.Config()
    config.validator.enable, config.checkpoint.enable = False, False
    config.training.local_batch_size, config.training.seq_len, config.training.steps = ROWS, LENGTH, 3
    config.training.disable_cuda_graphs, config.training.mixed_precision_param = True, "float32"
    config.debug.seed = 1
    model = config.model_spec.model
    model.layers = model.layers[:1]
    model.layers[0].attention.inner_attention = ScaledDotProductAttention.Config()
    return config


def train(group: distributed.ProcessGroup, arguments: list[str]) -> tuple[str, list[float], dict[str, Tensor]]:
    """The name of the loss, the losses of three steps, and the parameters behind them."""
    assert group.size() == distributed.get_world_size()
    _import_trainer()
    trainer = _configuration(arguments).build()
    for module in trainer.model_parts[0].modules():
        if hasattr(
            module, "set_force_sum_reduction_for_comms"
        ):  # of fully_shard: gloo divides by nothing but the ranks
            module.set_force_sum_reduction_for_comms(True)
    losses, step = [], trainer.fwd_bwd_fn

    def noted(*given: Any) -> Tensor:
        loss: Tensor = step(*given)
        losses.append(float(loss.detach()))
        return loss

    trainer.fwd_bwd_fn = noted
    trainer.train()
    parameters = {
        name: each.full_tensor() if isinstance(each, DTensor) else each
        for name, each in trainer.model_parts[0].state_dict().items()
    }
    return type(trainer.loss_fn).__name__, losses, parameters
