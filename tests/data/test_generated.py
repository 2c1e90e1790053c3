from __future__ import annotations

import numpy as np
import pytest

from jaxrec.data import Clicks, GeneratedLog
from jaxrec.data.generated import CHUNK_ROWS, GATES, PAIRS, SHARES, TABLE_ROWS, _truth
from jaxrec.metrics import auc

LOG = GeneratedLog(num_rows=3 * CHUNK_ROWS, seed=3)


@pytest.fixture(scope="module")
def clicks():
    return next(LOG.chunks(0, CHUNK_ROWS))


def columns(clicks):
    return [clicks.labels, clicks.dense, clicks.ids, clicks.probabilities]


def test_rows_depend_on_seed_and_position_alone(clicks):
    start, stop = CHUNK_ROWS - 100, CHUNK_ROWS + 50
    crossing = Clicks.concatenate(list(LOG.chunks(start, stop)))
    assert len(crossing) == 150
    for got, expected in zip(columns(crossing[:100]), columns(clicks[start:]), strict=True):
        np.testing.assert_array_equal(got, expected)
    longer = GeneratedLog(num_rows=10**9, seed=3)
    np.testing.assert_array_equal(next(longer.chunks(0, 50)).ids, clicks.ids[:50])
    other = GeneratedLog(num_rows=3 * CHUNK_ROWS, seed=4)
    assert not np.array_equal(next(other.chunks(0, 50)).ids, clicks.ids[:50])


def test_shapes_types_and_ranges(clicks):
    assert [(x.shape[1:], x.dtype) for x in columns(clicks)] == [
        ((), np.float32),
        ((13,), np.float32),
        ((26,), np.int32),
        ((), np.float64),
    ]
    assert set(np.unique(clicks.labels)) == {0, 1}
    assert (clicks.ids >= 0).all()
    np.testing.assert_array_equal(clicks.ids.max(axis=0), np.array(TABLE_ROWS) - 1)


def test_labels_follow_the_probabilities(clicks):
    order = np.argsort(clicks.probabilities)
    for part in np.array_split(order, 10):
        p, y = clicks.probabilities[part], clicks.labels[part]
        assert abs(y.mean() - p.mean()) < 5 * np.sqrt((p * (1 - p)).sum()) / len(part)


def test_ids_follow_a_power_law(clicks):
    table = int(np.argmax(TABLE_ROWS))
    counts = np.bincount(clicks.ids[:, table], minlength=TABLE_ROWS[table])
    ids = np.arange(TABLE_ROWS[table])
    expected = CHUNK_ROWS * np.log((ids + 2) / (ids + 1)) / np.log(TABLE_ROWS[table] + 1)
    assert (np.abs(counts - expected) < 5 * np.sqrt(expected) + 5).all()


def test_every_part_of_the_structure_is_worth_something(clicks):
    truth = _truth(LOG.seed, LOG.table_rows)
    parts = truth.parts(clicks.dense, clicks.ids)
    assert set(parts) == set(SHARES)
    best = auc(clicks.probabilities, clicks.labels)
    assert 0.8 < best < 0.9
    for left_out in parts:
        rest = sum(truth.scales[name] * part for name, part in parts.items() if name != left_out)
        assert auc(rest, clicks.labels) < best - 0.005


def test_effects_depend_on_more_than_single_features():
    features = {feature for pair in PAIRS for feature in pair} | {table for _, table in GATES}
    assert max(features) < len(TABLE_ROWS)
    assert sum(SHARES.values()) == pytest.approx(1)


@pytest.mark.parametrize(
    "options",
    [{"num_rows": 0}, {"num_rows": 5, "seed": -1}, {"num_rows": 5, "table_rows": (3,) * 25}],
    ids=["rows", "seed", "tables"],
)
def test_wrong_options(options):
    with pytest.raises(ValueError, match="a generated log has"):
        GeneratedLog(**options)
