"""Files of text and of Arrow become Parquet files with the same rows, once."""

from __future__ import annotations

import bz2
import concurrent.futures
import datetime
import gzip
import json
import subprocess
import sys
import time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jaxrec.data import DataError, ParquetGroups
from jaxrec.data.common_types import common_columns
from jaxrec.data.formats import conversion, delimited, json_lines
from jaxrec.data.formats.conversion import as_parquet, format_of
from jaxrec.data.structs import flat_table

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
    "X.CSV.BZ2": bz2.compress(csv()),
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
    monkeypatch.setattr(delimited, "_SAMPLE_BYTES", 60)
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


LONG = [str(2**64 - 1), str(2**64 - 2)]

WIDER = {
    "int_to_float": ("x\n" + "1\n" * 80 + "1.5\n", [1.0] * 80 + [1.5]),
    "null_to_int": ("y,x\n" + "1,\n" * 80 + "1,7\n", [None] * 80 + [7.0]),
    "null_to_text": ("y,x\n" + "1,\n" * 80 + "1,a\n", [None] * 80 + ["a"]),
    "null_to_id": ("y,x\n" + "1,\n" * 80 + f"1,{2**53 + 1}\n", [None] * 80 + [2**53 + 1]),
    "null_to_int_to_float": (
        "y,x\n" + "1,\n" * 80 + "1,7\n" * 80 + "1,0.5\n",
        [None] * 80 + [7.0] * 80 + [0.5],
    ),
    "beyond_int64": (f'x\n{2**64 - 1}\n{2**64 - 2}\n""\n7\n', [*LONG, None, "7"]),
    "beyond_int64_later": ("x\n" + "1\n" * 80 + f"{2**64 - 1}\n", ["1"] * 80 + LONG[:1]),
    "codes_with_zeros": ("x\n501\n00501\n0\n", ["501", "00501", "0"]),
    "codes_with_zeros_later": ("x\n" + "501\n" * 80 + "00501\n", ["501"] * 80 + ["00501"]),
    "codes_with_zeros_after_nulls": ("y,x\n" + "1,\n" * 80 + "1,007\n", [None] * 80 + ["007"]),
    "large_floats": ("x\n1e20\n100000000000000000000\n", [1e20, 1e20]),
    "one_column_of_tabs": ("x\na\tb\n", ["a\tb"]),
    "separators_in_a_name": ('"a, b, c";x\n1;2\n', [2]),
    "only_carriage_returns": ("y,x\r1,2\r3,4\r", [2, 4]),
    "a_quoted_line_end_at_the_end": ('y,x\n1,"a\n"\n', ["a\n"]),
}


@pytest.mark.parametrize("name", WIDER)
def test_a_type_that_fits_all_values(tmp_path, name):
    text, expected = WIDER[name]
    assert read(write(tmp_path, "x.csv", text))["x"].to_pylist() == expected


@pytest.mark.parametrize("separator", [";", "\t", "|"])
def test_fields_with_commas_stay_text(tmp_path, separator):
    """12,7 may be a decimal or two items: a guess would silently make other values."""
    text = "x;y\n12,7;1.5\n3,45;NA\n5;2.5\n".replace(";", separator)
    table = read(write(tmp_path, "x.csv", text))
    assert table.to_pydict() == {"x": ["12,7", "3,45", "5"], "y": [1.5, None, 2.5]}


def test_the_index_of_pandas(tmp_path):
    table = read(write(tmp_path, "x.csv", ",label\n0,1\n1,0\n"))
    assert table.to_pydict() == {"__index_level_0__": [0, 1], "label": [1, 0]}


# Two files of a column, and the values that both then have: the type is that of all files.
BOTH = {
    "codes": ("x.csv", "x\n501\n7\n", "x\n007\n", ["501", "7", "007"]),
    "ids": ("x.csv", "x\n1\n", f"x\n{2**64 - 1}\n", ["1", f"{2**64 - 1}"]),
    "dates": ("x.csv", "x\n2024-03-01\n", "x\nsoon\n", ["2024-03-01", "soon"]),
    "nulls": ("x.csv", "y,x\n1,\n", "y,x\n1,a\n", [None, "a"]),
    "numbers": ("x.csv", "x\n1\n", "x\n0.5\n", [1, 0.5]),
    "times": (
        "x.jsonl",
        '{"x": "2024-03-01T10:00:00Z"}',
        '{"x": "2024-03-01T10:00:00.25+02:00"}',
        [datetime.datetime(2024, 3, 1, 10), datetime.datetime(2024, 3, 1, 8, 0, 0, 250000)],
    ),
    "times and words": (
        "x.jsonl",
        '{"o": {"x": "2024-03-01"}}',
        '{"o": {"x": "2024-03-01T10:00:00.5 or so"}}',
        ["2024-03-01", "2024-03-01T10:00:00.5 or so"],
    ),
}


