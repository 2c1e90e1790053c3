"""Pools against dictionaries, on one device and over a mesh, in compiled steps."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType

import jaxrec
from jaxrec.mesh import shard_batch
from jaxrec.nn import KeyedJaggedTensorPool, TensorPool
from jaxrec.train import CheckpointManager, restore
from tests.copies import find_copies

SIZE, BATCH = 32, 16
LENGTHS = {"clicks": 3, "likes": 2}
EMPTY = {"clicks": [], "likes": []}
MESHES = {
    "one_device": None,
    "one_axis": ((8,), ("data",), AxisType.Auto),
    "two_axes": ((2, 4), ("host", "device"), AxisType.Auto),
    "explicit": ((4,), ("data",), AxisType.Explicit),
}


def mesh_of(name):
    if MESHES[name] is None:
        return None
    shape, axes, kind = MESHES[name]
    return jax.make_mesh(
        shape, axes, axis_types=(kind,) * len(shape), devices=jax.devices()[: np.prod(shape)]
    )


def place(batch, mesh):
    return jax.tree.map(jnp.asarray, batch) if mesh is None else shard_batch(batch, mesh)


@nnx.jit(donate_argnums=0)
def step(pool, ids, values):
    """Reads the rows before and after an update."""
    before = pool.lookup(ids)
    pool.update(ids, values)
    return before, pool.lookup(ids)


@pytest.mark.parametrize(
    ("mesh", "dtype"),
    [(mesh, "float32") for mesh in MESHES]
    + [("one_axis", dtype) for dtype in ("bfloat16", "int32", "uint8")],
)
def test_rows_of_a_pool(mesh, dtype):
    mesh = mesh_of(mesh)
    pool = TensorPool(SIZE, 3, dtype, mesh=mesh)
    rng, kept = np.random.default_rng(0), np.zeros((SIZE, 3), dtype)
    for _ in range(4):
        ids = rng.integers(-1, SIZE + 1, BATCH).astype(np.int32)
        values = np.asarray(rng.integers(-99, 99, (BATCH, 3))).astype(dtype)
        is_row = (ids >= 0) & (ids < SIZE)

        def read(ids=ids, is_row=is_row):
            return np.where(is_row[:, None], kept[np.where(is_row, ids, 0)], 0)

        expected = read()
        before, after = step(pool, *place((ids, values), mesh))
        np.testing.assert_array_equal(before, expected)
        for id_, row in zip(ids[is_row], values[is_row], strict=True):
            kept[id_] = row  # the last one of an id counts
        np.testing.assert_array_equal(after, read())
    np.testing.assert_array_equal(pool.pool.rows.get_value(), kept)


def test_every_bit_travels():
    """Signs of zeros and payloads of NaN, which sums would lose."""
    mesh = mesh_of("one_axis")
    bits = np.array([0x80000000, 0x7FC12345, 0xFF812345, 1] * 4, np.uint32)[:, None]
    pool = TensorPool(SIZE, 1, mesh=mesh)
    ids, values = place((np.arange(16, dtype=np.int32) * 2, bits.view(np.float32)), mesh)
    _, after = step(pool, ids, values)
    np.testing.assert_array_equal(np.asarray(after).view(np.uint32), bits)


bag = {key: st.lists(st.integers(0, 2**31 - 1), max_size=n) for key, n in LENGTHS.items()}
samples = st.lists(
    st.tuples(st.integers(0, SIZE - 1), st.fixed_dictionaries(bag)), min_size=BATCH, max_size=BATCH
)


def batch_of(rows, weights=None):
    """The batch whose samples are dictionaries of bags."""
    lists = {key: [row[key] for row in rows] for key in LENGTHS}
    capacities = {key: len(rows) * n for key, n in LENGTHS.items()}
    return jaxrec.KeyedJaggedArray.from_lists(lists, weights, capacities=capacities)


CAPACITIES = {key: 2 * n for key, n in LENGTHS.items()}  # two samples on each of eight devices


@given(st.lists(samples, min_size=2, max_size=2), st.sampled_from(["one_device", "one_axis"]))
@settings(max_examples=8, deadline=None)
def test_bags_of_a_pool(steps, mesh):
    mesh = mesh_of(mesh)
    pool = KeyedJaggedTensorPool(SIZE, LENGTHS, mesh=mesh)
    kept = {}
    for pairs in steps:
        ids = np.array([id_ for id_, _ in pairs], np.int32)
        batch = batch_of([row for _, row in pairs])
        if mesh is not None:
            ids, batch = shard_batch((ids, batch), mesh, capacities=CAPACITIES)
        before, after = step(pool, ids, batch)
        assert lists_of(before) == [kept.get(id_, EMPTY) for id_, _ in pairs]
        kept.update(pairs)
        assert lists_of(after) == [kept[id_] for id_, _ in pairs]


def lists_of(batch):
    """The samples of a batch, or of the batches of all devices, as dictionaries of bags."""
    batch = jax.device_get(batch)
    parts = [batch]
    if batch.lengths.ndim == 2:
        devices = batch.lengths.shape[0]
        parts = [jax.tree.map(lambda x, d=d: x[d], batch) for d in range(devices)]
    lists = [part.to_lists() for part in parts]
    return [
        {key: bags[key][sample] for key in bags}
        for bags in lists
        for sample in range(len(bags["clicks"]))
    ]


@pytest.mark.parametrize("mesh", ["one_device", "two_axes"])
def test_weights_and_numbers(mesh):
    mesh = mesh_of(mesh)
    pool = KeyedJaggedTensorPool(SIZE, LENGTHS, "float32", is_weighted=True, mesh=mesh)
    rng = np.random.default_rng(0)
    lengths = rng.integers(0, 3, (2, BATCH)).astype(np.int32)
    count = int(lengths.sum())
    batch = jaxrec.KeyedJaggedArray(
        np.zeros(0, np.int32), np.zeros(2 * BATCH, np.int32), keys=tuple(LENGTHS),
        capacities=(0, 0), strides=(BATCH, BATCH),
    )  # fmt: skip
    values, weights = rng.normal(size=(2, count)).astype(np.float32)
    columns, first = {}, 0
    for key, of_key in zip(LENGTHS, lengths, strict=True):
        last = first + int(of_key.sum())
        padding = (0, 3 * BATCH - (last - first))
        columns[key] = jaxrec.JaggedArray(
            np.pad(values[first:last], padding), of_key, np.pad(weights[first:last], padding)
        )
        first = last
    batch = jaxrec.KeyedJaggedArray.from_dict(columns)
    ids, placed = place((rng.permutation(SIZE)[:BATCH].astype(np.int32), batch), mesh)
    _, after = step(pool, ids, placed)
    for key in LENGTHS:
        parts = jax.device_get(after)[key]
        if mesh is None:
            found = (parts.to_lists(), parts.weights_to_lists())
        else:
            parts = [jax.tree.map(lambda x, d=d: x[d], parts) for d in range(mesh.size)]
            found = (
                [row for part in parts for row in part.to_lists()],
                [row for part in parts for row in part.weights_to_lists()],
            )
        assert found == (batch[key].to_lists(), batch[key].weights_to_lists())


def test_other_keys_are_left_out_and_keys_may_be_in_any_order():
    pool = KeyedJaggedTensorPool(4, LENGTHS)
    batch = jaxrec.KeyedJaggedArray.from_lists({"likes": [[4]], "x": [[9] * 9], "clicks": [[1]]})
    pool.update(np.array([2]), batch)
    assert pool.lookup(np.array([2])).to_lists() == {"clicks": [[1]], "likes": [[4]]}


class History(nnx.Module):
    """Scores an item by the embeddings of a user's last clicks, and remembers the item."""

    def __init__(self):
        config = jaxrec.EmbeddingBagConfig("item", 64, 4, feature_names=("clicks",))
        self.embeddings = jaxrec.EmbeddingBagCollection([config], rngs=nnx.Rngs(0))
        self.over = nnx.Linear(8, 1, rngs=nnx.Rngs(1))
        self.histories = KeyedJaggedTensorPool(SIZE, {"clicks": 3})
        self.vectors = TensorPool(SIZE, 4)

    def __call__(self, users):
        pooled = self.embeddings(self.histories(users))["clicks"]
        joined = jnp.concatenate([pooled, self.vectors(users)], axis=1)
        return self.over(joined)[:, 0], pooled


