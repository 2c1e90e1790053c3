"""Records in memory that grow."""

from __future__ import annotations

import mmap

import numpy as np
import pytest

from jaxrec.tier.stores import growing_records
from jaxrec.tier.stores.growing_records import GrowingRecords


class FixedMap(mmap.mmap):
    """Memory of a platform that cannot grow it."""

    def resize(self, newsize):
        raise SystemError("mmap: resizing not available--no mremap()")


@pytest.fixture(params=[mmap.mmap, FixedMap], ids=["in_place", "copied"])
def _each_platform(request, monkeypatch):
    monkeypatch.setattr(growing_records.mmap, "mmap", request.param)


@pytest.mark.usefixtures("_each_platform")
@pytest.mark.parametrize("width", [1, 3, 260])
def test_records_stay_as_they_grow(width):
    records = GrowingRecords(0, width)
    expected = np.zeros((0, width), np.uint8)
    for room in (1, 5, 10_000):
        grown = np.zeros((room, width), np.uint8)
        grown[: len(expected)] = expected
        records.grow(room)
        np.testing.assert_array_equal(records.array, grown)
        expected = np.random.default_rng(room).integers(0, 256, (room, width), np.uint8)
        records.array[:] = expected
