"""cross_entropy's cases for the tests that run over every operator."""

from typing import Any

import torch
from torch import Tensor

import eaves
from layouts import LAYOUTS, random_tensor
from operator_cases import Operator

ops = torch.ops.eaves

# The bits of python/csrc/cross_entropy.cpp.
LSE, DIVISOR, ARGMAX, ENTROPY, Z_LOSS, TARGET_MASS, SUM_SQ, MEAN_LOGIT, OF_IGNORED_ROWS = (1 << bit for bit in range(9))
EVERYTHING = (1 << 9) - 1
NONE, SUM, MEAN = range(3)


def random_targets(
    shape: tuple[int, ...], classes: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.int64
) -> Tensor:
    """Returns classes; if there are several rows, at least one is ignored."""
    generator = torch.Generator().manual_seed(13)
    targets = torch.randint(0, classes, shape, generator=generator)
    if targets.numel() > 1:
        targets.view(-1)[1::7] = -100
    return targets.to(dtype).to(device)


def cross_entropy_inputs(batch: int, device: torch.device | str, dtype: torch.dtype) -> tuple[Tensor, ...]:
    return random_tensor((batch, 5, 33), dtype, device), random_targets((batch, 5), 33, device)


def cross_entropy_large_inputs(device: torch.device | str) -> tuple[Tensor, ...]:
    # Few rows: each is split among threads or blocks, and its parts meet in the workspace.
    classes = (1 << 20) + 13
    return random_tensor((2, classes), torch.float32, device), torch.tensor([classes - 1, 5], device=device)


def cross_entropy_extension_calls(device: torch.device | str) -> list[tuple[Any, tuple[Any, ...]]]:
    calls: list[tuple[Any, tuple[Any, ...]]] = []

    def add(
        logits: Tensor,
        targets: Tensor,
        weight: Tensor | None = None,
        row_weight: Tensor | None = None,
        normalizer: Tensor | None = None,
        axis: int = -1,
        reduction: int = MEAN,
        smoothing: float = 0.0,
        softcap: float = 0.0,
        z_loss: float = 0.0,
        in_place: bool = True,
    ) -> None:
        numbers = (smoothing, 1.5, softcap, z_loss)
        options = (axis, -100, reduction, numbers)
        inputs = (logits, targets, weight, row_weight, normalizer, *options)
        has_factors = targets.is_floating_point() or (weight is not None and smoothing != 0)
        in_forward = EVERYTHING & ~(MEAN_LOGIT if has_factors else 0)
        everything = in_forward if reduction == MEAN else in_forward & ~DIVISOR
        for outputs in (0, everything):
            calls.append((ops.cross_entropy_forward.default, (*inputs, outputs)))
        if in_place:
            for outputs in (0, everything & (LSE | ARGMAX | ENTROPY | Z_LOSS | SUM_SQ | MEAN_LOGIT)):
                calls.append((ops.cross_entropy_forward_backward.default, (*inputs, outputs)))
            losses = torch.full(targets.shape if targets.dim() < logits.dim() else (), 2.0, device=device)
            calls.append(
                (
                    ops.cross_entropy_rescale.default,
                    (logits.clone(), losses.to(torch.promote_types(logits.dtype, torch.float32)), axis),
                )
            )
        results = list(ops.cross_entropy_forward(*inputs, everything))
        loss, lse = results[:2]
        divisor = results.pop(2) if reduction == MEAN else None
        _, entropy, _, target_mass = results[2:6]
        saved = (logits, targets, weight, row_weight, lse, entropy, target_mass, divisor, *options, 0, 0)
        ones = torch.ones_like(lse)
        calls.append((ops.cross_entropy_backward.default, (torch.ones_like(loss), ones, ones, *saved)))
        calls.append((ops.cross_entropy_backward.default, (torch.ones_like(loss), None, None, *saved)))
        # The overloads that torch.compile calls when the numbers change.
        number_tensor = torch.tensor(numbers, dtype=torch.float64)
        calls.append((ops.cross_entropy_forward.numbers, (number_tensor, *inputs, everything)))
        calls.append((ops.cross_entropy_backward.numbers, (number_tensor, torch.ones_like(loss), ones, ones, *saved)))
        if in_place:
            kept = (logits.clone(), targets, weight, row_weight, lse, None, target_mass, divisor)
            upstream = (torch.ones_like(loss), None, None)
            calls.append((ops.cross_entropy_backward_in_place.default, (*upstream, *kept, *options)))

    for layout in LAYOUTS:
        logits = layout(random_tensor((3, 4, 5), torch.float32, device))
        row_weight = torch.rand((3, 4), device=device)
        add(
            logits, random_targets((3, 4), 5, device), row_weight=row_weight, in_place="expanded" not in layout.__name__
        )
    add(random_tensor((3, 5, 4), torch.float32, device), random_targets((3, 4), 5, device), axis=-2, reduction=NONE)
    weight, normalizer = torch.rand(5, device=device), torch.full((), 7.0, device=device)
    for dtype in (torch.float16, torch.bfloat16):
        add(random_tensor((4, 5), dtype, device), random_targets((4,), 5, device, torch.int32), weight, smoothing=0.1)
    logits = random_tensor((4, 5), torch.float64, device)
    add(logits, random_targets((4,), 5, device), weight.double(), None, normalizer.double(), z_loss=0.1, softcap=3.0)
    soft = random_tensor((4, 5), torch.float32, device).softmax(-1)
    add(random_tensor((4, 5), torch.bfloat16, device), soft, reduction=SUM)
    add(random_tensor((5,), torch.float32, device), torch.tensor(2, device=device), reduction=NONE)
    add(random_tensor((0, 5), torch.float32, device), random_targets((0,), 5, device))
    logits, targets = random_tensor((4, 5), torch.float32, device), random_targets((4,), 10, device)
    shard = (logits, targets, weight, -1, -100, NONE, (0.1, 1.5, 3.0, 0.0), 5, 10)
    calls.append((ops.cross_entropy_shard_forward.default, shard))
    statistics = ops.cross_entropy_shard_forward(*shard)
    other = ops.cross_entropy_shard_forward(*shard[:-2], 0, 10)
    merge = (torch.stack([other, statistics]), targets, None, normalizer, -100, MEAN, (0.1, 1.0, 0.0, 0.01), 10, True)
    for outputs in (0, EVERYTHING & ~(MEAN_LOGIT | OF_IGNORED_ROWS)):
        calls.append((ops.cross_entropy_merge.default, (*merge, outputs)))
    return calls


CROSS_ENTROPY = Operator(
    name="cross_entropy",
    # Label smoothing changes the gradient of every class.
    function=lambda logits, targets: eaves.cross_entropy(logits, targets, label_smoothing=0.1),
    torch_function=lambda logits, targets: torch.nn.functional.cross_entropy(logits, targets, label_smoothing=0.1),
    differentiable=(0,),
    inputs=cross_entropy_inputs,
    tiny_inputs=lambda device, dtype: (random_tensor((2, 3), dtype, device), torch.tensor([2, 0], device=device)),
    large_inputs=cross_entropy_large_inputs,
    has_workspace=True,
    has_second_derivative=False,
    parts=("log_prob",),
    extension_calls=cross_entropy_extension_calls,
)
