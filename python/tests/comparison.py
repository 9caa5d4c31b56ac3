"""The oracles in float64, and the allowed distance of a result from them.

docs/numerics.md states the contract; testing/tolerance.h has the same bounds for the C++ tests. Nothing here is tuned
to an implementation. Tests that compare two float32 computations, without an oracle, state their own tolerance.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

FLOATING_POINT = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
PROMOTED = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool)

_MANTISSA_BITS = {torch.float16: 10, torch.bfloat16: 7, torch.float32: 23, torch.float64: 52}
_SMALLEST_EXPONENT = {torch.float16: -14, torch.bfloat16: -126, torch.float32: -126, torch.float64: -1022}


def unit_in_last_place(dtype: torch.dtype, value: Tensor) -> Tensor:
    """Returns the distance between neighbouring numbers of `dtype` around `value`."""
    exponent = torch.frexp(value.nan_to_num(0.0, 0.0, 0.0)).exponent.double() - 1
    return torch.exp2(exponent.clamp(min=_SMALLEST_EXPONENT[dtype]) - _MANTISSA_BITS[dtype])


def allowed_error(dtype: torch.dtype, exact: Tensor, scale: Tensor) -> Tensor:
    """Returns the bound on |result - exact|. `scale` is the size of the row that the result comes from.

    float32            2e-6 of the scale
    float16, bfloat16  half a unit in the last place of the exact value, and 1e-6
    float64            1e-13 of the scale: used for gradient checks, not part of the contract
    """
    if dtype == torch.float32:
        return 2e-6 * scale
    if dtype == torch.float64:
        return 1e-13 * scale
    return 0.5 * unit_in_last_place(dtype, exact) + 1e-6


class Bound(NamedTuple):
    """The exact result in float64 and the allowed error."""

    exact: Tensor
    error: Tensor


def differences(result: Tensor, bound: Bound) -> str:
    """Returns "" if `result` is within the bound, else the index of the largest excess and its values."""
    if result.shape != bound.exact.shape:
        return f"shape {tuple(result.shape)}, expected {tuple(bound.exact.shape)}"
    actual, exact = result.detach().cpu().double(), bound.exact
    unit = unit_in_last_place(result.dtype, exact)
    distance = (actual - exact).abs()
    overflows = actual.isinf() & (exact.abs() >= torch.finfo(result.dtype).max + 0.5 * unit) & (actual * exact > 0)
    # `<=` is false for NaN, and for an infinity because its distance to itself is NaN.
    right = (distance <= bound.error) | (actual == exact) | (actual.isnan() & exact.isnan()) | overflows
    if right.all():
        return ""
    wrong = (~right).nonzero()
    excess = (distance - bound.error)[~right].nan_to_num(math.inf, math.inf)
    index = tuple(wrong[excess.argmax()].tolist()) if exact.dim() else ()
    return (
        f"{len(wrong)} of {exact.numel()} differ, [{', '.join(map(str, index))}] most: "
        f"expected {exact[index].item():.9g}, actual {actual[index].item():.9g}, "
        f"distance {distance[index].item():.3g} = {(distance / unit)[index].item():.2f} units in the last place "
        f"of {result.dtype}, allowed {bound.error[index].item():.3g}"
    )


def assert_within(result: Tensor, bound: Bound, what: str = "") -> None:
    """Fails with index, expected, actual and distance if `result` is beyond the bound."""
    text = differences(result, bound)
    assert not text, f"{what}: {text}" if what else text


def assert_agree(actual: Tensor, expected: Tensor) -> None:
    """Compares two ways to one result that may add up in another order, with the tolerance of torch's own tests for the
    dtype.

    The oracles judge whether the result is right.
    """
    torch.testing.assert_close(actual, expected)


def assert_rounded(result: Tensor, exact: Tensor, roundings: int) -> None:
    """Checks a result that torch's own operators made of several rounded numbers, the largest of them around 1."""
    allowed = roundings * 0.5 * unit_in_last_place(result.dtype, torch.tensor(1.0, dtype=torch.float64))
    assert_within(result, Bound(exact.cpu(), allowed.expand_as(exact)))


# ------------------------------------------------------------------------------------------------------------ logsumexp


