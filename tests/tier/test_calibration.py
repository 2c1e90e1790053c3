"""Measured rates of caches."""

from __future__ import annotations

import dataclasses

import jax
import pytest

from jaxrec.plan import Topology
from jaxrec.plan.calibration import Measurement
from jaxrec.tier import calibration
from jaxrec.tier.calibration import calibrate_caches
from jaxrec.tier.planning.tier import tier_of


@pytest.mark.slow
def test_rates_of_caches_are_measured(monkeypatch):
    monkeypatch.setattr(calibration, "_IDS", (32, 64))
    monkeypatch.setattr(calibration, "_ASSIGNED_IDS", (64, 4096))
    close, statistics = calibration.close, []

    def close_and_count(model):
        statistics.extend(tier_of(model).statistics().values())
        close(model)

    monkeypatch.setattr(calibration, "close", close_and_count)
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    known, measured = Topology.from_mesh(mesh), list[Measurement]()
    topology = calibrate_caches(known, mesh, seconds=1e-3, report=measured.append)

    operations = ["assign"] * 2 + ["host_moves"] * 4 + ["store_moves"] * 4
    assert [m.operation for m in measured] == operations
    assert {m.bytes for m in measured if m.bytes} == {
        rows * (width + 1) * 4 for rows in (32, 64) for width in (16, 64)
    }
    assert 1e-6 < topology.assign.seconds(items=100) < 1
    for rate in (topology.host_moves, topology.store_moves):
        # On a busy machine a batch that moves rows may take less time than one that does not.
        assert 0 <= rate.seconds(items=100, bytes=10_000) < 1
    same = {name: getattr(known, name) for name in ("assign", "host_moves", "store_moves")}
    assert dataclasses.replace(topology, **same) == known
    # Each batch is one of those that the measurement says: of ids with rows, or of ids without.
    assigned, moved = statistics[:4], statistics[4:]
    assert all(each["evicted"] == 0 and each["hit_rate"] > 0.9 for each in assigned)
    assert all(each["hits"] == 0 and each["evicted"] >= 100 * 32 for each in moved)
