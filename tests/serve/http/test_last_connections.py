"""The end of a socket that listens."""

from __future__ import annotations

import socket
import sys

import pytest

from jaxrec.serve.http.last_connections import open_no_more
from jaxrec.serve.http.server import listen


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_connections_that_wait_are_kept_and_no_others_begin(host):
    try:
        listener = listen(host, 0)
    except OSError as error:
        pytest.skip(f"this machine has no address {host}: {error}")
    address = listener.getsockname()[:2]
    with listener, socket.create_connection(address, timeout=20) as waiting:
        if not open_no_more(listener):
            assert not sys.platform.startswith("linux")
            return
        with pytest.raises(TimeoutError):
            socket.create_connection(address, timeout=0.3)
        connection, _ = listener.accept()
        listener.close()
        with connection:
            waiting.sendall(b"request")
            assert connection.recv(7) == b"request"
            connection.sendall(b"answer")
            assert waiting.recv(6) == b"answer"
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address, timeout=20)
