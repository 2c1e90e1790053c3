"""Files that are complete or not there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from jaxrec.files.atomic import write_atomically


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def test_a_file_replaces_another_when_it_is_complete(tmp_path):
    path = tmp_path / "file"
    for text in ("first", "second"):
        before = path.read_text() if path.exists() else None
        with write_atomically(path) as unfinished:
            unfinished.write_text(text)
            assert (path.read_text() if path.exists() else None) == before
        assert path.read_text() == text
    assert names(tmp_path) == ["file"]


def test_a_directory_replaces_another_with_all_its_files(tmp_path):
    path = str(tmp_path / "directory")
    for name in ("first", "second"):
        with write_atomically(path) as unfinished:
            unfinished.mkdir()
            (unfinished / name).touch()
    assert os.listdir(path) == ["second"]
    assert names(tmp_path) == ["directory"]


@pytest.mark.parametrize("make", ["touch", "mkdir"])
def test_an_error_leaves_what_was_there(tmp_path, make):
    (tmp_path / "path").write_text("before")

    def interrupted():
        with write_atomically(tmp_path / "path") as unfinished:
            getattr(unfinished, make)()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert (tmp_path / "path").read_text() == "before"
    assert names(tmp_path) == ["path"]


def test_the_leftover_of_a_killed_process_is_removed(tmp_path):
    program = """
import os, signal, sys
from jaxrec.files.atomic import write_atomically
with write_atomically(sys.argv[1]) as unfinished:
    unfinished.mkdir()
    (unfinished / "half").touch()
    os.kill(os.getpid(), signal.SIGKILL)
"""
    path = tmp_path / "path"
    killed = subprocess.run([sys.executable, "-P", "-c", program, str(path)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert not path.exists()
    assert len(names(tmp_path)) == 1
    with write_atomically(path) as unfinished:
        unfinished.write_text("whole")
    assert names(tmp_path) == ["path"]
