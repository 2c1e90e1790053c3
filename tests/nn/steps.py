"""Steps of every public module: made with drawn values, fed with drawn batches, differentiated."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxrec
from tests.nn.cases import CASES, ROWS, Bags, Column, Dense

BATCH = 16
ONE = {"target"}  # features with exactly one id a sample

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
        size = len(sample) // mesh.size
        parts = [
            pack(sample[i * size : (i + 1) * size], 128 // mesh.size) for i in range(mesh.size)
        ]
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


def differentiate(kind, module, inputs):
    """Value and outputs, gradients of parameters and of dense inputs; tables move."""
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


@functools.cache
def step(kind):
    """`differentiate`, compiled."""
    return nnx.jit(functools.partial(differentiate, kind))


def rows_of_tables(module):
    return {
        (path, table.name): np.array(node.table(table.name))
        for path, node in collections(module).items()
        for table in node.configs
    }
