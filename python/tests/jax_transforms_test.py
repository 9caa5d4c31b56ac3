"""Each operator of eaves.jax under JAX's transforms: jit, vmap, checkpoint, scan, donation, export. Also the cost of
importing and calling it."""

import functools
import os
import subprocess
import sys
import timeit
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from jax_cross_entropy_test import labels_of
from layouts import random_tensor
from lrpe_cosine_cases import angles

jax = pytest.importorskip("jax", reason="JAX is not installed")
import jax.numpy as jnp  # noqa: E402

import eaves.jax  # noqa: E402
from eaves.jax import _library  # noqa: E402
from jax_arrays import array_of, assert_same_bits  # noqa: E402


class Operator(NamedTuple):
    """A function of arrays, each with rows on its first axis, and of parameters, which all rows share."""

    name: str
    function: Callable[..., Any]
    arrays: Callable[[int], tuple[Any, ...]]
    parameters: tuple[Any, ...] = ()
    is_of_xla: bool = False  # XLA's bits differ between programs

    def assert_same(self, actual: Any, expected: Any) -> None:
        if self.is_of_xla:
            jax.tree.map(assert_close, actual, expected)
        else:
            assert_same_bits(actual, expected)

    def step(self, *arrays: Any) -> Any:
        """The result, and the gradients of a number computed from it."""
        differentiable = tuple(i for i, each in enumerate(arrays) if jnp.issubdtype(each.dtype, jnp.floating))

        def number(*arrays: Any) -> tuple[Any, Any]:
            out = self.function(*arrays)
            return (out.astype(jnp.float32) ** 2).sum(), out

        (_, out), grads = jax.value_and_grad(number, differentiable, has_aux=True)(*arrays)
        return out, grads


HEAD = array_of(random_tensor((37, 24), torch.float32))
TEACHER = HEAD[::-1, :16]
THETA = array_of(angles(2, 4))


def _logits(rows: int) -> tuple[Any, ...]:
    return array_of(random_tensor((rows, 3, 37), torch.float32)), array_of(labels_of((rows, 3)))


def _hidden(rows: int) -> tuple[Any, ...]:
    return array_of(random_tensor((rows, 3, 24), torch.float32)), array_of(labels_of((rows, 3)))


def _x(rows: int) -> tuple[Any, ...]:
    return (array_of(random_tensor((rows, 5, 2, 8), torch.float32)),)


def _divergence(x: Any, head: Any, **options: Any) -> Any:
    return eaves.jax.linear_kl_div(x, head, jax.lax.stop_gradient(x[..., :16]), TEACHER, **options)


def _per_row(x: Any, labels: Any, head: Any) -> Any:
    return eaves.jax.linear_cross_entropy(x, head, labels, reduction="none")


OPERATORS = [
    Operator("logsumexp", lambda x: eaves.jax.logsumexp(x, -1), lambda rows: _logits(rows)[:1]),
    Operator("cross_entropy", eaves.jax.cross_entropy, _logits),
    Operator("cross_entropy-none", lambda z, t: eaves.jax.cross_entropy(z, t, reduction="none"), _logits),
    Operator(
        "linear_cross_entropy", lambda x, t, w: eaves.jax.linear_cross_entropy(x, w, t), _hidden, parameters=(HEAD,)
    ),
    Operator("linear_cross_entropy-none", _per_row, _hidden, parameters=(HEAD,)),
    Operator("linear_log_prob", lambda x, t, w: eaves.jax.linear_log_prob(x, w, t), _hidden, parameters=(HEAD,)),
    Operator("linear_kl_div", _divergence, lambda rows: _hidden(rows)[:1], (HEAD,), is_of_xla=True),
    Operator(
        "linear_kl_div-none", lambda x, w: _divergence(x, w, reduction="none", divergence="jsd", workspace_bytes=2000),
        lambda rows: _hidden(rows)[:1], (HEAD,), is_of_xla=True,
    ),
    Operator(
        "lrpe_cosine", lambda x, t: eaves.jax.lrpe_cosine(x, t, activation="silu"), _x, parameters=(THETA,)
    ),
]  # fmt: skip

each_operator = pytest.mark.parametrize("op", OPERATORS, ids=lambda op: op.name)


