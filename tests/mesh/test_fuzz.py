"""Random models on eight devices, placed at random, beside their formulas in NumPy float64.

The suite draws few; ``JAXREC_TEST_FUZZ=1000`` more. Case 812 again, alone:
``JAXREC_TEST_FUZZ=1000 pytest "tests/mesh/test_fuzz.py::test_eight_devices[812]"``.
"""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxrec
from jaxrec.mesh import (
    column_wise,
    data_parallel,
    grid,
    row_wise,
    shard_batch,
    table_column_wise,
    table_row_wise,
    table_wise,
)
from tests import differential
from tests.fuzz import max_examples

DEVICES = 8


@pytest.mark.parametrize("seed", range(max_examples(4)))
def test_eight_devices(seed):
    rng = np.random.default_rng([seed, DEVICES])
    case = differential.draw_case(rng, samples=DEVICES * int(rng.integers(1, 3)))
    shape, axes = [((8,), ("data",)), ((2, 4), ("host", "device"))][rng.integers(2)]
    mesh = jax.make_mesh(shape, axes, axis_types=(AxisType.Auto,) * len(shape))
    model = draw_sharded(rng, case, mesh)
    # Room for one row a round, or for a share that is or is not enough.
    tables = model.embeddings.tables.get_value()
    factors = tuple((p.group.name, float(rng.choice([0, 0.5, 1.25]))) for p in tables.layout.groups)
    model.embeddings.tables.set_value(dataclasses.replace(tables, capacity_factors=factors))
    with jax.set_mesh(mesh):
        differential.check(case, model, lambda case, call: place(case, call, mesh))


def draw_sharded(rng, case, mesh):
    """The model on the mesh, by random placements that suit it."""
    for _ in range(10_000):  # A refused plan costs little: no table is made.
        placements = {config.name: draw_placement(rng, config, mesh) for config in case.configs}
        plan = jaxrec.plan.ShardingPlan.from_dict(placements)
        try:
            return jaxrec.shard(lambda: differential.Model(case), plan, mesh)
        except ValueError as error:  # Some do not suit a table or its optimizer.
            refused = error
    raise refused


def draw_placement(rng, config, mesh):
    hosts = mesh.devices.shape[0] if mesh.devices.ndim == 2 else 1
    host = int(rng.integers(hosts))
    some = tuple(rng.permutation(DEVICES)[: rng.choice([1, 2, 3, 4, 8])].tolist())
    exchange = {"exchange": str(rng.choice(["rows", "pooled"]))}
    kinds = [
        data_parallel,
        lambda: table_wise(int(rng.integers(DEVICES)), **exchange),
        lambda: row_wise(**exchange),
        lambda: row_wise(some, **exchange),
        lambda: column_wise(some, **exchange),
        lambda: column_wise(some[:1] + some, **exchange),
        lambda: table_row_wise(host, **exchange),
        lambda: table_column_wise(host, **exchange),
        lambda: grid(tuple(range(hosts)), **exchange),
    ]
    return kinds[rng.integers(len(kinds))]()


def place(case, call, mesh):
    """The call on the mesh, and how its outputs come back."""
    samples = case.samples // DEVICES
    room = dict.fromkeys(call.bags, differential.LONGEST * samples)
    batch = shard_batch(differential.host_batch(call), mesh, capacities=room)
    if case.is_pooled:
        cotangents = {case.key(*key): np.float32(values) for key, values in call.cotangents.items()}
        return batch, shard_batch(cotangents, mesh), lambda key, values: np.float64(values)

    counts, cotangents = {}, {}
    for table, feature in call.cotangents:
        bags = call.bags_of_samples(feature)
        parts = [bags[start : start + samples] for start in range(0, case.samples, samples)]
        counts[case.key(table, feature)] = [sum(map(len, part)) for part in parts]
    if batch.sample_capacities:
        room = dict(zip(batch.keys, batch.sample_capacities, strict=True))
    for (table, feature), values in call.cotangents.items():
        key = case.key(table, feature)
        whole = np.zeros((DEVICES, room[feature], values.shape[1]), np.float32)
        pieces = np.split(values, np.cumsum(counts[key])[:-1])
        for device, piece in enumerate(pieces):
            whole[device, : len(piece)] = piece
        sharding = NamedSharding(mesh, PartitionSpec(tuple(mesh.axis_names)))
        cotangents[key] = jax.device_put(whole, sharding)

    def gather(key, values):
        values = differential.as_float64(values)
        ids = [part[:count] for part, count in zip(values, counts[key], strict=True)]
        rest = [part[count:] for part, count in zip(values, counts[key], strict=True)]
        return np.concatenate(ids + rest)

    return batch, cotangents, gather
