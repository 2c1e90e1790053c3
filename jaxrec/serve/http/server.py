"""The server: its socket, its signals and its end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import resource
import socket
import sys
from types import FrameType

import uvicorn

from jaxrec.serve.http.app import Application
from jaxrec.serve.http.last_connections import open_no_more
from jaxrec.serve.http.protocol import LimitedProtocol, ServerConfig

_BACKLOG = 2048

_SWITCH_SECONDS = 2e-4

# Time in which a connection that was just accepted sends its request.
_LAST_REQUEST_SECONDS = 1.0

# Time in which a connection that has begun is completed.
_LAST_CONNECTION_SECONDS = 0.1

# Files that the process opens beside connections.
_OTHER_FILES = 256


class ModelServer(uvicorn.Server):
    """A server that ends with exit code 0 on SIGTERM and SIGINT, after all responses.

    On a signal `/ready` says that the endpoint stops, and connections are closed after their next
    response. After ``limits.drain`` seconds new connections are refused, and idle ones are closed.
    Requests that are under way have ``limits.stop`` seconds more. A second SIGINT ends at once.

    Args:
        application: The endpoint.
    """

    def __init__(self, application: Application) -> None:
        super().__init__(ServerConfig(application.asgi, application.limits))
        self._application = application
        connections = self.server_state.connections
        application.metrics.connections.set_function(lambda: len(connections))

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin the end; called by the signal."""
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
        """Answer what is under way, and close all connections."""
        await self._pause(self._application.limits.drain)
        await self._accept_last(sockets or [])
        for server in self.servers:
            server.close()
        await self._pause(_LAST_REQUEST_SECONDS, until_closed=True)
        await super().shutdown(sockets)

    async def _pause(self, seconds: float, *, until_closed: bool = False) -> None:
        """Wait, but not where nobody waits for an answer."""
        loop = asyncio.get_running_loop()
        stop = loop.time() + seconds
        while loop.time() < stop and not self.force_exit and self._application.failure is None:
            # First, since a connection that was just accepted is counted a little later.
            await asyncio.sleep(0.02)
            if until_closed and not self.server_state.connections:
                return

    async def _accept_last(self, listeners: list[socket.socket]) -> None:
        """Accept the connections that wait: closing the listener would reset them."""
        for listener in listeners:
            open_no_more(listener)
        await self._pause(_LAST_CONNECTION_SECONDS)
        loop = asyncio.get_running_loop()
        for listener in listeners:
            with contextlib.suppress(BlockingIOError, InterruptedError):
                while True:
                    connection, _ = listener.accept()
                    connection.setblocking(False)
                    await loop.connect_accepted_socket(self._protocol, connection)

    def _protocol(self) -> LimitedProtocol:
        return LimitedProtocol(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens.

    Args:
        host: Address or name of this machine.
        port: Port; 0: any free one.

    Raises:
        OSError: The address cannot be used.
    """
    (family, _, _, _, address), *_ = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    return socket.create_server(address[:2], family=family, backlog=_BACKLOG)


def address_of(listener: socket.socket) -> str:
    """Return the URL of a socket that listens."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"


def allow_connections(wanted: int) -> int:
    """Allow the process as many open connections, and return how many it may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = sys.maxsize if hard == resource.RLIM_INFINITY else hard
    target = min(wanted + _OTHER_FILES, most)
    if soft != resource.RLIM_INFINITY and soft < target:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
        soft = target
    return wanted if soft == resource.RLIM_INFINITY else max(1, min(wanted, soft - _OTHER_FILES))


def serve(application: Application, listener: socket.socket) -> None:
    """Answer requests until a signal.

    Raises:
        Exception: The error that ended the start of the model.
    """
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
