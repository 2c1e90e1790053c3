"""Models whose tables change, and copies of them that changes bring up to date."""

from __future__ import annotations

import jax
import numpy as np
from flax import nnx

import jaxrec
from jaxrec import mesh as m
from jaxrec.tier import Dynamic, lfu, lru, make, shared
from jaxrec.tier.planning.tier import tier_of
from tests.tier import models

PLACEMENTS = {
    "one_device": None,
    "data_parallel": m.data_parallel(),
    "row_wise": m.row_wise(),
    "column_wise": m.column_wise(devices=(2, 7)),
    "grid": m.grid(),
}
BATCH = 8


class Plain(nnx.Module):
    """Tables that share a feature, one with two features, and a frozen one."""

    def __init__(self):
        config = jaxrec.EmbeddingBagConfig
        tables = [
            config("item", 60, 8),
            config("user", 40, 8, ["user", "friend"]),
            config("age", 50, 8, ["user"]),
            config("fixed", 60, 8, ["item"], trainable=False),
        ]
        rngs, optimizer = nnx.Rngs(0), jaxrec.optim.adam(0.1)
        self.deep = jaxrec.EmbeddingBagCollection(tables, optimizer=optimizer, rngs=rngs)
        self.wide = jaxrec.EmbeddingBagCollection(
            [config("item", 60, 8)], optimizer=optimizer, rngs=rngs
        )

    def __call__(self, features):
        return self.deep(features).values.sum(1) + self.wide(features).values.sum(1)


NAMES = ("deep/item", "user", "age", "wide/item")
READS = {"deep/item": ["item"], "user": ["user", "friend"], "age": ["user"], "wide/item": ["item"]}


def make_plain(placement=None):
    if placement is None:
        return Plain(), None
    mesh = jax.make_mesh((2, 4), ("host", "device"))
    plan = dict.fromkeys(["item", "user", "age", "fixed"], placement)
    return jaxrec.shard(Plain, jaxrec.plan.ShardingPlan.from_dict(plan), mesh), mesh


def draw_batch(rng):
    data = {
        key: [rng.integers(0, 40, n).tolist() for n in rng.integers(0, 3, BATCH)]
        for key in ("item", "user", "friend", "unread")
    }
    capacities = dict.fromkeys(data, 2 * BATCH)
    features = jaxrec.KeyedJaggedArray.from_lists(data, capacities=capacities)
    return features, rng.integers(0, 2, BATCH).astype(np.float32)


def tables_of(model):
    """Rows and state of the trained tables, by the tracker's names."""
    result = {}
    for name in NAMES:
        path, _, table = name.rpartition("/")
        collection = getattr(model, path or "deep")
        result[name] = {"rows": np.array(collection.table(table))}
        result[name] |= {k: np.array(x) for k, x in collection.table_state(table).items()}
    return result


def brought_up_to_date(copy, changes):
    for name, arrays in copy.items():
        each = changes[name]
        for key, array in {"rows": each.rows, **each.state}.items():
            arrays[key][each.ids] = array


def assert_same(copy, tables):
    for name, arrays in tables.items():
        for key, array in arrays.items():
            np.testing.assert_array_equal(copy[name][key], array, err_msg=f"{name} {key}")


def ids_in(batches):
    """The ids of batches by the names of the tables that read them."""
    return {
        name: sorted(
            {
                i
                for features, _ in batches
                for key in keys
                for bag in features[key].to_lists()
                for i in bag
            }
        )
        for name, keys in READS.items()
    }


OPEN = ("item", "query", "item_wide")
SETTINGS = {
    "lost": Dynamic(eviction=lru()),
    "stored": Dynamic(store="memory://", unknown=shared(3)),
    "refused": Dynamic(eviction=lfu(), admit_after=2, unknown=shared(3)),
}


def make_open(settings, devices=1, rows=110):
    def made():
        return make(lambda: models.Ranker(rows, "adam"), dict.fromkeys(OPEN, settings))

    if devices == 1:
        return made()
    mesh = jax.make_mesh((devices,), ("data",))
    placements = dict.fromkeys((*OPEN, "age"), jaxrec.mesh.row_wise())
    placements["query"] = jaxrec.mesh.column_wise([0, 1])
    return jaxrec.shard(made, jaxrec.plan.ShardingPlan.from_dict(placements), mesh)


class Copy:
    """A copy of a model's open tables, by id, and of the rows that other ids read."""

    def __init__(self):
        self.rows = {name: {} for name in OPEN}
        self.unknown = {name: {} for name in OPEN}

    def update(self, changes):
        for name in OPEN:
            each = changes[name]
            assert not set(each.ids.tolist()) & set(each.removed.tolist())
            self.rows[name].update(zip(each.ids.tolist(), each.rows, strict=True))
            for i in each.removed.tolist():
                self.rows[name].pop(i, None)
            self.unknown[name].update(
                zip(each.unknown.ids.tolist(), each.unknown.rows, strict=True)
            )

    def assert_current(self, model):
        for name, rows in self.rows.items():
            collection = model.wide if name == "item_wide" else model.embeddings
            now = collection.rows(name, list(rows))
            np.testing.assert_array_equal(np.array(list(rows.values())).reshape(now.shape), now)
            table = np.asarray(collection.table(name))
            for row, values in self.unknown[name].items():
                np.testing.assert_array_equal(values, table[row])


def ids_now(model, name):
    """The ids that have a row, in the table or in its store, when the model is settled."""
    (each,) = [v for v in tier_of(model).vocabularies if name in v.name.split("+")]
    ids = set(each.vocabulary.map.items()[0].tolist())
    if each.transfer is not None:
        for stored, _ in each.transfer.store.scan():
            ids |= set(stored.tolist())
    return ids
