"""The operators of the extension called directly, and exported by torch.export: schemas, fake tensors, and derivatives,
which no call loses silently."""

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import eaves
from comparison import assert_agree
from operators import (
    Caller,
    Operator,
    assert_same,
    differentiable,
    each_operator,
    gradient,
    gradients_of,
    leaves,
    of_differentiable,
)

# opcheck scripts something inside of torch.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")


# --------------------------------------------------------------------------------------------------------- direct calls


@each_operator()
def test_every_operator_of_the_extension_passes_opcheck(op: Operator, device: torch.device) -> None:
    # Autograd is outside of the extension: these inputs need no gradient.
    utilities = ("test_schema", "test_autograd_registration", "test_faketensor")
    for overload, arguments in op.extension_calls(device):
        torch.library.opcheck(overload, arguments, test_utils=utilities)
    # Tracing takes a second a call, and one trace for each operator shows that it can be traced.
    for overload, arguments in {str(call[0]): call for call in op.extension_calls(device)}.values():
        torch.library.opcheck(overload, arguments, test_utils=("test_aot_dispatch_dynamic",))


def wants_gradient(arguments: Sequence[Any]) -> list[Any]:
    """The arguments, with requires_grad set on the tensors that can have a gradient."""
    return [
        value.detach().requires_grad_() if isinstance(value, Tensor) and value.is_floating_point() else value
        for value in arguments
    ]


# The arguments of the forward that have a derivative, also in a direct call.
DERIVATIVES = {
    "logsumexp": {"x"},
    "cross_entropy": {"logits"},
    "linear_cross_entropy": {"hidden", "head", "bias"},
    "lrpe_cosine": {"x", "theta"},
}


def derivatives(op: Operator, overload: Any) -> set[int]:
    """The places of the differentiable arguments; an operator without a derivative has none."""
    if overload._schema.name != f"eaves::{op.name}_forward":
        return set()
    return {index for index, each in enumerate(overload._schema.arguments) if each.name in DERIVATIVES[op.name]}


@each_operator()
def test_a_direct_call_that_would_lose_a_derivative_is_refused(op: Operator, any_device: torch.device) -> None:
    for overload, arguments in op.extension_calls(any_device):
        tracked = wants_gradient(arguments)
        if derivatives(op, overload) or not any(isinstance(each, Tensor) and each.requires_grad for each in tracked):
            continue
        with pytest.raises(NotImplementedError, match=rf"^{op.name}: .*derivative is lost.*eaves\.{op.name}$"):
            overload(*tracked)
        expected = overload(*copy.deepcopy(arguments))  # some operators write over arguments
        with torch.no_grad():
            actual = overload(*copy.deepcopy(tracked))
        assert_same(as_tuple(actual), as_tuple(expected))


@each_operator()
def test_each_tensor_whose_derivative_would_be_lost_is_enough(op: Operator, any_device: torch.device) -> None:
    for overload, arguments in {str(call[0]): call for call in op.extension_calls(any_device)}.values():
        for index, value in enumerate(arguments):
            if isinstance(value, Tensor) and value.is_floating_point():
                tracked = list(arguments)
                tracked[index] = value.detach().requires_grad_()
                if index not in derivatives(op, overload):
                    sentence = "derivative is lost|requires a gradient, which this operator does not compute"
                    with pytest.raises(NotImplementedError, match=sentence):
                        overload(*tracked)
                with torch.autograd.forward_ad.dual_level():
                    tracked[index] = torch.autograd.forward_ad.make_dual(value, torch.ones_like(value))
                    with pytest.raises(NotImplementedError, match="derivative is lost"), torch.no_grad():
                        overload(*tracked)


