"""Long runs are cut so that their parts make up the whole."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrec.embed.kernels.parts import split_runs
from jaxrec.embed.kernels.reference import build_runs

NUM_ROWS = 5
SIZE = 120  # of all examples, so that one program is compiled


@given(rows=st.lists(st.integers(0, NUM_ROWS + 1), min_size=SIZE, max_size=SIZE))
def test_any_rows(rows: list[int]):
    check(np.array(rows, np.int32))


@pytest.mark.parametrize(
    "rows",
    [np.full(SIZE, 2), np.full(SIZE, NUM_ROWS), np.sort(np.arange(SIZE) % 2), np.arange(SIZE) // 8],
    ids=["one_row", "all_padding", "two_rows", "runs_of_one_part"],
)
def test_rows(rows: np.ndarray):
    check(np.minimum(rows, NUM_ROWS).astype(np.int32))


def check(rows: np.ndarray) -> None:
    runs = build_runs(jnp.asarray(rows), NUM_ROWS)
    parts = split_runs(runs, NUM_ROWS)
    unique, counts = np.unique(rows[rows < NUM_ROWS], return_counts=True)
    starts = np.asarray(parts.run_starts)
    np.testing.assert_array_equal(np.diff(starts)[: unique.size], counts)
    assert (starts[unique.size :] == counts.sum()).all()

    expected = []
    for run, count in enumerate(counts):
        first, last = parts.first_parts[run], parts.first_parts[run + 1]
        cuts = range(0, int(count), parts.size) if count > parts.size else ()
        assert last - first == len(cuts)
        end = starts[run] + count
        expected += [(starts[run] + i, min(starts[run] + i + parts.size, end)) for i in cuts]
    found = list(zip(parts.starts.tolist(), parts.ends.tolist(), strict=True))
    assert found[: len(expected)] == expected
    assert all(start == end for start, end in found[len(expected) :])
