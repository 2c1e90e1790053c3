"""Topics of Kafka, read from the mock cluster of its client, which speaks the protocol."""

from __future__ import annotations

import sys
import time

import numpy as np
import pyarrow as pa
import pytest

from jaxrec.data import DataError, KafkaSource, Shard, StreamBatches
from jaxrec.data.streams.kafka import parse_address
from jaxrec.data.streams.source import Position
from tests.data.streams.broker import MISSING, broker_process
from tests.data.streams.test_decode import stream

ids = [{"id": i} for i in range(100)]


def topics(broker, topic, **options):
    return KafkaSource(brokers=broker.address, topics=topic, **options)


def read(source, batch_size=7, **options):
    """Return the ids of the batches until the source is caught up, and the batches."""
    batches = StreamBatches(source=source, batch_size=batch_size, until="caught_up", **options)
    return [batch["id"].to_pylist() for batch in batches], batches


def flat(batches):
    return [i for batch in batches for i in batch]


def first_rows(reader):
    while (rows := reader.read(100)) is None:
        pass
    return rows


def test_reads_each_message_once(broker):
    broker.send("once", ids, partitions=3)
    read_ids, _ = read(topics(broker, "once"))
    assert sorted(flat(read_ids)) == list(range(100))
    assert [len(batch) for batch in read_ids] == [7] * 14 + [2]
    # Within a partition in order.
    for partition in range(3):
        own = [i for i in flat(read_ids) if i % 3 == partition]
        assert own == sorted(own)


def test_goes_on_after_the_used_batches(broker):
    broker.send("on", ids, partitions=3)
    first = StreamBatches(source=topics(broker, "on"), batch_size=7)
    iterator = iter(first)
    given = [next(iterator)["id"].to_pylist() for _ in range(6)]
    first.advance(4)
    state = first.state()
    iterator.close()
    # Batches that were given and not used come again, here and in another process.
    used = set(flat(given[:4]))
    again = StreamBatches(source=topics(broker, "on"), batch_size=7, until="caught_up")
    again.restore([state])
    rest = [i for batch in again for i in batch["id"].to_pylist()]
    assert sorted(rest) == sorted(set(range(100)) - used)
    again.advance(len(rest))
    assert [*again] == []
    broker.send("on", [{"id": 100}], partitions=3)
    assert [batch["id"].to_pylist() for batch in again] == [[100]]


def test_messages_of_many_rows_are_cut(broker):
    table = pa.table({"id": np.arange(100)})
    broker.send("arrow", [stream(table[i : i + 10]) for i in range(0, 100, 10)], partitions=2)
    source = topics(broker, "arrow", decode="arrow")
    first = StreamBatches(source=source, batch_size=7)
    iterator = iter(first)
    used = [next(iterator)["id"].to_pylist() for _ in range(5)]
    first.advance(5)
    iterator.close()
    again = StreamBatches(source=source, batch_size=9, until="caught_up")
    again.restore([first.state()])
    rest = [batch["id"].to_pylist() for batch in again]
    assert sorted(flat(used + rest)) == list(range(100))
    assert [len(batch) for batch in rest] == [9] * 7 + [2]


def test_processes_share_the_partitions(broker):
    broker.send("shared", ids, partitions=4)
    source = topics(broker, "shared")
    shares = [read(source, shard=Shard(index, 3)) for index in range(3)]
    found = [sorted(flat(batches)) for batches, _ in shares]
    of_partition = [[i for i in range(100) if i % 4 == p] for p in range(4)]
    assert found == [sorted(of_partition[0] + of_partition[3]), of_partition[1], of_partition[2]]
    # Another number of processes goes on from the states of all.
    for batches, (_, stream_) in zip(found, shares, strict=True):
        stream_.advance(len(batches))
    broker.send("shared", [{"id": 100 + i} for i in range(4)], partitions=4)
    states = [stream_.state() for _, stream_ in shares]
    rest = []
    for index in range(2):
        again = StreamBatches(source=source, batch_size=7, until="caught_up", shard=Shard(index, 2))
        again.restore(states)
        rest.append(sorted(i for batch in again for i in batch["id"].to_pylist()))
    assert rest == [[100, 102], [101, 103]]
    with pytest.raises(DataError, match="shared has 4 partitions, too few for 5 processes"):
        read(source, shard=Shard(0, 5))


def test_start(broker):
    broker.send("start", ids[:8], partitions=4)
    source = topics(broker, "start", start="latest")
    found, batches = read(source)
    assert found == []
    # Partitions without messages so far have saved positions, too.
    broker.send("start", ids[8:12], partitions=4)
    again = StreamBatches(source=source, batch_size=4, until="caught_up")
    again.restore([batches.state()])
    (batch,) = again
    assert sorted(batch["id"].to_pylist()) == [8, 9, 10, 11]


