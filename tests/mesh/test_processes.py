"""Two real processes on this machine, joined by gloo."""

from __future__ import annotations

import contextlib
import pathlib
import signal
import socket
import subprocess
import sys
import time

PROGRAM = pathlib.Path(__file__).with_name("processes.py")


@contextlib.contextmanager
def started(scenario, count=2):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    processes = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), scenario, str(port), str(count), str(process)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for process in range(count)
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_two_processes_train_as_one_device_does():
    """Also that plans and batches which differ are refused; see processes.py."""
    with started("train") as processes:
        outputs = [process.communicate(timeout=300) for process in processes]
    for out, err in outputs:
        assert out.endswith("same values\n"), err


def test_a_process_that_dies_is_reported_in_bounded_time():
    """The heartbeat's timeout is 10 s; the other process ends with an error, and does not hang."""
    with started("die") as processes:
        survivor, victim = processes
        victim.communicate(timeout=300)
        assert victim.returncode == -signal.SIGKILL
        start = time.monotonic()
        out, err = survivor.communicate(timeout=60)
    assert out.endswith("stepped\n")
    assert survivor.returncode != 0
    assert time.monotonic() - start < 40
    assert any(
        sign in err for sign in ("heartbeat", "Connection closed by peer", "Connection reset")
    ), err
