"""Rows dealt to devices by their work."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrec.data import balanced_order, imbalance, sequence_work


def test_work_is_that_of_the_visible_pairs_and_of_the_tokens():
    pairs = np.array([np.tril(np.ones((n, n))).sum() for n in (0, 1, 7)])
    work = sequence_work([0, 1, 7], attention_dim=3, dense_flops=11)
    np.testing.assert_allclose(work, pairs * 4 * 3 + np.array([0, 1, 7]) * 11)


@given(
    st.integers(1, 6),
    st.integers(1, 4),
    st.integers(0, 9),
    st.integers(0, 2**31),
)
def test_each_row_is_dealt_once(devices, steps, each, seed):
    work = np.random.default_rng(seed).pareto(1.1, devices * steps * each)
    order = balanced_order(work, devices, steps=steps)
    assert order.shape == (steps, devices, each)
    assert sorted(order.ravel().tolist()) == list(range(work.size))


@pytest.mark.parametrize("steps", [1, 4])
def test_power_law_lengths_are_balanced(steps):
    rng = np.random.default_rng(0)
    lengths = np.minimum(4096, 50 * (1 + rng.pareto(1.05, 8 * 128 * steps))).astype(int)
    work = sequence_work(lengths, attention_dim=512, dense_flops=2 * 6 * 512**2)
    as_they_come = np.arange(lengths.size).reshape(steps, 8, 128)
    assert imbalance(work, as_they_come) > 1.2
    assert imbalance(work, balanced_order(work, 8, steps=steps)) < 1.1


def test_a_row_too_long_to_balance_delays_one_step():
    work = np.ones(2 * 3 * 4)
    work[5] = 100
    order = balanced_order(work, 2, steps=3)
    totals = work[order].sum(-1)
    assert (totals.max(-1) == [103, 4, 4]).all()


def test_equal_rows_are_dealt_in_one_way():
    work = np.random.default_rng(1).integers(1, 4, 96)
    np.testing.assert_array_equal(balanced_order(work, 4), balanced_order(work.copy(), 4))


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("work", "devices", "message"),
    [
        pytest.param(np.ones(7), 2, "7 rows do not divide evenly among 2 devices", id="uneven"),
        pytest.param([1.0, np.nan], 2, "one finite number of 0 or more", id="nan"),
        pytest.param([1.0, -1.0], 2, "numbers from -1.0 to 1.0", id="negative"),
        pytest.param(np.ones((2, 2)), 2, r"got shape \(2, 2\)", id="two axes"),
        pytest.param(np.ones(2), 0, "devices and steps are 1 or more", id="no device"),
    ],
)
def test_wrong_work(work, devices, message):
    with pytest.raises(ValueError, match=message):
        balanced_order(work, devices)


def test_negative_lengths_have_no_work():
    with pytest.raises(ValueError, match="a row has -3 tokens"):
        sequence_work([4, -3], attention_dim=1, dense_flops=1)


@pytest.mark.every_case
@pytest.mark.parametrize("targets", [[1], [1, 3], [-1, 0]], ids=["one row", "too many", "negative"])
def test_wrong_targets(targets):
    with pytest.raises(ValueError, match="num_targets are a number for each row, from 0 to the"):
        sequence_work([3, 2], attention_dim=2, dense_flops=1, num_targets=targets)
