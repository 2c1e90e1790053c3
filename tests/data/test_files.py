"""Which files are a data set, in which order, and the columns of their directories."""

from __future__ import annotations

import datetime
import pathlib
import uuid

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jaxrec.data import DataError, ParquetGroups, Schema, learn_encoder
from jaxrec.data.criteo.conversion import source_files
from jaxrec.data.files import parquet_files
from jaxrec.data.partitions import key_types, keys_of
from jaxrec.data.views import without_views

pytestmark = pytest.mark.every_case


def write(path: pathlib.Path, rows: dict | None = None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(rows or {"x": [1]}), path)


def names(path) -> list[str]:
    files = parquet_files(path)
    return [str(file.relative_to(files.root)) for file in files.paths]


# Names as writers give them, in the order of their rows.
WRITERS = {
    "dask": [f"part.{number}.parquet" for number in range(12)],
    "duckdb": [f"data_{number}.parquet" for number in range(12)],
    "spark": [f"part-{number:05d}-6f2c.c000.snappy.parquet" for number in range(3)],
    "fastparquet": [f"part.{number}.parq" for number in (9, 10, 11)],
    "windows": ["A2.PARQUET", "A10.PARQUET"],
    "pandas": ["x.parquet.gzip", "y.pq"],
    "equal": ["part.01.parquet", "part.1.parquet"],
    "keys": [f"day={day}/part-{part}.parquet" for day in (2, 10) for part in (1, 20)],
}
# Files beside them that are no rows of the data set.
OTHERS = (
    "_SUCCESS", "_metadata", "_common_metadata", ".part-00000.parquet.crc", "notes.txt",
    "old.parquet.bak", "_temporary/0/part-0.parquet", ".x.parquet",
)  # fmt: skip


@pytest.mark.parametrize("writer", WRITERS)
def test_files_of_a_directory_in_the_order_of_their_numbers(tmp_path, writer):
    for name in (*reversed(WRITERS[writer]), *OTHERS):
        write(tmp_path / name)
    assert names(tmp_path) == WRITERS[writer]
    read = [path.name for path in ParquetGroups.of_directory(tmp_path).schemas]
    assert read == [pathlib.Path(name).name for name in WRITERS[writer]]


def test_text_files_have_the_same_order(tmp_path):
    for name in ("day_10", "day_2", "day_2.gz"):
        (tmp_path / name).touch()
    assert [path.name for path in source_files(tmp_path)] == ["day_2", "day_2.gz", "day_10"]


PATTERNS = {
    "files": ("part.*.parquet", ["part.2.parquet", "part.10.parquet"]),
    "directories": ("day=*", ["day=2/a.parquet", "day=10/a.parquet"]),
    "inside": ("day=1?/*", ["day=10/a.parquet"]),
    "deep": ("**/a.parquet", ["day=2/a.parquet", "day=10/a.parquet"]),
}


@pytest.mark.parametrize(("pattern", "wanted"), PATTERNS.values(), ids=PATTERNS)
def test_patterns(tmp_path, pattern, wanted):
    for name in ("part.10.parquet", "part.2.parquet", "day=10/a.parquet", "day=2/a.parquet", "_S"):
        write(tmp_path / name)
    assert names(tmp_path / pattern) == wanted


def test_a_name_with_brackets_is_a_file(tmp_path):
    write(tmp_path / "rows[1].parquet")
    assert names(tmp_path / "rows[1].parquet") == ["rows[1].parquet"]


WRONG = {
    "empty": ("none", "there are no Parquet files in this directory$"),
    "mixed": ("mixed", r"x=1/y.parquet has the keys x, and .*a.parquet has no directory key=value"),
    "inconsistent": (
        "deep",
        "x=2/z=1/a.parquet has the keys x, z, and .*x=1/y=1/a.parquet has the k",
    ),
    "twice": ("twice", "has a key twice, of x, x"),
    "text": ("text", "in this directory, but files such as a.csv$"),
    "pattern": ("empty*/x*.parquet", "no Parquet file matches this pattern"),
    "delta": ("delta", "is a Delta table, whose log says which of its files count"),
    "iceberg": ("ice", "is an Iceberg table, whose log says"),
    "splits": ("splits", "has the splits test, train, .* name one: '.*/splits/train-.*.parquet'"),
    "saved": (
        "saved",
        "has the splits a, b, which are data sets of their own; name one: .*saved/a",
    ),
    "state": ("state", "state.json names b.arrow, which is not there"),
    "damaged": ("damaged", "state.json is not JSON"),
}


