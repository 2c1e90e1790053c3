"""The processes of test_watch.py."""

from __future__ import annotations

import time

import jax
from flax import nnx

import jaxrec
from jaxrec.mesh.agree import gather_numbers


def work(connection, port: int, process: int, num_processes: int, is_started_by_hand: bool) -> int:
    """Join the others, say so, and exchange numbers until told how to end."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    coordinator = f"localhost:{port}"
    if is_started_by_hand:  # `jaxrec.shard` begins to watch
        jax.distributed.initialize(coordinator, num_processes, process)
        mesh = jax.make_mesh((num_processes,), ("data",))
        plan = jaxrec.plan.ShardingPlan.from_dict({"a": jaxrec.mesh.row_wise()})
        jaxrec.shard(make_model, plan, mesh)
    else:
        jaxrec.mesh.join_processes(coordinator, num_processes, process)
    gather_numbers([process])
    time.sleep(1)  # until connections stand
    connection.send("ready")
    is_over = False
    while not is_over:
        is_over = bool(gather_numbers([connection.poll(0.02)]).max())
    return 0


def make_model():
    config = jaxrec.EmbeddingBagConfig("a", 8, 4)
    return jaxrec.EmbeddingBagCollection([config], rngs=nnx.Rngs(0))