def assert_close(actual: Any, expected: Any) -> None:
    """Asserts that two results are close. With another number of rows a product may sum in another order, so each
    result may be off by 2e-6 of the largest (docs/numerics.md)."""
    np.testing.assert_allclose(actual, expected, rtol=0, atol=4e-6 * np.abs(expected).max())


def inputs(op: Operator, rows: int = 8) -> tuple[Any, ...]:
    return (*op.arrays(rows), *op.parameters)


@each_operator
def test_jit_and_a_second_run_give_the_same_bits(jax_device: Any, op: Operator) -> None:
    arrays = inputs(op)
    step = jax.jit(op.step)
    assert_same_bits(step(*arrays), step(*arrays))
    op.assert_same(step(*arrays)[0], op.function(*arrays))


def test_without_jit_the_bits_are_the_same() -> None:
    x = jnp.arange(12.0).reshape(3, 4)
    with_gradient = jax.value_and_grad(eaves.jax.logsumexp)
    value, grad = jax.jit(with_gradient)(x)
    with jax.disable_jit():
        value_without, grad_without = with_gradient(x)
    assert value_without == value and (grad_without == grad).all()


@each_operator
def test_vmap_is_a_loop_over_samples(jax_device: Any, op: Operator) -> None:
    arrays = op.arrays(6)
    samples = [array.reshape(2, 3, *array.shape[1:]) for array in arrays]
    in_axes = (0,) * len(arrays) + (None,) * len(op.parameters)
    batched = jax.jit(jax.vmap(op.step, in_axes))(*samples, *op.parameters)
    for index in range(2):
        one = op.step(*(array[index] for array in samples), *op.parameters)
        jax.tree.map(lambda whole, part, index=index: assert_close(whole[index], part), batched, one)


@each_operator
def test_vmap_over_another_axis_and_over_parameters(jax_device: Any, op: Operator) -> None:
    arrays = op.arrays(3)
    samples = [jnp.stack([array, array], 1) for array in arrays]
    parameters = [jnp.stack([each, 2 * each]) for each in op.parameters]
    in_axes = (1,) * len(arrays) + (0,) * len(parameters)
    batched = jax.vmap(op.step, in_axes)(*samples, *parameters)
    for index in range(2):
        one = op.step(*arrays, *(each[index] for each in parameters))
        jax.tree.map(lambda whole, part, index=index: assert_close(whole[index], part), batched, one)


@each_operator
def test_vmap_of_vmap(jax_device: Any, op: Operator) -> None:
    arrays = op.arrays(8)
    samples = [array.reshape(2, 2, 2, *array.shape[1:]) for array in arrays]
    in_axes = (0,) * len(arrays) + (None,) * len(op.parameters)
    batched = jax.vmap(jax.vmap(op.function, in_axes), in_axes)(*samples, *op.parameters)
    one = op.function(*(array[1, 0] for array in samples), *op.parameters)
    assert_close(batched[1, 0], one)


@each_operator
def test_checkpoint_gives_the_same_bits(jax_device: Any, op: Operator) -> None:
    arrays = inputs(op)
    again = op._replace(function=jax.checkpoint(op.function))
    assert_same_bits(jax.jit(again.step)(*arrays), jax.jit(op.step)(*arrays))


@each_operator
def test_scan_gives_the_bits_of_a_loop(jax_device: Any, op: Operator) -> None:
    arrays = op.arrays(6)
    samples = [array.reshape(3, 2, *array.shape[1:]) for array in arrays]
    step = jax.jit(op.step)
    scanned = jax.jit(lambda *arrays: jax.lax.scan(lambda c, each: (c, op.step(*each, *op.parameters)), (), arrays)[1])(
        *samples
    )
    for index in range(3):
        one = step(*(array[index] for array in samples), *op.parameters)
        assert_same_bits(jax.tree.map(lambda whole, index=index: whole[index], scanned), one)


@each_operator
def test_a_program_that_xla_records_gives_the_same_bits_in_each_run(op: Operator) -> None:
    try:
        found = jax.devices("cuda")[0]
    except RuntimeError:
        pytest.skip("no GPU for JAX")
    with jax.default_device(found):
        arrays = inputs(op)
        expected = jax.jit(op.step)(*arrays)

        def several(*arrays: Any) -> list[Any]:
            """Steps in a fixed order, because the input of each depends on the step before."""
            outs = []
            for _ in range(4):
                out = op.step(*arrays)
                outs.append(out)
                zero = jnp.where(jnp.isfinite(out[1][0]), 0.0, 0.0).astype(arrays[0].dtype)
                arrays = (arrays[0] + zero, *arrays[1:])
            return outs

        program = jax.jit(several).lower(*arrays).compile({"xla_gpu_graph_min_graph_size": 1})
        for _ in range(4):
            for each in program(*arrays):
                assert_same_bits(each, expected)


