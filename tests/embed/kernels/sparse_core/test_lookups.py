"""Lookups on SparseCores: interpreted, against NumPy float64 and the reference."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrec import optim
from jaxrec.embed import kernels
from jaxrec.embed.formats import FORMATS, as_table
from jaxrec.embed.kernels import Lookups, reference, use_kernels
from tests.embed.kernels import oracle
from tests.embed.kernels.gpu_cases import Batch, compiled_fast
from tests.embed.kernels.sparse_core.conftest import V5E, V6E

pytestmark = [pytest.mark.jax_version, pytest.mark.usefixtures("on_chip")]

BATCHES = {
    # Bags of two features alternate in the output; one bag is longer than a block of 64 lookups.
    "weighted": Batch(128, ((4, 70, 0, 1), (0, 2, 5, 3)), weighted=True, outside=True),
    # 66 bags are two blocks, and a block has bags of two features.
    "uneven": Batch(128, ((1, 2, 0, 3, 1) * 12, (5, 0, 0, 9, 1, 2)), outside=True),
    # A block has 8 rows.
    "wide": Batch(1024, ((3, 0, 1), (12, 1, 2)), slack=0),
    "one_feature": Batch(256, ((2, 1, 40),), weighted=True, interleave=False),
}


@pytest.mark.parametrize(("dim", "count"), [(128, 75), (1024, 8)], ids=["padded", "whole"])
def test_row_lookup(dim: int, count: int):
    from jaxrec.embed.kernels import sparse_core

    rng = np.random.default_rng(0)
    table = jnp.asarray(rng.standard_normal((50, dim)), jnp.float32)
    rows = jnp.asarray(rng.integers(-2, 53, count), jnp.int32)
    found = sparse_core.row_lookup(table, rows, interpret=True)
    np.testing.assert_array_equal(found, reference.row_lookup(table, rows))


@pytest.mark.parametrize("name", BATCHES)
def test_pooled_lookup(name: str):
    from jaxrec.embed.kernels import sparse_core

    batch = BATCHES[name]
    (table, ids, lengths, weights), layout = batch.arrays(), batch.layout
    lookups = oracle.lookups(ids, np.asarray(lengths), weights, layout)

    def pool(*arrays):
        return sparse_core.pooled_lookup(*arrays, layout, jnp.float32, interpret=True)

    found = compiled_fast(pool)(table, ids, lengths, weights)
    expected = oracle.pooled(table, lookups, layout.num_bags)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    assert np.isnan(found).any() == batch.outside


def test_what_the_kernels_take(on_chip):
    rows, step = jax.ShapeDtypeStruct((3,), jnp.int32), jnp.int32(0)

    def reason(primitive: str, *arguments, chip: str = V6E) -> str | None:
        with on_chip(chip), use_kernels("sparse_core", "reference"):
            return kernels.describe(primitive, *arguments).refused.get("sparse_core")

    def table(dim: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((8, dim), dtype)

    def update(optimizer: optim.RowOptimizer, dtype: str = "float32") -> str | None:
        state = jax.eval_shape(lambda: optimizer.init(8, 128))
        lookups = Lookups(rows, None, None)
        gradients = jax.ShapeDtypeStruct((3, 128), dtype)
        return reason("fused_update", table(128), state, lookups, gradients, optimizer, step)

    assert reason("row_lookup", table(128), rows) is None
    assert reason("row_lookup", table(128), rows, chip=V5E) == "it needs a TPU with SparseCores"
    assert reason("row_lookup", table(64), rows) == (
        "its rows have a multiple of 128 up to 1024 columns, and these have 64"
    )
    assert reason("row_lookup", table(1152), rows).endswith("these have 1152")
    assert reason("row_lookup", table(128, "bfloat16"), rows).endswith("these are bfloat16")
    packed = as_table(FORMATS["int8"].pack(jnp.zeros((8, 128))), FORMATS["int8"], 128)
    assert reason("row_lookup", packed, rows).endswith("these are int8")
    assert reason("row_lookup", jax.ShapeDtypeStruct((0, 128), "float32"), rows).endswith("none")
    assert reason("build_runs", rows, 8) == "it has no build_runs"
    assert update(optim.rowwise_adagrad(0.1, clip_value=1.0)) is None
    assert update(optim.sgd(0.1), "bfloat16").endswith("these are bfloat16")
    assert update(optim.sgd(0.1, clip_norm=1.0)) == "it bounds no norms"
    assert update(optim.adam(0.1)).endswith("and this is adam")


def test_without_a_tpu_no_kernel_is_tried(monkeypatch):
    monkeypatch.delenv("JAXREC_KERNELS", raising=False)
    table, rows = jnp.ones((8, 128)), jnp.zeros(3, jnp.int32)
    choice = kernels.describe("row_lookup", table, rows)
    assert choice.chosen["tpu"] == "reference"
    assert choice.refused["sparse_core"] == "there is no TPU here to try it on"
    # A user who names it gets the reference on other machines.
    with use_kernels("sparse_core", "reference"):
        np.testing.assert_array_equal(kernels.row_lookup(table, rows), np.ones((3, 128)))
