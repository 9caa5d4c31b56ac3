"""The passes over the logits of a chunk, by kernels of a GPU and by PyTorch's operators: statistics of the rows and the
gradient of the student's logits, compared with the formulas in float64 and autograd's gradients."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from eaves._chunked import divergence_kernels as kernels
from eaves._chunked.distributions import DivergenceSettings, Logits, RowFactors
from eaves._chunked.divergence import DIVERGENCES, MERGED, row_statistics, statistics, write_gradient
from pairwise import pairwise

each = pytest.mark.parametrize
ROWS = 5
EPSILON = torch.finfo(torch.float32).eps
# Less than a vector for each thread, and more than one piece of a row of the kernels, with and without whole vectors.
SIZES = (37, 20_000, 33_001)


def logits_of(logits: Logits) -> Tensor:
    """The logits z in float64."""
    z = logits.values.double()
    if logits.kind == "probs":
        z = z.log()
    if logits.bias is not None:
        z = z + logits.bias.double()
    z = logits.scale * z
    return z if logits.softcap is None else logits.softcap * torch.tanh(z / logits.softcap)


def softmax_of(logits: Logits, temperature: Tensor | float) -> Tensor:
    """Log-probabilities in float64."""
    return torch.log_softmax(logits_of(logits) / temperature, 1)


def times(p: Tensor, number: Tensor) -> Tensor:
    """p * number, and 0 if p is 0: in the gradient too."""
    return torch.where(p == 0, 0, p * number.masked_fill(p == 0, 0))


def formula(log_s: Tensor, log_t: Tensor, divergence: str, beta: float) -> Tensor:
    s, t = log_s.exp(), log_t.exp()
    if divergence == "forward":
        return times(t, log_t - log_s).sum(1)
    if divergence == "reverse":
        return times(s, log_s - log_t).sum(1)
    if divergence == "total_variation":
        return (s - t).abs().sum(1) / 2
    m = beta * t + (1 - beta) * s
    log_m = m.masked_fill(m == 0, 1).log()
    return beta * times(t, log_t - log_m).sum(1) + (1 - beta) * times(s, log_s - log_m).sum(1)


class Case:
    def __init__(self, device: torch.device, divergence: str, classes: int, **options: Any) -> None:
        generator = torch.Generator().manual_seed(classes)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(device)

        values, of_teacher = 3 * normal(ROWS, classes), 3 * normal(ROWS, classes)
        softcap, self.temperature = options.get("softcap"), options.get("temperature", 1.0)
        if self.temperature == "rows":
            self.temperature = torch.linspace(0.1, 10, ROWS, device=device).unsqueeze(1)
        kind = options.get("kind", "logits")
        if kind == "probs":
            of_teacher = torch.softmax(of_teacher, 1)
        biases = (normal(classes), normal(classes)) if options.get("bias") else (None, None)
        scale = options.get("scale", 1.0)
        self.student = Logits(values, biases[0], scale, softcap)
        if "difference" in options:
            of_teacher = values + options["difference"] * of_teacher
        of_teacher = of_teacher.to(options.get("teacher_dtype", torch.float32))
        self.teacher = Logits(
            of_teacher, biases[1], 1.0 if kind == "probs" else scale, softcap if kind == "logits" else None, kind
        )
        self.targets = torch.randint(classes, (ROWS,), generator=generator).to(device)
        self.settings = DivergenceSettings(divergence, 0.3, True, True)
        self.factors = RowFactors(*[normal(ROWS, 1) for _ in range(4)])

    def statistics(self) -> Any:
        return statistics(self.student, self.teacher, self.temperature, self.settings, self.targets)

    def gradient(self, upstream: RowFactors, dtype: torch.dtype = torch.float32) -> Tensor:
        out = torch.empty_like(self.student.values, dtype=dtype)
        self.write(upstream, out)
        return out

    def write(self, upstream: RowFactors, out: Tensor) -> None:
        found = self.statistics()
        write_gradient(
            self.student, self.teacher, self.temperature, self.settings, found, self.targets, upstream, out
        )  # fmt: skip

    def size(self) -> Tensor:
        """The size of the largest numbers of each row, at least 1; an exponential inherits their rounding errors."""
        largest = torch.stack(
            [
                (each.values.double() if each.kind != "probs" else each.values.double().log()).abs().amax(1)
                for each in (self.student, self.teacher)
            ]
        ).amax(0)
        return 1 + self.student.scale * largest / self._temperature().clamp(max=1)

    def terms(self, upstream: RowFactors, rounding: Tensor) -> Tensor:
        """The size of the terms of each number of the gradient, as if they did not cancel: s * (1 + |f'| + |centre|)
        for the divergence, with the 1 for the roundings of s and of logarithms. `rounding`: relative, [rows, 1]."""
        temperature = self._temperature().unsqueeze(1)
        log_s, log_t = (softmax_of(each, temperature) for each in (self.student, self.teacher))
        s, leaf = log_s.exp(), log_s.clone().requires_grad_()
        divergence = formula(leaf, log_t, self.settings.divergence, self.settings.beta)
        (weighted,) = torch.autograd.grad(divergence.sum(), leaf)  # s * f'
        weighted = weighted.abs()
        if self.settings.divergence == "total_variation":  # rounding may change the sign of a small difference
            weighted += s * ((log_s - log_t).abs() <= rounding) / rounding
        entropy = times(s, log_s)
        hard = softmax_of(self.student, 1.0).exp()
        of_terms = (
            s + weighted + s * weighted.sum(1, keepdim=True),
            s,
            s + entropy.abs() + s * entropy.sum(1, keepdim=True).abs(),
            hard * temperature,
        )
        terms = sum(
            factor.double().abs() * each for factor, each in zip(upstream, of_terms) if factor is not None
        )  # fmt: skip
        z, softcap = logits_of(self.student), self.student.softcap
        slope = 1.0 if softcap is None else 1 - (z / softcap).square()
        return terms * slope * self.student.scale / temperature

    def _temperature(self) -> Tensor:
        return (
            self.temperature.double().squeeze(1)
            if isinstance(self.temperature, Tensor)
            else self.student.values.new_full((ROWS,), self.temperature).double()
        )

    def exact(self, upstream: RowFactors) -> tuple[dict[str, Tensor], Tensor]:
        """The statistics that have derivatives, and the gradient."""
        leaf = self.student.values.double().requires_grad_()
        temperature = self.temperature.double() if isinstance(self.temperature, Tensor) else self.temperature
        student = self.student._replace(values=leaf)
        log_s, log_t = softmax_of(student, temperature), softmax_of(self.teacher, temperature)
        hard = -softmax_of(student, 1.0).gather(1, self.targets.unsqueeze(1)).squeeze(1)
        lse = torch.logsumexp(logits_of(student) / temperature, 1)
        found = {
            "divergence": formula(log_s, log_t, self.settings.divergence, self.settings.beta),
            "lse": lse,
            "entropy": -times(log_s.exp(), log_s).sum(1),
            "hard_loss": hard,
        }
        total = sum(
            (factor.double().squeeze(1) * each).sum()
            for factor, each in zip(upstream, found.values())
            if factor is not None
        )
        (gradient,) = torch.autograd.grad(total, leaf)
        return found, gradient


OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": "rows"},
    {"softcap": 5.0, "scale": 0.7, "temperature": 2.0},
    {"bias": True, "scale": 1.5},
    {"teacher_dtype": torch.bfloat16},
    {"teacher_dtype": torch.float16, "bias": True},
    {"kind": "probs", "temperature": 2.0},
    {"kind": "log_probs", "temperature": 0.5},
    {"difference": 1e-2},
)


@each(("divergence", "classes", "options"), pairwise(tuple(DIVERGENCES), SIZES, OPTIONS), ids=str)
def test_statistics_and_gradients_are_those_of_the_formulas(
    divergence: str, classes: int, options: dict[str, Any], device: torch.device
) -> None:
    case = Case(device, divergence, classes, **options)
    found = case.statistics()
    exact, _ = case.exact(case.factors)
    rounding = 2e-6 * case.size()
    for name, expected in exact.items():
        number = getattr(found, name)
        actual = number.double().sum(1) if name == "lse" else number.double()
        assert ((actual - expected).abs() <= rounding * expected.abs().clamp(min=1)).all(), name
    factors = case.factors
    for upstream in (
        factors,
        RowFactors(factors.divergence),
        RowFactors(factors.divergence, hard_loss=factors.hard_loss),
        RowFactors(None, lse=factors.lse),
    ):
        expected = case.exact(upstream)[1]
        actual = case.gradient(upstream)
        relative = rounding.unsqueeze(1)
        # A few roundings of the number itself, such as p - 1 of a target's hard loss. A GPU flushes a probability below
        # 1.2e-38 to 0; its gradient is that times |f'| of some hundreds, 1 / temperature and the upstream gradient.
        allowed = relative * case.terms(upstream, relative) + 4 * EPSILON * expected.abs() + 1e-33
        assert ((actual - expected).abs() <= allowed).all()
        assert torch.equal(case.gradient(upstream, torch.bfloat16), actual.bfloat16())


@each("classes", SIZES)
@each("divergence", DIVERGENCES)
def test_equal_distributions_have_divergence_0_and_gradient_0(
    divergence: str, classes: int, device: torch.device
) -> None:
    for options in ({}, {"temperature": "rows"}, {"softcap": 5.0}, {"bias": True}):
        case = Case(device, divergence, classes, **options)
        case.teacher = case.student
        assert not case.statistics().divergence.any()
        assert not case.gradient(RowFactors(1.0)).any()


@each("divergence", DIVERGENCES)
def test_classes_without_probability(divergence: str, device: torch.device) -> None:
    """Classes masked in both distributions, and in one of them."""
    case = Case(device, divergence, 20_000)
    student, teacher = case.student.values, case.teacher.values
    student[:, 3] = teacher[:, 3] = -math.inf
    teacher[1, 10:15_000] = -math.inf
    student[2, 5:9_000] = -math.inf
    found, (exact, gradient) = case.statistics().divergence, case.exact(RowFactors(torch.ones_like(student[:, :1])))
    expected = exact["divergence"]
    infinite = {"forward": 2, "reverse": 1}.get(divergence)
    assert [row for row in range(ROWS) if math.isinf(found[row])] == ([] if infinite is None else [infinite])
    rows = [row for row in range(ROWS) if row != infinite]
    torch.testing.assert_close(found[rows].double(), expected[rows], rtol=2e-6, atol=2e-6)
    if infinite is None:
        rows = [0, 3, 4]  # an infinite logarithm leaves autograd without a gradient
    actual = case.gradient(RowFactors(1.0))
    assert not actual[rows, 3].any()
    expected = gradient.nan_to_num(0)
    torch.testing.assert_close(actual[0].double(), expected[0], rtol=1e-4, atol=2e-6)
    assert actual[rows].isfinite().all()


def test_a_row_without_upstream_gradient_has_none_whatever_its_logits_are(device: torch.device) -> None:
    case = Case(device, "forward", 20_000)
    case.student.values[1], case.teacher.values[3] = math.nan, math.inf
    factor = torch.tensor([1.0, 0, 1, 0, 1], device=device).unsqueeze(1)
    actual = case.gradient(RowFactors(factor, factor * 2, None, factor))
    assert not actual[[1, 3]].any() and actual.isfinite().all() and actual[0].any()


def test_the_gradient_may_take_the_memory_of_the_logits(device: torch.device) -> None:
    for classes in SIZES:
        case = Case(device, "jsd", classes)
        expected = case.gradient(case.factors)
        case.write(case.factors, case.student.values)
        assert torch.equal(case.student.values, expected)


def test_rows_of_larger_tensors(device: torch.device) -> None:
    """Rows with gaps between them, which do not begin on a vector boundary."""
    case = Case(device, "reverse", 20_000)
    expected, found = case.gradient(case.factors), case.statistics()
    wide = torch.zeros(2, ROWS, 20_003, device=device)
    wide[0, :, 1:20_001], wide[1, :, 2:20_002] = case.student.values, case.teacher.values
    case.student = case.student._replace(values=wide[0, :, 1:20_001])
    case.teacher = case.teacher._replace(values=wide[1, :, 2:20_002])
    torch.testing.assert_close(case.statistics().divergence, found.divergence, rtol=2e-6, atol=0)
    torch.testing.assert_close(case.gradient(case.factors), expected, rtol=1e-5, atol=1e-6)


@each("divergence", DIVERGENCES)
def test_a_row_whose_target_is_no_class_is_nan(divergence: str, device: torch.device) -> None:
    case = Case(device, divergence, 9)
    expected, loss = case.gradient(case.factors), case.statistics().hard_loss
    case.targets[1], case.targets[3] = 99, -7
    found, actual, rows = case.statistics().hard_loss, case.gradient(case.factors), [0, 2, 4]
    assert found[[1, 3]].isnan().all() and actual[[1, 3]].isnan().all()
    assert torch.equal(found[rows], loss[rows]) and torch.equal(actual[rows], expected[rows])


PARTS = (0, 7, 19, 37)


def part_of(case: Case, first: int, last: int) -> Tensor:
    """The statistics of these classes alone. On the CPU they imitate the kernel: the numbers of a row that is all -inf
    are NaN, except for its lse, 0 and -inf."""
    student, teacher = (
        each._replace(values=each.values[:, first:last]) for each in (case.student, case.teacher)
    )  # fmt: skip
    targets = case.targets - first
    if student.values.is_cuda:
        divergence = case.settings.divergence, case.settings.beta
        found = kernels.statistics(student, teacher, case.temperature, divergence, targets)
        kernels.mark_targets_without_mass_(found, targets, last - first)
        return found
    z, u = logits_of(student), logits_of(teacher)
    lses = []
    for each in (z / case.temperature, u / case.temperature, z):
        largest = each.amax(1)
        anchor = largest.masked_fill(largest == -math.inf, 0)
        lses.append(torch.stack([anchor, (each - anchor.unsqueeze(1)).exp().sum(1).log()], 1))
    log_s, log_t = (softmax_of(each, case.temperature) for each in (student, teacher))
    of_rows = formula(log_s, log_t, case.settings.divergence, 0.0)
    is_here = (targets >= 0) & (targets < last - first)
    hard = -softmax_of(student, 1.0).gather(1, targets.clamp(0, last - first - 1).unsqueeze(1)).squeeze(1)
    hard = hard.masked_fill(~is_here, math.nan)
    centre = of_rows if case.settings.divergence == "reverse" else torch.full_like(of_rows, -1)
    numbers = torch.stack([centre, -times(log_s.exp(), log_s).sum(1)], 1)
    found = torch.cat([of_rows.unsqueeze(1), *lses[:2], numbers, lses[2], hard.unsqueeze(1)], 1)
    kernels.mark_targets_without_mass_(found, targets, last - first)
    return found


@each("divergence", MERGED)
def test_parts_of_the_classes_merge_to_the_whole(divergence: str, device: torch.device) -> None:
    """A part of row 1 has no class of the student, a part of row 2 none of the teacher, a part of row 3 none of
    either."""
    case = Case(device, divergence, PARTS[-1], temperature=2.0)
    case.targets = torch.tensor([3, 8, 20, 10, 99], device=device)
    part = slice(*PARTS[1:3])
    case.student.values[[1, 3], part] = case.teacher.values[[2, 3], part] = -math.inf
    whole = case.statistics()
    parts = [part_of(case, *each) for each in itertools.pairwise(PARTS)]
    merged = row_statistics(kernels.merged_parts(torch.stack(parts), divergence == "reverse"), case.settings)
    infinite = 1 if divergence == "forward" else 2
    assert merged.divergence.isposinf().nonzero().tolist() == [[infinite]]
    assert merged.hard_loss is not None and merged.hard_loss.isposinf().tolist() == [False, True, False, True, False]
    for name in ("divergence", "entropy", "hard_loss"):
        actual, expected = getattr(merged, name), getattr(whole, name)
        torch.testing.assert_close(actual.float(), expected, rtol=2e-6, atol=2e-6, equal_nan=True)
    for name in ("lse", "teacher_lse", "hard_lse"):
        actual, expected = getattr(merged, name), getattr(whole, name)
        torch.testing.assert_close(actual.float().sum(1), expected.sum(1), rtol=2e-6, atol=2e-6, equal_nan=True)
    if divergence == "reverse":
        torch.testing.assert_close(merged.centre.float(), whole.centre, rtol=2e-6, atol=2e-6)
