"""Multi-probe maps against recorded streams, and against ids that come one after the other."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrec.ragged import join_int64, split_int64
from jaxrec.tier.managed_collision import (
    LRUEviction,
    MultiProbeConfig,
    SingleTTLEviction,
)
from tests import golden
from tests.fuzz import max_examples
from tests.tier.managed_collision.oracle import MultiProbe, streams

CASES = [
    name
    for name, _ in golden.cases("zch")
    if name.startswith("mpzch") and name != "mpzch_murmur_hash3"
]
EVICTIONS = {"none": lambda ttl: None, "single_ttl": SingleTTLEviction, "lru": LRUEviction}


def words(ids):
    return jnp.asarray(split_int64(np.asarray(ids, np.int64)))


def update(probed, ids, is_valid, expiry=None, hour=None, rolls=None):
    return probed.update(ids, is_valid, expiry, hour, rolls)


def advance(*arguments):
    """The result of an update, and what evaluation then gives for the batch."""
    result = update(*arguments)
    return *result, result[0].remap(arguments[1])


MODES = {"eager": advance, "jit": jax.jit(advance)}


@pytest.mark.parametrize("advance", MODES.values(), ids=MODES)
@pytest.mark.parametrize("name", CASES)
def test_golden(name, advance):
    meta, arrays = dict(golden.cases("zch"))[name]["meta"], golden.load("zch", name)
    probed = MultiProbeConfig(
        meta["total_num_buckets"], meta["max_probe"], EVICTIONS[meta["policy"]](meta["ttl"])
    ).init(meta["zch_size"])
    for batch in range(12):
        ids, hour = arrays[f"ids_{batch}"], jnp.int32(arrays[f"hour_{batch}"])
        hours = (jnp.full(ids.size, hour + meta["ttl"]), hour) if meta["policy"] != "none" else ()
        probed, slots, evicted, _ = advance(probed, words(ids), jnp.ones(ids.size, bool), *hours)
        np.testing.assert_array_equal(slots, arrays[f"remapped_{batch}"])
        identities = join_int64(np.asarray(probed.identities))
        np.testing.assert_array_equal(identities, arrays[f"identities_{batch}"])
        if hours:
            np.testing.assert_array_equal(probed.metadata, arrays[f"metadata_{batch}"])
        expected = arrays[f"evicted_{batch}"]
        assert int(evicted.count) == expected.size
        np.testing.assert_array_equal(evicted.slots[: expected.size], expected)
    slots = probed.remap(words(arrays["ids_readonly"]))
    np.testing.assert_array_equal(slots, arrays["remapped_readonly"])


CAPACITY, SLOTS = 16, 12
CONFIGS = {
    "none": MultiProbeConfig(1, 3),
    "whole-bucket": MultiProbeConfig(2, 40, SingleTTLEviction(0)),
    "one-probe": MultiProbeConfig(1, 1, SingleTTLEviction(1), disable_fallback=True),
    "lru": MultiProbeConfig(1, 20, LRUEviction(1)),
    "lru-short": MultiProbeConfig(3, 3, LRUEviction(0), disable_fallback=True),
    "opt-in": MultiProbeConfig(
        1, 4, SingleTTLEviction(1), opt_in_prob=50, percent_reserved_slots=25
    ),
    "opt-in-lru": MultiProbeConfig(
        2,
        4,
        LRUEviction(0),
        opt_in_prob=50,
        percent_reserved_slots=20,
        disable_fallback=True,
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_oracle(name):
    config = CONFIGS[name]
    is_opt_in, evicts = config.opt_in_prob is not None, config.eviction is not None
    numbers = st.lists(st.integers(0, 99), min_size=CAPACITY, max_size=CAPACITY)

    @settings(max_examples=max_examples(12))
    @given(streams(6, CAPACITY), numbers, numbers)
    def check(stream, rolls, hours):
        probed, oracle = config.init(SLOTS), MultiProbe(config, SLOTS)
        for batch, ids in enumerate(stream):
            is_valid = np.zeros(CAPACITY, bool)
            is_valid[np.linspace(0, CAPACITY - 1, len(ids)).astype(int)] = True
            values = np.full(CAPACITY, 77, np.int64)
            values[is_valid] = ids
            rolls = rolls[1:] + rolls[:1]
            hour = batch + hours[batch] % 2
            expiry = np.array([hour + each % 3 for each in hours], np.int32)
            arguments = [jnp.asarray(expiry), jnp.int32(hour)] if evicts else [None, None]
            arguments.append(jnp.array(rolls, jnp.int32) if is_opt_in else None)
            probed, slots, evicted, read = MODES["jit"](
                probed, words(values), jnp.asarray(is_valid), *arguments
            )
            expected, taken = [], []
            for position in np.flatnonzero(is_valid):
                times = (int(expiry[position]), hour) if evicts else (None, None)
                slot, old = oracle.add(int(values[position]), *times, rolls[position])
                expected.append(slot)
                taken += [] if old is None else [old]
            assert np.asarray(slots)[is_valid].tolist() == expected
            assert evicted.slots[: int(evicted.count)].tolist() == taken
            new_ids = join_int64(np.asarray(evicted.ids))[: len(taken)].tolist()
            assert new_ids == [oracle.identities[slot] for slot in taken]
            assert join_int64(np.asarray(probed.identities)).tolist() == oracle.identities
            if evicts:
                assert probed.metadata.tolist() == oracle.metadata
            assert read[is_valid].tolist() == [oracle.remap(id) for id in ids]

    check()


def test_many_new_ids_that_displace_each_other():
    config = MultiProbeConfig(1, 100, SingleTTLEviction(0))
    probed, oracle = config.init(512), MultiProbe(config, 512)
    rng = np.random.default_rng(0)
    for hour in range(3):
        ids = rng.integers(-(2**63), 2**63 - 1, 500)
        expiry = jnp.full(500, hour, jnp.int32)
        probed, slots, _ = probed.update(words(ids), jnp.ones(500, bool), expiry, jnp.int32(hour))
        assert slots.tolist() == [oracle.add(int(id), hour, hour)[0] for id in ids]


def test_ranges_of_ids_as_buckets():
    config = MultiProbeConfig(4, 4, input_hash_size=2**62 + 1)
    probed, oracle = config.init(16), MultiProbe(config, 16)
    size = -(-(2**62 + 1) // 4)
    ids = [0, size - 1, size, 2 * size - 1, 2 * size, 3 * size - 1, 3 * size, 2**62]
    _, slots, _ = probed.update(words(ids), jnp.ones(8, bool))
    assert slots.tolist() == [oracle.add(id)[0] for id in ids]


def test_the_id_of_empty_slots_gets_none():
    probed = MultiProbeConfig(1, 2, disable_fallback=True).init(4)
    probed, slots, _ = probed.update(words([-1, 3]), jnp.ones(2, bool))
    assert int(slots[0]) == -1
    assert int(probed.open_slots) == 3


def test_empty_batches():
    none = words(np.zeros(0, np.int64))
    probed, slots, evicted = MultiProbeConfig().init(4).update(none, jnp.zeros(0, bool))
    assert (slots.shape, evicted.slots.shape, probed.remap(none).shape) == ((0,), (0,), (0,))


def test_hours_are_needed():
    probed = MultiProbeConfig(eviction=SingleTTLEviction(1)).init(4)
    with pytest.raises(ValueError, match="needs the hours"):
        probed.update(words([1]), jnp.ones(1, bool))


@pytest.mark.parametrize(
    ("settings", "slots"),
    [
        ({"max_probe": 0}, 4),
        ({"total_num_buckets": 3}, 4),
        ({"opt_in_prob": 50}, 4),
        ({"percent_reserved_slots": 50}, 4),
        ({"opt_in_prob": 50, "percent_reserved_slots": 10}, 4),
        ({"opt_in_prob": 0, "percent_reserved_slots": 50}, 4),
        ({"input_hash_size": -1}, 4),
        ({}, 0),
    ],
)
def test_wrong_settings(settings, slots):
    with pytest.raises(ValueError, match=r"must|divide|together"):
        MultiProbeConfig(**settings).init(slots)
