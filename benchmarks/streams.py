"""Counting the messages of a Kafka topic in a model that is killed again and again.

Usage: python -m benchmarks.streams [--messages 1000000] [--kills 20] [--partitions 4] [--seed 0]
       python -m benchmarks.streams --rate [--messages 500000]

A table has a row for each message, and a step adds 1 to the rows of its messages: after all kills
each row is 1 if each message counts exactly once. The topic grows while the runs read it. The
broker is the mock cluster of confluent-kafka (``pip install 'jaxrec[kafka]'``), or that of
``--brokers``, where the topic must be new. Prints a JSON line.

With ``--rate`` nothing is trained or killed: prints how many messages a second of processor time
are read, decoded and encoded into batches.
"""

from __future__ import annotations

import argparse
import json
import logging
import pathlib
import random
import resource
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time

import numpy as np

# Rows of a step, steps between two checkpoints, and messages that are sent at once.
BATCH, EVERY, CHUNK = 512, 10, 10_000

# Seconds for which a run that trains goes on before it is killed, at most.
LONGEST = 4.0

# Seconds that a run has for its first step.
LONGEST_WAIT = 60.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--partitions", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--brokers", help="brokers to use in place of the mock cluster")
    parser.add_argument("--topic", default="clicks")
    parser.add_argument("--rate", action="store_true")
    # A run in a process of its own: the directory of its checkpoints.
    parser.add_argument("--run", type=pathlib.Path, help=argparse.SUPPRESS)
    parser.add_argument("--last", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run and options.rate:
        return read(options.brokers, options.topic)
    if options.run:
        return count(
            options.brokers, options.topic, options.run, options.messages, is_last=options.last
        )
    with tempfile.TemporaryDirectory() as temporary:
        if options.rate:
            return measure_rate(options, pathlib.Path(temporary))
        print(json.dumps(measure(options, pathlib.Path(temporary, "run"))))


def count(
    brokers: str, topic: str, output: pathlib.Path, messages: int, *, is_last: bool = False
) -> None:
    """Train a run that counts messages, from its last checkpoint on; print when it has a step."""
    import jax.numpy as jnp
    import optax
    import pyarrow as pa
    from flax import nnx

    import jaxrec
    from jaxrec.data import KafkaSource, StreamBatches
    from jaxrec.train import Callback, CheckpointManager, SaveCheckpoints, Trainer
    from jaxrec.train.checkpoint import all_steps

    class Announce(Callback):
        def on_step_end(self, trainer, result):
            if result.step == first + 1:
                print("training", flush=True)

    def zeros(key, shape, dtype=jnp.float32):
        return jnp.zeros(shape, dtype)

    table = jaxrec.EmbeddingBagConfig(
        "message", messages, 1, feature_names=("id",), initializer=zeros
    )
    model = jaxrec.EmbeddingBagCollection(
        [table], optimizer=jaxrec.optim.sgd(1.0), rngs=nnx.Rngs(0)
    )

    def loss(model, features, weights):
        # The gradient of each message is -1, and padding has none.
        return -(weights * model(features).values[:, 0]).sum(), {}

    batches = StreamBatches(
        source=KafkaSource(
            brokers=brokers, topics=topic, schema=pa.schema([("id", pa.int64())]), group="count"
        ),
        batch_size=BATCH,
        transform=lambda rows: jaxrec.KeyedJaggedArray.from_dense(
            {"id": rows["id"].to_numpy()[:, None]}
        ),
        until="caught_up" if is_last else "stopped",
        max_wait=0.2,
    )
    with CheckpointManager(output) as manager:
        trainer = Trainer(
            model=model,
            optimizer=jaxrec.Optimizer(model, optax.sgd(0.0)),
            loss=loss,
            batch_size=BATCH,
            callbacks=[SaveCheckpoints(manager, EVERY), Announce()],
        )
        if all_steps(output):
            trainer.restore(manager)
        first = trainer.step
        trainer.train(batches)
    if is_last:
        counts = np.asarray(model.table("message"))[:, 0]
        wrong = int((counts != 1).sum())
        print(json.dumps({"steps": trainer.step, "wrong": wrong, "sum": float(counts.sum())}))


def read(brokers: str, topic: str) -> None:
    """Read a topic as tables, then as encoded batches; print a JSON line of each."""
    import pyarrow as pa

    from jaxrec.data import KafkaSource, Schema, StreamBatches, TableEncoder

    ids = {"encoding": "dynamic", "num_embeddings": 1000}
    schema = Schema.from_dict(
        {"label": "click", "dense": ["price"], "categorical": {"id": ids, "user": ids}}
    )
    encoder = TableEncoder(schema, {}, {}, {})
    columns = pa.schema([(name, pa.int64()) for name in ("id", "user", "click")])
    columns = columns.append(pa.field("price", pa.float64()))
    ways = {"tables": lambda table: table, "encoded": encoder.batch}
    for name, transform in ways.items():
        batches = StreamBatches(
            source=KafkaSource(brokers=brokers, topics=topic, schema=columns),
            batch_size=4096,
            transform=transform,
            until="caught_up",
        )
        before, messages = time.process_time(), 0
        for batch in batches:
            messages += len(batch) if name == "tables" else len(batch.labels)
        rate = messages / (time.process_time() - before)
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
        line = {"as": name, "messages": messages, "per_processor_second": round(rate)}
        print(json.dumps(line | {"peak_mib": memory}), flush=True)


def measure(options: argparse.Namespace, output: pathlib.Path) -> dict:
    """Kill runs while the topic grows, finish the last, and return what it has counted."""
    producer, brokers, failures = connect(options)
    send(producer, options, range(min(CHUNK, options.messages)))
    # The rest comes while the runs read, about as fast as they do.
    rest = threading.Thread(target=send_slowly, args=(producer, options), daemon=True)
    rest.start()
    moments, started = random.Random(options.seed), time.monotonic()
    killed = {"before training": 0, "while training": 0}
    for number in range(options.kills):
        with start(options, brokers, output) as process:
            # One in five while it starts.
            if number % 5 == 0:
                time.sleep(moments.uniform(0, LONGEST))
            else:
                # A run that has all messages that were sent so far makes no step.
                assert process.stdout is not None
                select.select([process.stdout], [], [], LONGEST_WAIT)
                time.sleep(moments.uniform(0, LONGEST))
            if process.poll() is not None:
                raise RuntimeError(f"a run ended by itself, with exit code {process.returncode}")
            process.send_signal(signal.SIGKILL)
            killed["before training" if number % 5 == 0 else "while training"] += 1
    rest.join()
    if failures:
        raise RuntimeError(f"{len(failures)} messages were not sent: {failures[0]}")
    with start(options, brokers, output, "--last") as process:
        lines = process.stdout.read().split("\n")
    if process.returncode:
        raise RuntimeError(f"the last run failed with exit code {process.returncode}")
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "messages": options.messages,
        "kills": options.kills,
        **killed,
        **json.loads(lines[-2]),
        "seconds": round(time.monotonic() - started, 1),
        "processor_seconds": round(children.ru_utime + children.ru_stime, 1),
    }


