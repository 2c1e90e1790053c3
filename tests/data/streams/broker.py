"""A broker for tests: the mock cluster of librdkafka, which speaks Kafka's protocol."""

from __future__ import annotations

import contextlib
import json
import logging
import multiprocessing

import pytest

MISSING = "needs confluent-kafka: pip install 'jaxrec[kafka]'"


class Broker:
    """A mock cluster of one broker within this process, and a producer for its topics."""

    def __init__(self):
        kafka = pytest.importorskip("confluent_kafka", reason=MISSING)
        quiet = logging.Logger("mock", logging.CRITICAL)
        settings = {"test.mock.num.brokers": 1, "linger.ms": 1, "compression.type": "lz4"}
        self.producer = kafka.Producer(settings, logger=quiet)
        (broker,) = self.producer.list_topics(timeout=10).brokers.values()
        self.address = f"{broker.host}:{broker.port}"

    def send(self, topic, values, partitions=1, seconds=None):
        """Send values, JSON unless they are bytes, to the partitions in turn."""
        for number, value in enumerate(values):
            payload = value if isinstance(value, bytes | None) else json.dumps(value)
            while True:
                try:
                    self.producer.produce(
                        topic,
                        payload,
                        partition=number % partitions,
                        timestamp=0 if seconds is None else int(1000 * seconds[number]),
                        on_delivery=_check,
                    )
                    break
                except BufferError:
                    self.producer.poll(0.1)
        assert self.producer.flush(30) == 0


def _check(error, message):
    assert error is None, error.str()


@pytest.fixture(scope="session")
def broker():
    """The broker that the tests of this process share; each test has topics of its own."""
    return Broker()


@contextlib.contextmanager
def broker_process():
    """Yield the address of a broker in a process of its own, with a topic, and the process."""
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,), daemon=True)
    process.start()
    try:
        yield mine.recv(), process
    finally:
        process.kill()
        process.join()


def _serve(pipe):
    broker = Broker()
    broker.send("clicks", [{"id": i} for i in range(10)])
    pipe.send(broker.address)
    pipe.recv()
