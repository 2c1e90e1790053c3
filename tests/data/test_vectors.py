"""Columns of vectors, compared with NumPy in float64."""

from __future__ import annotations

import decimal
import math

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jaxrec.data import DataError, ParquetGroups, Schema, TableEncoder, learn_encoder
from jaxrec.data.column_types import is_vector
from jaxrec.data.common_types import CommonTypes
from jaxrec.data.vectors import learned_widths

pytestmark = pytest.mark.every_case

ROWS = [[1.5, -2.0, 0.25], None, [0.0, 8.0, -1.0], [3.0, 3.0, 3.0]]
TYPES = {
    "half": pa.list_(pa.float16()),
    "fixed": pa.list_(pa.float32(), 3),
    "large": pa.large_list(pa.float64()),
    "decimal": pa.list_(pa.decimal128(9, 2)),
}


def schema(**options):
    content = {"label": "y", "dense": {"a": {}, "v": {"width": 3, **options}, "b": {}}}
    return Schema.from_dict({**content, "categorical": {"c": {}}})


def table(vectors, kind=None):
    if kind is not None and pa.types.is_decimal(kind.value_type):
        vectors = [x and [decimal.Decimal(str(each)) for each in x] for x in vectors]
    rows = len(vectors)
    v = vectors if isinstance(vectors, pa.Array) else pa.array(vectors, kind)
    a = np.arange(rows, dtype=float)
    return pa.table({"y": [0, 1] * (rows // 2), "a": a, "v": v, "b": -a, "c": ["x"] * rows})


@pytest.mark.parametrize("kind", TYPES.values(), ids=TYPES)
@pytest.mark.parametrize("transform", ["standardize", "log1p", "log_counts", "none"])
def test_transforms(kind, transform):
    rows = table(ROWS, kind)
    encoder = learn_encoder(schema(transform=transform), [rows[:1], rows[1:]])
    known = np.array([x for x in ROWS if x is not None])
    wanted = {
        "standardize": (known - known.mean()) / known.std(),
        "log1p": np.sign(known) * np.log1p(np.abs(known)),
        "log_counts": np.log(np.trunc(known) + 3),
        "none": known,
    }[transform]
    for given in (rows, pa.concat_tables([rows[:3], rows[3:]])):
        dense = np.asarray(encoder.batch(given, 6).dense)
        assert dense.shape == (6, 5)
        np.testing.assert_allclose(dense[[0, 2, 3], 1:4], wanted, rtol=1e-6, atol=1e-7)
        assert not dense[1, 1:4].any()
        assert not dense[4:].any()
        # The columns beside it stay where they are.
        np.testing.assert_allclose(dense[:4, 0], -dense[:4, 4], rtol=1e-6)
    sliced = encoder.pack(encoder.encode(rows)[1:], 3)
    np.testing.assert_array_equal(sliced.dense, encoder.batch(rows).dense[1:])


def test_saved_and_without_values(tmp_path):
    rows = table(ROWS)
    encoder = learn_encoder(schema(), [rows])
    assert (encoder.schema.num_dense, encoder.schema.widths) == (5, (1, 3, 1))
    encoder.save(tmp_path / "features")
    loaded = TableEncoder.load(tmp_path / "features")
    assert loaded.encode(rows).equals(encoder.encode(rows))
    arrays = {"a": np.arange(4.0), "b": np.zeros(4), "c": ["x"] * 4, "v": np.ones((4, 3), np.int8)}
    wanted = table([[1.0, 1.0, 1.0]] * 4)
    np.testing.assert_allclose(loaded.batch(arrays).dense[:, :4], loaded.batch(wanted).dense[:, :4])
    nothing = rows.set_column(2, "v", pa.nulls(4))
    assert not loaded.batch(nothing).dense[:, 1:4].any()
    assert loaded.batch(rows[:0], 2).dense.shape == (2, 5)


def test_large_columns_have_the_moments_of_all_numbers():
    numbers = np.random.default_rng(0).normal(1e4, 0.5, (5000, 3)).astype(np.float32)
    v = pa.FixedSizeListArray.from_arrays(pa.array(numbers.reshape(-1)), 3)
    moments = learn_encoder(schema(), [table(v)]).moments["v"]
    exact = numbers.astype(np.float64)
    assert moments.count == 15_000
    assert moments.mean == pytest.approx(exact.mean(), rel=1e-12)
    assert moments.scale == pytest.approx(exact.std(), rel=1e-9)


WRONG = {
    "short": ([[1.0, 2.0, 3.0], None, [1.0], None], "row 12 .*'v': the vector has 1 numbers, and"),
    "empty": ([[1.0, 2.0, 3.0], [], None, None], "row 11 .* has 0 numbers, and others have 3"),
    "null": ([None, [1.0, None, 2.0], None, None], "row 11 .*: a number of the vector is null"),
    "nan": ([None, [1.0, 2.0, math.nan], None, None], "row 11 .*number nan, which float32 does"),
    "infinities": ([[math.inf, -math.inf, 0.0]] * 4, "row 10 .*: the vector has the number inf"),
    "large": ([[1.0, 2.0, -1e300]] * 4, "row 10 .*: the vector has the number -1e.300"),
    "type": (pa.array(["a"] * 4), "column 'v' is of type string; expected lists of 3 numbers"),
    "fixed": (
        pa.array([[1.0, 2.0]] * 4, pa.list_(pa.float32(), 2)),
        "; expected lists of 3 number",
    ),
    "plain": (pa.array([1.0] * 4), "is of type double; expected lists of 3 numbers"),
}


@pytest.mark.parametrize(("vectors", "message"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_named(vectors, message, tmp_path):
    pq.write_table(table([[1.0, 2.0, 3.0]] * 10), tmp_path / "a.parquet")
    bad = pa.concat_tables([table([None] * 10, pa.list_(pa.float64())), table(vectors)]) if (
        isinstance(vectors, list)
    ) else table(vectors)  # fmt: skip
    pq.write_table(bad, tmp_path / "b.parquet")
    groups = ParquetGroups((tmp_path / "a.parquet", tmp_path / "b.parquet"))
    with pytest.raises(DataError, match=rf"b.parquet, .*{message}"):
        learn_encoder(schema(), groups)


def test_nulls_that_are_errors():
    with pytest.raises(DataError, match=r"row 1 .*: the vector is null; fill it"):
        learn_encoder(schema(missing="error"), [table(ROWS)])


def test_a_list_without_a_width_says_so():
    plain = Schema.from_dict({"label": "y", "dense": ["v"], "categorical": ["c"]})
    with pytest.raises(DataError, match="expected numbers: give the width of the vectors, such as"):
        learn_encoder(plain, [table(ROWS)])


def test_widths_of_files(tmp_path):
    columns = {
        "one": pa.array([None, None, [1.0, 2.0], [3.0, 4.0]]),
        "several": pa.array([None, None, [1.0, 2.0], [3.0]]),
        "empty": pa.array([[], [], [], []], pa.list_(pa.float32())),
        "null": pa.nulls(4, pa.list_(pa.float16())),
        "text": pa.array([["a"]] * 4),
    }
    pq.write_table(pa.table(columns), tmp_path / "a.parquet", row_group_size=2)
    pq.write_table(pa.table({name: pa.nulls(1) for name in columns}), tmp_path / "null.parquet")
    groups = ParquetGroups((tmp_path / "null.parquet", tmp_path / "a.parquet"))
    assert learned_widths(pa.table(columns).schema, [groups]) == {"one": 2}


@pytest.mark.parametrize("first", ["whole", "floats"])
def test_vectors_of_one_file_may_be_whole_numbers(first):
    """JSON writes 1.0 as 1."""
    kinds = {"whole": pa.list_(pa.int64()), "floats": pa.list_(pa.float64())}
    types = CommonTypes()
    types.add(pa.schema({"title": kinds.pop(first)}), "a.jsonl")
    types.add(pa.schema({"title": kinds.popitem()[1]}), "b.jsonl")
    assert is_vector(types.schema.field("title").type)
    assert not types.mixed
