"""Files of text and of Arrow become Parquet files with the same rows, once."""

from __future__ import annotations

import bz2
import datetime
import gzip
import json
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jaxrec.data import DataError, ParquetGroups
from jaxrec.data.formats import conversion, delimited, json_lines
from jaxrec.data.formats.conversion import as_parquet, format_of

pytestmark = pytest.mark.every_case

ROWS = {
    "city": ["Oslo", "a,b", 'say "hi"', "two\nlines", None, "ä"],
    "age": [31, None, -7, 10**12, 0, 5],
    "price": [1.5, 2.0, None, 1e-3, -4.0, 0.25],
    "is_new": [True, False, None, True, True, False],
    "day": [datetime.date(2024, 3, day) for day in range(1, 7)],
}


def quoted(value) -> str:
    if value is None:
        return ""
    text = str(value).lower() if isinstance(value, bool) else str(value)
    if any(c in text for c in ',;\t|"\n'):
        return '"' + text.replace('"', '""') + '"'
    return text


def csv(separator=",", end="\n", start="") -> bytes:
    lines = [ROWS, *zip(*ROWS.values(), strict=True)]
    return (start + end.join(separator.join(map(quoted, line)) for line in lines) + end).encode()


def json_rows() -> bytes:
    lines = (dict(zip(ROWS, row, strict=True)) for row in zip(*ROWS.values(), strict=True))
    return "".join(json.dumps(line, default=str) + "\n" for line in lines).encode()


def arrow(make) -> bytes:
    table, sink = pa.table(ROWS), pa.BufferOutputStream()
    with make(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=4)
    return sink.getvalue().to_pybytes()


FILES = {
    "x.csv": csv(),
    "windows.csv": csv(end="\r\n", start="\ufeff"),
    "x.tsv": csv("\t"),
    "german.CSV": csv(";"),
    "x.psv": csv("|"),
    "x.csv.gz": gzip.compress(csv()),
    "x.csv.bz2": bz2.compress(csv()),
    "x.csv.zst": pa.compress(csv(), "zstd", asbytes=True),
    "x.jsonl": json_rows(),
    "x.ndjson.gz": gzip.compress(json_rows()),
    "x.feather": arrow(pa.ipc.new_file),
    "x.arrow": arrow(pa.ipc.new_stream),
}


