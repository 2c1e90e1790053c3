"""Limits of the HTTP endpoint."""

from __future__ import annotations

import dataclasses

MEGABYTE = 1 << 20


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits of an endpoint: sizes of requests, and times that it waits.

    Attributes:
        max_batch: Number of samples from which requests that wait are predicted at once.
        max_delay: Longest time that a request waits for others, in seconds.
        max_samples: Largest number of samples of a request.
        max_body: Largest size of a body, in bytes.
        max_buffer: Largest size of all bodies together, from their first byte to their response.
        max_concurrent: Largest number of requests that wait or are predicted.
        max_connections: Largest number of open connections.
        max_header: Largest size of a request's header, in bytes.
        timeout: Longest time from a complete body to its response, in seconds.
        read_timeout: Longest time for a header, for a body, and for a client to take a response.
        keep_alive: Time after which an idle connection is closed.
        drain: Time from a signal to the end of new connections, in seconds.
        stop: Longest time for the requests that are under way then, in seconds.
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
