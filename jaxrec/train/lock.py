"""The lock of a run's directory against other runs."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import jax

from jaxrec.lock import lock, unlock
from jaxrec.mesh.agree import on_process_zero


@contextlib.contextmanager
def lock_directory(directory: str | os.PathLike[str]) -> Iterator[None]:
    """Lock a directory against other runs; make it if needed.

    The operating system releases the lock when the process ends, also by SIGKILL. A process may
    lock a directory several times. With several processes each of them calls this, and process 0
    holds the lock.

    Args:
        directory: The run's directory; the lock is its file ``.lock``.

    Raises:
        BlockingIOError: Another run has locked the directory; all processes raise it.
        OSError: The directory cannot be written.
    """
    on_process_zero(lambda: lock(directory, is_shared=True), (BlockingIOError, OSError))
    try:
        yield
    finally:
        if jax.process_index() == 0:
            unlock(directory)
