"""In-training pruning keeps rows for the ids that are used, and loses nothing else."""

from __future__ import annotations

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import strategies as st
from jax.sharding import AxisType

import jaxrec
from jaxrec.nn import PrunedEmbeddings
from jaxrec.nn.pruning import Addresses, first_addresses, reassign

IDS, ROWS = 50, 8


def make(optimizer=None, names=("user",)):
    tables = [jaxrec.EmbeddingBagConfig(name, ROWS, 4) for name in names]
    optimizer = optimizer or jaxrec.optim.adagrad(0.1, initial_accumulator_value=0.5)
    embeddings = jaxrec.EmbeddingBagCollection(tables, optimizer=optimizer, rngs=nnx.Rngs(0))
    return PrunedEmbeddings(embeddings, {"user": IDS})


def batch(bags, module):
    return jaxrec.KeyedJaggedArray.from_lists({"user": bags}, bounds=module.bounds)


def rows_of(module):
    return np.asarray(module.addresses["user"].get_value().rows)


def reassigned(rows, uses, num_rows):
    """The rule, id by id."""
    order = sorted(range(len(rows)), key=lambda i: (-uses[i], rows[i] == num_rows - 1, i))
    kept = set(order[: num_rows - 1])
    staying = {i: rows[i] for i in kept if rows[i] != num_rows - 1}
    free = iter(sorted(set(range(num_rows - 1)) - set(staying.values())))
    out, changed = [], [False] * num_rows
    for i in range(len(rows)):
        if i in staying or i not in kept:
            out.append(staying.get(i, num_rows - 1))
        else:
            out.append(next(free))
            changed[out[-1]] = True
    return out, changed


@hypothesis.given(
    st.lists(st.lists(st.integers(0, 4), min_size=12, max_size=12), min_size=1, max_size=4)
)
def test_reassignment(rounds):
    addresses = first_addresses(12, 5)
    for uses in rounds:
        addresses = Addresses(addresses.rows, jnp.asarray(uses, jnp.float32))
        expected = reassigned(addresses.rows.tolist(), uses, 5)
        addresses, changed = reassign(addresses, 5)
        assert (addresses.rows.tolist(), changed.tolist()) == expected
        own = [row for row in addresses.rows.tolist() if row != 4]
        assert sorted(own) == [0, 1, 2, 3]


def test_the_ids_that_occur_get_rows():
    module = make()
    before = np.asarray(module.embeddings.table("user"))
    wanted = [40, 41, 42, 43, 3, 44, 45]
    module(batch([wanted, [40]], module))
    np.testing.assert_array_equal(module.addresses["user"].get_value().uses[40], 2)
    state = module.embeddings.table_state("user")["accumulator"]
    module.embeddings.load_table_state("user", {"accumulator": state + 1})
    assert module.prune() == {"user": 6}
    rows = rows_of(module)
    assert rows[3] == 3  # it had a row, and keeps it
    assert {*rows[wanted].tolist()} == set(range(ROWS - 1))
    assert rows[7] == rows[0] == ROWS - 1
    after = np.asarray(module.embeddings.table("user"))
    np.testing.assert_array_equal(after[[3, 7]], before[[3, 7]])
    np.testing.assert_array_equal(after[rows[wanted]][[0, 1]], np.stack([before[-1]] * 2))
    state = np.asarray(module.embeddings.table_state("user")["accumulator"])
    np.testing.assert_array_equal(state[[3, 7]], 1.5)
    np.testing.assert_array_equal(state[[0, 1, 2, 4, 5, 6]], 0.5)


def test_pruning_changes_no_output_of_ids_that_come_in():
    module = make()
    module.eval()
    known = batch([[40], [41, 49]], module)
    before = module(known).values
    module.train()
    module(known)
    module.eval()
    assert module.prune() == {"user": 3}
    np.testing.assert_array_equal(module(known).values, before)
    np.testing.assert_allclose(module.addresses["user"].get_value().uses[40], 0.98)
    assert module.prune() == {"user": 0}


def test_evaluation_counts_nothing():
    module = make()
    module.eval()
    module(batch([[40]], module))
    assert float(module.addresses["user"].get_value().uses.sum()) == 0


@pytest.mark.parametrize("devices", [1, 8], ids=["one-device", "eight-devices"])
def test_training_with_skewed_ids_learns_those_used(devices):
    """Counted in the compiled step; the used ids end up each with what its label asks for."""
    model = make(jaxrec.optim.sgd(0.5))
    mesh = jax.make_mesh((devices,), ("data",), axis_types=(AxisType.Auto,))
    used = np.array([11, 22, 33, 44])
    plan = jaxrec.plan.ShardingPlan.from_dict({"user": jaxrec.mesh.row_wise()})
    model = jaxrec.shard(model, plan, mesh)
    optimizer = jaxrec.Optimizer(model, optax.sgd(0.1))

    @nnx.jit
    def step(model, optimizer, features, labels):
        def loss_fn(model):
            return jnp.mean((model(features).values.sum(1) - labels) ** 2)

        loss, gradients = jaxrec.value_and_grad(loss_fn)(model)
        optimizer.update(model, gradients)
        return loss

    ids = np.tile(used, 4)
    features = batch([[i] for i in ids.tolist()], model)
    labels = (ids / 11).astype(np.float32)
    features, labels = jaxrec.mesh.shard_batch((features, labels), mesh)
    for _ in range(10):
        shared = float(step(model, optimizer, features, labels))
    assert shared > 1.0  # one row for four labels
    uses = np.asarray(model.addresses["user"].get_value().uses)
    np.testing.assert_array_equal(uses[used], 40)
    assert uses.sum() == 160
    assert model.prune() == {"user": 4}
    for _ in range(30):
        alone = float(step(model, optimizer, features, labels))
    assert alone < 1e-3


def test_other_tables_are_looked_up_as_ever():
    module = make(names=("user", "item"))
    ids = {"user": [[49], [1]], "item": [[6], [2, 3]]}
    features = jaxrec.KeyedJaggedArray.from_lists(ids, bounds=module.bounds)
    found = module(features)["item"]
    np.testing.assert_array_equal(
        found,
        module.embeddings(jaxrec.KeyedJaggedArray.from_lists(ids | {"user": [[7], [1]]}))["item"],
    )
    assert module.bounds == {"user": IDS, "item": ROWS}


def test_an_id_outside():
    module = make()
    features = jaxrec.KeyedJaggedArray.from_lists({"user": [[IDS]]})
    with pytest.raises(ValueError, match=r"feature 'user', sample 0: id 50 is outside \[0, 50\)"):
        module(features)
    module.eval()
    assert np.isnan(nnx.jit(lambda module, x: module(x).values)(module, features)).all()


@pytest.mark.parametrize(
    ("num_ids", "message"),
    [
        ({"item": 9}, "'item', which is not a table"),
        ({"user": ROWS}, "has 8 rows for 8 ids"),
    ],
    ids=["unknown-table", "no-more-ids"],
)
def test_wrong_sizes(num_ids, message):
    with pytest.raises(ValueError, match=message):
        PrunedEmbeddings(make().embeddings, num_ids)
