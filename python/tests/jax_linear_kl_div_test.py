"""eaves.jax.linear_kl_div against the formulas in float64 and autograd of them, with every pair of options."""

import functools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from chunked_cases import assert_gradients, by_the_formula, exact, gradients_by_autograd
from comparison import Bound, assert_within
from jax_cross_entropy_test import labels_of
from kl_div_cases import logits_of, over
from layouts import random_tensor
from pairwise import pairwise

jax = pytest.importorskip("jax", reason="JAX is not installed")
import jax.numpy as jnp  # noqa: E402

import eaves.jax  # noqa: E402
from eaves._arguments import KL_DIV_OUTPUTS  # noqa: E402
from jax_arrays import DTYPES, array_of, assert_same_bits, tensor_of  # noqa: E402

V, D, E, K = 37, 24, 31, 6
DIVERGENCES = ("forward", "reverse", "jsd", "total_variation")
FAR = -1e4  # the logarithm of a probability of 0; autograd gives no NaN for it
OUTPUTS = KL_DIV_OUTPUTS
TEACHERS = ("hidden", "logits", "log_probs", "probs", "class", "renormalize", "zero", "ignore")

Options = dict[str, Any]


def divergence_of(kind: str, beta: float, log_s: Tensor, log_t: Tensor) -> Tensor:
    """The divergence of each row, by the formula."""
    if kind == "total_variation":
        return (log_s.exp() - log_t.exp()).abs().sum(-1) / 2
    if kind != "jsd":
        return by_the_formula(log_s, log_t, kind, beta)
    log_m = torch.logaddexp(math.log(beta) + log_t, math.log1p(-beta) + log_s)  # FAR stays finite
    kl_of_teacher, kl_of_student = (by_the_formula(log_m, log_p, "forward", 0.0) for log_p in (log_t, log_s))
    return beta * kl_of_teacher + (1 - beta) * kl_of_student


