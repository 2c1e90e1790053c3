"""How sharding types cut tables, and what they refuse."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

import jaxrec
from jaxrec.embed.layout import layout_tables
from jaxrec.mesh import (
    column_wise,
    data_parallel,
    grid,
    row_wise,
    table_column_wise,
    table_row_wise,
    table_wise,
)
from jaxrec.mesh.layout import layout_mesh
from jaxrec.mesh.sharding_types import DataParallel, TableWise
from jaxrec.mesh.shards import MeshShape
from jaxrec.plan import Topology

TABLE = jaxrec.EmbeddingBagConfig("user", num_embeddings=10, embedding_dim=7)
MESH = MeshShape(2, 4)


@pytest.mark.parametrize(
    ("placement", "expected"),
    [
        (data_parallel(), [((0, 10), (0, 7), 0)]),
        (table_wise(3), [((0, 10), (0, 7), 3)]),
        (row_wise((1, 5, 7)), [((0, 4), (0, 7), 1), ((4, 7), (0, 7), 5), ((7, 10), (0, 7), 7)]),
        (column_wise((2, 0)), [((0, 10), (0, 4), 2), ((0, 10), (4, 7), 0)]),
        (
            table_row_wise(1),
            [((0, 3), (0, 7), 4), ((3, 6), (0, 7), 5), ((6, 8), (0, 7), 6), ((8, 10), (0, 7), 7)],
        ),
        (column_wise(), [((0, 10), (c, c + 1), c) for c in range(7)]),
    ],
    ids=lambda value: getattr(value, "kind", None),
)
def test_blocks(placement, expected):
    blocks = [(b.rows, b.columns, b.device) for b in placement.cut(TABLE, MESH)]
    assert blocks == expected


@pytest.mark.parametrize(
    ("placement", "rows", "devices"),
    [
        pytest.param(row_wise((4, 2), shares=(3, 2)), [6, 4], [4, 2], id="shares"),
        pytest.param(row_wise(shares=[1] * 7 + [9]), [1] * 4 + [6], [0, 2, 3, 5, 7], id="rounded"),
        pytest.param(row_wise((4, 2, 6), buckets=5), [4, 4, 2], [4, 2, 6], id="buckets"),
        pytest.param(row_wise(buckets=2), [5, 5], [0, 1], id="few_buckets"),
        pytest.param(row_wise((1, 2), shares=(1, 9), buckets=5), [2, 8], [1, 2], id="both"),
        pytest.param(row_wise((1, 2), shares=(1, 99)), [10], [2], id="share_below_a_row"),
    ],
)
def test_rows_in_shares_and_buckets(placement, rows, devices):
    shards = placement.cut(TABLE, MESH)
    assert [shard.num_rows for shard in shards] == rows
    assert [shard.device for shard in shards] == devices
    ends = [shard.rows for shard in shards]
    assert [stop for _, stop in ends] == [start for start, _ in ends[1:]] + [10]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: row_wise((1, 2), shares=(1, 2, 3)), "row_wise: there are 3 shares for 2 devices"),
        (lambda: row_wise(shares=(1, 0)), r"row_wise: shares are numbers above 0, got \(1, 0\)"),
        (lambda: row_wise(shares=(1, np.inf)), "shares are numbers above 0"),
        (lambda: row_wise(shares="12"), "shares are numbers above 0"),
        (lambda: row_wise(buckets=0), "buckets is an integer of 1 or more, got 0"),
        (lambda: row_wise(buckets=2.0), r"buckets is an integer of 1 or more, got 2\.0"),
        (lambda: TableWise((1, 2)), r"table_wise: it takes one device, got \(1, 2\)"),
        (
            lambda: row_wise(buckets=4).cut(TABLE, MESH),
            "'user' has 10 rows.* divide into 4 buckets",
        ),
        (
            lambda: row_wise(shares=(1, 2)).cut(TABLE, MESH),
            "'user' is placed row_wise with 2 shares, but the mesh has 8 devices",
        ),
    ],
    ids=[
        "number",
        "zero",
        "infinity",
        "text",
        "no_buckets",
        "float",
        "kind",
        "rows",
        "devices",
    ],
)
def test_shares_and_buckets_that_are_not_possible(unchecked, make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("placement", "devices"),
    [
        (row_wise(), [0, 1]),
        (row_wise((5, 2, 3)), [5, 2]),
        (table_row_wise(1), [4, 5]),
        (grid(), [0, 1, 4, 5]),
    ],
    ids=lambda value: getattr(value, "kind", None),
)
def test_devices_beyond_the_rows_have_none(placement, devices):
    table = dataclasses.replace(TABLE, num_embeddings=2)
    assert [block.device for block in placement.cut(table, MESH)] == devices


def test_a_grid_covers_every_element_once():
    seen = np.zeros((10, 7), int)
    for block in grid().cut(TABLE, MESH):
        seen[slice(*block.rows), slice(*block.columns)] += 1
    assert (seen == 1).all()


@pytest.mark.parametrize(
    ("placements", "message"),
    [
        ({}, "no placement for table 'user'"),
        ({"user": table_wise(8)}, "placed table_wise on device 8, but the mesh has 8 devices"),
        ({"user": table_row_wise(2)}, "placed table_row_wise on host 2, but the mesh has 2 hosts"),
    ],
    ids=["missing", "no_such_device", "no_such_host"],
)
def test_errors(placements, message):
    layout = layout_tables([TABLE], jaxrec.optim.sgd())
    with pytest.raises(ValueError, match=message):
        layout_mesh(layout, placements, MESH)


@dataclasses.dataclass(frozen=True)
class Normalized(jaxrec.optim.RowOptimizer):
    """An optimizer of somebody's own that looks at whole rows."""

    def init(self, num_rows, dim):
        return {}

    def update(self, rows, gradients, state, step):
        return rows / (rows**2).sum(axis=1, keepdims=True), state