def measure_rate(options: argparse.Namespace, directory: pathlib.Path) -> None:
    """Print the lines of `read`, of a process of its own."""
    producer, brokers, failures = connect(options)
    send(producer, options, range(options.messages))
    if failures:
        raise RuntimeError(f"{len(failures)} messages were not sent: {failures[0]}")
    with start(options, brokers, directory, "--rate") as process:
        print(process.stdout.read(), end="")


def connect(options: argparse.Namespace) -> tuple:
    """Return a producer, the addresses of its brokers, and a list that gets failures to send."""
    import confluent_kafka as kafka

    failures = []

    def on_delivery(error, message):
        if error is not None:
            failures.append(error.str())

    settings = {"linger.ms": 20, "compression.type": "lz4", "on_delivery": on_delivery}
    if options.brokers:
        settings["bootstrap.servers"] = options.brokers
    else:
        settings["test.mock.num.brokers"] = 1
    producer = kafka.Producer(settings, logger=logging.Logger("mock", logging.CRITICAL))
    brokers = options.brokers or ",".join(
        f"{each.host}:{each.port}" for each in producer.list_topics(timeout=10).brokers.values()
    )
    return producer, brokers, failures


def start(
    options: argparse.Namespace, brokers: str, output: pathlib.Path, *more: str
) -> subprocess.Popen:
    """Start a run, or go on with it, in a process of its own."""
    program = [sys.executable, "-m", "benchmarks.streams", "--run", str(output), *more]
    program += ["--brokers", brokers, "--topic", options.topic]
    program += ["--messages", str(options.messages)]
    return subprocess.Popen(program, stdout=subprocess.PIPE, text=True)


def send(producer, options: argparse.Namespace, numbers: range) -> None:
    """Send messages with an id each, to the partitions in turn."""
    rest = ', "user": 12345, "click": 1, "price": 12.5' if options.rate else ""
    for number in numbers:
        payload = f'{{"id": {number}{rest}}}'
        while True:
            try:
                partition = number % options.partitions
                producer.produce(options.topic, payload, partition=partition)
                break
            except BufferError:  # the queue is full
                producer.poll(0.05)
    if producer.flush(60):
        raise RuntimeError("the broker does not take the messages")


def send_slowly(producer, options: argparse.Namespace) -> None:
    """Send all messages but the first chunk, in about the time that the kills take."""
    starts = range(CHUNK, options.messages, CHUNK)
    for first in starts:
        send(producer, options, range(first, min(first + CHUNK, options.messages)))
        time.sleep(options.kills * LONGEST / (2 * len(starts)))


if __name__ == "__main__":
    main()
