"""Batches that are put on a device are its own."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import jaxrec
from jaxrec.train import put_batch


def host_memory(size, offset):
    """Memory that XLA would use without a copy, or with ``offset`` bytes would copy later."""
    raw = np.zeros(4 * size + 128, np.uint8)
    start = -raw.ctypes.data % 64 + offset
    return raw[start : start + 4 * size].view(np.float32)


@pytest.mark.parametrize("offset", [0, 16])
@pytest.mark.parametrize("size", [16, 100_000, 5_000_000])
def test_host_memory_can_be_written_at_once(size, offset):
    """Also while the device is busy, and what is put there must wait."""
    matrix = jnp.ones((1000, 1000))
    for _ in range(3):
        matrix = matrix @ matrix
    host = {"x": host_memory(size, offset), "y": (np.arange(3), np.float32(2))}
    there = put_batch(host)
    host["x"][:] = 1
    assert not np.asarray(there["x"]).any()
    np.testing.assert_array_equal(there["y"][0], [0, 1, 2])
    assert there["y"][1] == 2


def test_ragged_batches():
    batch = jaxrec.KeyedJaggedArray.from_lists({"a": [[1, 2], [], [3]]})
    assert put_batch(batch).to_dict()["a"].to_lists() == [[1, 2], [], [3]]


def test_numbers_that_devices_lack():
    there = put_batch({"big": np.arange(3, dtype=">i8"), "y": np.array([0.5], ">f4")})
    assert [there["big"].tolist(), there["y"].tolist()] == [[0, 1, 2], [0.5]]
    with pytest.raises(TypeError, match=r"batch\['name'\]\[1\] is of type <U1"):
        put_batch({"name": (np.zeros(2), np.array(["a"]))})
    with pytest.raises(ValueError, match=r"batch\[0\]: 1099511627776 does not fit int32"):
        put_batch((np.array([1, 2**40]),))
    with pytest.raises(ValueError, match="batch: 1 elements are masked"):
        put_batch(np.ma.masked_array(np.float32([1, 2]), [True, False]))
