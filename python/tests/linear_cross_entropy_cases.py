"""linear_cross_entropy by its formula, and as the tests of the whole library call it."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

import eaves
from comparison import Bound, CrossEntropyOracle, unit_in_last_place
from cross_entropy_cases import DIVISOR, EVERYTHING, MEAN, MEAN_LOGIT, NONE, OF_IGNORED_ROWS, SUM, random_targets
from layouts import LAYOUTS, random_tensor
from operator_cases import Operator

ops = torch.ops.eaves

OF_INPUT, OF_WEIGHT, OF_BIAS, WIDE_WEIGHT = (1 << bit for bit in range(4))  # python/csrc/linear_cross_entropy.cpp


def bytes_of_half(hidden: Tensor, head: Tensor) -> int:
    """keep_bytes with room for the logits of half of the rows, each row filled up to a multiple of 32. (A GPU keeps
    whole tiles of 128 rows: from fewer rows it keeps none.)"""
    size = 8 if hidden.dtype == torch.float64 else 4
    return hidden.shape[:-1].numel() // 2 * (-head.shape[0] // 32 * -32) * size


# ---------------------------------------------------------------------------------------------------------- the formula


class Gradients(NamedTuple):
    """The gradients with respect to input, linear_weight and linear_bias; None for a gradient that was not asked
    for."""

    input: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


class LinearOracle:
    """eaves.linear_cross_entropy by the formula, in float64: the product, and CrossEntropyOracle of its logits.

    The bounds of a loss scale with the largest logit that its sum would have without cancellation.
    """

    def __init__(
        self,
        input: Tensor,
        linear_weight: Tensor,
        target: Tensor,
        linear_bias: Tensor | None = None,
        weight: Tensor | None = None,
        workspace_bytes: int | None = None,  # has no effect on the formula
        **options: Any,
    ) -> None:
        self.x = input.detach().cpu().double().reshape(-1, input.shape[-1])
        self.w = linear_weight.detach().cpu().double()
        self.shape, self.dtype = input.shape, input.dtype
        self.has_bias = linear_bias is not None
        z, size = self.x @ self.w.T, self.x.abs() @ self.w.abs().T
        if linear_bias is not None:
            bias = linear_bias.detach().cpu().double()
            z, size = z + bias, size + bias.abs()
        rows = input.shape[:-1]
        self.z = z.reshape(*rows, z.shape[1])
        self.rows = CrossEntropyOracle(
            self.z, target.cpu().double() if target.is_floating_point() else target, weight, **options
        )
        self.rows.counts &= self.rows.weight != 0
        # A product in float32 is off by this share of its size. The error of a logit enters its row's loss twice;
        # options that multiply logits multiply the error.
        unit = torch.finfo(torch.float64 if input.dtype == torch.float64 else torch.float32).eps
        features = input.shape[-1]
        product = unit * (1 + features**0.5) * size.amax(-1).reshape(rows) * abs(options.get("scale") or 1.0)
        z_slope = 1 + 2 * abs(options.get("z_loss", 0.0)) * (self.rows.lse.abs() + 1)
        row_error = 2 * product * (self.rows.row_mass.abs() + 1) * z_slope
        self.row_error = row_error
        if options.get("reduction", "mean") != "none":
            divisor = self.rows.divisor if self.rows.divisor != 0 else torch.tensor(1.0, dtype=torch.float64)
            self.loss_error = row_error.sum() / divisor.abs()
        else:
            self.loss_error = row_error

    def bounds(self, result_dtype: torch.dtype) -> dict[str, Bound]:
        """The exact value and the tolerance of each output but argmax. The exact value is 0 for rows that do not
        count."""
        counts = self.rows.counts
        found = {}
        for name, bound in self.rows.bounds().items():
            of_rows = name in ("lse", "entropy", "sum_sq", "mean_logit")
            exact = torch.where(counts, bound.exact, 0.0) if of_rows else bound.exact
            own = (2e-6 if result_dtype == torch.float32 else 1e-13) * (exact.abs() + 1)
            through = self.row_error * (1 + self.rows.lse.abs()) if of_rows else self.loss_error
            found[name] = Bound(exact, own + through)
        return found

    def gradients(
        self,
        grad_loss: Tensor | float = 1.0,
        grad_lse: Tensor | None = None,
        grad_entropy: Tensor | None = None,
    ) -> Gradients:
        """The gradients in float64."""
        counts = self.rows.counts.double()
        grad_lse = None if grad_lse is None else grad_lse.cpu().double() * counts
        grad_entropy = None if grad_entropy is None else grad_entropy.cpu().double() * counts
        of_logits = self.rows.gradient(torch.float64, grad_loss, grad_lse, grad_entropy).exact
        self.of_logits = of_logits.reshape(-1, of_logits.shape[-1])
        return Gradients(
            (self.of_logits @ self.w).reshape(self.shape),
            self.of_logits.T @ self.x,
            self.of_logits.sum(0),
        )


# The largest error of a gradient from a product, relative to the norm of the whole gradient. In 16 bits the gradient of
# the logits is rounded once, and the result is rounded once. Each rounding is at most half a unit in the last place,
# and together they are less than one. In float32 the sums make the error.
def allowed_share(dtype: torch.dtype) -> float:
    if dtype == torch.float64:
        return 1e-12
    if dtype == torch.float32:
        return 5e-6
    return float(unit_in_last_place(dtype, torch.tensor(1.0, dtype=torch.float64)))


def assert_gradients(actual: Any, exact: Gradients, dtype: torch.dtype, what: str = "") -> None:
    """Checks the errors of the given results, relative to the norm of the exact ones."""
    for name, found, wanted in zip(Gradients._fields, actual, exact, strict=True):
        if found is None:
            continue
        assert wanted is not None and found.shape == wanted.shape, f"{name} {what}"
        off = (found.detach().cpu().double() - wanted).norm()
        size = wanted.norm()
        smallest = torch.finfo(found.dtype).tiny * max(1, wanted.numel()) ** 0.5
        assert off <= allowed_share(dtype) * size + smallest, f"{name} {what}: off by {off / size:.3g} of {size:.3g}"


# ------------------------------------------------------------------------------------------- cases of the whole library

CLASSES, FEATURES = 37, 29


def head_of(x: Tensor) -> Tensor:
    """A head that is made without a copy and has exact products. In 16 bits a sum that cancels is as uncertain as its
    terms, and these tests compare element by element. The last classes have logits 0."""
    return torch.eye(CLASSES, FEATURES, dtype=x.dtype, device=x.device)


def inputs(batch: int, device: torch.device | str, dtype: torch.dtype) -> tuple[Tensor, ...]:
    return random_tensor((batch, 5, FEATURES), dtype, device), random_targets((batch, 5), CLASSES, device)


def large_inputs(device: torch.device | str) -> tuple[Tensor, ...]:
    rows = 1 << 17  # so many that copying the kept rows is worth threads, and that they need several chunks
    return random_tensor((rows, FEATURES), torch.float32, device), random_targets((rows,), CLASSES, device)


def extension_calls(device: torch.device | str) -> list[tuple[Any, tuple[Any, ...]]]:
    calls: list[tuple[Any, tuple[Any, ...]]] = []

    def add(
        x: Tensor,
        head: Tensor,
        targets: Tensor,
        bias: Tensor | None = None,
        weight: Tensor | None = None,
        row_weight: Tensor | None = None,
        normalizer: Tensor | None = None,
        reduction: int = MEAN,
        smoothing: float = 0.0,
        softcap: float = 0.0,
        z_loss: float = 0.0,
        limit: int = 0,
    ) -> None:
        numbers = (smoothing, 1.5, softcap, z_loss)
        options = (-100, reduction, numbers, False, limit)
        given = (x, head, bias, targets, weight, row_weight)
        has_factors = targets.is_floating_point() or (weight is not None and smoothing != 0)
        everything = EVERYTHING & ~(OF_IGNORED_ROWS | (MEAN_LOGIT if has_factors else 0))
        outputs = everything if reduction == MEAN else everything & ~DIVISOR
        gradients = OF_INPUT | OF_WEIGHT | (0 if bias is None else OF_BIAS)
        for wanted in (0, outputs):
            calls.append((ops.linear_cross_entropy_forward.default, (*given, normalizer, *options, wanted)))
        at_once = ((0, OF_INPUT), (outputs, gradients), (0, gradients | WIDE_WEIGHT))
        for wanted, grads in at_once[:1] if reduction == NONE else at_once:
            both = (*given, normalizer, *options, wanted, grads)
            calls.append((ops.linear_cross_entropy_forward_backward.default, both))
        results = list(ops.linear_cross_entropy_forward(*given, normalizer, *options, outputs))
        loss, lse = results[:2]
        divisor = results.pop(2) if reduction == MEAN else None
        _, entropy, _, target_mass = results[2:6]
        saved = (*given, lse, entropy, target_mass, divisor, *options)
        one, ones = torch.ones_like(loss), torch.ones_like(lse)
        for upstream in ((one, None, None), (one, ones, ones)):
            for grads in (OF_WEIGHT, gradients, gradients | WIDE_WEIGHT):
                calls.append((ops.linear_cross_entropy_backward.default, (*upstream, *saved, grads)))
        for dtype in {head.dtype, loss.dtype}:
            out = torch.ones(head.shape, dtype=dtype, device=device)
            for grads in (0, gradients & ~OF_WEIGHT):
                call = (out, one, None, None, *saved, grads)
                calls.append((ops.linear_cross_entropy_backward_accumulate.default, call))
        # torch.compile calls these overloads if the numbers change.
        number_tensor = torch.tensor(numbers, dtype=torch.float64)
        forward = (number_tensor, *given, normalizer, *options, outputs)
        calls.append((ops.linear_cross_entropy_forward.numbers, forward))
        if reduction != NONE:
            calls.append((ops.linear_cross_entropy_forward_backward.numbers, (*forward, gradients)))
        calls.append((ops.linear_cross_entropy_backward.numbers, (number_tensor, one, ones, ones, *saved, gradients)))
        grad_bias = None if bias is None else bias.clone()
        scaled = (x.clone(), head.clone(), grad_bias, torch.full((), 2.0, dtype=loss.dtype, device=device))
        calls.append((ops.linear_cross_entropy_rescale.default, scaled))

    def head_like(dtype: torch.dtype) -> Tensor:
        return random_tensor((7, 5), dtype, device)

    for layout in LAYOUTS:
        add(layout(random_tensor((3, 4, 5), torch.float32, device)), head_like(torch.float32),
            random_targets((3, 4), 7, device), row_weight=torch.rand((3, 4), device=device))  # fmt: skip
    numbers = random_tensor((7,), torch.float32, device)
    for dtype in (torch.float16, torch.bfloat16):
        add(random_tensor((4, 5), dtype, device), head_like(dtype), random_targets((4,), 7, device, torch.int32),
            numbers.to(dtype), numbers.abs(), smoothing=0.1)  # fmt: skip
    x, normalizer = random_tensor((4, 5), torch.float64, device), torch.full((), 7.0, dtype=torch.float64).to(device)
    add(x, random_tensor((5, 7), torch.float64, device).t(), random_targets((4,), 7, device), numbers.double(), None,
        None, normalizer, softcap=3.0, z_loss=0.1, limit=1000)  # fmt: skip
    soft = random_tensor((4, 7), torch.float32, device).softmax(-1)
    add(random_tensor((4, 5), torch.bfloat16, device), head_like(torch.bfloat16), soft, reduction=SUM)
    x = random_tensor((5,), torch.float32, device)
    add(x, head_like(torch.float32), torch.tensor(2, device=device), numbers, reduction=NONE)
    add(random_tensor((0, 5), torch.float32, device), head_like(torch.float32), random_targets((0,), 7, device))
    return calls


LINEAR_CROSS_ENTROPY = Operator(
    name="linear_cross_entropy",
    function=lambda x, targets: eaves.linear_cross_entropy(x, head_of(x), targets, label_smoothing=0.1),
    torch_function=lambda x, targets: torch.nn.functional.cross_entropy(
        torch.nn.functional.linear(x, head_of(x)).flatten(0, -2), targets.flatten(), label_smoothing=0.1
    ),
    differentiable=(0,),
    inputs=inputs,
    tiny_inputs=lambda device, dtype: (
        random_tensor((2, FEATURES), dtype, device),
        torch.tensor([2, 0], device=device),
    ),
    large_inputs=large_inputs,
    has_workspace=True,
    has_second_derivative=False,
    follows_autocast=True,
    parts=("linear_kl_div", "linear_log_prob", "linear_log_prob_loss"),
    extension_calls=extension_calls,
)
