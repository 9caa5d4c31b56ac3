"""Options that change from call to call under torch.compile: schedules of a coefficient, the tokens of a batch. Each
result is right, no graph breaks, and a call compiles for the first value and once more, or once with dynamic=True, for
any number of values.
"""

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import eaves
from cross_entropy_test import each

ROWS, FEATURES, CLASSES = 6, 8, 50

LOGITS = torch.randn(ROWS, CLASSES, generator=torch.Generator().manual_seed(1))
HIDDEN = torch.randn(ROWS, FEATURES, generator=torch.Generator().manual_seed(2))
HEAD = torch.randn(CLASSES, FEATURES, generator=torch.Generator().manual_seed(3))
TARGET = torch.tensor([0, 49, 7, 8, 9, 10])
WEIGHT = torch.linspace(0.5, 2, CLASSES)


def of_logits(x: Tensor, head: Tensor, target: Tensor, weight: Tensor, **options: Any) -> Tensor:
    return eaves.cross_entropy(x @ head.T, target, weight, **options)


def of_hidden(x: Tensor, head: Tensor, target: Tensor, weight: Tensor, **options: Any) -> Tensor:
    return eaves.linear_cross_entropy(x, head, target, weight=weight, **options)


def recomputed(x: Tensor, head: Tensor, target: Tensor, weight: Tensor, **options: Any) -> Tensor:
    return eaves.linear_cross_entropy(x, head, target, weight=weight, algorithm="recompute", **options)


def encoded(x: Tensor, head: Tensor, target: Tensor, weight: Tensor, **options: Any) -> Tensor:
    return eaves.lrpe_cosine(x[None, :, None], head[:1], **options)


LOSSES = (of_logits, of_hidden, recomputed)

# The keyword and its values; none is 0, because 0 means that the option is absent. One function each:
# test_all_numbers_at_once has all three.
NUMBERS = [
    ("normalizer", (64.5, 60.25, 59.0, 58.0), of_logits, None),
    ("normalizer", (64, 60, 59, 58), of_hidden, True),
    ("z_loss", (1e-4, 2e-4, 3e-4, 4e-4), recomputed, None),
    ("z_loss", (2, 3, 4, 5), of_logits, True),
    ("scale", (1.5, 2.5, 2.25, 0.125), of_hidden, None),
    ("scale", (2, 3, 4, 5), recomputed, True),
    ("softcap", (30.5, 20.5, 10.5, 5.5), of_logits, None),
    ("softcap", (30, 20, 10, 5), of_hidden, None),
    ("label_smoothing", (0.1, 0.2, 0.15, 0.3), recomputed, None),
    ("ignore_index", (7, 8, 9, 10), of_logits, None),
    ("ignore_index", (7, 8, 9, 10), of_hidden, True),
    ("ignore_index", (7, 8, 9, 10), recomputed, None),
    ("workspace_bytes", (1 << 20, 1 << 21, 1 << 22, 1 << 23), of_hidden, None),
    ("offset", (2, 3, 5, 4), encoded, None),
    ("extra_tokens", (2, 3, 5, 4), encoded, True),
]


def gradients(function: Callable[..., Tensor], device: torch.device, **options: Any) -> tuple[Tensor, ...]:
    """Returns the loss and the gradients of x and head."""
    x, head = (tensor.to(device).requires_grad_() for tensor in (HIDDEN.clone(), HEAD.clone()))
    loss = function(x, head, TARGET.to(device), WEIGHT.to(device), **options)
    return loss.detach(), *torch.autograd.grad(loss.sum(), (x, head))


def check(
    function: Callable[..., Tensor],
    name: str,
    values: tuple[float, ...],
    device: torch.device,
    most: int,
    dynamic: bool | None = None,
    backend: str = "aot_eager",
) -> None:
    """Checks that each value gives the result of the eager call, with at most so many compilations."""
    counter = CompileCounterWithBackend(backend)

    def compiled(*tensors: Tensor, **options: Any) -> Tensor:
        return traced(*tensors, options[name])

    traced = torch.compile(
        lambda *arguments: function(*arguments[:-1], **{name: arguments[-1]}),
        fullgraph=True, dynamic=dynamic, backend=counter,
    )  # fmt: skip
    for value in values:
        for actual, expected in zip(
            gradients(compiled, device, **{name: value}), gradients(function, device, **{name: value}), strict=True
        ):
            torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-7)
    assert counter.frame_count <= most, f"{counter.frame_count} compilations for {values}"


@pytest.mark.parametrize(("name", "values", "function", "dynamic"), NUMBERS)
def test_a_number_that_changes(
    name: str,
    values: tuple[float, ...],
    function: Callable[..., Tensor],
    dynamic: bool | None,
    any_device: torch.device,
    fresh_compiler: None,
) -> None:
    check(function, name, values, any_device, 1 if dynamic else 2, dynamic)


@pytest.mark.parametrize(
    ("function", "name", "values"),
    [
        (of_logits, "z_loss", (0.0, 1e-4, 2e-4, 3e-4, 4e-4, 0.0, 5e-4)),
        (of_hidden, "label_smoothing", (0, 0.1, 0.2, 0.3, 0, 0.4)),
    ],
)
def test_a_schedule_that_starts_at_zero(
    function: Callable[..., Tensor],
    name: str,
    values: tuple[float, ...],
    any_device: torch.device,
    fresh_compiler: None,
) -> None:
    # An absent option has its own graph.
    check(function, name, values, any_device, 3)


