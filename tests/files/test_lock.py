"""Locks of directories; `tests/train/test_lock.py` has those of runs, by the same functions."""

from __future__ import annotations

import pytest

from jaxrec.files.lock import LOCK_FILE, lock, owner, unlock
from tests.train.test_lock import is_locked, other_run


def test_once_or_several_times(tmp_path):
    directory = tmp_path / "a" / "b"
    lock(directory)
    with pytest.raises(BlockingIOError, match="this process has it open already; close it first"):
        lock(directory)
    assert is_locked(directory)
    lock(directory, is_shared=True)
    unlock(directory)
    assert is_locked(directory)
    unlock(directory)
    assert not is_locked(directory)
    lock(directory)
    unlock(directory)
    assert (directory / LOCK_FILE).read_text() == owner()


def test_another_process(tmp_path):
    with other_run(tmp_path), pytest.raises(BlockingIOError, match=r"process 7 on host8\); stop"):
        lock(tmp_path)
    lock(tmp_path)
    unlock(tmp_path)
