"""The bytes of records."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrec.embed.checkpoint_view import LogicalTable
from jaxrec.tier.rows.records import RecordLayout
from tests.fuzz import max_examples


def shape(*sizes: int, dtype: object = np.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def layout_of(dim: int = 2) -> RecordLayout:
    return RecordLayout.of([LogicalTable(shape(10, dim), {"sum": shape(10)})])


@settings(max_examples=max_examples(40))
@given(
    st.lists(
        st.tuples(
            st.integers(1, 5),
            st.sampled_from([np.float32, jnp.bfloat16, np.float16]),
            st.dictionaries(
                st.sampled_from("abc"),
                st.tuples(st.booleans(), st.sampled_from([np.float32, np.int32, jnp.bfloat16])),
            ),
        ),
        min_size=1,
        max_size=3,
    ),
    st.integers(0, 5),
    st.integers(0, 2**32),
)
def test_records_hold_rows_and_state(tables, count, seed):
    rng = np.random.default_rng(seed)
    shapes, values = [], []
    for dim, dtype, state in tables:
        sizes = {name: (9, dim) if is_wide else (9,) for name, (is_wide, _) in state.items()}
        shapes.append(
            LogicalTable(
                shape(9, dim, dtype=dtype),
                {name: shape(*sizes[name], dtype=kind) for name, (_, kind) in state.items()},
            )
        )
        values.append(
            {
                name: rng.normal(0, 9, (count, *array.shape[1:])).astype(array.dtype)
                for name, array in {"rows": shapes[-1].rows, **shapes[-1].state}.items()
            }
        )
    layout = RecordLayout.of(shapes)
    records = layout.pack(values)
    num_bytes = sum(
        array.dtype.itemsize * array[0].size if count else 0
        for table in values
        for array in table.values()
    )
    assert records.dtype == np.uint8
    assert records.shape == (count, layout.width)
    assert layout.width == num_bytes or not count
    for before, after in zip(values, layout.unpack(records), strict=True):
        assert before.keys() == after.keys()
        for name, array in before.items():
            assert after[name].dtype == array.dtype
            np.testing.assert_array_equal(after[name], array)


def test_records_of_devices_rows_in_any_memory_order():
    layout = RecordLayout.of([LogicalTable(shape(9, 3, dtype=jnp.bfloat16), {})])
    rows = np.asfortranarray(np.arange(12).reshape(4, 3).astype(ml_dtypes.bfloat16))
    (table,) = layout.unpack(layout.pack([{"rows": rows}]))
    np.testing.assert_array_equal(table["rows"], rows)


@pytest.mark.parametrize("wrong", [(1, 3), (4, 1), (3, 3)], ids=["row", "column", "rows"])
def test_arrays_of_another_shape_are_refused(wrong):
    layout = RecordLayout.of([LogicalTable(shape(9, 2), {}), LogicalTable(shape(9, 3), {})])
    tables = [{"rows": np.zeros((4, 2), np.float32)}, {"rows": np.zeros(wrong, np.float32)}]
    with pytest.raises(ValueError, match=r"table 1: 'rows' has the shape .*need \(4, 3\)"):
        layout.pack(tables)


def test_the_format_of_records():
    layout = layout_of()
    numbered, named = layout.record_format(), layout.record_format(["user", "item"], num_ids=7)
    assert numbered.width == named.width == layout.width
    assert (numbered.num_ids, named.num_ids) == (None, 7)
    assert numbered.description.startswith("table 0 rows float32[")
    assert named.description == numbered.description.replace("table 0", "user").replace(
        "table 1", "item"
    )
    assert layout_of(3).record_format().description != numbered.description