@pytest.fixture(autouse=True)
def small_parts(monkeypatch, tmp_path_factory):
    """Parts of a few lines, and a cache of this test's own."""
    monkeypatch.setenv("JAXREC_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setattr(delimited, "PART_BYTES", 120)
    monkeypatch.setattr(json_lines, "PART_BYTES", 120)
    monkeypatch.setattr(conversion, "GROUP_ROWS", 4)


def write(tmp_path, name: str, content: bytes | str):
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def read(path, types=None) -> pa.Table:
    files = as_parquet(path, types)
    groups = ParquetGroups(files.paths, keys=files.keys, sources=files.sources)
    assert tuple(groups.schemas) == files.sources
    return pa.concat_tables(groups.read(group) for group in range(len(groups.sizes)))


@pytest.mark.parametrize("name", FILES)
def test_rows_are_those_of_the_file(tmp_path, name):
    path = write(tmp_path, name, FILES[name])
    table = read(path)
    days = table["day"].cast(pa.date32()) if "json" not in name else table["day"]
    found = {field: table[field].to_pylist() for field in ROWS if field != "day"}
    assert found == {field: values for field, values in ROWS.items() if field != "day"}
    assert str(days[0].as_py()).startswith("2024-03-01")
    (file,) = as_parquet(path).paths
    assert file.name == f"{name}.parquet"
    sizes = pq.ParquetFile(file).metadata
    assert [sizes.row_group(n).num_rows for n in range(sizes.num_row_groups)] == [4, 2]


def test_a_directory_keeps_its_keys_and_the_order_of_its_files(tmp_path):
    for day, part in ((2, 10), (2, 9), (10, 1)):
        write(tmp_path, f"day={day}/part-{part}.csv", f"x\n{part}\n")
    write(tmp_path, "_SUCCESS", "")
    table = read(tmp_path)
    assert sorted(zip(table["day"].to_pylist(), table["x"].to_pylist(), strict=True)) == [
        (2, 9), (2, 10), (10, 1),
    ]  # fmt: skip
    table = read(tmp_path / "day=2" / "*.csv")
    assert sorted(table["x"].to_pylist()) == [9, 10]


def test_files_are_converted_again_when_they_change(tmp_path):
    path = write(tmp_path, "x.csv", "x\n1\n")
    first = as_parquet(path)
    assert as_parquet(path) == first
    path.write_text("x\n1\n22\n")
    assert read(path)["x"].to_pylist() == [1, 22]
    assert as_parquet(path) != first
    as_text = read(path, {"x": pa.string(), "other": pa.string()})
    assert as_text["x"].to_pylist() == ["1", "22"]


def test_a_saved_data_set_of_hugging_face(tmp_path):
    write(tmp_path, "data-00000-of-00001.arrow", FILES["x.arrow"])
    for name in ("state.json", "dataset_info.json"):
        write(tmp_path, name, "{}")
    assert read(tmp_path)["age"].to_pylist() == ROWS["age"]


WIDER = {
    "int_to_float": ("x\n" + "1\n" * 80 + "1.5\n", [1.0] * 80 + [1.5]),
    "null_to_int": ("y,x\n" + "1,\n" * 80 + "1,7\n", [None] * 80 + [7.0]),
    "null_to_text": ("y,x\n" + "1,\n" * 80 + "1,a\n", [None] * 80 + ["a"]),
}


@pytest.mark.parametrize("name", WIDER)
def test_a_type_that_fits_all_values(tmp_path, name):
    text, expected = WIDER[name]
    assert read(write(tmp_path, "x.csv", text))["x"].to_pylist() == expected


def test_fields_that_come_late(tmp_path):
    text = '{"x": 1}\n' * 40 + '{"x": 1.5, "tags": ["a", "b"]}\n' + '{"x": null}'
    table = read(write(tmp_path, "x.jsonl", text))
    assert table["x"].to_pylist() == [1.0] * 40 + [1.5, None]
    assert table["tags"].to_pylist() == [None] * 40 + [["a", "b"], None]


BAD = {
    "text-later": ("x.csv", "x\n" + "1\n" * 80 + "a\n", r"line 82, column 'x': 'a' is no int64"),
    "fields": ("x.csv", "x,y\n1,2\n1,2,3\n", r"line 3: .*Expected 2 columns, got 3"),
    "empty": ("x.csv", "", "line 1 is empty"),
    "no-names": ("x.csv", "1,2\n3,4\n", "line 1 has numbers and no names of columns: '1,2'"),
    "unnamed": ("x.csv", "a,,b\n1,2,3\n", "line 1 has a column without a name"),
    "twice": ("x.csv", "a,b,a\n1,2,3\n", "line 1 names 2 columns 'a'"),
    "latin": ("x.csv", "x\nä\n".encode("latin1"), "column 'x' is not UTF-8"),
    "cut": ("x.csv.gz", gzip.compress(csv() * 9)[:-20], "x.csv.gz is damaged"),
    "no-gzip": ("x.csv.gz", "x\n1\n", "x.csv.gz is damaged"),
    "json": ("x.jsonl", '{"x": 1}\n' * 30 + '{"x": \n', "line 3[01]: JSON parse error"),
    "json-types": ("x.jsonl", '{"x": 1}\n{"x": "a"}\n', "line 2: .*from number to string"),
    "json-later": (
        "x.jsonl",
        '{"x": 1}\n' * 30 + '{"x": "text"}\n' * 30,
        "changed from number to string|values of several types",
    ),
    "json-array": ("x.json", '[{"x": 1},\n{"x": 2}]\n', "write each of its objects on a line"),
    "arrow": ("x.arrow", FILES["x.arrow"][:300], "no Arrow file or stream, or damaged"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_malformed(tmp_path, name):
    file, content, message = BAD[name]
    path = write(tmp_path, file, content)
    with pytest.raises(DataError, match=message) as raised:
        as_parquet(path)
    assert str(path) in str(raised.value)
    assert not list(conversion.cache_directory().rglob("*.parquet"))


def test_files_of_several_formats(tmp_path):
    write(tmp_path, "x.csv", "x\n1\n")
    write(tmp_path, "x.jsonl", '{"x": 1}\n')
    with pytest.raises(DataError, match="several formats, CSV and JSON lines; name those of one"):
        format_of(tmp_path)
    assert format_of(tmp_path / "*.csv").name == "CSV"
    pq.write_table(pa.table({"x": [1]}), tmp_path / "x.parquet")
    assert format_of(tmp_path / "x.parquet") is None


@pytest.mark.slow
def test_processes_convert_once(tmp_path):
    path = write(tmp_path, "x.csv", "x\n" + "1\n" * 50_000)
    code = (
        "import pathlib, sys; from jaxrec.data.formats.conversion import as_parquet;"
        "print(as_parquet(pathlib.Path(sys.argv[1])).paths)"
    )
    runs = [
        subprocess.Popen(
            [sys.executable, "-P", "-c", code, path], stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    assert len({run.communicate()[0] for run in runs}) == 1
    assert [run.returncode for run in runs] == [0, 0]
