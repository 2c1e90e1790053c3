"""Records in a memory-mapped file, each with a checksum."""

from __future__ import annotations

import dataclasses

import numpy as np

PAGE_BYTES = 4096
_WORD = 8


@dataclasses.dataclass(frozen=True)
class RecordArray:
    """Records one after another in a mapped file.

    A record starts with its tag, 8 bytes: 0 if it is absent, otherwise its checksum, which is never
    0. A hole of a sparse file is therefore full of absent records, and a record that was written in
    part counts as absent. Then come the id (8 bytes, if ``has_id``; otherwise the slot is the id),
    the bytes of the record, and zeros up to a multiple of 8.

    Attributes:
        bytes: The whole file, uint8; shared with the file.
        pages: Bits of the pages of 4,096 bytes that surely exist in the file, uint64. Only
            these are written through ``bytes``: the process is killed if it writes to a new page
            when the disk is full.
        seeks_data: Whether ``lseek`` with SEEK_DATA finds further pages that exist.
        descriptor: The open file.
        start: Position of the first record in the file.
        width: Bytes of a record.
        has_id: Whether records have their id.
    """

    bytes: np.ndarray
    pages: np.ndarray
    seeks_data: bool
    descriptor: int
    start: int
    width: int
    has_id: bool

    @property
    def head(self) -> int:
        """Bytes before those of the record."""
        return 2 * _WORD if self.has_id else _WORD

    @property
    def stride(self) -> int:
        """Bytes from one record to the next."""
        return stride(self.width, self.has_id)


def stride(width: int, has_id: bool) -> int:
    """Return the bytes that a record of some width takes in the file."""
    whole = width + (2 * _WORD if has_id else _WORD)
    return (whole + _WORD - 1) // _WORD * _WORD