@pytest.mark.parametrize("name", BOTH)
def test_columns_of_two_files(tmp_path, name):
    file, one, other, expected = BOTH[name]
    for folder, order in (("a", (one, other)), ("b", (other, one))):
        for number, text in enumerate(order):
            write(tmp_path, f"{folder}/{number}{file}", text)
        files = as_parquet(tmp_path / folder)
        tables = [flat_table(pq.read_table(path)) for path in files.paths]
        columns = [table.columns[-1] for table in tables]
        found = columns if folder == "a" else columns[::-1]
        assert [value for column in found for value in column.to_pylist()] == expected


def test_a_bad_value_beside_floats_is_an_error(tmp_path):
    write(tmp_path, "a/0.csv", "x\n0.5\n1.5\n")
    write(tmp_path, "a/1.csv", "x\n?\n2.5\n")
    files = as_parquet(tmp_path / "a")
    columns = [(path, pq.read_schema(path)) for path in files.paths]
    assert [kinds.types for _, kinds in columns] == [[pa.float64()], [pa.string()]]
    with pytest.raises(DataError, match=r"1\.csv.*0\.csv|0\.csv.*1\.csv"):
        common_columns(columns, ["x"])


@pytest.mark.parametrize(
    "text", ["2024-13-41T10:00:00.25", "2024-02-30T10:00:00.25", "2024-02-03T25:00:00.5"]
)
def test_text_that_is_almost_a_time(tmp_path, text):
    table = read(write(tmp_path, "x.jsonl", f'{{"t": "{text}"}}\n'))
    assert table["t"].to_pylist() == [text]


CODES = {
    "first": "007,b,1\n",
    "last": "1,b,007\n",
    "signed": "1,b,-07\n",
    "quoted": '1,b,"007"\n',
    "after a line end": "1,b,1\r007,b,1\r",
    "no code": "0,2024-01-05 00:01 a00,-0\n",
    "no code: numbers": "1,3.07,10\n",
    "no code: dates": "1,-a-07,10\n",
}


@pytest.mark.parametrize("separator", delimited.SEPARATORS)
@pytest.mark.parametrize("name", CODES)
def test_codes_are_found_wherever_a_part_ends(tmp_path, monkeypatch, name, separator):
    path = write(tmp_path, "x.csv", "a,b,c\n" + CODES[name].replace(",", separator))
    for size in range(1, 12):
        monkeypatch.setattr(delimited, "_SCAN_BYTES", size)
        assert delimited._may_have_zeros(path, separator) == ("no code" not in name)


def test_fields_that_come_late(tmp_path):
    text = '{"x": 1}\n' * 40 + '{"x": 1.5, "tags": ["a", "b"]}\n' + '{"x": null}'
    table = read(write(tmp_path, "x.jsonl", text))
    assert table["x"].to_pylist() == [1.0] * 40 + [1.5, None]
    assert table["tags"].to_pylist() == [None] * 40 + [["a", "b"], None]


def test_a_long_line_of_names(tmp_path, monkeypatch):
    monkeypatch.setattr(delimited, "PART_BYTES", 1 << 20)
    table = read(write(tmp_path, "x.csv", f"{'a' * 70_000},x\n1,2\n"))
    assert table["x"].to_pylist() == [2]


