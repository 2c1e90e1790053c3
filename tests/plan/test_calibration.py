"""Measured rates, and rates fitted to times that they made."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from jaxrec.plan.calibration import Measurement, calibrate, fit
from jaxrec.plan.quantities import Links, Rate


def test_a_fit_finds_the_rate_that_times_were_made_of():
    rate = Rate(call=1e-4, item=2e-8, byte=3e-9)
    found = [
        Measurement("gather", items, items * width, rate.seconds(items=items, bytes=items * width))
        for items in (1000, 10_000, 100_000)
        for width in (64, 256, 1024)
    ]
    fitted = fit(found)
    for field in ("call", "item", "byte"):
        assert getattr(fitted, field) == pytest.approx(getattr(rate, field), rel=1e-6)


def test_a_fit_takes_off_what_is_known_and_never_falls_below_zero():
    found = [
        Measurement("update", items, items * 64, 3e-8 * items, known=1e-8 * items)
        for items in (1000, 10_000, 100_000)
    ]
    fitted = fit(found)
    assert fitted.seconds(items=10_000, bytes=640_000) == pytest.approx(2e-4)
    all_known = [dataclasses.replace(m, known=2 * m.seconds) for m in found]
    assert fit(all_known) == Rate(0.0, 0.0, 0.0)


@pytest.mark.slow
def test_calibration_measures_every_operation():
    mesh = jax.make_mesh((2, 2), ("host", "device"), devices=jax.devices()[:4])
    measured: list[Measurement] = []
    topology = calibrate(mesh, name="here", seconds=1e-4, report=measured.append)
    assert {m.operation for m in measured} == {
        *("sort", "gather", "update", "copy"),
        *("all_to_all", "reduce_scatter", "all_gather"),
    }
    assert (topology.name, topology.hosts, topology.devices_per_host) == ("here", 2, 2)
    assert all(m.seconds > 0 for m in measured)
    for rate in (topology.gather, topology.sort, topology.copy, topology.within.all_to_all):
        assert rate.seconds(items=10_000, bytes=1_000_000) > 0
    # Links within hosts and between them are measured apart.
    assert sum(m.operation == "all_to_all" for m in measured) == 6


def test_one_device_has_links_that_take_nothing():
    mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
    topology = calibrate(mesh, seconds=1e-4)
    assert topology.within == Links.of(0.0, 1e12)
    assert np.isfinite(topology.gather.byte)
