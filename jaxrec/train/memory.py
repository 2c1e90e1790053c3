"""Keeping memory that will be needed again."""

from __future__ import annotations

import ctypes
import platform

# malloc.h of the GNU C library.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -2, -4, -8


def keep_freed_memory() -> bool:
    """Makes the C library keep the memory that a step frees, for the next step.

    On a CPU, XLA allocates a step's temporary arrays anew on every call. As they are large, the
    allocator takes them from the system and gives them back each time, and the system fills every
    page with zeros: at a batch of 8192 that is more than half of the time of a DLRM's interactions.
    Call it once, before the first computation. The process then stays as large as it ever was.

    Returns:
        Whether it could be done: with the GNU C library, that is on most Linux systems.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    settings = {_M_MMAP_MAX: 0, _M_TRIM_THRESHOLD: 2**31 - 1, _M_TOP_PAD: 2**28, _M_ARENA_MAX: 1}
    return all([libc.mallopt(name, value) == 1 for name, value in settings.items()])
