"""Topics of Kafka as a source of rows."""

from __future__ import annotations

import dataclasses
import logging
import time
import warnings
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from jaxrec.data.files import DataError
from jaxrec.data.shuffled import Shard
from jaxrec.data.streams.decode import Decode, Decoder
from jaxrec.data.streams.source import (
    POLL_SECONDS,
    Position,
    Positions,
    Rows,
    Source,
    SourceReader,
    check_choices,
)

logger = logging.getLogger(__name__)

# Number of messages of one read; more would only make the first batch wait.
_MESSAGES = 10_000

# Seconds for which a lag counts, and that a look at the end of a partition may take.
_LAG_SECONDS = 5.0
_QUERY_SECONDS = 2.0

# Largest time between two reads that librdkafka allows, in milliseconds: training may be slow.
_LONGEST_POLL = 86_400_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class KafkaSource(Source):
    """The messages of topics of Kafka.

    The partitions are divided among the processes: process ``i`` of ``n`` reads those at ``i``,
    ``i + n`` and so on in the order of topics and numbers. Where reading goes on is part of
    checkpoints; the broker keeps nothing. Messages without a value have no row.

    Attributes:
        brokers: Addresses of some brokers, ``"host:9092"``, separated by commas.
        topics: A topic, or several.
        decode: Payloads to rows: "json", one or more objects, each on a line; "arrow", streams or
            files of Arrow IPC; or a function that makes of a list of bytes a `pyarrow.Table` with a
            row of each.
        schema: Columns and types of JSON or Arrow. None: JSON's fields get the type of the first
            value that is read.
        start: Where a run without a checkpoint begins: at the first messages that the broker has,
            "earliest", or after the last, "latest".
        group: Name of a consumer group to which the positions of used messages are committed, for
            tools that watch the lag of groups. They are never read.
        bad_messages: "fail": a message that cannot be decoded is an error. "skip": it is left out,
            with a warning for the first.
        deleted: "fail": messages that the broker deleted before they were read are an error.
            "skip": reading goes on at the first that is left, with a warning.
        timeout: Seconds without an answer of a broker after which reading fails.
        buffer_bytes: Largest number of bytes that are fetched ahead. A full buffer waits for
            training.
        options: Other settings of librdkafka, such as ``{"security.protocol": "SASL_SSL"}``.

    Raises:
        ValueError: An argument has another value, or librdkafka does not know one of ``options``;
            the latter is raised when reading begins.

    Example:
        >>> KafkaSource(brokers="localhost:9092", topics="clicks").topics
        'clicks'
    """

    brokers: str
    topics: str | tuple[str, ...]
    decode: Decode = "json"
    schema: pa.Schema | None = None
    start: Literal["earliest", "latest"] = "earliest"
    group: str | None = None
    bad_messages: Literal["fail", "skip"] = "fail"
    deleted: Literal["fail", "skip"] = "fail"
    timeout: float = 30.0
    buffer_bytes: int = 64 << 20
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        Decoder(self.decode, self.schema)
        fail_or_skip = ("fail", "skip")
        choices = {"start": ("earliest", "latest"), "bad_messages": fail_or_skip}
        check_choices(self, {**choices, "deleted": fail_or_skip})
        if not self.timeout > 0 or self.buffer_bytes < 1 << 10:
            raise ValueError(
                "timeout is above 0 seconds and buffer_bytes 1024 or more, got "
                f"{self.timeout} and {self.buffer_bytes}"
            )

    def open(self, positions: Positions, shard: Shard, *, has_end: bool) -> KafkaReader:
        """Connect to the brokers; see `Source.open`."""
        return KafkaReader(self, positions, shard, has_end=has_end)


