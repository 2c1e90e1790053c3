"""What the compiled sharded step sends, as docs/sharding.md says, and what it may not contain."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import jaxrec
from jaxrec import embed
from jaxrec.mesh import (
    ExchangePrecision,
    column_wise,
    data_parallel,
    grid,
    row_wise,
    shard_batch,
    shard_tables,
    table_column_wise,
    table_row_wise,
    table_wise,
)
from jaxrec.mesh.exchange import BAGS as BAGS_EXCHANGE
from jaxrec.mesh.exchange import POOLED, POOLED_BY_HOST, REPLICATED, Workload
from jaxrec.mesh.exchange import ROWS as ROWS_EXCHANGE
from jaxrec.mesh.traffic import collectives
from tests.copies import find_copies
from tests.users_xla import AS_USERS_DO

pytestmark = pytest.mark.jax_version

ROWS, DIM, DEVICES, BATCH = 4001, 8, 8, 32
N, BAGS = 64, BATCH // DEVICES  # room for ids of a device's batch, and its bags
C = math.ceil(1.25 * N / DEVICES)  # room between two devices


def lookup(tables, batch):
    return embed.lookup(tables, batch)[0]


def train_step(tables, batch):
    pooled, residuals = embed.lookup(tables, batch)
    gradients = jax.grad(lambda pooled: jnp.sin(pooled.values).sum())(pooled)
    return embed.apply_gradients(tables, residuals, gradients, 0)


def compile_on_mesh(
    function,
    placement,
    optimizer,
    precision=ExchangePrecision(),  # noqa: B008
    capacity_factor=None,
):
    """The compiled function, and the tables that it is for."""
    config = jaxrec.EmbeddingBagConfig("table", ROWS, DIM)
    tables = embed.init_tables([config], optimizer, jax.random.key(0))
    mesh = jax.make_mesh((2, 4), ("host", "device"), axis_types=(AxisType.Auto,) * 2)
    tables = shard_tables(tables, {"table": placement}, mesh)
    tables = tables.__class__(**{**vars(tables), "precision": precision})
    if capacity_factor is not None:
        factors = tuple((placed.name, capacity_factor) for placed in tables.layout.groups)
        tables = dataclasses.replace(tables, capacity_factors=factors)
    ids = np.random.default_rng(0).integers(0, ROWS, (BATCH, N // BAGS))
    batch = shard_batch(jaxrec.KeyedJaggedArray.from_lists({"table": ids.tolist()}), mesh)
    assert batch.capacities == (N,)

    donated = 0 if function is train_step else None
    return jax.jit(function, donate_argnums=donated).lower(tables, batch).compile(
        AS_USERS_DO
    ), tables


def sent(exchange, width, slices=1):
    """Bytes that a device puts into the collectives of a step, of a table of a number of slices."""
    lookups, bags = slices * N, slices * BAGS
    capacity = math.ceil(1.25 * lookups / DEVICES)
    # Each owner of a whole slice has one feature.
    return exchange.traffic(Workload(DEVICES, width, lookups, bags, capacity, N, BAGS, hosts=2))


CASES = {
    "data_parallel": (data_parallel(), sent(REPLICATED, DIM)),
    "table_wise": (table_wise(3), sent(BAGS_EXCHANGE, DIM)),
    "table_wise_rows": (table_wise(3, exchange="rows"), sent(ROWS_EXCHANGE, DIM)),
    "row_wise": (row_wise(), sent(ROWS_EXCHANGE, DIM)),
    "row_wise_pooled": (row_wise(exchange="pooled"), sent(POOLED, DIM)),
    "column_wise": (column_wise((0, 5)), sent(BAGS_EXCHANGE, DIM // 2, slices=2)),
    "column_wise_rows": (
        column_wise((0, 5), exchange="rows"),
        sent(ROWS_EXCHANGE, DIM // 2, slices=2),
    ),
    "table_row_wise": (table_row_wise(1), sent(ROWS_EXCHANGE, DIM)),
    "table_row_wise_pooled": (table_row_wise(1, exchange="pooled"), sent(POOLED_BY_HOST, DIM)),
    "table_column_wise": (table_column_wise(1), sent(BAGS_EXCHANGE, DIM // 4, slices=4)),
    "grid": (grid(), sent(ROWS_EXCHANGE, DIM // 2, slices=2)),
    "grid_pooled": (grid(exchange="pooled"), sent(POOLED_BY_HOST, DIM // 2, slices=2)),
}


def test_traffic_by_hand():
    """The sums of docs/sharding.md, written out for eight devices and messages of three rows."""
    work = Workload(8, dim=4, lookups=16, bags=2, capacity=3, owner_lookups=16, owner_bags=2)
    assert ROWS_EXCHANGE.traffic(work) == {"all-to-all": 8 * (3 * (4 + 16 + 16) + 12)}
    assert POOLED.traffic(work) == {
        "all-to-all": 8 * (12 + 8 + 8),
        "reduce-scatter": 8 * 32,
        "all-gather": 8 * 32,
    }
    assert BAGS_EXCHANGE.traffic(work) == {"all-to-all": 8 * (64 + 2 * (4 + 16 + 16))}
    by_host = dataclasses.replace(work, hosts=2)
    # Each device of a host gets 32 ids and 4 bags; a message within has space for 6 ids of 3 x 2.
    assert POOLED_BY_HOST.traffic(by_host) == {
        "all-to-all": 2 * (64 + 2 * (4 + 16 + 16)) + 4 * (4 * 12 + 4 * 4 + 8),
        "reduce-scatter": 4 * 4 * 16,
        "all-gather": 4 * 4 * 16,
    }
    assert REPLICATED.traffic(work) == {"all-gather": 8 * 16 * (4 + 16)}


@pytest.mark.parametrize("name", CASES)
def test_the_collectives_that_the_type_promises(name):
    placement, expected = CASES[name]
    step, tables = compile_on_mesh(train_step, placement, jaxrec.optim.adagrad(0.1))
    found = Counter()
    for each in collectives(step):
        # What all devices bring, or get.
        parts = each.devices if each.kind == "reduce-scatter" else 1
        found[each.kind] += each.result_bytes * parts
    # Single numbers, on which devices agree.
    assert found.pop("all-reduce", 0) <= 200
    assert found == expected
    assert_in_place(step, tables)


def test_copies_are_looked_up_alone():
    compiled, _ = compile_on_mesh(lookup, data_parallel(), jaxrec.optim.sgd(0.1))
    assert collectives(compiled) == []


def test_owners_of_the_pieces_of_a_row_add_their_sums():
    optimizer = jaxrec.optim.rowwise_adagrad(0.1)
    step, tables = compile_on_mesh(train_step, column_wise((0, 5)), optimizer)
    found = Counter()
    for each in collectives(step):
        found[each.kind] += each.result_bytes
    # A number for each lookup of all devices.
    totals = {"all-reduce": DEVICES * N * 4}
    assert found == sent(BAGS_EXCHANGE, DIM // 2, slices=2) | totals
    assert_in_place(step, tables)


@pytest.mark.parametrize(
    ("placement", "exchange"),
    [(grid(), ROWS_EXCHANGE), (grid(exchange="pooled"), POOLED)],
    ids=["rows", "pooled"],
)
def test_sums_of_rows_that_are_cut_both_ways(placement, exchange):
    step, tables = compile_on_mesh(
        train_step, placement, jaxrec.optim.rowwise_adagrad(0.1), capacity_factor=8.0
    )
    found = Counter()
    for each in collectives(step):
        parts = each.devices if each.kind == "reduce-scatter" else 1
        found[each.kind] += each.result_bytes * parts
    assert found.pop("all-reduce", 0) <= 200
    # Messages have space for all ids. A number of each travels to where it is looked up, and back.
    work = Workload(DEVICES, DIM // 2, 2 * N, 2 * BAGS, capacity=2 * N, hosts=2)
    totals = Counter({"all-to-all": 2 * 4 * DEVICES * 2 * N})
    assert found == Counter(exchange.traffic(work)) + totals
    assert_in_place(step, tables)


@pytest.mark.parametrize("optimizer", ["rowwise_adagrad", "sgd_clip_norm"])
def test_columns_of_one_row_are_updated_in_place(optimizer):
    optimizer = {
        "rowwise_adagrad": jaxrec.optim.rowwise_adagrad(0.1),
        "sgd_clip_norm": jaxrec.optim.sgd(0.1, clip_norm=1.0),
    }[optimizer]
    step, tables = compile_on_mesh(train_step, grid(), optimizer)
    assert_in_place(step, tables)


def test_groups_take_turns_in_place():
    """On simulated devices each group's exchange waits for the last; tables stay where they are."""
    widths = {"rows": 8, "sums": 12, "bags": 20}
    configs = [jaxrec.EmbeddingBagConfig(name, ROWS, width) for name, width in widths.items()]
    tables = embed.init_tables(configs, jaxrec.optim.adagrad(0.1), jax.random.key(0))
    mesh = jax.make_mesh((DEVICES,), ("data",), axis_types=(AxisType.Auto,))
    placements = {
        "rows": row_wise(),
        "sums": row_wise(exchange="pooled"),
        "bags": table_wise(1),
    }
    tables = shard_tables(tables, placements, mesh)
    bags = {name: [[1, 2]] * BATCH for name in widths}
    batch = shard_batch(jaxrec.KeyedJaggedArray.from_lists(bags), mesh)
    step = jax.jit(train_step, donate_argnums=0).lower(tables, batch).compile(AS_USERS_DO)
    assert_in_place(step, tables)


def test_fewer_bits_are_fewer_bytes():
    precision = ExchangePrecision(forward="int8", backward="bfloat16")
    step, _ = compile_on_mesh(train_step, row_wise(), jaxrec.optim.sgd(0.1), precision)
    found = sum(each.result_bytes for each in collectives(step) if each.kind == "all-to-all")
    assert found == DEVICES * C * (4 + (DIM + 8) + 2 * DIM) + DEVICES * 3 * 4


def assert_in_place(step, tables):
    """Every table and its state is a result in its own memory; nothing of its shape is copied."""
    text = step.as_text()
    arrays = jax.tree.leaves((tables.rows, tables.state))
    assert text.count("may-alias") + text.count("must-alias") >= len(arrays)
    for array in arrays:
        local = array.addressable_shards[0].data.shape
        assert find_copies(step, local) == []
        assert find_copies(step, local, ("dynamic-update-slice", "concatenate")) == []
