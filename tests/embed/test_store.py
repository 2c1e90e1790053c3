"""A table store of one's own, outside of the package, trains, loads and saves like `Tables`."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.experimental import io_callback

import jaxrec
from jaxrec.embed import TableStore, kernels
from jaxrec.embed.checkpoint_view import LogicalTable
from jaxrec.embed.layout import TableLayout
from jaxrec.embed.lookup import flatten, join_pooled
from jaxrec.embed.row_gradients import bound_samples, group_gradients, group_parts, merge
from jaxrec.embed.row_gradients import table_squares as squares_of_tables
from jaxrec.embed.row_slots import RowSlots
from jaxrec.optim.hyperparameter import as_step

pytestmark = pytest.mark.jax_version

HOST: dict[int, dict[str, dict[str, np.ndarray]]] = {}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HostTables(TableStore):
    """Tables in host memory. The device fetches a batch's rows and sends them back, changed."""

    version: jax.Array | None  # number of updates; a leaf that makes updates visible to JAX
    number: int = dataclasses.field(metadata={"static": True})
    layout: TableLayout = dataclasses.field(metadata={"static": True})

    @classmethod
    def init(cls, layout, key):
        tables = jaxrec.embed.Tables.init(layout, key)
        HOST[len(HOST)] = {
            name: jax.tree.map(np.array, {"rows": rows, **tables.state[name]})
            for name, rows in tables.rows.items()
        }
        return cls(jnp.int32(0), len(HOST) - 1, layout)

    @property
    def row_optimizers(self):
        return tuple(group.optimizer for group in self.layout.groups)

    @property
    def without_rows(self):
        return dataclasses.replace(self, version=None)

    def fetch(self, group, rows):
        """The rows and the state of some rows; zeros for one outside."""
        host = HOST[self.number][group.name]

        def read(rows, version):
            rows = np.asarray(rows)
            inside = (rows >= 0) & (rows < group.num_rows)
            safe = np.where(inside, rows, 0)
            return {k: (a[safe].T * inside).T.astype(a.dtype) for k, a in host.items()}

        def shape(array):
            return jax.ShapeDtypeStruct((rows.size, *array.shape[1:]), array.dtype)

        return io_callback(read, jax.tree.map(shape, host), rows, self.version, ordered=True)

    def table_arrays(self, name):
        """Views of a table's rows and state."""
        group, index = self.layout.find(name)
        start = group.row_offsets[index]
        rows = slice(start, start + group.tables[index].num_embeddings)
        return {key: array[rows] for key, array in HOST[self.number][group.name].items()}

    def lookup(self, features, *, is_weighted=False, dtype="float32", routes=None):
        layouts, pooled, lookups = {}, {}, {}
        for group in self.layout.groups:
            layouts[group.name] = layout = group.bags(features)
            flat = lookups[group.name] = flatten(features, None, layout, group)
            rows = self.fetch(group, flat.rows)["rows"]
            if flat.scales is not None:
                rows = rows * flat.scales[:, None]
            pooled[group.name] = jax.ops.segment_sum(rows, flat.bags, layout.num_bags)
        return join_pooled(self.layout, features, layouts, pooled, lookups, dtype)

    def row_gradients(self, residuals, cotangents):
        return group_gradients(self.layout, residuals, cotangents)

    def table_squares(self, calls):
        return squares_of_tables(self.layout.groups, calls)

    def update(self, calls, step, is_applied=None):
        parts, applied = group_parts(calls), True if is_applied is None else is_applied
        for group in self.layout.groups:
            bounded, optimizer = bound_samples(parts[group.name], group.optimizer)
            gradient = merge(bounded)
            runs = kernels.build_runs(gradient.lookups.rows, group.num_rows)
            state = self.fetch(group, runs.unique)
            rows, lookups = (
                state.pop("rows"),
                dataclasses.replace(gradient.lookups, rows=runs.inverse),
            )
            rows, state = kernels.fused_update(
                rows, state, lookups, gradient.values, optimizer, as_step(step)
            )
            new = {"rows": rows, **state}

            def write(unique, new, applied, group=group):
                host = HOST[self.number][group.name]
                inside = (np.asarray(unique) < group.num_rows) & np.asarray(applied)
                for name, array in new.items():
                    host[name][np.asarray(unique)[inside]] = np.asarray(array)[inside]

            io_callback(write, None, runs.unique, new, applied, ordered=True)
        return dataclasses.replace(self, version=self.version + 1)

    def read(self, name):
        return jnp.array(self.table_arrays(name)["rows"])

    def read_state(self, name):
        arrays = self.table_arrays(name)
        return {key: jnp.array(array) for key, array in arrays.items() if key != "rows"}

    def write(self, name, values):
        return self.write_state(name, {"rows": values})

    def write_state(self, name, state):
        for key, array in state.items():
            self.table_arrays(name)[key][: len(array)] = array
        return self

    def row_slots(self, name, rows):
        group, index = self.layout.find(name)
        slots = (group.row_offsets[index] + rows).astype(np.int32)
        return [RowSlots(group.name, (0, group.dim), slots, np.arange(len(rows), dtype=np.int32))]

    def read_rows(self, group, slots):
        (group,) = [each for each in self.layout.groups if each.name == group]
        state = self.fetch(group, slots)
        return state.pop("rows"), state

    def write_rows(self, group, slots, rows, state):
        raise TypeError("this store writes rows by `update` alone")

    def checkpoint_shapes(self, name):
        return jax.tree.map(jnp.asarray, self.checkpoint_view(name))

    def checkpoint_view(self, name):
        return LogicalTable(self.read(name), self.read_state(name))

    def from_checkpoint(self, name, logical, num_rows):
        arrays = {"rows": logical.rows, **logical.state}
        return self.write_state(name, {key: array[:num_rows] for key, array in arrays.items()})


