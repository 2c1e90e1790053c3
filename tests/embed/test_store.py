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
from jaxrec.embed.layout import TableLayout
from jaxrec.embed.outputs import flatten, join_pooled
from jaxrec.embed.row_gradients import bound_samples, group_parts, merge
from jaxrec.optim.hyperparameters import as_step
from jaxrec.train import checkpoint

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

    def lookup(self, features, *, is_weighted=False, dtype="float32", routes=None):
        layouts, pooled, lookups = {}, {}, {}
        for group in self.layout.groups:
            layouts[group.name] = layout = group.bags(features)
            flat = lookups[group.name] = flatten(features, None, layout, group)
            rows, _ = self.read_rows(group.name, flat.rows)
            if flat.scales is not None:
                rows = rows * flat.scales[:, None]
            pooled[group.name] = jax.ops.segment_sum(rows, flat.bags, layout.num_bags)
        return join_pooled(self.layout, features, layouts, pooled, lookups, dtype)

    def update(self, calls, step, is_applied=None):
        parts, store = group_parts(calls), self
        for group in self.layout.groups:
            bounded, optimizer = bound_samples(parts[group.name], group.optimizer)
            gradient = merge(bounded)
            runs = kernels.build_runs(gradient.lookups.rows, group.num_rows)
            rows, state = self.read_rows(group.name, runs.unique)
            lookups = dataclasses.replace(gradient.lookups, rows=runs.inverse)
            rows, state = kernels.fused_update(
                rows, state, lookups, gradient.values, optimizer, as_step(step)
            )
            slots = runs.unique if is_applied is None else jnp.where(is_applied, runs.unique, -1)
            store = store.write_rows(group.name, slots, rows, state)
        return store

    def read_rows(self, group, slots):
        host = HOST[self.number][group]

        def read(slots, version):
            slots = np.asarray(slots)
            inside = (slots >= 0) & (slots < len(host["rows"]))
            safe = np.where(inside, slots, 0)
            return {k: (a[safe].T * inside).T.astype(a.dtype) for k, a in host.items()}

        def shape(array):
            return jax.ShapeDtypeStruct((slots.size, *array.shape[1:]), array.dtype)

        state = io_callback(read, jax.tree.map(shape, host), slots, self.version, ordered=True)
        return state.pop("rows"), state

    def write_rows(self, group, slots, rows, state):
        def write(slots, new):
            host = HOST[self.number][group]
            slots = np.asarray(slots)
            inside = (slots >= 0) & (slots < len(host["rows"]))
            for name, array in new.items():
                host[name][slots[inside]] = np.asarray(array)[inside]

        io_callback(write, None, slots, {"rows": rows, **state}, ordered=True)
        return dataclasses.replace(self, version=self.version + 1)


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


def test_some_rows_are_written():
    model = make_model(HostTables.init)
    expected, state = np.array(model.table("item")), model.table_state("item")
    expected[[7, 2]] = [[1.0], [2.0]]
    model.load_rows("item", [7, 2], expected[[7, 2]])
    np.testing.assert_array_equal(model.table("item"), expected)
    model.load_table("item", -expected)
    np.testing.assert_array_equal(model.table("item"), -expected)
    model.load_table_state("item", {key: array + 1 for key, array in state.items()})
    for key, array in model.table_state("item").items():
        np.testing.assert_array_equal(array, state[key] + 1)


@pytest.mark.parametrize("source", [HostTables.init, None], ids=["host", "device"])
def test_a_checkpoint_is_that_of_tables_on_the_device(source, tmp_path):
    trained = make_model(source)
    train(trained)
    checkpoint.save(tmp_path, trained, jaxrec.Optimizer(trained, optax.sgd(0.1)))
    for store in (HostTables.init, None):
        restored = make_model(store)
        restored.load_table("item", np.zeros((16, 4)))
        checkpoint.restore(restored, tmp_path)
        np.testing.assert_array_equal(restored.table("item"), trained.table("item"))


def test_a_loss_must_not_read_its_whole_table():
    model = make_model(HostTables.init)
    with pytest.raises(TypeError, match="reads the whole table 'item'"):
        jaxrec.value_and_grad(lambda model: model.table("item").sum())(model)
