"""The interface of sources that grow while they are read, and the rows that they give.

A source has parts, such as the partitions of a topic or the files of a folder. A part is a sequence
of messages with numbers, the offsets, and a message has rows. To add a source, write a module here
with a subclass of `Source` and one of `SourceReader`.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa

from jaxrec.data.files import DataError
from jaxrec.data.shuffled import Shard

# Seconds after which a reader that waits for rows returns, so that its caller can stop.
POLL_SECONDS = 0.1


class Position(NamedTuple):
    """A place in a part: the next message, and the number of its rows that are used already."""

    offset: int
    row: int = 0


Positions: TypeAlias = Mapping[str, Position]
"""Positions by the names of parts, such as ``{"clicks/0": Position(1200)}``."""


def check_choices(source: Source, choices: Mapping[str, Sequence[str]]) -> None:
    """Raise a ValueError if a field of a source has another value than those that it may have."""
    for name, allowed in choices.items():
        if (value := getattr(source, name)) not in allowed:
            raise ValueError(f"{name} is {' or '.join(map(repr, allowed))}, got {value!r}")


@dataclasses.dataclass(frozen=True, eq=False)
class Rows:
    """Rows of a stream with the messages that they come from, in order.

    Attributes:
        table: The rows, ``[rows]``.
        parts: Names of the parts.
        part: int ``[messages]``: index of each message's part in ``parts``.
        offset: int64 ``[messages]``: number of each message in its part.
        first: int64 ``[messages]``: number of rows of each message that came before these.
        stop: int64 ``[messages]``: row of ``table`` at which each message's rows end.
        is_whole: bool ``[messages]``: whether a message ends with these rows.
        seconds: float64 ``[messages]``: Unix time of each message; NaN: unknown.
    """

    table: pa.Table
    parts: Sequence[str]
    part: np.ndarray
    offset: np.ndarray
    first: np.ndarray
    stop: np.ndarray
    is_whole: np.ndarray
    seconds: np.ndarray

    @classmethod
    def empty(cls, schema: pa.Schema) -> Rows:
        """Return no rows, with the columns of a schema."""
        none = np.zeros(0, np.int64)
        table = schema.empty_table()
        return cls(table, (), none, none, none, none, none.astype(bool), none.astype(float))

    def __len__(self) -> int:
        return len(self.table)

    @property
    def _messages(self) -> tuple[np.ndarray, ...]:
        return self.part, self.offset, self.first, self.stop, self.is_whole, self.seconds

    def split(self, rows: int) -> tuple[Rows, Rows]:
        """Return the first ``rows`` rows and the others; a message may be cut in two."""
        if rows >= len(self):
            return self, self._of_messages(self.table[:0], len(self.stop), None)
        whole = int(np.searchsorted(self.stop, rows, side="right"))
        begin = int(self.stop[whole - 1]) if whole else 0
        is_cut = begin < rows
        head = self._of_messages(self.table[:rows], 0, whole + is_cut)
        tail = self._of_messages(self.table[rows:], whole, None)
        stop, first, is_whole = tail.stop - rows, tail.first, head.is_whole
        if is_cut:
            first, is_whole, head_stop = first.copy(), is_whole.copy(), head.stop.copy()
            first[0] += rows - begin
            is_whole[-1], head_stop[-1] = False, rows
            head = dataclasses.replace(head, is_whole=is_whole, stop=head_stop)
        return head, dataclasses.replace(tail, stop=stop, first=first)

    def _of_messages(self, table: pa.Table, start: int, stop: int | None) -> Rows:
        return Rows(table, self.parts, *(array[start:stop] for array in self._messages))

    def join(self, other: Rows) -> Rows:
        """Return these rows and those of a later read of the same reader."""
        try:
            # A field that only later messages have is null in these. A file of whole numbers may
            # stand beside one of fractions.
            table = pa.concat_tables([self.table, other.table], promote_options="permissive")
        except pa.ArrowException as error:
            raise DataError(
                f"{other.parts[other.part[0]]}, offset {other.offset[0]}: the columns have other "
                f"types than those of the rows before ({error}); give the source a schema"
            ) from None
        first, later, parts = self, other, self.parts
        if other.parts is not parts:
            first, later = self._with_own_parts(), other._with_own_parts()
            parts = list(dict.fromkeys([*first.parts, *later.parts]))
            index = {name: i for i, name in enumerate(parts)}
            number = np.array([index[name] for name in later.parts], np.int64)
            later = dataclasses.replace(later, part=number[later.part])
        later = dataclasses.replace(later, stop=later.stop + len(self))
        arrays = zip(first._messages, later._messages, strict=True)
        return Rows(table, parts, *(np.concatenate(pair) for pair in arrays))

    def _with_own_parts(self) -> Rows:
        """Leave out the names of parts without a message, so that the names do not pile up."""
        used, part = np.unique(self.part, return_inverse=True)
        return dataclasses.replace(self, parts=[self.parts[i] for i in used], part=part)

    def positions(self) -> dict[str, Position]:
        """Return the position after these rows of each part that they come from."""
        parts, from_end = np.unique(self.part[::-1], return_index=True)
        begin = np.concatenate([[0], self.stop[:-1]]) if len(self.stop) else self.stop
        positions = {}
        lasts = len(self.part) - 1 - from_end
        for part, last in zip(parts.tolist(), lasts.tolist(), strict=True):
            offset = int(self.offset[last])
            rows = int(self.first[last] + self.stop[last] - begin[last])
            positions[self.parts[part]] = (
                Position(offset + 1) if self.is_whole[last] else Position(offset, rows)
            )
        return positions

    def locate(self, row: int) -> tuple[str, int, int]:
        """Return a row's part, its message's offset, and its place in the message."""
        message = int(np.searchsorted(self.stop, row, side="right"))
        begin = int(self.stop[message - 1]) if message else 0
        part = self.parts[int(self.part[message])]
        return part, int(self.offset[message]), int(self.first[message]) + row - begin

    @property
    def newest_seconds(self) -> float | None:
        """The newest Unix time of a message; None: all are unknown."""
        known = self.seconds[~np.isnan(self.seconds)]
        return float(known.max()) if known.size else None


class SourceReader(abc.ABC):
    """An open source: it gives its rows once, in the order of each part.

    One thread calls `read`; `lag` and `commit` may be called by another.

    Attributes:
        starts: First position to read in each of this process's parts, as far as the parts are
            known when the source is opened.
    """

    @property
    @abc.abstractmethod
    def starts(self) -> Positions: ...

    @abc.abstractmethod
    def read(self, rows: int) -> Rows | None:
        """Return the next rows, about ``rows`` of them; None if there are none now.

        It waits `POLL_SECONDS` or less for a row.

        Raises:
            DataError: A message cannot be decoded, or was deleted before it was read.
            ConnectionError: The source does not answer.
        """

    @property
    @abc.abstractmethod
    def has_ended(self) -> bool:
        """Whether a reader with an end has given all rows up to it."""

    @abc.abstractmethod
    def describe(self, part: str, offset: int, row: int) -> str:
        """Return text that names a row in an error."""

    @abc.abstractmethod
    def lag(self, positions: Positions) -> dict[str, int]:
        """Return the number of messages, or of files, after the positions, by part.

        It raises no error: where the source does not answer, the last known numbers count.
        """

    def commit(self, positions: Positions) -> None:  # noqa: B027 - most have none to tell
        """Tell the positions to those who watch the source; it waits for no answer."""

    @abc.abstractmethod
    def close(self) -> None:
        """Release connections and files."""


class Source(abc.ABC):
    """A source of rows that grows while it is read, for `jaxrec.data.StreamBatches`.

    Attributes:
        schema: Columns of the rows and their types; None: they are known once there are rows.
    """

    schema: pa.Schema | None

    @abc.abstractmethod
    def open(self, positions: Positions, shard: Shard, *, has_end: bool) -> SourceReader:
        """Open the source.

        Args:
            positions: Position from which to read each part, by its name; other processes' parts
                are ignored. A part that the mapping lacks is read from its first message. If the
                mapping is empty, the source decides where to begin.
            shard: Number of this process and of all processes; each part belongs to one of them.
            has_end: Whether the reader ends after the rows that are there now.

        Raises:
            DataError: There is no such source, or it no longer has a position.
            ConnectionError: The source does not answer.
            ImportError: A package is not installed; the message names it.
        """