@each_operator
def test_donated_arrays_may_be_overwritten(jax_device: Any, op: Operator) -> None:
    expected = jax.jit(op.step)(*inputs(op))
    arrays = [jnp.array(each, copy=True) for each in inputs(op)]
    donating = jax.jit(op.step, donate_argnums=0)
    assert_same_bits(donating(*arrays), expected)
    assert arrays[0].is_deleted()  # a result of the same shape has its memory


CHECKS = [jax.export.DisabledSafetyCheck.custom_call(name) for name in eaves.jax.TARGETS]


@each_operator
def test_an_exported_program_runs_after_a_round_trip(jax_device: Any, op: Operator) -> None:
    pytest.importorskip("flatbuffers", reason="flatbuffers is not installed")
    arrays = inputs(op)
    step = jax.jit(op.step)
    platform = "cuda" if jax_device.platform == "gpu" else jax_device.platform
    exported = jax.export.export(step, platforms=[platform], disabled_checks=CHECKS)(*arrays)
    assert_same_bits(jax.export.deserialize(exported.serialize()).call(*arrays), step(*arrays))


@each_operator
def test_sizes_that_are_not_known_are_refused(op: Operator) -> None:
    (batch,) = jax.export.symbolic_shape("b")
    arrays = [jax.ShapeDtypeStruct((batch, *each.shape[1:]), each.dtype) for each in op.arrays(2)]
    with pytest.raises(NotImplementedError, match="expected numbers alone"):
        jax.export.export(jax.jit(op.function), disabled_checks=CHECKS)(*arrays, *op.parameters)


@each_operator
def test_forward_mode_and_second_derivatives_are_refused(op: Operator) -> None:
    arrays = inputs(op)

    def number(first: Any) -> Any:
        return op.function(first, *arrays[1:]).sum()

    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(number, arrays[:1], arrays[:1])
    with pytest.raises(NotImplementedError, match="there is no second derivative"):
        jax.grad(lambda first: (jax.grad(number)(first) ** 2).sum())(arrays[0])


@pytest.mark.parametrize("name", ["row_weight", "class_weight", "normalizer", "targets"])
@pytest.mark.parametrize("has_head", [False, True])
def test_what_has_no_derivative_is_refused_and_may_be_constant(name: str, has_head: bool) -> None:
    first, labels = (_hidden if has_head else _logits)(2)
    arrays = {"row_weight": jnp.ones((2, 3)), "class_weight": jnp.ones(37), "normalizer": jnp.ones(())}
    arrays["targets"] = jax.nn.softmax(array_of(random_tensor((2, 3, 37), torch.float32)))

    def loss(first: Any, head: Any, value: Any) -> Any:
        options = {"targets": labels, name: value}
        if has_head:
            return eaves.jax.linear_cross_entropy(first, head, **options)
        return eaves.jax.cross_entropy(first, **options)

    def of_scale(scale: Any, first: Any) -> Any:
        constant = jax.lax.stop_gradient(scale) * arrays[name]
        return loss(scale * first, HEAD, constant)

    with pytest.raises(NotImplementedError, match=f"cross_entropy: there is no derivative with respect to {name};"):
        jax.jit(jax.grad(loss, 2))(first, HEAD, arrays[name])
    expected = (jax.grad(loss)(first, HEAD, arrays[name]) * first).sum()
    for grad in (jax.grad(of_scale), jax.jit(jax.grad(jax.checkpoint(of_scale)))):
        assert np.isclose(grad(jnp.ones(()), first), expected, rtol=1e-4)


# -------------------------------------------------------------------------------------------------------------- outputs

