"""Files and directories that are complete or not there."""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
from collections.abc import Iterator


@contextlib.contextmanager
def write_atomically(path: str | os.PathLike[str]) -> Iterator[pathlib.Path]:
    """Write a file or a directory that appears under its name when it is complete.

    The block writes to the yielded path ``.NAME.unfinished`` beside ``path``, which at its end
    replaces ``path``. If the block raises, it is removed and ``path`` stays as it was. If the
    process is killed, the next call removes it.
    """
    path = pathlib.Path(path)
    # In the same directory: a rename is atomic only within a file system.
    unfinished = path.with_name(f".{path.name}.unfinished")
    _remove(unfinished)
    try:
        yield unfinished
        # A rename replaces a file, but not a directory that has files: for a moment there is none.
        if unfinished.is_dir():
            _remove(path)
        unfinished.replace(path)
    except BaseException:
        _remove(unfinished)
        raise


def sync(path: pathlib.Path) -> None:
    """Wait until a file or directory is on the disk, where a power cut cannot undo it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: pathlib.Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
