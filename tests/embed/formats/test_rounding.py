from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from jaxrec.embed.formats.rounding import round_rows

pytestmark = pytest.mark.jax_version

DTYPES = pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bfloat16", "float16"])

# Normal numbers, float16's subnormals (below 6.1e-5) and numbers below its smallest (6.0e-8), and
# the border between them.
VALUES = [1.0003, -1.0003, 0.3, -777.77, 6.09e-5, -6.1e-5, 3.3e-6, -1e-7, 2.5e-8, -1e-9, 5e-11]


def rounded(values, dtype, step=0, row_ids=None) -> np.ndarray:
    """What is stored in a table of ``dtype``."""
    values = jnp.asarray(values, jnp.float32)
    row_ids = jnp.arange(len(values)) if row_ids is None else jnp.asarray(row_ids)
    rows = round_rows(values, row_ids.astype(jnp.int32), jnp.int32(step), dtype)
    assert rows.dtype == jnp.float32
    return np.asarray(rows.astype(dtype))


def neighbours(value: float, dtype) -> tuple[float, float]:
    """The numbers of ``dtype`` on either side of a float32."""
    value = np.float32(value)
    nearest = value.astype(dtype)
    if nearest.astype(np.float32) > value:
        return float(np.nextafter(nearest, np.array(-np.inf, dtype))), float(nearest)
    return float(nearest), float(np.nextafter(nearest, np.array(np.inf, dtype)))


@DTYPES
@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("over", ["rows", "steps"])
def test_mean_is_the_value(value, dtype, over):
    value = float(np.float32(value))
    rows = np.full((8192, 4), value, np.float32)
    if over == "rows":
        found = rounded(rows, dtype)
    else:
        at_step = jax.vmap(
            lambda row, step: round_rows(row[None], jnp.int32([7]), step, dtype)[0].astype(dtype)
        )
        found = np.asarray(at_step(jnp.asarray(rows), jnp.arange(len(rows), dtype=jnp.int32)))

    low, high = neighbours(value, dtype)
    found = found.astype(np.float64)
    assert set(np.unique(found)) <= {low, high}
    share = (value - low) / (high - low)
    # Five standard deviations of the share of those rounded up.
    bound = 5 * np.sqrt(share * (1 - share) / found.size) + 1e-12
    assert abs(np.mean(found == high) - share) <= bound


@DTYPES
@settings(max_examples=50, deadline=None)
@given(
    values=arrays(np.float32, (4, 8), elements=st.floats(-60000, 60000, width=32)),
    step=st.integers(0, 2**31 - 1),
)
def test_result_is_a_neighbour(dtype, values, step):
    # Devices flush float32's own subnormals to zero.
    values[np.abs(values) < np.finfo(np.float32).tiny] = 0
    found = rounded(values, dtype, step).astype(np.float32)
    for value, result in zip(values.ravel(), found.ravel(), strict=True):
        assert result in neighbours(value, dtype)


@DTYPES
def test_representable_values_stay(dtype):
    info = jnp.finfo(dtype)
    values = [0, -0.0, 1, -1.5, 0.125, info.max, info.min, info.tiny, -info.tiny]
    if dtype == jnp.float16:
        values += [2.0**-24, -3 * 2.0**-24, 1023 * 2.0**-24]
    values = np.tile(np.asarray(values, np.float32), (64, 1))
    for step in range(8):
        found = rounded(values, dtype, step).astype(np.float32)
        np.testing.assert_array_equal(found, values)
        np.testing.assert_array_equal(np.signbit(found), np.signbit(values))


@DTYPES
def test_nan_and_infinity_stay(dtype):
    values = np.tile(np.float32([np.nan, np.inf, -np.inf, -np.nan]), (64, 1))
    # NaNs of few bits, which cutting bits off would turn into infinities.
    values[::2, 0] = np.uint32(0x7F800001).view(np.float32)
    np.testing.assert_array_equal(rounded(values, dtype).astype(np.float32), values)


@DTYPES
def test_past_the_largest_value_rounds_to_nearest(dtype):
    largest = float(jnp.finfo(dtype).max)
    values = np.float32([largest, np.nextafter(np.float32(largest), np.float32(np.inf))])
    found = rounded(np.tile(values, (256, 1)), dtype).astype(np.float32)
    assert np.all(found == largest)


@DTYPES
def test_same_bits_again_and_others_elsewhere(dtype):
    values = np.full((512, 4), 1.0 + 2.0**-12, np.float32)
    found = rounded(values, dtype, step=3)
    np.testing.assert_array_equal(found, rounded(values, dtype, step=3))
    # The bits belong to the row of the table, not to the place in the batch.
    order = np.random.default_rng(0).permutation(len(values))
    np.testing.assert_array_equal(found[order], rounded(values, dtype, step=3, row_ids=order))
    # Rows, columns and steps are rounded independently of each other.
    ups = (found.astype(np.float32) > 1).astype(np.float64)
    later = (rounded(values, dtype, step=4).astype(np.float32) > 1).astype(np.float64)
    share = 2.0**-12 / float(jnp.finfo(dtype).eps)
    for one, other in [(ups, later), (ups[1:], ups[:-1]), (ups[:, 1:], ups[:, :-1])]:
        deviation = share * (1 - share) / np.sqrt(one.size)
        assert abs(np.mean((one - share) * (other - share))) < 5 * deviation


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64], ids=["float32", "float64"])
def test_wider_types_are_left_alone(dtype):
    values = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)
    found = round_rows(jnp.asarray(values), jnp.arange(4), jnp.int32(0), np.dtype(dtype))
    np.testing.assert_array_equal(found, values)
