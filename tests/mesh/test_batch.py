"""Host batches on a mesh: every sample keeps its bags, and training on them is as on one device."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType

import jaxrec
from jaxrec.mesh import column_wise, data_parallel, row_wise, shard_batch, table_wise

pytestmark = pytest.mark.jax_version

DEVICES = 4
TX = optax.sgd(0.1)


def make_mesh():
    return jax.make_mesh(
        (DEVICES,), ("data",), devices=jax.devices()[:DEVICES], axis_types=(AxisType.Auto,)
    )


@pytest.fixture
def mesh():
    return make_mesh()


def draw_shared(rng, num_bags, samples=16, most=4, weighted=False, capacities=None):
    """A batch whose samples share bags: for each key its number of bags."""
    bags = {
        key: [rng.integers(0, 40, rng.integers(0, most)).tolist() for _ in range(count)]
        for key, count in num_bags.items()
    }
    weights = {key: [[(i + 1) / 64 for i in bag] for bag in of_key] for key, of_key in bags.items()}
    inverse = np.stack([rng.integers(0, count, samples) for count in num_bags.values()])
    return jaxrec.KeyedJaggedArray.from_lists(
        bags,
        weights=weights if weighted else None,
        inverse_indices=inverse,
        capacities=capacities,
    )


def device_parts(sharded, devices=DEVICES):
    return [jax.tree.map(lambda x, i=i: np.asarray(x[i]), sharded) for i in range(devices)]


@pytest.mark.parametrize("id_bits", [32, 64])
def test_ids_of_64_bits(mesh, id_bits):
    """Each device has the ids of its own samples, whatever they were packed with."""
    ids = [[[2**40 + sample, 7][:sample]] for sample in range(4)]
    if id_bits == 32:
        ids = [[[id_ % 2**31 for id_ in bag] for bag in sample] for sample in ids]
    lists = {"a": [bag for sample in ids for bag in sample], "b": [[3]] * 4}
    weights = {key: [[0.5] * len(bag) for bag in bags] for key, bags in lists.items()}
    batch = jaxrec.KeyedJaggedArray.from_lists(lists, weights, id_bits=id_bits)
    labels = np.arange(4, dtype=np.float32)
    sharded, _ = shard_batch((batch, labels), mesh, id_bits=64)
    assert sharded.values.shape == (4, 16)
    for device in range(DEVICES):
        values, lengths = np.asarray(sharded.values)[device], np.asarray(sharded.lengths)[device]
        assert values[: lengths[0]].tolist() == lists["a"][device]
        assert values[8 : 8 + lengths[1]].tolist() == [3]
    np.testing.assert_array_equal(np.asarray(sharded.weights)[3, :3], [0.5, 0.5, 0])


@given(
    seed=st.integers(0, 2**32 - 1),
    num_bags=st.dictionaries(st.sampled_from("abc"), st.integers(1, 30), min_size=1),
    samples=st.integers(1, 5),
    weighted=st.booleans(),
)
def test_every_sample_keeps_its_bags(seed, num_bags, samples, weighted):
    rng = np.random.default_rng(seed)
    batch = draw_shared(rng, num_bags, samples * DEVICES, weighted=weighted)
    sharded = shard_batch(batch, make_mesh())
    whole, parts = batch.to_lists(), device_parts(sharded)
    for k, key in enumerate(batch.keys):
        expected = [whole[key][bag] for bag in batch.inverse_indices[k]]
        got = [part.to_lists()[key][bag] for part in parts for bag in part.inverse_indices[k]]
        assert got == expected
        for part in parts:
            # No device has bags that none of its samples uses.
            used = np.unique(part.inverse_indices[k])
            assert used.tolist() == list(range(used.size))
            assert part[key].lengths[used.size :].sum() == 0
            if weighted:
                count = int(part[key].lengths.sum())
                expected_weights = (part[key].values[:count] + 1) / np.float32(64)
                np.testing.assert_array_equal(part[key].weights[:count], expected_weights)


def test_capacities_and_numbers_of_bags_are_of_the_ladder(mesh):
    """So that batches of about the same size run the same program."""
    rng = np.random.default_rng(0)
    shapes = {
        jax.tree.map(lambda x: x.shape, shard_batch(draw_shared(rng, {"a": count}, 256), mesh))
        for count in (60, 61, 62, 63, 64)
        for _ in range(3)
    }
    assert len({(shape.capacities, shape.strides) for shape in shapes}) <= 3
    few = shard_batch(draw_shared(rng, {"a": 30}, 8), mesh)
    assert few.strides == (2,)  # a device's two samples use two bags at most


def test_capacities_that_are_given(mesh):
    """Whatever the batch, so that processes need not agree on what it takes."""
    few, many = (
        jaxrec.KeyedJaggedArray.from_lists({"a": [[1] * n] * 8, "b": [[2]] * 8}) for n in (1, 5)
    )
    room = {"a": 24, "b": 8, "unused": 8}
    for batch in (few, many):
        placed = shard_batch(batch, mesh, capacities=room)
        assert (placed.capacities, placed.values.shape) == ((24, 8), (4, 32))
    parts = [jax.tree.map(lambda x, d=d: np.asarray(x)[d], placed) for d in range(4)]
    assert [bag for part in parts for bag in part["a"].to_lists()] == [[1] * 5] * 8
    message = "batch: a device has 10 ids of key 'a', but its capacity is 8"
    with pytest.raises(ValueError, match=message):
        shard_batch(many, mesh, capacities={"a": 8, "b": 8})
    with pytest.raises(ValueError, match="2 ids of key 'b', but its capacity is 0"):
        shard_batch(many, mesh, capacities={"a": 24})
    shared = draw_shared(np.random.default_rng(0), {"a": 3}, 8)
    placed = shard_batch(shared, mesh, capacities={"a": 64})
    assert (placed.capacities, placed.strides) == ((64,), (2,))


@pytest.mark.slow
@pytest.mark.parametrize("exchange", ["rows", "pooled"])
def test_training_with_shared_bags_equals_one_device(mesh, exchange):
    placements = {
        "a": row_wise(exchange=exchange),
        "b": table_wise(2),
        "c": column_wise((0, 3)),
        "d": data_parallel(),
    }
    # Of 9 and 16 bags, drawn for 16 samples, some have none.
    num_bags = {"a": 9, "b": 16, "c": 3, "d": 1}

    class Ranker(nnx.Module):
        def __init__(self):
            rngs = nnx.Rngs(0)
            self.embeddings = jaxrec.EmbeddingBagCollection(
                [
                    jaxrec.EmbeddingBagConfig("a", 40, 4, feature_names=("a", "c")),
                    jaxrec.EmbeddingBagConfig("b", 40, 4, pooling="mean"),
                    jaxrec.EmbeddingBagConfig("c", 40, 4),
                    jaxrec.EmbeddingBagConfig("d", 40, 4),
                ],
                # A bound within the sums over samples that share a bag; an eps above the rounding
                # of bounded gradients that cancel.
                optimizer=jaxrec.optim.adagrad(0.1, eps=1e-3, clip_value=0.01),
                is_weighted=True,
                rngs=rngs,
            )
            self.over = nnx.Linear(20, 1, rngs=rngs)

        def __call__(self, features):
            return self.over(self.embeddings(features).values)[:, 0]

    @nnx.jit(donate_argnums=(0, 1))
    def step(model, optimizer, features, labels):
        def loss_fn(model):
            return jnp.square(model(features) - labels).mean()

        loss, gradients = jaxrec.value_and_grad(loss_fn)(model)
        optimizer.update(model, gradients)
        return loss

    rng = np.random.default_rng(0)
    room = dict.fromkeys(num_bags, 48)  # the same for all, so that a step is compiled once
    batches = [
        (
            draw_shared(rng, num_bags, weighted=True, capacities=room),
            rng.normal(size=16).astype(np.float32),
        )
        for _ in range(3)
    ]
    alone = Ranker()
    sharded = jaxrec.shard(Ranker, jaxrec.plan.ShardingPlan.from_dict(placements), mesh)
    optimizers = [jaxrec.Optimizer(model, TX) for model in (alone, sharded)]
    for batch in batches:
        expected = step(alone, optimizers[0], *batch)
        loss = step(sharded, optimizers[1], *shard_batch(batch, mesh, capacities=room))
        np.testing.assert_allclose(loss, expected, rtol=1e-6)
    for name in placements:
        np.testing.assert_allclose(
            sharded.embeddings.table(name), alone.embeddings.table(name), rtol=1e-5, atol=1e-6
        )
        np.testing.assert_allclose(
            sharded.embeddings.table_state(name)["accumulator"],
            alone.embeddings.table_state(name)["accumulator"],
            rtol=1e-5,
            atol=1e-7,
        )


def test_host_memory_can_be_written_at_once():
    mesh = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4])
    raw = np.zeros(4 * 4096 + 64, np.uint8)
    start = -raw.ctypes.data % 64  # where XLA on CPUs would use the memory itself
    host = raw[start : start + 4 * 4096].view(np.float32)
    placed = jaxrec.mesh.shard_batch(host, mesh)
    host[:] = 1
    assert not np.asarray(placed).any()


@pytest.mark.parametrize(
    ("batch", "error", "message"),
    [
        (
            {"x": np.zeros((6, 2))},
            ValueError,
            r"batch\['x'\]: a batch of 6 samples does not divide by the 4 devices of the mesh in "
            r"this process; add 2 samples of weight 0 with jaxrec.data.pad_batch\(batch, "
            r"batch_size\), which Trainer\(batch_size=...\) does, or drop 2",
        ),
        (
            [jaxrec.KeyedJaggedArray.from_lists({"a": [[1]] * 5})],
            ValueError,
            r"batch\[0\]: a batch of 5 samples does not divide by the 4 devices",
        ),
        (np.zeros((0, 2)), ValueError, "batch: a batch of 0 samples"),
        (3.0, TypeError, "batch is the number 3.0; a batch has arrays of samples"),
        (np.array(["a"] * 4), TypeError, "batch is of type <U1; a batch has arrays of numbers"),
        (
            np.array([1, 2, 3, 2**40]),
            ValueError,
            "batch: 1099511627776 does not fit int32, .* map such ids to rows on the host",
        ),
        (
            {"x": jaxrec.KeyedJaggedArray.from_lists({"a": [[1]] * 4}, id_bits=64)},
            ValueError,
            r"batch\['x'\].values: raw 64-bit ids stay on the host, .*tier.ahead.*hash_ids",
        ),
        (
            {"x": np.ma.masked_equal([1, 2, 3, 4], 2)},
            ValueError,
            r"batch\['x'\]: 1 elements are masked",
        ),
        (
            jaxrec.KeyedJaggedArray.from_lengths(
                ["a", "b"], [1, 2], [1, 0, 1, 0, 0], strides=[4, 1]
            ),
            ValueError,
            r"batch: its keys have different numbers of bags, \(4, 1\), and no inverse_indices",
        ),
    ],
    ids=["dense", "ragged", "empty", "number", "strings", "64_bits", "raw", "masked", "strides"],
)
def test_errors(mesh, batch, error, message):
    with pytest.raises(error, match=message):
        shard_batch(batch, mesh)


@pytest.mark.parametrize("shared", [False, True])
def test_slot_keys_stay(mesh, shared):
    inverse = [[0, 1, 2, 3]] * 2 if shared else None
    batch = jaxrec.KeyedJaggedArray.from_lists(
        {"a": [[1]] * 4, "b": [[2]] * 4}, inverse_indices=inverse
    )
    batch = dataclasses.replace(batch, slot_keys=("b",))
    placed = shard_batch({"x": batch}, mesh)["x"]
    assert placed.slot_keys == ("b",)
    assert device_parts(placed)[3].slot_keys == ("b",)


def test_a_batch_is_put_on_a_mesh_once(mesh):
    batch = shard_batch(jaxrec.KeyedJaggedArray.from_lists({"a": [[1]] * 8}), mesh)
    with pytest.raises(ValueError, match="batch is on a mesh already"):
        shard_batch(batch, mesh)


@pytest.mark.usefixtures("unchecked")
def test_a_batch_on_a_mesh_needs_a_model_there(mesh):
    model = jaxrec.EmbeddingBagCollection([jaxrec.EmbeddingBagConfig("a", 4, 2)], rngs=nnx.Rngs(0))
    batch = shard_batch(jaxrec.KeyedJaggedArray.from_lists({"a": [[1]] * DEVICES}), mesh)
    with pytest.raises(
        ValueError, match=r"shape \(4, 8\), .*the tables are on one device; put the"
    ):
        model(batch)


@pytest.mark.usefixtures("unchecked")
def test_something_else_for_a_mesh():
    with pytest.raises(TypeError, match=r"a batch is put on a jax\.sharding\.Mesh, got 'data'"):
        shard_batch(np.zeros(8), "data")


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("capacities", "message"),
    [([8], r"capacities are by key, .* got \[8\]"), ({"a": 8.5}, "key 'a': 8.5 is not an integer")],
    ids=["list", "float"],
)
def test_capacities_of_another_type(mesh, capacities, message):
    batch = jaxrec.KeyedJaggedArray.from_lists({"a": [[1]] * 4})
    with pytest.raises(TypeError, match=message):
        shard_batch(batch, mesh, capacities=capacities)


def test_big_endian_arrays(mesh):
    placed = shard_batch({"y": np.arange(4, dtype=">f4"), "i": np.arange(4, dtype=">i8")}, mesh)
    np.testing.assert_array_equal(placed["y"], [0, 1, 2, 3])
    np.testing.assert_array_equal(placed["i"], [0, 1, 2, 3])
    assert placed["y"].dtype == np.float32


def test_wide_types_are_narrowed_where_they_fit(mesh):
    placed = shard_batch({"i": np.arange(8), "f": np.ones(8), "b": np.ones(8, bool)}, mesh)
    assert {key: x.dtype.name for key, x in placed.items()} == {
        "i": "int32",
        "f": "float32",
        "b": "bool",
    }