def test_several_topics(broker):
    broker.send("red", ids[:3])
    broker.send("blue", ids[3:5])
    found, batches = read(topics(broker, ("red", "blue")), batch_size=5)
    assert sorted(found[0]) == [0, 1, 2, 3, 4]
    batches.advance(1)
    assert {p: n for p, n in batches.lag().items() if p[-2:] == "/0"} == {"red/0": 0, "blue/0": 0}


def test_messages_without_rows(broker):
    broker.send("tombs", [{"id": 0}, None, None, b"", {"id": 1}, None])
    found, batches = read(topics(broker, "tombs"), batch_size=1)
    assert found == [[0], [1]]
    batches.advance(2)
    assert batches._positions["tombs/0"] == Position(5)


def test_lag_and_time(broker):
    seconds = [1e9 + 60 * i for i in range(100)]
    broker.send("lag", ids, partitions=2, seconds=seconds)
    batches = StreamBatches(source=topics(broker, "lag"), batch_size=10)
    assert batches.lag() == {} == batches.scalars()
    iterator = iter(batches)
    for _ in range(6):
        next(iterator)
    assert sum(batches.lag().values()) == 100
    assert batches.newest_seconds is None
    newest = batches.clock()
    batches.advance(5)
    values = batches.scalars()
    assert values["stream/lag"] == 50 == sum(batches.lag().values())
    assert values["stream/lag"] == values["stream/lag/lag/0"] + values["stream/lag/lag/1"]
    assert batches.newest_seconds <= newest
    assert batches.newest_seconds in seconds
    assert values["stream/seconds_behind"] == pytest.approx(
        time.time() - batches.newest_seconds, abs=60
    )
    iterator.close()
    again = StreamBatches(source=topics(broker, "lag"), batch_size=10)
    again.restore([batches.state()])
    assert again.newest_seconds == batches.newest_seconds


def test_group(broker):
    kafka = pytest.importorskip("confluent_kafka")
    broker.send("watched", ids)
    batches = StreamBatches(source=topics(broker, "watched", group="watchers"), batch_size=10)
    iterator = iter(batches)
    for _ in range(3):
        next(iterator)
    batches.advance(2)
    place = kafka.TopicPartition("watched", 0)
    settings = {"bootstrap.servers": broker.address, "group.id": "watchers"}
    watcher = kafka.Consumer(settings)
    until = time.monotonic() + 10
    while watcher.committed([place], timeout=5)[0].offset != 20:
        assert time.monotonic() < until
        time.sleep(0.05)
    watcher.close()
    iterator.close()
    # What the group has is never read.
    assert len(read(topics(broker, "watched", group="watchers"))[0][0]) == 7


def test_memory_is_bounded(broker):
    broker.send("large", [{"id": i, "text": "x" * 10_000} for i in range(500)])
    source = topics(broker, "large", buffer_bytes=1 << 16, options={"statistics.interval.ms": 0})
    batches = StreamBatches(source=source, batch_size=1)
    iterator = iter(batches)
    next(iterator)
    time.sleep(0.3)
    consumer = batches._iteration.reader._consumer
    # The client holds its queue and one fetch, not the topic's 5 MB.
    assert len(consumer.consume(500, 0)) < 200
    iterator.close()


def test_bad_messages(broker):
    broker.send("bad", [*ids[:20], b'{"id": "no', *ids[20:30], b"[1]", *ids[30:]])
    problem = r"topic 'bad', partition 0, offset 20: the message cannot be decoded .*bad_messages="
    with pytest.raises(DataError, match=problem):
        read(topics(broker, "bad"))
    with pytest.warns(UserWarning, match="offset 20: the message cannot be decoded.*left out"):
        found, _ = read(topics(broker, "bad", bad_messages="skip"), batch_size=200)
    assert found == [list(range(100))]


def test_rows_that_the_transform_refuses(broker):
    broker.send("refused", [stream(pa.table({"id": [3 * i, 3 * i + 1]})) for i in range(9)])

    def transform(table):
        if 13 in table["id"].to_pylist():
            raise DataError("the table, row 9, column 'id': 13 is refused")
        return table

    source = topics(broker, "refused", decode="arrow")
    with pytest.raises(DataError, match=r"partition 0, offset 4, row 1: the table.*13 is refused"):
        read(source, transform=transform)


def test_positions_that_the_broker_has_not(broker):
    broker.send("moved", ids)
    batches = StreamBatches(source=topics(broker, "moved"), batch_size=7)
    batches.restore(['{"positions": {"moved/0": [500, 0]}, "seconds": null}'])
    with pytest.raises(DataError, match=r"offset 500: reading was to go on there.*ends at offset"):
        next(iter(batches))
    with pytest.raises(DataError, match="no state of StreamBatches: 'nonsense'"):
        batches.restore(["nonsense"])


