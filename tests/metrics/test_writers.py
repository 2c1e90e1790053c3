from __future__ import annotations

import contextlib
import csv
import io
import json
import struct
import sys

import numpy as np
import pytest
from rich.console import Console

from jaxrec.metrics import ConsoleWriter, CSVWriter, JSONLinesWriter, TensorBoardWriter, Writers

STEPS = [(10, {"click/ne": 0.75, "throughput": 123456.7}), (20, {"click/ne": float("nan")})]


def write(writer, steps=STEPS):
    with contextlib.closing(writer):
        for step, values in steps:
            writer.write(step, values)


def test_console():
    text = io.StringIO()
    write(ConsoleWriter(Console(file=text, soft_wrap=True)))
    assert (
        text.getvalue() == "step 10  click/ne 0.7500  throughput 123,457\nstep 20  click/ne nan\n"
    )


def test_console_of_some_names():
    text = io.StringIO()
    write(ConsoleWriter(Console(file=text), names=["throughput", "[ne]"]))
    assert text.getvalue() == "step 10  throughput 123,457\nstep 20\n"


def test_json_lines(tmp_path):
    path = tmp_path / "deep" / "metrics.jsonl"
    write(JSONLinesWriter(path))
    write(JSONLinesWriter(path), [(30, {"other": 1.0})])
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [record["step"] for record in records] == [10, 20, 30]
    assert records[0]["click/ne"] == 0.75
    assert records[1]["click/ne"] is None
    assert records[2]["other"] == 1.0
    assert all(record["time"] > 1.7e9 for record in records)


@pytest.mark.usefixtures("unchecked")
def test_values_of_numpy_and_values_that_are_not_finite(tmp_path):
    path = str(tmp_path / "metrics.jsonl")
    values = {"ne": np.float32(0.5), "auc": np.array(0.25), "loss": float("inf"), "n": 3}
    write(JSONLinesWriter(path), [(1, values)])
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["ne"] == 0.5
    assert json.loads(line)["loss"] is None
    write(CSVWriter(str(tmp_path / "metrics.csv")), [(1, values)])
    assert (tmp_path / "metrics.csv").read_text().endswith(",0.5,0.25,inf,3\n")


def test_csv(tmp_path):
    path = tmp_path / "metrics.csv"
    write(CSVWriter(path))
    write(CSVWriter(path), [(30, {"throughput": 2.5})])
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["10", "20", "30"]
    assert [row["click/ne"] for row in rows] == ["0.75", "nan", ""]
    assert [row["throughput"] for row in rows] == ["123456.7", "", "2.5"]


@pytest.mark.parametrize("writer", [JSONLinesWriter, CSVWriter])
def test_a_line_cut_short_ends_there(tmp_path, writer):
    path = tmp_path / "metrics"
    write(writer(path), [(10, {"ne": 0.5}), (20, {"ne": 0.25})])
    path.write_bytes(path.read_bytes()[:-3])
    write(writer(path), [(30, {"ne": 0.125})])
    lines = path.read_text().splitlines()
    assert "0.125" in lines[-1]
    assert "20" in lines[-2]
    assert "0.125" not in lines[-2]


def test_csv_columns_are_those_of_the_first_step(tmp_path):
    path = tmp_path / "metrics.csv"
    with contextlib.closing(CSVWriter(path)) as writer:
        writer.write(1, {"ne": 0.5})
        with pytest.raises(ValueError, match="no column for 'auc'; the first step written sets"):
            writer.write(2, {"ne": 0.5, "auc": 0.7})


def test_csv_of_something_else_is_left_alone(tmp_path):
    path = tmp_path / "notes.csv"
    path.write_text("name,age\nada,36\n")
    with pytest.raises(
        ValueError, match="is not a table of metrics: its first columns are name, age"
    ):
        CSVWriter(path)
    assert path.read_text() == "name,age\nada,36\n"


def test_unwritable_files(tmp_path):
    (tmp_path / "file").write_text("")
    for writer in (JSONLinesWriter, CSVWriter):
        with pytest.raises(OSError, match="file"):
            writer(tmp_path / "file" / "metrics")


def events(directory):
    """Steps, tags and values of the event file: length, checksum, record, checksum."""
    from tensorboardX.proto.event_pb2 import Event

    (path,) = directory.iterdir()
    data, found = path.read_bytes(), []
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        event = Event.FromString(data[12 : 12 + length])
        found += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
        data = data[16 + length :]
    return found


def test_tensorboard(tmp_path):
    write(TensorBoardWriter(tmp_path / "logs"), STEPS[:1])
    assert events(tmp_path / "logs") == [
        (10, "click/ne", 0.75),
        (10, "throughput", pytest.approx(123456.7)),
    ]


def test_tensorboard_is_an_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ImportError, match=r"pip install 'jaxrec\[tensorboard\]'"):
        TensorBoardWriter(tmp_path)


def test_several(tmp_path):
    with Writers(JSONLinesWriter(tmp_path / "a"), CSVWriter(tmp_path / "b")) as writers:
        writers.write(1, {"ne": 0.5})
    assert (tmp_path / "a").read_text()
    assert (tmp_path / "b").read_text()


def test_all_are_closed_whatever_happens(tmp_path):
    class Broken:
        def write(self, step, values):
            raise RuntimeError("disk full")

        def close(self):
            raise RuntimeError("still full")

    file = JSONLinesWriter(tmp_path / "a")
    writers = Writers(file, Broken())
    with pytest.raises(RuntimeError, match="still full"):
        writers.close()
    assert file._file.closed
