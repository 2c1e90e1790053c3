from __future__ import annotations

import numpy as np
import pytest

from jaxrec.data import Clicks, batches

pytestmark = pytest.mark.every_case

KEYS = ("a", "b")


def rows(count, start=0):
    number = np.arange(start, start + count)
    return Clicks(
        (number % 2).astype(np.float32),
        number[:, None].astype(np.float32) * np.ones(3, np.float32),
        np.stack([number, number + 1000], axis=1).astype(np.int32),
    )


@pytest.mark.parametrize("sizes", [[10], [3, 4, 3], [1] * 10, [4, 6], [8, 2]], ids=str)
def test_every_row_once_and_in_order(sizes):
    starts = np.cumsum([0, *sizes[:-1]])
    got = list(batches([rows(n, s) for n, s in zip(sizes, starts, strict=True)], 4, KEYS))
    assert len(got) == 3
    assert {batch.dense.shape for batch in got} == {(4, 3)}
    weights = np.concatenate([batch.weights for batch in got])
    np.testing.assert_array_equal(weights, [1] * 10 + [0] * 2)
    labels = np.concatenate([batch.labels for batch in got])
    np.testing.assert_array_equal(labels[:10], np.arange(10) % 2)
    assert {tuple(batch.features.capacity_per_key.values()) for batch in got} == {(4, 4)}
    ids = {key: [bag for batch in got for bag in batch.features[key].to_lists()] for key in KEYS}
    assert ids["a"] == [[i] for i in range(10)] + [[], []]
    assert ids["b"] == [[i + 1000] for i in range(10)] + [[], []]


def test_batches_of_padding_at_the_end():
    got = list(batches([rows(5), rows(0, 5)], 4, KEYS, at_least=4))
    assert [batch.weights.sum() for batch in got] == [4, 1, 0, 0]
    assert {batch.dense.shape for batch in got} == {(4, 3)}
    assert got[-1].features["b"].to_lists() == [[]] * 4
    assert got[-1].features.capacities == (4, 4)
    assert len(list(batches([rows(5)], 4, KEYS, at_least=1))) == 2


def test_no_rows_no_batches():
    assert list(batches([], 4, KEYS)) == []


def test_probabilities_stay_with_their_rows():
    known = [Clicks(*_parts(rows(2)), np.array([p, p])) for p in (0.25, 0.5)]
    assert Clicks.concatenate(known)[1:3].probabilities.tolist() == [0.25, 0.5]
    assert Clicks.concatenate([rows(2), rows(1)]).probabilities is None


def _parts(clicks):
    return clicks.labels, clicks.dense, clicks.ids


def test_raw_ids():
    clicks = rows(5)
    raw = Clicks(clicks.labels, clicks.dense, clicks.ids.astype(np.int64) - 2**62)
    first, last = batches([raw], 4, KEYS, id_bits=64)
    assert first.features.values.dtype == np.int64
    assert first.features["a"].to_lists() == [[number - 2**62] for number in range(4)]
    assert last.features["b"].to_lists() == [[1004 - 2**62], [], [], []]
    with pytest.raises(ValueError, match="id -4611686018427387904 is negative"):
        next(batches([raw], 4, KEYS))
