"""The scenario that test_reader_state.py runs in two processes."""

from __future__ import annotations

import jax
import optax
import pyarrow as pa
from jax.sharding import AxisType

import jaxrec
from jaxrec.data import Shard
from jaxrec.train import CheckpointManager, EventWindows, SaveCheckpoints, Trainer
from jaxrec.train.checkpoint import all_steps
from tests.train.test_reader_state import BATCH, Counter, count_loss, stream


def train(folder, directory, steps):
    """Train on the process's files, from the last checkpoint on; return the ends of windows."""
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    plan = jaxrec.plan.ShardingPlan.from_dict({"id": jaxrec.mesh.row_wise()})
    model = jaxrec.shard(Counter, plan, mesh)
    batches = stream(
        folder,
        schema=pa.schema([("id", pa.int64()), ("t", pa.int64())]),
        event_time="t",
        shard=Shard(jax.process_index(), jax.process_count()),
        max_wait=0.05,
    )
    ends = []
    windows = EventWindows(
        batches, 10, lambda trainer, end: ends.append((trainer.step, end)), every=1
    )
    with CheckpointManager(directory) as manager:
        trainer = Trainer(
            model=model,
            optimizer=jaxrec.Optimizer(model, optax.sgd(0.0)),
            loss=count_loss,
            batch_size=BATCH,
            place=lambda batch: jaxrec.mesh.shard_batch(batch, mesh, capacities={"id": BATCH}),
            uneven="empty",
            callbacks=[windows, SaveCheckpoints(manager, 2)],
        )
        if all_steps(directory):
            assert len(trainer.restore(manager).reader) == 2
        trainer.train(batches, steps=steps)
    return ends
