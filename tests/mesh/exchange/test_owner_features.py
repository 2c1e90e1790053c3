"""Features of owners in columns of equal sizes, by hand."""

from __future__ import annotations

from unittest.mock import MagicMock

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrec.mesh.channel import Channel
from jaxrec.mesh.exchange.owner_features import OwnerFeatures, received_layout, send_lookups

pytestmark = pytest.mark.jax_version

# Feature 0 on owner 1; features 1 and 2 on owner 0; none on owner 2.
OWNED = OwnerFeatures.of([[2, 1], [0], []], capacities=(3, 2, 4), strides=(1, 2, 1))


def test_columns_have_the_largest_size_of_their_features():
    assert OWNED.features == ((2, 1), (0,), ())
    assert OWNED.capacities == (4, 2)
    assert OWNED.strides == (1, 2)


def test_packing():
    # The values of the second feature come first, then one that belongs to no feature.
    values = jnp.array([2, 2, 9, 1, 1, 1, 3, 3, 3, 3])
    packed = OWNED.pack(values, (3, 0, 6), (3, 2, 4), OWNED.capacities)
    np.testing.assert_array_equal(
        packed, [[3, 3, 3, 3, 2, 2], [1, 1, 1, 0, 0, 0], [0, 0, 0, 0, 0, 0]]
    )
    unpacked = OWNED.unpack(packed, (3, 2, 4), OWNED.capacities)
    np.testing.assert_array_equal(unpacked, [1, 1, 1, 2, 2, 3, 3, 3, 3])


def test_padding_of_columns_is_no_row_of_the_owner():
    layout = received_layout(1, (3, 2, 4), (1, 2, 1), num_rows=7)
    rows, channel = jnp.array([1, 1, 1, 2, 2, 3, 3, 3, 3]), MagicMock(spec=Channel)
    channel.send_together = lambda *arrays: arrays
    route = send_lookups(OWNED, rows, jnp.array([3, 1, 1, 4]), layout, channel)
    np.testing.assert_array_equal(
        route.owned_rows, [3, 3, 3, 3, 2, 2, 1, 1, 1, -1, -1, -1, -1, -1, -1, -1, -1, -1]
    )


def test_the_batch_that_an_owner_receives():
    layout = OWNED.received(num_rows=7)
    assert layout.capacities == (4, 2) * 3
    assert layout.id_starts == (0, 4, 6, 10, 12, 16)
    assert layout.strides == (1, 2) * 3
    assert layout.row_counts == (7,) * 6
    assert not layout.is_interleaved
