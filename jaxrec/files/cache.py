"""The directory of what this machine keeps between processes, and can make again."""

from __future__ import annotations

import os
import pathlib


def cache_directory() -> pathlib.Path:
    """Return the directory: JAXREC_CACHE_DIR, or the user's own cache of jaxrec."""
    if named := os.environ.get("JAXREC_CACHE_DIR"):
        return pathlib.Path(named)
    import platformdirs  # An import of jaxrec does not need it.

    return platformdirs.user_cache_path("jaxrec")
