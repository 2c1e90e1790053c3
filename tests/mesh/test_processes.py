"""Two real processes on this machine, joined by gloo."""

from __future__ import annotations

import signal
import time

import pytest

from tests.pairs import Pair

pytestmark = [pytest.mark.jax_version, pytest.mark.slow]


@pytest.mark.parametrize("scenario", ["plan_together", "train", "refuse", "pack_alike"])
def test_two_processes(pair, scenario):
    """They plan and pack alike, train as one device, and refuse plans and batches that differ."""
    pair.run(f"tests.mesh.processes:{scenario}")


def test_a_process_that_dies_is_reported_in_bounded_time(forks):
    """The heartbeat's timeout is 5 s; the other process ends with an error, and does not hang."""
    pair = Pair(forks, heartbeat_timeout=5)
    survivor, victim = pair.send("tests.mesh.processes:die")
    try:
        assert victim.wait(120) == -signal.SIGKILL, victim.errors
        start = time.monotonic()
        assert survivor.wait(60) != 0
        assert time.monotonic() - start < 40
    finally:
        pair.stop()
    assert survivor.output.endswith("stepped\n")
    assert any(
        sign in survivor.errors
        for sign in ("heartbeat", "Connection closed by peer", "Connection reset")
    ), survivor.errors