def test_deleted_messages(broker, monkeypatch):
    from jaxrec.data.streams import kafka

    broker.send("old", ids)
    # The mock cluster deletes nothing: the reader is told of a later first message.
    real = kafka.KafkaReader._watermarks

    def later(self, index):
        low, high = real(self, index)
        return 40 if index == 0 else low, high

    monkeypatch.setattr(kafka.KafkaReader, "_watermarks", later)
    state = '{"positions": {"old/0": [10, 0]}, "seconds": null}'
    batches = StreamBatches(source=topics(broker, "old"), batch_size=100, until="caught_up")
    batches.restore([state])
    with pytest.raises(DataError, match=r'offset 10: the broker has deleted.*to offset 40.*"skip"'):
        next(iter(batches))
    source = topics(broker, "old", deleted="skip")
    batches = StreamBatches(source=source, batch_size=100, until="caught_up")
    batches.restore([state])
    with pytest.warns(UserWarning, match="they are left out"):
        (batch,) = batches
    assert batch["id"].to_pylist() == list(range(40, 100))


def test_positions_that_the_broker_loses_meanwhile(broker):
    broker.send("lost", ids)
    source = topics(broker, "lost", deleted="skip")
    reader = source.open({}, Shard(), has_end=False)
    # As a broker answers to a fetch of deleted messages: the mock cluster has none at 500 either.
    reader._consumer.assign([reader._at(0, 500)])
    with pytest.warns(UserWarning, match="offset 500: the broker has deleted"):
        rows = first_rows(reader)
    assert rows.table["id"][0].as_py() == 0
    reader.close()
    reader = topics(broker, "lost").open({}, Shard(), has_end=False)
    reader._consumer.assign([reader._at(0, 500)])
    with pytest.raises(DataError, match="offset 500: the broker has deleted"):
        first_rows(reader)
    reader.close()


def test_unknown_topic(broker):
    broker.send("known", ids[:1])
    with pytest.raises(DataError, match=r"has no topic 'clikcs'; it has .*known"):
        read(topics(broker, "clikcs"))


def test_unknown_option(broker):
    source = topics(broker, "clicks", options={"security.protocl": "SSL"})
    with pytest.raises(ValueError, match=r"options of KafkaSource: No such .*security\.protocl"):
        read(source)


def test_no_broker():
    pytest.importorskip("confluent_kafka", reason=MISSING)
    source = KafkaSource(brokers="127.0.0.1:1", topics="clicks", timeout=0.3)
    with pytest.raises(ConnectionError, match=r"no broker of 127.0.0.1:1 answered within 0.3 s"):
        read(source)


@pytest.mark.slow
def test_broker_that_goes_away():
    pytest.importorskip("confluent_kafka", reason=MISSING)
    with broker_process() as (address, process):
        source = KafkaSource(brokers=address, topics="clicks", timeout=1)
        batches = StreamBatches(source=source, batch_size=10)
        iterator = iter(batches)
        assert len(next(iterator)) == 10
        process.kill()
        started = time.monotonic()
        with pytest.raises(ConnectionError, match=r"no broker .* answered within 1 s"):
            next(iterator)
        assert time.monotonic() - started < 20
        assert sum(batches.lag().values()) >= 0


def test_without_the_client(monkeypatch):
    monkeypatch.setitem(sys.modules, "confluent_kafka", None)
    with pytest.raises(ImportError, match=r"pip install 'jaxrec\[kafka\]'"):
        read(KafkaSource(brokers="127.0.0.1:1", topics="clicks"))


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"start": "middle"}, "start is 'earliest' or 'latest', got 'middle'"),
        ({"bad_messages": "keep"}, "bad_messages is"),
        ({"deleted": "keep"}, "deleted is"),
        ({"timeout": 0}, "timeout is above 0"),
        ({"buffer_bytes": 1}, "buffer_bytes 1024 or more"),
        ({"decode": "avro"}, "decode is"),
    ],
)
def test_options(options, problem):
    with pytest.raises(ValueError, match=problem):
        KafkaSource(brokers="localhost:9092", topics="clicks", **options)


def test_address():
    assert parse_address("kafka://a:1,b:2/clicks,views") == ("a:1,b:2", ["clicks", "views"])
    for address in ("kafka://a:1", "kafka:///clicks", "a:1/clicks", "kafka://a:1/x/y"):
        with pytest.raises(ValueError, match="give kafka://HOST:PORT/TOPIC"):
            parse_address(address)
