"""Rows of the coming batches stay; compared with Belady's rule in plain Python."""

from __future__ import annotations

import collections

import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxrec
from jaxrec.ragged import KeyedJaggedArray
from jaxrec.tier import Cached, Dynamic, MissCounter, ahead, farthest, lfu, lru, make, ttl
from jaxrec.tier.ids.id_map import IdMap
from jaxrec.tier.planning.tier import tier_of
from jaxrec.tier.vocabulary.next_use import spare_coming
from jaxrec.tier.vocabulary.vocabulary import Vocabulary
from jaxrec.train.checkpoint import restore, save
from tests.fuzz import max_examples
from tests.tier import models
from tests.tier.vocabulary.test_cached import NAMES, make_stream, make_whole
from tests.tier.vocabulary.test_vocabulary import CHOICES, SEEDS, SIZES, Clock, Stream, check_batch
from tests.tier.vocabulary_oracle import POLICIES, Oracle

IDS = st.lists(st.integers(0, 12), max_size=5)
ROWS = st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=1, max_size=12)


@settings(max_examples=max_examples(200))
@given(ROWS, st.lists(IDS, min_size=1, max_size=5), st.data())
def test_rows_of_farthest_next_use(rows, coming, data):
    """Row ``i`` is that of id ``12 - i``."""
    keys, eligible = map(list, zip(*rows, strict=True))
    least = data.draw(st.integers(0, sum(eligible)))
    most = data.draw(st.integers(least, sum(eligible)))
    ids = IdMap(len(rows))
    ids.insert(12 - np.arange(len(rows)), np.arange(len(rows), dtype=np.int32))
    victims = spare_coming(
        np.array(keys, np.uint64),
        np.array(eligible),
        least,
        most,
        ids,
        [np.array(each, np.int64) for each in coming],
    )
    next_use = {}
    for number, batch in enumerate(coming):
        for i in batch:
            next_use.setdefault(12 - i, number)
    candidates = [row for row in range(len(rows)) if eligible[row]]
    unused = sorted(set(candidates) - set(next_use), key=lambda row: (keys[row], row))
    used = sorted(set(candidates) & set(next_use), key=lambda row: (-next_use[row], row))
    assert victims.tolist() == unused[:most] + used[: max(0, least - len(unused[:most]))]


@pytest.mark.parametrize("name", ["lru", "lfu_lru", "ttl_batches"])
@settings(max_examples=max_examples(10))
@given(CHOICES, SIZES, SEEDS, st.integers(1, 9))
def test_vocabularies(name: str, choices: dict, num_rows: int, seed: int, window: int):
    clock = Clock()
    otherwise = {"lru": lru, "lfu_lru": jaxrec.tier.lfu_lru, "ttl_batches": lambda: ttl(batches=9)}
    dynamic = Dynamic(eviction=farthest(window, otherwise[name]()), **choices)
    vocabulary = Vocabulary(num_rows, dynamic)
    oracle = Oracle(num_rows, dynamic, POLICIES[name], clock)
    stream = Stream(seed, clock)
    batches = collections.deque((stream.next(), stream.batch) for _ in range(window + 3))
    for _ in range(60):
        ids, number = batches.popleft()
        coming = [each for each, _ in batches]  # more than the policy looks at
        held = int(stream.rng.integers(0, 4))
        check_batch(vocabulary, oracle, ids, number, held, coming, coming[:window])
        batches.append((stream.next(), stream.batch))


def optimal_misses(batches: list[list[int]], room: int) -> int:
    """Misses of Belady's rule: as few rows as needed leave, those of the farthest next use."""
    resident: set[int] = set()
    misses = 0
    for number, ids in enumerate(batches):
        missing = set(ids) - resident
        misses += len(missing)
        place = {}
        for later in range(len(batches) - 1, number, -1):
            place.update(dict.fromkeys(batches[later], later))
        idle = sorted(resident - set(ids), key=lambda i: -place.get(i, len(batches)))
        resident -= set(idle[: max(0, len(resident) + len(missing) - room)])
        resident |= missing
    return misses


