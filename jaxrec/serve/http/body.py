"""Bodies of requests, read in parts within limits of size and time."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator

from starlette.requests import ClientDisconnect, Request

from jaxrec.serve.http.errors import RequestError, busy
from jaxrec.serve.http.limits import MEGABYTE, Limits
from jaxrec.serve.http.metrics import Metrics

# How long the rest of a refused body is read, so that a client that is still sending gets the
# response: closing a connection with unread bytes resets it.
LINGER_SECONDS = 2.0


class Memory:
    """Bytes of all bodies that the endpoint holds.

    Args:
        limits: Limits of the endpoint.
        metrics: Metrics of the endpoint.
    """

    def __init__(self, limits: Limits, metrics: Metrics) -> None:
        self._limits, self._metrics, self._held = limits, metrics, 0

    @contextlib.contextmanager
    def body(self) -> Iterator[Body]:
        """Hold the bytes of one body until the context ends."""
        body = Body(self)
        try:
            yield body
        finally:
            self._add(-len(body.content))
            body.content = bytearray()

    def take(self, size: int) -> None:
        """Hold more bytes.

        Raises:
            RequestError: There are too many.
        """
        if self._held + size > self._limits.max_buffer:
            raise busy(
                f"requests of {self._held / MEGABYTE:,.0f} MB are under way; try again later"
            )
        self._add(size)

    def _add(self, size: int) -> None:
        self._held += size
        self._metrics.body_bytes.set(self._held)

    @property
    def limits(self) -> Limits:
        return self._limits


class Body:
    """The body of a request.

    Attributes:
        content: What was read of it.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self.content = bytearray()

    async def read(self, request: Request) -> bytearray:
        """Read the body.

        Raises:
            RequestError: It is too large, comes too slowly, or there is too little memory.
            ClientDisconnect: The client closed the connection.
        """
        limits = self._memory.limits
        length = request.headers.get("content-length", "")
        if length.isdigit() and int(length) > limits.max_body:
            raise _too_large(limits.max_body)
        try:
            async with asyncio.timeout(limits.read_timeout):
                async for part in request.stream():
                    if len(self.content) + len(part) > limits.max_body:
                        raise _too_large(limits.max_body)
                    self._memory.take(len(part))
                    self.content += part
        except TimeoutError:
            raise RequestError(
                408,
                f"the body did not come within {limits.read_timeout:g} s; "
                f"{len(self.content):,} bytes did",
            ) from None
        return self.content


async def discard(request: Request, seconds: float = LINGER_SECONDS) -> None:
    """Read the rest of a body and forget it, for some time."""
    stop = time.monotonic() + seconds
    with contextlib.suppress(TimeoutError, ClientDisconnect, RuntimeError):
        async with asyncio.timeout(seconds):
            while time.monotonic() < stop:
                message = await request.receive()
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    return


def _too_large(most: int) -> RequestError:
    return RequestError(
        413,
        f"the body is larger than {most / MEGABYTE:g} MB; send fewer samples, or start the server "
        "with a larger --max-body-mb",
    )
