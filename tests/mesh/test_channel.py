"""What the exchanges of several groups need to take place one after the other."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

import jaxrec
from jaxrec.mesh import row_wise, shard_batch, table_wise

PLACEMENTS = {
    "rows": row_wise(),
    "sums": row_wise(exchange="pooled"),
    "bags": table_wise(0),
    "more_sums": row_wise(exchange="pooled"),
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_groups_of_every_exchange_with_activations_and_weights_of_a_type(dtype):
    """Every row moves by its weights' sum, in whichever turn its group's exchange comes."""
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2], axis_types=(AxisType.Auto,))
    # Four widths make four groups.
    configs = [jaxrec.EmbeddingBagConfig(name, 6, 2 + i) for i, name in enumerate(PLACEMENTS)]
    model = jaxrec.EmbeddingBagCollection(
        configs,
        optimizer=jaxrec.optim.sgd(1.0),
        is_weighted=True,
        dtype=dtype,
        rngs=nnx.Rngs(0),
    )
    model = jaxrec.shard(model, jaxrec.plan.ShardingPlan.from_dict(PLACEMENTS), mesh)
    for config in configs:
        # A group waits for a number of the one before, and none is like -1.0: its bits, as an
        # integer, are infinite in float16.
        model.load_table(config.name, -np.ones((6, config.embedding_dim)))
    lists = {name: [[1, 2], [2]] for name in PLACEMENTS}
    weights = {name: [[0.5, 0.25], [2.0]] for name in PLACEMENTS}
    batch = jaxrec.KeyedJaggedArray.from_lists(lists, weights=weights)
    weights = np.asarray(batch.weights, jnp.dtype(dtype))
    batch = jax.tree.unflatten(jax.tree.structure(batch), [batch.values, batch.lengths, weights])

    @nnx.jit(donate_argnums=0)
    def step(model, batch):
        def loss(model):
            pooled = model(batch).values
            return pooled.astype("float32").sum(), pooled

        (_, pooled), gradients = jaxrec.value_and_grad(loss, has_aux=True)(model)
        model.apply_gradients(gradients.tables[""], 0)
        return pooled

    pooled = step(model, shard_batch(batch, mesh))
    assert pooled.dtype == dtype
    np.testing.assert_array_equal(pooled.astype("float32"), [[-0.75] * 14, [-2.0] * 14])
    for name in PLACEMENTS:
        expected = np.array([-1, -1.5, -3.25, -1, -1, -1])
        np.testing.assert_array_equal(model.table(name)[:, 0], expected)
