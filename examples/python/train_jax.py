"""A small decoder in plain JAX: positions by eaves.jax.lrpe_cosine, the head and its loss by
eaves.jax.linear_cross_entropy, rows cut over all devices that JAX has. It trains on Python's own documentation, byte by
byte, with an Adam of a few lines.

Run it with a Python that has eaves and JAX; PyTorch is not needed. One step is one program: jax.jit with donated state.
"""

import argparse
import functools
from pydoc_data.topics import topics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import eaves.jax

BYTES, WIDTH, HEADS, LAYERS = 256, 64, 4, 2


def initial(key: jax.Array) -> dict[str, Any]:
    def matrix(key: jax.Array, rows: int, columns: int) -> jax.Array:
        return jax.random.normal(key, (rows, columns)) * rows**-0.5

    keys = iter(jax.random.split(key, 2 + 4 * LAYERS))
    sizes = {"qkv": (WIDTH, 3 * WIDTH), "out": (WIDTH, WIDTH), "up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
    blocks = [{name: matrix(next(keys), *size) for name, size in sizes.items()} for _ in range(LAYERS)]
    return {
        "embedding": jax.random.normal(next(keys), (BYTES, WIDTH)),
        "blocks": jax.tree.map(lambda *each: jnp.stack(each), *blocks),  # for jax.lax.scan
        "head": 0.1 * matrix(next(keys), WIDTH, BYTES),  # [D, V], used without a transposition
    }


def normalized(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)


def attention(x: jax.Array, block: dict[str, jax.Array]) -> jax.Array:
    """Linear attention: no softmax over positions, so that queries and keys have to carry the positions."""
    batch, length, _ = x.shape
    q, k, v = jnp.split((x @ block["qkv"]).reshape(batch, length, 3 * HEADS, -1), 3, axis=2)
    theta = 10000.0 ** (-jnp.arange(WIDTH // HEADS) / (WIDTH // HEADS))[None]
    q, k = (eaves.jax.lrpe_cosine(each, theta, activation="silu") for each in (q, k))
    scores = jnp.einsum("bnhd,bmhd->bhnm", q, k) * jnp.tril(jnp.ones((length, length))) / q.shape[-1]
    mixed = jnp.einsum("bhnm,bmhd->bnhd", scores, v)
    return normalized(mixed).reshape(batch, length, WIDTH) @ block["out"]


def loss_of(state: dict[str, Any], tokens: jax.Array) -> jax.Array:
    def layer(x: jax.Array, block: dict[str, jax.Array]) -> tuple[jax.Array, None]:
        x = x + attention(normalized(x), block)
        return x + jax.nn.silu(normalized(x) @ block["up"]) @ block["down"], None

    hidden, _ = jax.lax.scan(jax.checkpoint(layer), state["embedding"][tokens[:, :-1]], state["blocks"])
    loss: jax.Array = eaves.jax.linear_cross_entropy(
        normalized(hidden), state["head"], tokens[:, 1:], head_layout="dv", z_loss=1e-4
    )
    return loss


@functools.partial(jax.jit, donate_argnums=(0, 1))
def step(state: Any, moments: Any, tokens: jax.Array, count: jax.Array) -> Any:
    loss, grads = jax.value_and_grad(loss_of)(state, tokens)
    first, second = moments
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, grads)
    second = jax.tree.map(lambda m, g: 0.99 * m + 0.01 * g * g, second, grads)

    def updated(parameter: jax.Array, m: jax.Array, s: jax.Array) -> jax.Array:
        return parameter - 3e-3 * (m / (1 - 0.9**count)) / (jnp.sqrt(s / (1 - 0.99**count)) + 1e-8)

    return jax.tree.map(updated, state, first, second), (first, second), loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=64)
    arguments = parser.parse_args()

    text = np.frombuffer("".join(topics[name] for name in sorted(topics)).encode(), np.uint8).astype(np.int32)
    devices = np.array(jax.devices())
    devices = devices[: np.gcd(len(devices), arguments.batch)]
    mesh = jax.sharding.Mesh(devices, ("data",), axis_types=(AxisType.Auto,))
    state = jax.device_put(initial(jax.random.key(0)), NamedSharding(mesh, PartitionSpec()))
    moments = (jax.tree.map(jnp.zeros_like, state), jax.tree.map(jnp.zeros_like, state))
    generator = np.random.default_rng(0)
    losses = []
    for count in range(1, arguments.steps + 1):
        starts = generator.integers(0, len(text) - arguments.length - 1, arguments.batch)
        tokens = np.stack([text[start : start + arguments.length + 1] for start in starts])
        tokens = jax.device_put(tokens, NamedSharding(mesh, PartitionSpec("data")))
        state, moments, loss = step(state, moments, tokens, jnp.float32(count))
        losses.append(float(loss))

    print(f"{len(devices)} x {devices[0].device_kind}: loss {losses[0]:.2f} before, {losses[-1]:.2f} after")
    if not losses[-1] < losses[0] - 2:
        raise SystemExit("the model did not learn")


if __name__ == "__main__":
    main()
