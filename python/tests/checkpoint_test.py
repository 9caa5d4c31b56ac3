"""Every operator with autograd's other ways to keep tensors: activation checkpoints of both kinds, whole and selective,
hooks of saved tensors, and saved tensors on the CPU. Results and gradients equal the plain call's bit for bit."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import eaves
from chunked_cases import DIVERGENCES
from cross_entropy_test import REDUCTIONS, each
from layouts import random_tensor

ROWS, FEATURES, CLASSES = 6, 8, 11

# Takes hidden states, a head and its bias; each may require a gradient.
Call = Callable[[Tensor, Tensor, Tensor], Any]


def classes_of(x: Tensor) -> Tensor:
    return torch.tensor([3, -100, 0, 10, 3, 7], device=x.device)


def probabilities_of(x: Tensor) -> Tensor:
    return torch.softmax(torch.linspace(-1, 1, ROWS * CLASSES, device=x.device).view(ROWS, CLASSES), 1)


def tokens_of(x: Tensor) -> Tensor:
    """Returns K tokens of each row."""
    return torch.stack([classes_of(x), classes_of(x).flip(0), torch.arange(ROWS, device=x.device)], 1)


def temperatures_of(x: Tensor) -> Tensor:
    return torch.linspace(0.5, 2, ROWS, device=x.device)


def weights_of(x: Tensor) -> Tensor:
    return torch.linspace(0.5, 2, CLASSES, device=x.device).to(x.dtype)


def made_of(values: dict[str, Any], x: Tensor) -> dict[str, Any]:
    """Returns the options of a call; functions among the values are called with the hidden states."""
    return {name: value(x) if callable(value) else value for name, value in values.items()}


def on_logits(function: Callable[..., Any], target: Callable[[Tensor], Tensor], **options: Any) -> Call:
    """Computes the logits before the call, so that the call may overwrite them."""
    return lambda x, head, bias: function(F.linear(x.sin(), head, bias), target(x), **made_of(options, x))


def on_head(function: Callable[..., Any], target: Callable[[Tensor], Tensor], bias_name: str, **options: Any) -> Call:
    return lambda x, head, bias: function(x.sin(), head, target(x), **{bias_name: bias}, **made_of(options, x))


def kl_div(x: Tensor, head: Tensor, bias: Tensor, **options: Any) -> Any:
    y, teacher = random_tensor((ROWS, 5), x.dtype, x.device, 1.5), random_tensor((CLASSES, 5), x.dtype, x.device)
    return eaves.linear_kl_div(x.sin(), head, y, teacher, bias=bias, targets=classes_of(x), **options)


def lrpe(x: Tensor, head: Tensor, bias: Tensor, **options: Any) -> Any:
    theta = head[:2, :4]
    return eaves.lrpe_cosine(x.sin().view(1, ROWS, 2, FEATURES // 2), theta, **options)


OUTPUTS = {"outputs": ("lse", "entropy", "argmax")}
OF_TOKENS = {"outputs": ("entropy", "is_top1")}
ALGORITHMS = ("auto", "speed", "memory", "recompute")

CALLS: dict[str, Call] = {
    "logsumexp": lambda x, head, bias: eaves.logsumexp(F.linear(x.sin(), head, bias), -1),
    "logsumexp float32": lambda x, head, bias: eaves.logsumexp(F.linear(x, head), 0, dtype=torch.float32),
    "lrpe_cosine": lrpe,
    "lrpe_cosine silu": partial(lrpe, activation="silu", grid=(2, 3)),
    "lrpe_cosine softmax": partial(lrpe, activation="softmax", activation_dim=-2),
    "log_prob": on_logits(eaves.log_prob, classes_of, **OF_TOKENS),
    "log_prob of K": on_logits(eaves.log_prob, tokens_of, softcap=5.0, **OF_TOKENS),
    "log_prob, temperatures": on_logits(eaves.log_prob, classes_of, temperature=temperatures_of),
    "linear_log_prob": on_head(eaves.linear_log_prob, classes_of, "bias", **OF_TOKENS),
    "linear_log_prob of K": on_head(eaves.linear_log_prob, tokens_of, "bias", **OF_TOKENS),
    "linear_log_prob, temperatures": on_head(eaves.linear_log_prob, tokens_of, "bias", temperature=temperatures_of),
}
IN_PLACE: dict[str, Call] = {
    f"{name} in place": on_logits(function, target, inplace_backward=True, **options)
    for name, function, target, options in [
        ("log_prob", eaves.log_prob, classes_of, {}),
        ("log_prob of K", eaves.log_prob, tokens_of, {}),
    ]
}
for reduction in REDUCTIONS:
    for kind, target, options in [
        ("", classes_of, {}),
        (" with outputs", classes_of, OUTPUTS),
        (" weighted", classes_of, {"weight": weights_of, "label_smoothing": 0.1, "row_weight": temperatures_of}),
        (" soft", probabilities_of, {"z_loss": 0.1}),
    ]:
        options = {"reduction": reduction, **options}
        CALLS[f"cross_entropy {reduction}{kind}"] = on_logits(eaves.cross_entropy, target, **options)
        for algorithm in ALGORITHMS:
            CALLS[f"linear_cross_entropy {algorithm} {reduction}{kind}"] = on_head(
                eaves.linear_cross_entropy, target, "linear_bias", algorithm=algorithm, **options
            )
    IN_PLACE[f"cross_entropy {reduction} in place"] = on_logits(
        eaves.cross_entropy, classes_of, reduction=reduction, inplace_backward=True
    )
    for divergence in DIVERGENCES:
        CALLS[f"linear_kl_div {divergence} {reduction}"] = partial(kl_div, divergence=divergence, reduction=reduction)

# Which of x, head and bias require a gradient: all; x alone (a frozen head); the head alone (a frozen body).
WANTED = ((True, True, True), (True, False, False), (False, True, False))
# With float16 the gradients are computed in the backward, never with the loss.
DTYPES = (torch.float32, torch.float16)


def leaves_of(wanted: Sequence[bool], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    torch.manual_seed(3)
    tensors = [random_tensor(shape, dtype, device) for shape in ((ROWS, FEATURES), (CLASSES, FEATURES), (CLASSES,))]
    return [tensor.requires_grad_(is_wanted) for tensor, is_wanted in zip(tensors, wanted, strict=True)]


def results(call: Call, leaves: Sequence[Tensor], count: int = 1) -> list[list[Any]]:
    """Returns the results of the call and the gradients of `count` backwards over its graph."""
    torch.manual_seed(5)  # for random tensors that the call itself draws
    outputs = [tensor for tensor in tree_leaves(call(*leaves)) if isinstance(tensor, Tensor)]
    followed = [tensor for tensor in outputs if tensor.requires_grad]
    upstream = [torch.linspace(0.5, 2, t.numel(), device=t.device).view(t.shape).to(t) for t in followed]
    found: list[list[Any]] = [[tensor.detach() for tensor in outputs]]
    for index in range(count):
        torch.autograd.backward(followed, upstream, retain_graph=index + 1 < count)
        found.append([leaf.grad for leaf in leaves])
        for leaf in leaves:
            leaf.grad = None
    return found


def assert_same_bits(
    actual: list[list[Any]], expected: list[list[Any]], what: str, but_for_order: bool = False
) -> None:
    """`but_for_order`: allows the differences of another order of summation."""
    for a, e in zip(actual, expected, strict=True):
        for ours, theirs in zip(a, e, strict=True):
            assert (ours is None) == (theirs is None), what
            if ours is not None and but_for_order:
                torch.testing.assert_close(ours, theirs, msg=lambda text: f"{what}: {text}")
            elif ours is not None:
                assert torch.equal(ours, theirs), f"{what}: {ours}, expected {theirs}"


def for_each_case(device: torch.device) -> Iterator[tuple[str, Sequence[bool], torch.dtype]]:
    for dtype in DTYPES:
        for wanted in WANTED:
            yield f"{dtype}, of input, head and bias gradients of {wanted}", wanted, dtype


@each("name", (*CALLS, *IN_PLACE))
@each("use_reentrant", (False, True))
def test_in_a_checkpoint(name: str, use_reentrant: bool, any_device: torch.device) -> None:
    call = (CALLS | IN_PLACE)[name]
    for what, wanted, dtype in for_each_case(any_device):
        expected = results(call, leaves_of(wanted, dtype, any_device))
        # The reentrant checkpoint runs its first forward under no_grad, so its results are compared with a call under
        # no_grad.
        if use_reentrant:
            torch.manual_seed(5)
            with torch.no_grad():
                outputs = tree_leaves(call(*leaves_of(wanted, dtype, any_device)))
            expected[0] = [tensor for tensor in outputs if isinstance(tensor, Tensor)]
        checkpointed = partial(checkpoint, call, use_reentrant=use_reentrant)
        assert_same_bits(results(checkpointed, leaves_of(wanted, dtype, any_device)), expected, what)


@contextmanager
def counted(most: int) -> Iterator[None]:
    """Counts how often each saved tensor is unpacked, and allows at most `most` times."""
    asked: list[int] = []

    def pack(tensor: Tensor) -> tuple[int, Tensor]:
        asked.append(0)
        return len(asked) - 1, tensor

    def unpack(packed: tuple[int, Tensor]) -> Tensor:
        asked[packed[0]] += 1
        return packed[1]

    with saved_tensors_hooks(pack, unpack):
        yield
    assert 0 < max(asked) <= most


@each("name", CALLS)
def test_a_backward_asks_for_each_saved_tensor_once(name: str, any_device: torch.device) -> None:
    for what, wanted, dtype in for_each_case(any_device):
        expected = results(CALLS[name], leaves_of(wanted, dtype, any_device), 2)
        with counted(most=2):
            actual = results(CALLS[name], leaves_of(wanted, dtype, any_device), 2)
        assert_same_bits(actual, expected, what)


@each("name", IN_PLACE)
def test_a_backward_in_place_asks_for_each_saved_tensor_once(name: str, any_device: torch.device) -> None:
    for what, wanted, dtype in for_each_case(any_device):
        expected = results(IN_PLACE[name], leaves_of(wanted, dtype, any_device))
        with counted(most=1):
            actual = results(IN_PLACE[name], leaves_of(wanted, dtype, any_device))
        assert_same_bits(actual, expected, what)


@each("name", (*CALLS, *IN_PLACE))
def test_with_saved_tensors_on_the_cpu(name: str, any_device: torch.device) -> None:
    call = (CALLS | IN_PLACE)[name]
    for what, wanted, dtype in for_each_case(any_device):
        expected = results(call, leaves_of(wanted, dtype, any_device))
        with save_on_cpu(pin_memory=any_device.type == "cuda"):
            actual = results(call, leaves_of(wanted, dtype, any_device))
        # On a GPU a transposed head comes back contiguous, so PyTorch's product in front of the call adds up in another
        # order.
        assert_same_bits(actual, expected, what, but_for_order=any_device.type == "cuda")


POLICIES = {
    "products": lambda overload: overload in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default),
    "eaves": lambda overload: overload.namespace == "eaves",
}


@each("policy", POLICIES)
@each("name", CALLS)
def test_in_a_selective_checkpoint(name: str, policy: str, any_device: torch.device) -> None:
    def which(ctx: object, overload: Any, *args: object, **kwargs: object) -> CheckpointPolicy:
        is_kept = POLICIES[policy](overload)
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, which)
    for what, wanted, dtype in for_each_case(any_device):
        expected = results(CALLS[name], leaves_of(wanted, dtype, any_device))
        selective = partial(checkpoint, CALLS[name], use_reentrant=False, context_fn=contexts)
        assert_same_bits(results(selective, leaves_of(wanted, dtype, any_device)), expected, what)
