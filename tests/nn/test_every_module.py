"""What holds for every public module, whatever it computes.

It works under jit, in bfloat16, over eight devices, with empty bags and with a batch of one, and
its gradients are those of finite differences.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

import jaxrec
from jaxrec import nn
from tests.nn.cases import CASES, FLOAT32_WEIGHTS, KEEPS_FLOAT32, STOPS_GRADIENTS
from tests.nn.steps import (
    BATCH,
    collections,
    draw,
    forward,
    load,
    make,
    on_device,
    on_mesh,
    rows_of_tables,
    select,
    step,
    tables_of,
)

DEVICES = 8

pytestmark = [pytest.mark.usefixtures("compiled_fast"), pytest.mark.jax_version]

EVERY = pytest.mark.parametrize("kind", CASES, ids=lambda kind: kind.__name__)


def test_every_public_module_has_a_case():
    public = {
        value
        for name, value in vars(nn).items()
        if inspect.isclass(value) and issubclass(value, nnx.Module) and not name.startswith("_")
    }
    pools = {nn.KeyedJaggedTensorPool, nn.TensorPool}  # without gradients; tests/nn/test_pools.py
    assert set(CASES) == public - pools


@dataclasses.dataclass(frozen=True)
class Reference:
    """One step on one device in float64, tables aside, which are float32."""

    module: nnx.Module
    inputs: list[Any]
    value: Any
    out: Any
    of_parameters: Any
    of_inputs: list[Any]
    tables: dict[str, Any]
    moved: dict[str, Any]
    rows_moved: dict[tuple[str, str], np.ndarray]


@functools.cache
def reference(kind):
    with jax.enable_x64(True):
        module = make(kind, dtype=jnp.float64, param_dtype=jnp.float64)
        inputs, tables = on_device(draw(CASES[kind], np.float64)), tables_of(module)
        found = jax.tree.map(np.array, step(kind)(module, inputs))
        moved, rows_moved = tables_of(module), rows_of_tables(module)
        return Reference(module, inputs, *found, tables, moved, rows_moved)


def dot(xs, ys):
    leaves = zip(jax.tree.leaves(xs), jax.tree.leaves(ys), strict=True)
    return float(sum(np.vdot(x, y) for x, y in leaves))


@pytest.mark.parametrize(
    "kind", [kind for kind in CASES if kind not in STOPS_GRADIENTS], ids=lambda kind: kind.__name__
)
def test_gradients_are_finite_differences(kind):
    """Along random directions, of parameters and inputs in float64 and of tables in float32."""
    known, rng = reference(kind), np.random.default_rng(1)

    def direction(tree):
        return jax.tree.map(lambda x: rng.standard_normal(x.shape), tree)

    of_tables = jax.tree.map(np.subtract, known.tables, known.moved)
    gradients = (known.of_parameters, known.of_inputs, of_tables)
    assert any(np.abs(x).max() > 0 for x in jax.tree.leaves(gradients))

    with jax.enable_x64(True):
        parameters = jax.tree.map(np.array, nnx.state(known.module, nnx.Param))
        of_parameters = direction(parameters)
        of_inputs = [direction(x) if isinstance(x, jax.Array) else None for x in known.inputs]

        def along(amount):
            nnx.update(
                known.module,
                jax.tree.map(lambda x, d: jnp.asarray(x + amount * d), parameters, of_parameters),
            )
            shifted = [
                x if d is None else jnp.asarray(np.asarray(x) + amount * d)
                for x, d in zip(known.inputs, of_inputs, strict=True)
            ]
            load(known.module, known.tables)
            return float(step(kind)(known.module, shifted)[0])

        amount, tolerance = (1e-3, 2e-3) if kind in FLOAT32_WEIGHTS else (1e-5, 1e-5)
        difference = (along(amount) - along(-amount)) / (2 * amount)
        expected = dot(known.of_parameters, nnx.to_pure_dict(of_parameters)) + dot(
            known.of_inputs, [d for d in of_inputs if d is not None]
        )
        np.testing.assert_allclose(difference, expected, rtol=tolerance, atol=tolerance)

        nnx.update(known.module, jax.tree.map(jnp.asarray, parameters))
        if not known.tables:
            return
        # Short, for the third derivative of a layer norm over a few columns is large.
        of_rows = jax.tree.map(lambda x: x / x.size**0.5, direction(known.tables))

        def along_rows(amount):
            load(
                known.module,
                jax.tree.map(lambda x, d: x + np.float32(amount * d), known.tables, of_rows),
            )
            return float(step(kind)(known.module, known.inputs)[0])

        difference = (along_rows(2e-3) - along_rows(-2e-3)) / 4e-3
        np.testing.assert_allclose(difference, dot(of_tables, of_rows), rtol=2e-3, atol=2e-3)


@EVERY
def test_sharded_over_eight_devices(kind):
    """Value, gradients and tables after a step in float32 are those of one device in float64."""
    known = reference(kind)
    mesh = jax.make_mesh((DEVICES,), ("data",), axis_types=(AxisType.Auto,))
    placements = {name: jaxrec.mesh.row_wise() for _, name in known.rows_moved}
    plan = jaxrec.plan.ShardingPlan.from_dict(placements)
    sharded = jaxrec.shard(make(kind), plan, mesh)
    with jax.set_mesh(mesh):
        inputs = [on_mesh(sample, mesh) for sample in draw(CASES[kind])]
        value, _, *gradients = step(kind)(sharded, inputs)
    np.testing.assert_allclose(value, known.value, rtol=1e-5, atol=1e-5)
    expected = jax.tree.leaves((known.of_parameters, known.of_inputs))
    for one, other in zip(jax.tree.leaves(gradients), expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
    for (path, name), rows in known.rows_moved.items():
        found = collections(sharded)[path].table(name)
        np.testing.assert_allclose(found, rows, rtol=1e-4, atol=1e-5)


@EVERY
def test_bfloat16(kind):
    """Computed in bfloat16 it is near float64, of parameters that stay float32."""
    known, short = reference(kind), make(kind, dtype=jnp.bfloat16)
    found, number = forward(kind)(short, on_device(draw(CASES[kind])))
    if kind not in KEEPS_FLOAT32:
        main = found["states"].values if isinstance(found, dict) else found
        for leaf in jax.tree.leaves(main):
            assert leaf.dtype in (jnp.bfloat16, jnp.int32)
    assert {x.dtype for x in jax.tree.leaves(nnx.state(short, nnx.Param))} <= {jnp.dtype("float32")}
    size = sum(np.size(leaf) for leaf in jax.tree.leaves(known.out))
    assert abs(float(number) - float(known.value)) < 0.02 * size


@EVERY
def test_empty_bags(kind):
    """A batch of empty bags gives finite outputs and gradients."""
    known = reference(kind)
    nothing = [
        {key: [[]] * BATCH for key in sample} if isinstance(sample, dict) else sample
        for sample in draw(CASES[kind], np.float64)
    ]
    with jax.enable_x64(True):
        load(known.module, known.tables)
        found = step(kind)(known.module, on_device(nothing))
    for leaf in jax.tree.leaves((found, tables_of(known.module))):
        assert np.isfinite(leaf).all()


def rows_of(out, row):
    """What an output says of one sample."""
    if isinstance(out, jaxrec.KeyedJaggedArray):
        return [rows_of(out[key], row) for key in out.keys]
    if isinstance(out, jaxrec.JaggedArray):
        start = int(np.sum(out.lengths[:row]))
        values = out.values if out.weights is None else out.weights
        return [np.asarray(values)[start : start + int(out.lengths[row])]]
    if isinstance(out, jax.Array | np.ndarray):
        return [np.asarray(out)[row]]
    return [rows_of(part, row) for part in (out.values() if isinstance(out, dict) else out)]


@EVERY
def test_batch_of_one(kind):
    """A sample alone comes out as it does among others."""
    known, row = reference(kind), 3
    single = [select(sample, slice(row, row + 1)) for sample in draw(CASES[kind], np.float64)]
    with jax.enable_x64(True):
        load(known.module, known.tables)
        alone, _ = forward(kind)(known.module, on_device(single, capacity=8))
    got, expected = jax.tree.leaves(rows_of(alone, 0)), jax.tree.leaves(rows_of(known.out, row))
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
