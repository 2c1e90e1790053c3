from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrec.metrics.pairs import count_pairs

NAMES = ("concordant", "discordant", "tied_predictions", "tied_both", "tied_labels", "total")


def one_by_one(predictions, labels, weights):
    counts = dict.fromkeys(NAMES, 0.0)
    for i in range(len(labels)):
        for j in range(i):
            pair = weights[i] * weights[j]
            p, y = predictions[i] - predictions[j], labels[i] - labels[j]
            counts["total"] += pair
            counts["tied_labels"] += pair * (y == 0)
            counts["tied_both"] += pair * (y == 0 and p == 0)
            counts["tied_predictions"] += pair * (y != 0 and p == 0)
            counts["concordant"] += pair * (p * y > 0)
            counts["discordant"] += pair * (p * y < 0)
    return counts


@jax.jit
def compiled(*columns):
    pairs = count_pairs(*columns, jnp)
    return [getattr(pairs, name) for name in NAMES]


def in_step(*columns):
    pairs = compiled(*(jnp.asarray(x, jnp.float32) for x in columns))
    return dict(zip(NAMES, map(float, pairs), strict=True))


def on_host(*columns):
    pairs = count_pairs(*(np.asarray(x, np.float64) for x in columns), np)
    return {name: float(getattr(pairs, name)) for name in NAMES}


SAMPLES = st.lists(st.tuples(st.integers(0, 5), st.integers(-3, 3), st.integers(0, 3)), max_size=30)


@given(SAMPLES)
def test_on_host(samples):
    columns = np.array(samples, np.float64).reshape(-1, 3).T
    assert on_host(*columns) == pytest.approx(one_by_one(*columns))


@settings(max_examples=20)
@given(SAMPLES)
def test_in_step(samples):
    padded = np.zeros((30, 3))  # of weight 0, so that all examples have one shape
    padded[: len(samples)] = np.array(samples).reshape(-1, 3)
    assert in_step(*padded.T) == pytest.approx(one_by_one(*padded.T), abs=1e-4)


@pytest.mark.parametrize("samples", [0, 1, 2, 3])
def test_few(samples):
    columns = np.arange(3.0 * samples).reshape(3, samples) + 1
    assert in_step(*columns) == pytest.approx(one_by_one(*columns))
    assert on_host(*columns) == pytest.approx(one_by_one(*columns))


def test_many_in_float32():
    """Against the host's float64, at a batch's size."""
    rng = np.random.default_rng(1)
    labels = rng.random(20_000).astype(np.float32)
    predictions = (labels + rng.normal(0, 0.5, labels.shape)).astype(np.float32)
    weights = rng.random(20_000).astype(np.float32)
    got, expected = in_step(predictions, labels, weights), on_host(predictions, labels, weights)
    assert got["concordant"] == pytest.approx(expected["concordant"], rel=1e-5)
    assert got["total"] == pytest.approx(expected["total"], rel=1e-5)
