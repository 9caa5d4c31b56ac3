"""Cases for the operators that take a head in chunks of rows, linear_kl_div and linear_log_prob of several tokens: the
formulas in float64 with autograd's gradients, input tensors, and a counter of a call's products and bytes."""

import math
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import eaves
from comparison import Bound, allowed_error
from linear_cross_entropy_cases import Gradients
from linear_cross_entropy_cases import assert_gradients as assert_gradients_of
from refusals import Call

IGNORED = -100
DIVERGENCES = ("forward", "reverse", "jsd")
EVERYTHING: dict[str, Any] = {"outputs": ("entropy", "is_top1", "sum_sq", "mean_logit")}


def exact(tensor: Tensor | None, requires_grad: bool = False) -> Tensor | None:
    return None if tensor is None else tensor.detach().cpu().double().requires_grad_(requires_grad)


def gradients_by_autograd(total: Tensor, leaves: list[Tensor | None]) -> Gradients:
    found = list(torch.autograd.grad(total, [leaf for leaf in leaves if leaf is not None], retain_graph=True))
    return Gradients(*[None if leaf is None else found.pop(0) for leaf in leaves])


def by_the_formula(log_s: Tensor, log_t: Tensor, divergence: str, beta: float) -> Tensor:
    """Divergence of each row of log-probabilities, which are all finite."""

    def kl(log_p: Tensor, log_q: Tensor) -> Tensor:
        return (log_p.exp() * (log_p - log_q)).sum(-1)

    if divergence == "forward":
        return kl(log_t, log_s)
    if divergence == "reverse":
        return kl(log_s, log_t)
    log_m = (beta * log_t.exp() + (1 - beta) * log_s.exp()).log()
    return beta * kl(log_t, log_m) + (1 - beta) * kl(log_s, log_m)


class DivergenceOracle:
    """eaves.linear_kl_div in float64, from the tensors as they were rounded; gradients by autograd."""

    def __init__(
        self,
        hidden: Tensor,
        head: Tensor,
        teacher_hidden: Tensor,
        teacher_head: Tensor,
        *,
        targets: Tensor | None = None,
        bias: Tensor | None = None,
        teacher_bias: Tensor | None = None,
        divergence: str = "forward",
        beta: float = 0.5,
        temperature: Tensor | float | None = None,
        ignore_index: int = IGNORED,
        reduction: str = "mean",
        normalizer: float | None = None,
        workspace_bytes: int | None = None,  # accepted and ignored
    ) -> None:
        self.dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        self.leaves = [exact(each, True) for each in (hidden, head, bias)]
        teacher = [exact(each) for each in (teacher_hidden, teacher_head, teacher_bias)]
        divisor = torch.as_tensor(1.0 if temperature is None else temperature).cpu().double()
        logits = [F.linear(*each) / divisor.unsqueeze(-1) for each in (self.leaves, teacher)]
        log_s, log_t = (torch.log_softmax(z, -1) for z in logits)
        rows = by_the_formula(log_s, log_t, divergence, beta)
        counts = torch.ones_like(rows) if targets is None else (targets.cpu().long() != ignore_index).double()
        divided = (counts.sum().item() or 1.0) if normalizer is None else float(normalizer)

        def reduced(numbers: Tensor) -> Tensor:
            numbers = torch.where(counts == 0, 0.0, numbers)
            return numbers if reduction == "none" else numbers.sum() / (divided if reduction == "mean" else 1)

        self.divergence = reduced(rows)
        with torch.no_grad():
            # The scale of a row is the sum of its terms' magnitudes, as if neither two logarithms nor a logit and its
            # lse cancelled. A float32 product adds an error proportional to its size, and an error of a logit is an
            # error of each logarithm.
            p = log_s.exp() + log_t.exp()
            largest = torch.maximum(*(z.abs().amax(-1) for z in logits))
            scale = (p * (log_s.abs() + log_t.abs())).sum(-1) + 2 * largest + 1
            product = torch.zeros_like(scale)
            for x, weight, bias in ([each.detach() if each is not None else None for each in self.leaves], teacher):
                size = F.linear(x.abs(), weight.abs(), None if bias is None else bias.abs()).amax(-1)
                product += torch.finfo(self.dtype).eps * (1 + x.shape[-1] ** 0.5) * size / divisor
            through = 2 * product * (1 + (p * (log_s - log_t).abs()).sum(-1))
            error = reduced(allowed_error(self.dtype, rows, scale) + through)
        self.bound = Bound(self.divergence.detach(), error)

    def gradients(self, upstream: Tensor | float = 1.0) -> Gradients:
        given = torch.as_tensor(upstream).detach().cpu().double().expand(self.divergence.shape)
        return gradients_by_autograd((self.divergence * given).sum(), self.leaves)


