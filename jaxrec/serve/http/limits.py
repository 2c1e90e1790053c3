"""Limits of the endpoint, the reading of bodies within them, and the errors that clients get."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Mapping

from starlette.requests import ClientDisconnect, Request

from jaxrec.serve.http.metrics import Metrics

MEGABYTE = 1 << 20

RETRY_SECONDS = 1

# Seconds in which the rest of a refused body is read, so that a client that is still sending gets
# the response: closing a connection with unread bytes resets it.
LINGER_SECONDS = 2.0


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits of an endpoint: sizes of requests, and times that it waits.

    Attributes:
        max_batch: Number of samples from which waiting requests are predicted at once.
        max_delay: Longest time that a request waits for others, in seconds.
        max_samples: Largest number of samples of a request.
        max_body: Largest size of a body, in bytes.
        max_buffer: Largest size of all bodies together, from their first byte to their response.
        max_concurrent: Largest number of requests that wait or are predicted.
        max_connections: Largest number of open connections.
        max_header: Largest size of a request's header, in bytes.
        timeout: Longest time from a complete body to its response, in seconds.
        read_timeout: Longest time for a header, and then for a body, in seconds.
        keep_alive: Time after which an idle connection is closed.
        drain: Time after a signal in which new connections are still accepted, in seconds.
        stop: Longest time after that for requests under way, in seconds.
    """

    max_batch: int = 1024
    max_delay: float = 0.002
    max_samples: int = 65_536
    max_body: int = 16 * MEGABYTE
    max_buffer: int = 256 * MEGABYTE
    max_concurrent: int = 1024
    max_connections: int = 16_384
    max_header: int = 65_536
    timeout: float = 30.0
    read_timeout: float = 10.0
    keep_alive: float = 30.0
    drain: float = 1.0
    stop: float = 30.0


class RequestError(Exception):
    """Refusal of a request, with the response's status, message and headers."""

    def __init__(self, status: int, message: str, headers: Mapping[str, str] | None = None):
        super().__init__(message)
        self.status, self.message, self.headers = status, message, dict(headers or {})


def invalid(message: str) -> RequestError:
    """Return the error of a request whose content is wrong."""
    return RequestError(400, message)


def busy(message: str) -> RequestError:
    """Return the error of a request that may be sent again later."""
    return RequestError(503, message, {"retry-after": str(RETRY_SECONDS)})


class Memory:
    """Counter of the bytes of all bodies that the endpoint holds, which refuses too many."""

    def __init__(self, limits: Limits, metrics: Metrics) -> None:
        self._limits, self._metrics, self._held = limits, metrics, 0

    @contextlib.asynccontextmanager
    async def body(self, request: Request) -> AsyncIterator[bytearray]:
        """Read a body and hold its bytes until the context ends, or raise a RequestError."""
        content = bytearray()
        try:
            await self._read(request, content)
            yield content
        finally:
            # Also after an error: the parts that had come were counted.
            self._hold(-len(content))

    async def _read(self, request: Request, content: bytearray) -> None:
        limits = self._limits
        length = request.headers.get("content-length", "")
        if length.isdigit() and int(length) > limits.max_body:
            raise _too_large(limits.max_body)
        try:
            async with asyncio.timeout(limits.read_timeout):
                # Counted part by part, since a chunked body has no length, and a length may lie.
                async for part in request.stream():
                    if len(content) + len(part) > limits.max_body:
                        raise _too_large(limits.max_body)
                    if self._held + len(part) > limits.max_buffer:
                        raise busy(
                            f"requests of {self._held / MEGABYTE:,.0f} MB are under way; try again "
                            "later"
                        )
                    self._hold(len(part))
                    content += part
        except TimeoutError:
            raise RequestError(
                408,
                f"the body did not come within {limits.read_timeout:g} s; "
                f"{len(content):,} bytes did",
            ) from None

    def _hold(self, size: int) -> None:
        self._held += size
        self._metrics.body_bytes.set(self._held)


async def discard(request: Request, seconds: float = LINGER_SECONDS) -> None:
    """Read the rest of a body and forget it, for at most ``seconds``."""
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
