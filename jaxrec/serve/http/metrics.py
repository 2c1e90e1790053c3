"""Prometheus metrics of the HTTP endpoint."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from jaxrec.serve.ranker.caches import CacheCounts

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SECONDS = (0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.25, 0.5, 1, 2, 4, 8)
_SAMPLES = tuple(float(1 << power) for power in range(0, 17, 2))


_CACHE_COUNTERS = {
    "hits": "Rows whose history was cached.",
    "appends": "Rows whose new events were appended to a cache.",
    "misses": "Rows whose history was encoded.",
    "evictions": "Caches that were dropped for others.",
}


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

    def watch_caches(self, counts: Callable[[], CacheCounts]) -> None:
        """Show the counts and the size of a ranker's caches, read at each request of metrics."""
        self._registry.register(_CacheCollector(counts))

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)


class _CacheCollector(Collector):
    """Counts and sizes of the caches of histories."""

    def __init__(self, counts: Callable[[], CacheCounts]) -> None:
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        counts = self._counts()
        for name, help_text in _CACHE_COUNTERS.items():
            value = getattr(counts, name)
            yield CounterMetricFamily(f"jaxrec_history_cache_{name}", help_text, value=value)
        yield GaugeMetricFamily("jaxrec_history_caches", "Cached histories.", value=counts.caches)
        yield GaugeMetricFamily(
            "jaxrec_history_cache_bytes", "Bytes of cached histories.", value=counts.bytes
        )