def test_types_that_the_user_gives(tmp_path):
    types = {"x": pa.string(), "y": pa.float64(), "other": pa.string()}
    for name, text in (
        ("x.csv", "x,y\n2024-03-01,1\n"),
        ("x.jsonl", '{"x": "2024-03-01", "y": 1}\n'),
    ):
        assert read(write(tmp_path, name, text), types).to_pylist() == [
            {"x": "2024-03-01", "y": 1.0}
        ]
    objects = write(tmp_path, "objects.jsonl", '{"user": {"x": "2024-03-01", "y": 1}}\n')
    found = read(objects, {"user.x": pa.string(), "user.y": pa.float64(), "x": pa.float64()})
    assert found.to_pylist() == [{"user.x": "2024-03-01", "user.y": 1.0}]
    path = write(tmp_path, "bad.csv", "x,y\n2024,a\n")
    with pytest.raises(DataError, match="line 2, column 'y': 'a' is no double, the type that was"):
        read(path, types)


def test_text_that_looks_like_times_at_first(tmp_path):
    objects = '{"user": {"x": "2024-03-01"}}\n' * 20 + '{"user": {"x": "soon"}}\n' * 20
    table = read(write(tmp_path, "objects.jsonl", objects))
    assert table["user.x"].to_pylist() == ["2024-03-01"] * 20 + ["soon"] * 20
    text = '{"x": "2024-03-01"}\n' * 20 + '{"x": "soon"}\n' * 20
    table = read(write(tmp_path, "x.jsonl", text))
    assert table["x"].to_pylist() == ["2024-03-01"] * 20 + ["soon"] * 20


def test_nested_objects(tmp_path):
    text = '{"x": {"a": 1}, "y": {"b": {}}, "z": {}}\r\n' * 9 + '{"x": {"c": [2]}}\r\n'
    table = read(write(tmp_path, "x.jsonl", "\ufeff" + text))
    assert table["x.a"].to_pylist() == [1] * 9 + [None]
    assert table["x.c"].to_pylist() == [None] * 9 + [[2]]
    assert table["y"].null_count == table["z"].null_count == 10


def test_strings_are_stored_as_dictionaries_and_numbers_are_not(tmp_path):
    rows = {"a": [1, 2], "b": [0.5, 1.5], "c": ["x", "y"], "d": [["x"], []], "e": [{"f": 1}, {}]}
    rows |= {"g": [{"h": "x"}, {"h": "y"}], "i": [[0.5], [1.5]]}
    text = "".join(json.dumps(row) + "\n" for row in pa.table(rows).to_pylist())
    (file,) = as_parquet(write(tmp_path, "x.jsonl", text)).paths
    group = pq.ParquetFile(file).metadata.row_group(0)
    columns = [group.column(number) for number in range(group.num_columns)]
    found = {x.path_in_schema: x.has_dictionary_page for x in columns}
    texts = {"c", "d.list.element", "g.h"}
    assert {name for name, is_dictionary in found.items() if is_dictionary} == texts
    assert found.keys() == texts | {"a", "b", "e.f", "i.list.element"}


def test_long_rows_make_small_groups(tmp_path, monkeypatch):
    monkeypatch.setattr(conversion, "GROUP_ROWS", 1000)
    monkeypatch.setattr(conversion, "GROUP_BYTES", 100)
    text = "x\n" + ("a" * 50 + "\n") * 20
    (file,) = as_parquet(write(tmp_path, "x.csv", text)).paths
    assert pq.ParquetFile(file).metadata.num_row_groups > 5
    assert pq.read_table(file)["x"].to_pylist() == ["a" * 50] * 20


def test_names_without_rows(tmp_path):
    (file,) = as_parquet(write(tmp_path, "x.csv", "y,x\r\n")).paths
    table = pq.read_table(file)
    assert (table.column_names, len(table)) == (["y", "x"], 0)


def test_a_directory_is_a_root_or_below_one(tmp_path):
    write(tmp_path, "day=2/x.csv", "x\n1\n")
    assert read(tmp_path).column_names == ["x", "day"]
    assert read(tmp_path / "day=2").column_names == ["x"]


def test_descriptions_beside_lines_are_no_rows(tmp_path):
    write(tmp_path, "x.jsonl", '{"x": 1}\n')
    write(tmp_path, "info.json", '{"x": 2}\n')
    assert read(tmp_path)["x"].to_pylist() == [1]


def test_a_result_that_a_cleaner_removed_is_made_again(tmp_path):
    path = write(tmp_path, "x.csv", "x\n1\n")
    as_parquet(path).paths[0].unlink()
    assert read(path)["x"].to_pylist() == [1]