class KafkaReader(SourceReader):
    """A consumer of the partitions of one process."""

    def __init__(
        self, source: KafkaSource, positions: Positions, shard: Shard, *, has_end: bool
    ) -> None:
        self._source, self._kafka = source, _client()
        self._decoder = Decoder(source.decode, source.schema)
        self._failure: Any = None
        self._down_since: float | None = None
        self._num_skipped = 0
        # Last offsets that were seen, and when they were asked for.
        self._last: dict[str, int] = {}
        self._asked = -np.inf
        try:
            self._consumer = self._kafka.Consumer(self._settings(), logger=logger)
        except self._kafka.KafkaException as error:
            raise ValueError(f"options of KafkaSource: {error.args[0].str()}") from None
        try:
            # All processes deal the same list, so that each partition has one reader.
            names = self._partitions()
            if len(names) < shard.count:
                raise DataError(
                    f"{source.topics} has {len(names)} partitions, too few for {shard.count} "
                    "processes; each reads one or more"
                )
            self._names = names[shard.index :: shard.count]
            self._parts = [f"{topic}/{number}" for topic, number in self._names]
            self._index = {name: i for i, name in enumerate(self._names)}
            self._ends: dict[int, int] | None = {} if has_end else None
            starts = [self._begin(i, positions) for i in range(len(self._names))]
            self._starts = dict(zip(self._parts, starts, strict=True))
            # Rows of the first message of a part that were used before.
            self._used = {i: start for i, start in enumerate(starts) if start.row}
            self._consumer.assign([self._at(i, start.offset) for i, start in enumerate(starts)])
        except BaseException:
            self._consumer.close()
            raise

    def _settings(self) -> dict[str, Any]:
        source = self._source
        return {
            # An error of the brokers is raised here in words; librdkafka would log each try.
            "log_level": 2,
            "max.poll.interval.ms": _LONGEST_POLL,
            "queued.max.messages.kbytes": max(1, source.buffer_bytes >> 10),
            "fetch.max.bytes": max(source.buffer_bytes, 1 << 20),
            "fetch.message.max.bytes": min(source.buffer_bytes, 1 << 20),
            "fetch.wait.max.ms": 100,
            **source.options,
            "bootstrap.servers": source.brokers,
            # Required even without a group.
            "group.id": source.group or "jaxrec",
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            # A position that the broker does not have is reported, not replaced.
            "auto.offset.reset": "error",
            "enable.partition.eof": True,
            "error_cb": self._on_error,
        }

    # Opening.

    def _partitions(self) -> list[tuple[str, int]]:
        source = self._source
        topics = (source.topics,) if isinstance(source.topics, str) else source.topics
        # All topics: to ask for one that is missing creates it on some brokers.
        there = self._ask("list its topics", self._consumer.list_topics).topics
        for topic in topics:
            if topic not in there or not there[topic].partitions:
                known = ", ".join(sorted(t for t in there if not t.startswith("__"))[:10])
                raise DataError(
                    f"{source.brokers} has no topic {topic!r}; it has {known or 'none'}"
                )
        return [(topic, number) for topic in topics for number in sorted(there[topic].partitions)]

    def _ask(self, what: str, call: Any, *arguments: Any) -> Any:
        try:
            return call(*arguments, timeout=self._source.timeout)
        except self._kafka.KafkaException as error:
            raise self._connection_error(what, error.args[0]) from None

    def _connection_error(self, what: str, error: Any) -> ConnectionError:
        cause = error if self._failure is None else self._failure
        return ConnectionError(
            f"no broker of {self._source.brokers} answered within {self._source.timeout:g} s to "
            f"{what} ({cause.str()}); check the address and the network, or raise timeout"
        )

    def _begin(self, index: int, positions: Positions) -> Position:
        """Return where a part begins, after comparing a saved position with the broker's."""
        name, source = self._parts[index], self._source
        low, high = self._watermarks(index)
        self._last[name] = high
        if self._ends is not None:
            self._ends[index] = high
        start = positions.get(name)
        if start is None:
            # A part without a position among others was added since they were saved.
            from_first = bool(positions) or source.start == "earliest"
            start = Position(low if from_first else high)
        if start.offset > high:
            raise DataError(
                f"{self.describe(name, start.offset, 0)}: reading was to go on there, but the "
                f"partition ends at offset {high:,}; the topic was made anew since the position "
                "was saved. Train a new run, or continue without the position"
            )
        if start.offset < low:
            start = self._deleted(index, start.offset, low)
        if self._ends is not None and start.offset >= high:
            del self._ends[index]
        return start

    def _watermarks(self, index: int) -> tuple[int, int]:
        what, call = "give the offsets of a partition", self._consumer.get_watermark_offsets
        offsets = self._ask(what, call, self._at(index))
        if offsets is None:
            codes = self._kafka.KafkaError
            raise self._connection_error(what, codes(codes._TIMED_OUT))
        return offsets

    def _deleted(self, index: int, offset: int, low: int) -> Position:
        """Return the first position with a message, or raise an error if ``deleted`` is "fail"."""
        text = (
            f"{self.describe(self._parts[index], offset, 0)}: the broker has deleted the messages "
            f"from there to offset {low:,} before they were read"
        )
        if self._source.deleted == "fail":
            raise DataError(
                f'{text}; deleted="skip" goes on without them. A longer retention of the topic '
                "prevents it"
            )
        warnings.warn(f"{text}; they are left out", stacklevel=2)
        return Position(low)

    def _at(self, index: int, offset: int | None = None) -> Any:
        topic, number = self._names[index]
        partition = self._kafka.TopicPartition
        return partition(topic, number) if offset is None else partition(topic, number, offset)

    # Reading.

    @property
    def starts(self) -> Positions:
        return self._starts

    @property
    def has_ended(self) -> bool:
        return self._ends is not None and not self._ends

    def read(self, rows: int) -> Rows | None:
        received = self._consumer.consume(min(rows, _MESSAGES), POLL_SECONDS)
        self._check_brokers()
        if received:
            self._down_since = None
        messages = self._before_end([each for each in received if each.error() is None])
        # The end of a partition comes after its messages.
        for message in received:
            if (error := message.error()) is not None:
                self._on_event(message, error)
        return self._rows(messages) if messages else None

    def _on_event(self, message: Any, error: Any) -> None:
        """Act on a message that tells of an event or an error of a partition."""
        index = self._index.get((message.topic(), message.partition()))
        if index is None:
            return
        code = error.code()
        if code == self._kafka.KafkaError._PARTITION_EOF:
            # The last offsets may belong to commits of transactions, for which no message comes:
            # the broker's word that the end is reached counts, too.
            if self._ends is not None and message.offset() >= self._ends.get(index, 0):
                self._ends.pop(index, None)
        elif code == self._kafka.KafkaError._AUTO_OFFSET_RESET:
            start = self._deleted(index, message.offset(), self._watermarks(index)[0])
            # librdkafka seeks in no partition that it has stopped.
            self._consumer.incremental_unassign([self._at(index)])
            self._consumer.incremental_assign([self._at(index, start.offset)])
        elif not error.retriable():
            name = self._parts[index]
            raise DataError(f"{self._where(name)}: it cannot be read ({error.str()})")

    def _before_end(self, messages: list[Any]) -> list[Any]:
        """Leave out messages after the end, if there is one, and note which parts have ended."""
        if self._ends is None:
            return messages
        kept = []
        for message in messages:
            index = self._index[message.topic(), message.partition()]
            end = self._ends.get(index, -1)
            if message.offset() < end:
                kept.append(message)
            if message.offset() + 1 >= end >= 0:
                del self._ends[index]
        return kept

    def _rows(self, messages: list[Any]) -> Rows:
        index = self._index
        part = np.array([index[m.topic(), m.partition()] for m in messages], np.int64)
        offset = np.array([m.offset() for m in messages], np.int64)
        stamps = np.array([m.timestamp() for m in messages], np.int64)
        # Kinds of time stamps: 0 is none; milliseconds.
        seconds = np.where(stamps[:, 0] > 0, stamps[:, 1] / 1000, np.nan)

        def on_bad(at: int, error: Exception) -> None:
            self._on_bad(self._parts[part[at]], int(offset[at]), error)

        payloads = [m.value() or b"" for m in messages]
        given = np.flatnonzero([m.value() is not None for m in messages])
        counts = np.zeros(len(messages), np.int64)
        if len(given) == len(messages):
            table, counts = self._decoder(payloads, on_bad)
        else:
            table, counts[given] = self._decoder(
                [payloads[i] for i in given], lambda at, error: on_bad(int(given[at]), error)
            )
        whole, first = np.ones(len(messages), bool), np.zeros(len(messages), np.int64)
        rows = Rows(table, self._parts, part, offset, first, np.cumsum(counts), whole, seconds)
        return self._without_used(rows) if self._used else rows

    def _without_used(self, rows: Rows) -> Rows:
        """Leave out the rows of a part's first message that were used before."""
        for index in [i for i in self._used if i in rows.part]:
            start = self._used.pop(index)
            message = int(np.flatnonzero(rows.part == index)[0])
            if rows.offset[message] != start.offset:  # it was deleted, as compaction does
                continue
            begin = int(rows.stop[message - 1]) if message else 0
            used = min(start.row, int(rows.stop[message]) - begin)
            table = pa.concat_tables([rows.table[:begin], rows.table[begin + used :]])
            stop, first = rows.stop.copy(), rows.first.copy()
            stop[message:] -= used
            first[message] = used
            rows = dataclasses.replace(rows, table=table, stop=stop, first=first)
        return rows

    def _on_bad(self, part: str, offset: int, error: Exception) -> None:
        problem = " ".join(str(error).split()) or type(error).__name__
        text = f"{self.describe(part, offset, 0)}: the message cannot be decoded ({problem})"
        if self._source.bad_messages == "fail":
            raise DataError(f'{text}; bad_messages="skip" leaves such messages out') from None
        self._num_skipped += 1
        if self._num_skipped == 1:
            warnings.warn(f"{text}; it is left out, and others like it", stacklevel=2)

    # Brokers.

    def _on_error(self, error: Any) -> None:
        """Note an error that is not of one partition; librdkafka calls it within `read`."""
        codes = self._kafka.KafkaError
        if error.fatal() or error.code() in (codes._AUTHENTICATION, codes._SSL):
            self._failure = error
        elif self._down_since is None:
            self._down_since = time.monotonic()

    def _check_brokers(self) -> None:
        """Raise a ConnectionError if no broker has answered for as long as the source allows."""
        if self._failure is not None:
            raise ConnectionError(f"{self._source.brokers}: {self._failure.str()}")
        since, timeout = self._down_since, self._source.timeout
        if since is None or time.monotonic() - since < timeout:
            return
        # Brokers may have come back without a message: ask before giving up.
        self._ask("list its topics", self._consumer.list_topics)
        self._down_since = None

    def describe(self, part: str, offset: int, row: int) -> str:
        return f"{self._where(part)}, offset {offset:,}" + (f", row {row}" if row else "")

    def _where(self, part: str) -> str:
        topic, _, number = part.rpartition("/")
        return f"topic {topic!r}, partition {number}"

    def lag(self, positions: Positions) -> dict[str, int]:
        if time.monotonic() - self._asked >= _LAG_SECONDS:
            self._last |= self._look_at_ends()
            self._asked = time.monotonic()
        return {
            name: max(0, end - positions[name].offset)
            for name, end in self._last.items()
            if name in positions
        }

    def _look_at_ends(self) -> dict[str, int]:
        ends = {}
        for index, name in enumerate(self._parts):
            try:
                # Not the last one seen: a consumer with a full buffer sees none.
                offsets = self._consumer.get_watermark_offsets(
                    self._at(index), timeout=_QUERY_SECONDS
                )
            except (self._kafka.KafkaException, RuntimeError):
                break  # the brokers do not answer, or the reader is closed
            if offsets is None:
                break
            ends[name] = offsets[1]
        return ends

    def commit(self, positions: Positions) -> None:
        if self._source.group is None:
            return
        places = [
            self._at(index, positions[name].offset)
            for index, name in enumerate(self._parts)
            if name in positions
        ]
        try:
            self._consumer.commit(offsets=places, asynchronous=True)
        except (self._kafka.KafkaException, RuntimeError) as error:
            logger.warning("the positions are not committed to the group: %s", error)

    def close(self) -> None:
        self._consumer.close()


def _client() -> ModuleType:
    try:
        import confluent_kafka
    except ImportError:
        raise ImportError("Kafka topics need: pip install 'jaxrec[kafka]'") from None
    return confluent_kafka


def parse_address(address: str) -> tuple[str, Sequence[str]]:
    """Return the brokers and the topics of ``kafka://host:port,host:port/topic,topic``.

    Raises:
        ValueError: The address has no broker or no topic.
    """
    brokers, _, topics = address.removeprefix("kafka://").partition("/")
    names = [name for name in topics.split(",") if name]
    if not address.startswith("kafka://") or not brokers or not names or "/" in topics:
        raise ValueError(
            f"{address} is no address of topics; give kafka://HOST:PORT/TOPIC, with commas between "
            "several hosts or topics"
        )
    return brokers, names
