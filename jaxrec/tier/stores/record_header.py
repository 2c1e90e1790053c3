"""Headers of sparse files of records, and how such files are made."""

from __future__ import annotations

import errno
import os
import pathlib
import zlib

from jaxrec.tier.ids.reference import PAGE_BYTES, stride
from jaxrec.tier.stores.record_format import RecordFormat
from jaxrec.tier.stores.snapshots import sync

FIRST_ROOM = 1024
HEADER_BYTES = 1 << 16

# The last bytes of the header are the state of the records: all are on the disk, or some may be
# torn because the process or the machine ended while they were written.
FLUSHED, WRITTEN = "flushed", "written"
_STATE_BYTES = 64

_MAGIC = "jaxrec records 1, little-endian"


def create(path: pathlib.Path, format: RecordFormat) -> None:
    """Make a file without records at a path, where it appears when it is complete."""
    text = f"{_MAGIC}\n{format.to_json()}\n"
    header = f"{text}{zlib.crc32(text.encode()):08x}\n".encode()
    if len(header) > HEADER_BYTES - _STATE_BYTES:
        raise ValueError(f"the description of the records is too long: {len(header):,} bytes")
    unfinished = path.with_name(f"{path.name}.unfinished")
    room = format.num_ids or FIRST_ROOM
    try:
        with unfinished.open("wb") as file:
            size = file_size(room, stride(format.width, format.num_ids is None))
            resize(file.fileno(), path, size)
            file.write(header)
            file.flush()
            write_state(file.fileno(), FLUSHED)
            # A file system without sparse files allocates the whole size at once.
            if os.fstat(file.fileno()).st_blocks * 512 > (16 << 20) + size // 2:
                raise OSError(errno.EFBIG, _no_sparse_file(size), str(path))
        sync(unfinished)
        unfinished.replace(path)
        sync(path.parent)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def read_format(path: pathlib.Path) -> RecordFormat:
    """Return the format of a file's records."""
    with path.open("rb") as file:
        text = file.read(HEADER_BYTES - _STATE_BYTES).rstrip(b"\0").decode(errors="replace")
    magic, _, rest = text.partition("\n")
    content, _, crc = rest.partition("\n")
    if magic != _MAGIC:
        raise ValueError(f"{path} is not a file of records of this version of jaxrec")
    if crc != f"{zlib.crc32(f'{magic}{chr(10)}{content}{chr(10)}'.encode()):08x}\n":
        raise ValueError(f"{path} is damaged: its header has another checksum")
    return RecordFormat.from_json(content)


def read_state(descriptor: int) -> str:
    """Return the state in the header of an open file; empty in a file of an earlier jaxrec."""
    state = os.pread(descriptor, _STATE_BYTES, HEADER_BYTES - _STATE_BYTES)
    return state.rstrip(b"\0").decode(errors="replace")


def write_state(descriptor: int, state: str) -> None:
    """Write `FLUSHED`, `WRITTEN` or `closed_state` into the header of an open file."""
    os.pwrite(descriptor, state.encode().ljust(_STATE_BYTES, b"\0"), HEADER_BYTES - _STATE_BYTES)


def closed_state() -> str:
    """Return the state of a file that was closed whole; it is true until the machine restarts."""
    try:
        # Written pages survive the process but not the machine. The id of this boot tells which of
        # the two has ended since.
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"closed {file.read().strip()}"
    except OSError:  # another system
        return "closed"


def file_size(room: int, step: int) -> int:
    """Return the size in bytes of a file for ``room`` records of ``step`` bytes each."""
    records = -(-(HEADER_BYTES + room * step) // PAGE_BYTES) * PAGE_BYTES
    return records + PAGE_BYTES  # a hole, by which `seeks_data` is known


def resize(descriptor: int, path: pathlib.Path, size: int) -> None:
    """Set the size of an open file, without allocating blocks."""
    try:
        os.ftruncate(descriptor, size)
    except OSError as error:
        raise OSError(error.errno, _no_sparse_file(size), str(path)) from None


def _no_sparse_file(size: int) -> str:
    return (
        f"the file system refuses a sparse file of {size / 1e9:,.1f} GB; choose a directory on one "
        "that has large sparse files, such as ext4 (up to 17.6 TB) or XFS, and see `ulimit -f`"
    )
