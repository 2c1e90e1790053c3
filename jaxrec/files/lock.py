"""Locks of directories against other processes.

They are POSIX locks of a whole file (``lockf``), which also work over NFS. The package filelock
uses ``flock``: runs of earlier versions would not see it, file systems without locks are errors,
and its errors do not name the holder.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import pathlib
import socket
import warnings
from collections.abc import Iterator
from typing import TextIO

LOCK_FILE = ".lock"

# Errors of file systems without locks.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)

# Locks of this process: the open file, and the number of times it is locked.
_locks: dict[pathlib.Path, tuple[TextIO, int]] = {}


def lock(directory: str | os.PathLike[str], *, is_shared: bool = False) -> None:
    """Lock a directory against other processes until `unlock`, by its file ``.lock``.

    A process may lock a directory several times if ``is_shared``. A BlockingIOError says which
    process has locked it.
    """
    path = _path(directory)
    # A POSIX lock never excludes its own process, so that this process counts by itself.
    if path in _locks:
        if not is_shared:
            raise BlockingIOError(
                errno.EWOULDBLOCK,
                "this process has it open already; close it first, or choose another directory",
                str(path.parent),
            )
        file, count = _locks[path]
        _locks[path] = file, count + 1
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        # The operating system releases the lock when the process ends, also by SIGKILL. So the file
        # may stay: its content only names the holder in errors.
        file = stack.enter_context(path.open("a+"))
        try:
            # Forked processes, which may outlive this one, do not inherit these locks.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                file.seek(0)
                raise BlockingIOError(
                    errno.EWOULDBLOCK,
                    f"another run writes here ({file.read()}); stop it, or choose another "
                    "directory",
                    str(path.parent),
                ) from None
            if error.errno not in _NO_LOCKS:
                raise
            warnings.warn(
                f"{path.parent}: the file system has no locks ({error.strerror}); make sure that "
                "only one run writes here",
                stacklevel=2,
            )
        with contextlib.suppress(OSError):  # A full disk must not keep a run from its records.
            file.truncate(0)
            file.write(owner())
            file.flush()
        stack.pop_all()
    _locks[path] = file, 1


def unlock(directory: str | os.PathLike[str]) -> None:
    """Release one `lock` of a directory; the directory is free when all of them are released."""
    path = _path(directory)
    file, count = _locks.pop(path)
    if count > 1:
        _locks[path] = file, count - 1
    else:
        with contextlib.suppress(OSError):
            file.close()


@contextlib.contextmanager
def locked(directory: str | os.PathLike[str], *, is_shared: bool = False) -> Iterator[None]:
    """Lock a directory within the block; see `lock`."""
    lock(directory, is_shared=is_shared)
    try:
        yield
    finally:
        unlock(directory)


def owner() -> str:
    """Return this process's name for messages, such as ``process 7 on host8``."""
    return f"process {os.getpid()} on {socket.gethostname()}"


def _path(directory: str | os.PathLike[str]) -> pathlib.Path:
    return pathlib.Path(directory).absolute() / LOCK_FILE
