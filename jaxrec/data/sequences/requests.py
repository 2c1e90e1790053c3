"""Requests, the rows of a ranker's batch: their limits, their ranges, and batches made of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Bool, Int, Int32

from jaxrec.data.sequences.ranges import Ranges, chunks
from jaxrec.data.sequences.schema import SequenceSchema
from jaxrec.ragged import KeyedJaggedArray


@dataclasses.dataclass(frozen=True)
class TimeWindow:
    """The times from ``start`` to before ``stop``, in seconds; None: without that limit.

    Example:
        >>> TimeWindow.split(0, 99, 2)
        (TimeWindow(start=0, stop=50), TimeWindow(start=50, stop=100))
    """

    start: int | None = None
    stop: int | None = None

    def __post_init__(self) -> None:
        if self.start is not None and self.stop is not None and self.start >= self.stop:
            raise ValueError(f"a window starts before it stops; got {self.start} and {self.stop}")

    @property
    def is_unlimited(self) -> bool:
        return self.start is None and self.stop is None

    def contains(self, times: Int[np.ndarray, " times"]) -> Bool[np.ndarray, " times"]:
        """Return whether each time is in the window."""
        within = np.ones(len(times), bool)
        if self.start is not None:
            within &= times >= self.start
        if self.stop is not None:
            within &= times < self.stop
        return within

    @classmethod
    def split(cls, first: int, last: int, count: int) -> tuple[TimeWindow, ...]:
        """Cut the times from ``first`` to ``last``, both included, into windows of equal length.

        Raises:
            ValueError: There are fewer seconds than windows.
        """
        if not 1 <= count <= last - first + 1:
            raise ValueError(f"the times {first} to {last} do not make {count} windows")
        edges = [first + -(-(last + 1 - first) * n // count) for n in range(count + 1)]
        return tuple(cls(*edges[n : n + 2]) for n in range(count))


@dataclasses.dataclass(frozen=True)
class RequestLimits:
    """What a request holds at most, and which candidates make requests.

    A list of candidates beyond a limit becomes several requests of the same history, so that no
    candidate is lost.

    Attributes:
        history: Number of events, the newest ones.
        candidates: Number of candidates.
        seconds: A request does not cross a multiple of this many seconds; None: it may.
        min_history: Candidates after fewer events are left out, and counted (`SequenceCounts`).
        window: Candidates at other times are left out, and counted.

    Raises:
        ValueError: A number is out of range.
    """

    history: int
    candidates: int = 64
    seconds: int | None = None
    min_history: int = 0
    window: TimeWindow = TimeWindow()

    def __post_init__(self) -> None:
        for name, least in (("history", 1), ("candidates", 1), ("min_history", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {least} or more, got {getattr(self, name)}")
        if self.seconds is not None and self.seconds < 1:
            raise ValueError(f"seconds is 1 or more, got {self.seconds}")

    @property
    def needs_times(self) -> bool:
        """Whether the times of candidates decide about requests."""
        return self.seconds is not None or not self.window.is_unlimited


@dataclasses.dataclass(frozen=True)
class SequenceCounts:
    """How many candidates and events a data set has, and what the limits left out.

    Attributes:
        rows: Rows of the files.
        requests: Requests made of them.
        candidates: Candidates of the requests.
        events: Events of the requests' histories; an event counts once in each.
        outside_window: Candidates outside of the window of time.
        short_history: Candidates after fewer events than ``min_history``.
        cut_events: Events that were older than the newest ones of a request.
    """

    rows: int = 0
    requests: int = 0
    candidates: int = 0
    events: int = 0
    outside_window: int = 0
    short_history: int = 0
    cut_events: int = 0

    def __add__(self, other: SequenceCounts) -> SequenceCounts:
        names = [field.name for field in dataclasses.fields(self)]
        return SequenceCounts(**{n: getattr(self, n) + getattr(other, n) for n in names})


@dataclasses.dataclass(frozen=True, eq=False)
class Requests:
    """Requests as ranges of flat arrays of events and candidates.

    Attributes:
        sources: ``[requests]`` int64, the row that a request comes from.
        history: Ranges of events, in the order of time.
        candidates: Ranges of candidates.
        counts: What was left out.
    """

    sources: Int[np.ndarray, " requests"]
    history: Ranges
    candidates: Ranges
    counts: SequenceCounts

    def __len__(self) -> int:
        return len(self.sources)


def cut_requests(
    limits: RequestLimits,
    rows: Int[np.ndarray, " candidates"],
    history: Ranges,
    times: Int[np.ndarray, " candidates"] | None,
) -> tuple[Requests, Int[np.ndarray, " kept"]]:
    """Cut the candidates of rows into requests.

    Args:
        limits: Which candidates a request takes.
        rows: ``[candidates]``, row of each candidate, ascending.
        history: The events before each candidate.
        times: ``[candidates]`` seconds; needed by ``limits.seconds`` and ``limits.window``.

    Returns:
        The requests, whose ranges of candidates count the kept ones alone, and the positions of
        the kept candidates. A request's history is that of its first candidate.
    """
    within = np.ones(len(rows), bool) if times is None else limits.window.contains(times)
    is_long = history.lengths >= limits.min_history
    kept = np.flatnonzero(within & is_long)
    spans = None
    if limits.seconds is not None and times is not None:
        spans = times[kept] // limits.seconds
    candidates = chunks(rows[kept], limits.candidates, spans)
    first = kept[candidates.starts]
    before = history[first]
    own = before.newest(limits.history)
    counts = SequenceCounts(
        requests=len(first),
        candidates=len(kept),
        events=int(own.lengths.sum()),
        outside_window=int(len(rows) - within.sum()),
        short_history=int((within & ~is_long).sum()),
        cut_events=int((before.lengths - own.lengths).sum()),
    )
    return Requests(rows[first], own, candidates, counts), kept


@dataclasses.dataclass(frozen=True, eq=False)
class SequenceRows:
    """Requests and the values of their features, in host memory.

    Attributes:
        schema: Names of the features.
        requests: The requests.
        history: ``[events]`` int32 by feature of the history.
        candidates: ``[candidates]`` int32 by feature of the candidates.
        context: By feature of the context, ``[values]`` int32 and the range of each row.
    """

    schema: SequenceSchema
    requests: Requests
    history: Mapping[str, Int32[np.ndarray, " events"]]
    candidates: Mapping[str, Int32[np.ndarray, " candidates"]]
    context: Mapping[str, tuple[Int32[np.ndarray, " values"], Ranges]]

    def __len__(self) -> int:
        return len(self.requests)

    @classmethod
    def empty(cls, schema: SequenceSchema) -> SequenceRows:
        """Return no requests of a schema."""
        nothing, none = np.zeros(0, np.int32), Ranges(*np.zeros((2, 0), np.int64))
        return cls(
            schema,
            Requests(none.starts, none, none, SequenceCounts()),
            dict.fromkeys(schema.history, nothing),
            dict.fromkeys(schema.candidates, nothing),
            dict.fromkeys(schema.context, (nothing, none)),
        )

    @classmethod
    def concatenate(cls, parts: Sequence[SequenceRows]) -> SequenceRows:
        """Concatenate the requests of several parts of one schema."""
        if len(parts) == 1:
            return parts[0]
        first = parts[0]
        all_requests = [part.requests for part in parts]

        def flat(side: str) -> tuple[dict[str, np.ndarray], list[int]]:
            arrays = [getattr(part, side) for part in parts]
            joined = {name: np.concatenate([x[name] for x in arrays]) for name in arrays[0]}
            return joined, [len(next(iter(x.values()))) for x in arrays]

        context = {}
        rows = [0]
        for name in first.context:
            values = [part.context[name][0] for part in parts]
            ranges = [part.context[name][1] for part in parts]
            rows = [len(each) for each in ranges]
            joined = Ranges.concatenate(ranges, [len(each) for each in values])
            context[name] = (np.concatenate(values), joined)
        # Without context nothing reads the sources.
        starts = np.cumsum([0, *rows[:-1]]) if first.context else np.zeros(len(parts), np.int64)
        history, events = flat("history")
        candidates, of_candidates = flat("candidates")
        requests = Requests(
            np.concatenate([x.sources + s for x, s in zip(all_requests, starts, strict=True)]),
            Ranges.concatenate([x.history for x in all_requests], events),
            Ranges.concatenate([x.candidates for x in all_requests], of_candidates),
            sum((x.counts for x in all_requests), SequenceCounts()),
        )
        return cls(first.schema, requests, history, candidates, context)

    def batch(
        self, rows: Int[np.ndarray, " rows"], capacities: Mapping[str, int]
    ) -> KeyedJaggedArray:
        """Make a batch of some requests.

        Args:
            rows: ``[rows]`` numbers of requests; -1 is a row of padding, without events,
                candidates and context.
            capacities: Capacity of each feature.

        Raises:
            ValueError: The requests have more values than a capacity.
        """
        exists = rows >= 0
        requests = self.requests
        chosen = np.where(exists, rows, 0)

        def own(ranges: Ranges) -> Ranges:
            # Padding has no request, and so no range; a batch without any has none to look at.
            if not exists.any():
                return Ranges(np.zeros(len(rows), np.int64), np.zeros(len(rows), np.int64))
            part = ranges[chosen]
            return Ranges(part.starts, np.where(exists, part.lengths, 0))

        columns: dict[str, tuple[np.ndarray, Ranges, np.ndarray]] = {}
        for name, (values, ranges) in self.context.items():
            at = own(ranges[requests.sources])
            columns[name] = (values, at, at.positions())
        for flat, ranges in (
            (self.history, requests.history),
            (self.candidates, requests.candidates),
        ):
            at = own(ranges)
            # One gather of positions serves all features of a side.
            places = at.positions()
            columns |= {name: (values, at, places) for name, values in flat.items()}
        size = [capacities[name] for name in columns]
        filled = np.zeros(sum(size), np.int32)
        starts = np.cumsum([0, *size])
        for (name, (values, _, places)), start in zip(columns.items(), starts, strict=False):
            if len(places) > capacities[name]:
                raise ValueError(
                    f"feature {name!r}: the rows have {len(places)} values, but the capacity is "
                    f"{capacities[name]}"
                )
            np.take(values, places, out=filled[start : start + len(places)], mode="clip")
        lengths = [ranges.lengths.astype(np.int32) for _, ranges, _ in columns.values()]
        return KeyedJaggedArray(
            filled,
            np.concatenate(lengths),
            keys=tuple(columns),
            capacities=tuple(size),
            strides=(len(rows),) * len(columns),
        )
