"""Fields of structs as columns."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jaxrec.data import ParquetGroups
from jaxrec.data.column_types import holds_structs, how_to_flatten
from jaxrec.data.structs import flat_schema, flat_table

pytestmark = pytest.mark.every_case

ROWS = [
    {"user": {"age": 3, "home": {"city": "Ulm", "at": [1.5, 2.5]}}, "x": 1},
    {"user": {"age": None, "home": None}, "x": 2},
    {"user": None, "x": 3},
]
FLAT = {
    "user.age": [3, None, None],
    "user.home.city": ["Ulm", None, None],
    "user.home.at": [[1.5, 2.5], None, None],
    "x": [1, 2, 3],
}


def test_fields_are_columns():
    table = pa.Table.from_pylist(ROWS).replace_schema_metadata({"pandas": "{}"})
    flat = flat_table(table)
    assert flat.to_pydict() == FLAT
    assert flat.schema == flat_schema(table.schema)
    assert flat.schema.metadata == {b"pandas": b"{}"}
    assert flat_table(flat) is flat
    # The values under a null struct do not show.
    hidden = pa.StructArray.from_arrays([pa.array([7, 8])], ["a"], mask=pa.array([True, False]))
    assert flat_table(pa.table({"s": hidden}))["s.a"].to_pylist() == [None, 8]


def test_files_have_the_fields(tmp_path):
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "x.parquet")
    groups = ParquetGroups((tmp_path / "x.parquet",))
    assert next(iter(groups.schemas.values())).names == [*FLAT]
    assert groups.read(0).to_pydict() == FLAT
    names = ["user.home.city", "x"]
    assert groups.read(0, names).to_pydict() == {name: FLAT[name] for name in names}


def test_lists_of_structs():
    kind = pa.list_(pa.list_(pa.struct({"id": pa.int8()})))
    assert holds_structs(kind)
    assert not holds_structs(pa.list_(pa.int8()))
    assert how_to_flatten("x", kind) == (
        "write a list for each field, such as 'x.id': [row['id'] for row in x]"
    )


def test_a_null_column_beside_names_that_look_like_its_fields():
    """pandas calls a second column ``x`` ``x.1``: the first is no struct."""
    table = pa.table({"x": pa.nulls(2), "x.1": [1, 2]})
    assert flat_table(table, ["x", "x.1"]).column_names == ["x", "x.1"]