class Oracle:
    """The exact results in float64, from the rounded tensors. `teacher` has the arguments of linear_kl_div that give
    the teacher, as tensors."""

    def __init__(self, hidden: Tensor, head: Tensor, bias: Tensor | None, teacher: Options, options: Options) -> None:
        self.leaves = [exact(each, True) for each in (hidden, head, bias)]
        given = {name: each.long() if name == "teacher_tokens" else exact(each) for name, each in teacher.items()}
        option = options.get
        z = logits_of(*self.leaves, option("scale"), option("softcap"))
        u, temperature = over(z, option("temperature")), option("temperature")
        log_s = torch.log_softmax(u, -1)
        self.lse, self.entropy = u.logsumexp(-1), -(log_s.exp() * log_s).sum(-1)
        self.teacher_lse = torch.zeros_like(self.lse)
        of_teacher = {"scale": option("teacher_scale"), "softcap": option("teacher_softcap")}
        if "teacher_tokens" in given:
            rest, tokens, log_t = option("teacher_rest"), given["teacher_tokens"], given["teacher_log_probs"]
            is_token = tokens >= 0
            log_t = log_t.masked_fill(~is_token, FAR)
            own = torch.zeros_like(log_s, dtype=torch.bool).scatter(-1, tokens.clamp(min=0), is_token)
            chosen = log_s.gather(-1, tokens.clamp(min=0)).masked_fill(~is_token, FAR)
            if rest == "class":
                log_t = torch.cat([log_t, torch.log1p(-log_t.exp().sum(-1, keepdim=True))], -1)
            elif rest != "ignore":
                log_t = torch.log_softmax(over(log_t, temperature), -1)
            if rest == "renormalize":
                chosen = torch.log_softmax(chosen, -1)
            elif rest != "ignore":
                log_t = log_t if rest == "class" else torch.cat([log_t, torch.full_like(log_t[..., :1], FAR)], -1)
                chosen = torch.cat([chosen, log_s.masked_fill(own, FAR).logsumexp(-1, keepdim=True)], -1)
            log_s, largest_of_teacher = chosen, log_t.masked_fill(log_t < FAR / 2, 0.0)
        else:
            if "teacher_hidden" in given:
                y = logits_of(*given.values(), **of_teacher)
            elif "teacher_logits" in given:
                y = logits_of(given["teacher_logits"], torch.eye(V).double(), **of_teacher)
            else:
                y = given["teacher_log_probs"] if "teacher_log_probs" in given else given["teacher_probs"].log()
            y = over(y, temperature)
            largest_of_teacher = y
            log_t, self.teacher_lse = torch.log_softmax(y, -1), y.logsumexp(-1)
        self.divergence = divergence_of(option("divergence"), option("beta"), log_s, log_t)
        targets, weight = option("targets"), option("row_weight")
        counts = torch.ones_like(self.lse, dtype=torch.bool)
        if targets is not None:
            counts = targets != option("ignore_index")
        self.hard_loss = torch.zeros_like(self.lse)
        if targets is not None:
            log_p = torch.log_softmax(z, -1)
            self.hard_loss = -log_p.gather(-1, torch.where(counts, targets, 0).long().unsqueeze(-1)).squeeze(-1)
        weight = torch.ones_like(self.lse) if weight is None else weight.double()
        self.counts = counts & (weight != 0)
        for name in OUTPUTS:
            setattr(self, name, torch.where(self.counts, getattr(self, name), 0.0))
        losses = weight * (self.divergence + (option("hard_weight") or 0.0) * self.hard_loss)
        divisor = (weight * self.counts).sum() if option("normalizer") is None else option("normalizer")
        self.loss = losses if option("reduction") == "none" else losses.sum()
        self.loss = self.loss / divisor if option("reduction") == "mean" else self.loss
        # The bounds of chunked_cases.DivergenceOracle: a share of a row's terms as if nothing cancelled, plus the error
        # of a product in float32, which each logarithm has once.
        with torch.no_grad():
            size = F.linear(*(None if each is None else each.abs() for each in self.leaves)).amax(-1)
            size = (size + largest_of_teacher.abs().amax(-1)) * max(1.0, option("scale") or 1.0)
            size = size + over(size.unsqueeze(-1), temperature).squeeze(-1)
            product = torch.finfo(torch.float32).eps * (1 + hidden.shape[-1] ** 0.5) * size
            p = log_s.exp() + log_t.exp()
            terms = (p * (log_s.abs() + log_t.abs())).sum(-1) + 2 * torch.maximum(u.abs(), z.abs()).amax(-1) + 1
            self.error = 2e-6 * terms + product * (1 + (p * (log_s - log_t).abs()).sum(-1))
            of_loss = weight.abs() * self.error * (1 + abs(option("hard_weight") or 0.0))
            if option("reduction") != "none":
                of_loss = of_loss.sum() / (divisor if option("reduction") == "mean" else 1.0)
            self.error_of_loss = of_loss

    def bounds(self) -> dict[str, Bound]:
        found = {name: Bound(getattr(self, name).detach(), self.error) for name in OUTPUTS}
        return found | {"loss": Bound(self.loss.detach(), self.error_of_loss)}

    def gradients(self, upstream: dict[str, Tensor]) -> Any:
        terms = [(getattr(self, name) * each.double()).sum() for name, each in upstream.items()]
        return gradients_by_autograd(torch.stack(terms).sum(), self.leaves)


def teacher_of(kind: str, dtype: torch.dtype, has_bias: bool = False, rows: tuple[int, ...] = (4, 5)) -> Options:
    logits = random_tensor((*rows, V), torch.float32, deviation=1.5).flip(0)
    if kind == "hidden":
        tensors = {"teacher_hidden": random_tensor((*rows, E), dtype).flip(0)}
        tensors["teacher_head"] = random_tensor((V, E), dtype, deviation=E**-0.5).flip(0)
        return tensors | {"teacher_bias": random_tensor((V,), dtype).flip(0) if has_bias else None}
    if kind == "logits":
        return {"teacher_logits": logits.to(dtype)}
    log_probs = torch.log_softmax(logits, -1)
    if kind == "log_probs":
        return {"teacher_log_probs": log_probs}
    if kind == "probs":
        return {"teacher_probs": log_probs.exp()}
    top, tokens = log_probs.topk(K)
    tokens = tokens.clone()
    tokens[0, 1, 3:] = -1  # fewer than K
    return {"teacher_log_probs": top, "teacher_tokens": tokens.int()}


