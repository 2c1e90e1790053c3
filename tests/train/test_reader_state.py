"""Checkpoints hold where the batches of the model end, and training goes on there."""

from __future__ import annotations

import json
import os
import signal
import threading
import time

import jax
import numpy as np
import optax
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from flax import nnx

import jaxrec
from jaxrec.data import FolderSource, StreamBatches
from jaxrec.metrics import Writer
from jaxrec.train import (
    Callback,
    CheckpointManager,
    SaveCheckpoints,
    Trainer,
    WriteMetrics,
    interruptible,
)
from jaxrec.train.checkpoint import all_steps
from jaxrec.train.checkpoint.files import read_run

ROWS, BATCH = 40, 4


class Counter(nnx.Module):
    """Counts ids: each step adds 1 to the rows of its ids."""

    def __init__(self):
        table = jaxrec.EmbeddingBagConfig("id", ROWS, 1, initializer=jax.nn.initializers.zeros)
        self.ids = jaxrec.EmbeddingBagCollection(
            [table], optimizer=jaxrec.optim.sgd(1.0), rngs=nnx.Rngs(0)
        )

    @property
    def counts(self):
        return np.asarray(self.ids.table("id"))[:, 0].astype(int).tolist()


def count_loss(model, ids, weights):
    # The gradient of each row is -1, and padding has none.
    return -(weights * model.ids(ids).values[:, 0]).sum(), {}


def make(**options):
    model = Counter()
    return Trainer(
        model=model,
        optimizer=jaxrec.Optimizer(model, optax.sgd(0.0)),
        loss=count_loss,
        batch_size=BATCH,
        **options,
    )


def stream(folder, schema=None, **options):
    return StreamBatches(
        source=FolderSource(directory=folder, schema=schema, poll_seconds=0.01),
        batch_size=BATCH,
        transform=lambda rows: jaxrec.KeyedJaggedArray.from_dense(
            {"id": rows["id"].to_numpy()[:, None]}
        ),
        **{"until": "caught_up", **options},
    )


def write(folder, ids):
    folder.mkdir(exist_ok=True)
    pq.write_table(pa.table({"id": list(ids)}), folder / f"{ids[0]:02}.parquet", row_group_size=3)


def counted(ids):
    return [int(i in ids) for i in range(ROWS)]


class Killed(Exception):
    pass