@each_operator()
def test_a_direct_call_of_a_forward_has_its_derivatives(op: Operator, device: torch.device) -> None:
    def in_float64(value: Any) -> Any:
        if isinstance(value, torch.dtype):
            return torch.float64
        return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value

    traced = set()
    for overload, arguments in op.extension_calls(device):
        places = sorted(index for index in derivatives(op, overload) if arguments[index] is not None)
        if not places or any(arguments[index].numel() == 0 for index in places):
            continue
        given = [in_float64(value) for value in arguments]

        def function(*wanted: Tensor, call: Any = overload, places: Any = places, given: Any = given) -> Any:
            tensors = dict(zip(places, wanted, strict=True))
            results = as_tuple(call(*[tensors.get(index, value) for index, value in enumerate(given)]))
            return tuple(result for result in results if result.requires_grad)

        wanted = [given[index].detach().clone().requires_grad_() for index in places]
        assert torch.autograd.gradcheck(function, wanted, fast_mode=True)
        # In the dtypes of the call: results with a derivative equal results without.
        tracked = [value.detach().requires_grad_() if i in places else value for i, value in enumerate(arguments)]
        for actual, expected in zip(as_tuple(overload(*tracked)), as_tuple(overload(*arguments)), strict=True):
            assert_agree(actual, expected)
        torch.library.opcheck(overload, tuple(tracked), test_utils=("test_autograd_registration", "test_faketensor"))
        if overload not in traced:  # it takes a second
            traced.add(overload)
            torch.library.opcheck(overload, tuple(tracked), test_utils=("test_aot_dispatch_dynamic",))
    assert traced


def as_tuple(result: Tensor | Sequence[Tensor] | None) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else tuple(result or ())


@each_operator()
def test_tensors_of_two_devices_are_refused_and_not_read(op: Operator, device: torch.device) -> None:
    others = [torch.device("meta")] + ([torch.device("cpu")] if device.type == "cuda" else [])
    inputs = op.inputs(3, device, torch.float32)
    for other in others:
        for index in range(len(inputs) if len(inputs) > 1 else 0):
            moved = [each.to(other) if i == index else each for i, each in enumerate(inputs)]
            for given in (moved, leaves(op, moved)):
                said = rf"^{op.name}: \w+ is on [\w:]+, expected [\w:]+ \(as \w+\)(; on meta|$)"
                with pytest.raises(ValueError, match=said):
                    op.function(*given)
    # The same in direct calls of the extension.
    for overload, arguments in op.extension_calls(device):
        tensors = [i for i, value in enumerate(arguments) if isinstance(value, Tensor)]
        for index in tensors if len(tensors) > 1 else []:
            moved = [each.to("meta") if i == index else each for i, each in enumerate(arguments)]
            with torch.no_grad(), pytest.raises(ValueError, match=r"is on [\w:]+, expected [\w:]+"):
                overload(*moved)


# ---------------------------------------------------------------------------------------------------- exported programs


@each_operator()
def test_it_can_be_exported(op: Operator, any_device: torch.device) -> None:
    inputs = op.inputs(4, any_device, torch.float32)
    batch = torch.export.Dim("batch")
    exported = torch.export.export(
        Caller(lambda *tensors: op.function(*tensors) + 1), inputs, dynamic_shapes=(tuple({0: batch} for _ in inputs),)
    )
    others = op.inputs(7, any_device, torch.float32)
    assert_same([exported.module()(*others)], [op.function(*others) + 1])


@each_operator()
@pytest.mark.parametrize(("strict", "wants_gradients"), [(False, True), (True, False)])
def test_an_exported_program_has_the_gradients_of_the_call(
    op: Operator, strict: bool, wants_gradients: bool, any_device: torch.device, fresh_compiler: None
) -> None:
    inputs = op.inputs(4, any_device, torch.float32)
    given = leaves(op, inputs)
    exported = torch.export.export(Caller(op.function), given if wants_gradients else inputs, strict=strict)
    compiled = torch.compile(exported.module(), backend="aot_eager", fullgraph=True)
    upstream = torch.randn_like(op.function(*inputs))
    expected = gradient(op, inputs, upstream)
    for program in (exported.module(), exported.run_decompositions().module(), compiled):
        assert_same([program(*inputs)], [op.function(*inputs)])
        with torch.no_grad():
            assert_same([program(*given)], [op.function(*inputs)])
        for actual, wanted in zip(gradients_of(op, program, inputs, upstream), expected, strict=True):
            assert_agree(actual, wanted)


