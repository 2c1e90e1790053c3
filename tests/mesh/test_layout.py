"""What is allocated for tables that lie unevenly over the devices."""

from __future__ import annotations

import warnings

import pytest

import jaxrec
from jaxrec.embed.layout import layout_tables
from jaxrec.mesh import data_parallel, row_wise, table_wise
from jaxrec.mesh.layout import layout_mesh, row_bytes, rows_by_device, warn_of_unused_memory
from jaxrec.mesh.shards import MeshShape

ROWS = 250_000  # 128 MB of 128 columns


def layout(placements, dtype="float32"):
    tables = [jaxrec.EmbeddingBagConfig(name, ROWS, 128, dtype=dtype) for name in placements]
    return layout_mesh(
        layout_tables(tables, jaxrec.optim.rowwise_adagrad()), placements, MeshShape(1, 8)
    )


def test_one_large_table_on_one_device():
    alone = layout({"large": table_wise(3)})
    assert rows_by_device(alone.groups[0]) == [0, 0, 0, ROWS, 0, 0, 0, 0]
    assert row_bytes(alone.groups[0]) == 128 * 4 + 4
    with pytest.warns(
        UserWarning,
        match="tables large take 123 MiB with their optimizer state, but 984 MiB are allocated: "
        ".*on all 8 devices, of which 7 hold none",
    ):
        warn_of_unused_memory(alone)


@pytest.mark.parametrize(
    "placements",
    [
        {"large": row_wise()},
        {"large": data_parallel()},
        {f"t{i}": table_wise(i % 8) for i in range(9)},
    ],
    ids=["by_rows", "copies", "spread"],
)
def test_tables_over_all_devices(placements):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_unused_memory(layout(placements))


def test_16_bit_rows():
    assert row_bytes(layout({"a": row_wise()}, "bfloat16").groups[0]) == 128 * 2 + 4
