"""A format of files is one class: rows, columns, directories' keys and errors are those of all."""

from __future__ import annotations

import contextlib
import json
from typing import NamedTuple

import pyarrow as pa
import pytest

from jaxrec.data import BatchSource, DataError
from jaxrec.data.groups import FileGroups, GroupRange, LocatedGroups

pytestmark = pytest.mark.every_case

ROWS = 2


class Lines(NamedTuple):
    rows: pa.Table

    @property
    def columns(self):
        return self.rows.schema

    @property
    def sizes(self):
        return tuple(len(part) for part in self.rows.to_batches(ROWS))

    def read(self, group, columns):
        part = self.rows.slice(group * ROWS, ROWS)
        return part if columns is None else part.select(columns)


class LineGroups(FileGroups):
    """One JSON object a line, in groups of two lines."""

    format = "lines"

    @contextlib.contextmanager
    def open(self, path):
        try:
            rows = [json.loads(line) for line in path.read_text().splitlines()]
        except ValueError as error:
            raise DataError(f"{path}: {error}") from None
        yield Lines(pa.Table.from_pylist(rows))


@pytest.fixture
def paths(tmp_path):
    made = []
    for day, ids in (("1", [1, 2, 3]), ("2", [4])):
        made.append(tmp_path / f"day={day}" / "rows.jsonl")
        made[-1].parent.mkdir()
        made[-1].write_text("".join(json.dumps({"id": n, "x": n / 2}) + "\n" for n in ids))
    return tuple(made)


def test_rows_of_all_files(paths):
    groups = LineGroups(paths)
    assert isinstance(groups, LocatedGroups)
    assert groups.sizes == (2, 1, 1)
    assert [groups.read(group)["id"].to_pylist() for group in range(3)] == [[1, 2], [3], [4]]
    assert [groups.location(group) for group in range(3)] == [
        (paths[0], 0), (paths[0], 2), (paths[1], 0),
    ]  # fmt: skip
    source = BatchSource(GroupRange(groups, 1, 4), 3, lambda rows: rows["id"].to_pylist())
    assert source[0] == [2, 3, 4]


def test_columns_and_keys(paths):
    groups = LineGroups(paths, ("day", "id"))
    assert groups.read(2).to_pylist() == [{"day": 2, "id": 4}]
    assert [columns.names for columns in groups.schemas.values()] == [["id", "x", "day"]] * 2
    assert groups.read(0, ["x"]).to_pydict() == {"x": [0.5, 1.0]}
    assert LineGroups(paths, keys=("day",)).read(1).to_pylist() == [{"id": 3, "x": 1.5, "day": 1}]


def test_errors_name_the_file(paths):
    with pytest.raises(DataError, match="no lines files were given"):
        LineGroups(())
    with pytest.raises(DataError, match=r"rows.jsonl has no column 'y'; its columns are id, x"):
        _ = LineGroups(paths, ("y",)).sizes
    groups = LineGroups(paths)
    assert groups.sizes == (2, 1, 1)
    paths[0].write_text("{")
    with pytest.raises(DataError, match=r"rows.jsonl, row group 1: it cannot be read \(.*rows"):
        groups.read(1)


def test_groups_that_do_not_say_where_they_stand():
    groups = GroupRange(Lines(pa.table({"x": [1, 2, 3]})), 0, 3)
    with pytest.raises(TypeError, match="Lines has no method location"):
        groups.location(0)
