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
from tests.nn.cases import CASES, FLOAT32_WEIGHTS, KEEPS_FLOAT32, ROWS, Bags, Column, Dense

BATCH, DEVICES = 16, 8
ONE = {"target"}  # features with exactly one id a sample

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


# -- modules ---------------------------------------------------------------------------------------


def make(kind, **types):
    """A module with drawn values: first values have zeros, which sit on the kink of a ReLU."""
    module = nnx.eval_shape(lambda: CASES[kind].make(rngs=nnx.Rngs(0), **types))
    rng = np.random.default_rng(0)

    def filled(variable):
        def values(leaf):
            if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                return jax.random.key(0)
            if isinstance(variable, nnx.Param | jaxrec.embed.TableVariable):
                scale = 0.5 if isinstance(variable, nnx.Param) else 1.0
                return jnp.asarray(scale * rng.standard_normal(leaf.shape), leaf.dtype)
            return jnp.ones(leaf.shape, leaf.dtype)  # variances, counters

        return jax.tree.map(values, variable.get_value())

    for _, variable in nnx.iter_graph(module):
        if isinstance(variable, nnx.Variable):
            variable.set_value(filled(variable))
    module.eval()  # no dropout, and no batch's statistics
    return module


def collections(module):
    return {
        "/".join(map(str, path)): node
        for path, node in nnx.iter_modules(module)
        if isinstance(node, jaxrec.EmbeddingBagCollection | jaxrec.EmbeddingCollection)
    }


def tables_of(module):
    """The rows of each collection's groups of tables, on the host."""
    return {
        path: jax.tree.map(np.array, node.tables.get_value())
        for path, node in collections(module).items()
    }


def load(module, tables):
    for path, node in collections(module).items():
        node.tables.set_value(jax.tree.map(jnp.asarray, tables[path]))


# -- batches ---------------------------------------------------------------------------------------


def draw(case, dtype=np.float32, batch=BATCH):
    """Inputs, in which some bags are empty; sample by sample, then packed."""
    rng = np.random.default_rng(0)
    samples = []
    lengths = rng.permutation(np.arange(batch) % 5)  # 0 to 4, each as often
    for kind in case.inputs:
        match kind:
            case Dense(shape):
                samples.append(rng.standard_normal((batch, *shape)).astype(dtype))
            case Bags(keys):
                samples.append(
                    {
                        key: [
                            rng.integers(0, ROWS, 1 if key in ONE else length).tolist()
                            for length in (lengths if key in ("a", "history") else lengths[::-1])
                        ]
                        for key in keys
                    }
                )
            case Column(dim):
                samples.append(
                    [rng.standard_normal((length, dim)).astype(dtype) for length in lengths]
                )
    return samples


def select(sample, rows):
    if isinstance(sample, dict):
        return {key: sample[key][rows] for key in sample}
    return sample[rows]


def pack(sample, capacity=48):
    """A drawn input as a module takes it."""
    if isinstance(sample, dict):
        return jaxrec.KeyedJaggedArray.from_lists(
            sample, capacities=dict.fromkeys(sample, capacity)
        )
    if isinstance(sample, list):
        flat = np.concatenate([np.zeros((0, *sample[0].shape[1:]), sample[0].dtype), *sample])
        lengths = np.array([len(row) for row in sample], np.int32)
        return jaxrec.JaggedArray(np.pad(flat, [(0, capacity - len(flat)), (0, 0)]), lengths)
    return sample


def on_device(samples, capacity=48):
    return [jax.tree.map(jnp.asarray, pack(sample, capacity)) for sample in samples]


def on_mesh(sample, mesh):
    """The same on a mesh: dense arrays cut, ragged ones with an axis over the devices."""
    if isinstance(sample, list):
        size = len(sample) // DEVICES
        parts = [pack(sample[i * size : (i + 1) * size], 16) for i in range(DEVICES)]
        return jaxrec.mesh.shard_batch(jax.tree.map(lambda *xs: np.stack(xs), *parts), mesh)
    return jaxrec.mesh.shard_batch(pack(sample), mesh)


# -- what is computed ------------------------------------------------------------------------------


@functools.cache
def forward(kind):
    """The compiled module: its outputs, and their `total`."""

    def run(module, inputs):
        out = CASES[kind].call(module, *inputs)
        return out, total(out)

    return nnx.jit(run)


def total(out):
    """A smooth number that every element of the output has part in, padding aside."""
    if isinstance(out, jaxrec.KeyedJaggedArray):
        return sum(total(out[key]) for key in out.keys)
    if isinstance(out, jaxrec.JaggedArray):
        values = out.values if out.weights is None else out.weights
        filled = np.arange(values.shape[out.lengths.ndim - 1])
        filled = filled.reshape((1,) * (out.lengths.ndim - 1) + filled.shape)
        used = filled < jnp.sum(out.lengths, axis=-1, keepdims=True)
        used = used.reshape(used.shape + (1,) * (values.ndim - used.ndim))
        return jnp.where(used, jnp.sin(values), 0).sum()
    if isinstance(out, jax.Array):
        return jnp.sin(out).sum()
    return sum(total(part) for part in (out.values() if isinstance(out, dict) else out))


class WithInputs(nnx.Module):
    """A module and the floating-point inputs that it is differentiated with respect to."""

    def __init__(self, module, inputs):
        self.module = module
        self.inputs = nnx.List([nnx.Param(x) for x in inputs])


@functools.cache
def step(kind):
    """Compiled: value and outputs, gradients of parameters and of dense inputs; tables move."""

    def run(module, inputs):
        dense = [place for place, x in enumerate(inputs) if isinstance(x, jax.Array)]

        def loss(both):
            given = dict(zip(dense, (x[...] for x in both.inputs), strict=True))
            out = CASES[kind].call(both.module, *(given.get(i, x) for i, x in enumerate(inputs)))
            return total(out), out

        both = WithInputs(module, [inputs[place] for place in dense])
        (value, out), gradients = jaxrec.value_and_grad(loss, has_aux=True)(both)
        for path, collection in collections(both).items():
            collection.apply_gradients(gradients.tables[path], 0)
        found = nnx.to_pure_dict(gradients.dense)
        return value, out, found.get("module", {}), list(found.get("inputs", {}).values())

    return nnx.jit(run)


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


def rows_of_tables(module):
    return {
        (path, table.name): np.array(node.table(table.name))
        for path, node in collections(module).items()
        for table in node.configs
    }


# -- what holds ------------------------------------------------------------------------------------


def dot(xs, ys):
    leaves = zip(jax.tree.leaves(xs), jax.tree.leaves(ys), strict=True)
    return float(sum(np.vdot(x, y) for x, y in leaves))


@EVERY
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