@pytest.mark.parametrize(("path", "message"), WRONG.values(), ids=WRONG)
def test_what_is_no_data_set(tmp_path, path, message):
    for name in (
        "mixed/a.parquet", "mixed/x=1/y.parquet", "delta/a.parquet", "ice/data/a.parquet",
        "ice/metadata/v1.metadata.json", "deep/x=1/y=1/a.parquet", "deep/x=2/z=1/a.parquet",
        "twice/x=1/x=2/a.parquet", "splits/train-00000-of-00002.parquet",
        "splits/test-00000-of-00001.parquet", "saved/a/x.parquet", "state/a.parquet",
        "damaged/a.parquet",
    ):  # fmt: skip
        write(tmp_path / name)
    (tmp_path / "saved/dataset_dict.json").write_text('{"splits": ["a", "b"]}')
    (tmp_path / "state/state.json").write_text('{"_data_files": [{"filename": "b.arrow"}]}')
    (tmp_path / "damaged/state.json").write_text('{"_data_files": [')
    (tmp_path / "delta/_delta_log").mkdir()
    (tmp_path / "none").mkdir()
    (tmp_path / "text").mkdir()
    (tmp_path / "text/a.csv").touch()
    with pytest.raises(DataError, match=message):
        parquet_files(tmp_path / path)


def test_keys_are_columns(tmp_path):
    for day, country in ((1, "DE"), (12, "a%2Fb"), ("__HIVE_DEFAULT_PARTITION__", "FR")):
        write(tmp_path / f"rows/day={day}/country={country}/part-0.parquet", {"x": [1, 2]})
    groups = ParquetGroups.of_directory(tmp_path / "rows")
    tables = [groups.read(group) for group in range(3)]
    assert pa.concat_tables(tables).to_pydict() == {
        "x": [1, 2] * 3,
        "day": [1, 1, 12, 12, None, None],
        "country": ["DE", "DE", "a/b", "a/b", "FR", "FR"],
    }
    for columns in (("country", "x"), ("day",)):
        some = ParquetGroups(groups.paths, columns)
        assert some.read(1) == tables[1].select(list(columns))
    # A directory above the data set is a column for whoever asks.
    part = ParquetGroups.of_directory(tmp_path / "rows/day=1")
    assert part.read(0).column_names == ["x", "country"]
    assert ParquetGroups(part.paths, ("day",)).read(0)["day"].to_pylist() == [1, 1]
    with pytest.raises(DataError, match=r"has no column 'city'; its columns are x"):
        _ = ParquetGroups(part.paths, ("city",)).sizes
    with pytest.raises(FileNotFoundError, match=r"No such file or directory: '.*gone.parquet'"):
        _ = ParquetGroups((tmp_path / "gone.parquet",)).sizes


def test_views_are_strings(tmp_path):
    """Polars has string views, for which Arrow has few functions."""
    views, lists = pa.string_view(), pa.list_(pa.string_view())
    columns = {"x": pa.array(["a", None], views), "y": pa.array([["b"], []], lists)}
    write(tmp_path / "a.parquet", columns)
    groups = ParquetGroups.of_directory(tmp_path)
    (schema,) = groups.schemas.values()
    assert schema.types == [pa.string(), pa.list_(pa.string())] == groups.read(0).schema.types
    assert groups.read(0).to_pydict() == {"x": ["a", None], "y": [["b"], []]}


def test_uuids_are_text(tmp_path):
    """DuckDB has a type for them. A request has their text."""
    values = [None, uuid.UUID(int=0), uuid.UUID(int=2**128 - 1), uuid.UUID(int=0xAB << 100)]
    stored = pa.array([x and x.bytes for x in values], pa.uuid())
    write(tmp_path / "a.parquet", {"x": stored[1:], "y": stored[:3]})
    groups = ParquetGroups.of_directory(tmp_path)
    (schema,) = groups.schemas.values()
    assert schema.types == [pa.string()] * 2 == groups.read(0).schema.types
    texts = [x and str(x) for x in values]
    assert groups.read(0).to_pydict() == {"x": texts[1:], "y": texts[:3]}
    sliced = without_views(pa.table({"x": stored}).slice(1, 2))
    assert sliced["x"].to_pylist() == texts[1:3]


def test_uuids_in_lists_are_text(tmp_path):
    """DuckDB writes ``UUID[]`` so."""
    ids = [uuid.UUID(int=n) for n in range(4)]
    rows = [ids[:2], None, [], [None, ids[3]]]
    values = pa.array([ids[0].bytes, ids[1].bytes, None, ids[3].bytes], pa.uuid())
    is_null = pa.array([x is None for x in rows])
    column = pa.ListArray.from_arrays([0, 2, 2, 2, 4], values, mask=is_null)
    write(tmp_path / "a.parquet", {"x": column})
    groups = ParquetGroups.of_directory(tmp_path)
    (schema,) = groups.schemas.values()
    assert schema.types == [pa.list_(pa.string())] == groups.read(0).schema.types
    texts = [x and [y and str(y) for y in x] for x in rows]
    assert groups.read(0)["x"].to_pylist() == texts
    large = pa.LargeListArray.from_arrays([0, 2, 2, 2, 4], values, mask=is_null)
    for lists, kind in ((column, pa.list_), (large, pa.large_list)):
        table = pa.table({"x": lists})
        assert without_views(table.slice(1, 3))["x"].to_pylist() == texts[1:]
        assert without_views(table.slice(0, 0)).schema.types == [kind(pa.string())]


