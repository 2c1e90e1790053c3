"""Programs of a Mosaic kernel, on a GPU or in an interpreter."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator

import jax
from jaxtyping import Array, Int32

# The grid's axis. Users' meshes have axes of other names.
PROGRAMS = "jaxrec_program"

# Within `interpreted`: returns the program's number.
_stand_in: contextvars.ContextVar[Callable[[], Array] | None] = contextvars.ContextVar(
    "jaxrec_mosaic_stand_in", default=None
)


@contextlib.contextmanager
def interpreted(number: Callable[[], Array]) -> Iterator[None]:
    """Trace a kernel for an interpreter; ``number`` returns the program's number.

    The functions of `indexing` then are those of `stand_ins`.
    """
    token = _stand_in.set(number)
    try:
        yield
    finally:
        _stand_in.reset(token)


def is_interpreted() -> bool:
    """Return whether kernels are traced for an interpreter."""
    return _stand_in.get() is not None


def program() -> Int32[Array, ""]:
    """Return this program's number among all programs."""
    return (_stand_in.get() or program_on_gpu)()


def program_on_gpu() -> Int32[Array, ""]:
    """Return a program's number, in a grid of programs by Mosaic."""
    return jax.lax.axis_index(PROGRAMS)
