"""What the compiled sharded step sends, as docs/sharding.md says, and what it may not contain."""

from __future__ import annotations

import math
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import jaxrec
from jaxrec import embed
from jaxrec.mesh import (
    Precision,
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
from jaxrec.mesh.traffic import collectives
from tests.users_xla import AS_USERS_DO

ROWS, DIM, DEVICES, BATCH = 4001, 8, 8, 32
N, BAGS = 64, BATCH // DEVICES  # room for ids of a device's batch, and its bags
C = math.ceil(1.25 * N / DEVICES)  # room between two devices


def lookup(tables, batch):
    return embed.lookup(tables, batch)[0]


def train_step(tables, batch):
    pooled, residuals = embed.lookup(tables, batch)
    gradients = jax.grad(lambda pooled: jnp.sin(pooled.values).sum())(pooled)
    return embed.apply_gradients(tables, residuals, gradients, 0)


def compile_on_mesh(function, placement, optimizer, precision=Precision()):  # noqa: B008
    """The compiled function, and the tables that it is for."""
    config = jaxrec.EmbeddingBagConfig("table", ROWS, DIM)
    tables = embed.init_tables([config], optimizer, jax.random.key(0))
    mesh = jax.make_mesh((2, 4), ("host", "device"), axis_types=(AxisType.Auto,) * 2)
    tables = shard_tables(tables, {"table": placement}, mesh)
    tables = tables.__class__(**{**vars(tables), "precision": precision})
    ids = np.random.default_rng(0).integers(0, ROWS, (BATCH, N // BAGS))
    batch = shard_batch(jaxrec.KeyedJaggedArray.from_lists({"table": ids.tolist()}), mesh)
    assert batch.capacities == (N,)

    donated = 0 if function is train_step else None
    return jax.jit(function, donate_argnums=donated).lower(tables, batch).compile(
        AS_USERS_DO
    ), tables


def rows(width, pieces=1):
    """Bytes that a device puts into the exchange of rows: asking, rows; and gradients back.

    With what it asks for it says how much that is and how much it needs, and for which row it has
    no room.
    """
    room = math.ceil(1.25 * pieces * N / DEVICES)
    return {"all-to-all": DEVICES * room * (4 + 8 * width) + DEVICES * 3 * 4}


def sums(width, pieces=1):
    room = math.ceil(1.25 * pieces * N / DEVICES)
    return {
        "all-to-all": DEVICES * (room * 4 + pieces * BAGS * 4 + 8),
        "reduce-scatter": DEVICES * pieces * BAGS * width * 4,
        "all-gather": DEVICES * pieces * BAGS * width * 4,
    }


def bags(width, lanes=1):
    return {
        "all-to-all": DEVICES * lanes * (N * 4 + BAGS * 4) + 2 * DEVICES * lanes * BAGS * width * 4
    }


CASES = {
    "data_parallel": (data_parallel(), {"all-gather": DEVICES * N * (4 + 4 * DIM)}),
    "table_wise": (table_wise(3), bags(DIM)),
    "table_wise_rows": (table_wise(3, exchange="rows"), rows(DIM)),
    "row_wise": (row_wise(), rows(DIM)),
    "row_wise_sums": (row_wise(exchange="sums"), sums(DIM)),
    "column_wise": (column_wise((0, 5)), bags(DIM // 2)),
    "column_wise_rows": (column_wise((0, 5), exchange="rows"), rows(DIM // 2, pieces=2)),
    "table_row_wise": (table_row_wise(1), rows(DIM)),
    "table_column_wise": (table_column_wise(1), bags(DIM // 4)),
    "grid": (grid(), rows(DIM // 2, pieces=2)),
    "grid_sums": (grid(exchange="sums"), sums(DIM // 2, pieces=2)),
}


@pytest.mark.parametrize("name", CASES)
def test_the_collectives_that_the_type_promises(name):
    placement, expected = CASES[name]
    step, tables = compile_on_mesh(train_step, placement, jaxrec.optim.adagrad(0.1))
    found = Counter()
    for each in collectives(step):
        # What all devices bring, or get.
        found[each.kind] += each.result_bytes * (DEVICES if each.kind == "reduce-scatter" else 1)
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
    # A number for each lookup of all devices, and as much beyond as a lane may be longer.
    totals = {"all-reduce": DEVICES * 2 * N * 4}
    assert found == bags(DIM // 2) | totals
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
        "sums": row_wise(exchange="sums"),
        "bags": table_wise(1),
    }
    tables = shard_tables(tables, placements, mesh)
    bags = {name: [[1, 2]] * BATCH for name in widths}
    batch = shard_batch(jaxrec.KeyedJaggedArray.from_lists(bags), mesh)
    step = jax.jit(train_step, donate_argnums=0).lower(tables, batch).compile(AS_USERS_DO)
    assert_in_place(step, tables)


def test_fewer_bits_are_fewer_bytes():
    precision = Precision(forward="int8", backward="bfloat16")
    step, _ = compile_on_mesh(train_step, row_wise(), jaxrec.optim.sgd(0.1), precision)
    found = sum(each.result_bytes for each in collectives(step) if each.kind == "all-to-all")
    assert found == DEVICES * C * (4 + (DIM + 8) + 2 * DIM) + DEVICES * 3 * 4


def assert_in_place(step, tables):
    """Every table and its state is a result in its own memory; nothing of its shape is copied."""
    text = step.as_text()
    arrays = jax.tree.leaves((tables.rows, tables.state))
    assert text.count("may-alias") + text.count("must-alias") >= len(arrays)
    for array in arrays:
        local = ",".join(map(str, array.addressable_shards[0].data.shape))
        copies = re.findall(
            rf"= f32\[{local}\]\S* (?:copy|dynamic-update-slice|concatenate)\(.*", text
        )
        assert not copies
