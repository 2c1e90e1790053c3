"""Rows of a stream are cut and joined anywhere, and know where they end in each part."""

import dataclasses

import numpy as np
import pyarrow as pa
import pytest

from jaxrec.data import DataError
from jaxrec.data.streams.source import Position, Rows


def rows_of(messages, parts=("a", "b")):
    """Return rows of ``(part, offset, number of rows)``; a row holds its own place."""
    places = [(part, offset, row) for part, offset, n in messages for row in range(n)]
    table = pa.table({"place": [f"{part} {offset} {row}" for part, offset, row in places]})
    return Rows(
        table,
        parts,
        np.array([parts.index(part) for part, _, _ in messages], np.int64),
        np.array([offset for _, offset, _ in messages], np.int64),
        np.zeros(len(messages), np.int64),
        np.cumsum([n for *_, n in messages]),
        np.ones(len(messages), bool),
        np.array([float(offset) for _, offset, _ in messages]),
    )


MESSAGES = [("a", 5, 1), ("b", 0, 0), ("b", 2, 3), ("a", 6, 2), ("b", 3, 0)]


def expected(messages, count):
    """Return the positions after ``count`` rows, message by message."""
    positions = {}
    for part, offset, n in messages:
        if n <= count:
            positions[part] = Position(offset + 1)
        elif count:
            positions[part] = Position(offset, count)
        if n > count:
            break
        count -= n
    return positions


@pytest.mark.every_case
@pytest.mark.parametrize("first", range(7))
def test_split(first):
    rows = rows_of(MESSAGES)
    head, tail = rows.split(first)
    assert head.table["place"].to_pylist() == rows.table["place"].to_pylist()[:first]
    assert head.positions() == expected(MESSAGES, first)
    assert (head.positions() | tail.positions()) == expected(MESSAGES, 6)
    for part, start in ((head, 0), (tail, first)):
        for row in range(len(part)):
            name, offset, at = part.locate(row)
            assert f"{name} {offset} {at}" == rows.table["place"][start + row].as_py()
    # A message may be cut again and again.
    for second in range(7 - first):
        middle, rest = tail.split(second)
        assert (head.positions() | middle.positions()) == expected(MESSAGES, first + second)
        assert rest.positions() == {} or (
            head.positions() | middle.positions() | rest.positions()
        ) == expected(MESSAGES, 6)


def test_join():
    one = rows_of([("a", 0, 2), ("b", 0, 1)])
    two = rows_of([("c", 7, 1), ("b", 1, 2)], parts=("b", "c"))
    both = one.split(1)[1].join(two)
    assert both.table["place"].to_pylist() == ["a 0 1", "b 0 0", "c 7 0", "b 1 0", "b 1 1"]
    assert both.positions() == {"a": (1, 0), "b": (2, 0), "c": (8, 0)}
    assert [both.locate(row) for row in (0, 4)] == [("a", 0, 1), ("b", 1, 1)]
    # Names of parts without rows are dropped, so that they do not grow with the files of a folder.
    assert list(both.split(2)[1].join(two).parts) == ["b", "c"]
    assert both.newest_seconds == 7


def test_join_of_other_types():
    one, two = rows_of([("a", 0, 1)]), rows_of([("b", 3, 1)])
    numbers = dataclasses.replace(two, table=pa.table({"place": [1]}))
    with pytest.raises(DataError, match=r"b, offset 3: the columns have other types.*a schema"):
        one.join(numbers)


def test_empty():
    none = Rows.empty(pa.schema([("place", pa.string())]))
    assert none.positions() == {}
    assert none.newest_seconds is None
    rows = none.join(rows_of(MESSAGES))
    assert rows.positions() == expected(MESSAGES, 6)
