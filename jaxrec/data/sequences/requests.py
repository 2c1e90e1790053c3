"""Requests, the rows of a ranker's batch: their limits, and how candidates are cut into them."""

from __future__ import annotations

import dataclasses

import numpy as np
from jaxtyping import Bool, Int

from jaxrec.data.sequences.ranges import Ranges, chunks


@dataclasses.dataclass(frozen=True)
class TimeWindow:
    """Times ``[start, stop)`` in seconds; None: no limit on that side.

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
    """Limits on the size of a request, and which candidates are in requests.

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
    """Numbers of candidates and events of a data set, kept and left out by the limits.

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
        counts: Numbers of candidates and events, kept and left out.
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
