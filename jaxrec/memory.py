"""Settings of the C library's memory allocator; loads nothing else, so that it can come first."""

from __future__ import annotations

import ctypes
import platform

# malloc.h of the GNU C library.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -2, -4, -8


def keep_freed_memory() -> bool:
    """Make the C library keep freed memory for later allocations; for training on CPUs.

    XLA allocates the temporary arrays of a step on each call. The allocator takes such large arrays
    from the operating system and returns them each time, and the system fills each page with zeros:
    a quarter of the time of a step of DLRM with 2,048 samples. ``jaxrec train`` calls this. It
    holds for the whole process, whose memory then never shrinks and whose threads share one arena
    of memory.

    Call it first, before other imports: a thread that was started earlier may have an arena of its
    own, as one of PyArrow has, which ``jaxrec.train`` and ``jaxrec.data`` import. XLA's threads
    then use that arena, too, from which arrays of more than 64 MB are still returned each time.

    Returns:
        Whether the C library is GNU's, as on most Linux systems, took the settings, and has no
        second arena. Other C libraries are left as they are.

    Example:
        >>> import jaxrec
        >>> is_kept = jaxrec.keep_freed_memory()
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    settings = {_M_MMAP_MAX: 0, _M_TRIM_THRESHOLD: 2**31 - 1, _M_TOP_PAD: 2**28, _M_ARENA_MAX: 1}
    return all([libc.mallopt(name, value) == 1 for name, value in settings.items()]) and (
        _number_of_arenas(libc) == 1
    )


def _number_of_arenas(libc: ctypes.CDLL) -> int:
    libc.open_memstream.restype = ctypes.c_void_p
    text, size = ctypes.c_char_p(), ctypes.c_size_t()
    stream = ctypes.c_void_p(libc.open_memstream(ctypes.byref(text), ctypes.byref(size)))
    libc.malloc_info(0, stream)
    libc.fclose(stream)
    number = (text.value or b"").count(b"<heap nr=")
    libc.free(text)
    return number
