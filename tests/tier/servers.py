"""Servers that tests start on a free port of this machine, and end."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator

import pytest

PROGRAMS = ("redis-server", "valkey-server")
_START_SECONDS = 20


def redis_program() -> str:
    """Return the path of Redis or Valkey; skip the test without one.

    With JAXREC_REQUIRE_SERVERS=1 the test fails instead.
    """
    for name in PROGRAMS:
        if path := shutil.which(name):
            return path
    reason = f"needs a server: {' or '.join(PROGRAMS)} is not on the PATH"
    if os.environ.get("JAXREC_REQUIRE_SERVERS") == "1":
        pytest.fail(reason)
    pytest.skip(reason)


@contextlib.contextmanager
def redis_server(directory, *options: str) -> Iterator[int]:
    """Run a server and yield its port.

    Args:
        directory: Where it writes.
        *options: Options of its command line.
    """
    port = free_port()
    command = [redis_program(), "--port", str(port), "--bind", "127.0.0.1", "--dir", str(directory)]
    process = subprocess.Popen([*command, "--save", "", *options], stdout=subprocess.DEVNULL)
    try:
        wait_for(port, process)
        yield port
    finally:
        process.kill()
        process.wait()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def wait_for(port: int, process: subprocess.Popen) -> None:
    """Wait until a server listens."""
    give_up = time.monotonic() + _START_SECONDS
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            if process.poll() is not None or time.monotonic() > give_up:
                pytest.fail(f"the server did not start: {process.args}")
            time.sleep(0.02)


@pytest.fixture(scope="module")
def redis_port(tmp_path_factory) -> Iterator[int]:
    """Port of a server that the tests of a file share."""
    with redis_server(tmp_path_factory.mktemp("redis")) as port:
        yield port
