"""Keys of batches over a mesh: reshaping them before or after `shard_batch` is the same."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

import jaxrec
from jaxrec import KeyedJaggedArray
from jaxrec.mesh import row_wise, shard_batch
from jaxrec.ragged import equal, jagged_unique_indices, keyed_jagged_index_select

ROWS = {
    "a": [[1, 2], [], [3], [4]],
    "b": [[5], [6, 7, 8], [], [9]],
    "c": [[], [], [10], [11, 12]],
    "d": [[13], [14], [15], [16, 17, 18]],
}
WEIGHTS = {key: [[id / 8 for id in bag] for bag in bags] for key, bags in ROWS.items()}

BATCHES = {
    "ids": KeyedJaggedArray.from_lists(ROWS),
    "weights": KeyedJaggedArray.from_lists(ROWS, WEIGHTS),
    "shared-bags": KeyedJaggedArray.from_lists(
        ROWS, inverse_indices=np.array([[0, 1, 2, 3], [3, 2, 1, 0], [0, 0, 2, 3], [1, 1, 1, 3]])
    ),
}

OPERATIONS = {
    "permute": lambda batch: batch.permute([2, 0, 3, 1]),
    "repeat": lambda batch: batch.permute([1, 1, 0]),
    "select": lambda batch: batch.select(["d", "a"]),
    "split-first": lambda batch: batch.split([1, 3])[0],
    "split-last": lambda batch: batch.split([1, 0, 3])[2],
    "concat": lambda batch: KeyedJaggedArray.concat(batch.split([2, 2])[::-1]),
    "capacities": lambda batch: batch.with_capacities({"b": 32}),
}


def make_mesh(kind=AxisType.Auto):
    return jax.make_mesh((2,), ("data",), devices=jax.devices()[:2], axis_types=(kind,))


@pytest.mark.parametrize(
    ("kind", "is_traced"),
    [(AxisType.Auto, False), (AxisType.Auto, True), (AxisType.Explicit, False)],
    ids=["auto", "auto-jit", "explicit"],
)
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("name", BATCHES)
def test_keys_are_reshaped_on_a_mesh_as_on_the_host(name, operation, kind, is_traced):
    mesh, batch, reshape = make_mesh(kind), BATCHES[name], OPERATIONS[operation]
    placed = shard_batch(batch, mesh)
    result = (jax.jit(reshape) if is_traced else reshape)(placed)
    expected = shard_batch(reshape(batch), mesh)
    assert result.keys == expected.keys
    assert result.batch_size == 2
    for key in result.keys:
        assert equal(result.select([key]), expected.select([key]))


def test_capacities_on_a_mesh_hold_the_fullest_device():
    placed = shard_batch(BATCHES["ids"], make_mesh())
    with pytest.raises(ValueError, match=r"'d'.*capacity"):
        placed.with_capacities({"d": 3})  # the second device has 4 ids
    assert placed.with_capacities({"d": 4}).capacity_per_key["d"] == 4


def test_a_mesh_batch_and_a_host_batch_are_not_concatenated():
    batch = BATCHES["ids"].select(["a"])
    placed = shard_batch(BATCHES["ids"].select(["b"]), jax.make_mesh((1,), ("data",)))
    with pytest.raises(ValueError, match="some of the batches lie over a mesh and some do not"):
        KeyedJaggedArray.concat([batch, placed])


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_rows_of_ids_on_a_mesh_become_a_dense_array(kind):
    mesh, batch = make_mesh(kind), BATCHES["weights"]
    tables = [jaxrec.EmbeddingConfig("t", 20, 4, feature_names=tuple(ROWS))]
    optimizer = jaxrec.optim.sgd(learning_rate=0.1)
    model = jaxrec.EmbeddingCollection(tables, optimizer=optimizer, rngs=nnx.Rngs(0))
    expected = {key: rows.to_padded_dense(3, -1.0) for key, rows in model(batch).items()}
    sharded = jaxrec.shard(model, jaxrec.plan.ShardingPlan.from_dict({"t": row_wise()}), mesh)

    @nnx.jit
    def padded(model, features):
        return {key: rows.to_padded_dense(3, -1.0) for key, rows in model(features).items()}

    placed = shard_batch(batch, mesh)
    for key, dense in padded(sharded, placed).items():
        np.testing.assert_array_equal(dense, expected[key])
        np.testing.assert_array_equal(
            placed[key].to_padded_dense_weights(2), batch[key].to_padded_dense_weights(2)
        )
    assert placed["a"].to_padded_dense().shape == (4, 2)  # the longest row of all devices


@pytest.mark.parametrize(
    ("name", "count"),
    {
        "offsets": lambda batch: batch.offsets,
        "length_per_key": lambda batch: batch.length_per_key,
        "segment_ids": lambda batch: batch.segment_ids,
        "to_lists": lambda batch: batch.to_lists(),
        "with_checked_ids": lambda batch: batch.with_checked_ids({"a": 100}),
        "keyed_jagged_index_select": lambda batch: keyed_jagged_index_select(batch, np.array([0])),
        "jagged_unique_indices": jagged_unique_indices,
        "column.offsets": lambda batch: batch["a"].offsets,
        "column.segment_ids": lambda batch: batch["a"].segment_ids,
        "column.to_lists": lambda batch: batch["a"].to_lists(),
        "column.weights_to_lists": lambda batch: batch["a"].weights_to_lists(),
    }.items(),
)
def test_what_counts_ids_refuses_a_batch_over_a_mesh(name, count):
    placed = shard_batch(BATCHES["weights"], make_mesh())
    with pytest.raises(ValueError, match="lies over a mesh: it has a batch for each of 2 devices"):
        count(placed)
