"""Random ragged batches for the tests, as nested lists."""

from __future__ import annotations

import string

from hypothesis import strategies as st

MAX_ID = 2**31 - 1

ids = st.integers(0, 50) | st.integers(0, MAX_ID)


@st.composite
def nested_batches(draw, min_keys: int = 1, max_keys: int = 4, max_batch: int = 4):
    """A mapping of names to lists of bags, all of one batch size."""
    size = {"min_size": min_keys, "max_size": max_keys}
    keys = draw(st.lists(st.sampled_from(string.ascii_lowercase), unique=True, **size))
    batch = draw(st.integers(0, max_batch))
    bags = st.lists(ids, max_size=12)
    return {key: draw(st.lists(bags, min_size=batch, max_size=batch)) for key in keys}


def weights_like(batch):
    """Weights that tell where they belong, nested like a batch of lists."""
    return {
        key: [
            [index + position / 64 for position in range(len(bag))]
            for index, bag in enumerate(bags)
        ]
        for key, bags in batch.items()
    }
