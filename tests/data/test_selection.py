"""Sets of row numbers, and the row groups of such a set."""

from __future__ import annotations

import itertools
import pickle

import numpy as np
import pyarrow as pa
import pytest

from jaxrec.data import TableGroups
from jaxrec.data.encode import Location
from jaxrec.data.groups import GroupRange
from jaxrec.data.selection import RowMask, RowNumbers, SelectedGroups, selected_rows

pytestmark = pytest.mark.every_case


@pytest.mark.parametrize(("total", "parts"), [(1, 1), (30, 7), (200_003, 5)])
def test_a_set_of_rows(total, parts):
    selected = np.random.default_rng(total).random(total) < 0.3
    selected[0] = True
    mask = RowMask.empty(total)
    edges = np.linspace(0, total, parts + 1).astype(int).tolist()
    for start, stop in itertools.pairwise(edges):
        mask.add(start, selected[start:stop])
    assert mask.count == selected.sum()
    assert mask.inverted().count == total - mask.count
    numbers = np.flatnonzero(selected)
    for start, stop in ((0, total), (total // 3, total // 2), (total - 1, total)):
        np.testing.assert_array_equal(mask.part(start, stop), selected[start:stop])
        np.testing.assert_array_equal(mask.inverted().part(start, stop), ~selected[start:stop])
    for place in {0, len(numbers) // 2, len(numbers) - 1}:
        assert mask.row(place) == numbers[place]
    assert mask.stretch == (numbers[0], numbers[-1] + 1)


def test_groups_of_selected_rows():
    """Groups, ranges of them, and errors have the rows' own numbers."""
    selected = np.array([n % 3 == 0 and not 10 <= n < 20 for n in range(35)])
    mask = RowMask.empty(35)
    mask.add(0, selected)
    groups = TableGroups(pa.table({"n": range(35)}), 5)
    rows = selected_rows(groups, mask)
    assert isinstance(rows, SelectedGroups)
    expected = np.flatnonzero(selected).tolist()
    found = [rows.read(group)["n"].to_pylist() for group in range(len(rows.sizes))]
    assert [n for each in found for n in each] == expected
    assert [len(each) for each in found] == [*rows.sizes]
    assert all(rows.sizes)
    part = GroupRange(rows, 3, 8)
    for source in (rows, part):
        for group in range(len(source.sizes)):
            path, first = source.location(group)
            for place, n in enumerate(source.read(group)["n"].to_pylist()):
                assert f"row {n} (from 0)" in str(Location(path, first, "n").error(place, "bad"))
    assert int(pickle.loads(pickle.dumps(RowNumbers(np.array([4, 9])))) + 1) == 9


def test_a_stretch_of_rows_is_read_as_a_range():
    mask = RowMask.empty(9)
    mask.add(0, np.arange(9) >= 6)
    groups = TableGroups(pa.table({"n": range(9)}), 4)
    assert selected_rows(groups, mask) == GroupRange(groups, 6, 9)
    assert selected_rows(groups, mask.inverted()) == GroupRange(groups, 0, 6)
