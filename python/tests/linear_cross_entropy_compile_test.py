"""eaves.linear_cross_entropy under torch.compile, beyond the tests of library_test.py for every operator: the gradient
of the head with each algorithm, repeated backwards, and autocast."""

from typing import Any

import pytest
import torch
import torch._functorch.config
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import eaves
from comparison import assert_agree
from cross_entropy_test import each
from linear_cross_entropy_gradient_test import ALGORITHMS, leaves
from linear_cross_entropy_test import problem


# torch needs this setting to run a second backward of a compiled graph.
@torch._functorch.config.patch(donated_buffer=False)
@pytest.mark.parametrize(
    ("algorithm", "reduction"),
    [("speed", "mean"), ("memory", "mean"), ("recompute", "mean"), ("auto", "mean"), ("speed", "none")],
)
def test_all_gradients_are_those_of_the_eager_call(
    algorithm: str, reduction: str, any_device: torch.device, fresh_compiler: None
) -> None:

    def function(x: Tensor, head: Tensor, target: Tensor, bias: Tensor) -> Tensor:
        loss = eaves.linear_cross_entropy(
            x.sin(), head, target, linear_bias=bias, algorithm=algorithm, reduction=reduction
        )
        return loss * 3

    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (9, 20):
        x, head, target, bias = problem((rows, 24), 33, torch.float32, any_device)
        results = []
        for f in (function, compiled):
            given = leaves(x, head, bias)
            loss = f(given[0], given[1], target, given[2])
            first = torch.autograd.grad(loss.sum(), given, retain_graph=True)
            second = torch.autograd.grad(loss.sum(), given)
            assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True)), "scaled twice"
            results.append((loss.detach(), *first))
        for actual, expected in zip(*results, strict=True):
            assert_agree(actual, expected)


def test_outputs_with_a_gradient_are_compiled(any_device: torch.device, fresh_compiler: None) -> None:
    def function(x: Tensor, head: Tensor, target: Tensor) -> Tensor:
        out: Any = eaves.linear_cross_entropy(x, head, target, outputs=("lse", "entropy"), algorithm="speed")
        return out.loss + out.lse.sum() + 2 * out.entropy.sum()

    x, head, target, _ = problem((9, 24), 33, torch.float32, any_device)
    results = []
    for f in (function, torch.compile(function, fullgraph=True, backend="aot_eager")):
        given = leaves(x, head)
        results.append(torch.autograd.grad(f(*given, target), given))
    for actual, expected in zip(*results, strict=True):
        assert_agree(actual, expected)


def test_without_a_gradient_only_the_loss_is_compiled(any_device: torch.device, fresh_compiler: None) -> None:
    x, head, target, _ = problem((9, 24), 33, torch.float32, any_device)
    names: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Any:
        names.extend(str(node.target) for node in graph.graph.nodes if "eaves" in str(node.target))
        return graph.forward

    compiled = torch.compile(eaves.linear_cross_entropy, fullgraph=True, backend=backend)
    assert torch.equal(compiled(x, head, target), eaves.linear_cross_entropy(x, head, target))
    assert names == ["eaves.linear_cross_entropy_forward.default"]


def test_autocast_is_compiled(any_device: torch.device, fresh_compiler: None) -> None:
    def function(x: Tensor, head: Tensor, target: Tensor) -> Tensor:
        with torch.autocast(any_device.type, torch.bfloat16):
            return eaves.linear_cross_entropy(x, head, target)

    x, head, target, _ = problem((9, 24), 33, torch.float32, any_device)
    results = []
    for f in (function, torch.compile(function, fullgraph=True, backend="aot_eager")):
        given = leaves(x, head)
        loss = f(*given, target)
        results.append((loss.detach(), *torch.autograd.grad(loss, given)))
    for actual, expected in zip(*results, strict=True):
        assert actual.dtype == torch.float32 and torch.equal(actual, expected)


X, W, LABELS = torch.randn(6, 8), torch.randn(11, 8), torch.tensor([1, 2, 3, 4, 5, 6])
OUTSIDE_OF_A_GRAPH = {
    "linear_kl_div": lambda x, w: eaves.linear_kl_div(x, w, X.to(x), W.to(x)),
    "log_prob": lambda x, w: eaves.log_prob(x @ w.T, LABELS.to(x.device), temperature=X.to(x).abs()[:, 0]),
    "linear_log_prob": lambda x, w: eaves.linear_log_prob(x, w, LABELS.to(x.device)[:, None]),
    "linear_cross_entropy": lambda x, w: eaves.linear_cross_entropy(
        x, w, LABELS.to(x.device), grad_weight_out=torch.zeros_like(w)
    ),
}


@each("op", OUTSIDE_OF_A_GRAPH)
def test_the_error_of_fullgraph_says_which_call_is_not_compiled_and_why(
    op: str, any_device: torch.device, fresh_compiler: None
) -> None:
    reasons = {"linear_kl_div": "", "linear_cross_entropy": "grad_weight_out is written in the backward, and "}
    reason = reasons.get(op, "with several tokens or a temperature for each row ")
    call, given = OUTSIDE_OF_A_GRAPH[op], leaves(X.to(any_device), W.to(any_device))
    with pytest.raises(Exception) as caught:
        torch.compile(call, fullgraph=True, backend="aot_eager")(*given)
    first_lines = "\n".join(str(caught.value).splitlines()[:2])
    assert f"{op}: {reason}this operator runs outside of the graph" in first_lines, str(caught.value)
    # Without fullgraph=True the caller is compiled around the call.
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda x, w: call(x.sin(), w).cos().sum() * 2, backend=counter)
    found = compiled(*given)
    assert_agree(found, call(given[0].sin(), given[1]).cos().sum() * 2)
    names = [str(node.target) for graph in counter.graphs for node in graph.graph.nodes]
    assert "sin" in names and "cos" in names, names


@each("algorithm", ALGORITHMS)
def test_grad_weight_out_is_written_where_the_caller_is_compiled(
    algorithm: str, any_device: torch.device, fresh_compiler: None
) -> None:
    def function(x: Tensor, head: Tensor, target: Tensor, out: Tensor) -> Tensor:
        return eaves.linear_cross_entropy(x.sin(), head, target, grad_weight_out=out, algorithm=algorithm) * 3

    x, head, target, _ = problem((9, 24), 33, torch.float32, any_device)
    results = []
    for f in (function, torch.compile(function, backend="aot_eager")):
        out = torch.zeros_like(head)
        given = leaves(x, head)
        f(*given, target, out).backward()
        assert given[1].grad is None
        assert out.norm() > 0
        results.append((out, given[0].grad))
    for actual, expected in zip(*results, strict=True):
        assert_agree(actual, expected)