@pytest.mark.parametrize(
    ("optimizer", "placement", "message"),
    [
        pytest.param(
            Normalized(0.1),
            table_column_wise(0),
            "'user'.*Normalized needs whole rows; use row_wise.*sums_rows = True",
            id="own_optimizer",
        ),
        pytest.param(
            jaxrec.optim.lamb(),
            column_wise((1,) * 7, exchange="rows"),
            "'user'.*exchange 'rows'.*lamb.*device has two parts.*name each place once$",
            id="one_device_twice",
        ),
        pytest.param(
            jaxrec.optim.rowwise_adagrad(),
            grid((0, 1), exchange="pooled_by_host"),
            "'user'.*exchange 'pooled_by_host'.*rowwise_adagrad.*use exchange='rows'",
            id="sums_of_rows_on_several_hosts",
        ),
    ],
)
def test_cut_rows_that_an_optimizer_cannot_do_with(optimizer, placement, message):
    layout = layout_tables([TABLE], optimizer)
    with pytest.raises(ValueError, match=message):
        layout_mesh(layout, {"user": placement}, MESH)


@pytest.mark.parametrize(
    "optimizer",
    [jaxrec.optim.rowwise_adagrad(), jaxrec.optim.sgd(clip_norm=1.0)],
    ids=["sums", "clips"],
)
def test_unequal_parts_of_packed_rows(optimizer):
    layout = layout_tables([dataclasses.replace(TABLE, dtype="int8")], optimizer)
    with pytest.raises(ValueError, match=r"'user'.*7 columns into 2 unequal parts.*stored as int8"):
        layout_mesh(layout, {"user": column_wise((0, 1))}, MESH)


def test_column_slices_that_are_updated_together_are_equally_wide():
    for optimizer, widths in [
        (jaxrec.optim.rowwise_adagrad(), [4]),
        (jaxrec.optim.sgd(clip_norm=1.0), [4]),
        (jaxrec.optim.sgd(), [4, 3]),
    ]:
        layout = layout_mesh(layout_tables([TABLE], optimizer), {"user": column_wise((0, 1))}, MESH)
        assert [placed.group.dim for placed in layout.groups] == widths
        assert layout.slices.output_dims == (4, 3)


def test_rows_that_are_not_pooled_have_no_sums():
    layout = layout_tables([jaxrec.EmbeddingConfig("user", 10, 4)], jaxrec.optim.sgd())
    with pytest.raises(ValueError, match=r"'user'.*row_wise.*not pooled; use exchange='rows'"):
        layout_mesh(layout, {"user": row_wise(exchange="pooled")}, MESH)


def test_unknown_exchanges(unchecked):
    names = "'rows', 'pooled', 'pooled_by_host', 'bags'"
    with pytest.raises(ValueError, match=f"row_wise: exchange='sums' is not one of {names}"):
        row_wise(exchange="sums")
    with pytest.raises(ValueError, match="data_parallel: exchange=None is not one of 'replicated'"):
        DataParallel(exchange=None)


def test_bags_need_whole_tables():
    layout = layout_tables([jaxrec.EmbeddingBagConfig("user", 10, 4)], jaxrec.optim.sgd())
    with pytest.raises(ValueError, match=r"'user'.*'bags' is not possible.*rows are cut over"):
        layout_mesh(layout, {"user": row_wise(exchange="bags")}, MESH)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: table_wise(1.0),
            r"table_wise: a device is named by its number .* got 1\.0 \(",
        ),
        (lambda: table_wise(jax.devices()[0]), "table_wise: a device is named by its number"),
        (lambda: row_wise(jax.devices()[:2]), "row_wise: a device is named by its number"),
        (lambda: row_wise(3), r"row_wise: expected a sequence of numbers, such as \(0, 1\), got 3"),
        (lambda: column_wise("01"), "column_wise: a device is named by its number .* got '0'"),
        (lambda: grid((0, None)), "grid: a host is named by its number on the mesh, .* got None"),
        (lambda: table_row_wise(True), "table_row_wise: a host is named by its number .* got True"),
    ],
    ids=["float", "device", "devices", "number", "string", "none", "bool"],
)
def test_devices_are_numbers(unchecked, make, message):
    with pytest.raises(TypeError, match=message):
        make()


