"""Functions of one batch, over meshes; tests/walk has the operations that use them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding

from jaxrec.ragged import lengths_range
from jaxrec.ragged.arrays import each_device, on_auto_axes

pytestmark = pytest.mark.jax_version

LENGTHS = np.array([[2, 1], [0, 3]], np.int32)
KINDS = (AxisType.Auto, AxisType.Explicit)


def weighted(lengths, scores):
    return lengths_range(lengths, 3) * scores


def mesh_of(kind, axes=("data",)):
    return jax.make_mesh((2, 1)[: len(axes)], axes, axis_types=(kind,) * len(axes))


@pytest.mark.every_case
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("axes", [("data",), ("host", "data")], ids=len)
def test_results_and_gradients_lie_over_the_devices(kind, axes):
    by_device = NamedSharding(mesh_of(kind, axes), jax.P(axes))

    def loss(scores, lengths):
        out = each_device(weighted, lengths, scores)
        return out.sum(), out

    scores = np.array([[1, 2, 3], [4, 5, 6]], np.float32)
    arrays = jax.device_put((scores, LENGTHS), by_device)
    gradient, out = jax.jit(jax.grad(loss, has_aux=True))(*arrays)
    np.testing.assert_array_equal(out, [[0, 2, 0], [0, 5, 12]])
    np.testing.assert_array_equal(gradient, [[0, 1, 0], [0, 1, 2]])
    for array in (out, gradient):
        assert array.sharding.is_equivalent_to(by_device, 2)


def test_one_batch_is_not_mapped():
    assert each_device(weighted, LENGTHS[0], np.arange(3)).tolist() == [0, 1, 0]


@pytest.mark.every_case
@pytest.mark.parametrize("kind", KINDS)
def test_replicated_results(kind):
    mesh = mesh_of(kind)
    ids = jax.device_put(LENGTHS, NamedSharding(mesh, jax.P("data")))

    def count(ids, uses):
        return uses.at[ids].add(1.0)

    def run(ids):
        return on_auto_axes(count, ids, jnp.zeros(4), is_replicated=True)

    uses = jax.jit(run)(ids)
    np.testing.assert_array_equal(uses, [1, 1, 1, 1])
    assert uses.sharding.is_fully_replicated or kind == AxisType.Auto
