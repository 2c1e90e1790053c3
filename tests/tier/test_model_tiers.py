"""Models that get open vocabularies, and those that cannot."""

from __future__ import annotations

import numpy as np
import pytest
from flax import nnx

import jaxrec
from jaxrec.tier import Dynamic, lfu, make, shared
from jaxrec.tier.planning.tier import tier_of
from jaxrec.tier.store import TierStore
from jaxrec.tier.stores.memory_store import MemoryStore
from tests.tier import models

config = jaxrec.EmbeddingBagConfig


class Two(nnx.Module):
    """Two collections of some tables."""

    def __init__(self, first, second=()):
        rngs = nnx.Rngs(0)
        self.first = jaxrec.EmbeddingBagCollection(list(first), rngs=rngs)
        if second:
            self.second = jaxrec.EmbeddingBagCollection(list(second), rngs=rngs)


def vocabularies(model) -> list[tuple[str, tuple[str, ...], int]]:
    return [
        (each.name, tuple(sorted(each.features)), len(each.tables))
        for each in tier_of(model).vocabularies
    ]


def test_tables_that_share_features_share_rows():
    settings = Dynamic()
    model = make(
        lambda: models.Ranker(66, "sgd"), dict.fromkeys(("item", "query", "item_wide"), settings)
    )
    assert vocabularies(model) == [
        ("item+item_wide", ("item",), 2),
        ("query", ("context", "query"), 1),
    ]
    for collection, features in (
        (model.embeddings, ("context", "item", "query")),
        (model.wide, ("item",)),
    ):
        store = collection.tables.get_value()
        assert isinstance(store, TierStore)
        assert store.features == features
        assert store.tier is tier_of(model)


def test_features_connect_tables():
    """``a`` and ``c`` share no feature, but each shares one with ``b``."""
    tables = [
        config("a", 20, 4, ["f"]),
        config("c", 20, 4, ["h"]),
        config("b", 20, 4, ["f", "h"]),
        config("d", 30, 4, ["i"]),
    ]
    model = make(Two(tables), dict.fromkeys("abcd", Dynamic()))
    parts = {frozenset(name.split("+")): (f, n) for name, f, n in vocabularies(model)}
    assert parts == {frozenset("abc"): (("f", "h"), 3), frozenset("d"): (("i",), 1)}


def test_a_name_means_tables_of_all_collections():
    model = make(Two([config("a", 20, 4, ["f"])], [config("a", 20, 8, ["f"])]), {"a": Dynamic()})
    assert vocabularies(model) == [("a", ("f",), 2)]


def test_a_model_is_changed_in_place():
    model = Two([config("a", 20, 4), config("b", 20, 4)], [config("c", 20, 4)])
    assert make(model, {"a": Dynamic()}) is model
    assert model.first.tables.get_value().features == ("a",)
    assert not isinstance(model.second.tables.get_value(), TierStore)


def test_plain_tables_stay_as_they_are():
    before = models.Ranker(66, "adam")
    model = make(lambda: models.Ranker(66, "adam"), {"query": Dynamic()})
    for name in ("item", "query", "age"):
        expected = np.array(before.embeddings.table(name))
        if name == "query":
            expected[0] = 0  # the row of unknown ids
        np.testing.assert_array_equal(model.embeddings.table(name), expected)


def test_a_model_without_vocabulary_has_no_tier():
    assert tier_of(Two([config("a", 20, 4)])) is None


def test_equal_urls_are_two_stores():
    model = make(
        Two([config("a", 20, 4), config("b", 20, 4)]),
        dict.fromkeys("ab", Dynamic(store="memory://")),
    )
    first, second = [each.transfer.store for each in tier_of(model).vocabularies]
    assert isinstance(first, MemoryStore)
    assert first is not second


def test_records_of_a_store_hold_all_tables_that_share_rows():
    def make_tables():
        return Two([config("a", 20, 4, ["f"])], [config("b", 20, 3, ["f"])])

    model = make(make_tables, dict.fromkeys("ab", Dynamic(store="memory://")))
    (vocabulary,) = tier_of(model).vocabularies
    # The default optimizer keeps no state.
    assert vocabulary.transfer.layout.width >= 4 * (4 + 3)
    widths = [width for _, name, width, _ in vocabulary.transfer.layout.leaves if name == "rows"]
    assert widths == [4, 3]


ONE = [config("a", 20, 4)]
PAIR = [config("a", 20, 4, ["f"]), config("b", 20, 4, ["f"])]
STORE = MemoryStore()
ERRORS = {
    "unknown_table": (ONE, {"b": Dynamic()}, "the model has no table 'b'; it has 'a'"),
    "no_table": (ONE, {}, r"tables names no table; give \{'item': jaxrec.tier.Dynamic\(\)\}"),
    "half_of_a_feature": (
        PAIR,
        {"b": Dynamic()},
        "feature 'f' is read by table 'b', which has an open vocabulary, and by 'a', which has "
        "not; give both the same settings, or each a feature of its own",
    ),
    "other_settings": (
        PAIR,
        {"a": Dynamic(), "b": Dynamic(eviction=lfu())},
        "tables 'a' and 'b' both read feature 'f', so that an id has the same row in both, but "
        "their settings differ; give both the same",
    ),
    "other_rows": (
        [config("a", 20, 4, ["f"]), config("b", 30, 4, ["f"])],
        dict.fromkeys("ab", Dynamic()),
        "tables 'a' and 'b' both read feature 'f', .* but they have 20 and 30 rows; give both "
        "the same num_embeddings",
    ),
    "no_room": (
        ONE,
        {"a": Dynamic(unknown=shared(20))},
        "table a: num_embeddings is 20, but 20 rows are kept for unknown ids",
    ),
    "unknown_store": (ONE, {"a": Dynamic(store="disk://")}, "no row store has the URL 'disk://'"),
    "one_store_for_two": (
        [config("a", 20, 4), config("b", 20, 4)],
        dict.fromkeys("ab", Dynamic(store=STORE)),
        "tables .a. and .b. have the same store .*; give each table a store of its own",
    ),
}


@pytest.mark.parametrize(("tables", "settings", "message"), ERRORS.values(), ids=ERRORS)
def test_errors(tables, settings, message):
    model = Two(tables)
    with pytest.raises(ValueError, match=message):
        make(model, settings)
    # The model is as before.
    assert tier_of(model) is None


def test_a_model_gets_vocabularies_once():
    model = make(Two([config("a", 20, 4), config("b", 20, 4)]), {"a": Dynamic()})
    with pytest.raises(ValueError, match="the model has open vocabularies already; name all their"):
        make(model, {"b": Dynamic()})


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("model", "tables", "message"),
    [
        (3, {"a": Dynamic()}, "a model is an nnx.Module, or a function that makes one, got 3"),
        (lambda: Two(ONE), ["a"], r"tables are settings by name, such as .*, got \['a'\]"),
        (lambda: Two(ONE), {"a": lfu()}, r"tables are settings by name, .*, got \{'a': Lfu\(\)\}"),
        (lambda: Two(ONE), {1: Dynamic()}, "tables are settings by name"),
    ],
    ids=["model", "list", "policy", "number"],
)
def test_other_types(model, tables, message):
    with pytest.raises(TypeError, match=message):
        make(model, tables)
