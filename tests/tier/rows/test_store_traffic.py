"""Counts of rows between the devices and a store, counted again by Python."""

from __future__ import annotations

import time

import numpy as np
import pytest
from flax import nnx

import jaxrec
from jaxrec.tier import Cached, Dynamic, ahead, make
from jaxrec.tier.model_statistics import statistics, totals
from jaxrec.tier.planning.tier import TierObserver, tier_of
from jaxrec.tier.rows.records import StoreTraffic, step_of
from jaxrec.tier.stores.memory_store import MemoryStore
from tests.tier import models
from tests.tier.vocabulary.test_cached import NAMES, make_stream

KEYS = {
    "fetched",
    "initialized",
    "written",
    "fetched_bytes",
    "written_bytes",
    "read_ms",
    "write_ms",
    "stall_ms",
    "last_stall_ms",
}


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_times_and_counts():
    clock = Clock()
    traffic, other = StoreTraffic(10, clock), StoreTraffic(1, clock)
    assert traffic.summary() == dict.fromkeys(KEYS, 0)
    with traffic.waiting():  # of an evaluation
        clock.now += 100
    for wait in (0.5, 0.25):
        with step_of([traffic, other]):
            for part in (wait, 1.0):
                with traffic.waiting():
                    clock.now += part
    with traffic.reading():
        clock.now += 4
    with traffic.writing(7):
        clock.now += 8
    traffic.add_received(np.array([True, False, True, False, False]))
    assert traffic.summary() == {
        "fetched": 2,
        "initialized": 3,
        "written": 7,
        "fetched_bytes": 20,
        "written_bytes": 70,
        "read_ms": 2000.0,
        "write_ms": 4000.0,
        "stall_ms": 1375.0,
        "last_stall_ms": 1250.0,
    }
    assert other.summary() == dict.fromkeys(KEYS, 0)
    assert other.steps == 2


def test_rows_that_were_not_written_do_not_count():
    traffic = StoreTraffic(10)
    with pytest.raises(OSError, match="full"), traffic.writing(3):
        raise OSError("full")
    assert traffic.summary()["written"] == 0


class Ledger(TierObserver):
    """The ids that were evicted before, as a set of Python for each vocabulary."""

    def __init__(self, count: int) -> None:
        self.gone: list[set[int]] = [set() for _ in range(count)]
        self.fetched, self.initialized, self.written = ([0] * count for _ in range(3))

    def moved(self, assignments):
        for v, each in enumerate(assignments):
            for i in each.new_ids.tolist():
                if i in self.gone[v]:
                    self.fetched[v] += 1
                else:
                    self.initialized[v] += 1
            self.gone[v].update(each.evicted_ids.tolist())
            self.written[v] += each.evicted_ids.size

    def taken(self, batch):
        return

    def restored(self):
        return


def test_rows_of_a_run():
    """An item has 8 + 1 numbers of two tables, a query 8, each with Adam's two moments."""
    model = make(lambda: models.Ranker(6000, "adam"), dict.fromkeys(NAMES, Cached(80)))
    tier = tier_of(model)
    ledger = Ledger(len(tier.vocabularies))
    tier.observers.add(ledger)
    models.train(model, ahead(model, make_stream(40), look_ahead=2))
    list(ahead(model, make_stream(5, seed=1), is_training=False))
    tier.settle(model)  # all rows are in the store
    values = statistics(model)
    widths = {"item": 3 * 4 * 9, "query": 3 * 4 * 8}
    for v, each in enumerate(tier.vocabularies):
        table = each.tables[0].config.name
        of_table = values[table]
        assert of_table["fetched"] == ledger.fetched[v] > 20
        assert of_table["initialized"] == ledger.initialized[v]
        assert of_table["written"] == ledger.written[v] > 100
        for name in ("fetched", "written"):
            assert of_table[f"{name}_bytes"] == of_table[name] * widths[table]
        assert each.transfer.traffic.steps == 40
    summed = totals(model)
    for name in KEYS:
        assert summed[name] == pytest.approx(values["item"][name] + values["query"][name])


class SlowStore(MemoryStore):
    """Takes a second to read."""

    def get(self, ids):
        time.sleep(1)
        return super().get(ids)


def make_one(settings):
    config = jaxrec.EmbeddingBagConfig("item", num_embeddings=100, embedding_dim=4)
    return make(
        lambda: jaxrec.EmbeddingBagCollection([config], rngs=nnx.Rngs(0)), {"item": settings}
    )


def test_training_waits_for_a_slow_store():
    model = make_one(Cached(10, SlowStore()))
    batches = [jaxrec.KeyedJaggedArray.from_lists({"item": [[i]]}) for i in (1, 1)]
    taken = ahead(model, batches)
    next(taken)
    waited = statistics(model)["item"]
    # The reader begins a moment before the training thread waits for it.
    assert 100 < waited["last_stall_ms"] == waited["stall_ms"]
    assert waited["read_ms"] >= 1000
    next(taken)
    after = statistics(model)["item"]
    assert after["last_stall_ms"] == 0
    assert after["stall_ms"] == waited["stall_ms"] / 2


def test_tables_without_a_store_have_no_traffic():
    model = make_one(Dynamic())
    assert not KEYS & statistics(model)["item"].keys()
    assert not KEYS & totals(model).keys()
