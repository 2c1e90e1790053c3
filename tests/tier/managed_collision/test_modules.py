"""Collections with maps: training, evaluation, checkpoints, and what the compiled step contains."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxrec
from jaxrec.embed import Tables
from jaxrec.embed.layout import layout_tables
from jaxrec.mesh.ahead import lookup_ahead, route_ahead
from jaxrec.ragged import join_int64
from jaxrec.tier.managed_collision import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
    MultiProbeConfig,
    SingleTTLEviction,
    SortedMapConfig,
    id_words,
)
from jaxrec.train import checkpoint
from tests.copies import find_copies
from tests.tier.managed_collision import models
from tests.tier.managed_collision.oracle import MultiProbe, Sorted
from tests.users_xla import AS_USERS_DO


def ids_of(features, key):
    """The ids of a key of a raw batch, without padding."""
    column = features[key]
    return np.asarray(column.values)[: int(np.sum(column.lengths))].tolist()


def row_wise_adagrad(rows, state, gradients, rate=0.1, eps=1e-8):
    """One step for rows by slot, in float64."""
    for slot, gradient in gradients.items():
        state[slot] += np.mean(gradient**2)
        rows[slot] -= rate * gradient / (np.sqrt(state[slot]) + eps)


@pytest.mark.parametrize("is_pooled", [True, False])
def test_training_equals_plain_python(is_pooled):
    """Slots, evictions, fresh rows and updates, by dictionaries and NumPy."""
    model, optimizer = models.make(is_pooled=is_pooled)
    oracles = {
        "wide": Sorted(models.SLOTS, 2, 100, lambda count, last, iteration: count),
        "user": MultiProbe(models.PROBED, models.SLOTS),
    }
    rng = np.random.default_rng(0)
    dims = {table.name: table.embedding_dim for table in model.plain.configs}
    rows = {name: np.ones((models.SLOTS, dims[name])) for name in ("wide", "deep", "user")}
    state = {name: np.zeros(models.SLOTS) for name in rows}
    evicted_in_all = 0
    for step in range(7):
        features = models.make_batch(rng)
        items = ids_of(features, "item") + ids_of(features, "liked")
        evicted = {"wide": oracles["wide"].add(items), "user": []}
        slots = {}
        for id in ids_of(features, "user"):
            slots[id], old = oracles["user"].add(id, step, step)
            evicted["user"] += [] if old is None else [old]
        evicted["deep"] = evicted["wide"]
        for name, gone in evicted.items():
            evicted_in_all += len(gone)
            rows[name][gone], state[name][gone] = 1, 0
        kernel = np.asarray(model.over.kernel.get_value(), np.float64)[:, 0]
        bias = float(model.over.bias.get_value()[0])
        hours = np.asarray(model.plain.table("hour"), np.float64)
        batch = id_words(features, hour=step)
        loss, remapped = models.train_step(model, optimizer, batch)
        lookup = {
            "item": oracles["wide"].remap,
            "liked": oracles["wide"].remap,
            "user": lambda id, slots=slots: slots[id],
        }
        got, given = remapped.to_lists(), features.to_lists()
        for key, find in lookup.items():
            assert got[key] == [[find(id) for id in bag] for bag in given[key]]
        assert got["hour"] == given["hour"]
        if not is_pooled:
            continue
        blocks = [("wide", "item"), ("wide", "liked"), ("deep", "item"), ("user", "user")]
        pooled = [
            np.array([sum((rows[t][s] for s in bag), np.zeros(dims[t])) for bag in got[key]])
            for t, key in blocks
        ]
        pooled.append(np.array([sum((hours[h] for h in b), np.zeros(4)) for b in got["hour"]]))
        logits = np.concatenate(pooled, axis=1) @ kernel + bias
        np.testing.assert_allclose(loss, np.mean(logits**2), rtol=1e-4)
        gradients = {name: {} for name in rows}
        start = 0
        for name, key in blocks:
            part = kernel[start : start + dims[name]]
            start += dims[name]
            for sample, bag in enumerate(got[key]):
                for slot in bag:
                    gradient = 2 * logits[sample] / models.BATCH * part
                    gradients[name][slot] = gradients[name].get(slot, 0) + gradient
        for name in rows:
            row_wise_adagrad(rows[name], state[name], gradients[name])
            np.testing.assert_allclose(model.plain.table(name), rows[name], rtol=2e-3, atol=1e-5)
    assert evicted_in_all > 20


def test_evaluation_changes_nothing():
    model, optimizer = models.make()
    rng = np.random.default_rng(1)
    for step in range(3):
        models.train_step(model, optimizer, id_words(models.make_batch(rng), hour=step))
    before = models.contents(model)
    model.eval()
    new, old = models.make_batch(rng), models.make_batch(np.random.default_rng(1))
    evaluate = nnx.jit(lambda model, batch: model(batch)[1])
    for features in (new, old):
        remapped = evaluate(model, id_words(features))
    assert model(old)[1].to_lists() == remapped.to_lists()
    models.assert_same(models.contents(model), before)
    wide = model.embeddings.id_map("deep")
    known = set(join_int64(np.asarray(wide.ids))[: models.SLOTS - 1].tolist())
    for id, slot in zip(ids_of(old, "item"), ids_of(remapped, "item"), strict=True):
        assert (slot < models.SLOTS - 1) == (id in known)
    model.train()
    model(id_words(new))
    assert int(model.embeddings.num_batches.get_value()) == 4


def test_a_skipped_step_keeps_map_and_rows_together():
    model, optimizer = models.make()
    rng = np.random.default_rng(2)
    for step in range(4):
        batch = id_words(models.make_batch(rng), hour=step)
        kernel = model.over.kernel.get_value()
        model.over.kernel.set_value(kernel * (jnp.nan if step == 3 else 1))
        models.train_step(model, optimizer, batch)
    assert int(optimizer.skipped.get_value()) == 1
    assert int(model.embeddings.num_batches.get_value()) == 4
    for name in ("wide", "deep", "user"):
        rows, state = model.plain.table(name), model.plain.table_state(name)
        assert np.isfinite(rows).all()
        for each in state.values():
            # A row without state is a fresh one.
            assert (np.asarray(rows)[np.asarray(each) == 0] == 1).all()


def test_an_id_begins_with_the_same_row_wherever_its_slot_is():
    config = jaxrec.EmbeddingBagConfig("item", 3, 4, initializer="normal")

    def first_row(ids):
        rngs = nnx.Rngs(0)
        plain = jaxrec.EmbeddingBagCollection([config], rngs=rngs)
        module = ManagedCollisionEmbeddingBagCollection(
            plain, {"item": SortedMapConfig(8)}, return_remapped_features=True, rngs=rngs
        )
        rows, remapped = module(jaxrec.KeyedJaggedArray.from_lists({"item": ids}, id_bits=64))
        return np.asarray(rows.values), np.asarray(remapped.values)[:2].tolist()

    rows, slots = first_row([[7], [8, 8]])
    others, other_slots = first_row([[9, 9], [7]])
    assert slots[0] != other_slots[-1]
    np.testing.assert_array_equal(rows[0], others[1])
    assert len({rows[0, 0], rows[1, 0] / 2, others[0, 0] / 2}) == 3


def test_dropped_ids_leave_their_bags():
    config = MultiProbeConfig(1, 1, disable_fallback=True)
    tables = [jaxrec.EmbeddingBagConfig("user", 1, 2, initializer="ones", pooling="mean")]
    tables += [jaxrec.EmbeddingBagConfig("hour", 24, 2, initializer="ones")]
    rngs = nnx.Rngs(0)
    plain = jaxrec.EmbeddingBagCollection(tables, is_weighted=True, rngs=rngs)
    module = ManagedCollisionEmbeddingBagCollection(
        plain, {"user": config}, return_remapped_features=True, rngs=rngs
    )
    batch = jaxrec.KeyedJaggedArray.from_lists(
        {"hour": [[1], [2], []], "user": [[5, 9, 5], [9, 9], [9, 5]]},
        {"hour": [[1.0], [2.0], []], "user": [[1.0, 2.0, 3.0], [4.0, 5.0], [6.0, 7.0]]},
        id_bits=64,
    )
    pooled, remapped = module(batch)
    assert remapped.to_lists() == {"hour": [[1], [2], []], "user": [[0, 0], [], [0]]}
    assert remapped.weights[8:11].tolist() == [1.0, 3.0, 7.0]
    assert pooled["user"][:, 0].tolist() == [2.0, 0.0, 7.0]
    assert pooled["hour"][:, 0].tolist() == [1.0, 2.0, 0.0]


def test_batches_of_32_bit_ids():
    rngs = nnx.Rngs(0)
    config = jaxrec.EmbeddingConfig("item", 4, 2)
    module = ManagedCollisionEmbeddingCollection(
        jaxrec.EmbeddingCollection([config], rngs=rngs), {"item": SortedMapConfig(16)}, rngs=rngs
    )
    batch = jaxrec.KeyedJaggedArray.from_lists({"item": [[2**31 - 1], [5, 5]]})
    rows = nnx.jit(lambda module, batch: module(batch))(module, batch)["item"].values
    np.testing.assert_array_equal(rows[1], rows[2])
    assert join_int64(np.asarray(module.id_map("item").ids))[:2].tolist() == [5, 2**31 - 1]
    assert (module.bounds, int(module.open_slots["item"])) == ({}, 1)


def test_routing_ahead_changes_nothing():
    model, _ = models.make()
    batch = id_words(models.make_batch(np.random.default_rng(4)), hour=0)
    before = models.contents(model)
    route_ahead(lambda model: model(batch), model)
    models.assert_same(models.contents(model), before)
    with pytest.raises(TypeError, match="cannot be looked up a step ahead"):
        lookup_ahead(lambda model: model(batch), model)


def test_a_checkpoint_has_the_maps(tmp_path):
    model, optimizer = models.make()
    rng = np.random.default_rng(3)
    batches = [id_words(models.make_batch(rng), hour=step) for step in range(6)]
    for batch in batches[:3]:
        models.train_step(model, optimizer, batch)
    checkpoint.save(tmp_path, model, optimizer)
    other = models.make(seed=1)
    checkpoint.restore(other[0], tmp_path, other[1])
    models.assert_same(models.contents(*other), models.contents(model, optimizer))
    for batch in batches[3:]:
        losses = [models.train_step(*each, batch)[0] for each in ((model, optimizer), other)]
        assert float(losses[0]) == float(losses[1])
    models.assert_same(models.contents(*other), models.contents(model, optimizer))


ROWS = 20_011


@pytest.mark.slow
def test_no_copy_of_a_table():
    model, optimizer = models.make(probed=models.OPT_IN, rows=ROWS)
    graphdef, state = nnx.split((model, optimizer))

    def step(state, features):
        model, optimizer = nnx.merge(graphdef, state)
        loss, gradients = jaxrec.value_and_grad(lambda model: (model(features)[0] ** 2).mean())(
            model
        )
        optimizer.update(model, gradients)
        return nnx.state((model, optimizer)), loss

    rng = np.random.default_rng(0)
    batch = id_words(models.make_batch(rng), hour=0)
    batch = jax.tree.map(jnp.asarray, batch)
    compiled = jax.jit(step, donate_argnums=0).lower(state, batch).compile(AS_USERS_DO)
    groups = [(ROWS + models.SLOTS + 24, models.DIM), (ROWS, 8)]
    for shape in groups:
        assert find_copies(compiled, shape) == []
        # The optimizer's state is float32; arrays of maps are integers, and may be copied.
        assert not any("= f32" in copy for copy in find_copies(compiled, shape[:1]))

    def pointers(state):
        leaves = [x for x in jax.tree.leaves(state) if x.shape in groups]
        assert len(leaves) == 2
        return {x.unsafe_buffer_pointer() for x in leaves}

    before = pointers(state)
    for _ in range(2):
        state, loss = compiled(state, batch)
        assert np.isfinite(loss)
    assert pointers(state) == before


def collection(*tables):
    return jaxrec.EmbeddingBagCollection(tables, rngs=nnx.Rngs(0))


WRONG = {
    "another collection": (
        TypeError,
        "takes an EmbeddingBagCollection, got Linear",
        lambda: (nnx.Linear(1, 1, rngs=nnx.Rngs(0)), {}),
    ),
    "no settings": (
        TypeError,
        "is a SortedMapConfig or a MultiProbeConfig, got 5",
        lambda: (collection(jaxrec.EmbeddingBagConfig("a", 4, 2)), {"a": 5}),
    ),
    "unknown table": (
        ValueError,
        "names table 'b', but the tables are",
        lambda: (collection(jaxrec.EmbeddingBagConfig("a", 4, 2)), {"b": SortedMapConfig(8)}),
    ),
    "two maps": (
        ValueError,
        "has two maps",
        lambda: (
            collection(jaxrec.EmbeddingBagConfig("a", 4, 2)),
            {"a": SortedMapConfig(8), ("a",): SortedMapConfig(8)},
        ),
    ),
    "other sizes": (
        ValueError,
        "equally many rows",
        lambda: (
            collection(jaxrec.EmbeddingBagConfig("a", 4, 2), jaxrec.EmbeddingBagConfig("b", 5, 2)),
            {("a", "b"): SortedMapConfig(8)},
        ),
    ),
    "feature of two maps": (
        ValueError,
        "read feature 'a' through different maps",
        lambda: (
            collection(
                jaxrec.EmbeddingBagConfig("a", 4, 2),
                jaxrec.EmbeddingBagConfig("b", 4, 2, feature_names=("a",)),
            ),
            {"a": SortedMapConfig(8)},
        ),
    ),
}


@pytest.mark.parametrize(("error", "message", "arguments"), WRONG.values(), ids=WRONG)
def test_wrong_arguments(unchecked, error, message, arguments):
    with pytest.raises(error, match=message):
        ManagedCollisionEmbeddingBagCollection(*arguments(), rngs=nnx.Rngs(0))


def test_wrong_batches(unchecked):
    module = ManagedCollisionEmbeddingBagCollection(
        collection(jaxrec.EmbeddingBagConfig("a", 4, 2)),
        {"a": MultiProbeConfig(eviction=SingleTTLEviction(1))},
        rngs=nnx.Rngs(0),
    )
    with pytest.raises(KeyError, match=r"takes features \['a'\], which the batch lacks"):
        module(jaxrec.KeyedJaggedArray.from_lists({"b": [[1]]}, id_bits=64))
    batch = jax.tree.map(jnp.asarray, jaxrec.KeyedJaggedArray.from_lists({"a": [[1]]}))
    with pytest.raises(TypeError, match="evicts ids by the hour, which the batch lacks"):
        module(batch)
    with pytest.raises(TypeError, match="KeyedJaggedArray, or the result of id_words"):
        module([1])
    with pytest.raises(KeyError, match="table 'b' has no map"):
        module.id_map("b")


def test_more_rows_than_int32_can_number():
    """The collection of such a table lies over a mesh; the maps look at its configuration only."""
    config = jaxrec.EmbeddingBagConfig("big", 2**31, 1)
    layout = layout_tables([config], jaxrec.optim.sgd(0.1))
    collection = jaxrec.EmbeddingBagCollection(
        [config], rngs=nnx.Rngs(0), store=lambda *_: Tables({}, {}, layout)
    )
    with pytest.raises(ValueError, match="table 'big' has 2147483648 rows; a map gives ids rows"):
        ManagedCollisionEmbeddingBagCollection(
            collection, {"big": SortedMapConfig(8)}, rngs=nnx.Rngs(0)
        )
