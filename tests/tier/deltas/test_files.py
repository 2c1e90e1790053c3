"""The files of a version, read by pyarrow alone."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pytest

from jaxrec.tier import (
    Subscriber,
)
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
