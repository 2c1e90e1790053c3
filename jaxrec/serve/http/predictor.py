"""The model behind the endpoint: one call for several requests, and new versions of its tables."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from jaxrec.serve.artifact.batch_spec import output_columns
from jaxrec.serve.artifact.load import ServedModel
from jaxrec.serve.artifact.refresh import Refresher
from jaxrec.serve.artifact.requests import Request
from jaxrec.serve.artifact.served import ServedArtifact
from jaxrec.serve.http.argument_columns import ArgumentColumns
from jaxrec.serve.http.bodies import Lists, Payload
from jaxrec.serve.http.input_columns import InputColumns
from jaxrec.serve.http.limits import RequestError, invalid
from jaxrec.serve.http.metrics import Metrics
from jaxrec.serve.http.raw_columns import RawColumns
from jaxrec.tier import VersionError

logger = logging.getLogger(__name__)

# Errors of values that a model cannot take.
INPUT_ERRORS = (ValueError, TypeError, KeyError, OverflowError, pa.ArrowException)


@dataclasses.dataclass(frozen=True, eq=False)
class Scores:
    """The response to a request.

    Attributes:
        columns: Outputs by name, ``[samples, ...]`` each, or lists.
        version: Version of the tables, one for all outputs.
    """

    columns: Mapping[str, np.ndarray | Lists]
    version: int


class Predictor:
    """Predicts the samples of several requests together."""

    joins_requests = True

    def __init__(self, served: ServedModel) -> None:
        self.served = served
        self.columns: InputColumns[Request] = (
            ArgumentColumns(served.manifest.batch)
            if served.encoder is None
            else RawColumns(served.encoder, served.manifest.batch)
        )

    def predict(self, payloads: Sequence[Payload]) -> list[Scores | RequestError]:
        """Return each request's scores or error, in order.

        A wrong request does not change the results of others. All scores are of one version.
        """
        # All together first, since nearly all requests are right. Only if that fails, one by one,
        # to find the wrong ones.
        results: dict[int, Scores | RequestError] = {}
        try:
            requests = [self._joined(dict(enumerate(payloads)))]
        except INPUT_ERRORS:
            requests = []
            for number, payload in enumerate(payloads):
                try:
                    requests.append(self._joined({number: payload}))
                except INPUT_ERRORS as error:
                    results[number] = invalid(message_of(error))
        if requests:
            order = [number for numbers, _ in requests for number in numbers]
            request = Request.joined([request for _, request in requests])
            results |= self._scores(request, {i: payloads[i].num_samples for i in order})
        return [results[number] for number in range(len(payloads))]

    def _scores(self, request: Request, sizes: Mapping[int, int]) -> dict[int, Scores]:
        """Predict a request, and cut the scores into those of the requests that it joins.

        ``sizes`` maps each joined request's index to its number of samples, in the order of the
        samples.
        """
        # Read once, so that the version is that of the tables that were used.
        variables = self.served.variables
        columns = output_columns(self.served.predict_request(request, variables))
        results, start = {}, 0
        for number, size in sizes.items():
            parts = {name: array[start : start + size] for name, array in columns.items()}
            results[number] = Scores(parts, variables.version)
            start += size
        return results

    def _joined(self, payloads: Mapping[int, Payload]) -> tuple[list[int], Request]:
        """Join payloads to one request; return their numbers in its order, and the request."""
        lists: dict[int, Mapping[str, list[Any]]] = {}
        tables: dict[pa.Schema, dict[int, pa.Table]] = {}
        for number, payload in payloads.items():
            columns = payload.columns
            if isinstance(columns, pa.Table):
                # Clients write metadata of their own, such as pandas' index; tables of one schema
                # are joined.
                plain = columns.replace_schema_metadata()
                tables.setdefault(plain.schema, {})[number] = plain
            else:
                lists[number] = columns
        order, requests = list(lists), []
        if lists:
            requests.append(self.columns.request(self.columns.table([*lists.values()])))
        for of_schema in tables.values():
            requests.append(self.columns.request(pa.concat_tables(of_schema.values())))
            order += of_schema
        return order, Request.joined(requests)


def message_of(error: Exception) -> str:
    text = error.args[0] if isinstance(error, KeyError) and error.args else error
    return " ".join(str(text).split())


@dataclasses.dataclass(frozen=True, eq=False)
class Follower:
    """Looks for published versions every ``seconds``, and applies them."""

    served: ServedArtifact
    refresher: Refresher | None
    seconds: float
    metrics: Metrics

    async def begin(self) -> None:
        """Apply the published versions before the first request."""
        if self.refresher is not None:
            try:
                await self._update(self.refresher)
            except (OSError, VersionError) as error:
                self._report(error)

    async def follow(self) -> None:
        """Apply later versions as they appear, until the task is cancelled."""
        while self.refresher is not None:
            await asyncio.sleep(self.seconds)
            try:
                await self._update(self.refresher)
            except Exception as error:  # the tables of before stay in use
                self._report(error)

    async def _update(self, refresher: Refresher) -> None:
        if await asyncio.to_thread(refresher.update):
            version = self.served.variables.version
            self.metrics.tables_version.set(version)
            logger.info("tables are of version %d", version)

    def _report(self, error: Exception) -> None:
        self.metrics.refresh_errors.inc()
        logger.warning("tables stay at version %d: %s", self.served.variables.version, error)
