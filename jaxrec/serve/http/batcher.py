"""Dynamic batching: requests that come at about the same time are predicted together."""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import dataclasses
import logging
import time
from collections.abc import Callable, Sequence

from jaxrec.serve.http.bodies import Payload
from jaxrec.serve.http.limits import Limits, RequestError, busy
from jaxrec.serve.http.metrics import Metrics
from jaxrec.serve.http.predictor import Scores

logger = logging.getLogger(__name__)

# Number of batches whose samples may wait.
_WAITING_BATCHES = 64

Predict = Callable[[Sequence[Payload]], list[Scores | RequestError]]


@dataclasses.dataclass(frozen=True, eq=False)
class _Waiting:
    """A request that waits for others until ``deadline``, by `time.monotonic`."""

    payload: Payload
    deadline: float
    result: asyncio.Future[Scores]


class Batcher:
    """Collects requests, and predicts them together in a thread.

    When the thread is free, it predicts the waiting requests, up to ``max_batch`` samples, as soon
    as ``max_batch`` samples wait or the first request has waited for ``max_delay``. A request of
    more samples is predicted alone, and so is every request without ``joins_requests``.
    """

    def __init__(
        self, predict: Predict, limits: Limits, metrics: Metrics, *, joins_requests: bool = True
    ) -> None:
        self._predict, self._limits, self._metrics = predict, limits, metrics
        self._max_batch = limits.max_batch if joins_requests else 1
        self._max_delay = limits.max_delay if joins_requests else 0.0
        self._queue: collections.deque[_Waiting] = collections.deque()
        self._samples = self._active = 0
        self._has_new = asyncio.Event()
        # One thread: programs use all cores by themselves, and two would only slow each other.
        self.thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="predict")

    async def submit(self, payload: Payload) -> Scores:
        """Wait for a request's scores, or refuse it: too many wait, or it takes too long."""
        limits = self._limits
        if self._active >= limits.max_concurrent:
            raise busy(f"{self._active} requests are under way; try again later")
        most = _WAITING_BATCHES * limits.max_batch
        # An empty queue takes a request of any size, which `Limits.max_samples` bounds.
        if self._samples and self._samples + payload.num_samples > most:
            raise busy(f"{self._samples} samples wait; try again later")
        result: asyncio.Future[Scores] = asyncio.get_running_loop().create_future()
        self._queue.append(_Waiting(payload, time.monotonic() + self._max_delay, result))
        self._add(payload.num_samples)
        self._active += 1
        self._has_new.set()
        try:
            async with asyncio.timeout(limits.timeout):
                return await result
        except TimeoutError:
            raise RequestError(
                504, f"the request was not answered within {limits.timeout:g} s"
            ) from None
        finally:
            self._active -= 1

    async def run(self) -> None:
        """Predict requests as they come, until the task is cancelled."""
        while True:
            await self._wait_for_batch()
            if not (batch := self._take()):
                continue
            try:
                results = await self._results([each.payload for each in batch])
            # An error of the model must not end the loop: all later requests would wait in vain.
            except Exception:
                logger.exception("a batch of %d requests failed", len(batch))
                error = RequestError(500, "the model failed; the server's log says why")
                results = [error] * len(batch)
            for each, result in zip(batch, results, strict=True):
                if each.result.done():  # it took too long
                    continue
                if isinstance(result, RequestError):
                    each.result.set_exception(result)
                else:
                    each.result.set_result(result)

    async def _results(self, payloads: list[Payload]) -> Sequence[Scores | RequestError]:
        """Predict a batch in the thread; return each request's scores or error."""
        start = time.perf_counter()
        loop = asyncio.get_running_loop()
        results = await loop.run_in_executor(self.thread, self._predict, payloads)
        self._metrics.batch_seconds.observe(time.perf_counter() - start)
        self._metrics.batch_requests.observe(len(payloads))
        self._metrics.batch_samples.observe(sum(each.num_samples for each in payloads))
        if len(results) != len(payloads):
            raise AssertionError(f"{len(results)} results for {len(payloads)} requests")
        return results

    async def _wait_for_batch(self) -> None:
        """Wait for a request, then until its deadline or until ``max_batch`` samples wait."""
        while not self._queue:
            self._has_new.clear()
            await self._has_new.wait()
        while self._samples < self._max_batch:
            seconds = self._queue[0].deadline - time.monotonic()
            if seconds <= 0:
                return
            self._has_new.clear()
            try:
                async with asyncio.timeout(seconds):
                    await self._has_new.wait()
            except TimeoutError:
                return

    def _take(self) -> list[_Waiting]:
        """Remove the first requests from the queue: one, and more up to ``max_batch`` samples."""
        batch: list[_Waiting] = []
        samples = 0
        while self._queue:
            more = self._queue[0].payload.num_samples
            if batch and samples + more > self._max_batch:
                break
            first = self._queue.popleft()
            self._add(-more)
            if not first.result.done():  # it may have taken too long
                batch.append(first)
                samples += more
        return batch

    def _add(self, samples: int) -> None:
        self._samples += samples
        self._metrics.waiting.set(self._samples)
