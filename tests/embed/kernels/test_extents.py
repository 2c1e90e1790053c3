"""Where bags begin and end."""

from __future__ import annotations

import functools
import importlib
from types import ModuleType

import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from jaxrec.embed.kernels import BagLayout
from tests.embed.kernels.gpu_cases import compiled_fast, kernels_in, lowered_for_cuda

pytestmark = pytest.mark.jax_version


@pytest.fixture
def extents(gpu: ModuleType) -> ModuleType:
    return importlib.import_module(f"{gpu.__name__}.extents")


def bag_extents(extents: ModuleType, lengths: Array, layout: BagLayout) -> tuple[Array, Array]:
    interpreted = functools.partial(extents.bag_extents, layout=layout, interpret=True)
    return compiled_fast(interpreted)(lengths)


def layout(strides: tuple[int, ...]) -> BagLayout:
    """Two features, of 6 and of 4 positions; the second one's ids come first in the batch."""
    starts = (strides[1], 0)
    return BagLayout((10, 3), (6, 4), starts, strides, (0, 9), (9, 9), (False, False))


@pytest.mark.parametrize(
    ("strides", "lengths", "starts", "ends"),
    [
        # Lengths: the second feature's, then the first one's.
        ((2, 2), [1, 2, 4, 0], [10, 14, 3, 4], [14, 14, 4, 6]),
        ((1, 2), [1, 2, 4], [10, 3, 4], [14, 4, 6]),
    ],
    ids=["equal_numbers", "different_numbers"],
)
def test_bags_in_order(extents, strides, lengths, starts, ends):
    found = bag_extents(extents, jnp.array(lengths, jnp.int32), layout(strides))
    np.testing.assert_array_equal(found, [starts, ends])


@pytest.mark.parametrize(
    "strides",
    [(1024,), (1025, 1025), (3000, 1, 2048)],
    ids=["one_block", "two_blocks", "uneven_blocks"],
)
def test_bags_of_many_blocks(extents, strides: tuple[int, ...]):
    rng = np.random.default_rng(0)
    lengths = [rng.integers(0, 9, stride) for stride in strides]
    capacities = tuple(int(each.sum()) + 3 for each in lengths)
    id_starts = np.cumsum((7, *capacities[:-1]))
    made = BagLayout(
        tuple(id_starts.tolist()),
        capacities,
        tuple(np.cumsum((0, *strides[:-1])).tolist()),
        strides,
        *(3 * [(0,) * len(strides)]),
    )
    lengths_now = jnp.asarray(np.concatenate(lengths), jnp.int32)
    starts, ends = bag_extents(extents, lengths_now, made)
    expected = [start + np.cumsum(each) for start, each in zip(id_starts, lengths, strict=True)]
    np.testing.assert_array_equal(ends, np.concatenate(expected))
    np.testing.assert_array_equal(ends - starts, np.concatenate(lengths))


@pytest.mark.parametrize(
    "lengths",
    [[3, 2**30, 5, -7], [2**31 - 1] * 4, [-(2**31), 9, 2**31 - 1, -1]],
    ids=["too_long", "longest", "negative"],
)
def test_wrong_lengths_stay_in_their_segment(extents, lengths: list[int]):
    wrong = jnp.array(lengths, jnp.int32)
    found = bag_extents(extents, wrong, layout((2, 2)))
    starts, ends = map(np.asarray, found)
    assert (starts <= ends).all()
    assert (starts >= [10, 10, 3, 3]).all()
    assert (ends <= [16, 16, 7, 7]).all()


def test_sums_of_wrong_lengths_that_wrap_around_stay_in_their_segment(extents):
    """Of two billion positions, as no array has here: each third bag's sum wraps around again."""
    capacity = 2**31 - 100
    made = BagLayout((50,), (capacity,), (0,), (2000,), (0,), (9,), (False,))
    lengths = jnp.full(2000, 2**31 - 1, jnp.int32)
    starts, ends = map(np.asarray, bag_extents(extents, lengths, made))
    assert min(starts.min(), ends.min()) >= 50
    assert max(starts.max(), ends.max()) <= 50 + capacity


@pytest.mark.filterwarnings("ignore:.*Triton.*:DeprecationWarning")
@pytest.mark.parametrize("strides", [(2, 2), (3000, 1)], ids=["one_block", "uneven_blocks"])
def test_extents_lower_for_cuda(extents, strides: tuple[int, ...]):
    kernel = functools.partial(extents.bag_extents, layout=layout(strides), interpret=False)
    text = lowered_for_cuda(kernel, jnp.zeros(sum(strides), jnp.int32))
    # Where each feature is one block, no sums of blocks are needed.
    expected = ["sum_lengths", "write_extents"] if max(strides) > 2 else ["write_extents"]
    assert kernels_in(text, "sum_lengths", "write_extents") == expected
