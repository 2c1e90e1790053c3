"""The lock of a run's directory against other runs."""

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

import jax

from jaxrec.mesh.agree import gather_texts

LOCK_FILE = ".lock"

# Errors of file systems without locks.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)

# Locks of this process: the open file, and the number of times it is locked.
_locks: dict[pathlib.Path, tuple[TextIO, int]] = {}


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

    Example:
        >>> import tempfile
        >>> with lock_directory(tempfile.mkdtemp()):
        ...     pass  # write here
    """
    path = pathlib.Path(directory).absolute() / LOCK_FILE
    error: OSError | None = None
    if jax.process_index() == 0:
        try:
            _lock(path)
        except OSError as raised:
            error = raised
    if jax.process_count() > 1:
        text = gather_texts("" if error is None else str(error))[0]
        if text and error is None:
            error = BlockingIOError(errno.EWOULDBLOCK, f"process 0 has no lock: {text}")
    if error is not None:
        raise error
    try:
        yield
    finally:
        if jax.process_index() == 0:
            _unlock(path)


def _lock(path: pathlib.Path) -> None:
    if path in _locks:
        file, count = _locks[path]
        _locks[path] = file, count + 1
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
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
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        stack.pop_all()
    _locks[path] = file, 1


def _unlock(path: pathlib.Path) -> None:
    file, count = _locks.pop(path)
    if count > 1:
        _locks[path] = file, count - 1
    else:
        file.close()
