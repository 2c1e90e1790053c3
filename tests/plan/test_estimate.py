"""Estimates that add up."""

from __future__ import annotations

import pytest

from jaxrec.plan.estimate import imbalance


def test_the_slowest_device_and_its_waits_make_the_step(plan):
    found = plan.estimate
    for device in found.devices:
        busy = sum(device.seconds.values())
        assert busy <= found.seconds * (1 + 1e-9)
        assert busy + device.waits == pytest.approx(found.seconds)
    assert sum(table.bytes for table in found.tables) == pytest.approx(
        sum(device.bytes["tables"] for device in found.devices)
    )


@pytest.mark.parametrize(
    ("loads", "expected"),
    [([1.0, 1.0], (1, 0, 0)), ([2.0, 0.0], (2, 0.5, 0.6931)), ([0.0, 0.0], (1, 0, 0))],
)
def test_imbalance(loads, expected):
    assert tuple(imbalance(loads).values()) == pytest.approx(expected, abs=1e-4)