DAY = datetime.date(2024, 3, 1)
BOTH = {
    "text": ("1", ["1", "1"], True),
    "numbers": ("1", [1, 1], True),
    "dates": ("2024-03-01", [DAY, DAY], True),
    "times": ("2024-03-01 00%3A00%3A00", [datetime.datetime(2024, 3, 1)], True),
    "categories": ("a", pa.array(["a"]).dictionary_encode(), True),
    "nulls": ("__HIVE_DEFAULT_PARTITION__", pa.nulls(2, pa.int64()), True),
    "another": ("1", [1, 2], False),
    "another_type": ("1", ["Monday"], False),
    "a_null": ("1", [1, None], False),
    "a_null_directory": ("__HIVE_DEFAULT_PARTITION__", [1], False),
    "lists": ("1", [[1]], False),
}


@pytest.mark.parametrize(("value", "column", "same"), BOTH.values(), ids=BOTH)
def test_a_column_of_the_file_has_the_value_of_its_directory(tmp_path, value, column, same):
    """DuckDB writes both with WRITE_PARTITION_COLUMNS."""
    write(tmp_path / f"day={value}/a.parquet", {"day": column})
    groups = ParquetGroups.of_directory(tmp_path, ["day"])
    if same:
        assert groups.read(0)["day"].to_pylist() == pa.array(column).to_pylist()
        return
    with pytest.raises(
        DataError, match=r"a.parquet, column 'day': the file has the values .* says"
    ):
        groups.read(0)


def test_plain_directories_of_any_depth(tmp_path):
    deep = ["2024/1/a.parquet", "2024/10/b.parquet", "2025/1/1/a.parquet", "z.parquet"]
    for name in (*deep, "2024/_temporary/1/x.parquet", "2024/.git/x.parquet"):
        write(tmp_path / name)
    assert names(tmp_path) == deep
    assert names(tmp_path / "*") == deep
    assert names(tmp_path / "2024/_temp*") == ["_temporary/1/x.parquet"]


@pytest.mark.parametrize("target", [".", "..", "../other"])
def test_links_to_directories(tmp_path, target):
    write(tmp_path / "rows/a/x.parquet")
    write(tmp_path / "other/y.parquet")
    (tmp_path / "rows/link").symlink_to(target, target_is_directory=True)
    if target == "../other":
        assert names(tmp_path / "rows") == ["a/x.parquet", "link/y.parquet"]
    else:
        with pytest.raises(DataError, match=r"rows/link is a link to .* would be read twice"):
            parquet_files(tmp_path / "rows")


def test_a_saved_data_set_has_the_files_that_its_state_names(tmp_path):
    for name in ("data-00000-of-00002.parquet", "data-00001-of-00002.parquet"):
        write(tmp_path / name)
    write(tmp_path / "data-00000-of-00001.parquet")
    (tmp_path / "state.json").write_text(
        '{"_data_files": [{"filename": "data-00000-of-00001.parquet"}]}'
    )
    assert names(tmp_path) == ["data-00000-of-00001.parquet"]


def test_types_of_keys():
    paths = [f"a={a}/b={b}/c=1=2/x" for a, b in (("1", "x"), ("-7", "2"), ("007", "3"))]
    assert key_types(paths) == {"a": pa.int64(), "b": pa.string(), "c": pa.string()}
    assert keys_of(paths[0]) == {"a": "1", "b": "x", "c": "1=2"}
    assert key_types([f"a={10**18}/x"]) == {"a": pa.string()}


def test_columns_of_strings_are_read_as_dictionaries(tmp_path):
    rows = {"city": ["Rome", None, "Oslo", "Rome"], "tags": [["a"], [], None, ["b"]]}
    rows |= {"item": [7, 8, 7, 7], "name": pa.array(["x", "y"] * 2, pa.large_string())}
    path = tmp_path / "day=a" / "x.parquet"
    path.parent.mkdir()
    pq.write_table(pa.table(rows), path, row_group_size=3)
    plain, groups = (ParquetGroups((path,), dictionaries=x) for x in (False, True))
    assert groups.schemas == plain.schemas
    found = [groups.read(group) for group in range(2)]
    assert pa.types.is_dictionary(found[0]["city"].type)
    assert pa.types.is_dictionary(found[0]["name"].type)
    assert found[0]["tags"].type == pa.list_(pa.string())
    assert [table.to_pydict() for table in found] == [plain.read(n).to_pydict() for n in range(2)]
    options = {name: {"min_count": 1} for name in ("city", "tags", "item", "name")}
    schema = Schema.from_dict({"label": [], "categorical": options})
    wanted = learn_encoder(schema, plain)
    encoder = learn_encoder(schema, groups)
    assert encoder.example.to_pydict() == wanted.example.to_pydict()
    for group, table in enumerate(found):
        assert encoder(table).equals(wanted(plain.read(group)))