class LogsumexpOracle:
    """logsumexp of `x` over `dims` and its gradient, by the formula, in float64.

    `dims` as in eaves.logsumexp: an int or several; an empty sequence means all.
    """

    def __init__(self, x: Tensor, dims: int | Sequence[int], keepdim: bool = False) -> None:
        self.x = x.detach().cpu().double()
        # The backward reads lse in float32, or in float64 if x is float64.
        self.lse_dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        rank = max(self.x.dim(), 1)
        named = [dims] if isinstance(dims, int) else list(dims)
        self.axes = sorted(axis % rank for axis in named) or list(range(rank))
        self.kept_shape = [1 if axis in self.axes else size for axis, size in enumerate(self.x.shape)]
        self.shape = [
            1 if axis in self.axes else size
            for axis, size in enumerate(self.x.shape)
            if keepdim or axis not in self.axes
        ]
        if self.x.numel() == 0:
            largest = torch.full(self.kept_shape, -math.inf, dtype=torch.float64)
        else:
            largest = self.x.nan_to_num(-math.inf, math.inf, -math.inf).amax(self.axes, keepdim=True)
        # The anchor of an infinite maximum is 0: exp of the element itself is 0, infinity or NaN, as the formula
        # requires.
        anchor = torch.where(largest.isfinite(), largest, torch.zeros_like(largest))
        self.lse = (self.x - anchor).exp().sum(self.axes, keepdim=True).log() + anchor
        # Near zero, lse is the logarithm of a sum near 1, with an absolute error of 6e-8 in float32 however small lse
        # is. Hence 1/16; testing/tolerance.h has 1/4, for sums of more numbers on a GPU.
        self.scale = torch.maximum(self.lse.abs(), anchor.abs()).clamp(min=1 / 16)

    def forward(self, dtype: torch.dtype) -> Bound:
        """Returns the bound on a result of `dtype`."""
        return Bound(self.lse.view(self.shape), allowed_error(dtype, self.lse, self.scale).view(self.shape))

    def backward(self, grad_out: Tensor, dtype: torch.dtype) -> Bound:
        """Returns the bound on the gradient in `dtype` for the upstream gradient `grad_out`.

        It adds the backward's own error and the effect of the forward's error of lse: the gradient is g * exp(x - lse),
        so an absolute error of lse is a relative error of each gradient.
        """
        upstream = grad_out.detach().cpu().double().reshape(self.kept_shape)
        exact = upstream * (self.x - self.lse).exp()
        exact = torch.where(self.lse == -math.inf, torch.zeros_like(exact), exact)
        row_scale = exact.abs() if exact.numel() == 0 else exact.abs().amax(self.axes, keepdim=True)
        of_lse = allowed_error(self.lse_dtype, self.lse, self.scale)
        return Bound(exact, allowed_error(dtype, exact, row_scale) + exact.abs() * torch.expm1(of_lse))


# -------------------------------------------------------------------------------------------------------- cross entropy


def logsumexp_scale(lse: Tensor, largest: Tensor) -> Tensor:
    """Returns the larger of |lse| and |the largest element|, and at least 1/16; see LogsumexpOracle."""
    finite = torch.where(largest.isfinite(), largest.abs(), torch.zeros_like(largest))
    return torch.maximum(lse.abs(), finite).clamp(min=1 / 16)


