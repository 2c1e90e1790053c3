"""Calibration by decile and the importance of columns, beside plain NumPy."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from jaxrec.train.explanation import MAX_ROWS, column_importance, deciles, sample_size


def test_deciles_beside_numpy():
    rng = np.random.default_rng(0)
    predictions, labels = rng.random(1000), rng.integers(0, 2, 1000).astype(float)
    means = deciles(predictions.astype(np.float32), labels, np.ones(1000))
    order = np.argsort(predictions.astype(np.float32), kind="stable").reshape(10, 100)
    assert [x["rows"] for x in means] == [100] * 10
    for name, values in (("predicted", predictions), ("observed", labels)):
        np.testing.assert_allclose([x[name] for x in means], values[order].mean(axis=1), rtol=1e-6)


def test_deciles_by_weights():
    """A row of weight 3 counts as three rows, and one of weight 0 not at all."""
    values = np.arange(30.0)
    weights = np.where(values % 3 == 1, 3.0, 0.0)
    means = deciles(values, 2 * values, weights)
    assert [x["predicted"] for x in means] == [*range(1, 30, 3)]
    assert [x["observed"] for x in means] == [*range(2, 60, 6)]
    assert {x["rows"] for x in means} == {1}


@pytest.mark.parametrize(("rows", "groups"), [(0, 0), (1, 1), (3, 3), (11, 10)])
def test_deciles_of_few_rows(rows, groups):
    means = deciles(np.zeros(rows), np.ones(rows), np.ones(rows))
    assert (len(means), sum(x["rows"] for x in means)) == (groups, rows)


@dataclasses.dataclass(frozen=True)
class Columns:
    """Columns of numbers as a sample."""

    values: dict

    def __len__(self):
        return len(self.values["label"])

    columns = ("unused", "weak", "strong")

    def batches(self, batch_size):
        return iter(())

    def shuffled(self, column, order):
        return Columns(self.values | {column: self.values[column][order]})


def values_of(rows):
    """The error and the correlation of a model that reads two of three columns."""
    predicted = 3 * rows.values["strong"] + rows.values["weak"]
    label = rows.values["label"]
    return {
        "mse": float(((predicted - label) ** 2).mean()),
        "corr": float(np.corrcoef(predicted, label)[0, 1]),
        "neither": 1.0,
    }


def importance(seed=0, best=None):
    rng = np.random.default_rng(1)
    columns = {name: rng.normal(size=4000) for name in Columns.columns}
    columns["label"] = 3 * columns["strong"] + columns["weak"] + rng.normal(size=4000)
    best = best or {"mse": "min", "corr": "max"}
    return column_importance(
        Columns(columns), Columns.columns, values_of, best, value="mse", rows=4000, seed=seed
    )


def test_importance_of_a_known_model():
    """A shuffled column adds twice its variance to the squared error."""
    found = importance()
    assert [*found.columns] == ["strong", "weak", "unused"]
    assert found.columns["unused"] == {"mse": 0, "corr": 0}
    assert found.columns["weak"]["mse"] == pytest.approx(2, rel=0.1)
    assert found.columns["strong"]["mse"] == pytest.approx(18, rel=0.1)
    assert found.columns["strong"]["corr"] > found.columns["weak"]["corr"] > 0
    assert (found.value, found.rows, found.seed) == ("mse", 4000, 0)


def test_importance_follows_from_the_seed():
    assert importance().columns == importance().columns
    assert importance(seed=1).columns != importance().columns


def test_a_wide_table_is_sampled_by_fewer_rows():
    assert sample_size(10_000, 40) == 10_000
    assert MAX_ROWS < 100_000 * 11
    assert sample_size(100_000, 10) == MAX_ROWS // 11