class Kill(Callback):
    """Ends training as a kill does: nothing is saved."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, trainer, result):
        if result.step == self.step:
            raise Killed


@pytest.fixture
def folder(tmp_path):
    write(tmp_path / "in", range(10))
    write(tmp_path / "in", range(10, 21))
    return tmp_path / "in"


def test_goes_on_after_a_kill(folder, tmp_path):
    """Checkpoints of steps 2 and 4; the run ends within step 5 and, again, within step 6."""
    for killed in (4, 5, None):
        with CheckpointManager(tmp_path / "run") as manager:
            trainer = make(callbacks=[SaveCheckpoints(manager, 2)])
            if killed is not None:
                trainer.callbacks = [*trainer.callbacks, Kill(killed)]
            if all_steps(tmp_path / "run"):
                metadata = trainer.restore(manager)
                assert len(metadata.reader) == 1
            if killed is None:
                trainer.train(stream(folder))
                break
            with pytest.raises(Killed):
                trainer.train(stream(folder))
    assert trainer.model.counts == counted(range(21))
    (state,) = read_run(tmp_path / "run" / "6").reader
    assert json.loads(state)["positions"] == {"00.parquet": [1, 0], "10.parquet": [1, 0]}
    # Nothing new, then a new file; in the same process, and in another.
    trainer = make()
    trainer.restore(tmp_path / "run")
    batches = stream(folder)
    assert trainer.train(batches) == 0
    write(folder, range(21, 25))
    assert trainer.train(batches) == 1
    assert trainer.train(batches) == 0
    assert trainer.train(stream(folder)) == 0
    assert trainer.model.counts == counted(range(25))
    assert trainer.reader_scalars() == {"stream/lag": 0, "stream/lag/files": 0}


def test_other_batches(folder, tmp_path):
    """A checkpoint of other batches has no state, and other batches ignore one."""
    trainer = make()
    trainer.train([*stream(folder)][:2])
    assert trainer.reader_scalars() == {}
    with CheckpointManager(tmp_path / "run") as manager:
        trainer.save(manager)
    trainer = make()
    assert trainer.restore(tmp_path / "run").reader == ()
    trainer.train(stream(folder), steps=3)
    with CheckpointManager(tmp_path / "next") as manager:
        trainer.save(manager)
        trainer = make()
        trainer.restore(manager)
        # Saved again before it goes on, it keeps the state.
        trainer.save(manager)
        assert trainer.restore(manager).reader != ()
    # Other batches between those of a stream change nothing about it.
    assert trainer.train([*stream(folder)][:2]) == 2
    assert trainer.train(stream(folder)) == 3


def test_snapshot(folder):
    trainer, batches = make(), stream(folder)
    trainer.train(batches, steps=2)
    set_back = trainer.snapshot()
    trainer.train(batches, steps=2)
    set_back()
    trainer.train(batches)
    assert trainer.model.counts == counted(range(21))


def test_saved_after_going_back(folder, tmp_path):
    """A model that went back to a checkpoint is saved with the rows of that checkpoint."""
    with CheckpointManager(tmp_path / "run") as manager:
        trainer, batches = make(), stream(folder)
        trainer.train(batches, steps=2)
        trainer.save(manager)
        trainer.train(batches, steps=1)
        trainer.restore(manager)
    with CheckpointManager(tmp_path / "again") as manager:
        trainer.save(manager)
    assert read_run(tmp_path / "again/2").reader == read_run(tmp_path / "run/2").reader
    trainer = make()
    trainer.restore(tmp_path / "again")
    trainer.train(stream(folder))
    assert trainer.model.counts == counted(range(21))


def test_stops_while_it_waits(folder):
    """Training that ends early ends a reader that waits for rows."""
    trainer = make()
    batches = stream(folder, until="stopped")
    started = time.monotonic()
    assert trainer.train(batches, steps=5) == 5
    assert time.monotonic() - started < 60
    assert batches._iteration.stopped.is_set()


class Lines(Writer):
    def __init__(self):
        self.lines = []

    def write(self, step, values):
        self.lines.append(values)


def test_lag_among_metrics(folder):
    lines = Lines()
    make(callbacks=[WriteMetrics(lines, 2)]).train(stream(folder))
    assert [line["stream/lag"] for line in lines.lines] == [2, 1, 0]


@pytest.mark.slow
@pytest.mark.processes
def test_two_processes(pair, tmp_path):
    """Each reads its files, one has more than the other; then one process goes on alone."""
    (tmp_path / "in").mkdir()
    for first, last in ((0, 13), (13, 14), (14, 19), (19, 30), (30, 31), (31, 34)):
        table = pa.table({"id": range(first, last), "t": range(first, last)})
        pq.write_table(table, tmp_path / f"in/{first:02}.parquet")
    arguments = {"folder": tmp_path / "in", "directory": tmp_path / "run"}
    one, other = pair.run("tests.train.shared_streams:train", steps=3, **arguments)
    assert one == other
    one, other = pair.run("tests.train.shared_streams:train", steps=None, **arguments)
    assert one == other
    ends = [end for _, end in one]
    assert ends == sorted(set(ends))
    trainer = make()
    states = [json.loads(state) for state in trainer.restore(tmp_path / "run").reader]
    assert all(len(state["positions"]) > 1 for state in states)
    assert trainer.model.counts == counted(range(34))
    write(tmp_path / "in", range(34, 40))
    trainer.train(stream(tmp_path / "in"))
    assert trainer.model.counts == counted(range(40))


@pytest.mark.slow
def test_kills(forks, broker, tmp_path):
    """20,000 messages and two kills; ``python -m benchmarks.streams`` has a million and twenty."""
    messages = 20_000
    broker.send("clicks", ({"id": i} for i in range(messages // 2)), partitions=3)
    options = ["--run", tmp_path / "run", "--brokers", broker.address, "--messages", messages]
    for kill, first in enumerate(range(messages // 2, messages, messages // 4)):
        process = forks.run("benchmarks.streams", *options)
        step = max(all_steps(tmp_path / "run"), default=0)
        until = time.monotonic() + 120
        while max(all_steps(tmp_path / "run"), default=0) <= step:
            assert time.monotonic() < until, process.errors
            assert process.poll() is None, process.errors
            time.sleep(0.002)
        time.sleep(0.03 * kill)
        assert process.stop() == -9
        more = ({"id": i} for i in range(first, first + messages // 4))
        broker.send("clicks", more, partitions=3)
    process = forks.run("benchmarks.streams", *options, "--last")
    assert process.wait(120) == 0, process.errors
    line = json.loads(process.output.strip().split("\n")[-1])
    assert (line["wrong"], line["sum"]) == (0, messages)


def test_interrupt_while_it_waits(folder, tmp_path):
    """A signal while the reader waits for rows ends training, which saves what it has."""
    trainer = make()
    with CheckpointManager(tmp_path / "run") as manager, interruptible() as interrupt:
        batches = stream(folder, until="stopped", stop=lambda: bool(interrupt))
        trainer.callbacks = [SaveCheckpoints(manager), interrupt, SignalAfter(5)]
        assert trainer.train(batches) == 5
    assert interrupt.signal == signal.SIGINT
    assert all_steps(tmp_path / "run") == [5]
    trainer = make()
    trainer.restore(tmp_path / "run")
    trainer.train(stream(folder))
    assert trainer.model.counts == counted(range(21))


class SignalAfter(Callback):
    """Sends this process SIGINT a moment after a step."""

    def __init__(self, step):
        self.step = step

    def on_step_dispatched(self, trainer, step):
        if step == self.step:
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
