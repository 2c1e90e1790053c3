"""Files whose checksum is computed while they are written."""

from __future__ import annotations

import io
import zlib
from typing import Any


class CheckedStream(io.RawIOBase):
    """A file that is written, with the checksum of its bytes.

    Attributes:
        bytes: Number of bytes so far.
        crc32: Their checksum.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.bytes = self.crc32 = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        self._stream.write(data)
        self.crc32 = zlib.crc32(data, self.crc32)
        self.bytes += size
        return size
