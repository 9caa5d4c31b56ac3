"""eaves.levanter: numbers and gradients equal Levanter's reference, by its formula, which is written down here."""

import pytest

jax = pytest.importorskip("jax", reason="JAX is not installed")
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

import eaves  # noqa: E402
from cross_entropy_test import each  # noqa: E402
from integrations import run_recipe  # noqa: E402


def reference(x, labels, w, *, logit_soft_cap=None):  # type: ignore[no-untyped-def]
    logits = jax.lax.dot(x, w, preferred_element_type=jnp.float32)
    if logit_soft_cap is not None:
        logits = jnp.tanh(logits / logit_soft_cap) * logit_soft_cap
    lse = jax.nn.logsumexp(logits, axis=-1)
    return lse - logits[jnp.arange(len(labels)), labels], lse, logits.argmax(-1)


@each("dtype", (jnp.float32, jnp.bfloat16))
@each("softcap", (None, 2.0))
def test_numbers_and_gradients_are_those_of_the_reference(dtype: object, softcap: object, jax_device: object) -> None:
    rng = np.random.default_rng(3)
    x, w = jnp.asarray(rng.normal(size=(24, 32)), dtype), jnp.asarray(rng.normal(size=(32, 131)) / 3, jnp.float32)
    w = w if dtype == jnp.float32 else w.astype(dtype)
    labels = jnp.asarray(rng.integers(131, size=24), jnp.int32)
    found = jax.jit(lambda x, w: eaves.levanter.cross_entropy(
        x, labels, w, block_sizes=3, logit_soft_cap=softcap, return_argmax=True))(x, w)  # fmt: skip
    expected = reference(x, labels, w, logit_soft_cap=softcap)
    for ours, theirs in zip(found[:2], expected[:2], strict=True):
        assert ours.dtype == jnp.float32
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
    assert found[2].dtype == jnp.int32 and (found[2] == expected[2]).all()
    assert len(eaves.levanter.cross_entropy(x, labels, w, dtype=None)) == 2

    def gradients(function, *factors):  # type: ignore[no-untyped-def]  # as Levanter's caller reduces it
        def loss(x, w):  # type: ignore[no-untyped-def]
            loss, lse, *_ = function(x, labels, w, logit_soft_cap=softcap)
            return (jnp.arange(24) % 3 * (loss + 1e-2 * lse**2)).sum()

        return jax.grad(loss, argnums=(0, 1))(*factors)

    exact = gradients(reference, x.astype(jnp.float32), w.astype(jnp.float32))
    for ours, theirs in zip(gradients(eaves.levanter.cross_entropy, x, w), exact, strict=True):
        assert ours.dtype == dtype
        distance = jnp.linalg.norm(ours.astype(jnp.float32) - theirs)
        assert distance <= (5e-6 if dtype == jnp.float32 else 2**-7) * jnp.linalg.norm(theirs)


def test_the_recipe_runs_and_another_dtype_is_left_to_the_next_implementation(jax_cpu: None) -> None:
    x, labels, w = jnp.zeros((2, 3)), jnp.zeros(2, jnp.int32), jnp.zeros((3, 5))
    with pytest.raises(NotImplementedError, match=r"eaves\.levanter: dtype is bfloat16, expected float32"):
        eaves.levanter.cross_entropy(x, labels, w, dtype=jnp.bfloat16)
    table: dict[str, object] = {}
    run_recipe("Levanter", IMPLEMENTATIONS=table)
    assert table == {"eaves": eaves.levanter.cross_entropy}
    loss, _ = eaves.levanter.cross_entropy(x.astype(jnp.bfloat16), labels, w)  # factors of two dtypes
    np.testing.assert_allclose(loss, np.log(5), rtol=1e-6)