class TokensOracle:
    """Log-probabilities in float64, from logits or from a head, with the tensors as they were rounded; `weight=None`
    means that x are the logits."""

    def __init__(
        self,
        x: Tensor,
        weight: Tensor | None,
        tokens: Tensor,
        *,
        bias: Tensor | None = None,
        temperature: Tensor | float | None = None,
        softcap: float | None = None,
        scale: float | None = None,
        ignore_index: int = IGNORED,
    ) -> None:
        self.dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        self.leaves = [exact(each, True) for each in (x, weight, bias)]
        x, weight, bias = self.leaves
        z = x if weight is None else x @ weight.T
        z = z if bias is None else z + bias
        z = z if scale is None else scale * z
        self.argmax = z.detach().argmax(-1)
        z = z if softcap is None else softcap * torch.tanh(z / softcap)
        if isinstance(temperature, Tensor):
            z = z / temperature.detach().cpu().double().unsqueeze(-1)
        elif temperature is not None:
            z = z / temperature
        t = tokens.cpu().long()
        t = t if t.dim() == z.dim() else t.unsqueeze(-1)
        self.counts = t != ignore_index
        row_counts = self.counts.any(-1)
        log_p = torch.log_softmax(z, -1)
        p = log_p.exp()
        found = log_p.gather(-1, torch.where(self.counts, t, 0))
        self.log_prob = torch.where(self.counts, found, 0.0).reshape(tokens.shape)
        self.entropy = torch.where(row_counts, -torch.where(p == 0, 0.0, p * log_p).sum(-1), 0.0)
        self.sum_sq = torch.where(row_counts, p.square().sum(-1), 0.0).detach()
        self.mean_logit = torch.where(row_counts, z.mean(-1), 0.0).detach()
        self.is_top1 = ((self.argmax.unsqueeze(-1) == t) & self.counts).reshape(tokens.shape)
        # As in the losses, an error is a share of the largest logit. A float32 product adds an error proportional to
        # its size, and an error of a logit enters its row's log-probabilities twice.
        with torch.no_grad():
            largest = z.abs().amax(-1) + 1
            product = torch.zeros_like(largest)
            if weight is not None:
                size = (x.abs() @ weight.abs().T).amax(-1) + (0 if bias is None else bias.abs().amax())
                divisor = temperature.cpu().double() if isinstance(temperature, Tensor) else temperature or 1.0
                unit = torch.finfo(self.dtype).eps * (1 + x.shape[-1] ** 0.5)
                product = 2 * unit * size * (scale or 1.0) / divisor
            self.error = allowed_error(self.dtype, largest, largest) + product

        of_tokens = self.error.unsqueeze(-1).expand(self.counts.shape).reshape(self.log_prob.shape)
        self.bound = Bound(self.log_prob.detach(), of_tokens)

    def bounds(self) -> dict[str, Bound]:
        of_rows = self.error * (1 + self.entropy.detach())
        return {
            "log_prob": self.bound,
            "entropy": Bound(self.entropy.detach(), of_rows),
            "sum_sq": Bound(self.sum_sq, of_rows),
            "mean_logit": Bound(self.mean_logit, of_rows),
        }

    def gradients(self, upstream: Tensor | None, of_entropy: Tensor | None = None) -> Gradients:
        total = torch.zeros((), dtype=torch.float64)
        for output, given in ((self.log_prob, upstream), (self.entropy, of_entropy)):
            if given is not None:
                total = total + (output * given.cpu().double()).sum()
        return gradients_by_autograd(total, self.leaves)


def heads(
    dtype: torch.dtype,
    device: torch.device | str,
    rows: tuple[int, ...] = (3, 5),
    classes: int = 33,
    student: int = 24,
    teacher: int = 31,
    deviation: float = 0.5,
) -> list[Tensor]:
    """Returns hidden, head, teacher_hidden and teacher_head."""
    generator = torch.Generator().manual_seed(5)
    shapes = ((*rows, student), (classes, student), (*rows, teacher), (classes, teacher))
    return [(deviation * torch.randn(shape, generator=generator)).to(device, dtype) for shape in shapes]


