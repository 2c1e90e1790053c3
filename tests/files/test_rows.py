"""Arrow files of rows and arrays; `tests/tier/test_row_file.py` has the Parquet files."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pytest

from jaxrec.files import rows

ARRAYS = {
    "float32": np.array([[1.5, -0.0], [np.nan, 2]], np.float32),
    "bfloat16": np.asarray(jnp.array([[1.5, -0.0], [np.inf, 2]], jnp.bfloat16)),
    "float8": np.asarray(jnp.array([[1.5], [2]], jnp.float8_e4m3fn)),
    "bool": np.array([[True], [False]]),
    "uint32": np.array([1, 2**32 - 1], np.uint32),
    "scalar": np.float16(3),
    "empty": np.zeros((0, 3), np.int8),
}


def test_arrow_files_keep_bits(tmp_path):
    with (tmp_path / "arrays").open("wb") as file:
        rows.write_arrays(file, ARRAYS)
    with pa.OSFile(str(tmp_path / "arrays")) as file:
        found = rows.read_arrays(file)
    assert found.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        assert found[name].dtype == array.dtype
        assert found[name].shape == array.shape
        assert found[name].tobytes() == array.tobytes()
    values = {k: x for k, x in ARRAYS.items() if np.ndim(x) and len(x) == 2}
    shapes = {k: jax.ShapeDtypeStruct(x.shape, x.dtype) for k, x in values.items()}
    with (tmp_path / "rows").open("wb") as file:
        writer = rows.RowWriter(file, shapes)
        writer.write(np.array([3, -5]), values)
        writer.write(np.array([4, 5]), values)
        writer.close()
    with pa.OSFile(str(tmp_path / "rows")) as file:
        for part in rows.read_rows(file, {}):
            assert not part[1]
    with pa.OSFile(str(tmp_path / "rows")) as file:
        parts = list(rows.read_rows(file, shapes))
        assert [ids.tolist() for ids, _ in parts] == [[3, -5], [4, 5]]
        for _, of_part in parts:
            for name, array in values.items():
                assert of_part[name].tobytes() == array.tobytes()
    other = {"float32": jax.ShapeDtypeStruct((2, 3), jnp.float32)}
    with (
        pa.OSFile(str(tmp_path / "rows")) as file,
        pytest.raises(ValueError, match="float32 of width 2, but the table has float32 of width 3"),
    ):
        list(rows.read_rows(file, other))
    with (
        pa.OSFile(str(tmp_path / "arrays")) as file,
        pytest.raises(ValueError, match="not an Arrow file of rows"),
    ):
        list(rows.read_rows(file, shapes))