def test_threads_convert_once(tmp_path, monkeypatch):
    path, calls, convert = write(tmp_path, "x.csv", "x\n1\n"), [], conversion.convert

    def counted(*arguments):
        calls.append(arguments)
        time.sleep(0.05)
        return convert(*arguments)

    monkeypatch.setattr(conversion, "convert", counted)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        found = list(pool.map(as_parquet, [path] * 4))
    assert found == [found[0]] * 4
    assert len(calls) == 1


def test_a_line_without_end_is_not_read_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(json_lines, "LINE_BYTES", 500)
    path = write(tmp_path, "x.json", "[" + '{"x": 1}, ' * 1000 + "]")
    with pytest.raises(DataError, match="line 1 is longer than 500 bytes; the file is one array"):
        as_parquet(path)


def without_checks() -> pa.Table:
    """A column of text whose bytes are no text."""
    buffers = pa.array([b"\xff"]).buffers()
    return pa.table({"x": pa.Array.from_buffers(pa.string(), 1, buffers)})


def stream_of(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


BAD = {
    "text-later": ("x.csv", "x\n" + "1\n" * 80 + "a\n", r"line 82, column 'x': 'a' is no int64"),
    "fields": ("x.csv", "x,y\n1,2\n1,2,3\n", r"line 3: .*Expected 2 columns, got 3"),
    "empty": ("x.csv", "", "x.csv is empty; leave it out"),
    "empty-line": ("x.csv", "\nx\n1\n", "line 1 is empty"),
    "excel": ("x.csv", "sep=;\nx;y\n1;2\n", "line 1 is 'sep=;', which is for Excel; remove"),
    "name-on-two-lines": ("x.csv", 'a,"b\nc"\n1,2\n', "line 1 has a quote that is not closed"),
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
    "arrow-values": ("x.arrow", stream_of(without_checks()), "damaged .*UTF8"),
    "arrow-type": (
        "x.arrow",
        stream_of(pa.table({"x": pa.array([{}], pa.struct([]))})),
        "a column that Parquet cannot hold",
    ),
    "latin-later": (
        "x.csv",
        ("x\n" + "a\n" * 80 + "ä\n").encode("latin1"),
        "column 'x' is not UTF-8",
    ),
    "latin-name": ("x.csv", "ä\n1\n".encode("latin1"), "line 1 is not UTF-8"),
    "gzip-without-name": ("x.csv", gzip.compress(csv()), "by gzip; name it x.csv.gz"),
    "utf16": ("x.csv", "y,x\n1,2\n".encode("utf-16"), "line 1 is not UTF-8 .* iconv -f UTF-16 "),
    "line-after-line-ends": (
        "x.csv",
        'y,x\n"a\nb",1\n\n' + '"c\nd",2\n' * 40 + '"e\nf",z\n',
        "line 85, column 'x': 'z' is no int64",
    ),
    "fields-after-blank-lines": ("x.csv", "x,y\n1,2\n\n\n1,2,3\n", "line 5: .*Expected 2"),
    "json-after-blank-lines": ("x.jsonl", '{"x": 1}\n\n\n{"x": "a"}\n', "line 4: .*to string"),
    "open-quote": ("x.csv", 'y,x\n1,"a\n2,b\n', r"column 'x': .* begins with 'a.n2,b.n' has no"),
    "open-quote-far": ("x.csv", 'y,x\n1,"a\n' + "2,b\n" * 900, "a quote may not be closed"),
    "json-empty": ("x.jsonl", "", "x.jsonl is empty; leave it out"),
    "json-long": ("x.jsonl", f'{{"y": 1}}\n{{"x": [{2**64}]}}\n', "line 2, field 'x': a whole"),
    "json-long-in-object": (
        "x.jsonl",
        f'{{"y": {{"id": {2**64}}}}}\n',
        "line 1, field 'y.id': a whole",
    ),
    "json-object-of-lines": ("x.json", '{\n"x": 1\n}\n' * 40, "each line holds one whole object"),
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
        "sizes = []; as_parquet(pathlib.Path(sys.argv[1]), progress=sizes.append);"
        "print(len(sizes))"
    )
    runs = [
        subprocess.Popen(
            [sys.executable, "-P", "-c", code, path], stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    assert sorted(run.communicate()[0].strip() for run in runs) == ["0", "1"]
    assert [run.returncode for run in runs] == [0, 0]
