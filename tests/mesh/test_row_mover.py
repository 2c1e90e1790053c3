"""Tables in row order, as checkpoints have them: out of any placement, and into any other."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

import jaxrec
from jaxrec.embed.checkpoint_view import part_rows
from jaxrec.mesh import (
    column_wise,
    data_parallel,
    grid,
    row_mover,
    row_wise,
    table_column_wise,
    table_row_wise,
    table_wise,
)

PLACEMENTS = {
    "rows": row_wise((3, 1, 3)),
    "cut": grid(),
    "columns": column_wise((5, 2)),
    "alone": table_wise(6),
    "copied": data_parallel(),
}


def make(shape=(2, 4), placements=None, seed=0, replica_axis=None):
    """Tables whose numbers of rows divide by nothing, on a mesh or on a device."""
    optimizers = {
        "cut": jaxrec.optim.adagrad(0.1),
        "columns": jaxrec.optim.partial_rowwise_adam(0.1),
    }
    tables = [
        jaxrec.EmbeddingBagConfig(
            name,
            rows,
            4,
            dtype="bfloat16" if name == "columns" else "float32",
            optimizer=optimizers.get(name),
        )
        for name, rows in zip(PLACEMENTS, (101, 97, 102, 99, 103), strict=True)
    ]
    bags = jaxrec.EmbeddingBagCollection(tables, rngs=nnx.Rngs(seed))
    rng = np.random.default_rng(seed)
    for name in PLACEMENTS:
        state = bags.table_state(name)
        bags.load_table_state(name, {key: rng.random(x.shape) for key, x in state.items()})
    if shape:
        names = ("host", "device")
        devices = jax.devices()[: np.prod(shape)]
        mesh = jax.make_mesh(shape, names, (AxisType.Auto,) * 2, devices=devices)
        plan = jaxrec.plan.ShardingPlan.from_dict(placements or PLACEMENTS)
        bags = jaxrec.shard(bags, plan, mesh, replica_axis=replica_axis)
    return bags.tables.get_value()


def same(one, other, names=tuple(PLACEMENTS), rows=slice(None)):
    for name in names:
        np.testing.assert_array_equal(
            np.asarray(one.read(name))[rows], np.asarray(other.read(name))[rows], name
        )
        state = other.read_state(name)
        assert state.keys() == one.read_state(name).keys()
        for key, array in state.items():
            np.testing.assert_array_equal(
                np.asarray(one.read_state(name)[key])[rows], np.asarray(array)[rows], name
            )


@pytest.fixture(scope="module")
def placed():
    return make()


@pytest.mark.slow
@pytest.mark.parametrize("elements", [row_mover.COPY_ELEMENTS, 256], ids=["whole", "pieces"])
def test_rows_are_in_order(placed, monkeypatch, elements):
    monkeypatch.setattr(row_mover, "COPY_ELEMENTS", elements)
    for name in PLACEMENTS:
        found, form = placed.checkpoint_view(name), placed.checkpoint_shapes(name)
        rows = np.asarray(placed.read(name))
        assert jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), found) == jax.tree.map(
            lambda x: (x.shape, x.dtype, x.sharding), form
        )
        part = part_rows(len(rows), 8)
        assert {shard.data.shape for shard in found.rows.addressable_shards} == {(part, 4)}
        np.testing.assert_array_equal(np.asarray(found.rows)[: len(rows)], rows, name)
        assert not np.asarray(found.rows)[len(rows) :].any()
        state = placed.read_state(name)
        assert state.keys() == found.state.keys()
        for key, array in state.items():
            np.testing.assert_array_equal(np.asarray(found.state[key])[: len(rows)], array, name)


TARGETS = {
    "others": (
        (2, 4),
        {
            "rows": data_parallel(),
            "cut": table_row_wise(1),
            "columns": row_wise(),
            "alone": table_column_wise(0),
            "copied": row_wise((7, 0)),
        },
    ),
    "replicas": ((2, 2), dict.fromkeys(PLACEMENTS, row_wise())),
    "one device": ((), None),
}


@pytest.mark.parametrize(("shape", "placements"), TARGETS.values(), ids=TARGETS)
def test_from_any_placement_to_any(placed, shape, placements):
    is_replicated = placements == TARGETS["replicas"][1]
    target = make(shape, placements, seed=1, replica_axis="host" if is_replicated else None)
    for name in PLACEMENTS:
        source, form = placed.checkpoint_view(name), target.checkpoint_shapes(name)
        saved = jax.tree.map(np.asarray, source)
        count = len(placed.read(name))

        def put(array, wanted, count=count):
            # As a checkpoint does that is read with other devices.
            room = np.zeros(wanted.shape, array.dtype)
            room[:count] = array[:count]
            return jax.device_put(room, wanted.sharding)

        target = target.from_checkpoint(name, jax.tree.map(put, saved, form), count)
    same(target, placed)
    for name in ("rows", "copied"):
        # And out of there: copies on the devices of a mesh are all as they should be.
        count = len(placed.read(name))
        np.testing.assert_array_equal(
            np.asarray(target.checkpoint_view(name).rows)[:count], placed.read(name)
        )


@pytest.mark.parametrize("shape", [(2, 4), ()], ids=["mesh", "one device"])
def test_some_rows_and_no_state(placed, shape):
    """The rows past those that are given stay, and so does the state; types may differ."""
    target, before = make(shape, seed=1), make(shape, seed=1)
    for name in PLACEMENTS:
        ones = jax.tree.map(
            lambda form: jax.device_put(jnp.ones(form.shape, jnp.float32), form.sharding),
            target.checkpoint_shapes(name),
        )
        target = target.from_checkpoint(name, dataclasses.replace(ones, state={}), 10)
        assert (np.asarray(target.read(name))[:10] == 1).all()
        state = before.read_state(name)
        for key, array in target.read_state(name).items():
            np.testing.assert_array_equal(array, state[key])
    same(target, before, rows=slice(10, None))
