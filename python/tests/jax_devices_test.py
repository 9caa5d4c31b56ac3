"""Each operator of eaves.jax over arrays that are cut over devices: rows, and a vocabulary."""

import contextlib
from typing import Any

import numpy as np
import pytest
import torch

from jax_cross_entropy_test import labels_of
from layouts import random_tensor

jax = pytest.importorskip("jax", reason="JAX is not installed")
import jax.numpy as jnp  # noqa: E402
from jax.sharding import AxisType, NamedSharding, PartitionSpec  # noqa: E402

import eaves.jax  # noqa: E402
from jax_arrays import array_of  # noqa: E402
from jax_transforms_test import Operator, each_operator, inputs  # noqa: E402


def devices(*sizes: int, axis_type: Any = AxisType.Auto) -> Any:
    """A mesh of the CPU's devices."""
    count = int(np.prod(sizes))
    found = jax.devices("cpu")
    assert len(found) >= count, "conftest.py asks for four"
    names = ("data", "model")[: len(sizes)]
    return jax.sharding.Mesh(np.array(found[:count]).reshape(sizes), names, axis_types=(axis_type,) * len(sizes))


@pytest.mark.usefixtures("jax_cpu")
@each_operator
def test_rows_cut_over_devices_give_the_bits_of_one_device(op: Operator, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for sums over rows, which are gradients of parameters: these are summed device by device."""
    monkeypatch.setenv("EAVES_BATCH_INVARIANT", "1")
    mesh = devices(4)
    with jax.default_device(mesh.devices.flat[0]):
        arrays = op.arrays(8)
        cut = [jax.device_put(each, NamedSharding(mesh, PartitionSpec("data"))) for each in arrays]
        whole = [jax.device_put(each, NamedSharding(mesh, PartitionSpec())) for each in op.parameters]
        step = jax.jit(op.step)
        out, grads = step(*arrays, *op.parameters)
        out_of_all, grads_of_all = step(*cut, *whole)
    op.assert_same((out_of_all, grads_of_all[0]), (out, grads[0]))
    assert grads_of_all[0].sharding.spec[0] == "data"
    for of_all, of_one in zip(grads_of_all[1:], grads[1:], strict=True):
        np.testing.assert_allclose(of_all, of_one, rtol=5e-6, atol=5e-6)
    text = step.lower(*cut, *whole).compile().as_text()
    rows = arrays[0].shape
    assert not [line for line in text.splitlines() if "all-gather" in line and f"f32[{rows[0]},{rows[1]}," in line]


@pytest.mark.usefixtures("jax_cpu")
@each_operator
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("is_set", [False, True])
@pytest.mark.parametrize("is_cut", [False, True])
def test_each_kind_of_mesh(
    op: Operator, axis_type: Any, is_set: bool, is_cut: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EAVES_BATCH_INVARIANT", "1")
    mesh = devices(4, axis_type=axis_type)
    arrays = [np.asarray(each) for each in inputs(op)]
    out, grads = jax.jit(op.step)(*arrays)
    with jax.set_mesh(mesh) if is_set else contextlib.nullcontext():
        placed: list[Any] = arrays
        if is_cut:
            rows = len(op.arrays(8))
            specs = [PartitionSpec("data" if index < rows else None) for index in range(len(arrays))]
            placed = [jax.device_put(each, NamedSharding(mesh, spec)) for each, spec in zip(arrays, specs)]
        out_of_all, grads_of_all = jax.jit(op.step)(*placed)
        if is_cut and axis_type == AxisType.Explicit:
            assert jax.typeof(grads_of_all[0]).sharding.spec[0] == "data"
    op.assert_same((out_of_all, grads_of_all[0]), (out, grads[0]))
    for of_all, of_one in zip(grads_of_all[1:], grads[1:], strict=True):
        np.testing.assert_allclose(of_all, of_one, rtol=5e-6, atol=5e-6)


@pytest.mark.usefixtures("jax_cpu")
@each_operator
def test_inside_of_shard_map(op: Operator) -> None:
    mesh = devices(4)
    arrays, spec = op.arrays(8), PartitionSpec("data")
    specs = (spec,) * len(arrays) + (PartitionSpec(),) * len(op.parameters)

    def of_own_rows(*arrays: Any) -> Any:
        out = op.function(*arrays)
        return out if out.ndim else out[None]

    for check_vma in (True, False):
        mapped = jax.shard_map(of_own_rows, mesh=mesh, in_specs=specs, out_specs=spec, check_vma=check_vma)
        out, grads = jax.jit(op._replace(function=mapped).step)(*arrays, *op.parameters)
        pieces = [[each[2 * i : 2 * i + 2] for each in arrays] for i in range(4)]
        steps = [op._replace(function=of_own_rows).step(*piece, *op.parameters) for piece in pieces]
        np.testing.assert_allclose(out, np.concatenate([each[0] for each in steps]), rtol=2e-6, atol=2e-6)
        np.testing.assert_allclose(grads[0], np.concatenate([each[1][0] for each in steps]), rtol=2e-6, atol=2e-6)
        for index in range(1, len(grads)):
            np.testing.assert_allclose(grads[index], sum(each[1][index] for each in steps), rtol=1e-5, atol=1e-5)


SHARDED: list[dict[str, Any]] = [
    {},
    {"reduction": "sum", "z_loss": 0.01, "softcap": 8.0},
    {"label_smoothing": 0.1, "weighted": True},
    {"reduction": "none", "weighted": True, "ignore_index": 3},
    {"reduction": "none", "label_smoothing": 0.1, "scale": 0.5},
]


@pytest.mark.usefixtures("jax_cpu")
@pytest.mark.parametrize("options", SHARDED, ids=str)
@pytest.mark.parametrize("of_head", [False, True])
def test_a_vocabulary_cut_over_devices_is_that_of_one_device(options: dict[str, Any], of_head: bool) -> None:
    mesh = devices(2, 2)
    classes, rows = 40, 6
    options = dict(options)
    weighted = options.pop("weighted", False)
    labels = array_of(labels_of((rows,), classes, options.get("ignore_index", -100)))
    hidden, head = (array_of(random_tensor(shape, torch.float32)) for shape in ((rows, 24), (classes, 24)))
    weight = jnp.linspace(0.5, 1.5, classes)
    row_weight = jnp.linspace(0.0, 1.0, rows)  # the first row does not count
    own, whole = PartitionSpec("model"), PartitionSpec()

    def function(hidden: Any, head: Any, weight: Any, axis_name: str | None = None) -> Any:
        named: dict[str, Any] = {
            "class_weight": weight if weighted else None, "row_weight": row_weight, "axis_name": axis_name,
            "outputs": ("lse", "entropy", "argmax"), **options,
        }  # fmt: skip
        if of_head:
            return eaves.jax.linear_cross_entropy(hidden, head, labels, **named)
        return eaves.jax.cross_entropy(hidden @ head.T, labels, **named)

    def cut(hidden: Any, head: Any, weight: Any) -> Any:
        return function(hidden, head, weight, "model")

    of_all = jax.shard_map(cut, mesh=mesh, in_specs=(whole, own, own), out_specs=whole)

    def number(function: Any, hidden: Any, head: Any) -> Any:
        loss, lse, entropy, _ = function(hidden, head, weight)
        return (loss**2).sum() + 0.1 * lse.sum() + 0.2 * (entropy**2).sum()

    expected, found = function(hidden, head, weight), jax.jit(of_all)(hidden, head, weight)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=5e-6, atol=5e-6)
    grads = jax.jit(jax.grad(lambda *arrays: number(of_all, *arrays), (0, 1)))(hidden, head)
    for one, other in zip(grads, jax.grad(lambda *a: number(function, *a), (0, 1))(hidden, head), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)


@pytest.mark.usefixtures("jax_cpu")
def test_a_vocabulary_cut_over_devices_gathers_once() -> None:
    mesh = devices(4)
    hidden, head, labels = jnp.ones((8, 24)), jnp.ones((40, 24)), jnp.zeros(8, jnp.int32)
    mapped = jax.shard_map(
        lambda *arrays: eaves.jax.linear_cross_entropy(*arrays, axis_name="data"),
        mesh=mesh, in_specs=(PartitionSpec(), PartitionSpec("data"), PartitionSpec()), out_specs=PartitionSpec(),
    )  # fmt: skip
    text = jax.jit(mapped).lower(hidden, head, labels).compile().as_text()
    assert text.count(" all-gather(") + text.count(" all-gather-start(") == 1
    assert " all-reduce(" not in text


@pytest.mark.usefixtures("jax_cpu")
def test_probabilities_of_a_cut_vocabulary_and_unchecked_axes_are_refused() -> None:
    mesh = devices(4)
    specs = {"mesh": mesh, "in_specs": PartitionSpec(None, "data"), "out_specs": PartitionSpec()}

    def of(labels: Any) -> Any:
        return lambda logits: eaves.jax.cross_entropy(logits, labels, axis_name="data")

    with pytest.raises(NotImplementedError, match="targets are probabilities"):
        jax.shard_map(of(jnp.ones((2, 10))), **specs)(jnp.ones((2, 40)))
    with pytest.raises(ValueError, match="check_vma=True"):
        jax.shard_map(of(jnp.zeros(2, jnp.int32)), check_vma=False, **specs)(jnp.ones((2, 40)))
