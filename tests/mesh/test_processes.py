"""Two real processes on this machine, joined by gloo."""

from __future__ import annotations

import pathlib
import signal
import socket
import subprocess
import sys
import time
from typing import NamedTuple

import pytest

PROGRAM = pathlib.Path(__file__).with_name("processes.py")


class Ended(NamedTuple):
    """What a process printed, how it ended, and how long after the other one."""

    out: str
    err: str
    code: int
    seconds: float


@pytest.fixture(scope="module")
def ended():
    """The one that survives, and the one that kills itself; see processes.py."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    survivor, victim = (
        subprocess.Popen(
            [sys.executable, str(PROGRAM), str(port), "2", str(process)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for process in range(2)
    )
    try:
        ends = [Ended(*victim.communicate(timeout=300), victim.returncode, 0)]
        start = time.monotonic()
        out, err = survivor.communicate(timeout=60)
        ends.insert(0, Ended(out, err, survivor.returncode, time.monotonic() - start))
        yield ends
    finally:
        for process in (survivor, victim):
            process.kill()
            process.wait()


def test_two_processes_train_as_one_device_does(ended):
    """Also that they plan alike, and that plans and batches which differ are refused."""
    for each in ended:
        assert "same values\n" in each.out, each.err


def test_a_process_that_dies_is_reported_in_bounded_time(ended):
    """The heartbeat's timeout is 10 s; the other process ends with an error, and does not hang."""
    survivor, victim = ended
    assert victim.code == -signal.SIGKILL, victim.err
    assert survivor.out.endswith("stepped\n")
    assert survivor.code != 0
    assert survivor.seconds < 40
    assert any(
        sign in survivor.err
        for sign in ("heartbeat", "Connection closed by peer", "Connection reset")
    ), survivor.err