@nnx.jit(donate_argnums=(0, 1))
def train_step(model, optimizer, users, clicks, labels):
    def loss_fn(model):
        scores, pooled = model(users)
        return optax.sigmoid_binary_cross_entropy(scores, labels).mean(), pooled

    (loss, pooled), gradients = jaxrec.value_and_grad(loss_fn, has_aux=True)(model)
    optimizer.update(model, gradients)
    model.histories.update(users, clicks)
    model.vectors.update(users, pooled)
    return loss


def draw(seed):
    rng = np.random.default_rng(seed)
    lists = [rng.integers(0, 64, rng.integers(0, 4)).tolist() for _ in range(BATCH)]
    clicks = jaxrec.KeyedJaggedArray.from_lists({"clicks": lists}, capacities=(3 * BATCH,))
    users = rng.permutation(SIZE)[:BATCH].astype(np.int32)
    return users, clicks, rng.integers(0, 2, BATCH).astype(np.float32)


@pytest.mark.slow
def test_models_on_a_mesh_and_their_checkpoints(tmp_path):
    """Eight devices equal one; a checkpoint of eight is read by four and by one."""
    alone, many = History(), History()
    mesh = mesh_of("one_axis")
    plan = jaxrec.plan.ShardingPlan.from_dict({"item": jaxrec.mesh.row_wise()})
    many = jaxrec.shard(many, plan, mesh)
    assert not many.vectors.pool.rows.get_value().sharding.is_fully_replicated
    optimizers = [jaxrec.Optimizer(model, optax.sgd(0.1)) for model in (alone, many)]
    for seed in range(4):
        batch = draw(seed)
        placed = shard_batch(batch, mesh, capacities={"clicks": 6})
        losses = [
            float(train_step(alone, optimizers[0], *jax.tree.map(jnp.asarray, batch))),
            float(train_step(many, optimizers[1], *placed)),
        ]
        np.testing.assert_allclose(*losses, rtol=1e-6)

    def rows(model):
        return [np.asarray(p.pool.rows.get_value()) for p in (model.histories, model.vectors)]

    histories, vectors = rows(many)
    np.testing.assert_array_equal(rows(alone)[0], histories)
    np.testing.assert_allclose(rows(alone)[1], vectors, rtol=1e-6)
    assert np.abs(vectors).max() > 0

    with CheckpointManager(tmp_path) as manager:
        manager.save(many, optimizers[1])
    for name in ("one_device", "explicit"):
        other = History()
        if name != "one_device":
            other = jaxrec.shard(other, plan, mesh_of(name))
        restore(other, tmp_path, jaxrec.Optimizer(other, optax.sgd(0.1)))
        for found, expected in zip(rows(other), (histories, vectors), strict=True):
            np.testing.assert_array_equal(found, expected)
        if name != "one_device":
            assert other.vectors.pool.rows.get_value().sharding.num_devices == 4


