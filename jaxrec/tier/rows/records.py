"""Records of row stores: rows and their state as bytes, and counts of the rows that travel."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from jaxrec.embed.checkpoint_view import LogicalTable
from jaxrec.tier.stores.record_format import RecordFormat


@dataclasses.dataclass(frozen=True)
class RecordLayout:
    """Layout of a record: a row of each table of a vocabulary, with its optimizer state, as bytes.

    Attributes:
        leaves: Number of the table, name (``"rows"`` or a state's), width (None: one number a row)
            and type of each array, in the order of the record.
    """

    leaves: tuple[tuple[int, str, int | None, np.dtype], ...]

    @classmethod
    def of(cls, shapes: Sequence[LogicalTable]) -> RecordLayout:
        """Make the layout for tables of these shapes (`TableStore.checkpoint_shapes`)."""
        leaves = []
        for number, table in enumerate(shapes):
            for name, array in {"rows": table.rows, **dict(sorted(table.state.items()))}.items():
                width = array.shape[1] if len(array.shape) > 1 else None
                leaves.append((number, name, width, np.dtype(array.dtype)))
        return cls(tuple(leaves))

    @property
    def width(self) -> int:
        """Number of bytes of a record."""
        return sum((width or 1) * dtype.itemsize for _, _, width, dtype in self.leaves)

    def record_format(self, names: Sequence[str] = (), num_ids: int | None = None) -> RecordFormat:
        """Return the format of the records; tables without ``names`` are numbered.

        Ids are 0 to ``num_ids`` - 1; with None any 64-bit ids except -1.
        """
        fields = (
            f"{names[number] if names else f'table {number}'} {name} {dtype}[{width or 1}]"
            for number, name, width, dtype in self.leaves
        )
        return RecordFormat(self.width, ", ".join(fields), num_ids)

    def parts(self, tables: Sequence[Mapping[str, np.ndarray]]) -> list[np.ndarray]:
        """Return the bytes of rows and states, uint8 ``[n, _]`` for each of `leaves`.

        ``tables`` has arrays ``[n, ...]`` by name for each table. Side by side the parts are the
        records.

        Raises:
            ValueError: If an array has another shape.
        """
        count, parts = len(tables[0]["rows"]), []
        for number, name, width, dtype in self.leaves:
            values = tables[number][name]
            shape = (count, width) if width else (count,)
            if values.shape != shape:
                raise ValueError(
                    f"table {number}: {name!r} has the shape {values.shape}, records of {count} "
                    f"rows need {shape}"
                )
            array = np.ascontiguousarray(values, dtype)
            parts.append(array.view(np.uint8).reshape(count, (width or 1) * dtype.itemsize))
        return parts

    def pack(self, tables: Sequence[Mapping[str, np.ndarray]]) -> np.ndarray:
        """Return the records of rows and states, uint8 ``[n, width]``; see `parts`."""
        return np.concatenate(self.parts(tables), axis=1)

    def unpack(self, records: np.ndarray) -> list[dict[str, np.ndarray]]:
        """Return views of the rows and states in records, by name for each table."""
        tables: dict[int, dict[str, np.ndarray]] = {}
        start = 0
        for number, name, width, dtype in self.leaves:
            stop = start + (width or 1) * dtype.itemsize
            # A view of another type needs the bytes of each record side by side, which stores
            # return.
            values = records[:, start:stop].view(dtype)
            tables.setdefault(number, {})[name] = values if width else values[:, 0]
            start = stop
        return [tables[number] for number in sorted(tables)]


class StoreTraffic:
    """Counts rows that travel between the devices and a row store, and times it, in this process.

    Each method is called by one thread: the training thread receives rows, the store's threads read
    and write. `summary` may be called by any thread. ``width`` is the bytes of a record.
    """

    def __init__(self, width: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._width, self._clock = width, clock
        self.steps = 0
        self._fetched = self._initialized = self._written = 0
        self._read_seconds = self._write_seconds = 0.0
        # Waiting seconds of the current step, of the last one, and of all.
        self._waited = self._last_stall = self._stall = 0.0

    @contextlib.contextmanager
    def reading(self, share: float = 1.0) -> Iterator[None]:
        """Within the block, time a read of the store; others are read with it at a ``share``."""
        start = self._clock()
        yield
        self._read_seconds += share * (self._clock() - start)

    @contextlib.contextmanager
    def writing(self, rows: int, share: float = 1.0) -> Iterator[None]:
        """Within the block, time a write of ``rows`` evicted rows; count them if it succeeds.

        Other stores are written with this one at a ``share``.
        """
        start = self._clock()
        yield
        self._write_seconds += share * (self._clock() - start)
        self._written += rows

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Within the block, time a wait of the training thread for rows."""
        start = self._clock()
        yield
        self._waited += self._clock() - start

    def add_received(self, found: np.ndarray) -> None:
        """Count received rows; rows not ``found``, bool ``[n]``, have first values."""
        num_found = int(np.count_nonzero(found))
        self._fetched += num_found
        self._initialized += found.size - num_found

    def begin_step(self) -> None:
        """Start the waiting time of a step at zero; earlier waits belong to no step."""
        self._waited = 0.0

    def end_step(self) -> None:
        """Count a step; its stall is the time waited since `begin_step`."""
        self._last_stall = self._waited
        self._stall += self._waited
        self.steps += 1

    def summary(self) -> dict[str, float]:
        """Return the counts and times by the names of `jaxrec.tier.statistics`."""
        per_step = 1e3 / max(1, self.steps)
        return {
            "fetched": self._fetched,
            "initialized": self._initialized,
            "written": self._written,
            "fetched_bytes": self._fetched * self._width,
            "written_bytes": self._written * self._width,
            "read_ms": self._read_seconds * per_step,
            "write_ms": self._write_seconds * per_step,
            "stall_ms": self._stall * per_step,
            "last_stall_ms": 1e3 * self._last_stall,
        }


@contextlib.contextmanager
def step_of(traffic: Iterable[StoreTraffic]) -> Iterator[None]:
    """Count the block as one step of each store.

    The time that the block waits for a store is the stall of the store's step.
    """
    of_step = list(traffic)
    for each in of_step:
        each.begin_step()
    yield
    for each in of_step:
        each.end_step()