def chosen_tokens(rows: tuple[int, ...], places: int | None, classes: int, device: torch.device) -> Tensor:
    """Returns tokens with a duplicate in a row, ignored places, and wholly ignored rows."""
    generator = torch.Generator().manual_seed(3)
    shape = rows if places is None else (*rows, places)
    tokens = torch.randint(classes, shape, generator=generator)
    flat = tokens.view(math.prod(rows), -1) if tokens.numel() else tokens.new_empty(math.prod(rows), 0)
    if places is not None and places > 1:
        flat[:, 1] = flat[:, 0]
        flat[::3, places // 2] = IGNORED
        flat[1::4, 0] = IGNORED
    if tokens.numel():
        flat[2] = IGNORED
    return tokens.to(device)


def temperatures(rows: tuple[int, ...], device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.linspace(0.5, 2.0, math.prod(rows)).view(rows).to(device, dtype)


def uneven(found: Tensor) -> Tensor:
    """Returns an upstream gradient of both signs."""
    numbers = torch.linspace(-1, 2, found.numel(), dtype=found.dtype, device=found.device)
    return numbers.view(found.shape) if found.dim() else torch.full_like(found, -1.5)


def differentiated(
    tensors: list[Tensor], bias: Tensor | None, upstream_of: Callable[[Tensor], Tensor], **options: Any
) -> tuple[Tensor, Tensor, list[Tensor | None]]:
    """Returns the divergence, its upstream gradient, and the gradients of hidden, head and bias."""
    student = [each.detach().requires_grad_() for each in tensors[:2]]
    bias = None if bias is None else bias.detach().requires_grad_()
    found = eaves.linear_kl_div(*student, *tensors[2:], bias=bias, **options)
    upstream = upstream_of(found)
    wanted = [each for each in (*student, bias) if each is not None]
    gradients: list[Tensor | None] = list(torch.autograd.grad(found, wanted, upstream))
    assert [each.dtype for each in wanted] == [each.dtype for each in gradients if each is not None]
    return found.detach(), upstream, gradients if bias is not None else [*gradients, None]


def assert_gradients(found: Any, exact: Gradients, what: str = "") -> None:
    """Judges each gradient by its own dtype: a bias may be wider or narrower than its head."""
    for index, gradient in enumerate(found):
        alone = [gradient if other == index else None for other in range(3)]
        if gradient is not None:
            assert_gradients_of(alone, exact, gradient.dtype, what)


class Watching(TorchDispatchMode):
    """Counts products, and the bytes that are alive at once in tensors made by the calls that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.products, self.peak, self.largest = 0, 0, 0
        self.made: list[weakref.ref[Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.products += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_)
        given = {each.untyped_storage().data_ptr() for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        for result in tree_leaves(out):
            if isinstance(result, Tensor) and result.untyped_storage().data_ptr() not in given:
                self.made.append(weakref.ref(result))
                self.largest = max(self.largest, result.numel())
        alive = [each for reference in self.made if (each := reference()) is not None]
        self.made = [weakref.ref(each) for each in alive]
        bytes_of = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in alive}
        self.peak = max(self.peak, sum(bytes_of.values()))
        return out


# Wrong arguments for a head of [5, 3], the error's type and a part of its message.
OF_HEADS: list[Call] = [
    ({"hidden": None}, TypeError, r"hidden is a NoneType, expected a torch\.Tensor"),
    ({"hidden": torch.zeros(4, 3).long()}, ValueError, "hidden has dtype int64, expected a floating-point type"),
    ({"head": torch.zeros(5, 2)}, ValueError, r"head has shape \[5, 2\], expected \[classes, 3\]"),
    ({"head": torch.zeros(5, 3).bfloat16()}, ValueError, "head has dtype bfloat16, expected float32 .as hidden"),
    ({"bias": torch.zeros(4)}, ValueError, r"bias has shape \[4\], expected \[5\] \(one per class of head"),
    ({"workspace_bytes": 0}, ValueError, "workspace_bytes is 0, expected a positive number of bytes"),
]
