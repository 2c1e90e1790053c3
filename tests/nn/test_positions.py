"""Vectors by position: their values and gradients, and the programs of GPUs."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

import jaxrec
from jaxrec.nn import positions
from jaxrec.nn.positions import take_positions

CAPACITY, COUNT, DIM = 12, 4, 3
LENGTHS = [[3, 0, 4, 1], [0, 2, 0, 2]]  # of two devices


def expected_gradient(lengths, cotangent):
    """Sum of each position's cotangents, element by element."""
    gradient = np.zeros((COUNT, DIM))
    for of_device, rows in zip(cotangent, lengths, strict=True):
        element = 0
        for length in rows:
            for place in range(length):
                gradient[place] += of_device[element]
                element += 1
    return gradient


def cotangents(count):
    """Whole numbers, whose sums are exact, also at padding."""
    return np.random.default_rng(0).integers(-9, 9, (count, CAPACITY, DIM)).astype(np.float32)


def gradient_of(*arrays):
    def transposed(vectors, lengths, cotangent):
        _, vjp = jax.vjp(lambda vectors: take_positions(vectors, lengths, CAPACITY), vectors)
        return vjp(cotangent)[0]

    return jax.jit(transposed)(*arrays)


@pytest.fixture(params=["scattered", "gathered"])
def way(request, monkeypatch):
    """Computes gradients as CPUs do, or as GPUs do."""
    if request.param == "gathered":
        monkeypatch.setattr(
            positions.jax.lax, "platform_dependent", lambda *arrays, cpu, default: default(*arrays)
        )
    return request.param


@pytest.mark.usefixtures("way")
@pytest.mark.every_case
@pytest.mark.parametrize("devices", [0, 1, 2], ids=["one_batch", "one_device", "two_devices"])
def test_gradients(devices):
    lengths, cotangent = np.array(LENGTHS[: max(devices, 1)], np.int32), cotangents(max(devices, 1))
    vectors = jnp.asarray(np.random.default_rng(1).normal(size=(COUNT, DIM)), jnp.float32)
    expected = expected_gradient(lengths, cotangent)
    if devices == 0:
        lengths, cotangent = lengths[0], cotangent[0]
    taken = take_positions(vectors, jnp.asarray(lengths), CAPACITY)
    assert taken.shape == cotangent.shape
    first = taken.reshape(-1, CAPACITY, DIM)[0]
    np.testing.assert_array_equal(first[:8], vectors[np.array([0, 1, 2, 0, 1, 2, 3, 0])])
    gradient = gradient_of(vectors, jnp.asarray(lengths), cotangent)
    np.testing.assert_array_equal(gradient, expected)


@pytest.mark.usefixtures("way")
@pytest.mark.every_case
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_gradients_on_a_mesh(kind):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(kind,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    lengths, cotangent = np.array(LENGTHS, np.int32), cotangents(2)
    with jax.set_mesh(mesh):
        vectors = jnp.ones((COUNT, DIM))
        arrays = jax.device_put((lengths, cotangent), sharding)
        gradient = gradient_of(vectors, *arrays)
    np.testing.assert_array_equal(gradient, expected_gradient(lengths, cotangent))


@pytest.mark.usefixtures("way")
def test_second_derivatives():
    """Position ``p`` occurs ``n`` times: the second derivative of its cubes is ``6 n x``."""
    lengths = jnp.array(LENGTHS[0], jnp.int32)

    def loss(vectors):
        return (take_positions(vectors, lengths, CAPACITY)[:8] ** 3).sum()

    found = jax.jit(jax.hessian(loss))(jnp.arange(1.0, COUNT + 1)[:, None])[:, 0, :, 0]
    np.testing.assert_array_equal(found, np.diag(6 * np.array([3, 2, 2, 1]) * np.arange(1, 5)))


def test_positions_past_the_last_are_nan():
    taken = take_positions(jnp.ones((2, 1)), jnp.array([3, 1], jnp.int32), 5)
    np.testing.assert_array_equal(taken[:, 0], [1, 1, np.nan, 1, 1])


@pytest.mark.jax_version
def test_a_gpu_adds_no_gradient_of_sasrec_by_atomics():
    """Each scatter of the program for CUDA writes a place once, or adds whole numbers."""
    table = jaxrec.EmbeddingConfig("item", 20, 8, ("history",))
    items = jaxrec.EmbeddingCollection([table], rngs=nnx.Rngs(0))
    model = jaxrec.nn.SASRec(items, max_length=6, num_blocks=1, rngs=nnx.Rngs(0))
    batch = jaxrec.KeyedJaggedArray.from_lists({"history": [[1, 2, 3], [], [4]]})

    def loss(model, batch):
        return model(batch)["history"].values.sum()

    @jax.jit
    def gradients(state, batch):
        return nnx.state(jaxrec.value_and_grad(loss)(nnx.merge(graph, state), batch)[1])

    graph, state = nnx.split(model)
    text = gradients.trace(state, batch).lower(lowering_platforms=("cuda",)).as_text()
    scatters = re.findall(r"stablehlo\.scatter.*?\}\) : .*?\n", text, re.S)
    assert scatters
    for scatter in scatters:
        is_float = re.search(r"stablehlo\.add .*: tensor<f", scatter)
        assert not is_float or "unique_indices = true" in scatter, scatter