Function = Callable[..., Any]  # of hidden states, targets and a head
WITH_OUTPUTS: dict[str, tuple[Function, tuple[str, ...]]] = {
    "cross_entropy": (
        lambda x, t, _, **named: eaves.jax.cross_entropy(x, t % 24, reduction="none", **named),
        ("sum_sq", "argmax", "lse"),
    ),
    "linear_cross_entropy": (
        lambda x, t, w, **named: eaves.jax.linear_cross_entropy(x, w, t, reduction="none", z_loss=0.1, **named),
        ("entropy", "mean_logit", "z_loss"),
    ),
    "linear_log_prob": (
        lambda x, t, w, **named: eaves.jax.linear_log_prob(x, w, t, **named),
        ("mean_logit", "is_top1", "sum_sq", "entropy"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WITH_OUTPUTS)
def test_outputs_are_a_tree_of_the_names_in_their_order(jax_device: Any, name: str) -> None:
    function, names = WITH_OUTPUTS[name]
    hidden, targets = _hidden(4)
    found = function(hidden, targets, HEAD, outputs=names)
    assert found._fields == ("log_prob" if name == "linear_log_prob" else "loss", *names)
    assert_close(np.float32(found[0]), np.float32(function(hidden, targets, HEAD)))  # other kernels on a GPU
    for each in names:
        alone = function(hidden, targets, HEAD, outputs=each)
        assert alone._fields == (found._fields[0], each)
        assert_close(np.float32(alone[1]), np.float32(getattr(found, each)))

    of_all = functools.partial(function, outputs=names)
    assert jax.tree.structure(jax.jit(of_all)(hidden, targets, HEAD)) == jax.tree.structure(found)
    assert_same_bits(jax.jit(of_all)(hidden, targets, HEAD), found)
    batched = jax.vmap(of_all, (0, 0, None))(hidden, targets, HEAD)
    assert type(batched) is type(found)
    jax.tree.map(lambda one, other: assert_close(np.float32(one), np.float32(other)), batched, found)

    def number(hidden: Any) -> tuple[Any, Any]:
        out = of_all(hidden, targets, HEAD)
        return sum(each.astype(jnp.float32).sum() for each in out), out

    (_, aux), grad = jax.jit(jax.value_and_grad(number, has_aux=True))(hidden)
    assert type(aux) is type(found)
    differentiable = [each for each in names if each in ("lse", "entropy")]
    of_these = jax.grad(lambda x: sum(each.sum() for each in function(x, targets, HEAD, outputs=differentiable)))
    assert_close(grad, of_these(hidden))  # the others count as constant


# --------------------------------------------------------------------------------------------------- the package itself

WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # an import of it fails
import eaves.jax, jax.numpy as jnp
print(float(eaves.jax.logsumexp(jnp.zeros(4))), eaves.jax.__version__)
try:
    import eaves
    eaves.logsumexp
except ImportError as error:
    print(error)
"""


def run(program: str) -> list[str]:
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, env=environment
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_jax_alone_is_enough() -> None:
    number, refused = run(WITHOUT_TORCH)
    assert number.startswith("1.386294") and number.endswith(eaves.jax.__version__)
    assert "needs PyTorch, which is not installed" in refused


@pytest.mark.parametrize("version", ["0.10.1", "0.10.0", "0.9.2"])
def test_a_jaxlib_that_is_too_old_is_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_library, "jaxlib_version", version)
    with pytest.raises(ImportError, match=f"needs jaxlib {_library.JAX_TARGET} or newer, but {version} is installed"):
        _library._load()


def test_neither_framework_is_imported_for_the_other() -> None:
    program = "import sys, eaves; {}; print('torch' in sys.modules, 'jax' in sys.modules)"
    assert run(program.format("pass")) == ["False False"]
    assert run(program.format("import eaves.jax")) == ["False True"]
    assert run(program.format("eaves.jax.logsumexp")) == ["False True"]
    assert run(program.format("eaves.logsumexp")) == ["True False"]


def test_a_jitted_call_costs_the_host_no_more_than_that_of_jax() -> None:
    x = jnp.zeros((2, 3))
    ours, theirs = jax.jit(lambda x: eaves.jax.logsumexp(x, -1)), jax.jit(lambda x: jax.nn.logsumexp(x, -1))

    def best_us(function: Any) -> float:
        return min(timeit.repeat(lambda: function(x).block_until_ready(), number=500, repeat=9)) / 500 * 1e6

    for _ in range(5):  # the machine may be busy
        times = best_us(ours), best_us(theirs)
        if times[0] <= 1.1 * times[1]:
            break
    assert times[0] <= 1.1 * times[1], times