def arrays_of(teacher: Options, layout: str) -> Options:
    found = {name: array_of(each) for name, each in teacher.items()}
    if layout == "dv" and "teacher_head" in found:
        found["teacher_head"] = found["teacher_head"].T
    return found


CASES = pairwise(
    DTYPES,
    ("none", "sum", "mean"),
    DIVERGENCES,
    TEACHERS,
    (None, 0.5, 3.0, "rows"),  # temperature
    (None, 0.7),  # scale
    (None, 5.0),  # softcap
    (False, True),  # bias of both
    (False, True),  # row_weight
    (None, -100, 3),  # ignore_index, without targets or with
    (None, 0.3),  # hard_weight, with targets
    ("vd", "dv"),
    (None, 1, 4000),  # workspace_bytes: one chunk, of single rows, of a few
    (False, True),  # further outputs
    (None, 7.0),  # normalizer, of the mean
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_the_loss_the_outputs_and_the_gradients_are_within_the_contract(jax_device: Any, case: tuple[Any, ...]) -> None:
    dtype, reduction, kind, teacher_kind, temperature, scale, softcap, biased, weighted, ignored = case[:10]
    hard_weight, layout, workspace_bytes, everything, normalizer = case[10:]
    hidden, head = random_tensor((4, 5, D), dtype), random_tensor((V, D), dtype, deviation=D**-0.5)
    bias = random_tensor((V,), dtype) if biased else None
    teacher = teacher_of(teacher_kind, dtype, biased)
    temperature = None if teacher_kind in ("class", "ignore") else temperature  # the call refuses one
    kind = "jsd" if (kind, teacher_kind) == ("reverse", "zero") else kind  # "reverse" is infinite there
    options: Options = {
        "divergence": kind, "beta": 0.3, "reduction": reduction, "scale": scale, "softcap": softcap,
        "teacher_scale": scale and 0.8, "teacher_softcap": softcap and 6.0, "row_weight": None, "targets": None,
        "temperature": torch.linspace(0.5, 2, 20).view(4, 5) if temperature == "rows" else temperature,
        "ignore_index": -100 if ignored is None else ignored, "hard_weight": None,
        "teacher_rest": teacher_kind if "teacher_tokens" in teacher else "renormalize",
        "normalizer": normalizer if reduction == "mean" else None,
    }  # fmt: skip
    if teacher_kind not in ("hidden", "logits"):
        options |= {"teacher_scale": None, "teacher_softcap": None}
    if weighted:
        options["row_weight"] = torch.rand(4, 5, generator=torch.Generator().manual_seed(4))
        options["row_weight"][1, 1] = 0
    if ignored is not None:
        options |= {"targets": labels_of((4, 5), V, ignored), "hard_weight": hard_weight}
    names = [name for name in OUTPUTS if everything and (name != "hard_loss" or options["targets"] is not None)]
    if everything and "teacher_tokens" in teacher:
        names.remove("teacher_lse")
    oracle = Oracle(hidden, head, bias, teacher, options)
    given = {name: array_of(each) if isinstance(each, Tensor) else each for name, each in options.items()}

    def function(hidden: Any, head: Any, bias: Any) -> Any:
        return eaves.jax.linear_kl_div(
            hidden, head, bias=bias, **arrays_of(teacher, layout), head_layout=layout, outputs=names,
            workspace_bytes=workspace_bytes, **given,
        )  # fmt: skip

    lying = (head.T if layout == "dv" else head).contiguous()
    result, vjp = jax.vjp(jax.jit(function), *map(array_of, (hidden, lying, bias)))
    found = result._asdict() if everything else {"loss": result}
    bounds = oracle.bounds()
    for name, each in found.items():
        assert_within(tensor_of(each), bounds[name], name)
    upstream = {name: random_tensor(tuple(each.shape), torch.float32) for name, each in found.items()}
    cotangent = type(result)(*map(array_of, upstream.values())) if everything else array_of(upstream["loss"])
    grad_hidden, grad_head, grad_bias = (None if grad is None else tensor_of(grad) for grad in vjp(cotangent))
    assert grad_hidden is not None and grad_head is not None and grad_hidden.dtype == grad_head.dtype == dtype
    grad_head = grad_head.T if layout == "dv" else grad_head
    assert_gradients((grad_hidden, grad_head, grad_bias), oracle.gradients(upstream))


def call(hidden: Any, head: Any, *teacher: Any, **options: Any) -> Any:
    return eaves.jax.linear_kl_div(hidden, head, *teacher, **options)


def heads() -> tuple[Any, ...]:
    teacher = teacher_of("hidden", torch.float32, rows=(6,))
    tensors = random_tensor((6, D), torch.float32), random_tensor((V, D), torch.float32, deviation=D**-0.5)
    return tuple(map(array_of, (*tensors, teacher["teacher_hidden"], teacher["teacher_head"])))


def test_beta_at_its_limits_is_another_divergence(jax_device: Any) -> None:
    arrays = heads()
    for beta, divergence in ((0.0, "forward"), (1, "reverse")):
        step = jax.value_and_grad(functools.partial(call, divergence=divergence))
        limit = jax.value_and_grad(functools.partial(call, divergence="jsd", beta=beta))
        assert_same_bits(limit(*arrays), step(*arrays))
        near, _ = jax.value_and_grad(functools.partial(call, divergence="jsd", beta=abs(beta - 1e-4)))(*arrays)
        np.testing.assert_allclose(near / 1e-4, step(*arrays)[0], rtol=2e-2)


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("temperature", [0.1, 10.0])
def test_equal_heads_have_divergence_and_gradient_0(jax_device: Any, divergence: str, temperature: float) -> None:
    hidden, head, *_ = heads()
    function = functools.partial(call, divergence=divergence, temperature=temperature, softcap=3.0, teacher_softcap=3.0)
    loss, grads = jax.jit(jax.value_and_grad(function, (0, 1)))(hidden, head, hidden, head)
    assert loss == 0 and not any(each.any() for each in grads)


@pytest.mark.parametrize("rest", ["class", "renormalize", "ignore"])
@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("served_at", [1.0, 2.0])
def test_equal_heads_and_a_top_k_have_divergence_and_gradient_0(
    jax_device: Any, served_at: float, divergence: str, rest: str
) -> None:
    hidden, head, *_ = heads()
    logits = jnp.matmul(hidden, head.T, precision="highest")
    log_probs, tokens = jax.lax.top_k(jax.nn.log_softmax(logits / served_at), K)
    given = {"teacher_log_probs": log_probs, "teacher_tokens": tokens, "teacher_rest": rest, "scale": 1 / served_at}
    loss, grads = jax.value_and_grad(functools.partial(call, divergence=divergence, **given), (0, 1))(hidden, head)
    assert abs(loss) < 2e-6
    # The gradients of total variation are signs of differences; for an undivided sum only "jsd" has gradients of 0.
    if divergence == "jsd" or (divergence != "total_variation" and rest != "ignore"):
        assert all(abs(each).max() < 2e-6 for each in grads)


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_classes_that_both_mask_change_nothing_and_those_of_the_teacher_stay_finite(
    jax_device: Any, divergence: str
) -> None:
    hidden, head, teacher_hidden, teacher_head = heads()
    step = jax.value_and_grad(functools.partial(call, divergence=divergence), (0, 1))
    mask = jnp.zeros(V).at[jnp.array([0, V - 1])].set(-jnp.inf)
    of_both = functools.partial(call, divergence=divergence, bias=mask, teacher_bias=mask)
    loss, grads = jax.value_and_grad(of_both, (0, 1))(hidden, head, teacher_hidden, teacher_head)
    expected, exact_grads = step(hidden, head[1:-1], teacher_hidden, teacher_head[1:-1])
    np.testing.assert_allclose(loss, expected, rtol=2e-6)
    np.testing.assert_allclose(grads[0], exact_grads[0], rtol=1e-4, atol=1e-7)
    assert not grads[1][0].any() and not grads[1][-1].any()

    of_teacher = functools.partial(call, divergence=divergence, teacher_bias=mask)
    loss, grads = jax.value_and_grad(of_teacher, (0, 1))(hidden, head, teacher_hidden, teacher_head)
    assert jnp.isinf(loss) if divergence == "reverse" else jnp.isfinite(loss)
    assert divergence == "reverse" or all(jnp.isfinite(each).all() for each in grads)


def test_no_number_of_a_row_that_does_not_count_is_read(jax_device: Any) -> None:
    hidden, head, teacher_hidden, teacher_head = heads()
    targets, weight = jnp.array([1, -100, 2, 3, 4, 5]), jnp.array([1.0, 1, 0.5, 0, 2, 1])
    lost = jnp.array([1, 3])
    for options in ({}, {"workspace_bytes": 1}, {"reduction": "none"}):

        def loss(hidden: Any, head: Any, teacher: Any, targets: Any, weight: Any, options: Any = options) -> Any:
            found = call(
                hidden, head, teacher, teacher_head, targets=targets, row_weight=weight, hard_weight=0.5,
                outputs=OUTPUTS, **options,
            )  # fmt: skip
            return found.loss.sum(), found

        step = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))
        poisoned = (each.at[lost].set(jnp.nan) for each in (hidden, teacher_hidden))
        (value, found), (grad_hidden, grad_head) = step(next(poisoned), head, next(poisoned), targets, weight)
        kept = jnp.array([0, 2, 4, 5])
        (expected, _), exact = step(hidden[kept], head, teacher_hidden[kept], targets[kept], weight[kept])
        np.testing.assert_allclose(value, expected, rtol=2e-6)
        np.testing.assert_allclose(grad_hidden[kept], exact[0], rtol=1e-4, atol=1e-7)
        np.testing.assert_allclose(grad_head, exact[1], rtol=1e-4, atol=1e-6)
        assert not any(getattr(found, name)[lost].any() for name in OUTPUTS) and not grad_hidden[lost].any()
        assert jnp.isnan(step(hidden, head, teacher_hidden, targets.at[0].set(V), weight)[0][0])


