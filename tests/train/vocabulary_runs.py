"""Results of `jaxrec train --vocabulary dynamic`: rows by id, and the history of a run."""

from __future__ import annotations

import json

import numpy as np

from jaxrec.tier.planning.tier import tier_of

LAYERS = [
    "--model.embedding-dim=4",
    "--model.bottom-layer-sizes=4",
    "--model.top-layer-sizes=4",
]


def rows_by_id(model, table="cat_0"):
    (each,) = [v for v in tier_of(model).vocabularies if table in [t.config.name for t in v.tables]]
    ids, rows = each.vocabulary.map.items()
    values = np.asarray(model.embeddings.table(table))
    return dict(zip(ids.tolist(), values[rows], strict=True))


def assert_same(model, other, tables=("cat_0", "cat_2", "cat_25"), **tolerances):
    for table in tables:
        rows, others = rows_by_id(model, table), rows_by_id(other, table)
        assert rows.keys() == others.keys()
        for i, row in rows.items():
            np.testing.assert_allclose(row, others[i], err_msg=f"{table}, {i}", **tolerances)


def history(output):
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
