"""Updates of packed rows, and of rows with state of 8 and 16 bits, by the kernels in Mosaic."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrec import optim
from jaxrec.embed.formats import FORMATS, TABLE_FORMATS, PackedRows, as_table, is_packed
from jaxrec.embed.kernels import Lookups, reference
from jaxrec.embed.state import state_format
from tests.embed.kernels.gpu_cases import backend, compiled_fast, lowered_for_cuda

pytestmark = pytest.mark.jax_version

NUM_ROWS, NUM_BAGS, NUM_LOOKUPS = 40, 30, 300
PACKED = ("int8", "float8_e4m3", "float8_e5m2")


def table_of(dtype: str, dim: int):
    rows = np.random.default_rng(dim).normal(size=(NUM_ROWS, dim)).astype(np.float32)
    rows[3], rows[5] = 0, 2  # equal elements
    row_format = TABLE_FORMATS[dtype]
    return as_table(row_format.pack(jnp.asarray(rows)), row_format, dim)


def state_of(optimizer: optim.RowOptimizer, dim: int):
    state = {}
    for name, array in optimizer.init(NUM_ROWS, dim).items():
        values = array + jnp.asarray(np.random.default_rng(1).random(array.shape), jnp.float32)
        row_format = state_format(optimizer, name, array.ndim)
        state[name] = (
            values if array.ndim == 1 else as_table(row_format.pack(values), row_format, dim)
        )
    return state


def batch(dim: int, weighted: bool = False):
    """Whole numbers, whose sums are exact in any order."""
    rng = np.random.default_rng(0)
    rows = rng.integers(-1, NUM_ROWS + 2, NUM_LOOKUPS)
    rows[:100] = 3
    rows[rows == 7] = 8  # a row without lookups
    scales = jnp.asarray(2.0 ** rng.integers(-1, 2, NUM_LOOKUPS), jnp.float32)
    bags = jnp.asarray(rng.integers(0, NUM_BAGS, NUM_LOOKUPS), jnp.int32)
    lookups = Lookups(jnp.asarray(rows, jnp.int32), bags, scales if weighted else None)
    return lookups, jnp.asarray(rng.integers(-4, 5, (NUM_BAGS, dim)), jnp.float32)


def both(table, state, optimizer, *, weighted: bool = False):
    """The results of the kernel and of the reference."""
    kernel = functools.partial(backend("mosaic").fused_update, interpret=True)
    lookups, gradients = batch(table.shape[1], weighted)
    arguments = table, state, lookups, gradients, optimizer, jnp.int32(3)
    return tuple(
        compiled_fast(function, static_argnums=4)(*arguments)
        for function in (kernel, reference.fused_update)
    )


def floats(array) -> np.ndarray:
    return np.asarray(array[:] if is_packed(array) else array, np.float32)


def spacing(array) -> np.ndarray:
    """The largest distance of neighbouring numbers in each row."""
    values = floats(array)
    largest = np.abs(values).max(axis=1, keepdims=True)
    name = array.row_format.name if is_packed(array) else array.dtype.name
    match name:
        case "float32":
            return largest * 1e-5
        case "int8":
            return np.ptp(values, axis=1, keepdims=True) / 255
    bits = {"bfloat16": 8, "float8_e4m3": 4, "float8_e5m2": 3, "ufloat8_e5m3": 4}[name]
    return largest * 2.0**-bits * 2


@pytest.mark.parametrize("random", [True, False], ids=["at_random", "to_nearest"])
@pytest.mark.parametrize("dim", [1, 10, 64, 100, 300])
@pytest.mark.parametrize("dtype", PACKED)
def test_the_same_bytes(dtype: str, dim: int, random: bool):
    """Each number of this update is exact in float32, so that the stored bytes are the same."""
    optimizer = optim.sgd(2.0**-4, stochastic_rounding=random)
    table = table_of(dtype, dim)
    (new, _), (expected, _) = both(table, {}, optimizer)
    np.testing.assert_array_equal(new.stored, expected.stored)
    assert (new.stored[3] != table.stored[3]).any()
    np.testing.assert_array_equal(new.stored[7], table.stored[7])


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16", "float8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", *PACKED])
@pytest.mark.parametrize("dim", [20, 300], ids="dim_{}".format)
@pytest.mark.parametrize("kind", ["rowwise_adagrad", "adam", "lamb"])
def test_types_of_rows_and_state(kind: str, dim: int, dtype: str, state_dtype: str):
    """State of 300 columns has three scales a row in 8 bits."""
    optimizer = getattr(optim, kind)(0.1, state_dtype=state_dtype)
    table, state = table_of(dtype, dim), state_of(optimizer, dim)
    (new, new_state), (expected, expected_state) = both(table, state, optimizer, weighted=True)
    assert jax.tree.structure(new_state) == jax.tree.structure(expected_state)
    for mine, wanted in [
        (new, expected),
        *((new_state[name], expected_state[name]) for name in state),
    ]:
        found, exact = floats(mine), floats(wanted)
        if exact.ndim == 1:
            np.testing.assert_allclose(found, exact, rtol=1e-5)
            continue
        # A number that was computed in another order may be rounded the other way.
        difference = np.abs(found - exact)
        assert (difference <= 1.01 * spacing(wanted) + 1e-6).all()
        largest = np.abs(exact).max(axis=1, keepdims=True)
        assert np.mean(difference > 1e-4 * largest + 1e-6) < 0.02


@pytest.mark.parametrize("dtype", PACKED)
def test_no_floats_of_the_rows_are_in_memory(dtype: str):
    """Lowered for CUDA, an update is one kernel on the stored bytes; of 3 GiB, too."""
    module, dim, num_rows = backend("mosaic"), 64, 45_000_000
    row_format, optimizer = TABLE_FORMATS[dtype], optim.rowwise_adagrad(0.1)
    stored = jax.ShapeDtypeStruct((num_rows, row_format.width(dim)), jnp.uint8)
    table, lookups = PackedRows(stored, row_format, dim), batch(dim)[0]
    state = {"accumulator": jax.ShapeDtypeStruct((num_rows,), jnp.float32)}

    def update(table, state, gradients):
        return module.fused_update(table, state, lookups, gradients, optimizer, jnp.int32(0))

    gradients = jax.ShapeDtypeStruct((NUM_BAGS, dim), jnp.float32)
    arguments = {"table": table, "state": state, "optimizer": optimizer}
    assert module.refuse("fused_update", arguments) is None
    text = lowered_for_cuda(update, table, state, gradients)
    assert "update" in text
    assert f"tensor<{num_rows}x{dim}xf32>" not in text
    assert f"tensor<{NUM_LOOKUPS}x{dim}xf32>" not in text


def test_formats_that_no_kernel_packs():
    module = backend("mosaic")
    table = PackedRows(jnp.zeros((4, 8), jnp.uint8), FORMATS["int4"], 8)
    arguments = {"table": table, "state": {}, "optimizer": optim.sgd(0.1)}
    assert module.refuse("fused_update", arguments) == "it does not pack int4"
