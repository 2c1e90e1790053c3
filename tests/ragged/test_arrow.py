"""Batches of Arrow columns."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given

from jaxrec.ragged import KeyedJaggedArray
from tests.ragged.strategies import nested_batches

pytestmark = pytest.mark.every_case

from_arrow = KeyedJaggedArray.from_arrow

ROWS = [[1, 2], None, [], [3]]
LISTS = [[1, 2], [], [], [3]]


@given(nested_batches())
def test_tables_agree_with_lists(rows):
    table = pa.table({key: pa.array(bags, pa.list_(pa.int64())) for key, bags in rows.items()})
    batch = from_arrow(table)
    assert batch.to_lists() == rows
    assert batch.capacities == KeyedJaggedArray.from_lists(rows).capacities
    assert from_arrow(dict(zip(rows, table.columns, strict=True))).to_lists() == rows


@pytest.mark.parametrize(
    "kind",
    [
        pa.list_(pa.int64()),
        pa.list_(pa.uint8()),
        pa.large_list(pa.int32()),
        pa.list_view(pa.int64()),
        pa.large_list_view(pa.int16()),
    ],
    ids=str,
)
def test_every_kind_of_list(kind):
    array = pa.array(ROWS, kind)
    weights = pa.array([[0.5, 1], None, [], [2]], pa.list_(pa.float32()))
    batch = from_arrow({"f": array}, {"f": weights})
    assert batch["f"].to_lists() == LISTS
    assert batch["f"].weights_to_lists() == [[0.5, 1.0], [], [], [2.0]]
    assert from_arrow({"f": array[1:]})["f"].to_lists() == LISTS[1:]
    assert from_arrow({"f": array[:2]})["f"].to_lists() == LISTS[:2]
    chunks = pa.chunked_array([array, array[:0], array[:1]])
    assert from_arrow({"f": chunks})["f"].to_lists() == [*LISTS, *LISTS[:1]]
    assert from_arrow({"f": pa.chunked_array([], kind)})["f"].to_lists() == []


def test_a_null_row_may_hide_values():
    values, offsets = pa.array([1, 2, 3]), pa.array([0, 1, 2, 3], pa.int32())
    array = pa.ListArray.from_arrays(offsets, values, mask=pa.array([False, True, False]))
    assert from_arrow({"f": array})["f"].to_lists() == [[1], [], [3]]


def test_lists_of_fixed_size():
    array = pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int32(), 2))
    assert from_arrow({"f": array})["f"].to_lists() == [[1, 2], [], [3, 4]]
    assert from_arrow({"f": array[1:]})["f"].to_lists() == [[], [3, 4]]


def test_one_id_per_row():
    batch = from_arrow(
        pa.record_batch({"f": pa.array([4, None, 5]), "g": pa.array([1, 2, 3], pa.uint16())})
    )
    assert batch.to_lists() == {"f": [[4], [], [5]], "g": [[1], [2], [3]]}
    weighted = from_arrow({"f": pa.array([4, None])}, {"f": pa.array([0.5, None])})
    assert weighted["f"].weights_to_lists() == [[0.5], []]
    assert weighted.weights.dtype == np.float32


@pytest.mark.parametrize("kind", [pa.float16(), pa.float64(), pa.int64()], ids=str)
def test_weights_become_float32(kind):
    weights = pa.array(np.array([2]), pa.int64()).cast(kind)
    batch = from_arrow({"f": pa.array([4])}, {"f": weights})
    assert batch.weights.dtype == np.float32
    assert batch["f"].weights_to_lists() == [[2.0]]


def test_columns_of_one_name():
    table = pa.Table.from_arrays([pa.array([1]), pa.array([2]), pa.array([3])], ["f", "g", "f"])
    with pytest.raises(ValueError, match=r"columns \['f'\] occur more than once in the table; ren"):
        from_arrow(table)
    with pytest.raises(ValueError, match=r"columns \['f'\] occur more than once"):
        from_arrow(pa.table({"f": [1], "g": [2]}), table.to_batches()[0])


def test_ids_are_checked():
    with pytest.raises(ValueError, match="feature 'f', sample 3: id 3 is outside"):
        from_arrow(pa.table({"f": ROWS}), bounds={"f": 3})
    with pytest.raises(ValueError, match="id 18446744073709551615 does not fit int32"):
        from_arrow({"f": pa.array([2**64 - 1], pa.uint64())})


@pytest.mark.parametrize(
    ("data", "weights", "error", "message"),
    [
        ({"f": [[1]]}, None, TypeError, "feature 'f' is a list; expected an Arrow array"),
        ({"f": pa.array([1.5])}, None, TypeError, "feature 'f' is of Arrow type double; expected"),
        ({"f": pa.array([["x"]])}, None, TypeError, "of Arrow type list<.*string>; expected integ"),
        ({"f": pa.array([[[1]]])}, None, TypeError, "of Arrow type list<.*list<"),
        ({"f": pa.array([True])}, None, TypeError, "of Arrow type bool"),
        ({"f": pa.array([[1], None, [2, None]])}, None, ValueError, "sample 2 has a null inside"),
        (
            {"f": pa.array([1, 2])},
            {"f": pa.array([1.0])},
            ValueError,
            "2 samples but weights for 1",
        ),
        (
            {"f": pa.array([[1], [2]])},
            {"f": pa.array([[1.0], [2.0, 3.0]])},
            ValueError,
            "feature 'f', sample 1: 1 ids but 2 weights",
        ),
        ({"f": pa.array([1])}, {"f": pa.array(["x"])}, TypeError, "expected floating point"),
    ],
    ids=[
        "list",
        "float",
        "string",
        "deep",
        "bool",
        "null_inside",
        "weights_samples",
        "weights_shape",
        "weights_string",
    ],
)
def test_errors(data, weights, error, message):
    with pytest.raises(error, match=message):
        from_arrow(data, weights)


def test_the_package_imports_without_arrow():
    program = "import sys; import jaxrec.ragged; assert 'pyarrow' not in sys.modules"
    subprocess.run([sys.executable, "-P", "-c", program], check=True)
