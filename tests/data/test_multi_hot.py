from __future__ import annotations

import numpy as np
import pytest

from jaxrec.data import MultiHot

KEYS, SIZES, ROWS = ("a", "b", "c"), (3, 1, 4), (50, 7, 20)


@pytest.mark.parametrize("distribution", ["uniform", "pareto"])
def test_the_stream_of_mlperf(distribution):
    """The global generator with seed 0 through all features, as the reference draws."""
    state = np.random.get_state()
    np.random.seed(0)
    expected = []
    for rows, size in zip(ROWS, SIZES, strict=True):
        if distribution == "uniform":
            drawn = np.random.randint(0, rows, size=(rows, size - 1))
        else:
            drawn = np.random.pareto(a=0.25, size=(rows, size - 1))
            drawn = np.array([int(x) if x < 2**31 else -(2**31) for x in drawn.ravel()])
            drawn = drawn.reshape(rows, size - 1) % rows
        expected.append(np.concatenate([np.arange(rows)[:, None], drawn], axis=1))
    np.random.set_state(state)
    tables = MultiHot(KEYS, SIZES, ROWS, distribution).tables
    for got, wanted in zip(tables, expected, strict=True):
        assert got.dtype == np.int32
        np.testing.assert_array_equal(got, wanted)


def test_a_batch():
    multi_hot = MultiHot(KEYS, SIZES, ROWS)
    ids = np.array([[1, 2, 3], [49, 6, 19]])
    batch = multi_hot(ids)
    assert batch.capacities == (6, 2, 8)
    for feature, key in enumerate(KEYS):
        expected = multi_hot.tables[feature][ids[:, feature]].tolist()
        assert batch[key].to_lists() == expected


@pytest.mark.parametrize("identifier", [-1, 7])
def test_ids_without_a_row(identifier):
    with pytest.raises(ValueError, match=r"feature 'b': ids reach from .* its table has 7 rows"):
        MultiHot(KEYS, SIZES, ROWS)(np.array([[1, identifier, 3]]))


@pytest.mark.parametrize("change", [{"sizes": (1, 2)}, {"sizes": (0, 1, 1)}], ids=str)
def test_features_that_are_none(change):
    with pytest.raises(ValueError, match="sizes"):
        MultiHot(**{"keys": KEYS, "sizes": SIZES, "table_rows": ROWS} | change)
