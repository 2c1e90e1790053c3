"""JAX's cache of compiled programs, shared by processes that read and are killed at any moment."""

from __future__ import annotations

import os
import tempfile

from jax._src import compilation_cache
from jax._src.lru_cache import _CACHE_SUFFIX, LRUCache


def write_whole_programs() -> None:
    """Let the cache write a program to another file first, and rename it.

    JAX writes in place. Another process could read half of a program, which JAX warns of, and half
    of a program stays when the process is killed.
    """

    def put(self, key: str, value: bytes) -> None:
        path = self.path / f"{key}{_CACHE_SUFFIX}"
        if not path.exists():
            with tempfile.NamedTemporaryFile(dir=self.path, delete=False) as file:
                file.write(value)
            os.replace(file.name, path)

    LRUCache.put = put


def write_without_compression() -> None:
    """Let the cache write programs as they are; zlib takes a third of the time of writing one."""
    compilation_cache.compress_executable = compilation_cache.decompress_executable = bytes
