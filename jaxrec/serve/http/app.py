"""The ASGI application: its routes, and the life of the model behind them."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from jaxrec.serve.artifact.load import ServedModel
from jaxrec.serve.artifact.refresh import Refresher
from jaxrec.serve.http import bodies, metrics, page
from jaxrec.serve.http.batcher import Batcher
from jaxrec.serve.http.bodies import ARROW, JSON
from jaxrec.serve.http.input_columns import InputColumns
from jaxrec.serve.http.limits import Limits, Memory, RequestError, busy, discard
from jaxrec.serve.http.metrics import Metrics
from jaxrec.serve.http.predictor import Follower, Predictor
from jaxrec.serve.http.ranker_predictor import RankerPredictor
from jaxrec.serve.ranker.served import ServedRanker

logger = logging.getLogger(__name__)

VERSION_HEADER = "x-jaxrec-tables"

# Bodies of more bytes are decoded, and columns of more values are encoded, in a thread, so that
# other connections do not wait for them.
_INLINE_BYTES = 1 << 16
_INLINE_VALUES = 1 << 12

Result = TypeVar("Result")


class Application:
    """An endpoint for one model.

    The refresher looks for new versions every ``poll_seconds``. The ``Host`` header must have one
    of ``allowed_hosts``; empty: any name. ``asgi`` is the application that uvicorn runs.
    ``failure`` is the error that ended the start, or None.
    """

    def __init__(
        self,
        served: ServedModel | ServedRanker,
        limits: Limits,
        *,
        refresher: Refresher | None = None,
        poll_seconds: float = 10.0,
        allowed_hosts: Sequence[str] = (),
        on_ready: Callable[[], None] = lambda: None,
    ) -> None:
        self.served, self.limits, self.metrics = served, limits, Metrics()
        self._predictor: Predictor | RankerPredictor
        if isinstance(served, ServedRanker):
            self._predictor = RankerPredictor(served, limits.timeout)
            self.metrics.watch_caches(lambda: served.cache_counts)
        else:
            self._predictor = Predictor(served)
        columns: InputColumns[Any] = self._predictor.columns
        self._batcher = Batcher(
            self._predictor.predict,
            limits,
            self.metrics,
            joins_requests=self._predictor.joins_requests,
        )
        self._memory = Memory(limits, self.metrics)
        self._follower = Follower(served, refresher, poll_seconds, self.metrics)
        self._decoders = {
            JSON: bodies.JsonDecoder(columns, limits.max_samples).decode,
            ARROW: bodies.ArrowDecoder(columns, limits.max_samples).decode,
        }
        self._allowed_hosts = frozenset(allowed_hosts)
        self._on_ready = on_ready
        # Number of requests that wait for the model, and the event that ends their waiting.
        self._num_waiting, self._is_started = 0, asyncio.Event()
        self.is_ready = self.is_stopping = False
        self.failure: Exception | None = None
        self.asgi = Starlette(
            routes=[
                Route("/predict", self._predict, methods=["POST"]),
                Route("/health", self._health),
                Route("/ready", self._ready),
                Route("/metrics", self._metrics),
                Route("/model", self._model),
                Route("/example", self._example),
                Route("/", self._page),
            ],
            exception_handlers={
                RequestError: self._refused,
                HTTPException: self._no_route,
                Exception: self._failed,
            },
            lifespan=self._lifespan,
        )

    def stop(self) -> None:
        """Report that the endpoint stops, and close each connection after its next response."""
        self.is_ready, self.is_stopping = False, True
        self.metrics.is_ready.set(0)

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: Any) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(self._start()), asyncio.create_task(self._batcher.run())]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._batcher.thread.shutdown(wait=False, cancel_futures=True)

    async def _start(self) -> None:
        """Apply published versions, compile the programs, report ready, and follow new versions."""
        loop = asyncio.get_running_loop()
        try:
            await self._follower.begin()
            # In the thread that predicts, so that /health answers while programs compile.
            await loop.run_in_executor(self._batcher.thread, self.served.warm_up)
        except Exception as error:
            self.failure = error
            return
        finally:
            self._is_started.set()
        # A signal may have come during the start.
        if not self.is_stopping:
            self.is_ready = True
            self.metrics.is_ready.set(1)
            self._on_ready()
        await self._follower.follow()

    async def _until_started(self) -> None:
        """Wait until the model is loaded; refuse if too many requests wait or it takes too long."""
        if self._is_started.is_set():
            return
        if self._num_waiting >= self.limits.max_concurrent:
            raise busy(
                f"the model is being loaded, and {self._num_waiting} requests wait for it; try "
                "again later"
            )
        self._num_waiting += 1
        try:
            async with asyncio.timeout(self.limits.timeout):
                await self._is_started.wait()
        except TimeoutError:
            raise busy(
                f"the model was not loaded within {self.limits.timeout:g} s; try again later"
            ) from None
        finally:
            self._num_waiting -= 1

    async def _predict(self, request: Request) -> Response:
        start = time.perf_counter()
        try:
            response = await self._scores(request)
        except RequestError as error:
            response = await self._refused(request, error)
        self.metrics.seconds.observe(time.perf_counter() - start)
        self.metrics.responses.labels(response.status_code).inc()
        return response

    async def _scores(self, request: Request) -> Response:
        self._check_host(request)
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        decode = self._decoders.get(kind)
        if decode is None:
            raise RequestError(
                415,
                f"the body is of type {kind or 'unknown'}; send {' or '.join(self._decoders)} "
                "with a content-type that says so",
            )
        # Before the body is read: a request that will be refused need not be received.
        accepted = _accepted(request.headers.get("accept", ""), kind)
        await self._until_started()
        if self.failure is not None:
            raise busy("the model cannot be loaded; the server's log says why")
        try:
            async with self._memory.body(request) as body:
                payload = await self._offload(len(body) > _INLINE_BYTES, decode, body)
                scores = await self._batcher.submit(payload)
        except ClientDisconnect:
            raise RequestError(400, "the client closed the connection") from None
        encode = bodies.encode_arrow if accepted == ARROW else bodies.encode_json
        is_large = any(column.size > _INLINE_VALUES for column in scores.columns.values())
        content = await self._offload(is_large, encode, scores.columns)
        return self._respond(
            content, media_type=accepted, headers={VERSION_HEADER: str(scores.version)}
        )

    async def _offload(
        self, is_large: bool, function: Callable[[Any], Result], argument: Any
    ) -> Result:
        """Call a function here, or in the thread that predicts if ``is_large``."""
        # One thread for large bodies, so that one at a time is decoded: that takes several times
        # its bytes.
        if not is_large:
            return function(argument)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._batcher.thread, function, argument)

    async def _health(self, _: Request) -> Response:
        return self._json(200, {"status": "alive"})

    async def _ready(self, _: Request) -> Response:
        if self.is_ready:
            return self._json(200, {"status": "ready"})
        status = "stopping" if self.is_stopping else "starting"
        return self._json(503, {"status": status})

    async def _metrics(self, request: Request) -> Response:
        self._check_host(request)
        return self._respond(self.metrics.text(), media_type=metrics.MEDIA_TYPE)

    async def _model(self, request: Request) -> Response:
        self._check_host(request)
        return self._json(200, page.describe(self.served, self._predictor.columns, self.limits))

    async def _example(self, request: Request) -> Response:
        self._check_host(request)
        # A line for each column, to be read and edited.
        lines = [
            b"  %s: %s" % (msgspec.json.encode(name), msgspec.json.encode(values))
            for name, values in self._predictor.columns.example().items()
        ]
        content = b"{\n" + b",\n".join(lines) + b"\n}\n"
        return self._respond(content, media_type=JSON)

    async def _page(self, request: Request) -> Response:
        self._check_host(request)
        return self._respond(page.HTML, media_type="text/html", headers=page.HEADERS)

    def _check_host(self, request: Request) -> None:
        """Raise a RequestError if the ``Host`` header names another server."""
        if not self._allowed_hosts:
            return
        # A web page can point its own name at this machine ("DNS rebinding"), and read the endpoint
        # through a visitor's browser. The browser then sends the page's name.
        name = request.headers.get("host", "")
        name = name[: name.rfind("]") + 1] if name.startswith("[") else name.partition(":")[0]
        if name.lower() not in self._allowed_hosts:
            raise RequestError(
                421, f"host {name!r} is not this server; start it with --allowed-hosts {name}"
            )

    async def _refused(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestError)
        # The statuses of bodies that were not read to their end.
        if error.status in (408, 413):
            content = msgspec.json.encode({"error": error.message})
            return _Refusal(request, content, error.status)
        return self._json(error.status, {"error": error.message}, error.headers)

    async def _no_route(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        problem = f"{request.method} {request.url.path}: {error.detail.lower()}"
        return self._json(
            error.status_code, {"error": f"{problem}; POST /predict, or GET / for more"},
            error.headers,
        )  # fmt: skip

    async def _failed(self, _: Request, error: Exception) -> Response:
        logger.error("a request failed", exc_info=error)
        return self._json(500, {"error": "the request failed; the server's log says why"})

    def _json(self, status: int, content: Any, headers: Any = None) -> Response:
        encoded = msgspec.json.encode(content)
        return self._respond(encoded, status, JSON, headers)

    def _respond(
        self, content: bytes, status: int = 200, media_type: str = "", headers: Any = None
    ) -> Response:
        response = Response(content, status, headers, media_type)
        if self.is_stopping:
            response.headers["connection"] = "close"
        return response


class _Refusal(Response):
    """A response to a request whose body is not read to its end."""

    def __init__(self, request: Request, content: bytes, status: int) -> None:
        super().__init__(content, status, {"connection": "close"}, JSON)
        self._request = request

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start: Message = {
            "type": "http.response.start",
            "status": self.status_code,
            "headers": self.raw_headers,
        }
        await send(start)
        # The response is kept open while the rest of the body is read and forgotten. Closing a
        # connection with unread bytes resets it, and the client would lose the response.
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        await discard(self._request)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def loopback_hosts(host: str) -> tuple[str, ...]:
    """Return the ``Host`` names of a server on a loopback address; ``()`` for other addresses."""
    with contextlib.suppress(ValueError):
        if not ipaddress.ip_address(host).is_loopback:
            return ()
        shown = f"[{host}]" if ":" in host else host
        return tuple(dict.fromkeys(["localhost", "127.0.0.1", "[::1]", shown]))
    return ("localhost", "127.0.0.1", "[::1]") if host == "localhost" else ()


def _accepted(header: str, default: str) -> str:
    """Return a response's media type by the ``Accept`` header; ``default`` is the request's own."""
    kinds = [each.partition(";")[0].strip().lower() for each in header.split(",") if each.strip()]
    for kind in kinds:
        if kind in (JSON, ARROW):
            return kind
    if not kinds or any(kind in ("*/*", "application/*") for kind in kinds):
        return default
    raise RequestError(406, f"accept {JSON} or {ARROW}, got {header}")
