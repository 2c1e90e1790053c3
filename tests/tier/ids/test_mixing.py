"""Mixed bits are those of SplitMix64."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrec.tier.ids.mixing import mix
from tests.fuzz import max_examples
from tests.tier.vocabulary_oracle import mix as mix_one

# The first outputs of Java's SplittableRandom, and of Vigna's splitmix64.c, with seed 1234567.
PUBLISHED = (
    6457827717110365317,
    3203168211198807973,
    9817491932198370423,
    4593380528125082431,
    16408922859458223821,
)


def test_published_numbers():
    """Output ``i`` mixes the state, which each output advances by one increment."""
    outputs = [int(mix(np.array([1234567]), seed)[0]) for seed in range(5)]
    assert outputs == list(PUBLISHED)


@settings(max_examples=max_examples(100))
@given(st.lists(st.integers(-(2**63), 2**63 - 1)), st.integers(0, 2**40))
def test_agrees_with_python(numbers, seed):
    bits = mix(np.array(numbers, np.int64), seed)
    assert bits.dtype == np.uint64
    assert bits.tolist() == [mix_one(number, seed) for number in numbers]


@pytest.mark.parametrize("seed", [0, 101, 1 << 20])
def test_bits_of_neighbours_are_even(seed):
    bits = mix(np.arange(4096), seed)
    ones = np.unpackbits(bits.view(np.uint8).reshape(-1, 8), axis=1).mean(axis=0)
    assert np.abs(ones - 0.5).max() < 0.05
    assert np.bincount((bits % np.uint64(8)).astype(int)).min() > 430
