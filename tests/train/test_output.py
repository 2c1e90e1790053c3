"""Outputs that are lost: a run goes on."""

from __future__ import annotations

import contextlib
import io
import os
import sys

import pytest

from jaxrec.commands import main
from jaxrec.train.progress import Output
from tests.commands.test_train import SMALL


@contextlib.contextmanager
def closed_pipe():
    """Yield the writing end of a pipe that nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as file:
        yield file


def test_a_lost_output_drops_what_is_written():
    report = io.StringIO()
    with closed_pipe() as file:
        output = Output(file, report)
        for _ in range(3):
            assert output.write("line\n") == 5
            output.flush()
        assert output.fileno() == file.fileno()
        assert not output.isatty()
        print("Python's own end", file=file, flush=True)
    assert report.getvalue().startswith("jaxrec train: the output is lost (Broken pipe), and train")
    assert report.getvalue().count("\n") == 1


def test_both_outputs_may_be_lost():
    with closed_pipe() as file, closed_pipe() as report:
        output = Output(file, report)
        output.write("line\n")
        output.flush()
        with contextlib.suppress(BrokenPipeError):
            report.close()


def test_a_full_disk_is_a_lost_output():
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full here")
    report = io.StringIO()
    with open("/dev/full", "w") as file:
        output = Output(file, report)
        output.write("line\n")
        output.flush()
    assert "No space left on device" in report.getvalue()


def test_a_run_outlives_its_reader(tmp_path, monkeypatch, capsys):
    """As `jaxrec train | head -1`."""
    with closed_pipe() as file:
        monkeypatch.setattr(sys, "stdout", file)
        assert main(["train", *SMALL, f"--output={tmp_path / 'model'}"]) == 0
        monkeypatch.undo()
    assert (tmp_path / "model/results.json").exists()
    assert (tmp_path / "model/10").is_dir()
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "training goes on without it" in error
