"""Short texts that processes leave for each other at JAX's coordination service.

Unlike gathers of arrays, notes need no device and no common order with the steps: any thread may
write and read them.
"""

from __future__ import annotations

import contextlib
import urllib.parse
from typing import Any

import jax

_PREFIX = "jaxrec"


class NoteBoard:
    """The notes of all processes on one subject; each process has one note at a time.

    Attributes:
        process, num_processes: Number of this process, and of all.

    Args:
        subject: Name of the subject, the same in all processes.

    Raises:
        RuntimeError: There are several processes, and JAX's coordination service does not run.
    """

    def __init__(self, subject: str) -> None:
        # The public interface has no function for keys and values.
        from jax._src import distributed

        client = distributed.global_state.client
        if client is None:
            raise RuntimeError(
                "the processes of this job do not know each other; call "
                "jaxrec.mesh.join_processes() before anything else of JAX"
            )
        self._client: Any = client
        self.process, self.num_processes = jax.process_index(), jax.process_count()
        self._directory = f"{_PREFIX}/{urllib.parse.quote(subject, safe='')}/"

    def write(self, note: str) -> None:
        """Set the note of this process."""
        key = f"{self._directory}{self.process}"
        self._client.key_value_set(key, note, allow_overwrite=True)

    def read(self) -> dict[int, str]:
        """Return the notes by process; processes that wrote none are missing."""
        notes = {}
        for key, note in self._client.key_value_dir_get(self._directory):
            with contextlib.suppress(ValueError):
                notes[int(key.rpartition("/")[2])] = note
        return notes
