"""Batches of a source that grows, which know where the trained ones end."""

from __future__ import annotations

import collections
import dataclasses
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jaxrec.data.files import DataError
from jaxrec.data.shuffled import Shard
from jaxrec.data.streams.source import Position, Rows, Source, SourceReader

# Seconds between two reports of the positions to the source.
_COMMIT_SECONDS = 5.0

# Units of numbers in a column of event times, in seconds.
_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}

_ALONE = Shard()


@runtime_checkable
class ResumableBatches(Protocol):
    """Batches that save and restore where the used ones end; a `jaxrec.train.Trainer` does both.

    Batches are made ahead, so the iterator is further than the model: `advance` says which batches
    the model has.
    """

    def __iter__(self) -> Iterator[Any]:
        """Iterate from the first batch that is not used."""

    def advance(self, count: int) -> None:
        """Note that the next ``count`` batches are used."""

    def state(self) -> str:
        """Return where the used batches of this process end, as text."""

    def restore(self, states: Sequence[str]) -> None:
        """Go on where the batches with these states, one of each process, ended."""

    def interrupt(self) -> None:
        """End the iteration soon, even while it waits for rows."""

    def scalars(self) -> dict[str, float]:
        """Return figures for the metrics by name, such as the lag."""


@dataclasses.dataclass
class _Iteration:
    """One pass over the source: its reader, and the positions after each batch.

    ``used`` has an entry for each batch that was given and is not used yet: the positions that the
    batch moved, and the newest event time so far.
    """

    reader: SourceReader | None = None
    used: collections.deque[tuple[dict[str, Position], float]] = dataclasses.field(
        default_factory=collections.deque
    )
    stopped: threading.Event = dataclasses.field(default_factory=threading.Event)


