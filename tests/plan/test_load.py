"""Loads as fields and as one array."""

from __future__ import annotations

import numpy as np

from jaxrec.plan.load import LOADS, Load


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
