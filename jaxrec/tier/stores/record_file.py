"""Sparse files of records: header, growth, memory, copies."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import pathlib
from collections.abc import Iterator

import numpy as np

from jaxrec.tier.ids import implementation
from jaxrec.tier.ids.reference import PAGE_BYTES, RecordArray, stride
from jaxrec.tier.stores.record_header import (
    FIRST_ROOM,
    FLUSHED,
    HEADER_BYTES,
    WRITTEN,
    closed_state,
    file_size,
    read_format,
    read_state,
    resize,
    write_state,
)

RECORDS = "records"

# Threads that read from the disk at the same time; one is enough for a file in memory.
_THREADS = 8
_PHYSICAL_BYTES = os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE

# A file gives its mapped pages back above this many bytes; they stay in the operating system's
# cache, but the process's memory would seem to grow without a bound. Each page costs a page fault
# when it is used again. So this happens only after uses that may have mapped this share of the
# bytes since the last time.
_MAPPED_BYTES = max(512 << 20, _PHYSICAL_BYTES // 4)
_MAPPED_SHARE = 1 / 16

# Free bytes of a disk below which no page is written through the map, since a full disk would kill
# the process by SIGBUS. File systems that copy on write need room for existing pages, too.
_SPARE_BYTES = 256 << 20

# FICLONE of linux/fs.h: makes a file share the blocks of another.
_CLONE = 0x40049409


class RecordFile:
    """Records by slot in a memory-mapped, sparse file that `create` made.

    ``may_be_torn`` is set if an earlier run may have ended while it wrote. `remove_torn` clears it.
    """

    # The file is a header of 64 KiB, records, and a page that is never written. The header is text:
    # a magic line, the format as JSON and a checksum; its last bytes are the state of the records.
    # `jaxrec.tier.ids.reference` describes the records. A file of `num_ids` has a slot for each id;
    # any other starts with 1,024 slots, which double.
    def __init__(self, path: pathlib.Path, *, is_writable: bool = True) -> None:
        self.path, self._is_writable, self.start = path, is_writable, HEADER_BYTES
        self.format = read_format(path)
        self.stride = stride(self.format.width, self.format.num_ids is None)
        self._descriptor = os.open(path, os.O_RDWR if is_writable else os.O_RDONLY)
        try:
            self._check_size()
            self._map_file()
        except BaseException:
            os.close(self._descriptor)
            raise
        self._state = read_state(self._descriptor)
        self.may_be_torn = self._state not in (FLUSHED, closed_state())
        self._resident = _mapped_bytes()
        self._touched = 0  # bytes of the pages of all uses since pages were given back

    def _check_size(self) -> None:
        size = os.fstat(self._descriptor).st_size
        self.room = self.format.num_ids or FIRST_ROOM
        while self.format.num_ids is None and file_size(self.room, self.stride) < size:
            self.room *= 2
        if (wanted := file_size(self.room, self.stride)) != size:
            raise ValueError(
                f"{self.path} is truncated or damaged: it has {size:,} bytes and should have "
                f"{wanted:,}; restore it from a checkpoint, or remove it to begin anew"
            )

    def _map_file(self) -> None:
        size = os.fstat(self._descriptor).st_size
        try:
            access = mmap.ACCESS_WRITE if self._is_writable else mmap.ACCESS_READ
            self._mmap = mmap.mmap(self._descriptor, size, access=access)
        except OSError as error:
            raise OSError(
                error.errno, f"{size:,} bytes cannot be mapped into memory: {error.strerror}",
                str(self.path),
            ) from None  # fmt: skip
        # Records are read at random: pages that the kernel reads ahead would only push others out.
        self._mmap.madvise(mmap.MADV_RANDOM)
        self._use_map()

    def _use_map(self) -> None:
        size = len(self._mmap)
        self._records = RecordArray(
            bytes=np.frombuffer(self._mmap, np.uint8),
            pages=np.zeros(size // PAGE_BYTES // 64 + 1, np.uint64),
            # The last page is a hole. Where the file system reports data, it does not report holes.
            seeks_data=self._data_at(size - PAGE_BYTES) is None,
            descriptor=self._descriptor,
            start=HEADER_BYTES,
            width=self.format.width,
            has_id=self.format.num_ids is None,
        )

    def read(
        self, slots: np.ndarray, ids: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Read the records of slots, int64 ``[n]``; return flags, ids and records.

        `jaxrec.tier.ids.reference.read_records` describes the three arrays.
        """
        self._give_pages_back(slots.size)
        return implementation.current().read_records(self._records, slots, ids, self._threads())

    def write(self, slots: np.ndarray, ids: np.ndarray, records: np.ndarray) -> None:
        """Write records, uint8 ``[n, width]``, of ids ``[n]`` into distinct slots ``[n]``."""
        self._begin_writing()
        self._give_pages_back(slots.size)
        through_map = self._can_write_through_map(slots.size)
        records = np.ascontiguousarray(records)
        error = implementation.current().write_records(
            self._records, slots, ids, records, through_map, self._threads()
        )
        if error:  # a record may have been written in part
            absent = slots[~self.read(slots, ids)[0]]
            self.erase(absent[self.is_used(absent)])
        self._check(error)

    def read_whole(
        self, slots: np.ndarray, ids: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Read records as `read` does; raise a ValueError if one is damaged instead of absent."""
        found, found_ids, records = self.read(slots, ids)
        if not found.all():
            absent = np.flatnonzero(~found)
            damaged = absent[self.is_used(slots[absent])]
            if damaged.size:
                named = "" if ids is None else f" of id {ids[damaged[0]]}"
                raise ValueError(
                    f"{self.path} is damaged: of {slots.size:,} records that were read, "
                    f"{damaged.size:,} do not have the bytes that were written, the first{named} "
                    f"in place {slots[damaged[0]]}; remove the file, and start again from the last "
                    "checkpoint"
                )
        return found, found_ids, records

    def is_used(self, slots: np.ndarray) -> np.ndarray:
        """Return whether slots that were read have a record, whole or torn, bool ``[n]``."""
        places = HEADER_BYTES + np.maximum(slots, 0) * self.stride
        pages = places // PAGE_BYTES
        exists = slots >= 0
        if self._records.seeks_data and implementation.current().MARKS_PAGES:
            # A page without its bit is a hole, which has no record: the map need not be touched
            # there.
            bits = self._records.pages[pages // 64] >> (pages % 64).astype(np.uint64)
            exists &= (bits & np.uint64(1)).astype(bool)
        tags = self._records.bytes.view(np.uint64)
        used = np.zeros(slots.size, bool)
        used[exists] = tags[places[exists] // 8] != 0
        return used

    def remove_torn(self) -> int:
        """Remove the torn records, and return their number."""
        count = 0
        for slots in self.slots(1 << 16):
            absent = slots[~self.read(slots)[0]]
            torn = absent[self.is_used(absent)]
            self.erase(torn)
            count += torn.size
        self._begin_writing()
        self.may_be_torn = False
        return count

    def erase(self, slots: np.ndarray) -> None:
        """Remove the records of slots."""
        self._begin_writing()
        self._give_pages_back(slots.size)
        self._check(implementation.current().erase_records(self._records, slots))

    def grow(self, room: int) -> None:
        """Make room for more records."""
        size = file_size(room, self.stride)
        resize(self._descriptor, self.path, size)
        pages = self._records.pages
        self.room = room
        # A map with views of its memory cannot be resized.
        del self._records
        try:
            self._mmap.resize(size)  # pages that are mapped stay so
        except (SystemError, ValueError, OSError):  # platforms that cannot
            self._mmap.close()
            self._map_file()
        else:
            self._use_map()
        self._records.pages[: pages.size] = pages

    def slots(self, size: int) -> Iterator[np.ndarray]:
        """Yield the slots that may have a record, int64, ``size`` at a time."""
        parts, count, next_slot, position = [], 0, 0, HEADER_BYTES
        while (extent := self._extent(position)) is not None:
            begin, position = extent
            first = max((begin - HEADER_BYTES) // self.stride, next_slot)
            next_slot = min(-(-(position - HEADER_BYTES) // self.stride), self.room)
            while first < next_slot:
                last = min(first + size - count, next_slot)
                parts.append(np.arange(first, last))
                count, first = count + last - first, last
                if count >= size:
                    yield self._soon(np.concatenate(parts))
                    parts, count = [], 0
        if parts:
            yield self._soon(np.concatenate(parts))

    def flush(self) -> None:
        """Wait until the file is durable."""
        self._mmap.flush()
        os.fsync(self._descriptor)
        # The state comes last: it must not reach the disk before the records that it vouches for.
        if not self.may_be_torn:
            self._state = FLUSHED
            write_state(self._descriptor, FLUSHED)

    def copy_to(self, path: pathlib.Path) -> None:
        """Copy the file to a path in the kernel; the copies share blocks if the file system can."""
        with path.open("wb") as copy:
            with contextlib.suppress(OSError):
                fcntl.ioctl(copy, _CLONE, self._descriptor)
                return
            resize(copy.fileno(), path, os.fstat(self._descriptor).st_size)
            position = 0
            while (extent := self._extent(position)) is not None:
                begin, position = extent
                _copy(self._descriptor, copy.fileno(), begin, position)

    def close(self) -> None:
        """Close the file."""
        if self._descriptor >= 0:
            if self._state == WRITTEN and not self.may_be_torn:
                write_state(self._descriptor, closed_state())
            del self._records
            self._mmap.close()
            os.close(self._descriptor)
            self._descriptor = -1

    def _begin_writing(self) -> None:
        """Record on disk that records may be torn, before the first one can be."""
        if self._state != WRITTEN:
            write_state(self._descriptor, WRITTEN)
            os.fsync(self._descriptor)
            self._state = WRITTEN

    def _check(self, error: int) -> None:
        if error:
            hint = "; free some of it and start again from the last checkpoint"
            hint = hint if error in (errno.ENOSPC, errno.EDQUOT) else ""
            raise OSError(
                error, f"records cannot be written: {os.strerror(error)}{hint}", str(self.path)
            )

    def _can_write_through_map(self, count: int) -> bool:
        disk = os.fstatvfs(self._descriptor)
        spare = _SPARE_BYTES + 2 * PAGE_BYTES * count
        is_paged = disk.f_frsize >= PAGE_BYTES == mmap.PAGESIZE
        return is_paged and disk.f_bavail * disk.f_frsize > spare

    def _threads(self) -> int:
        on_disk = os.fstat(self._descriptor).st_blocks * 512
        return _THREADS if on_disk > _PHYSICAL_BYTES // 2 else 1

    def _give_pages_back(self, count: int) -> None:
        """Give mapped pages back to the system if too many are in memory, before ``count`` uses."""
        self._touched += count * (PAGE_BYTES + self.stride)
        if self._touched <= _MAPPED_BYTES * _MAPPED_SHARE:
            return
        if _mapped_bytes() - self._resident > _MAPPED_BYTES:
            self._mmap.madvise(mmap.MADV_DONTNEED)
            self._touched = 0

    def _data_at(self, position: int) -> int | None:
        """Return the position of the first data from a position on; None if only holes follow."""
        try:
            return os.lseek(self._descriptor, position, os.SEEK_DATA)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            return None

    def _extent(self, position: int) -> tuple[int, int] | None:
        """Return begin and end of the first data from a position on; None: only holes follow."""
        if (begin := self._data_at(position)) is None:
            return None
        return begin, os.lseek(self._descriptor, begin, os.SEEK_HOLE)

    def _soon(self, slots: np.ndarray) -> np.ndarray:
        """Tell the operating system that ascending slots will be read soon, and return them."""
        if hasattr(os, "posix_fadvise"):
            first = HEADER_BYTES + int(slots[0]) * self.stride
            size = (int(slots[-1]) - int(slots[0]) + 1) * self.stride
            # With large holes between the slots, the kernel would read what is not needed.
            if size <= 2 * slots.size * self.stride:
                os.posix_fadvise(self._descriptor, first, size, os.POSIX_FADV_WILLNEED)
        return slots


def _copy(source: int, target: int, begin: int, end: int) -> None:
    while begin < end:
        try:
            count = os.copy_file_range(source, target, end - begin, begin, begin)
        except (AttributeError, OSError) as error:
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise
            count = os.pwrite(target, os.pread(source, min(end - begin, 1 << 22), begin), begin)
        begin += count


def _mapped_bytes() -> int:
    """Return the bytes of mapped files in this process's memory; 0 if that is unknown."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[2]) * mmap.PAGESIZE
    except OSError:
        return 0
