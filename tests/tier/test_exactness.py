"""Open vocabularies train as plain tables do whose rows were assigned in the same order."""

from __future__ import annotations

import itertools

import jax
import numpy as np
import pytest

import jaxrec
from jaxrec.tier import Dynamic, ahead, make
from jaxrec.tier.planning.tier import tier_of
from tests.tier import models


def rows_of(tier) -> dict[str, dict[int, int]]:
    """The row of each id by feature."""
    result = {}
    for each in tier.vocabularies:
        ids, rows = each.vocabulary.map.items()
        pairs = dict(zip(ids.tolist(), rows.tolist(), strict=True))
        result |= dict.fromkeys(each.features, pairs)
    return result


def on_mesh(make_model, kind):
    mesh = jax.make_mesh((8,), ("data",))
    names = ("item", "query", "age", "item_wide")
    placements = {name: kind for name in names}
    if kind.kind == "column_wise":
        placements["item_wide"] = jaxrec.mesh.row_wise()
    plan = jaxrec.plan.ShardingPlan.from_dict(placements)
    return jaxrec.shard(make_model, plan, mesh)


PLACEMENTS = {
    "row_wise": jaxrec.mesh.row_wise(),
    "table_wise": jaxrec.mesh.table_wise(device=3),
    "column_wise": jaxrec.mesh.column_wise(devices=(0, 1)),
    "data_parallel": jaxrec.mesh.data_parallel(),
}
SETTINGS = {name: Dynamic() for name in ("item", "query", "item_wide")}
PARTS = {name: Dynamic(store="memory://") for name in SETTINGS}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("placement", "optimizer"),
    [
        *itertools.product([None, "row_wise"], models.OPTIMIZERS),
        ("table_wise", "rowwise_adagrad"),
        ("column_wise", "adam"),
        ("data_parallel", "rowwise_adagrad"),
    ],
)
def test_with_room_for_all_ids(placement: str | None, optimizer: str):
    batches, names = models.stream(20, 60)

    def make_model():
        return make(lambda: models.Ranker(66, optimizer), SETTINGS)

    model = make_model() if placement is None else on_mesh(make_model, PLACEMENTS[placement])
    losses = models.train(model, ahead(model, batches, look_ahead=2))

    rows = rows_of(tier_of(model))
    assert set(rows["item"]) <= set(names.tolist())
    plain = models.Ranker(66, optimizer)
    models.set_first_rows(plain, rows)
    expected = models.train(plain, [(models.plain_batch(x, rows), y) for x, y in batches])
    np.testing.assert_allclose(losses, expected, rtol=1e-6, atol=1e-6)
    used = np.array(list(rows["item"].values()))
    np.testing.assert_allclose(
        model.embeddings.table("item")[used], plain.embeddings.table("item")[used], atol=2e-6
    )


@pytest.mark.parametrize(
    ("placement", "optimizer"),
    [
        *itertools.product([None, "row_wise"], models.OPTIMIZERS),
        pytest.param("column_wise", "adam", marks=pytest.mark.slow),
    ],
)
def test_evicted_rows_return_as_they_left(placement: str | None, optimizer: str):
    vocabulary = 6000
    batches, names = models.stream(40, vocabulary, samples=8)

    def make_model():
        return make(lambda: models.Ranker(302, optimizer), PARTS)

    model = make_model() if placement is None else on_mesh(make_model, PLACEMENTS[placement])
    losses = models.train(model, ahead(model, batches, look_ahead=1))
    assert tier_of(model).statistics()["item+item_wide"]["evicted"] > 100

    rows = {name: i for i, name in enumerate(names.tolist())}
    of_features = dict.fromkeys(("item", "query", "context"), rows)
    plain = models.Ranker(vocabulary, optimizer)
    # The scale of first values depends on the number of rows; those of the model are wanted.
    small = models.Ranker(302, optimizer)
    set_first_rows_like(plain, small, of_features)
    expected = models.train(plain, [(models.plain_batch(x, of_features), y) for x, y in batches])
    np.testing.assert_allclose(losses, expected, rtol=1e-6, atol=1e-6)


def set_first_rows_like(plain, small, rows) -> None:
    """First values as tables of another number of rows would have them."""
    for large, few in ((plain.embeddings, small.embeddings), (plain.wide, small.wide)):
        configs = {config.name: config for config in few.configs}
        store = large.tables.get_value()
        for config in large.configs:
            of_table = rows.get(config.feature_names[0])
            if of_table is None:
                few_rows = np.asarray(few.table(config.name))
                store = store.write(config.name, few_rows)
                continue
            ids = np.array(list(of_table), np.int64)
            indices = np.array(list(of_table.values()), np.int32)
            new = models.NewRows(configs[config.name], indices, ids)
            store = models.reset(store, [new], models.first_key(few))
        large.tables.set_value(store)
