"""Bags as flat lookups on GPUs, against lookups one by one in NumPy."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrec.embed.kernels import BAD_ROW
from tests.embed.kernels import oracle
from tests.embed.kernels.gpu_cases import Batch, compiled_fast, kernels_in, lowered_for_cuda

pytestmark = pytest.mark.jax_version

RNG = np.random.default_rng(0)
# More bags than a block has, and more positions.
MANY = tuple(RNG.integers(0, 4, 1500).tolist()), tuple(RNG.integers(0, 2, 1100).tolist())
BATCHES = {
    "short": Batch(4, ((1, 1, 0, 1, 1, 1, 2), (1, 0, 1, 1, 1, 1, 1)), outside=True),
    "weighted": Batch(4, ((4, 1), (0, 2)), weighted=True),
    "by_feature": Batch(4, ((4, 1), (0, 2)), interleave=False),
    "uneven": Batch(4, ((1, 2, 0), (5,), (0, 3)), slack=0, outside=True),
    "one_long": Batch(4, ((0, 0, 3000, 0), (2, 0, 0, 1)), outside=True),
    "many": Batch(4, MANY, outside=True, weighted=True),
    "summed": Batch(4, (MANY[0],)),
}


@pytest.mark.parametrize("name", BATCHES)
def test_every_lookup(gpu, name: str):
    layout = BATCHES[name].layout
    table, ids, lengths, weights = BATCHES[name].arrays()
    num_rows = table.shape[0]
    options = {"layout": layout, "num_rows": num_rows, "interpret": True}
    flatten = compiled_fast(functools.partial(gpu.flatten_bags, **options))
    found = flatten(ids, lengths, weights)
    expected = oracle.lookups(
        *map(np.asarray, (ids, lengths)), None if weights is None else np.asarray(weights), layout
    )
    position = [each.position for each in expected]
    rows = np.full(layout.num_positions, num_rows)
    rows[position] = [BAD_ROW if each.row is None else each.row for each in expected]
    np.testing.assert_array_equal(found.rows, rows)
    np.testing.assert_array_equal(found.bags[np.array(position)], [each.bag for each in expected])
    assert 0 <= found.bags.min() <= found.bags.max() < layout.num_bags
    if weights is None and not any(layout.means):
        assert found.scales is None
    else:
        scales = np.asarray(found.scales)[position]
        np.testing.assert_allclose(scales, [each.scale for each in expected], rtol=1e-6)


@pytest.mark.parametrize("lengths", [[2**31 - 1] * 4, [-5, 3, -(2**31), 2]], ids=["long", "short"])
def test_wrong_lengths_stay_inside(gpu, lengths: list[int]):
    batch = BATCHES["weighted"]
    table, ids, _, weights = batch.arrays()
    layout, wrong = batch.layout, jnp.array(lengths, jnp.int32)
    found = gpu.flatten_bags(ids, wrong, weights, layout, table.shape[0], interpret=True)
    rows, bags = np.asarray(found.rows), np.asarray(found.bags)
    assert ((rows == BAD_ROW) | ((rows >= 0) & (rows <= table.shape[0]))).all()
    assert ((bags >= 0) & (bags < layout.num_bags)).all()


@pytest.mark.filterwarnings("ignore:.*Triton.*:DeprecationWarning")
@pytest.mark.parametrize("name", BATCHES)
def test_flatten_bags_lowers_for_cuda(gpu, name: str):
    batch = BATCHES[name]

    def kernel(table, *arrays):
        return gpu.flatten_bags(*arrays, batch.layout, table.shape[0])

    text = lowered_for_cuda(kernel, *batch.arrays())
    assert kernels_in(text, "flatten") == ["flatten"]