def test_nothing_that_counts_gives_0(jax_device: Any) -> None:
    ignored = jnp.full(6, -100)
    for targets, normalizer in ((ignored, None), (ignored, 0.0)):
        function = functools.partial(call, targets=targets, normalizer=normalizer)
        loss, grads = jax.value_and_grad(function, (0, 1))(*heads())
        assert loss == 0 and not any(each.any() for each in grads)


def test_top_tokens_that_are_all_classes_are_the_whole_teacher(jax_device: Any) -> None:
    hidden, head, *teacher = heads()
    log_probs = jax.nn.log_softmax(teacher[0] @ teacher[1].T)
    tokens = jnp.broadcast_to(jnp.arange(V)[::-1], log_probs.shape)
    for divergence in DIVERGENCES:
        step = functools.partial(jax.value_and_grad(call, (0, 1)), hidden, head, divergence=divergence)
        expected, exact = step(*teacher)
        for rest in ("class", "ignore") if divergence == "reverse" else ("renormalize", "zero"):
            loss, grads = step(teacher_log_probs=log_probs[:, ::-1], teacher_tokens=tokens, teacher_rest=rest)
            np.testing.assert_allclose(loss, expected, rtol=2e-5, err_msg=f"{divergence} {rest}")
            for one, other in zip(grads, exact, strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-6, err_msg=f"{divergence} {rest}")


