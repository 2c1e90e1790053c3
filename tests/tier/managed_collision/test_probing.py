"""The hash of multi-probe maps against FBGEMM's."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrec.ragged import join_int64, split_int64
from jaxrec.tier.managed_collision import murmur_hash3
from tests import golden
from tests.tier.managed_collision.oracle import murmur


@pytest.mark.parametrize("hash_ids", [murmur_hash3, jax.jit(murmur_hash3)], ids=["eager", "jit"])
def test_golden_hash(hash_ids):
    arrays = golden.load("zch", "mpzch_murmur_hash3")
    hashes = join_int64(np.asarray(hash_ids(jnp.asarray(split_int64(arrays["ids"]))))).view(
        np.uint64
    )
    np.testing.assert_array_equal(hashes, arrays["hash_uint64"])
    assert [murmur(int(id)) for id in arrays["ids"]] == hashes.tolist()
