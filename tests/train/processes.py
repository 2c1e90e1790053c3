"""What each of several processes runs, and how they are started.

Usage: python processes.py SCENARIO PORT NUM_PROCESSES PROCESS DIRECTORY
"""

from __future__ import annotations

import contextlib
import pathlib
import socket
import subprocess
import sys
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxrec
from jaxrec.train import CheckpointManager, restore, restore_state

# A large table, so that a copy of it stands out.
ROWS = {"large": 200_003, "small": 31, "cut": 9}
DIM = 32


@contextlib.contextmanager
def started(scenario, directory, count=2):
    """The processes of a scenario, joined by gloo."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    # -P: the installed package, and not the checkout.
    command = [sys.executable, "-P", __file__, scenario, str(port), str(count)]
    running = [
        subprocess.Popen(
            [*command, str(process), str(directory)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for process in range(count)
    ]
    try:
        yield running
    finally:
        for process in running:
            process.kill()
            process.wait()


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


def checkpoint(directory):
    """Restores what one process saved, makes a step of the dense layer, saves, restores that."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    placements = {
        "large": jaxrec.mesh.row_wise(),
        "small": jaxrec.mesh.data_parallel(),
        "cut": jaxrec.mesh.column_wise((3, 0)),
    }
    plan = jaxrec.plan.ShardingPlan.from_dict(placements)
    jaxrec.mesh.dense.MIN_SHARDED_SIZE = 4  # the kernel is sharded
    model = jaxrec.shard(lambda: Ranker(seed=1), plan, mesh, dense="fsdp")
    optimizer = jaxrec.Optimizer(model, optax.adam(0.1))

    @nnx.jit
    def step(model, optimizer, batch):
        _, gradients = jaxrec.value_and_grad(lambda m: (m.over(batch) ** 2).sum())(model)
        optimizer.update(model, gradients)

    tracemalloc.start()
    restore(directory / "one", model, optimizer)
    with CheckpointManager(directory / "two") as manager:
        step(model, optimizer, jaxrec.mesh.shard_batch(np.ones((4, 4), np.float32), mesh))
        state = {"sum": jnp.float32(3)}
        manager.save(model, optimizer, state=state, batches=7)
        manager.wait_until_finished()
        kernel = np.asarray(model.over.kernel[...])
        assert restore(directory / "two", model, optimizer).step == 1
        np.testing.assert_array_equal(model.over.kernel[...], kernel)
        assert not model.over.kernel.get_raw_value().is_fully_replicated
    _, peak = tracemalloc.get_traced_memory()
    is_no_array = tracemalloc.DomainFilter(False, np.lib.tracemalloc_domain)
    objects = tracemalloc.take_snapshot().filter_traces([is_no_array]).traces
    held = peak - sum(trace.size for trace in objects)
    assert restore_state(directory / "two", state)["sum"] == 3
    table = ROWS["large"] * DIM * 4
    # Half of it is on the devices of this process.
    assert held < 0.75 * table, f"{held:,} bytes were on the host, of a table of {table:,}"
    print("restored and saved", flush=True)


if __name__ == "__main__":
    scenario, port, count, process, directory = sys.argv[1:]
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    jax.distributed.initialize(f"localhost:{port}", int(count), int(process))
    {"checkpoint": checkpoint}[scenario](pathlib.Path(directory))
