"""Sequences of interactions, the last item of each left out and ranked among others."""

from __future__ import annotations

import numpy as np
import pytest

from jaxrec.data import DataError, Interactions

pytestmark = pytest.mark.every_case


@pytest.fixture(scope="module")
def generated():
    return Interactions.generate(num_users=60, num_items=300, seed=0)


def test_a_file(tmp_path):
    path = tmp_path / "data.txt"
    path.write_text("1 5\n2 7\n1 6\n1 7\n2 5\n3 1\n2 9\n2 1\n")
    data = Interactions.read(path)
    assert [row.tolist() for row in data.sequences] == [[5, 6, 7], [7, 5, 9, 1]]
    assert data.num_items == 9
    np.testing.assert_allclose(data.popularity, np.array([0, 1, 0, 0, 0, 2, 1, 2, 0, 1]) / 7)
    assert [row.tolist() for row in data.before(-2)] == [[5], [7, 5]]


BAD = {
    "words": ("1 a\n", "expected two integers a line"),
    "columns": ("1 2 3\n", "got 3 columns"),
    "ragged": ("1 2\n3\n", "expected two integers a line"),
    "zero": ("1 2\n1 0\n", "numbers from 0 to 2"),
    "too-large": ("1 2\n1 2147483648\n", "to 2147483648"),
    "short": ("1 2\n1 3\n", "no user has 3 interactions"),
}


@pytest.mark.parametrize(("text", "message"), BAD.values(), ids=BAD)
def test_files_that_are_none(tmp_path, text, message):
    path = tmp_path / "data.txt"
    path.write_text(text)
    with pytest.raises(DataError, match=message):
        Interactions.read(path)
    with pytest.raises(FileNotFoundError):
        Interactions.read(tmp_path / "missing")


def test_two_of_three_items_follow(generated):
    assert {len(row) for row in generated.sequences} <= set(range(5, 51))
    pairs = np.concatenate([np.stack([row[:-1], row[1:]]) for row in generated.sequences], axis=1)
    following = {}
    for item, after in pairs.T.tolist():
        following.setdefault(item, []).append(after)
    most = sum(max(found.count(x) for x in found) for found in following.values())
    assert most / pairs.shape[1] > 0.6
    again = Interactions.generate(num_users=60, num_items=300, seed=0)
    for one, other in zip(generated.sequences, again.sequences, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("position", [-1, -2])
def test_candidates(generated, position):
    found = generated.candidates(position, others=100, seed=3)
    assert found.shape == (60, 101)
    for row, candidates in zip(generated.sequences, found.tolist(), strict=True):
        assert candidates[0] == row[position]
        assert len({*candidates}) == 101
        assert not {*row.tolist()} & {*candidates[1:]}
    np.testing.assert_array_equal(generated.candidates(position, others=100, seed=3), found)
    assert (generated.candidates(position, others=100, seed=4) != found).any()


def test_candidates_come_by_popularity():
    """A user of items 1 to 3 has one other, item 4 as often as its share of 4 and 5."""
    rows = [np.array(row, np.int32) for row in [[1, 2, 3]] * 3000 + [[4, 4, 4, 5, 5, 4]] * 2000]
    found = Interactions(rows, 5).candidates(-1, others=1, seed=0)[:3000, 1]
    assert {*found.tolist()} == {4, 5}
    assert (found == 4).mean() == pytest.approx(2 / 3, abs=0.03)


def test_too_few_items():
    data = Interactions.generate(20, 60, seed=0)
    with pytest.raises(ValueError, match="too few items to draw 100 others"):
        data.candidates(-1, seed=0)
