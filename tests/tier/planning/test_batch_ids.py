"""Batches that are taken apart and put together with other ids."""

from __future__ import annotations

import collections

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrec.ragged import KeyedJaggedArray
from jaxrec.tier.planning.batch_ids import HostBatch, fingerprint
from tests.fuzz import max_examples

Labelled = collections.namedtuple("Labelled", "features label")


def make_features(data, id_bits=64, **options) -> KeyedJaggedArray:
    return KeyedJaggedArray.from_lists(data, id_bits=id_bits, **options)


BAGS = st.lists(st.lists(st.integers(-(2**63), 2**63 - 1).filter(lambda i: i != -1), max_size=4))


@settings(max_examples=max_examples(60))
@given(st.lists(BAGS, min_size=1, max_size=3), st.integers(0, 4))
def test_segments(columns, padding):
    bags = max(map(len, columns))
    data = {f"k{i}": [*column, *[[]] * (bags - len(column))] for i, column in enumerate(columns)}
    capacities = {key: sum(map(len, of_key)) + padding for key, of_key in data.items()}
    host = HostBatch.of([make_features(data, capacities=capacities), "rest"])
    assert [segment.key for segment in host.segments] == list(data)
    for segment in host.segments:
        flat = [i for bag in data[segment.key] for i in bag]
        assert segment.ids.tolist() == flat
        assert segment.ids.dtype == np.int64
        assert segment.lengths.tolist() == [len(bag) for bag in data[segment.key]]
        position = 0
        for sample, bag in enumerate(data[segment.key]):
            for _ in bag:
                expected = f"feature {segment.key!r}, sample {sample}"
                assert segment.describe(position) == expected
                position += 1


@settings(max_examples=max_examples(40))
@given(BAGS, BAGS)
def test_rows_take_the_place_of_ids(first, second):
    batch = {"x": Labelled(make_features({"a": first}), 3), "y": [make_features({"a": second})]}
    host = HostBatch.of(batch)
    rows = [np.arange(segment.ids.size, dtype=np.int32) + 10 for segment in host.segments]
    result = host.with_rows(rows)
    assert isinstance(result["x"], Labelled)
    assert result["x"].label == 3
    for features, bags in ((result["x"].features, first), (result["y"][0], second)):
        flat = [row for bag in features["a"].to_lists() for row in bag]
        assert flat == list(range(10, 10 + sum(map(len, bags))))
        assert features["a"].lengths.tolist() == [len(bag) for bag in bags]
        assert features.values.dtype == np.int32
        assert features.slot_keys == ("a",)
    # The batch is as before.
    assert batch["x"].features["a"].to_lists() == first


def test_ids_of_plain_tables_stay():
    features = make_features({"a": [[2**60]], "b": [[2**31 - 1]]})
    result = HostBatch.of(features).with_rows([np.array([5], np.int32), None])
    assert result["a"].to_lists() == [[5]]
    assert result["b"].to_lists() == [[2**31 - 1]]
    assert result.slot_keys == ("a",)


@pytest.mark.parametrize("bad", [2**31, 2**60, -5])
def test_ids_of_plain_tables_fit_32_bits(bad):
    features = make_features({"a": [[], [3, bad], [bad]]})
    message = (
        f"feature 'a', sample 1: id {bad} is outside every table of fixed size; "
        r"hash .*hash_ids.* or give its tables an open vocabulary with jaxrec.tier.Dynamic\(\)"
    )
    with pytest.raises(ValueError, match=message):
        HostBatch.of(features).with_rows([None])


def test_ids_of_32_bits_become_64():
    host = HostBatch.of(make_features({"a": [[7], [2**31 - 1]]}, 32))
    assert host.segments[0].ids.dtype == np.int64
    assert host.segments[0].ids.tolist() == [7, 2**31 - 1]


def test_weights_stay():
    features = KeyedJaggedArray.from_lists(
        {"a": [[2**40, 5]]}, weights={"a": [[0.5, 2.0]]}, id_bits=64
    )
    result = HostBatch.of(features).with_rows([np.array([1, 2], np.int32)])
    assert result["a"].weights[:2].tolist() == [0.5, 2.0]


@pytest.mark.parametrize("batch", [{"labels": np.zeros(3)}, (), 5], ids=["dict", "empty", "number"])
def test_batches_without_ids(batch):
    kind = type(batch).__name__
    message = rf"a batch is a pytree with a KeyedJaggedArray, such as .*, got {kind}"
    with pytest.raises(TypeError, match=message):
        HostBatch.of(batch)


def test_batches_on_a_device():
    features = make_features({"a": [[7]]}, 32)
    on_device = KeyedJaggedArray(
        jnp.asarray(features.values),
        jnp.asarray(features.lengths),
        keys=features.keys,
        capacities=features.capacities,
    )
    with pytest.raises(TypeError, match=r"the batch is on a device; give .* host batches"):
        HostBatch.of((on_device, 1))


IDS = st.lists(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=6), min_size=1, max_size=3)


@settings(max_examples=max_examples(200))
@given(IDS, IDS)
def test_fingerprints_tell_batches_apart(first, second):
    marks = [fingerprint([np.array(ids, np.int64) for ids in batch]) for batch in (first, second)]
    # The order of ids changes no row.
    if [sorted(ids) for ids in first] == [sorted(ids) for ids in second]:
        assert marks[0] == marks[1]
    elif len(first) == len(second) and [i for x in first for i in x] != [
        i for x in second for i in x
    ]:
        assert marks[0] != marks[1]
    assert all(0 <= number < 2**63 for number in marks[0])
