"""eaves.jax.linear_kl_div over a vocabulary that is cut over devices, against one device."""

import functools
from typing import Any

import numpy as np
import pytest
import torch

from jax_cross_entropy_test import labels_of
from layouts import random_tensor

jax = pytest.importorskip("jax", reason="JAX is not installed")
import jax.numpy as jnp  # noqa: E402
from jax.sharding import PartitionSpec  # noqa: E402

import eaves.jax  # noqa: E402
from eaves._arguments import KL_DIV_OUTPUTS  # noqa: E402
from jax_arrays import array_of  # noqa: E402
from jax_devices_test import devices  # noqa: E402

D, K = 24, 6

SHARDED: list[dict[str, Any]] = [
    {},
    {"divergence": "reverse", "reduction": "sum", "softcap": 8.0, "teacher_scale": 0.7},
    {"divergence": "jsd", "beta": 0.2, "temperature": 2.0, "hard_weight": 0.3},
    {"divergence": "total_variation", "reduction": "none", "hard_weight": 0.3},
    *({"teacher": rest, "divergence": "jsd"} for rest in ("class", "renormalize", "zero", "ignore")),
    {"teacher": "logits", "workspace_bytes": 1},
    {"teacher": "probs", "reduction": "none", "divergence": "jsd"},
]


@pytest.mark.usefixtures("jax_cpu")
@pytest.mark.parametrize("options", SHARDED, ids=str)
def test_a_vocabulary_cut_over_devices_is_that_of_one_device(options: dict[str, Any]) -> None:
    classes, rows = 40, 6
    mesh, own, whole = devices(2, 2), PartitionSpec("model"), PartitionSpec()
    kind = options.get("teacher", "hidden")
    options = {name: each for name, each in options.items() if name != "teacher"}
    hidden, head = (array_of(random_tensor(shape, torch.float32)) for shape in ((rows, D), (classes, D)))
    targets, weight = array_of(labels_of((rows,), classes)), jnp.linspace(0.0, 1.0, rows)
    bias = jnp.linspace(-1, 1, classes)
    logits = random_tensor((rows, classes), torch.float32, deviation=1.5)
    log_probs = torch.log_softmax(logits, -1)
    teacher: dict[str, Any] = {
        "hidden": {"teacher_hidden": hidden[:, :20], "teacher_head": head[:, :20], "teacher_bias": bias},
        "logits": {"teacher_logits": array_of(logits)},
        "probs": {"teacher_probs": array_of(log_probs.exp())},
    }.get(kind) or {f"teacher_{name}": array_of(each) for name, each in zip(("log_probs", "tokens"), log_probs.topk(K))}
    cut = {"teacher_head": own, "teacher_bias": own, "teacher_logits": PartitionSpec(None, "model")}
    cut["teacher_probs"] = cut["teacher_logits"]
    names = [name for name in KL_DIV_OUTPUTS if kind in ("hidden", "logits", "probs") or name != "teacher_lse"]
    if "teacher_tokens" in teacher:
        options["teacher_rest"] = kind

    def function(hidden: Any, head: Any, bias: Any, teacher: Any, axis_name: str | None = None) -> Any:
        return eaves.jax.linear_kl_div(
            hidden, head, bias=bias, targets=targets, row_weight=weight, outputs=names, axis_name=axis_name,
            **teacher, **options,
        )  # fmt: skip

    specs = (whole, own, own, {name: cut.get(name, whole) for name in teacher})
    of_all = jax.shard_map(functools.partial(function, axis_name="model"), mesh=mesh, in_specs=specs, out_specs=whole)

    def number(function: Any, hidden: Any, head: Any, bias: Any) -> Any:
        found = function(hidden, head, bias, teacher)
        terms = (factor * (each**2).sum() for factor, each in enumerate(found, 1))
        return sum(terms), found

    arrays, step = (hidden, head, bias), functools.partial(jax.value_and_grad, argnums=(0, 1, 2), has_aux=True)
    (_, expected), exact = step(functools.partial(number, function))(*arrays)
    (_, found), grads = jax.jit(step(functools.partial(number, of_all)))(*arrays)
    for one, other in zip((*found, *grads), (*expected, *exact), strict=True):
        np.testing.assert_allclose(one, other, rtol=5e-5, atol=5e-5)
