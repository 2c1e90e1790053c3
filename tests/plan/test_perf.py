"""Seconds by phase beside dictionaries of them."""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxrec.plan.perf import PHASES, Perf

PERFS = [Perf(1.0, 2.0, 3.0, 4.0, 5.0), Perf(0.5, 0.0, 7.0, 1.0, 0.25)]


def test_phases_have_the_names_of_the_fields():
    fields = [field.name for field in dataclasses.fields(Perf)]
    assert [phase.replace(" ", "_") for phase in PHASES] == fields
    assert Perf(prefetch=2.0).to_dict() == dict.fromkeys(PHASES[:4], 0.0) | {"prefetch": 2.0}


def test_sums_and_multiples_are_by_phase():
    first, second = (perf.to_dict() for perf in PERFS)
    total = (PERFS[0] + PERFS[1] * 3).to_dict()
    assert total == {phase: first[phase] + 3 * second[phase] for phase in PHASES}
    assert PERFS[0].total == sum(first.values()) == 15
    assert (PERFS[0].forward, PERFS[0].backward) == (3, 7)


def test_passes_are_scaled_apart_and_without_prefetch():
    scaled = PERFS[0].scale(2.0, 10.0)
    assert list(scaled.to_dict().values()) == [2, 4, 30, 40, 0]


def test_arrays_of_devices_are_added_as_numbers_are():
    counts = np.array([1.0, 2.0])
    np.testing.assert_array_equal((PERFS[0] * counts + PERFS[1]).backward_compute, [10, 13])
