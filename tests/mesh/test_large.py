"""Tables with more rows than int32 can number, on eight devices.

A real one takes gigabytes, so most tests lower the number of rows that layouts take for int32's.
What depends on the real number is tested without tables.
"""

from __future__ import annotations

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType

import jaxrec
from jaxrec.embed.config import MAX_ROWS
from jaxrec.embed.layout import layout_tables
from jaxrec.mesh import (
    column_wise,
    data_parallel,
    grid,
    row_wise,
    shard_batch,
    table_row_wise,
    table_wise,
)
from jaxrec.mesh.ahead import route_ahead, use_routes
from jaxrec.mesh.layout import layout_mesh
from jaxrec.mesh.placed_group import flatten_large
from jaxrec.mesh.shards import MeshShape
from jaxrec.ragged.wide_ids import WideIds
from jaxrec.train import checkpoint
from tests.mesh.table_steps import BATCH, smooth_loss, train_tables

LIMIT, ROWS = 60, 203
KEYS = {"a": 12, "b": ROWS, "c": 12}
OPTIMIZERS = {
    "sgd": jaxrec.optim.sgd(0.1),
    "clipped": jaxrec.optim.sgd(0.1, clip_norm=0.05),
    "rowwise_adagrad": jaxrec.optim.rowwise_adagrad(0.1),
    "adam": jaxrec.optim.adam(0.01),
}