@pytest.mark.parametrize("divergence", ["reverse", "jsd"])
def test_a_row_without_tokens_has_divergence_0_and_counts(jax_cpu: None, divergence: str) -> None:
    hidden, head, *_ = heads()
    log_probs = jax.nn.log_softmax(jnp.ones((6, K)) * jnp.arange(K)) - 0.5
    nothing = {"teacher_tokens": jnp.full((6, K), 3).at[2].set(-1).at[:, 1:].set(-1), "divergence": divergence}
    nothing["teacher_log_probs"] = log_probs.at[4].set(-jnp.inf)
    for rest in {"class", "renormalize", "zero", "ignore"} - ({"zero"} if divergence == "reverse" else set()):
        function = functools.partial(call, **nothing, teacher_rest=rest, outputs="divergence")
        found = function(hidden, head)
        assert not found.divergence[jnp.array([2, 4])].any(), rest
        np.testing.assert_allclose(found.loss, found.divergence.sum() / 6, rtol=1e-6)
        grad = jax.grad(lambda *arrays, function=function: function(*arrays).loss)(hidden, head)
        assert not grad[jnp.array([2, 4])].any() and jnp.isfinite(grad).all(), rest


def products_of(function: Any, *arrays: Any) -> int:
    return str(jax.jit(function).lower(*arrays).as_text()).count("stablehlo.dot_general")