@each_operator()
def test_an_exported_program_has_no_other_derivatives_than_the_call(op: Operator, any_device: torch.device) -> None:
    inputs = op.inputs(4, any_device, torch.float32)
    program = torch.export.export(Caller(op.function), inputs).module()
    given = leaves(op, inputs)
    wanted = differentiable(op, given)
    gradients = [
        torch.autograd.grad(function(*given).square().sum(), wanted, create_graph=True)
        for function in (op.function, program)
    ]
    if op.has_second_derivative:
        second = [torch.autograd.grad(sum(each.sin().sum() for each in first), wanted) for first in gradients]
        for expected, actual in zip(*second, strict=True):
            assert_agree(actual, expected)
    else:
        with pytest.raises(NotImplementedError, match=rf"^{op.name}: there is no second derivative"):
            torch.autograd.grad(gradients[1][0].sum(), wanted)
    with pytest.raises(NotImplementedError, match=rf"^{op.name}: its derivative is lost .* around a program"):
        torch.func.grad(lambda *tensors: program(*tensors).sum(), op.differentiable)(*inputs)
    with torch.autograd.forward_ad.dual_level():
        dual = [torch.autograd.forward_ad.make_dual(each, torch.ones_like(each)) for each in wanted]
        with pytest.raises(NotImplementedError, match=rf"^{op.name}: its derivative is lost .* around a program"):
            of_differentiable(op, program, inputs)(*dual)


def test_a_model_trains_as_an_exported_program(any_device: torch.device) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.theta = torch.nn.Parameter(torch.rand(2, 2))
            self.body, self.head = torch.nn.Linear(8, 8), torch.nn.Linear(8, 11)
            self.frozen = torch.nn.Parameter(torch.randn(11, 8), requires_grad=False)

        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            encoded = eaves.lrpe_cosine(x.view(1, 6, 2, 2), self.theta, activation="softmax", activation_dim=-2)
            hidden = self.body(encoded.reshape(6, 8))
            of_head = eaves.linear_cross_entropy(
                hidden, self.head.weight, target, linear_bias=self.head.bias, algorithm="speed", outputs="entropy"
            )
            logits = self.head(hidden)
            of_logits = eaves.cross_entropy(logits, target, z_loss=0.1, outputs="lse")
            assert of_head.entropy is not None and of_logits.lse is not None
            frozen = eaves.linear_log_prob(hidden, self.frozen, target, outputs="entropy", temperature=2.0)
            assert frozen.entropy is not None
            numbers = (of_head.loss, of_head.entropy.mean(), of_logits.loss, of_logits.lse.square().mean(),
                       frozen.log_prob.sum(), frozen.entropy.mean(), eaves.logsumexp(hidden, -1).mean())  # fmt: skip
            return torch.stack(numbers).sin().sum()

    x = torch.randn(6, 4, device=any_device)
    target = torch.tensor([3, -100, 0, 10, 3, 7], device=any_device)
    model = Model().to(any_device)
    for is_decomposed in (False, True):
        exported = torch.export.export(copy.deepcopy(model), (x, target))
        program = exported.run_decompositions().module() if is_decomposed else exported.module()
        trained = []
        for each in (copy.deepcopy(model), program):
            optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
            for _ in range(3):
                optimizer.zero_grad()
                loss = each(x, target)
                loss.backward()
                optimizer.step()
            trained.append({"loss": loss.detach(), **{k: v.detach() for k, v in each.named_parameters()}})
        assert trained[0].keys() == trained[1].keys()
        for name, expected in trained[0].items():
            assert_agree(trained[1][name], expected)