class CrossEntropyOracle:
    """eaves.cross_entropy by the formula, in float64. The oracle converts every target, one class or probabilities, to
    a distribution.

    Tensors per row have "the shape of input without the classes", [rows...]; tensors per class have the classes last.
    The scales are the same as in testing/tolerance.h: the size of each result as if its terms did not cancel.
    """

    def __init__(
        self,
        input: Tensor,
        target: Tensor,
        weight: Tensor | None = None,
        *,
        class_dim: int = -1,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        softcap: float | None = None,
        scale: float | None = None,
        z_loss: float = 0.0,
        row_weight: Tensor | None = None,
        normalizer: float | None = None,
    ) -> None:
        self.class_dim, self.reduction, self.z_loss_weight = class_dim, reduction, z_loss
        self.result_dtype = torch.float64 if input.dtype == torch.float64 else torch.float32
        z = input.detach().cpu().double().movedim(class_dim, -1)
        classes = z.shape[-1]
        factor = 1.0 if scale is None else float(scale)
        self.is_transformed = factor != 1.0 or softcap is not None
        self.scale = factor
        self.logits, self.slope = factor * z, torch.full_like(z, factor)
        if softcap is not None:
            # 1 / cosh^2 is the derivative of tanh; 1 - tanh^2 would cancel.
            self.slope = factor / (self.logits / softcap).cosh() ** 2
            self.logits = softcap * (self.logits / softcap).tanh()
        self.largest = self.logits.nan_to_num(-math.inf, math.inf, -math.inf).amax(-1)
        anchor = torch.where(self.largest.isfinite(), self.largest, torch.zeros_like(self.largest))
        self.lse = (self.logits - anchor.unsqueeze(-1)).exp().sum(-1).log() + anchor
        self.log_p = self.logits - self.lse.unsqueeze(-1)
        self.p = self.log_p.exp()
        p_log_p = torch.where(self.logits == -math.inf, torch.zeros_like(self.p), self.p * self.log_p)
        self.entropy = -p_log_p.sum(-1)
        self.sum_sq = torch.where(self.logits == -math.inf, 0.0, self.p.square()).sum(-1)
        self.mean_logit = self.logits.mean(-1)
        self.argmax = z.nan_to_num(-math.inf, math.inf, -math.inf).argmax(-1)

        weights = torch.ones(classes, dtype=torch.float64) if weight is None else weight.detach().cpu().double()
        rows = z.shape[:-1]
        self.hard = torch.zeros_like(z)
        if target.is_floating_point():
            q = target.detach().cpu().double().movedim(class_dim, -1)
            self.counts = torch.ones(rows, dtype=torch.bool)
            self.distribution = weights * ((1 - label_smoothing) * q + label_smoothing / classes)
            target_weight = torch.ones(rows, dtype=torch.float64)
        else:
            t = target.cpu().long()
            self.counts = t != ignore_index
            t = torch.where(self.counts, t, torch.zeros_like(t))
            counted = self.counts.double()
            target_weight = weights[t] * counted if classes else counted
            if classes:
                self.hard.scatter_(-1, t.unsqueeze(-1), ((1 - label_smoothing) * target_weight).unsqueeze(-1))
            self.distribution = counted.unsqueeze(-1) * (label_smoothing / max(classes, 1)) * weights
        mass = self.hard + self.distribution
        self.row_mass = mass.sum(-1)
        lse_scale = logsumexp_scale(self.lse, self.largest)
        self.lse_error = allowed_error(self.result_dtype, self.lse, lse_scale)
        self.entropy_error = allowed_error(
            self.result_dtype, self.entropy, torch.maximum(self.entropy.abs(), lse_scale)
        )

        zero = torch.zeros((), dtype=torch.float64)  # 0 * log(0) is 0
        losses = torch.where(mass == 0, zero, -mass * self.log_p).sum(-1)
        finite_logits = torch.where(self.logits.isfinite(), self.logits.abs(), zero)
        loss_scale = torch.where(mass == 0, zero, mass.abs() * torch.maximum(finite_logits, lse_scale[..., None])).sum(
            -1
        )
        self.weight = torch.ones(rows, dtype=torch.float64)
        if row_weight is not None:
            self.weight = row_weight.detach().cpu().double()
        z_losses = torch.where(self.counts & (z_loss != 0), z_loss * self.lse**2, zero)
        z_scale = torch.where(self.counts, 2 * z_loss * lse_scale**2, zero)
        losses, loss_scale = losses + z_losses, loss_scale + z_scale
        losses, loss_scale = self.weight * losses, self.weight.abs() * loss_scale
        z_losses, z_scale = self.weight * z_losses, self.weight.abs() * z_scale
        if reduction == "mean":
            self.divisor = (
                (self.weight * target_weight).sum() if normalizer is None else torch.tensor(float(normalizer)).double()
            )
        else:
            self.divisor = torch.ones((), dtype=torch.float64)

        def reduced(values: Tensor) -> Tensor:
            if reduction == "none":
                return values
            return zero if self.divisor == 0 else values.sum() / self.divisor

        self.loss = Bound(reduced(losses), allowed_error(self.result_dtype, reduced(losses), reduced(loss_scale)))
        self.z_loss = Bound(reduced(z_losses), allowed_error(self.result_dtype, reduced(z_losses), reduced(z_scale)))

    def bounds(self) -> dict[str, Bound]:
        """Returns the bound of each output but argmax."""
        return {
            "loss": self.loss,
            "lse": Bound(self.lse, self.lse_error),
            "entropy": Bound(self.entropy, self.entropy_error),
            "z_loss": self.z_loss,
            "sum_sq": self._of_row(self.sum_sq, self.sum_sq * (1 + self.largest.abs())),
            "mean_logit": self._of_row(self.mean_logit, self.logits.abs().mean(-1)),
        }

    def _of_row(self, exact: Tensor, scale: Tensor) -> Bound:
        return Bound(exact, allowed_error(self.result_dtype, exact, scale))

    def gradient(
        self,
        dtype: torch.dtype,
        grad_loss: Tensor | float = 1.0,
        grad_lse: Tensor | None = None,
        grad_entropy: Tensor | None = None,
    ) -> Bound:
        """Returns the bound on the gradient of input in `dtype`, in the layout of input.

        It adds the backward's own error and the effect of the forward's errors of lse and entropy.
        """

        def column(values: Tensor | float | None) -> Tensor:
            if values is None:
                return torch.zeros_like(self.lse).unsqueeze(-1)
            given = torch.as_tensor(values).detach().cpu().double()
            return given.expand(self.lse.shape).unsqueeze(-1)

        divisor = self.divisor if self.divisor != 0 else torch.tensor(math.inf, dtype=torch.float64)
        g = column(grad_loss) / divisor * (self.weight * self.counts).unsqueeze(-1)
        of_lse, of_entropy = column(grad_lse), column(grad_entropy)
        lse, entropy = self.lse.unsqueeze(-1), self.entropy.unsqueeze(-1)
        zero = torch.zeros((), dtype=torch.float64)
        hard, distribution = g * self.hard, g * self.distribution
        of_mass = g * (self.row_mass.unsqueeze(-1) - self.hard)
        of_z_loss = g * 2 * self.z_loss_weight * lse if self.z_loss_weight else torch.zeros_like(g)
        has_entropy = (of_entropy != 0) & (self.p != 0)
        in_entropy = torch.where(has_entropy, -of_entropy * (self.log_p + entropy), zero)
        p_minus_one = torch.expm1(self.log_p)
        exact = self.p * (of_mass + of_z_loss + of_lse + in_entropy) - distribution
        exact = (exact + torch.where(hard == 0, zero, hard * p_minus_one)) * self.slope
        has_upstream = self.counts.unsqueeze(-1) | (of_lse != 0) | (of_entropy != 0)
        exact = torch.where(has_upstream, exact, zero)  # rows without an upstream gradient get 0 even if a logit is NaN

        rounding = self.logits.abs() / 4 if self.is_transformed else torch.zeros_like(self.logits)
        entropy_terms = torch.where(has_entropy, of_entropy.abs() * (self.log_p.abs() + entropy.abs()), zero)
        of_p = of_mass.abs() + of_z_loss.abs() + of_lse.abs() + entropy_terms
        through_p = torch.where(self.p == 0, zero, self.p * (of_p * (1 + rounding) + hard.abs() * rounding))
        of_target = torch.where(hard == 0, zero, hard.abs() * p_minus_one.abs())
        scale = self.scale * (through_p + of_target + distribution.abs())
        row_scale = scale.nan_to_num(0.0).amax(-1, keepdim=True) if scale.numel() else scale
        lse_error, entropy_error = self.lse_error.unsqueeze(-1), self.entropy_error.unsqueeze(-1)
        let_through = (of_p + hard.abs()) * torch.expm1(lse_error) + g.abs() * 2 * self.z_loss_weight * lse_error
        let_through = self.scale * self.p * (let_through + of_entropy.abs() * (entropy_error + lse_error))
        error = allowed_error(dtype, exact, row_scale) + let_through
        return Bound(exact.movedim(-1, self.class_dim), error.movedim(-1, self.class_dim))