@settings(max_examples=max_examples(6), deadline=None)
@given(SEEDS, st.sampled_from([30, 60, 100]))
def test_no_policy_misses_less_often_with_all_batches_in_sight(seed: int, room: int):
    rng = np.random.default_rng(seed)
    batches = [np.unique(rng.zipf(1.3, 20) % 150) for _ in range(60)]
    misses = {}
    for policy in (farthest(len(batches)), lru(), lfu()):
        settings = Cached(room, eviction=policy, evict_fraction=1e-9).vocabulary
        vocabulary = Vocabulary(room, settings)
        for number, ids in enumerate(batches):
            coming = batches[number + 1 :]
            vocabulary.commit(vocabulary.propose(ids, number + 1, 0, None, coming))
        misses[policy] = vocabulary.statistics.summary(len(vocabulary))["new"]
    least = optimal_misses([each.tolist() for each in batches], room)
    assert misses[farthest(len(batches))] == least
    assert min(misses.values()) == least


def make_model():
    tables = dict.fromkeys(NAMES, Cached(200, eviction=farthest(6)))
    return make(lambda: models.Ranker(6000, "rowwise_adagrad"), tables)


def test_the_same_bits_as_whole_tables(tmp_path):
    """A run that is restored in its middle, with batches planned, goes on with the same rows."""
    batches = make_stream(40)
    model, whole = make_model(), make_whole("rowwise_adagrad")
    counter = MissCounter(model)
    optimizer = jaxrec.Optimizer(model, optax.sgd(0.1))
    losses = []
    for number, batch in enumerate(ahead(model, batches, look_ahead=2), 1):
        losses.append(float(models.train_step(model, optimizer, *batch)))
        if number == 20:
            save(tmp_path, model, optimizer, batches=number)
    assert losses == models.train(whole, batches)
    assert counter.misses == dict.fromkeys(NAMES, 0)

    other = make_model()
    optimizer = jaxrec.Optimizer(other, optax.sgd(0.1))
    restore(other, tmp_path, optimizer)
    again = [
        float(models.train_step(other, optimizer, *batch))
        for batch in ahead(other, batches[20:], look_ahead=2)
    ]
    assert again == losses[20:]
    for each, of_other in zip(
        tier_of(model).vocabularies, tier_of(other).vocabularies, strict=True
    ):
        for mine, others in zip(
            each.vocabulary.map.items(), of_other.vocabulary.map.items(), strict=True
        ):
            np.testing.assert_array_equal(mine, others)


def test_it_misses_less_often_than_lru():
    config = jaxrec.EmbeddingBagConfig("query", 6000, 4)
    batches = [
        KeyedJaggedArray.from_dense({"query": models.ids_of(features, "query")[:, None]})
        for features, _ in make_stream(60)
    ]
    misses = {}
    for policy in (farthest(6), lru()):
        model = make(
            lambda: jaxrec.EmbeddingBagCollection([config], rngs=nnx.Rngs(0)),
            {"query": Cached(80, eviction=policy)},
        )
        list(ahead(model, batches, look_ahead=2))
        misses[policy] = tier_of(model).statistics()["query"]["new"]
    assert misses[farthest(6)] < misses[lru()]


def test_an_error_of_a_batch_comes_after_those_before():
    model = make_model()
    bad = jaxrec.KeyedJaggedArray.from_lists({"item": [[6000]], "query": [[]], "context": [[]]})
    batches = [*make_stream(3), (bad, np.zeros(1, np.float32)), *make_stream(3)]
    taken = ahead(model, batches, look_ahead=2)
    assert len([next(taken) for _ in range(3)]) == 3
    with pytest.raises(ValueError, match="id 6000 is not in table item"):
        next(taken)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((0,), ValueError, "farthest: batches is 1 or more, got 0"),
        ((2.0,), TypeError, r"batches.*2\.0"),
        ((True,), TypeError, "farthest: batches is an integer, got True"),
        ((2, "lru"), TypeError, "otherwise.*'?lru"),
        ((2, farthest(3)), TypeError, "otherwise is a policy that looks at the past"),
    ],
    ids=["none", "float", "bool", "name", "itself"],
)
def test_bad_settings(arguments, error, message: str):
    with pytest.raises(error, match=message):
        farthest(*arguments)
