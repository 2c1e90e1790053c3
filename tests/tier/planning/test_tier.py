"""Several vocabularies of a model, and updates that take several batches."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from flax import nnx

import jaxrec
from jaxrec.tier import Dynamic, ahead, lfu, make, zeros
from jaxrec.tier.planning.batch_ids import BatchIds
from jaxrec.tier.planning.batch_order import ForeseenBatch
from jaxrec.tier.planning.model_tables import collection_at, collections_of
from jaxrec.tier.planning.tier import tier_of
from jaxrec.train import RoutedSteps
from tests.tier import models, sums

ROWS = {"item": 1 + 40, "query": 1 + 12}


def make_features(item, query=(), context=()):
    """Eight samples with an age and ids of their own."""
    data = {"item": item, "query": query, "context": context}
    data = {key: [[i] for i in ids] + [[]] * (8 - len(ids)) for key, ids in data.items()}
    capacities = dict.fromkeys((*data, "age"), 8)
    return jaxrec.KeyedJaggedArray.from_lists(
        {**data, "age": [[1]] * 8}, id_bits=64, capacities=capacities
    )


@pytest.fixture
def model():
    settings = Dynamic(eviction=lfu(), store="memory://")
    return make(
        lambda: models.Ranker(13, "sgd"), dict.fromkeys(("item", "query", "item_wide"), settings)
    )


def state_of(tier) -> dict[str, dict[str, np.ndarray]]:
    return {each.name: each.vocabulary.state() for each in tier.vocabularies}


def test_a_vocabulary_without_room_leaves_the_others_unharmed(model):
    tier = tier_of(model)
    list(ahead(model, [make_features([1, 2], [3])]))
    before, totals = state_of(tier), tier.statistics()
    full = make_features([5, 6], range(10, 18), range(20, 28))
    message = (
        "feature 'context', sample 4: no row of table query is left for id 24: the batch has 16 "
        "new ids, and 12 of the 12 rows"
    )
    with pytest.raises(ValueError, match=message):
        tier.plan(ForeseenBatch(full, BatchIds.of(full, tier.vocabularies, None)), held=0)
    for name, state in state_of(tier).items():
        for key, array in state.items():
            np.testing.assert_array_equal(array, before[name][key], err_msg=f"{name} {key}")
    assert tier.statistics() == totals


def test_features_of_one_table_share_rows(model):
    (batch,) = ahead(model, [make_features([7], [7, 8], [8, 7])])
    rows = {key: [bag[0] for bag in batch[key].to_lists() if bag] for key in batch.keys}
    assert rows["query"] == rows["context"][::-1]
    assert batch["age"].to_lists() == [[1]] * 8
    assert set(batch.slot_keys) == {"item", "query", "context"}


def test_statistics(model):
    tier = tier_of(model)
    assert set(tier.statistics()) == {"item+item_wide", "query"}
    list(ahead(model, [make_features([1, 2], [3], [3]), make_features([1])]))
    items, queries = tier.statistics()["item+item_wide"], tier.statistics()["query"]
    assert (items["lookups"], items["hits"], items["resident"]) == (3, 1, 2)
    assert (queries["lookups"], queries["hits"], queries["resident"]) == (2, 0, 1)
    assert queries["load"] == 1 / 12


def test_features_are_those_of_open_tables(model):
    assert set(tier_of(model).features) == {"item", "query", "context"}


def test_a_batch_may_lack_features_of_tables_that_it_does_not_read():
    config = jaxrec.EmbeddingBagConfig
    tables = [config("a", 20, 4), config("b", 20, 4)]
    model = make(
        lambda: jaxrec.EmbeddingBagCollection(tables, rngs=nnx.Rngs(0)),
        dict.fromkeys("ab", Dynamic()),
    )
    features = jaxrec.KeyedJaggedArray.from_lists({"a": [[2**40]]}, id_bits=64)
    (batch,) = ahead(model, [features])
    assert batch.slot_keys == ("a",)
    assert tier_of(model).statistics()["b"]["lookups"] == 0


# Updates of several batches.


def step_of_part(model, optimizer, batches):
    """One update with the sum of the gradients of several batches; returns all outputs."""

    def loss_fn(model):
        outputs = [model(features) for features, _ in batches]
        return sum(
            (each * weights[:, None]).sum()
            for each, (_, weights) in zip(outputs, batches, strict=True)
        ), outputs

    (_, outputs), gradients = jaxrec.value_and_grad(loss_fn, has_aux=True)(model)
    optimizer.update(model, gradients)
    return outputs


def parts(batches, count):
    batches = iter(batches)
    while part := tuple(itertools.islice(batches, count)):
        yield part


def run_parts(devices: int, look_ahead: int, count: int, settings: Dynamic, steps: int = 24):
    """Outputs of routed steps of ``count`` batches, and those of the oracle."""
    mesh = sums.make_mesh(devices)
    batches = sums.make_stream(steps, 150)
    model = sums.make_sums(130, settings, mesh)
    steps = RoutedSteps(
        step_of_part,
        lambda model, part: [model(features) for features, _ in part],
        model,
        sums.make_optimizer(model),
    )
    place = sums.place_on(mesh)
    taken = ahead(model, batches, look_ahead, place=place)
    found = [output for _, outputs in steps(parts(taken, count)) for output in outputs]
    oracle = sums.SumsOracle(130, settings, held=look_ahead + 2)
    expected = []
    for part in parts(batches, count):
        before = []
        for batch in part:
            oracle.admit(batch)
            # An id that a later batch of the part brings had no row in this one.
            residents = dict(oracle.vocabulary.residents)
            before.append(residents)
        last = oracle.vocabulary.residents
        for batch, residents in zip(part, before, strict=True):
            oracle.vocabulary.residents = residents
            expected.append(oracle.sums(batch))
        for batch, residents in zip(part, before, strict=True):
            oracle.vocabulary.residents = residents
            oracle.update(batch)
        oracle.vocabulary.residents = last
    return found, expected


def assert_same(found, expected):
    for number, (output, wanted) in enumerate(zip(found, expected, strict=True), 1):
        np.testing.assert_allclose(output, wanted, atol=1e-4, err_msg=f"batch {number}")


@pytest.mark.parametrize("count", [2, 3])
def test_updates_of_several_batches(count):
    assert_same(*run_parts(1, 4, count, Dynamic(admit_after=2, unknown=zeros())))


def test_routed_updates_of_several_batches():
    assert_same(*run_parts(2, 4, 2, Dynamic(), steps=16))


def test_zeros_stay_zeros_for_routed_updates_of_several_batches():
    assert_same(*run_parts(2, 4, 2, Dynamic(admit_after=2, unknown=zeros()), steps=16))


class _Nested(nnx.Module):
    """Collections in the module itself, in a module within it, and in a list."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        first, second, third = (
            jaxrec.EmbeddingBagCollection([jaxrec.EmbeddingBagConfig(name, 20, 4)], rngs=rngs)
            for name in ("a", "b", "c")
        )
        self.first = first
        self.tower = nnx.Module()
        self.tower.second = second
        self.others = nnx.List([third])


def test_collections_by_path():
    model = make(_Nested, dict.fromkeys("abc", Dynamic()))
    collections = collections_of(model)
    assert set(collections) == {"first", "tower/second", "others/0"}
    for path, collection in collections.items():
        assert collection_at(model, path) is collection
    assert collection_at(model.first, "") is model.first
    with pytest.raises(KeyError):
        collection_at(model, "tower/first")
