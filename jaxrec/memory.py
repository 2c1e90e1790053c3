"""Settings of the C library's memory allocator; imports no other module, so it can come first."""

from __future__ import annotations

import ctypes
import platform

# Numbers of `mallopt`'s parameters in malloc.h of the GNU C library.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -2, -4, -8


def keep_freed_memory() -> bool:
    """Make the C library keep freed memory for later allocations; for training on CPUs.

    XLA allocates the temporary arrays of a step on each call. For arrays of this size the allocator
    asks the operating system for memory and returns it after the step, and the system fills each
    new page with zeros. This takes a quarter of the time of a step of DLRM with 2,048 samples.
    ``jaxrec train`` calls this function.

    The settings hold for the whole process. Its memory then never shrinks, and all its threads
    share one arena of memory.

    Call the function before other imports. A thread that was started earlier may have its own
    arena; ``jaxrec.train`` and ``jaxrec.data`` import PyArrow, which starts such a thread. XLA's
    threads then use that arena, too, and return arrays of more than 64 MB after each step.

    Returns:
        True: the C library is GNU's, as on most Linux systems, has taken the settings, and has one
        arena. False: it has a second arena, has refused a setting, or is another C library, whose
        settings stay.

    Example:
        >>> import jaxrec
        >>> is_kept = jaxrec.keep_freed_memory()
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    # Take all arrays from the heap, and none by mmap. Never return the heap's top, which grows by
    # 256 MB at a time. Make no second arena: its heaps have up to 64 MB, too little for the arrays.
    settings = {_M_MMAP_MAX: 0, _M_TRIM_THRESHOLD: 2**31 - 1, _M_TOP_PAD: 2**28, _M_ARENA_MAX: 1}
    # A list: all settings are made, also if one of them is refused.
    return all([libc.mallopt(name, value) == 1 for name, value in settings.items()]) and (
        _number_of_arenas(libc) == 1
    )


def _number_of_arenas(libc: ctypes.CDLL) -> int:
    # The only report with the arenas is malloc_info's XML, with an element "heap" for each.
    libc.open_memstream.restype = ctypes.c_void_p
    text, size = ctypes.c_char_p(), ctypes.c_size_t()
    stream = ctypes.c_void_p(libc.open_memstream(ctypes.byref(text), ctypes.byref(size)))
    libc.malloc_info(0, stream)
    libc.fclose(stream)
    number = (text.value or b"").count(b"<heap nr=")
    libc.free(text)
    return number
