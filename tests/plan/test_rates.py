"""Rates of operations."""

from __future__ import annotations

import math

import pytest

from jaxrec.plan.rates import Rate

pytestmark = pytest.mark.every_case


@pytest.mark.parametrize("field", ["call", "item", "byte"])
@pytest.mark.parametrize("value", [-1.0, math.inf, math.nan, "1"])
def test_rates_are_numbers(unchecked, field, value):
    with pytest.raises(ValueError, match=f"a rate's {field} is seconds"):
        Rate(**{field: value})
