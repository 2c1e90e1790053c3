from __future__ import annotations

import collections
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrec.metrics import WeightedSumOfPredictions
from jaxrec.metrics.sums import BatchWindow, Total

SLOTS = 4
APPEND = jax.jit(BatchWindow.append)
MERGE = jax.jit(BatchWindow.merge)


def filled(batches):
    """The window of ``(sum, size, counts)`` for one task."""
    window = BatchWindow.empty(SLOTS, {"x": (1,)}, 1)
    for total, size, counts in batches:
        window = APPEND(
            window,
            {"x": jnp.array([float(total)])},
            jnp.array([size], jnp.int32),
            jnp.array([counts]),
        )
    return window


def expected(batches, samples):
    """A queue of batches: the oldest leave while there are too many samples or batches."""
    queue = collections.deque(maxlen=SLOTS)
    for total, size, counts in batches:
        if counts:
            queue.append((total, size))
    while len(queue) > 1 and sum(size for _, size in queue) > samples:
        queue.popleft()
    return sum(total for total, _ in queue)


BATCHES = st.lists(st.tuples(st.integers(-9, 9), st.integers(1, 6), st.booleans()), max_size=10)


@given(BATCHES, st.integers(1, 30))
def test_against_a_queue(batches, samples):
    assert filled(batches).on_host(samples)["x"] == expected(batches, samples)


@settings(max_examples=50)
@given(BATCHES, BATCHES, st.integers(1, 40))
def test_merged_step_by_step(one, other, samples):
    """Newest with newest, and so on back; the shorter one has nothing before its first."""
    merged = MERGE(filled(one), filled(other)).on_host(samples)["x"]
    kept = [[(x, n) for x, n, counts in batches if counts][::-1] for batches in (one, other)]
    length = max(map(len, kept))
    pairs = zip(*(part + [(0, 0)] * (length - len(part)) for part in kept), strict=True)
    both = [(x + y, n + m, True) for (x, n), (y, m) in pairs][::-1]
    assert merged == expected(both, samples)


def test_tasks_move_on_their_own():
    window = BatchWindow.empty(2, {"x": (2,)}, 2)
    for value, counts in ((1.0, [True, True]), (2.0, [False, True]), (4.0, [True, True])):
        window = APPEND(
            window, {"x": jnp.full(2, value)}, jnp.ones(2, jnp.int32), jnp.array(counts)
        )
    np.testing.assert_array_equal(window.on_host(100)["x"], [5.0, 6.0])


def test_window_of_ever_larger_batches():
    """The newest batch is in the window even if it alone is larger."""
    metric = WeightedSumOfPredictions(window=3)
    state = metric.init()
    for size in (2, 1, 5):
        state = metric.update(state, jnp.full(size, float(size)), jnp.zeros(size))
    assert metric.compute(state)["window_weighted_sum_predictions"] == 25.0
    assert metric.compute(state)["lifetime_weighted_sum_predictions"] == 30.0


def test_totals_lose_nothing():
    """A plain float32 sum of ones stops at 2^24; this one goes on, compiled or not."""

    @jax.jit
    def sum_of_many(total, terms):
        return jax.lax.scan(lambda total, x: (total + x, None), total, terms)[0]

    rng = np.random.default_rng(0)
    terms = (rng.random(20_000) * 10.0 ** rng.integers(-3, 4, 20_000)).astype(np.float32)
    start = Total(jnp.float32(2.0**30), jnp.float32(0))
    total = sum_of_many(start, terms)
    exact = 2.0**30 + terms.astype(np.float64).sum()
    assert float(total.on_host()) == pytest.approx(exact, rel=1e-11)
    assert float(total.high) != pytest.approx(exact, rel=1e-11)
    halves = [sum_of_many(Total.zeros(()), part) for part in np.split(terms, 2)]
    merged = start + halves[0] + halves[1]
    assert float(merged.on_host()) == pytest.approx(exact, rel=1e-11)


def test_sums_are_exact_where_float32_stops():
    """Python's exact sum of the terms, beside a float32 sum, which loses the small ones."""
    terms = np.float32([16_777_216.0, *[1.0] * 1000, 0.25, -7.5])

    def add(total, term):
        return total + term, None

    total, _ = jax.jit(lambda terms: jax.lax.scan(add, Total.zeros(()), terms))(terms)
    assert float(total.on_host()) == math.fsum(terms)
    assert float(jax.lax.scan(lambda x, term: (x + term, None), jnp.float32(0), terms)[0]) != (
        math.fsum(terms)
    )


def test_two_sums_are_added():
    values = np.random.default_rng(0).normal(size=(2, 50, 3)).astype(np.float32) * 1e6
    totals = []
    for half in values:
        total = Total.zeros((3,))
        for term in jnp.asarray(half):
            total = total + term
        totals.append(total)
    expected = np.float64(values).sum(axis=(0, 1))
    np.testing.assert_allclose((totals[0] + totals[1]).on_host(), expected, rtol=1e-12, atol=1e-6)
