"""Two real processes on this machine, joined by gloo."""

from __future__ import annotations

import pytest

SCENARIOS = ["plan_together", "train", "refuse", "meshes_without_some_devices", "pack_alike"]
pytestmark = [pytest.mark.jax_version, pytest.mark.processes, pytest.mark.slow]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_two_processes(pair, scenario):
    """They plan and pack alike, train as one device, and refuse plans and batches that differ."""
    pair.run(f"tests.mesh.processes:{scenario}")
