"""One suite for lookups of packed rows, which every implementation that runs here goes through."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxrec
from jaxrec.embed import apply_gradients, init_tables, kernels, lookup
from jaxrec.embed.formats import FORMATS, TABLE_FORMATS, PackedRows, as_table
from jaxrec.embed.kernels import BagLayout
from tests.embed import row_oracle
from tests.embed.kernels import oracle
from tests.embed.kernels.cases import SMALL, Case, case
from tests.embed.kernels.gpu_cases import BACKENDS, kernels_in, lowered_for_cuda, name_of

pytestmark = pytest.mark.jax_version

COMPILED = ("reference", "cpu-avx512", "cpu-avx2", "cpu-portable")
# Where two cases of a test run, they are of the first and the last.
IMPLEMENTATIONS = [n for n in ("mosaic", *COMPILED, "triton") if n in (*COMPILED, *BACKENDS)]
every_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS, indirect=True)
# Those of inference, and those of training.
ROW_FORMATS = {name: FORMATS[name] for name in ("int8", "int4", "int2", "float8")} | {
    "fused_int8": TABLE_FORMATS["int8"],
    "float8_e4m3": TABLE_FORMATS["float8_e4m3"],
    "float8_e5m2": TABLE_FORMATS["float8_e5m2"],
}
every_format = pytest.mark.parametrize("name", ROW_FORMATS)

# Of 1, 3, 4, 16, 64, 100, 128, 256 and 1024 columns; sums, means, weights, empty and huge bags.
SHAPES = (
    "d1", "d3", "different", "uniform", "empty_bags", "powerlaw", "one_huge_bag", "half_one_row",
    "d100", "one_hot", "d256", "d1024",
)  # fmt: skip


def packed_table(name: str, num_rows: int, dim: int) -> np.ndarray:
    return row_oracle.random_packed(np.random.default_rng(dim), num_rows, name, dim)


def packed_rows(packed: np.ndarray, name: str, dim: int) -> PackedRows:
    return PackedRows(jnp.asarray(packed), ROW_FORMATS[name], dim)


def pooled(this: Case, name: str, packed: np.ndarray, dtype: str = "float32"):
    dim = this.table.shape[1]
    return kernels.pooled_lookup(packed_rows(packed, name, dim), *this.arrays, this.layout, dtype)


def expected_pooled(this: Case, name: str, packed: np.ndarray) -> np.ndarray:
    rows = row_oracle.unpack(packed, name, this.table.shape[1])
    found = oracle.lookups(this.ids, this.lengths, this.weights, this.layout)
    return oracle.pooled(rows, found, this.layout.num_bags)


def assert_sums(result, expected, this: Case) -> None:
    """Within what float32 can sum: hundreds of float8 elements of up to 480 are added."""
    largest = max(1.0, float(np.nanmax(np.abs(expected), initial=0)))
    np.testing.assert_allclose(result, expected, rtol=2e-5, atol=2e-6 * largest)


# The interpreter of kernels for GPUs is slow: each shape, and each format at several of them.
INTERPRETED = (
    ("d1", "int2"), ("d1", "float8"), ("d3", "int4"), ("d3", "fused_int8"), ("different", "int8"),
    ("uniform", "float8_e4m3"), ("uniform", "int2"), ("empty_bags", "int4"),
    ("powerlaw", "float8_e5m2"), ("one_huge_bag", "int4"), ("one_huge_bag", "fused_int8"),
    ("half_one_row", "float8"), ("d100", "float8_e4m3"), ("d100", "int4"), ("d100", "int2"),
    ("one_hot", "int8"), ("d256", "fused_int8"), ("d1024", "int8"), ("d1024", "float8_e5m2"),
)  # fmt: skip


@pytest.mark.parametrize(
    ("implementation", "shape", "name"),
    [
        (implementation, *each)
        for implementation in IMPLEMENTATIONS
        for each in (
            itertools.product(SHAPES, ROW_FORMATS) if implementation in COMPILED else INTERPRETED
        )
    ],
    indirect=["implementation"],
)
def test_pooled_lookup(implementation, shape, name):
    this = case(shape)
    packed = packed_table(name, this.num_rows, SMALL[shape].D)
    result = pooled(this, name, packed)
    assert result.dtype == jnp.float32
    assert_sums(result, expected_pooled(this, name, packed), this)


@every_implementation
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_type_of_pooled_lookup(implementation, dtype):
    this = case("d100")
    packed = packed_table("int4", this.num_rows, 100)
    result = pooled(this, "int4", packed, dtype)
    assert result.dtype == dtype
    expected = jnp.asarray(expected_pooled(this, "int4", packed), "float32").astype(dtype)
    np.testing.assert_allclose(
        result.astype("float32"),
        expected.astype("float32"),
        rtol=float(jnp.finfo(dtype).eps),
        atol=1e-5,
    )


INTERPRETED_ROWS = (
    *itertools.product((3, 100), ROW_FORMATS),
    *((1, "int2"), (1, "fused_int8"), (4, "int4"), (16, "int2"), (64, "int8"), (128, "float8")),
    (1024, "int4"),
)


@pytest.mark.parametrize(
    ("implementation", "dim", "name"),
    [
        (implementation, *each)
        for implementation in IMPLEMENTATIONS
        for each in (
            itertools.product((1, 3, 4, 16, 64, 100, 128, 1024), ROW_FORMATS)
            if implementation in COMPILED
            else INTERPRETED_ROWS
        )
    ],
    indirect=["implementation"],
)
def test_row_lookup(implementation, dim, name):
    packed = packed_table(name, 7, dim)
    rows = jnp.array([0, 6, 7, 3, 3, 8, -1, 2**31 - 1, -(2**31), 6], jnp.int32)
    result = kernels.row_lookup(packed_rows(packed, name, dim), rows)
    padded = np.concatenate(
        [row_oracle.unpack(packed, name, dim), np.zeros((1, dim)), np.full((1, dim), np.nan)]
    )
    expected = padded[[0, 6, 7, 3, 3, 8, 8, 8, 8, 6]]
    if name == "fused_int8":  # Without fused multiply-add the product is rounded, too.
        np.testing.assert_allclose(result, expected, rtol=1e-6, atol=1e-7)
    else:
        np.testing.assert_array_equal(result, expected)


@every_implementation
@every_format
def test_ids_outside_make_nan(implementation, name):
    this = Case("d100")
    lengths = this.lengths[: SMALL["d100"].B]
    places = np.flatnonzero(np.cumsum(lengths) > 0)[0] + np.arange(4) * 3
    this.ids[places] = [-1, -(2**31), SMALL["d100"].V, 2**31 - 1]
    packed = packed_table(name, this.num_rows, 100)
    expected = expected_pooled(this, name, packed)
    assert np.isnan(expected).any()
    assert_sums(pooled(this, name, packed), expected, this)


@every_implementation
def test_nothing_to_look_up(implementation):
    layout = BagLayout((0,), (0,), (0,), (3,), (0,), (5,), (False,))
    ids, lengths = jnp.zeros(0, jnp.int32), jnp.zeros(3, jnp.int32)
    packed = packed_rows(packed_table("int8", 5, 4), "int8", 4)
    found = kernels.pooled_lookup(packed, ids, lengths, None, layout, "float32")
    assert found.tolist() == [[0.0] * 4] * 3
    assert kernels.row_lookup(packed, ids).shape == (0, 4)


@every_implementation
@every_format
def test_a_bag_of_one_id_is_its_row(implementation, name):
    """To the last bit, as a sum of one term is exact."""
    packed = packed_rows(packed_table(name, 50, 64), name, 64)
    rows = jnp.asarray(np.random.default_rng(0).integers(0, 50, 100), jnp.int32)
    layout = BagLayout((0,), (100,), (0,), (100,), (0,), (50,), (False,))
    bags = kernels.pooled_lookup(packed, rows, jnp.ones(100, jnp.int32), None, layout, "float32")
    np.testing.assert_array_equal(bags, kernels.row_lookup(packed, rows))


def test_plain_rows_are_arrays():
    rows = jnp.zeros((7, 5), "float16")
    assert as_table(rows, FORMATS["float16"], 5) is rows


def test_format_that_the_library_does_not_know():
    """The reference takes it."""
    packed = PackedRows(jnp.ones((7, 5)), FORMATS["float32"], 5)
    rows = jnp.array([3, 7], jnp.int32)
    choice = kernels.describe("row_lookup", packed, rows)
    assert choice.chosen["cpu"] == "reference"
    assert "does not unpack float32" in str(choice)
    assert kernels.row_lookup(packed, rows).tolist() == [[1.0] * 5, [0.0] * 5]


@pytest.mark.filterwarnings("ignore:.*Triton.*:DeprecationWarning")
@pytest.mark.parametrize(
    ("shape", "name"),
    [("d100", name) for name in ROW_FORMATS]
    + [("d1", "fused_int8"), ("d3", "int4"), ("d3", "float8"), ("d1024", "int2")],
)
def test_gpus_read_packed_rows(gpu, shape, name):
    """Lowered for CUDA, a lookup is one kernel on the stored rows, and unpacks none outside."""
    this, dim = case(shape), SMALL[shape].D
    table = packed_rows(packed_table(name, this.num_rows, dim), name, dim)

    def look_up(table, rows, *arrays):
        pooled = kernels.pooled_lookup(table, *arrays, this.layout, "float32")
        return pooled, kernels.row_lookup(table, rows)

    with kernels.use_kernels(name_of(gpu), "reference"):
        text = lowered_for_cuda(look_up, table, jnp.arange(7), *this.arrays)
    assert kernels_in(text, "pool", "copy_rows") == ["pool", "copy_rows"]
    lookups = this.layout.num_positions
    assert f"tensor<{this.num_rows}x{dim}xf32>" not in text
    assert f"tensor<{lookups}x{dim}xf32>" not in text


@pytest.mark.parametrize(
    ("stored", "row_format", "reason"),
    [
        ((7, 5), FORMATS["float32"], "it does not unpack float32"),
        ((2**28, 8), FORMATS["float8"], None),
        ((2**28 + 1, 8), FORMATS["float8"], "its offsets of 32 bits are too short"),
        ((2**29, 8), FORMATS["float8"], "its offsets of 32 bits are too short"),
        ((2**29 + 1, 8), FORMATS["float8"], None),
    ],
    ids=["unknown", "2_GiB", "past_2_GiB", "4_GiB", "past_4_GiB"],
)
def test_packed_rows_that_triton_refuses(stored, row_format, reason):
    table = PackedRows(jax.ShapeDtypeStruct(stored, row_format.dtype), row_format, stored[1])
    with kernels.use_kernels("triton", "reference"):
        choice = kernels.describe("row_lookup", table, jax.ShapeDtypeStruct((3,), "int32"))
    assert choice.chosen["cuda"] == ("triton" if reason is None else "reference")
    assert (reason or "") in str(choice.refused.get("triton", ""))
    if "mosaic" not in BACKENDS:
        return
    with kernels.use_kernels("mosaic", "reference"):  # its offsets have 64 bits
        choice = kernels.describe("row_lookup", table, jax.ShapeDtypeStruct((3,), "int32"))
    is_known = row_format != FORMATS["float32"]
    assert choice.chosen["cuda"] == ("mosaic" if is_known else "reference")


@pytest.mark.filterwarnings("ignore:.*Triton.*:DeprecationWarning")
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16", "float8"])
@pytest.mark.parametrize("dtype", ["float32", "int8", "float8_e4m3"])
def test_gpus_update_packed_rows_and_state_by_xla(dtype, state_dtype):
    config = jaxrec.EmbeddingBagConfig("a", 30, 16, dtype=dtype)
    optimizer = jaxrec.optim.adam(0.1, state_dtype=state_dtype)
    tables = init_tables([config], optimizer, jax.random.key(0))
    batch = jaxrec.KeyedJaggedArray.from_lists({"a": [[1, 2], [2], []]})

    def step(tables, batch):
        activations, residuals = lookup(tables, batch)
        return apply_gradients(tables, residuals, activations, step=0)

    with kernels.use_kernels("triton", "reference"):
        text = lowered_for_cuda(step, tables, batch)
    is_plain = (dtype, state_dtype) == ("float32", "float32")
    assert ('"update"' in text) == is_plain
    assert '"pool"' in text