@pytest.mark.parametrize("mesh", ["one_device", "one_axis"])
def test_updates_are_in_place(mesh):
    mesh = mesh_of(mesh)
    pool = TensorPool(80_000, 8, mesh=mesh)
    ids, values = place((np.arange(16, dtype=np.int32), np.ones((16, 8), np.float32)), mesh)
    graphdef, state = nnx.split(pool)

    def update(state, ids, values):
        pool = nnx.merge(graphdef, state)
        pool.update(ids, values)
        return nnx.state(pool)

    compiled = jax.jit(update, donate_argnums=0).lower(state, ids, values).compile()
    local = 80_000 if mesh is None else 10_000
    assert find_copies(compiled, (local, 8)) == []


def test_ids_outside():
    pool = TensorPool(4, 2)
    for ids in ([0, 4], [-1, 0]):
        wrong = max(ids, key=lambda i: not 0 <= i < 4)
        sample = ids.index(wrong)
        message = rf"sample {sample}: id {wrong} is outside \[0, 4\), the ids of the pool"
        with pytest.raises(IndexError, match=message):
            pool.lookup(np.array(ids))
        with pytest.raises(IndexError, match=message):
            pool.update(np.array(ids), np.zeros((2, 2), np.float32))


def test_bags_that_are_too_long():
    pool = KeyedJaggedTensorPool(4, LENGTHS, is_weighted=True)
    lists = {"clicks": [[1], [2]], "likes": [[1], [1, 2, 3]]}
    batch = jaxrec.KeyedJaggedArray.from_lists(lists, lists)
    message = "feature 'likes', sample 1: 3 values, but bags of the pool hold 2"
    with pytest.raises(ValueError, match=message):
        pool.update(np.array([0, 1]), batch)
    _, after = step(pool, jnp.array([0, 1]), jax.tree.map(jnp.asarray, batch))
    assert after["likes"].to_lists() == [[1], [-1, -1]]
    assert np.isnan(after["likes"].weights_to_lists()[1]).all()
    assert after["clicks"].to_lists() == [[1], [2]]


