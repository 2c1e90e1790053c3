"""Checkpoints of open vocabularies: rows, ids and counters belong together."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxrec
from jaxrec.tier import Dynamic, ahead, lfu, make, shared
from jaxrec.tier.planning.tier import tier_of
from jaxrec.train.checkpoint import CheckpointError, restore, save
from tests.tier import models

pytestmark = pytest.mark.jax_version

SETTINGS = {
    "plain": Dynamic(eviction=lfu(), admit_after=2, unknown=shared(5)),
    "store": Dynamic(store="memory://"),
}
NAMES = ("item", "query", "item_wide")
TX = optax.adam(1e-2)  # with one object for all, programs are compiled once


def make_model(settings: Dynamic, rows: int = 120, devices: int = 1):
    def made():
        return make(lambda: models.Ranker(rows, "adam"), dict.fromkeys(NAMES, settings))

    if devices == 1:
        return made()
    mesh = jax.make_mesh((devices,), ("data",), devices=jax.devices()[:devices])
    placements = dict.fromkeys((*NAMES, "age"), jaxrec.mesh.row_wise())
    return jaxrec.shard(made, jaxrec.plan.ShardingPlan.from_dict(placements), mesh)


def rows_by_id(model, name: str) -> dict[int, list[np.ndarray]]:
    """The row of each resident id with its state."""
    (vocabulary,) = [v for v in tier_of(model).vocabularies if name in v.name.split("+")]
    ids, rows = vocabulary.vocabulary.map.items()
    collection = model.wide if name == "item_wide" else model.embeddings
    state = collection.table_state(name)
    arrays = [collection.table(name), *(state[key] for key in sorted(state))]
    arrays = [np.asarray(array) for array in arrays]
    return {i: [a[row] for a in arrays] for i, row in zip(ids.tolist(), rows, strict=True)}


def assert_same_rows(model, expected, rtol=0.0):
    for name in NAMES:
        found, wanted = rows_by_id(model, name), rows_by_id(expected, name)
        assert found.keys() == wanted.keys()
        for i, arrays in wanted.items():
            for array, other in zip(found[i], arrays, strict=True):
                np.testing.assert_allclose(array, other, rtol=rtol, atol=rtol)


def steps(model, optimizer, batches):
    return [
        float(models.train_step(model, optimizer, x, jnp.asarray(y)))
        for x, y in ahead(model, batches, look_ahead=2)
    ]


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize(
    ("before", "after"), [(1, 1), pytest.param(8, 4, marks=pytest.mark.slow), (1, 4)]
)
def test_a_restored_run_goes_on_as_if_undisturbed(tmp_path, settings, before, after):
    batches, _ = models.stream(24, 400, samples=8)
    model = make_model(settings, devices=before)
    optimizer = jaxrec.Optimizer(model, TX)
    losses = []
    # It is saved while batches are planned ahead.
    for number, (x, y) in enumerate(ahead(model, batches, look_ahead=2), 1):
        losses.append(float(models.train_step(model, optimizer, x, jnp.asarray(y))))
        if number == 12:
            save(tmp_path, model, optimizer, batches=number)

    other = make_model(settings, devices=after)
    other_optimizer = jaxrec.Optimizer(other, TX)
    restore(other, tmp_path, other_optimizer)
    again = steps(other, other_optimizer, batches[12:])
    rtol = 0.0 if before == after else 1e-5
    np.testing.assert_allclose(again, losses[12:], rtol=rtol)
    assert_same_rows(other, model, rtol)
    assert tier_of(other).statistics().keys() == tier_of(model).statistics().keys()


@pytest.mark.parametrize("rows", [60, 200], ids=["fewer_rows", "more_rows"])
def test_another_number_of_rows(tmp_path, rows):
    settings = Dynamic(eviction=lfu())
    batches, _ = models.stream(12, 400, samples=8)
    model = make_model(settings)
    optimizer = jaxrec.Optimizer(model, TX)
    steps(model, optimizer, batches)
    save(tmp_path, model, optimizer)

    other = make_model(settings, rows)
    with pytest.raises(CheckpointError, match="resized=True"):
        restore(other, tmp_path)
    restore(other, tmp_path, jaxrec.Optimizer(other, TX), resized=True)
    for name in NAMES:
        saved, loaded = rows_by_id(model, name), rows_by_id(other, name)
        assert len(loaded) == min(len(saved), rows - 1)
        for i, arrays in loaded.items():
            for array, expected in zip(arrays, saved[i], strict=True):
                np.testing.assert_array_equal(array, expected)
    # The ids with the most lookups stay.
    counts = {}
    for each, of in ((model, "saved"), (other, "loaded")):
        vocabulary = tier_of(each).vocabularies[0].vocabulary
        ids, places = vocabulary.map.items()
        numbers = vocabulary.records.count[places].tolist()
        counts[of] = dict(zip(ids.tolist(), numbers, strict=True))
    gone = counts["saved"].keys() - counts["loaded"].keys()
    assert max((counts["saved"][i] for i in gone), default=0) <= min(counts["loaded"].values())
    few = models.stream(4, 30, samples=8, seed=1)[0]
    assert np.isfinite(steps(other, jaxrec.Optimizer(other, TX), few)).all()


def test_other_models_stay_as_they_are(tmp_path):
    model = make_model(SETTINGS["store"])
    optimizer = jaxrec.Optimizer(model, TX)
    steps(model, optimizer, models.stream(3, 100, samples=8)[0])
    save(tmp_path, model, optimizer)
    plain = models.Ranker(120, "adam")
    with pytest.raises(CheckpointError, match="has vocabularies '"):
        restore(plain, tmp_path)


def test_a_plain_checkpoint_has_no_vocabularies(tmp_path):
    plain = models.Ranker(120, "adam")
    save(tmp_path, plain, jaxrec.Optimizer(plain, TX))
    with pytest.raises(CheckpointError, match="lacks the model's vocabularies"):
        restore(make_model(SETTINGS["store"]), tmp_path)


LEFT = {
    "a table without its vocabulary": (("item", "item_wide"), "adam", {"query"}),
    "another optimizer": (NAMES, "sgd", set()),
    "another optimizer, with records of the other": (NAMES, "sgd", set(NAMES)),
}


@pytest.mark.parametrize(("names", "optimizer", "left"), LEFT.values(), ids=LEFT)
def test_a_part_is_restored_by_id(tmp_path, names, optimizer, left):
    """A table comes with its vocabulary and its row store, or stays as it is."""
    settings = SETTINGS["store"] if left == set(NAMES) else Dynamic()
    batches, _ = models.stream(12, 400, samples=8)
    model = make_model(settings)
    steps(model, jaxrec.Optimizer(model, TX), batches)
    save(tmp_path, model, jaxrec.Optimizer(model, TX))

    other = make(lambda: models.Ranker(120, optimizer), dict.fromkeys(names, settings))
    tables = {"item": other.embeddings, "query": other.embeddings, "item_wide": other.wide}
    before = {name: np.asarray(of.table(name)) for name, of in tables.items()}
    differences = restore(other, tmp_path, jaxrec.Optimizer(other, TX), partial=True).differences
    assert {each.name for each in differences if each.kind == "table"} == left
    for name, of in tables.items():
        if name in left:
            np.testing.assert_array_equal(of.table(name), before[name])
            continue
        found, wanted = rows_by_id(other, name), rows_by_id(model, name)
        assert found.keys() == wanted.keys()
        for i, (row, *_) in wanted.items():
            np.testing.assert_array_equal(found[i][0], row)
    np.testing.assert_array_equal(other.embeddings.table("age"), model.embeddings.table("age"))
    more, _ = models.stream(4, 120, samples=8, seed=1)
    if names == NAMES:
        assert np.isfinite(steps(other, jaxrec.Optimizer(other, TX), more)).all()
