"""The scenario that test_placed_checkpoints.py runs in two processes."""

from __future__ import annotations

import contextlib
import tracemalloc
from collections.abc import Callable, Iterator
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.experimental import multihost_utils

import jaxrec
from jaxrec.train import CheckpointManager, restore, restore_state

# A large table, so that a copy of it stands out.
ROWS = {"large": 100_003, "small": 31, "cut": 9}
DIM = 32


class Ranker(nnx.Module):
    def __init__(self, seed=0):
        rngs = nnx.Rngs(seed)
        self.embeddings = jaxrec.EmbeddingBagCollection(
            [jaxrec.EmbeddingBagConfig(name, rows, DIM) for name, rows in ROWS.items()],
            optimizer=jaxrec.optim.rowwise_adagrad(0.1),
            rngs=rngs,
        )
        self.over = nnx.Linear(4, 1, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)


# Orbax waits in a thread, whose programs XLA does not order with those of the main thread.
@mock.patch.object(multihost_utils, "sync_global_devices", mock.Mock(side_effect=AssertionError))
def checkpoint(directory):
    """Restores what one process saved, makes a step of the dense layer, saves, restores that.

    Returns:
        For each of the three, the bytes on the host as a part of the large table.
    """
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    placements = {
        "large": jaxrec.mesh.row_wise(),
        "small": jaxrec.mesh.data_parallel(),
        "cut": jaxrec.mesh.column_wise((3, 0)),
    }
    plan = jaxrec.plan.ShardingPlan.from_dict(placements)
    with mock.patch.object(jaxrec.mesh.dense, "MIN_SHARDED_SIZE", 4):  # the kernel is sharded
        model = jaxrec.shard(lambda: Ranker(seed=1), plan, mesh, dense="fsdp")
        optimizer = jaxrec.Optimizer(model, optax.adam(0.1))

    @nnx.jit
    def step(model, optimizer, batch):
        _, gradients = jaxrec.value_and_grad(lambda m: (m.over(batch) ** 2).sum())(model)
        optimizer.update(model, gradients)

    held = []
    with host_memory(held.append):
        restore(model, directory / "one", optimizer)
    step(model, optimizer, jaxrec.mesh.shard_batch(np.ones((4, 4), np.float32), mesh))
    with CheckpointManager(directory / "two") as manager:
        state = {"sum": jnp.float32(3)}
        with host_memory(held.append):
            manager.save(model, optimizer, state=state, batches=7)
            manager.wait_until_finished()
        kernel = np.asarray(model.over.kernel[...])
        with host_memory(held.append):
            assert restore(model, directory / "two", optimizer).step == 1
        np.testing.assert_array_equal(model.over.kernel[...], kernel)
        assert not model.over.kernel.get_raw_value().is_fully_replicated
    assert restore_state(state, directory / "two")["sum"] == 3
    return [size / (ROWS["large"] * DIM * 4) for size in held]


@contextlib.contextmanager
def host_memory(report: Callable[[int], None]) -> Iterator[None]:
    """Reports the most bytes on the host meanwhile, without the Python objects that stay."""
    tracemalloc.start()
    try:
        yield
        _, peak = tracemalloc.get_traced_memory()
        is_no_array = tracemalloc.DomainFilter(False, np.lib.tracemalloc_domain)
        objects = tracemalloc.take_snapshot().filter_traces([is_no_array]).traces
        report(peak - sum(trace.size for trace in objects))
    finally:
        tracemalloc.stop()
