"""The files of a version, read by pyarrow alone."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pytest

from jaxrec.tier import (
    Subscriber,
)
from jaxrec.tier.deltas import arrow_files
from tests.tier.deltas.models import (
    assert_same,
    draw_open,
    open_model,
    publish_and_train,
    trained_model,
)

# Small tables lose rows often.
pytestmark = pytest.mark.filterwarnings("ignore:the table .* thrashes")


def test_the_files_by_pyarrow(tmp_path):
    """As the docs describe them, for readers without jaxrec."""
    model = trained_model("lost")
    *_, last = publish_and_train(model, tmp_path, draw_open, with_state=True, full_every=9)
    newest = sorted(tmp_path.glob("*.json"))[-1]
    manifest = json.loads(newest.read_text())
    assert manifest["version"] == last.version
    files = manifest["delta"]["embeddings/item"]
    with pa.memory_map(str(tmp_path / files["rows"]["name"])) as source:
        table = pa.ipc.open_file(source).read_all()
    assert table.schema.field("row").type == pa.list_(pa.float32(), 8)
    assert table.num_rows == files["rows"]["rows"] > 0
    assert table.column_names == ["id", "row", "state_first_moment", "state_second_moment"]
    ids = table["id"].to_numpy()
    rows = np.array(table["row"].to_pylist(), np.float32)
    np.testing.assert_array_equal(rows, model.embeddings.rows("item", ids))
    with pa.memory_map(str(tmp_path / manifest["dense"]["name"])) as source:
        dense = pa.ipc.open_file(source).read_all()
    kernel = dense["name"].to_pylist().index("over/kernel")
    assert dense["shape"].to_pylist()[kernel] == [32, 1]
    found = np.frombuffer(dense["bytes"][kernel].as_buffer(), dense["dtype"][kernel].as_py())
    np.testing.assert_array_equal(found, np.asarray(model.over.kernel[...])[:, 0])


def test_small_parts(tmp_path, monkeypatch):
    """Rows are read and written a few at a time."""
    monkeypatch.setattr("jaxrec.files.rows._ROWS", 7)
    model, copy = trained_model("stored"), open_model("stored", "sgd")
    subscriber = Subscriber(copy, tmp_path)
    for _ in publish_and_train(model, tmp_path, draw_open, rounds=2, full_every=2):
        subscriber.update()
        assert_same(copy, model)


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
        arrow_files.write_arrays(file, ARRAYS)
    with pa.OSFile(str(tmp_path / "arrays")) as file:
        found = arrow_files.read_arrays(file)
    assert found.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        assert found[name].dtype == array.dtype
        assert found[name].shape == array.shape
        assert found[name].tobytes() == array.tobytes()
    values = {k: x for k, x in ARRAYS.items() if np.ndim(x) and len(x) == 2}
    shapes = {k: jax.ShapeDtypeStruct(x.shape, x.dtype) for k, x in values.items()}
    with (tmp_path / "rows").open("wb") as file:
        writer = arrow_files.RowFileWriter(file, shapes)
        writer.write(np.array([3, -5]), values)
        writer.write(np.array([4, 5]), values)
        writer.close()
    with pa.OSFile(str(tmp_path / "rows")) as file:
        for part in arrow_files.read_rows(file, {}):
            assert not part[1]
    with pa.OSFile(str(tmp_path / "rows")) as file:
        parts = list(arrow_files.read_rows(file, shapes))
        assert [ids.tolist() for ids, _ in parts] == [[3, -5], [4, 5]]
        for _, of_part in parts:
            for name, array in values.items():
                assert of_part[name].tobytes() == array.tobytes()
    other = {"float32": jax.ShapeDtypeStruct((2, 3), jnp.float32)}
    with (
        pa.OSFile(str(tmp_path / "rows")) as file,
        pytest.raises(ValueError, match="float32 of width 2, but the table has float32 of width 3"),
    ):
        list(arrow_files.read_rows(file, other))
    with (
        pa.OSFile(str(tmp_path / "arrays")) as file,
        pytest.raises(ValueError, match="not an Arrow file of rows"),
    ):
        list(arrow_files.read_rows(file, shapes))
