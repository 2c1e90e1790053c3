"""`jaxrec predict`: scores of every row in order, and one sentence for each error."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from flax import nnx

from jaxrec.commands import main
from jaxrec.data.arrays import as_column
from jaxrec.serve import export, load
from jaxrec.serve.artifact.batch_spec import output_columns
from tests.serve.artifact.test_load import columns, of_columns  # noqa: F401
from tests.serve.record import RECORDED

ROWS = 53


@pytest.fixture
def work(of_columns, tmp_path, monkeypatch):  # noqa: F811
    """A directory with a model, a file of rows and a directory of two files."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").symlink_to(of_columns[2])
    table = columns(ROWS).append_column("row", pa.array(np.arange(ROWS)))
    pq.write_table(table, "rows.parquet", row_group_size=20)
    (tmp_path / "parts").mkdir()
    pq.write_table(table[:30].drop_columns("label"), "parts/a.parquet")
    pq.write_table(table[30:].drop_columns("label"), "parts/b.parquet")
    return tmp_path


def predict(*arguments: str) -> int:
    return main(["predict", *arguments])


@pytest.mark.parametrize("rows", ["rows.parquet", "parts"])
@pytest.mark.parametrize("batch_size", ["7", "16384"])
def test_scores_of_every_row_in_order(work, capsys, rows, batch_size):
    assert predict("model", rows, "-o", "scores.parquet", "--batch-size", batch_size) == 0
    assert f"{ROWS} rows in " in capsys.readouterr().out
    scores = pq.read_table("scores.parquet")
    assert scores.column_names == ["score"]
    expected = load("model").predict_columns(columns(ROWS))
    np.testing.assert_allclose(scores["score"].to_numpy(), expected, rtol=1e-5, atol=1e-5)


def test_scores_of_json_lines(work):
    rows = columns(ROWS).to_pylist()
    (work / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name in ("rows.jsonl", "rows.parquet"):
        assert predict("model", name, "-o", f"{name}.scores") == 0
    assert pq.read_table("rows.jsonl.scores").equals(pq.read_table("rows.parquet.scores"))
    (work / "rows.jsonl").write_text('{"age": 1}\n')
    assert predict("model", "rows.jsonl", "-o", "x") == 1


def test_directories_are_columns_and_parts_may_have_no_values(work):
    """The parts are read by their numbers; a part without cities is as one with nulls."""
    table = columns(ROWS).drop_columns("label").append_column("row", pa.array(range(ROWS)))
    cities = table["city"].to_pylist()
    table = table.set_column(table.column_names.index("city"), "city", pa.array(
        [None if number < 4 else city for number, city in enumerate(cities)], pa.string()
    ))  # fmt: skip
    for number in range(11):
        part = table.slice(4 * number, 4 if number < 10 else ROWS)
        if not number:
            part = part.set_column(part.column_names.index("city"), "city", pa.nulls(4))
        (work / f"by/part={number}").mkdir(parents=True)
        pq.write_table(part, work / f"by/part={number}/x.parquet")
    keep = ["--keep", "row", "part", "city"]
    for path in ("by", "by/part=*"):
        assert predict("model", path, "-o", "scores.parquet", *keep) == 0
        scores = pq.read_table("scores.parquet")
        assert scores["row"].to_pylist() == list(range(ROWS))
        assert scores["part"].to_pylist() == [min(row // 4, 10) for row in range(ROWS)]
        assert scores["city"].to_pylist() == table["city"].to_pylist()
        expected = load("model").predict_columns(table)
        np.testing.assert_allclose(scores["score"].to_numpy(), expected, rtol=1e-5, atol=1e-5)


def test_columns_that_are_kept(work):
    kept = ["--keep", "row", "city"]
    assert predict("model", "rows.parquet", "--output", "scores.parquet", *kept) == 0
    scores = pq.read_table("scores.parquet")
    assert scores.column_names == ["row", "city", "score"]
    assert scores["row"].to_pylist() == list(range(ROWS))
    assert scores["city"].to_pylist() == columns(ROWS)["city"].to_pylist()


def test_outputs_are_columns():
    outputs = {
        "probability": np.float32([0.5, 0.25]),
        "tasks": (np.int32([1, 2]), np.float32([3, 4])),
        "vector": np.arange(4.0).reshape(2, 2),
    }
    predicted = output_columns(outputs)
    table = pa.table({name: as_column(array) for name, array in predicted.items()})
    assert table.to_pylist() == [
        {"probability": 0.5, "tasks.0": 1, "tasks.1": 3.0, "vector": [0.0, 1.0]},
        {"probability": 0.25, "tasks.0": 2, "tasks.1": 4.0, "vector": [2.0, 3.0]},
    ]
    assert output_columns(np.float32([1]))["score"].tolist() == [1.0]


def spoil(work, name: str) -> None:
    table = pq.read_table(work / "rows.parquet")
    if name == "damaged":
        content = bytearray((work / "rows.parquet").read_bytes())
        content[: len(content) // 2] = bytes(len(content) // 2)
        (work / "bad.parquet").write_bytes(content)
        return
    if name == "value":
        income = table["income"].to_pylist()
        income[41] = float("inf")
        table = table.set_column(table.column_names.index("income"), "income", pa.array(income))
    elif name == "column":
        table = table.drop_columns("tags")
    elif name == "empty":
        table = table[:0]
    elif name == "name":
        table = table.rename_columns({"row": "score"})
    pq.write_table(table, work / "bad.parquet", row_group_size=20)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("value", [], "bad.parquet, row 41 (from 0), column 'income': the number is inf"),
        ("column", [], "bad.parquet has no column 'tags'; its columns are"),
        ("empty", [], "bad.parquet has no rows"),
        ("damaged", [], "bad.parquet"),
        ("good", ["--keep", "rwo"], "bad.parquet has no column 'rwo'"),
        ("name", ["--keep", "score"], "--keep score has the name of a column of scores"),
    ],
)
def test_wrong_rows_leave_no_output(work, capsys, name, options, message):
    spoil(work, name)
    assert predict("model", "bad.parquet", "-o", "scores.parquet", *options) == 1
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
    assert sorted(path.name for path in work.glob("*scores*")) == []


def test_wrong_options(work, capsys):
    export(
        nnx.Linear(2, 1, rngs=nnx.Rngs(0)), "linear",
        example=np.zeros((1, 2), np.float32), batch_sizes=(1,), platforms=("cpu",),
    )  # fmt: skip
    for arguments, code, message in (
        ((), 2, "give the model, the rows and the output: MODEL INPUT -o OUTPUT"),
        (("model", "rows.parquet"), 2, "give the model, the rows and the output"),
        (("model", "rows.parquet", "-o", "rows.parquet"), 2, "is one of the input files"),
        (("model", "rows.parquet", "-o", "parts"), 2, "parts is a directory"),
        (("model", "rows.parquet", "-o", "x", "--batch-size", "0"), 2, "must be above 0, got 0"),
        (("model", "missing", "-o", "x"), 1, "missing: No such file or directory"),
        (("model", "no.parquet", "-o", "x"), 1, "no.parquet: No such file or directory"),
        (("parts", "rows.parquet", "-o", "x"), 1, "parts is not an exported model"),
        (("linear", "rows.parquet", "-o", "x"), 1, "exported without an encoder of columns"),
        ((str(RECORDED / "int8"), "rows.parquet", "-o", "x"), 1, "without an encoder of columns"),
    ):
        assert predict(*arguments) == code, arguments
        said = capsys.readouterr().err
        assert message in said
        assert said.count("\n") == 1