def make_model(store=None):
    config = jaxrec.EmbeddingBagConfig("item", 16, 4, pooling="mean")
    adagrad = jaxrec.optim.rowwise_adagrad(0.1, clip_value=0.5)
    return jaxrec.EmbeddingBagCollection([config], optimizer=adagrad, rngs=nnx.Rngs(0), store=store)


@nnx.jit
def train_step(model, optimizer, features):
    loss, gradients = jaxrec.value_and_grad(lambda model: (model(features).values ** 2).sum())(
        model
    )
    optimizer.update(model, gradients)
    return loss


def train(model):
    optimizer = jaxrec.Optimizer(model, optax.sgd(0.1))
    rng = np.random.default_rng(0)
    losses = []
    for _ in range(4):
        ids = [rng.integers(16, size=rng.integers(5)).tolist() for _ in range(6)]
        features = jaxrec.KeyedJaggedArray.from_lists({"item": ids})
        losses.append(float(train_step(model, optimizer, features)))
    return losses


def test_training_equals_tables_on_the_device():
    own, plain = make_model(HostTables.init), make_model()
    assert isinstance(own.tables.get_value(), HostTables)
    np.testing.assert_allclose(train(own), train(plain), rtol=1e-6)
    np.testing.assert_allclose(own.table("item"), plain.table("item"), rtol=1e-5)
    for name, state in plain.table_state("item").items():
        np.testing.assert_allclose(own.table_state("item")[name], state, rtol=1e-5)


def test_some_rows_are_read():
    model = make_model(HostTables.init)
    expected = np.asarray(model.table("item"))[[5, 0, 5]]
    np.testing.assert_array_equal(model.rows("item", [5, 0, 5]), expected)
    with pytest.raises(ValueError, match="got id 16"):
        model.rows("item", [16])


def test_a_loss_must_not_read_its_whole_table():
    model = make_model(HostTables.init)
    with pytest.raises(TypeError, match="reads the whole table 'item'"):
        jaxrec.value_and_grad(lambda model: model.table("item").sum())(model)