@dataclasses.dataclass(eq=False, kw_only=True)
class StreamBatches:
    """Batches of the rows of a source that grows while it is read, such as a topic.

    Give them to `jaxrec.train.Trainer.train`. Its checkpoints then hold where the batches of the
    model end, by part of the source, and `Trainer.restore` makes a later `train` go on there: each
    row counts once in the model, however often the run is killed. A loop of your own calls
    `advance` after each step, saves `state` with the model, and calls `restore` before it iterates.

    Rows wait in the source while training is slower. Iterating again begins after the used batches.

    Attributes:
        source: The source, such as `jaxrec.data.KafkaSource` or `jaxrec.data.FolderSource`.
        batch_size: Number of rows of a batch of this process.
        transform: Function that makes a batch of a `pyarrow.Table`, such as
            ``lambda rows: encoder.batch(rows, batch_size)``.
        shard: Number of this process and of all processes; each reads other parts of the source.
        max_wait: Seconds after which a batch has fewer rows, if no more came; ``transform`` or
            ``Trainer(batch_size=...)`` fills it up. With several processes it may be empty, since
            all take part in each step, and each process has one batch or more. None: a batch waits
            for its rows.
        until: "stopped": the batches end with an argument below or an interrupt. "caught_up": they
            also end after the rows that are there when the iteration begins.
        num_batches: Largest number of batches of an iteration; None: any number.
        seconds: Seconds after which an iteration ends; None: never.
        event_time: Column with the time of each row, for `newest_seconds` and `clock`: of an Arrow
            time type, or numbers since 1970 in ``event_time_unit``. None: the time of the message,
            if it has one.
        event_time_unit: "s", "ms", "us" or "ns".
        stop: Function that says whether to end now, such as
            ``lambda: bool(interrupt)``; called every tenth of a second.

    Raises:
        ValueError: A number is below 1, or another argument has another value.
        DataError: A row cannot be decoded, or ``transform`` refuses it: the error names its place.
        ConnectionError: The source does not answer.

    Example:
        >>> import pathlib, tempfile
        >>> from jaxrec.data import FolderSource
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> _ = (folder / "a.csv").write_text("id\\n1\\n2\\n3\\n")
        >>> source = FolderSource(directory=folder)
        >>> batches = StreamBatches(source=source, batch_size=2, until="caught_up")
        >>> [batch["id"].to_pylist() for batch in batches]
        [[1, 2], [3]]
    """

    source: Source
    batch_size: int
    transform: Callable[[pa.Table], Any] = lambda rows: rows
    shard: Shard = _ALONE
    max_wait: float | None = None
    until: Literal["stopped", "caught_up"] = "stopped"
    num_batches: int | None = None
    seconds: float | None = None
    event_time: str | None = None
    event_time_unit: Literal["s", "ms", "us", "ns"] = "s"
    stop: Callable[[], bool] = lambda: False

    def __post_init__(self) -> None:
        if self.max_wait is not None and self.shard.count > 1 and self.source.schema is None:
            raise ValueError(
                "with several processes and max_wait a batch may be empty, so that its columns "
                "must be known: give the source a schema"
            )
        if self.batch_size < 1 or (self.num_batches is not None and self.num_batches < 1):
            raise ValueError(
                "batch_size and num_batches are 1 or more, got "
                f"{self.batch_size} and {self.num_batches}"
            )
        for name in ("max_wait", "seconds"):
            if (value := getattr(self, name)) is not None and not value >= 0:
                raise ValueError(f"{name} is 0 or more seconds, got {value}")
        for name, allowed in {
            "until": ("stopped", "caught_up"),
            "event_time_unit": tuple(_UNITS),
        }.items():
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"{name} is {' or '.join(map(repr, allowed))}, got {getattr(self, name)!r}"
                )
        self._positions: dict[str, Position] = {}
        self._time = self._read_time = -np.inf
        self._iteration: _Iteration | None = None
        self._committed = -np.inf

    # The batches.

    def __iter__(self) -> Iterator[Any]:
        self.interrupt()
        self._iteration = iteration = _Iteration()
        return self._batches(iteration)

    def _batches(self, iteration: _Iteration) -> Iterator[Any]:
        started, count = time.monotonic(), 0
        has_end = self.until == "caught_up"
        reader = self.source.open(self._positions, self.shard, has_end=has_end)
        try:
            # Also of parts without rows so far: a run that goes on must not begin them elsewhere.
            self._positions = dict(reader.starts)
            self._read_time, iteration.reader = self._time, reader
            rows = self._no_rows
            while count != self.num_batches:
                # Others may have rows: a process makes the empty batches beside theirs of its own.
                is_needed = not count and self.shard.count > 1 and self.max_wait is not None
                filled, passed = self._fill(iteration, reader, rows, started, is_needed=is_needed)
                if filled is None or self._is_over(iteration, started):
                    return
                batch, rows = filled.split(self.batch_size)
                made = self._made(reader, batch)
                self._read_time = max(self._read_time, self._newest(batch))
                iteration.used.append((passed | batch.positions(), self._read_time))
                count += 1
                yield made
        finally:
            reader.close()

    @property
    def _no_rows(self) -> Rows:
        return Rows.empty(pa.schema([]) if self.source.schema is None else self.source.schema)

    def _fill(
        self,
        iteration: _Iteration,
        reader: SourceReader,
        rows: Rows,
        started: float,
        *,
        is_needed: bool,
    ) -> tuple[Rows | None, dict[str, Position]]:
        """Read until there are rows for a batch, or the wait is over; None at the end.

        If the batch ``is_needed``, it may be empty at the end. Also return the positions after
        messages without rows that came before these.
        """
        waited = time.monotonic()
        passed: dict[str, Position] = {}
        while len(rows) < self.batch_size:
            if self._is_over(iteration, started):
                return None, passed
            if (new := reader.read(self.batch_size - len(rows))) is not None:
                if not len(rows):
                    # Any number of messages may have no row: keep their positions alone.
                    passed |= rows.positions()
                    rows = self._no_rows
                rows = rows.join(new)
            elif reader.has_ended:
                return (rows if len(rows) or is_needed else None), passed
            # A process without rows takes part in a step of all, with an empty batch.
            elif (len(rows) or self.shard.count > 1) and self._waited(waited):
                break
        return rows, passed

    def _waited(self, since: float) -> bool:
        return self.max_wait is not None and time.monotonic() - since >= self.max_wait

    def _is_over(self, iteration: _Iteration, started: float) -> bool:
        if iteration.stopped.is_set() or self.stop():
            return True
        return self.seconds is not None and time.monotonic() - started >= self.seconds

    def _made(self, reader: SourceReader, rows: Rows) -> Any:
        """Make a batch; an error about a row names the row's place in the source."""
        try:
            return self.transform(rows.table)
        except DataError as error:
            # The first rows with which it fails end with the bad one.
            low, high = 0, len(rows)
            while high - low > 1:
                middle = (low + high) // 2
                if self._fails(rows.table[:middle]):
                    high = middle
                else:
                    low = middle
            if not high:
                raise
            raise DataError(f"{reader.describe(*rows.locate(high - 1))}: {error}") from None

    def _fails(self, table: pa.Table) -> bool:
        try:
            self.transform(table)
        except DataError:
            return True
        return False

    def interrupt(self) -> None:
        """End the iteration, even while another thread waits in it for rows."""
        if self._iteration is not None:
            self._iteration.stopped.set()

    # Where the used batches end.

    def advance(self, count: int = 1) -> None:
        """Note that the next ``count`` batches are used: they are in the model.

        Batches that others added to those of this process, as for equal numbers of batches in all
        processes, are left out.
        """
        iteration = self._iteration
        if iteration is None or iteration.reader is None:
            return
        for _ in range(min(count, len(iteration.used))):
            positions, self._time = iteration.used.popleft()
            self._positions.update(positions)
        if time.monotonic() - self._committed >= _COMMIT_SECONDS:
            self._committed = time.monotonic()
            iteration.reader.commit(self._positions)

    def state(self) -> str:
        """Return where the used batches of this process end, as JSON."""
        state = {"positions": self._positions, "seconds": self.newest_seconds}
        return json.dumps(state)

    def restore(self, states: Sequence[str]) -> None:
        """Go on where the used batches ended.

        Args:
            states: The results of `state` of all processes; their number may have been another.

        Raises:
            DataError: A text is not a result of `state`.
        """
        positions, newest = {}, -np.inf
        for text in states:
            try:
                state = json.loads(text)
                positions.update(
                    {
                        name: Position(int(offset), int(row))
                        for name, (offset, row) in state["positions"].items()
                    }
                )
                newest = max(newest, -np.inf if state["seconds"] is None else state["seconds"])
            except (ValueError, KeyError, TypeError, AttributeError):
                raise DataError(f"this is no state of StreamBatches: {text[:80]!r}") from None
        self.interrupt()
        self._iteration = None
        self._positions, self._time = positions, newest

    # Event time and lag.

    @property
    def newest_seconds(self) -> float | None:
        """Unix time of the newest row of the used batches; None before the first."""
        return float(self._time) if np.isfinite(self._time) else None

    def clock(self) -> float:
        """Return the Unix time of the newest row that was given; 0 before the first.

        It is the time for `jaxrec.tier.ttl(hours=24, clock=batches.clock)`: ids then live as long
        in a run over old messages as in one that follows the topic. It never goes back.
        """
        return float(self._read_time) if np.isfinite(self._read_time) else 0.0

    def _newest(self, rows: Rows) -> float:
        """Return the newest event time of rows; -inf: none is known."""
        if self.event_time is None:
            newest = rows.newest_seconds
            return -np.inf if newest is None else newest
        if not len(rows):
            return -np.inf
        if self.event_time not in rows.table.column_names:
            raise DataError(
                f"there is no column {self.event_time!r} of event times; the columns are "
                f"{', '.join(rows.table.column_names)}"
            )
        newest = pc.max(rows.table[self.event_time])
        kind, value = newest.type, newest.as_py()
        if value is None:
            return -np.inf
        if pa.types.is_timestamp(kind):
            return newest.cast(pa.int64()).as_py() * _UNITS[kind.unit]
        if not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
            raise DataError(
                f"the column {self.event_time!r} of event times is of type {kind}; expected times "
                "or numbers"
            )
        return float(value) * _UNITS[self.event_time_unit]

    def lag(self) -> Mapping[str, int]:
        """Return the number of messages, or of files, that are not used yet, by part.

        It is at most 5 seconds old; empty before the first iteration.
        """
        if self._iteration is None or self._iteration.reader is None:
            return {}
        return self._iteration.reader.lag(self._positions)

    def scalars(self) -> dict[str, float]:
        """Return the lag, of each part and the sum, and the age of the newest used row.

        The names are ``stream/lag``, ``stream/lag/clicks/0`` and ``stream/seconds_behind``.
        """
        lag = self.lag()
        values = {"stream/lag": float(sum(lag.values()))} if lag else {}
        values |= {f"stream/lag/{part}": float(number) for part, number in lag.items()}
        if (newest := self.newest_seconds) is not None:
            values["stream/seconds_behind"] = max(0.0, time.time() - newest)
        return values
