"""Batches come with the ids of those after them."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxrec
from jaxrec.tier import Cached, make
from jaxrec.tier.planning.batch_ids import BatchIds
from jaxrec.tier.planning.batch_order import foresee
from jaxrec.tier.planning.tier import tier_of
from tests.fuzz import max_examples


@functools.cache
def reader():
    tables = [jaxrec.EmbeddingBagConfig(name, 100, 4) for name in ("a", "b")]
    model = make(
        lambda: jaxrec.EmbeddingBagCollection(tables, rngs=nnx.Rngs(0)),
        dict.fromkeys("ab", Cached(50)),
    )
    vocabularies = tier_of(model).vocabularies
    return lambda batch: BatchIds.of(batch, vocabularies, None)


def make_batch(a: list[int], b: list[int]):
    return jaxrec.KeyedJaggedArray.from_lists({"a": [a], "b": [b]})


IDS = st.lists(st.integers(0, 99), max_size=5)


@settings(max_examples=max_examples(20), deadline=None)
@given(st.lists(st.tuples(IDS, IDS), max_size=8), st.integers(0, 5))
def test_the_ids_of_the_next_batches(lists, num_ahead: int):
    batches = [make_batch(*each) for each in lists]
    read = []

    def source():
        for batch in batches:
            read.append(batch)
            yield batch

    seen = 0
    for number, foreseen in enumerate(foresee(source(), reader(), num_ahead)):
        assert foreseen.batch is batches[number]
        assert len(read) == min(number + 1 + num_ahead, len(batches))
        assert [ids.tolist() for ids in foreseen.ids.ids] == [list(x) for x in lists[number]]
        following = lists[number + 1 : number + 1 + num_ahead]
        found = [[ids.tolist() for ids in of_batch] for of_batch in foreseen.coming]
        assert found == [[list(dict.fromkeys(ids)) for ids in each] for each in following]
        seen += 1
    assert seen == len(batches)


def test_an_error_comes_after_the_batches_before_it():
    batches = [make_batch([1], []), make_batch([2], []), make_batch([100], []), make_batch([3], [])]
    foreseen = foresee(batches, reader(), 3)
    assert [next(foreseen).batch for _ in range(2)] == batches[:2]
    with pytest.raises(ValueError, match="id 100 is not in table a"):
        next(foreseen)


@pytest.mark.parametrize("taken", [0, 1])
def test_the_source_is_closed(taken: int):
    closed = []

    def source():
        try:
            while True:
                yield make_batch([1], [])
        finally:
            closed.append(True)

    foreseen = foresee(source(), reader(), 2)
    for _ in range(taken):
        next(foreseen)
    foreseen.close()
    assert closed == [True] * taken  # a generator that never ran has nothing to close


def test_a_single_batch_is_refused():
    with pytest.raises(TypeError, match="batches must be an iterable of batches"):
        next(foresee(make_batch([1], [1]), reader(), 2))


def test_ids_are_int64():
    (foreseen,) = foresee([make_batch([1], [2])], reader(), 1)
    assert all(ids.dtype == np.int64 for ids in foreseen.ids.ids)
