"""Prometheus metrics of the HTTP endpoint."""

from __future__ import annotations

import functools

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SECONDS = (0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.25, 0.5, 1, 2, 4, 8)
_SAMPLES = tuple(float(1 << power) for power in range(0, 17, 2))


class Metrics:
    """The metrics of one endpoint.

    Attributes:
        responses: Responses to ``/predict``, by status.
        seconds: Seconds from a request's header to its response.
        batch_samples: Samples that are predicted together.
        batch_requests: Requests that are predicted together.
        batch_seconds: Seconds in which a batch is encoded and predicted.
        waiting: Samples that wait.
        body_bytes: Bytes of bodies in memory.
        connections: Open connections.
        is_ready: 1 if the endpoint is ready.
        tables_version: Version of the tables.
        refresh_errors: Times that published versions could not be applied.
    """

    def __init__(self) -> None:
        # Its own registry, not the process's: several endpoints and tests live in one process.
        registry = self._registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        counter = functools.partial(Counter, registry=registry)
        gauge = functools.partial(Gauge, registry=registry)
        seconds = functools.partial(Histogram, buckets=_SECONDS, registry=registry)
        counts = functools.partial(Histogram, buckets=_SAMPLES, registry=registry)
        self.responses = counter("jaxrec_responses", "Responses to /predict.", ["status"])
        self.seconds = seconds(
            "jaxrec_request_seconds", "Seconds from the header of a request to its response."
        )
        self.batch_samples = counts("jaxrec_batch_samples", "Samples that are predicted together.")
        self.batch_requests = counts(
            "jaxrec_batch_requests", "Requests that are predicted together."
        )
        self.batch_seconds = seconds(
            "jaxrec_batch_seconds", "Seconds in which requests are encoded and predicted."
        )
        self.waiting = gauge("jaxrec_waiting_samples", "Samples that wait.")
        self.body_bytes = gauge("jaxrec_body_bytes", "Bytes of bodies.")
        self.connections = gauge("jaxrec_connections", "Open connections.")
        self.is_ready = gauge("jaxrec_ready", "1 if requests are answered.")
        self.tables_version = gauge("jaxrec_tables_version", "Version of the tables.")
        self.refresh_errors = counter(
            "jaxrec_refresh_errors", "Times that published versions could not be taken over."
        )

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)
