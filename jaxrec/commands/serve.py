"""The command ``jaxrec serve``, which answers requests over HTTP."""

from __future__ import annotations

import dataclasses
import logging
import pathlib
from collections.abc import Sequence
from typing import Annotated

import tyro

from jaxrec.arguments import NOT_GIVEN, ConfigError, parse, required
from jaxrec.serve import ArtifactError, ServedModel, ServedRanker, load, load_ranker
from jaxrec.serve.artifact.manifest import read_manifest
from jaxrec.serve.artifact.refresh import Refresher

USAGE_ERRORS = (ConfigError,)
FAILURES = (ArtifactError, ValueError)

_MEGABYTE = 1 << 20


@dataclasses.dataclass(frozen=True)
class ServeOptions:
    """Answer requests over HTTP with a model that `jaxrec export` wrote.

    POST /predict takes JSON and Arrow bodies. GET / returns a page to try it. The model may be a
    ranker of `jaxrec.serve.export_ranker`: the server then keeps encoded histories by the request's
    cache_key, usually a user's id.

    Example: jaxrec serve model --port 8000
    """

    model: Annotated[pathlib.Path, tyro.conf.Positional, required("MODEL")] = NOT_GIVEN
    """Directory of the exported model."""
    host: str = "127.0.0.1"
    """Address that the server listens on; 0.0.0.0: all addresses of this machine."""
    port: int = 8000
    """Port that the server listens on; 0: any free one."""
    deltas: str = ""
    """Folder or URL of versions that `jaxrec.tier.publish` writes; the server loads new ones."""
    poll_s: float = 10.0
    """Seconds between two checks for new versions."""
    cache_mb: float | None = None
    """Largest total size of a ranker's encoded histories, of which those that were used last are
    kept, by default 1024; 0: none are kept. Other models keep nothing."""
    max_batch: int = 1024
    """Number of waiting samples that are predicted at once, without waiting for more. A ranker
    answers one request after the other."""
    max_delay_ms: float = 2.0
    """Longest time that a request waits for others to be predicted with it."""
    max_samples: int = 65_536
    """Largest number of samples of a request."""
    max_body_mb: float = 16.0
    """Largest size of a body."""
    max_buffer_mb: float = 256.0
    """Largest total size of the bodies of all requests under way."""
    max_concurrent: int = 1024
    """Largest number of requests under way; further ones get status 503."""
    max_connections: int = 16_384
    """Largest number of open connections."""
    timeout_s: float = 30.0
    """Longest time from a complete request to its response, which is status 504 afterwards."""
    read_timeout_s: float = 10.0
    """Longest time for a client to send a header, and again to send a body."""
    drain_s: float = 1.0
    """Time after SIGTERM in which new connections are still accepted, until load balancers have
    read /ready."""
    stop_s: float = 30.0
    """Longest time for requests under way to end after that."""
    allowed_hosts: tuple[str, ...] = ()
    """Names of the server in the Host header. By default all names, but on a loopback address only
    localhost, 127.0.0.1 and [::1]."""


def run(options: Sequence[str]) -> int:
    """Run ``jaxrec serve``; return the exit code."""
    parsed = parse("serve", options, ServeOptions())
    if parsed.model == NOT_GIVEN:
        raise ConfigError("give the directory of an exported model: MODEL")
    _check(parsed)
    # The server's packages are an extra of jaxrec: the error should name it.
    try:
        from jaxrec.serve.http.app import Application, loopback_hosts
        from jaxrec.serve.http.limits import Limits
        from jaxrec.serve.http.server import address_of, allow_connections, listen, serve
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"it needs {error.name}; install it by pip install 'jaxrec[serve]'"
        ) from None
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s")
    logging.getLogger("jaxrec").setLevel(logging.INFO)
    limits = Limits(
        max_batch=parsed.max_batch,
        max_delay=parsed.max_delay_ms / 1000,
        max_samples=parsed.max_samples,
        max_body=int(parsed.max_body_mb * _MEGABYTE),
        max_buffer=int(parsed.max_buffer_mb * _MEGABYTE),
        max_concurrent=parsed.max_concurrent,
        max_connections=allow_connections(parsed.max_connections),
        timeout=parsed.timeout_s,
        read_timeout=parsed.read_timeout_s,
        drain=parsed.drain_s,
        stop=parsed.stop_s,
    )
    served = _load(parsed)
    refresher = Refresher(served, parsed.deltas) if parsed.deltas else None
    with listen(parsed.host, parsed.port) as listener:
        address = address_of(listener)
        application = Application(
            served,
            limits,
            refresher=refresher,
            poll_seconds=parsed.poll_s,
            allowed_hosts=parsed.allowed_hosts or loopback_hosts(parsed.host),
            on_ready=lambda: print(f"serving {parsed.model} at {address}", flush=True),
        )
        serve(application, listener)
    return 0


def _load(options: ServeOptions) -> ServedModel | ServedRanker:
    """Read the model, which may be a ranker."""
    if read_manifest(options.model).ranker is None:
        if options.cache_mb is not None:
            raise ConfigError(
                f"--cache-mb bounds the encoded histories of a ranker, and {options.model} is "
                "another model, which keeps none; leave it out"
            )
        return load(options.model)
    if options.cache_mb is None:
        return load_ranker(options.model)
    return load_ranker(options.model, cache_bytes=int(options.cache_mb * _MEGABYTE))


def _check(options: ServeOptions) -> None:
    """Raise ConfigError if an option is out of range."""
    above_zero = (
        "poll_s", "max_batch", "max_samples", "max_body_mb", "max_buffer_mb", "max_concurrent",
        "max_connections", "timeout_s", "read_timeout_s", "stop_s",
    )  # fmt: skip
    for name in (*above_zero, "cache_mb", "max_delay_ms", "drain_s"):
        if (value := getattr(options, name)) is None:
            continue
        is_good = value > 0 if name in above_zero else value >= 0
        if not is_good or value == float("inf"):
            least = "above 0" if name in above_zero else "0 or more"
            raise ConfigError(f"--{name.replace('_', '-')} must be {least}, got {value:g}")
    if not 0 <= options.port <= 65_535:
        raise ConfigError(f"--port must be from 0 to 65535, got {options.port}")
    if options.max_buffer_mb < options.max_body_mb:
        raise ConfigError(
            f"--max-buffer-mb must be --max-body-mb or more, got {options.max_buffer_mb:g}"
        )
