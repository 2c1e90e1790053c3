"""Long histories are cut at random, as often and as far as equation 4 says."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import jaxrec
from jaxrec.nn import stochastic_length

KEYS = ["history", "time"]


def batch_of(lengths):
    rows = [list(range(100 * row, 100 * row + length)) for row, length in enumerate(lengths)]
    return jaxrec.KeyedJaggedArray.from_lists(
        {"history": rows, "user": [[row] for row in range(len(rows))], "time": rows}
    )


def cut(lengths, alpha=1.5, seed=0, **options):
    rng = np.random.default_rng(seed)
    return stochastic_length(
        batch_of(lengths), KEYS, max_length=100, alpha=alpha, rng=rng, **options
    )


def test_rows_stay_in_order_and_together():
    found = cut([100, 0, 31, 32, 5, 80])
    rows = found["history"].to_lists()
    assert found["time"].to_lists() == rows
    assert found["user"].to_lists() == [[0], [1], [2], [3], [4], [5]]
    assert [len(row) for row in rows][1::3] == [0, 5]  # 100 ** 0.75 is 31
    for number, row in enumerate(rows):
        assert row == sorted(set(row))
        assert all(value // 100 == number for value in row)
    assert {len(row) for row in rows} <= {0, 5, 31, 32, 80, 100}


def test_how_often_a_row_stays_whole():
    """With probability ``N ** alpha / n ** 2``: 0.156 for 80 events."""
    lengths = cut([80] * 4000)["history"].lengths
    assert set(lengths.tolist()) == {31, 80}
    share = (lengths == 80).mean()
    assert share == pytest.approx(100**1.5 / 80**2, abs=0.02)


def test_every_event_stays_as_often():
    rows = cut([80] * 2000, alpha=1.0)["history"].to_lists()
    places = np.array([value % 100 for row in rows if len(row) == 10 for value in row])
    counts = np.bincount(places, minlength=80)
    expected = len(places) / 80
    assert np.abs(counts - expected).max() < 5 * expected**0.5


def test_at_two_nothing_is_cut():
    lengths = [100, 3, 0]
    assert cut(lengths, alpha=2.0).to_lists() == batch_of(lengths).to_lists()


def test_capacity():
    assert cut([100, 100], capacity=256)["history"].capacity == 256
    with pytest.raises(ValueError, match="events stay, but the capacity is 8"):
        cut([100, 100], capacity=8)


def test_refusals():
    batch, rng = batch_of([3, 4]), np.random.default_rng(0)
    with pytest.raises(ValueError, match="alpha is from 1 to 2"):
        cut([3], alpha=0.5)
    with pytest.raises(KeyError, match="lacks"):
        stochastic_length(batch, ["item"], max_length=9, alpha=1.0, rng=rng)
    with pytest.raises(ValueError, match="differ in the lengths"):
        stochastic_length(batch, ["history", "user"], max_length=9, alpha=1.0, rng=rng)
    with pytest.raises(ValueError, match="one feature of the history or more"):
        stochastic_length(batch, [], max_length=9, alpha=1.0, rng=rng)
    with pytest.raises(TypeError, match="on the host"):
        stochastic_length(jax.device_put(batch), KEYS, max_length=9, alpha=1.0, rng=rng)
    broken = batch_of([3, 4])
    broken.lengths[0] = 100
    with pytest.raises(ValueError, match="no more events than its capacity"):
        stochastic_length(broken, ["history"], max_length=9, alpha=1.0, rng=rng)


def test_a_key_that_is_named_twice_is_cut_once():
    batch = batch_of([100, 3])
    found = [
        stochastic_length(batch, keys, max_length=100, alpha=1.0, rng=np.random.default_rng(0))
        for keys in (["history"], ["history", "history"])
    ]
    assert found[0].to_lists() == found[1].to_lists()
