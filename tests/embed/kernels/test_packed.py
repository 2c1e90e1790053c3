"""One suite for lookups of packed rows, which every implementation that runs here goes through."""

from __future__ import annotations

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
from tests.embed.kernels.gpu_cases import lowered_for_cuda

IMPLEMENTATIONS = ("reference", "cpu-avx512", "cpu-avx2", "cpu-portable")
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


@every_implementation
@every_format
@pytest.mark.parametrize("shape", SHAPES)
def test_pooled_lookup(implementation, name, shape):
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


@every_implementation
@every_format
@pytest.mark.parametrize("dim", [1, 3, 4, 16, 64, 100, 128, 1024])
def test_row_lookup(implementation, name, dim):
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
    rows = jnp.asarray(np.random.default_rng(0).integers(0, 50, 300), jnp.int32)
    layout = BagLayout((0,), (300,), (0,), (300,), (0,), (50,), (False,))
    bags = kernels.pooled_lookup(packed, rows, jnp.ones(300, jnp.int32), None, layout, "float32")
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


@every_format
def test_gpus_read_packed_rows_by_xla(name):
    """No kernel for GPUs unpacks rows: naming one leaves the call to the reference, lowered so."""
    this = case("d100")
    table = packed_rows(packed_table(name, this.num_rows, 100), name, 100)
    arguments = (table, *this.arrays, this.layout, "float32")

    def look_up(table, *arrays):
        return kernels.pooled_lookup(table, *arrays, this.layout, "float32")

    with kernels.use_kernels("triton", "reference"):
        choice = kernels.describe("pooled_lookup", *arguments)
        assert choice.chosen["cuda"] == "reference"
        assert choice.refused["triton"] == "it does not unpack rows"
        text = lowered_for_cuda(look_up, table, *this.arrays)
    assert "triton" not in text
    assert f"tensor<{this.num_rows}x100xf32>" not in text  # rows are unpacked after they are read


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
    assert ('"pool"' in text) == (dtype == "float32")