@pytest.fixture
def mesh():
    mesh = jax.make_mesh((2, 4), ("host", "device"), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        yield mesh


@pytest.fixture
def few_row_numbers(monkeypatch):
    monkeypatch.setattr("jaxrec.mesh.layout.MAX_ROWS", LIMIT)


def make(kind="pooled", optimizer="sgd", is_weighted=False, padding_id=None):
    tables = [("big", ROWS, 4, ("a", "b")), ("small", 12, 4, ("c", "a"))]
    options = {"optimizer": OPTIMIZERS[optimizer], "rngs": nnx.Rngs(0)}
    if kind == "per_id":
        configs = [jaxrec.EmbeddingConfig(*each, padding_id=padding_id) for each in tables]
        return jaxrec.EmbeddingCollection(configs, **options)
    configs = [
        jaxrec.EmbeddingBagConfig(*each, pooling=pooling, padding_id=padding_id)
        for each, pooling in zip(tables, ("mean", "sum"), strict=True)
    ]
    return jaxrec.EmbeddingBagCollection(configs, is_weighted=is_weighted, **options)


def shard(big, small, mesh, *arguments, **options):
    plan = jaxrec.plan.ShardingPlan.from_dict({"big": big, "small": small})
    return jaxrec.shard(lambda: make(*arguments, **options), plan, mesh)


def draw(seed, is_weighted=False, **options):
    rng = np.random.default_rng(seed)
    bags = {
        key: [rng.integers(0, bound, rng.integers(0, 5)).tolist() for _ in range(BATCH)]
        for key, bound in KEYS.items()
    }
    weights = None
    if is_weighted:
        weights = {key: [rng.random(len(bag)).tolist() for bag in bags[key]] for key in bags}
    # The ids of one batch in four lie together, so that exchanges of rows take several rounds.
    if seed % 4 == 3:
        bags["b"] = [[id_ % 40 for id_ in bag] for bag in bags["b"]]
    capacities = dict.fromkeys(bags, 64)
    return jaxrec.KeyedJaggedArray.from_lists(bags, weights, capacities=capacities, **options)


def wide(batch, mesh):
    return shard_batch(batch, mesh, id_bits=64)


train_step = functools.partial(train_tables, smooth_loss)


def read(model):
    return {
        name: {"rows": np.asarray(model.table(name)), **model.table_state(name)}
        for name in ("big", "small")
    }


def assert_close(tables, expected):
    for name, arrays in expected.items():
        for key, array in arrays.items():
            atol = 2e-6 * np.abs(array).max()
            np.testing.assert_allclose(tables[name][key], array, rtol=0, atol=atol, err_msg=key)


CASES = {
    "rows": (row_wise(), data_parallel(), "pooled", "rowwise_adagrad"),
    "pooled": (row_wise(exchange="pooled"), table_wise(2), "pooled", "rowwise_adagrad"),
    "clipped": (row_wise(shares=range(4, 12)), row_wise(), "pooled", "clipped"),
    "clipped_pooled": (row_wise(exchange="pooled"), row_wise(), "pooled", "clipped"),
    "host": (table_row_wise(1), row_wise(), "pooled", "adam"),
    "host_pooled": (table_row_wise(1, exchange="pooled"), column_wise(), "pooled", "sgd"),
    "grid": (grid(), row_wise(exchange="pooled"), "pooled", "sgd"),
    "grid_pooled": (grid(exchange="pooled"), row_wise(), "pooled", "adam"),
    "per_id": (row_wise(), row_wise(), "per_id", "rowwise_adagrad"),
    "per_id_grid": (grid((1, 0)), table_wise(1), "per_id", "sgd"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.usefixtures("few_row_numbers")
def test_equal_to_one_device(mesh, case):
    big, small, kind, optimizer = CASES[case]
    is_weighted = case == "pooled"
    one = make(kind, optimizer, is_weighted)
    many = shard(big, small, mesh, kind, optimizer, is_weighted)
    layout = many.tables.get_value().layout
    assert layout.wide == ("big",)
    assert {g.is_large for g in layout.groups if g.tables == ("big",)} == {True}
    for name in ("big", "small"):
        np.testing.assert_array_equal(many.table(name), one.table(name))
    for step in range(4):
        batches = [draw(step + call, is_weighted) for call in range(1 + step % 2)]
        expected = train_step(one, batches, step)
        loss = train_step(many, [wide(batch, mesh) for batch in batches], step)
        np.testing.assert_allclose(loss, expected, rtol=1e-6)
    assert_close(read(many), read(one))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "optimizer"), [("pooled", "sgd"), ("per_id", "adam")])
@pytest.mark.usefixtures("few_row_numbers")
def test_padding_ids(mesh, kind, optimizer):
    options = {"is_weighted": kind == "pooled", "padding_id": 7}
    one = make(kind, optimizer, **options)
    many = shard(row_wise(), data_parallel(), mesh, kind, optimizer, **options)
    for step in range(2):
        batch = draw(step, options["is_weighted"])
        assert (np.asarray(batch.values) == 7).any()
        expected = train_step(one, [batch], step)
        loss = train_step(many, [wide(batch, mesh)], step)
        np.testing.assert_allclose(loss, expected, rtol=1e-6)
    assert_close(read(many), read(one))
    for name in ("big", "small"):
        np.testing.assert_array_equal(many.rows(name, [7]), 0)


@pytest.mark.parametrize("exchange", ["rows", "pooled"])
@pytest.mark.usefixtures("few_row_numbers")
def test_samples_that_share_bags(mesh, exchange):
    one, many = make(), shard(row_wise(exchange=exchange), row_wise(), mesh)
    rng = np.random.default_rng(0)
    # Bag 5 belongs to no sample.
    bags = {key: [[1, 2], [11], [], [0, 3, 3], [7], [5]] for key in KEYS}
    inverse = rng.integers(0, 5, (3, BATCH))
    batch = jaxrec.KeyedJaggedArray.from_lists(bags, inverse_indices=inverse)
    for step in range(2):
        expected = train_step(one, [batch], step)
        np.testing.assert_allclose(train_step(many, [wide(batch, mesh)], step), expected, rtol=1e-6)
    assert_close(read(many), read(one))


@pytest.mark.usefixtures("few_row_numbers")
def test_routes_that_are_computed_ahead(mesh):
    many = shard(row_wise(), row_wise(), mesh)
    batch = wide(draw(3), mesh)

    @nnx.jit
    def lookup(model, batch, ahead=None):
        with use_routes(model, ahead) if ahead else contextlib.nullcontext():
            return model(batch).values

    expected = lookup(many, batch)
    ahead = nnx.jit(lambda model, batch: route_ahead(lambda model: model(batch), model))(
        many, batch
    )
    np.testing.assert_array_equal(lookup(many, batch, ahead), expected)
    (route,) = ahead[""]
    assert float(route.routes["float32_4"].route.demand.max()) > 0


@pytest.mark.usefixtures("few_row_numbers")
def test_rows_are_read_and_set_by_id(mesh):
    many, ids = shard(row_wise(), row_wise(), mesh, "pooled", "rowwise_adagrad"), [202, 0, 60, 61]
    np.testing.assert_array_equal(many.rows("big", ids), make().table("big")[np.array(ids)])
    values = np.arange(16, dtype=np.float32).reshape(4, 4)
    many.load_rows("big", ids, values)
    np.testing.assert_array_equal(many.rows("big", ids), values)
    np.testing.assert_array_equal(np.asarray(many.table("big"))[ids], values)
    with pytest.raises(ValueError, match="has the rows 0 to 202, got id 203"):
        many.rows("big", [203])


@pytest.mark.slow
@pytest.mark.parametrize("num_devices", [8, 4, 1])
@pytest.mark.usefixtures("few_row_numbers")
def test_checkpoints_restore_on_other_devices(mesh, tmp_path, num_devices):
    many = shard(row_wise(), row_wise(), mesh, "pooled", "rowwise_adagrad")
    train_step(many, [wide(draw(0), mesh)], 0)
    expected = read(many)
    checkpoint.save(tmp_path, many, jaxrec.Optimizer(many, optax.sgd(0.1)))
    if num_devices == 1:
        restored = make("pooled", "rowwise_adagrad")
        checkpoint.restore(restored, tmp_path, jaxrec.Optimizer(restored, optax.sgd(0.1)))
    else:
        devices = jax.devices()[:num_devices]
        few = jax.make_mesh((num_devices,), ("data",), (AxisType.Auto,), devices=devices)
        with jax.set_mesh(few):
            placements = row_wise(exchange="pooled"), table_wise(1)
            restored = shard(*placements, few, "pooled", "rowwise_adagrad")
            checkpoint.restore(restored, tmp_path, jaxrec.Optimizer(restored, optax.sgd(0.1)))
    for name, arrays in read(restored).items():
        for key, array in arrays.items():
            np.testing.assert_array_equal(array, expected[name][key])


@pytest.mark.usefixtures("few_row_numbers")
def test_tables_move_to_another_plan(mesh):
    many = shard(row_wise(), row_wise(), mesh)
    expected = read(many)
    plan = {"big": grid(exchange="pooled"), "small": data_parallel()}
    jaxrec.shard(many, jaxrec.plan.ShardingPlan.from_dict(plan), mesh)
    jax.tree.map(np.testing.assert_array_equal, read(many), expected)


@pytest.mark.usefixtures("few_row_numbers")
def test_batches_of_narrow_ids_are_refused(mesh):
    many = shard(row_wise(), row_wise(), mesh)
    message = "table 'big' has more rows than int32 can number.*make batches with id_bits=64"
    batch = shard_batch(draw(0), mesh)
    for call in (lambda model, batch: model(batch), nnx.jit(lambda model, batch: model(batch))):
        with pytest.raises(ValueError, match=message):
            call(many, batch)
    with pytest.raises(ValueError, match=r"raw 64-bit ids stay on the host.*id_bits=64"):
        many(draw(0, id_bits=64))
    with pytest.raises(ValueError, match=r"shard_batch\(..., id_bits=64\)"):
        shard_batch(draw(0, id_bits=64), mesh)


def with_bad_ids(key, ids):
    """Samples of row 1, each of the first with one of the ids beside in a key."""
    lists = {name: [[1] for _ in range(BATCH)] for name in KEYS}
    for sample, id_ in enumerate(ids):
        lists[key][sample].append(id_)
    return jaxrec.KeyedJaggedArray.from_lists(lists, id_bits=64)


@pytest.mark.slow
@pytest.mark.parametrize("exchange", ["rows", "pooled"])
@pytest.mark.usefixtures("few_row_numbers")
def test_ids_outside_of_their_table(mesh, exchange):
    """No id is cut to 32 bits: 2**32 + 5 is not id 5."""
    ids = [ROWS, 2**31, 2**32, 2**32 + 5, 2**63 - 1, -2, -(2**63)]
    many = shard(row_wise(exchange=exchange), row_wise(), mesh)
    batch = wide(with_bad_ids("b", ids), mesh)
    found = np.isnan(nnx.jit(lambda model, batch: model(batch)["b"])(many, batch)).all(axis=1)
    assert found.tolist() == [True] * len(ids) + [False] * (BATCH - len(ids))
    with pytest.raises(ValueError, match=r"feature 'b', sample 0: id 203 is outside .0, 203"):
        many(batch)
    with pytest.raises(ValueError, match=rf"'b', sample 0: id {2**32 + 5} is outside .0, 203"):
        many(wide(with_bad_ids("b", [2**32 + 5]), mesh))
    before = read(many)
    train_step(many, [batch], 0)
    for name in ("big", "small"):  # the row that samples have beside the bad ids
        changed = (np.asarray(many.table(name)) != before[name]["rows"]).any(axis=1)
        assert changed.nonzero()[0].tolist() == [1]


@pytest.mark.parametrize(
    "small", [row_wise(), data_parallel(), table_wise(1), row_wise(exchange="pooled")]
)
@pytest.mark.usefixtures("few_row_numbers")
def test_ids_outside_of_other_tables(mesh, small):
    ids = [12, 2**31, 2**32 + 5, -2]
    many = shard(row_wise(), small, mesh)
    batch = wide(with_bad_ids("c", ids), mesh)
    found = np.isnan(nnx.jit(lambda model, batch: model(batch)["c"])(many, batch)).all(axis=1)
    assert found.tolist() == [True] * len(ids) + [False] * (BATCH - len(ids))


@pytest.mark.parametrize(
    ("big", "optimizer", "message"),
    [
        (data_parallel(), "sgd", "'big' takes 203 rows on device 0, more than int32 can number"),
        (table_wise(3), "sgd", "'big' takes 203 rows on device 3, .*cut its rows over more dev"),
        (column_wise(), "sgd", "'big' takes 203 rows on device 0"),
        (row_wise((1, 2)), "sgd", "'big' takes 102 rows on device 1"),
        (
            row_wise(exchange="bags"),
            "sgd",
            "'big' is placed row_wise, and exchange 'bags' is not possible, since it carries no "
            "more rows over the mesh than int32 can number; use exchange='rows'",
        ),
        (grid(), "rowwise_adagrad", "its columns are cut, and its optimizer .*needs whole rows"),
    ],
)
@pytest.mark.usefixtures("few_row_numbers")
def test_placements_that_are_not_possible(mesh, big, optimizer, message):
    with pytest.raises(ValueError, match=message):
        shard(big, row_wise(), mesh, "pooled", optimizer)


@pytest.mark.usefixtures("few_row_numbers")
def test_slots_of_a_large_group_are_not_numbered(mesh):
    """An exchange of another package that asks for them gets an error."""
    (placed, *_) = shard(row_wise(), row_wise(), mesh).tables.get_value().layout.groups
    with pytest.raises(ValueError, match="table 'big' has more slots over the mesh than int32"):
        placed.slots(jnp.arange(3, dtype=jnp.int32))


@pytest.mark.parametrize(
    ("num_rows", "placement"),
    [
        (MAX_ROWS + 1, row_wise()),
        (2**32, row_wise((3, 1, 0, 2))),
        (2**34 - 99, row_wise(shares=range(30, 62))),
        (6 * 2**30, table_row_wise(3)),
        (10**10, row_wise()),
    ],
)
def test_owners_of_real_numbers_of_rows(num_rows, placement):
    """Owners and rows of ids on both sides of each shard's ends, by Python's integers."""
    config = jaxrec.EmbeddingBagConfig("big", num_rows, 1)
    layout = layout_mesh(
        layout_tables([config], OPTIMIZERS["sgd"]), {"big": placement}, MeshShape(4, 8)
    )
    (placed,) = layout.groups
    assert placed.is_large
    assert layout.wide == ("big",)
    ends = {end for each in placed.shards for end in each.shard.rows}
    ids = sorted({end + step for end in ends for step in (-2, -1, 0, 1, 2**31, -(2**32))})
    ids = np.array([id_ for id_ in ids if id_ != -1], np.int64)
    batch = jaxrec.KeyedJaggedArray.from_lists({"big": [ids.tolist()]}, id_bits=64)
    wide_batch = batch._with(values=WideIds.of(np.asarray(batch.values)))
    lookups = flatten_large(wide_batch, placed.group.bags(wide_batch), placed)
    for position, id_ in enumerate(ids.tolist()):
        owner = [each for each in placed.shards if each.shard.rows[0] <= id_ < each.shard.rows[1]]
        if not owner:
            assert int(lookups.rows[position]) == -1, id_
            continue
        (shard,) = owner
        found = int(lookups.owners[position]), int(lookups.rows[position])
        assert found == (shard.shard.device, shard.local_row + id_ - shard.shard.rows[0]), id_
    assert (np.asarray(lookups.rows)[ids.size :] == placed.padding).all()
