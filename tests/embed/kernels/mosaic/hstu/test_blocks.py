"""Blocks of queries and keys that meet, beside the mask of all pairs."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrec.embed.kernels.mosaic.hstu import blocks
from jaxrec.nn.attention_mask import key_intervals, make_mask
from tests.nn.attention_oracle import Mask

LENGTHS = np.array([5, 0, 300, 1, 90, 70], np.int32)
TARGETS = (0, 0, 40, 1, 89, 0)
MASKS = {
    "causal": Mask(),
    "all": Mask(causal=False),
    "targets": Mask(num_targets=TARGETS),
    "groups": Mask(num_targets=TARGETS, target_group_size=3),
    "context": Mask(contextual_length=3),
    "window": Mask(
        num_targets=TARGETS,
        contextual_length=3,
        max_attention_length=20,
        min_full_attention_length=4,
    ),
}
QUERIES, KEYS = 64, 32


def pairs(mask):
    """Ranges of whole tiles of queries, and whether each query sees each key."""
    made = make_mask(LENGTHS, **mask.arguments())
    intervals = key_intervals(made, LENGTHS, int(LENGTHS.sum()) + 3)
    fields = (intervals.first, intervals.last, intervals.own, intervals.group)
    ranges = blocks.padded_ranges(jnp.stack([each for each in fields if each is not None]))
    keys = ranges.shape[1]
    first, last, own, *group = np.asarray(ranges)[:, :, None]
    place = np.arange(keys)
    sees = (first <= place) & (place <= last)
    for start in group:
        sees |= (start <= place) & (place <= own)
    return ranges, sees


@pytest.mark.parametrize("name", MASKS)
def test_every_pair_is_visited_once_and_no_block_without_a_pair(name):
    ranges, sees = pairs(MASKS[name])
    n = sees.shape[0]
    meets = np.asarray(blocks.meetings(ranges, n, queries=QUERIES, keys=KEYS))
    by_block = sees.reshape(n // QUERIES, QUERIES, n // KEYS, KEYS)
    expected = by_block.any((1, 3))
    assert (meets | ~expected).all()
    # A block of queries of several rows may reach over keys that none of them sees.
    assert meets.sum() <= 1.3 * expected.sum()
    for of_rows in (meets, meets.T):
        for row, plan in zip(of_rows, visits(of_rows), strict=True):
            assert plan == sorted(set(plan))
            assert set(np.flatnonzero(row)) <= set(plan)
            assert len(plan) <= row.sum() + 1
    first, last = np.asarray(blocks.common(ranges, QUERIES)).T
    start = np.arange(0, n, KEYS)
    is_whole = (first[:, None] <= start) & (start + KEYS - 1 <= last[:, None])
    assert is_whole.any() == (name != "window")
    assert by_block.all((1, 3))[is_whole].all()


def visits(meets):
    """The blocks that each row visits."""
    plans = np.asarray(blocks.stretches(jnp.asarray(meets)))
    return [
        [
            block
            for begin, end in plan[1 : 1 + 2 * plan[0]].reshape(-1, 2)
            for block in range(begin, end)
        ]
        for plan in plans
    ]


def test_stretches():
    none, one, two, three = "00000000000", "00111100000", "01100011100", "11000100111"
    more = "01101001010"
    rows = [[each == "1" for each in text] for text in (none, one, two, three, more)]
    *exact, covered = visits(np.array(rows))
    assert exact == [[i for i, each in enumerate(row) if each] for row in rows[:-1]]
    assert covered == [1, 2, 4, 5, 6, 7, 9]


@pytest.mark.parametrize(
    ("total", "zeros"), [(70, range(70, 128)), (64, range(64, 128)), (128, ())]
)
def test_padding_of_the_edge_is_zero(total, zeros):
    array = np.arange(128.0)[:, None, None] + 1
    array[total:] = np.nan
    found = np.asarray(blocks.edge(jnp.asarray(array), jnp.int32(total), 64))[:, 0, 0]
    expected = np.arange(64, 128.0) + 1
    expected[[place - 64 for place in zeros]] = 0
    np.testing.assert_array_equal(found, expected)


def test_whole_tiles():
    assert blocks.padded(jnp.ones((130, 2, 40))).shape == (256, 2, 64)
    whole = jnp.ones((128, 1, 128))
    assert blocks.padded(whole) is whole
    ranges = blocks.padded_ranges(jnp.zeros((4, 3), jnp.int32))
    assert ranges.shape == (4, 128)
    assert (ranges[0, 3:] > ranges[1, 3:]).all()