GOOD = jaxrec.KeyedJaggedArray.from_lists({"clicks": [[1], [2]], "likes": [[], []]})


@pytest.mark.parametrize(
    ("batch", "error", "message"),
    [
        (GOOD.select(["clicks"]), KeyError, r"the batch lacks \['likes'\]"),
        (
            jaxrec.KeyedJaggedArray.from_lists({"clicks": [[1]], "likes": [[]]}),
            ValueError,
            "feature 'clicks' has 1 bags for 2 ids; each id needs one",
        ),
        (
            jaxrec.KeyedJaggedArray.from_lists(
                {"clicks": [[1]], "likes": [[]]}, inverse_indices=[[0, 0]] * 2
            ),
            ValueError,
            "a pool takes batches without inverse_indices",
        ),
        (
            jax.tree.map(lambda x: np.stack([x]), GOOD),
            ValueError,
            "one on a single device batches without an axis over devices",
        ),
        (GOOD._with(values=np.zeros(16, np.float32)), TypeError, "the pool holds int32, the batch"),
    ],
    ids=["keys", "samples", "inverse_indices", "mesh", "type"],
)
def test_other_batches(batch, error, message):
    pool = KeyedJaggedTensorPool(4, LENGTHS)
    with pytest.raises(error, match=message):
        pool.update(np.array([0, 1]), batch)


def test_weights_are_missing():
    pool = KeyedJaggedTensorPool(4, LENGTHS, is_weighted=True)
    with pytest.raises(ValueError, match="the pool has weights, the batch has none"):
        pool.update(np.array([0, 1]), GOOD)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: TensorPool(0, 2), ValueError, "num_rows is an integer of 1 or more, got 0"),
        (lambda: TensorPool(4, True), ValueError, "width is an integer of 1 or more, got True"),
        (lambda: TensorPool(2**31, 1), ValueError, "num_rows is below 2"),
        (lambda: TensorPool(4, 2, np.int64), TypeError, "elements have 1, 2 or 4 bytes, got int64"),
        (
            lambda: TensorPool(30, 2, mesh=mesh_of("one_axis")),
            ValueError,
            "30 rows do not divide by the 8 devices of the mesh; take 32",
        ),
        (lambda: KeyedJaggedTensorPool(4, {}), ValueError, "names no feature"),
        (
            lambda: KeyedJaggedTensorPool(4, {"a": 0}),
            ValueError,
            "the largest length of feature 'a' is an integer of 1 or more, got 0",
        ),
        (
            lambda: KeyedJaggedTensorPool(4, LENGTHS, "int64"),
            ValueError,
            "values_dtype is 'int32' or 'float32', got 'int64'",
        ),
        (
            lambda: TensorPool(4, 2).update(np.array([1]), np.zeros((1, 3))),
            ValueError,
            r"values have shape \(1, 3\); expected \(1, 2\)",
        ),
        (
            lambda: TensorPool(8, 2, mesh=mesh_of("one_axis")).lookup(np.array([1])),
            ValueError,
            "1 row indices do not divide by the 8 devices",
        ),
        (
            lambda: TensorPool(8, 2).pool.read(np.array([1.0])),
            TypeError,
            r"row indices are integers \[batch\], got float64\[1\]",
        ),
    ],
    ids=lambda value: value[:24] if isinstance(value, str) else "",
)
def test_bad_arguments(make, error, message):
    with pytest.raises(error, match=message):
        make()
