"""The HTTP protocol of connections, with limits of headers and of connections."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from jaxrec.serve.http.limits import Limits


class ServerConfig(uvicorn.Config):
    """uvicorn's configuration with the endpoint's limits.

    Attributes:
        limits: The limits.
    """

    def __init__(self, app: Any, limits: Limits) -> None:
        super().__init__(
            app,
            loop="asyncio",
            http=LimitedProtocol,
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=max(1, round(limits.keep_alive)),
            timeout_graceful_shutdown=max(1, round(limits.stop)),
        )
        self.limits = limits


class LimitedProtocol(HttpToolsProtocol):
    """A connection whose header must come within some time and bytes.

    uvicorn limits neither, so that clients that send slowly, or send headers without end, would
    keep connections and memory.
    """

    config: ServerConfig

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # A response is written in two parts. Without this the second one waits for the client's
        # acknowledgement of the first, which may take 40 ms; asyncio sets it only for sockets that
        # were made with a protocol's number.
        connection = transport.get_extra_info("socket")
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._timer: asyncio.TimerHandle | None = None
        self._header_bytes = 0
        self._is_header = True
        limits = self.config.limits
        if len(self.connections) > limits.max_connections:
            self._refuse("503 Service Unavailable", "too many connections; try again later")
            return
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._is_header:
            self._header_bytes += len(data)
            if self._timer is None:  # the next request of the connection
                self._start_timer()
        super().data_received(data)
        if self._is_header and self._header_bytes > self.config.limits.max_header:
            self._refuse("431 Request Header Fields Too Large", "the header is too large")

    def _unsupported_upgrade_warning(self) -> None:
        """Answer a request for another protocol as HTTP, without a line in the log."""

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_header = True

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_header:  # and no trailer, which may come after a chunked body
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._is_header, self._header_bytes = False, 0
        self._stop_timer()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._is_header, self._header_bytes = True, 0

    def _start_timer(self) -> None:
        self._timer = self.loop.call_later(self.config.limits.read_timeout, self._time_out)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _time_out(self) -> None:
        self._timer = None
        seconds = self.config.limits.read_timeout
        self._refuse("408 Request Timeout", f"the header did not come within {seconds:g} s")

    def _refuse(self, status: str, problem: str) -> None:
        """Answer without a request, and close the connection."""
        if self.transport.is_closing():
            return
        body = b'{"error":"%s"}' % problem.encode()
        head = (
            f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()