def test_what_nobody_asks_for_is_not_computed() -> None:
    arrays = heads()
    assert products_of(call, *arrays) == 2
    assert products_of(jax.grad(call, (0, 1)), *arrays) == 4
    assert products_of(jax.grad(call), *arrays) == 3  # a frozen head
    with_hard_loss = functools.partial(call, targets=jnp.zeros(6, int), hard_weight=1.0)
    assert products_of(jax.grad(with_hard_loss, (0, 1)), *arrays) == 4
    rows = jax.value_and_grad(lambda *arrays: call(*arrays, reduction="none").sum(), (0, 1))
    assert products_of(rows, *arrays) == 6
    of_top = {"teacher_log_probs": jnp.zeros((6, K)), "teacher_tokens": jnp.zeros((6, K), int)}
    assert products_of(jax.grad(functools.partial(call, **of_top), (0, 1)), *arrays[:2]) == 3


def test_chunks_hold_no_more_than_the_workspace() -> None:
    hidden, head = jnp.zeros((256, 16)), jnp.zeros((4000, 16))

    def bytes_of(limit: int | None) -> int:
        step = jax.jit(jax.grad(functools.partial(call, workspace_bytes=limit), (0, 1)))
        return int(step.lower(hidden, head, hidden, head).compile().memory_analysis().temp_size_in_bytes)

    of_head = 4 * head.size
    assert bytes_of(1 << 20) <= (1 << 20) + 4 * of_head < 4 * 256 * 4000 < bytes_of(1 << 26)


