"""Row stores by URL."""

from __future__ import annotations

from jaxrec.tier.memory_store import MemoryStore
from jaxrec.tier.row_store import RowStore


def open_store(url: str | RowStore) -> RowStore:
    """Return the store of a URL; a store itself is returned as it is.

    Args:
        url: ``"memory://"``.

    Raises:
        ValueError: No store has that scheme.
    """
    if isinstance(url, RowStore):
        return url
    if url == "memory://":
        return MemoryStore()
    raise ValueError(f"no row store has the URL {url!r}; use 'memory://' or a jaxrec.tier.RowStore")
