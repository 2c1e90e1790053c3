"""The server: its socket, the limits of its connections, and its end on a signal."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import re
import resource
import socket
import sys
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from jaxrec.serve.http.app import Application
from jaxrec.serve.http.limits import LINGER_SECONDS, Limits

_BACKLOG = 2048

_SWITCH_SECONDS = 2e-4

# Time in which a connection that was just accepted sends its request.
_LAST_REQUEST_SECONDS = 1.0

# Files that the process opens beside connections.
_OTHER_FILES = 256

_UPGRADE = re.compile(rb"\r\nupgrade:[^\r\n]*", re.IGNORECASE)

# Bytes that a refused client may still send.
_MOST_DISCARDED = 1 << 20


class ServerConfig(uvicorn.Config):
    """uvicorn's configuration with the endpoint's limits."""

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
    """A connection that refuses a header that is too large or takes too long."""

    # uvicorn limits neither, so clients that send slowly, or send headers without end, would keep
    # connections and memory.
    config: ServerConfig

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # A response is written in two parts. Without this the second one waits for the client's
        # acknowledgement of the first, which may take 40 ms; asyncio sets it only for sockets that
        # were made with a protocol's number.
        connection = transport.get_extra_info("socket")
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._timer: asyncio.TimerHandle | None = None
        self._received = self._header_bytes = 0  # while a header comes, and of its fields
        self._is_header = True
        self._discarded: int | None = None  # bytes since the connection was refused
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
        if self._discarded is not None:
            self._discarded += len(data)
            if self._discarded > _MOST_DISCARDED:
                self.transport.close()
            return
        if self._is_header:
            if not self._received:
                data = _without_upgrade(data)
            self._received += len(data)
            if self._timer is None:  # the next request of the connection
                self._start_timer()
        super().data_received(data)
        if self._is_header and self._received > self.config.limits.max_header:
            self._refuse_header()

    def _unsupported_upgrade_warning(self) -> None:
        """Suppress uvicorn's warning, since every client can ask for another protocol."""

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_header, self._header_bytes = True, 0

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._header_bytes += len(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_header:  # and no trailer, which may come after a chunked body
            super().on_header(name, value)
            self._header_bytes += len(name) + len(value)

    def on_headers_complete(self) -> None:
        self._is_header, self._received = False, 0
        self._stop_timer()
        if self._header_bytes > self.config.limits.max_header:  # it came in one piece
            self._refuse_header()
        else:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if self._discarded is None:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self._discarded is None:
            super().on_message_complete()
        self._is_header, self._received = True, 0

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

    def _refuse_header(self) -> None:
        """Refuse a header that is too large, and let the client read why."""
        most = self.config.limits.max_header
        self._refuse(
            "431 Request Header Fields Too Large",
            f"the header is larger than {most:,} bytes; send fewer or shorter fields",
            is_sending=True,
        )

    def _refuse(self, status: str, problem: str, *, is_sending: bool = False) -> None:
        """Send an error response and close the connection.

        With ``is_sending`` the client may still send: it can read the response for a moment.
        """
        if self.transport.is_closing() or self._discarded is not None:
            return
        body = b'{"error":"%s"}' % problem.encode()
        head = (
            f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self._discarded = 0
        self._stop_timer()
        # The rest of the client's bytes is read and forgotten for a moment: a connection that is
        # closed with unread bytes is reset, and the answer is lost.
        if is_sending and self.transport.can_write_eof():
            self.transport.write_eof()
            self._timer = self.loop.call_later(LINGER_SECONDS, self.transport.close)
        else:
            self.transport.close()


def _without_upgrade(data: bytes) -> bytes:
    """Return the first bytes of a request without the header field ``upgrade``."""
    # A server may ignore the offer, but httptools takes the bytes after the header for the other
    # protocol.
    head, end, body = data.partition(b"\r\n\r\n")
    return _UPGRADE.sub(b"", head) + end + body if end and _UPGRADE.search(head) else data


class ModelServer(uvicorn.Server):
    """A server that ends with exit code 0 on SIGTERM and SIGINT, after all responses.

    On a signal `/ready` says that the endpoint stops, and connections are closed after their next
    response. After ``limits.drain`` seconds new connections are refused, and idle ones are closed.
    Requests under way have ``limits.stop`` seconds more. A second SIGINT ends at once.
    """

    def __init__(self, application: Application) -> None:
        super().__init__(ServerConfig(application.asgi, application.limits))
        self._application = application
        connections = self.server_state.connections
        application.metrics.connections.set_function(lambda: len(connections))

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to stop; uvicorn calls it on SIGTERM and SIGINT."""
        if self.should_exit and sig == 2:
            self.force_exit = True
        self._application.stop()
        self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        """Return whether the server ends; called ten times a second."""
        if self._application.failure is not None:
            return True
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Answer the requests under way, and close all connections."""
        await self._pause(self._application.limits.drain)
        # The system completes connections by itself, and resets those that wait in a listener when
        # it is closed. So we accept them first. A connection that begins between the two calls,
        # microseconds apart, is still reset; a load balancer that heeds /ready opens none by then.
        waiting: list[socket.socket] = []
        for listener in sockets or []:
            with contextlib.suppress(BlockingIOError, InterruptedError):
                while True:
                    waiting.append(listener.accept()[0])
        for server in self.servers:
            server.close()
        loop = asyncio.get_running_loop()
        for connection in waiting:
            connection.setblocking(False)
            await loop.connect_accepted_socket(self._protocol, connection)
        await self._pause(_LAST_REQUEST_SECONDS, until_closed=True)
        await super().shutdown(sockets)

    async def _pause(self, seconds: float, *, until_closed: bool = False) -> None:
        """Wait ``seconds``; end early if no connection is left, or the server must end."""
        loop = asyncio.get_running_loop()
        stop = loop.time() + seconds
        while loop.time() < stop and not self.force_exit and self._application.failure is None:
            # First, since a connection that was just accepted is counted a little later.
            await asyncio.sleep(0.02)
            if until_closed and not self.server_state.connections:
                return

    def _protocol(self) -> LimitedProtocol:
        return LimitedProtocol(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens at an address or name of this machine; port 0: any free port."""
    (family, _, _, _, address), *_ = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    return socket.create_server(address[:2], family=family, backlog=_BACKLOG)


def address_of(listener: socket.socket) -> str:
    """Return the URL of a socket that listens."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"


def allow_connections(wanted: int) -> int:
    """Raise the process's limit of open files; return how many of ``wanted`` connections fit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = sys.maxsize if hard == resource.RLIM_INFINITY else hard
    target = min(wanted + _OTHER_FILES, most)
    if soft != resource.RLIM_INFINITY and soft < target:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
        soft = target
    return wanted if soft == resource.RLIM_INFINITY else max(1, min(wanted, soft - _OTHER_FILES))


def serve(application: Application, listener: socket.socket) -> None:
    """Answer requests until a signal; raise the error if the model cannot be started."""
    # The thread that predicts and the one that answers take turns often: with Python's 5 ms each
    # response would wait for that long.
    sys.setswitchinterval(_SWITCH_SECONDS)
    # The modules and the model live as long as the process: a full garbage collection that visits
    # them stops all requests for 80 ms.
    gc.collect()
    gc.freeze()
    server = ModelServer(application)
    server.run(sockets=[listener])
    if application.failure is not None:
        raise application.failure