def test_the_default_backend_reads_the_number_of_each_call(any_device: torch.device, fresh_compiler: None) -> None:
    check(of_hidden, "scale", (1.5, 2.5, 2.25, 0.125), any_device, 2, backend="inductor")


@each("function", LOSSES[:2])
def test_under_vmap_each_number_is_right(
    function: Callable[..., Tensor], any_device: torch.device, fresh_compiler: None
) -> None:
    tensors = [each.to(any_device) for each in (HIDDEN, HEAD, TARGET, WEIGHT)]
    x, target = torch.stack([tensors[0], tensors[0] * 2]), torch.stack([tensors[2]] * 2)

    def of_batch(z_loss: float) -> Tensor:
        return torch.vmap(lambda x, t: function(x, tensors[1], t, tensors[3], z_loss=z_loss))(x, target)

    compiled = torch.compile(of_batch, fullgraph=True, backend="aot_eager")
    for number in (0.1, 0.2, 0.3):
        torch.testing.assert_close(compiled(number), of_batch(number), rtol=1e-6, atol=1e-7)


@each("name", ["normalizer", "z_loss", "scale", "softcap", "label_smoothing"])
def test_numbers_of_numpy_are_numbers(name: str, any_device: torch.device) -> None:
    for function in LOSSES:
        expected = gradients(function, any_device, **{name: 0.5})
        for kind in (numpy.float64, numpy.float32, numpy.float16):
            for actual, wanted in zip(gradients(function, any_device, **{name: kind(0.5)}), expected, strict=True):
                assert torch.equal(actual, wanted)


@pytest.mark.parametrize(("function", "name"), [(of_logits, "z_loss"), (of_hidden, "normalizer")])
def test_numbers_of_numpy_are_numbers_when_compiled(
    function: Callable[..., Tensor], name: str, any_device: torch.device, fresh_compiler: None
) -> None:
    check(function, name, tuple(map(numpy.float64, (0.5, 0.25, 0.75))), any_device, 2)


def test_all_numbers_at_once(any_device: torch.device, fresh_compiler: None) -> None:
    counter = CompileCounterWithBackend("aot_eager")

    def options(step: int) -> dict[str, Any]:
        return {
            "scale": 1 + step / 8, "softcap": 30 - step, "z_loss": 1e-4 * step, "label_smoothing": step / 16,
            "normalizer": 64 + step,
        }  # fmt: skip

    for function in LOSSES:
        compiled = torch.compile(function, fullgraph=True, backend=counter)
        before = counter.frame_count
        for step in range(1, 6):
            for actual, expected in zip(
                gradients(compiled, any_device, **options(step)),
                gradients(function, any_device, **options(step)),
                strict=True,
            ):
                torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-7)
        assert counter.frame_count - before <= 2


@pytest.mark.parametrize(("function", "strict"), [(of_logits, True), (of_hidden, False), (recomputed, False)])
def test_an_exported_program_has_the_numbers_of_each_call(
    function: Callable[..., Tensor], strict: bool, any_device: torch.device, fresh_compiler: None
) -> None:
    class Module(torch.nn.Module):
        def forward(self, x: Tensor, head: Tensor, target: Tensor, weight: Tensor) -> Tensor:
            rows = x.shape[0]
            return function(x, head, target, weight, scale=rows / 8, z_loss=rows / 64, normalizer=rows)

    tensors = [each.to(any_device) for each in (HIDDEN, HEAD, TARGET, WEIGHT)]
    rows = torch.export.Dim("rows", min=2, max=64)
    shapes = ({0: rows}, None, {0: rows}, None)
    program = torch.export.export(Module(), tuple(tensors), dynamic_shapes=shapes, strict=strict).module()
    for count in (6, 4, 3):
        given = [tensors[0][:count], tensors[1], tensors[2][:count], tensors[3]]
        torch.testing.assert_close(program(*given), Module()(*given), rtol=1e-6, atol=1e-7)
        wanted = [given[0].requires_grad_(), given[1].requires_grad_()]
        found = [torch.autograd.grad(each(*given).sum().sin(), wanted) for each in (program, Module())]
        for actual, expected in zip(*found, strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-7)
        for tensor in wanted:
            tensor.requires_grad_(False)


def test_a_bad_number_is_refused_in_words(any_device: torch.device, fresh_compiler: None) -> None:
    compiled = torch.compile(of_logits, fullgraph=True, backend="aot_eager")
    for number in (0.1, 0.2):
        gradients(compiled, any_device, label_smoothing=number)
    with pytest.raises(Exception, match=r"label_smoothing is .*expected 0 to 1"):
        gradients(compiled, any_device, label_smoothing=1.5)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_cuda_graph_does_not_keep_the_number_of_the_first_call(
    mode: str, cuda: torch.device, fresh_compiler: None
) -> None:
    for function in LOSSES:
        compiled = torch.compile(lambda *a, f=function: f(*a[:-1], z_loss=a[-1]), fullgraph=True, mode=mode)
        tensors = [each.to(cuda) for each in (HIDDEN, HEAD, TARGET, WEIGHT)]
        for step in range(1, 8):  # from the third call on, a graph is replayed
            number = 1e-2 * step
            actual = compiled(*tensors, number).clone()
            torch.testing.assert_close(actual, function(*tensors, z_loss=number), rtol=1e-6, atol=1e-7)