def test_numbers_of_numpy_are_devices(unchecked):
    assert row_wise(np.array([0, 1])) == row_wise((0, 1))
    assert table_wise(np.int64(3)) == table_wise(3)


def test_arguments_of_another_type(unchecked, mesh):
    plan = jaxrec.plan.ShardingPlan.from_dict({"user": row_wise()})
    model = jaxrec.EmbeddingBagCollection([TABLE], rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match=r"Mesh, got None"):
        jaxrec.shard(model, plan, None)
    with pytest.raises(TypeError, match=r"ShardingPlan\.from_dict\(.*got {'user'"):
        jaxrec.shard(model, {"user": row_wise()}, mesh)
    with pytest.raises(TypeError, match=r"a model is an nnx.Module, or a function .* got 3"):
        jaxrec.shard(3, plan, mesh)
    with pytest.raises(TypeError, match=r"a plan has placements by table.* got None"):
        jaxrec.plan.ShardingPlan.from_dict(None)


@pytest.mark.parametrize("devices", [1, 16])
def test_a_plan_for_other_devices(mesh, devices):
    model = jaxrec.EmbeddingBagCollection([TABLE], rngs=nnx.Rngs(0))
    topology = dataclasses.replace(Topology.from_mesh(mesh), devices_per_host=devices)
    plan = jaxrec.plan.Planner(topology).plan(model, batch_size=16)
    assert plan.num_devices == devices
    message = f"the plan was made for {devices} devices, and there are 4: plan anew by Planner"
    for given in (plan, jaxrec.plan.ShardingPlan.from_json(plan.to_json())):
        with pytest.raises(ValueError, match=message):
            jaxrec.shard(model, given, mesh)


def test_a_plan_for_the_devices_of_a_replica():
    mesh = jax.make_mesh((2, 4), ("replica", "data"), axis_types=(AxisType.Auto,) * 2)
    model = jaxrec.EmbeddingBagCollection([TABLE], rngs=nnx.Rngs(0))
    plan = jaxrec.plan.Planner(Topology.from_mesh(jax.make_mesh((8,), ("data",)))).plan(
        model, batch_size=16
    )
    with pytest.raises(ValueError, match="made for 8 devices, and there are 4 in each replica"):
        jaxrec.shard(model, plan, mesh, replica_axis="replica")


def test_a_plan_holds_placements_alone(unchecked):
    with pytest.raises(TypeError, match="table 'user': a placement is made by"):
        jaxrec.plan.ShardingPlan.from_dict({"user": "row_wise"})


@pytest.fixture
def mesh():
    return jax.make_mesh((4,), ("data",), devices=jax.devices()[:4], axis_types=(AxisType.Auto,))


def test_shard_batch_keeps_every_sample(mesh):
    rng = np.random.default_rng(0)
    lists = {
        key: [rng.integers(0, 99, rng.integers(0, 5)).tolist() for _ in range(8)] for key in "ab"
    }
    weights = {key: [[float(i) for i in bag] for bag in bags] for key, bags in lists.items()}
    batch = jaxrec.KeyedJaggedArray.from_lists(lists, weights=weights)
    labels = np.arange(8.0, dtype=np.float32)
    sharded, placed = jaxrec.mesh.shard_batch((batch, labels), mesh)
    np.testing.assert_array_equal(placed, labels)
    assert len(sharded.values.sharding.device_set) == 4
    parts = [jax.tree.map(lambda x, i=i: np.asarray(x[i]), sharded) for i in range(4)]
    for key in "ab":
        assert [bag for part in parts for bag in part[key].to_lists()] == lists[key]
        for part in parts:
            used = int(part[key].lengths.sum())
            np.testing.assert_array_equal(part[key].weights[:used], part[key].values[:used])


def test_batches_that_do_not_fit(mesh):
    batch = jaxrec.KeyedJaggedArray.from_lists({"user": [[1]] * 6})
    with pytest.raises(ValueError, match="batch of 6 samples does not divide by the 4 devices"):
        jaxrec.mesh.shard_batch(batch, mesh)
    model = jaxrec.EmbeddingBagCollection([TABLE], rngs=nnx.Rngs(0))
    plan = jaxrec.plan.ShardingPlan.from_dict({"user": row_wise()})
    jaxrec.shard(model, plan, mesh)
    with pytest.raises(ValueError, match=r"Put host batches on the mesh with jaxrec\.mesh"):
        model(batch)