TOP: Options = {
    "teacher_hidden": None, "teacher_head": None, "teacher_log_probs": jnp.zeros((6, K)),
    "teacher_tokens": jnp.zeros((6, K), int),
}  # fmt: skip
LOGITS: Options = {"teacher_hidden": None, "teacher_head": None, "teacher_logits": jnp.ones((6, V))}
PROBS: Options = {"teacher_hidden": None, "teacher_head": None, "teacher_probs": jnp.ones((6, V)) / V}
WRONG: list[tuple[Options, type[Exception], str]] = [
    ({"divergence": "kl"}, ValueError, 'divergence is \'kl\', expected "forward", "reverse", "jsd" or "total'),
    ({"beta": 1.5}, ValueError, "beta is 1.5, expected a number from 0 to 1"),
    ({"temperature": 0.0}, ValueError, "temperature is 0.0, expected a positive number"),
    ({"temperature": jnp.ones(3)}, ValueError, r"temperature has shape \[3\], expected \[6\] \(one per row\)"),
    ({"softcap": -1.0}, ValueError, "softcap is -1.0, expected a positive number"),
    ({"teacher_hidden": None}, ValueError, 'the teacher is given by nothing, expected one of "teacher_hidden"'),
    ({"teacher_logits": jnp.ones((6, V))}, ValueError, "the teacher is given by teacher_hidden and teacher_logits"),
    ({"teacher_head": None}, ValueError, "teacher_hidden and teacher_head are expected together"),
    ({"teacher_head": jnp.ones((V + 1, E))}, ValueError, rf"teacher_head has shape \[{V + 1}, {E}\], expected {V}"),
    ({"teacher_head": jnp.ones((V, E), jnp.bfloat16)}, ValueError, "teacher_head has dtype bfloat16, expected float32"),
    ({"teacher_hidden": jnp.ones((5, E))}, ValueError, r"teacher_hidden has shape \[5, 31\], expected \[6, 'features'"),
    ({"teacher_tokens": jnp.zeros((6, K), int)}, ValueError, "teacher_tokens is given beside teacher_hidden"),
    ({"head": jnp.ones((V, D), jnp.bfloat16)}, ValueError, "head has dtype bfloat16, expected float32"),
    ({"bias": jnp.ones(3)}, ValueError, r"bias has shape \[3\], expected \[37\]"),
    ({"targets": jnp.zeros(5, int)}, ValueError, r"targets has shape \[5\], expected \[6\]"),
    ({"targets": jnp.zeros(6)}, ValueError, "targets has dtype float32, expected int32 or int64"),
    ({"hard_weight": 0.5}, ValueError, "the hard loss needs targets; pass a class for each row"),
    ({"hard_weight": -0.5, "targets": jnp.zeros(6, int)}, ValueError, "hard_weight is -0.5, expected a n"),
    ({"outputs": "argmax"}, ValueError, "outputs has 'argmax', expected names among divergence"),
    ({"workspace_bytes": 0}, ValueError, "workspace_bytes is 0, expected a positive number of bytes"),
    ({"teacher_rest": "tail"}, ValueError, 'teacher_rest is \'tail\', expected "class", "renormalize", "zero" or "ig'),
    ({"teacher_rest": "zero", "divergence": "reverse", **TOP}, ValueError, 'divergence is "reverse", which is inf'),
    ({"outputs": "teacher_lse", **TOP}, ValueError, 'outputs has "teacher_lse", which a top K does not'),
    ({"temperature": 2.0, **TOP}, ValueError, 'temperature is given beside teacher_tokens and teacher_rest="class"'),
    ({"temperature": jnp.ones(6), "teacher_rest": "ignore", **TOP}, ValueError, "temperature is given beside teacher_"),
    ({"teacher_scale": 2.0, **TOP}, ValueError, "teacher_scale is given, which teacher_log_probs do not take; leave"),
    ({"teacher_softcap": 2.0, **PROBS}, ValueError, "teacher_softcap is given, which teacher_probs do not take; leave"),
    ({"teacher_bias": jnp.ones(V), **LOGITS}, ValueError, "teacher_bias is given, which teacher_logits do not take; l"),
    ({"axis_name": "model"}, ValueError, "head does not vary over the axis 'model'"),
    ({"student_weight": 1}, TypeError, "unexpected keyword argument 'student_weight'; pass head"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "error", "sentence"), WRONG, ids=lambda each: str(each)[:40])
def test_wrong_arguments_are_told(jax_cpu: None, changes: Options, error: type[Exception], sentence: str) -> None:
    arrays = dict(zip(("hidden", "head", "teacher_hidden", "teacher_head"), heads()))
    with pytest.raises(error, match=f"linear_kl_div: (got )?(an )?{sentence}"):
        call(**{**arrays, **changes})


def test_the_teacher_has_no_derivative(jax_cpu: None) -> None:
    for index, name in ((2, "teacher_hidden"), (3, "teacher_head")):
        with pytest.raises(NotImplementedError, match=f"no derivative with respect to {name};"):
            jax.grad(call, index)(*heads())
