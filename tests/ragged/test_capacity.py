"""The ladder of capacities."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrec.ragged.capacity import capacity_for


def test_the_first_rungs():
    ladder = [8, 12, 16, 24, 32, 48, 64, 96, 128]
    assert sorted({capacity_for(count) for count in range(129)}) == ladder
    assert [capacity_for(count) for count in ladder] == ladder


@given(st.integers(0, 2**40))
def test_a_rung_holds_its_count_and_little_more(count):
    capacity = capacity_for(count)
    assert capacity >= count
    assert capacity <= max(8, 1.5 * count)
    power = 1 << (capacity.bit_length() - 1)
    assert capacity in (power, power * 3 // 2)


def test_a_negative_count():
    with pytest.raises(ValueError, match="0 or more, not -1"):
        capacity_for(-1)
