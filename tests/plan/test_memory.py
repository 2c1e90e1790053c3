"""The memory that a step is expected to take beside what compiled programs take."""

from __future__ import annotations

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import jaxrec
from jaxrec import optim
from jaxrec.mesh import data_parallel, row_wise, table_wise
from jaxrec.plan import ParameterConstraints, Planner, ShardingPlan, Topology

pytestmark = pytest.mark.jax_version

DEVICES, BATCH, POOLING = 8, 4096, 8


@pytest.mark.filterwarnings("ignore:tables a take 10 MiB")  # one table alone on eight devices
@pytest.mark.parametrize(
    "placement",
    [data_parallel(), row_wise(), row_wise(exchange="pooled"), table_wise(3)],
    ids=["copies", "rows", "sums", "bags"],
)
def test_memory_of_a_compiled_step(placement):
    """Tables and state to a few bytes; what comes and goes within 40 %, as XLA schedules it."""
    tables = [jaxrec.EmbeddingBagConfig("a", 20_000, 64, optimizer=optim.adagrad())]
    mesh = jax.make_mesh((DEVICES,), ("data",))
    plan = ShardingPlan.from_dict({"a": placement})
    constraints = {"a": ParameterConstraints(pooling_factors=POOLING)}
    found = Planner(Topology.from_mesh(mesh), constraints).evaluate(tables, plan, batch_size=BATCH)
    model = jaxrec.EmbeddingBagCollection(tables, rngs=nnx.Rngs(0))
    model = jaxrec.shard(model, plan, mesh)
    optimizer = jaxrec.Optimizer(model, optax.sgd(0.1))
    random = np.random.default_rng(0)
    batch = jaxrec.KeyedJaggedArray.from_lengths(
        ["a"],
        random.integers(0, 20_000, BATCH * POOLING).astype(np.int32),
        np.full(BATCH, POOLING, np.int32),
    )

    def step(model, optimizer, batch):
        loss, gradients = jaxrec.value_and_grad(lambda model: (model(batch).values ** 2).mean())(
            model
        )
        optimizer.update(model, gradients)
        return loss

    jitted = nnx.jit(step, donate_argnums=(0, 1))
    lowered = jitted.lower(model, optimizer, jaxrec.mesh.shard_batch(batch, mesh))
    taken = lowered.compile().memory_analysis()
    device = max(found.estimate.devices, key=lambda device: device.bytes["tables"])
    held = device.bytes["tables"] + device.bytes["padding"]
    given = 4 * BATCH * (POOLING + 2) / DEVICES  # ids and lengths
    assert held <= taken.argument_size_in_bytes <= held + given + 2048
    working = device.bytes["embeddings"] + device.bytes["exchange"]
    assert working == pytest.approx(taken.temp_size_in_bytes, rel=0.4)
