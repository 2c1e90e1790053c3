"""Implementations of the kernels that are checked, timed and compiled for GPUs."""

from __future__ import annotations

from types import ModuleType

from jaxrec.embed.kernels.registry import IMPLEMENTATIONS

# Those that must pass a trial on a card are written for GPUs; the reference runs in XLA.
BACKENDS = tuple(
    each.name for each in IMPLEMENTATIONS if "cuda" in each.platforms and each.is_tried
)
NAMES = ("reference", *BACKENDS)


def module(name: str) -> ModuleType:
    """Return the module of an implementation.

    Raises:
        ImportError: This JAX does not have what it is written in.
    """
    (found,) = (each for each in IMPLEMENTATIONS if each.name == name)
    return found.module


def reason_missing(name: str) -> str | None:
    """Return why an implementation does not run with this JAX; None: it does."""
    try:
        found = module(name)
    except ImportError as error:
        return str(error)
    return found.refuse("row_lookup", {})
