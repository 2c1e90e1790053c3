"""Sums within hosts and bags between them: the results of one device, and fewer bytes of links."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import jaxrec
from jaxrec import embed
from jaxrec.mesh import (
    grid,
    row_wise,
    shard_batch,
    shard_tables,
    table_row_wise,
)
from jaxrec.mesh.exchange import POOLED_BY_HOST, Cut, Workload, choose_exchange
from jaxrec.mesh.exchange.pooled import Pooled
from jaxrec.mesh.traffic import collectives

pytestmark = pytest.mark.jax_version

BATCH, DIM = 32, 8
SGD, LAMB = jaxrec.optim.sgd(0.1), jaxrec.optim.lamb(0.1)


@dataclasses.dataclass(frozen=True)
class Flat(Pooled):
    """Sums over all devices."""

    name = "flat"


def configs(num_tables, pooling="mean"):
    kinds = ("sum", pooling)
    return [
        jaxrec.EmbeddingBagConfig(f"t{i}", 40 + i, DIM, pooling=kinds[i % 2])
        for i in range(num_tables)
    ]


def batch_of(tables, seed=0, *, weighted=False, longest=4):
    rng = np.random.default_rng(seed)
    ids = {
        table.name: [
            rng.integers(0, table.num_embeddings, rng.integers(0, longest + 1)).tolist()
            for _ in range(BATCH)
        ]
        for table in tables
    }
    weights = {name: [rng.random(len(bag)).tolist() for bag in bags] for name, bags in ids.items()}
    capacities = dict.fromkeys(ids, longest * BATCH)
    return jaxrec.KeyedJaggedArray.from_lists(
        ids, weights=weights if weighted else None, capacities=capacities
    )


def mesh_of(hosts):
    return jax.make_mesh((hosts, 8 // hosts), ("host", "device"), axis_types=(AxisType.Auto,) * 2)


def make_step(weighted, calls=1):
    def step(tables, batch, number):
        found, parts = [], []
        for _ in range(calls):
            pooled, residuals = embed.lookup(tables, batch, is_weighted=weighted)
            factors = 1 + jnp.sin(jnp.arange(pooled.values.size, dtype=jnp.float32))
            gradient = dataclasses.replace(
                pooled, values=jnp.cos(pooled.values) * factors.reshape(pooled.values.shape)
            )
            found.append(pooled.values)
            parts.append(tables.row_gradients(residuals, gradient))
        return found, tables.update(parts, number), tables.table_squares(parts)

    return jax.jit(step)


def train(tables, batches, *, weighted=False, calls=1):
    step, outputs = make_step(weighted, calls), []
    for number, batch in enumerate(batches):
        found, tables, squares = step(tables, batch, number)
        outputs.append([*map(np.asarray, found), *(np.asarray(squares[t]) for t in squares)])
    names = [config.name for config in tables.configs]
    rows = {name: np.asarray(tables.read(name)) for name in names}
    state = {
        name: {key: np.asarray(array) for key, array in tables.read_state(name).items()}
        for name in names
    }
    return outputs, rows, state


@pytest.mark.parametrize(
    ("hosts", "optimizer", "weighted", "calls"),
    [
        (4, jaxrec.optim.adagrad(0.1), True, 1),
        (2, jaxrec.optim.rowwise_adagrad(0.1), False, 2),
        (2, jaxrec.optim.adam(0.01), False, 1),
        (4, dataclasses.replace(SGD, clip_norm=0.5), True, 1),
        (2, dataclasses.replace(SGD, clip_value=0.01), False, 2),
    ],
    ids=["adagrad_weighted", "rowwise_adagrad_twice", "adam", "clip_norm", "clip_value_twice"],
)
def test_equal_to_one_device(hosts, optimizer, weighted, calls):
    """Rows of five tables on one or all hosts; the first host has more tables than the last."""
    tables = configs(5)
    one = embed.init_tables(tables, optimizer, jax.random.key(0))
    whole = optimizer.needs_whole_rows or optimizer.clip_norm is not None
    places = {
        table.name: table_row_wise(number % (hosts - 1), exchange="pooled")
        if whole or number < 4
        else grid(exchange="pooled")
        for number, table in enumerate(tables)
    }
    mesh = mesh_of(hosts)
    sharded = shard_tables(one, places, mesh)
    assert {exchange.name for _, exchange in sharded.layout} == {"pooled_by_host"}
    batches = [batch_of(tables, seed, weighted=weighted) for seed in range(3)]
    expected = train(one, batches, weighted=weighted, calls=calls)
    capacities = dict.fromkeys(places, 4 * BATCH // 8)
    placed = [shard_batch(batch, mesh, capacities=capacities) for batch in batches]
    outputs, rows, state = train(sharded, placed, weighted=weighted, calls=calls)
    for found, wanted in zip(outputs, expected[0], strict=True):
        for array, other in zip(found, wanted, strict=True):
            np.testing.assert_allclose(array, other, rtol=1e-5, atol=1e-6)
    for name, wanted in expected[1].items():
        np.testing.assert_allclose(rows[name], wanted, rtol=1e-6, atol=1e-6)
        for key, array in expected[2][name].items():
            np.testing.assert_allclose(state[name][key], array, rtol=2e-6, atol=1e-6)


def test_the_last_of_three_axes_is_within_a_host():
    tables = configs(3)
    one = embed.init_tables(tables, SGD, jax.random.key(0))
    shape, axes = (2, 2, 2), ("pod", "host", "device")
    mesh = jax.make_mesh(shape, axes, axis_types=(AxisType.Auto,) * 3)
    places = {f"t{i}": table_row_wise(host, exchange="pooled") for i, host in enumerate((0, 3, 1))}
    sharded = shard_tables(one, places, mesh)
    batch = batch_of(tables)
    (wanted,), expected, _ = train(one, [batch])
    (found,), rows, _ = train(sharded, [shard_batch(batch, mesh)])
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-6, atol=1e-7)
    for name, array in expected.items():
        np.testing.assert_allclose(rows[name], array, rtol=1e-6, atol=1e-7)


def test_a_batch_beyond_the_capacity_is_exact():
    """All ids are rows of the first device of a host, so that messages to it overflow."""
    (table,) = configs(1)
    one = embed.init_tables([table], SGD, jax.random.key(0))
    ids = [[number % 3, 0, 1, 1] for number in range(BATCH)]
    batch = jaxrec.KeyedJaggedArray.from_lists({"t0": ids})
    mesh = mesh_of(2)
    sharded = shard_tables(one, {"t0": table_row_wise(1, exchange="pooled")}, mesh)
    routes = jax.jit(type(sharded).route)(sharded, shard_batch(batch, mesh))
    (route,) = (each.route for each in routes.values())
    assert float(np.max(route.demand)) == pytest.approx(4)  # of four devices one has all ids
    expected = train(one, [batch])
    found = train(sharded, [shard_batch(batch, mesh)])
    np.testing.assert_allclose(found[0][0][0], expected[0][0][0], rtol=1e-6)
    np.testing.assert_allclose(found[1]["t0"], expected[1]["t0"], rtol=1e-6, atol=1e-6)


def test_an_id_beyond_its_table_makes_its_own_bag_nan():
    tables = configs(2)
    one = embed.init_tables(tables, SGD, jax.random.key(0))
    ids = {"t0": [[1]] * BATCH, "t1": [[2]] * BATCH}
    ids["t1"][5] = [2, 41]  # of 41 rows
    mesh = mesh_of(2)
    places = {f"t{host}": table_row_wise(host, exchange="pooled") for host in (0, 1)}
    sharded = shard_tables(one, places, mesh)
    batch = shard_batch(jaxrec.KeyedJaggedArray.from_lists(ids), mesh)
    pooled = np.asarray(jax.jit(embed.lookup)(sharded, batch)[0].values)
    is_bad = np.isnan(pooled).all(axis=1)
    assert not np.isnan(pooled[:, :DIM]).any()
    np.testing.assert_array_equal(np.flatnonzero(np.isnan(pooled[:, DIM:]).any(axis=1)), [5])
    assert not is_bad.any()


def test_replicas_have_hosts_of_their_own():
    """On a mesh of replicas, hosts and devices: as sums over all devices of a replica."""
    tables = configs(2, pooling="sum")
    one = embed.init_tables(tables, SGD, jax.random.key(0))
    shape, axes = (2, 2, 2), ("replica", "host", "device")
    mesh = jax.make_mesh(shape, axes, axis_types=(AxisType.Auto,) * 3)
    batch = shard_batch(batch_of(tables), mesh)
    results = []
    for exchange in ("pooled", Flat()):
        places = {f"t{host}": table_row_wise(host, exchange=exchange) for host in (0, 1)}
        sharded = shard_tables(one, places, mesh, replica_axis="replica")
        results.append(train(sharded, [batch]))
    (found, rows, _), (expected, expected_rows, _) = results
    np.testing.assert_allclose(found[0][0], expected[0][0], rtol=1e-6, atol=1e-7)
    for name, array in expected_rows.items():
        np.testing.assert_allclose(rows[name], array, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("hosts", [2, 4])
@pytest.mark.parametrize("placed", ["table_row_wise", "grid"])
def test_bytes_between_hosts(hosts, placed):
    """Those of the formula, and fewer than over all devices by the number of hosts."""
    tables = configs(hosts, pooling="sum")
    one = embed.init_tables(tables, SGD, jax.random.key(0))
    mesh = mesh_of(hosts)
    batch = shard_batch(batch_of(tables, longest=2), mesh)
    sent = {}
    for exchange in ("pooled", Flat()):
        places = {
            f"t{i}": table_row_wise(i, exchange=exchange)
            if placed == "table_row_wise"
            else grid(exchange=exchange)
            for i in range(hosts)
        }
        sharded = shard_tables(one, places, mesh)
        program = make_step(False).lower(sharded, batch, 0).compile()
        sent[exchange] = sum(
            each.sent_between_hosts(8 // hosts)
            for each in collectives(program)
            if each.kind != "all-reduce"  # sums of squares, a number for each table
        )
        if exchange != "pooled":
            continue
        (group,), bags = sharded.layout.groups, BATCH // 8
        owned = len(group.group.features) // hosts
        lookups = sum(batch.capacities)
        work = Workload(
            8, group.group.dim, lookups, bags * len(group.group.features), 1, hosts=hosts,
            owner_lookups=owned * max(batch.capacities), owner_bags=owned * bags,
        )  # fmt: skip
        expected = POOLED_BY_HOST.sent_between_hosts(work)
    assert sent["pooled"] == pytest.approx(expected, rel=0.01)
    print(placed, hosts, sent, sent[Flat()] / sent["pooled"])
    assert sent[Flat()] > 0.8 * hosts * sent["pooled"]


@pytest.mark.parametrize(
    ("cut", "expected"),
    [
        (Cut(True, SGD, 1, 4, row_hosts=1, hosts=2), "pooled_by_host"),
        (Cut(True, SGD, 2, 4, row_hosts=1, hosts=2), "pooled_by_host"),
        (Cut(True, LAMB, 1, 4, row_hosts=1, hosts=2), "pooled_by_host"),
        (Cut(True, SGD, 1, 4, row_hosts=1, hosts=1), "pooled"),
        (Cut(True, SGD, 1, 8, row_hosts=2, hosts=2), "pooled"),
        (Cut(True, dataclasses.replace(SGD, clip_norm=1.0), 2, 4, 1, 2), "pooled"),
        (Cut(True, SGD, 1, 1, row_hosts=1, hosts=2), "bags"),
    ],
)
def test_where_pooled_is_in_two_stages(cut, expected):
    assert choose_exchange("pooled", cut).name == expected


@pytest.mark.parametrize(
    ("cut", "reason"),
    [
        (Cut(False, SGD, 1, 4, 1, 2), "its rows are not pooled"),
        (Cut(True, SGD, 1, 4, 1, 1), "the mesh has one host"),
        (Cut(True, SGD, 1, 8, 2, 2), "its rows are cut over several hosts"),
        (Cut(True, LAMB, 2, 4, 1, 2), "lamb with these settings needs whole rows, and its columns"),
    ],
)
def test_refused(cut, reason):
    with pytest.raises(ValueError, match=reason):
        choose_exchange("pooled_by_host", cut)


def test_by_name_on_one_axis():
    """A mesh of one axis has one host, and a placement over all devices has rows on several."""
    one = embed.init_tables(configs(1), SGD, jax.random.key(0))
    flat = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    with pytest.raises(ValueError, match=r"table 't0' is placed row_wise, and .* one host"):
        shard_tables(one, {"t0": row_wise(exchange="pooled_by_host")}, flat)
