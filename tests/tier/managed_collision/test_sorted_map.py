"""Sorted maps against what TorchRec recorded, and against a Python dictionary."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from jaxrec.ragged import join_int64, split_int64
from jaxrec.tier.managed_collision import (
    AverageThreshold,
    DistanceLFUEvictionPolicy,
    LFUEvictionPolicy,
    LRUEvictionPolicy,
    SortedMapConfig,
)
from tests import golden
from tests.fuzz import max_examples
from tests.tier.managed_collision.oracle import Sorted, streams

INT64_MAX = np.iinfo(np.int64).max
CASES = [name for name, case in golden.cases("zch") if name.startswith("mch")]
ONE_FEATURE = [name for name in CASES if name != "mch_lfu_two_features"]


def words(ids):
    return jnp.asarray(split_int64(np.asarray(ids, np.int64)))


def advance(ids_map, ids, is_valid):
    """The map after a batch, the evicted slots, and the slots of the batch."""
    ids_map, evicted = ids_map.update(ids, is_valid)
    return ids_map, evicted, ids_map.remap(ids)


MODES = {"eager": advance, "jit": jax.jit(advance)}


def policy_of(meta):
    decay = meta.get("decay_exponent", 1.0)
    if meta["policy"] == "lfu":
        return LFUEvictionPolicy()
    if meta["policy"].startswith("lru"):
        return LRUEvictionPolicy(decay)
    return DistanceLFUEvictionPolicy(decay)


def check_state(ids_map, arrays, batch, offset):
    ids = join_int64(np.asarray(ids_map.ids))
    np.testing.assert_array_equal(ids, arrays[f"sorted_raw_ids_{batch}"])
    if f"output_ids_{batch}" in arrays:
        slots = np.asarray(ids_map.slots) + offset
        np.testing.assert_array_equal(slots, arrays[f"output_ids_{batch}"])
        assert int(ids_map.open_slots) == arrays[f"open_slots_{batch}"][0]
    for name, values in ids_map.metadata.items():
        values = np.asarray(values).astype(np.int64)
        # 32 bits write the last slot's 2**63 - 1 as 2**31 - 1.
        values = np.where(values == np.iinfo(np.int32).max, INT64_MAX, values)
        np.testing.assert_array_equal(values, arrays[f"{name}_{batch}"])


@pytest.mark.parametrize("advance", MODES.values(), ids=MODES)
@pytest.mark.parametrize("name", ONE_FEATURE)
def test_golden(name, advance):
    case, arrays = dict(golden.cases("zch"))[name], golden.load("zch", name)
    meta = case["meta"]
    interval, offset = meta["eviction_interval"], meta["output_global_offset"]
    history = int(arrays["ids_0"].size * interval * 1.25)
    config = SortedMapConfig(history, policy_of(meta), interval)
    ids_map = config.init(meta["zch_size"])
    for batch in range(12):
        ids = words(arrays[f"ids_{batch}"])
        ids_map, evicted, slots = advance(ids_map, ids, jnp.ones(ids.shape[0], bool))
        np.testing.assert_array_equal(np.asarray(slots) + offset, arrays[f"remapped_{batch}"])
        check_state(ids_map, arrays, batch, offset)
        expected = arrays[f"evicted_output_ids_{batch}"]
        assert bool(arrays[f"evict_is_none_{batch}"]) == ((batch + 1) % interval != 0)
        assert int(evicted.count) == expected.size
        slots = np.asarray(evicted.slots)
        np.testing.assert_array_equal(slots[: expected.size] + offset, expected)
        assert (slots[expected.size :] == meta["zch_size"]).all()
    remapped = np.asarray(ids_map.remap(words(arrays["ids_eval"]))) + offset
    np.testing.assert_array_equal(remapped, arrays["remapped_eval"])


@pytest.mark.parametrize("advance", MODES.values(), ids=MODES)
def test_golden_two_features(advance):
    name = "mch_lfu_two_features"
    meta, arrays = dict(golden.cases("zch"))[name]["meta"], golden.load("zch", name)
    interval = meta["eviction_interval"]
    first = np.concatenate([arrays["ids_f0_0"], arrays["ids_f1_0"]])
    config = SortedMapConfig(int(first.size * interval * 1.25), eviction_interval=interval)
    ids_map = config.init(meta["zch_size"])
    for batch in range(6):
        parts = [arrays[f"ids_f{feature}_{batch}"] for feature in (0, 1)]
        ids = words(np.concatenate(parts))
        ids_map, _, slots = advance(ids_map, ids, jnp.ones(ids.shape[0], bool))
        expected = [arrays[f"remapped_f{feature}_{batch}"] for feature in (0, 1)]
        np.testing.assert_array_equal(slots, np.concatenate(expected))
        check_state(ids_map, arrays, batch, 0)


def lfu(count, last, iteration):
    return count


def lru(count, last, iteration):
    return -(iteration - last + 1)


def distance_lfu(count, last, iteration):
    return np.float32(count) / np.float32(iteration - last + 1)


def above_average(count, counts):
    return count > np.float32(np.mean(counts))


CAPACITY, SLOTS = 16, 9
ORACLES = {
    "lfu": (LFUEvictionPolicy(), lfu, None, 1, 64),
    "lfu-interval": (LFUEvictionPolicy(), lfu, None, 2, 24),  # a history that is too short
    "lru": (LRUEvictionPolicy(), lru, None, 1, 64),
    "distance": (DistanceLFUEvictionPolicy(), distance_lfu, None, 3, 64),
    "average": (LFUEvictionPolicy(AverageThreshold()), lfu, above_average, 1, 64),
}


def padded(ids):
    """A batch of ids between lines of padding, which hold ids too."""
    is_valid = np.zeros(CAPACITY, bool)
    is_valid[np.linspace(0, CAPACITY - 1, len(ids)).astype(int)] = True
    assert is_valid.sum() == len(ids)
    values = np.full(CAPACITY, 77, np.int64)
    values[is_valid] = ids
    return words(values), jnp.asarray(is_valid)


@pytest.mark.every_case
@pytest.mark.parametrize("name", ORACLES)
def test_oracle(name):
    policy, score, admits, interval, history = ORACLES[name]

    @settings(max_examples=max_examples(12))
    @given(streams(6, CAPACITY))
    def check(stream):
        ids_map = SortedMapConfig(history, policy, interval).init(SLOTS)
        oracle = Sorted(SLOTS, interval, history, score, admits)
        for ids in stream:
            batch, is_valid = padded(ids)
            ids_map, evicted, slots = MODES["jit"](ids_map, batch, is_valid)
            expected = oracle.add(ids)
            assert evicted.slots[: int(evicted.count)].tolist() == expected
            new_ids = join_int64(np.asarray(evicted.ids))[: len(expected)].tolist()
            assert [oracle.remap(id) for id in new_ids] == expected
            slots = np.asarray(slots)[np.asarray(is_valid)]
            assert slots.tolist() == [oracle.remap(id) for id in ids]
            assert int(ids_map.open_slots) == SLOTS - 1 - len(oracle.entries)

    check()


def test_the_id_of_empty_slots_is_unknown():
    ids, is_valid = padded([INT64_MAX] * 3 + [INT64_MAX - 1])
    ids_map, evicted = SortedMapConfig(8).init(4).update(ids, is_valid)
    assert evicted.slots.tolist() == [2, 4, 4]
    assert ids_map.remap(words([INT64_MAX, INT64_MAX - 1])).tolist() == [3, 2]


def test_empty_batches_and_small_maps():
    none = words(np.zeros(0, np.int64))
    for slots in (1, 2):
        ids_map, evicted = SortedMapConfig(4).init(slots).update(none, jnp.zeros(0, bool))
        assert (int(evicted.count), int(ids_map.iteration)) == (0, 1)
        assert ids_map.remap(none).shape == (0,)
        ids_map, evicted = ids_map.update(words([5, 6, 6]), jnp.ones(3, bool))
        assert evicted.slots.tolist() == [0] * (slots - 1)
        assert ids_map.remap(words([5, 6])).tolist() == [slots - 1, 0]


def test_counts_do_not_overflow():
    ids_map = SortedMapConfig(4).init(3)
    ids_map, _ = ids_map.update(words([5]), jnp.ones(1, bool))
    most = np.iinfo(np.int32).max
    ids_map.metadata["counts"] = jnp.array([most - 2, 0, most], jnp.int32)
    for _ in range(2):
        ids_map, _ = ids_map.update(words([5, 5, 5]), jnp.ones(3, bool))
    assert ids_map.metadata["counts"].tolist() == [most - 1, 0, most]


@pytest.mark.parametrize(
    "make",
    [
        lambda: SortedMapConfig(0),
        lambda: SortedMapConfig(8, eviction_interval=0),
        lambda: SortedMapConfig(8).init(0),
    ],
)
def test_wrong_settings(make):
    with pytest.raises(ValueError, match=r"must be|1 slot or more"):
        make()
