"""Counts, seconds by phase and rates."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from jaxrec.plan.quantities import LOADS, PHASES, Load, Perf, Rate


def test_fields_are_stacked_in_their_order_and_back():
    arrays = np.arange(12.0).reshape(6, 2)
    load = Load(*arrays)
    np.testing.assert_array_equal(load.stacked, arrays)
    for index, name in enumerate(LOADS):
        np.testing.assert_array_equal(getattr(load, name), arrays[index])


def test_fields_are_views_of_the_array_that_they_were_made_of():
    arrays = np.zeros((6, 3))
    load = Load(*arrays)
    arrays[LOADS.index("ids")] += 1
    np.testing.assert_array_equal(load.ids, 1)


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


@pytest.mark.every_case
@pytest.mark.parametrize("field", ["call", "item", "byte"])
@pytest.mark.parametrize("value", [-1.0, math.inf, math.nan, "1"])
def test_rates_are_numbers(unchecked, field, value):
    with pytest.raises(ValueError, match=f"a rate's {field} is seconds"):
        Rate(**{field: value})
