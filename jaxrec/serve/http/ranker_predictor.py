"""A ranker behind the endpoint: one request after the other, with caches of histories."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pyarrow as pa

from jaxrec.serve.http.bodies import Lists, Payload
from jaxrec.serve.http.limits import RequestError, invalid
from jaxrec.serve.http.predictor import INPUT_ERRORS, Scores, message_of
from jaxrec.serve.http.ranker_columns import RankerColumns
from jaxrec.serve.ranker.served import ServedRanker


class RankerPredictor:
    """Scores the candidates of requests.

    A program computes for one row, so that requests gain nothing by being predicted together:
    ``joins_requests`` says so to the batcher. ``timeout`` is the longest time from a complete body
    to its response, in seconds.
    """

    joins_requests = False

    def __init__(self, served: ServedRanker, timeout: float = math.inf) -> None:
        self.served, self._timeout = served, timeout
        self.columns = RankerColumns(served.ranker, served.manifest.batch)

    def predict(self, payloads: Sequence[Payload]) -> list[Scores | RequestError]:
        """Return each request's scores or error, in order."""
        return [self._scores(payload) for payload in payloads]

    def _scores(self, payload: Payload) -> Scores | RequestError:
        columns = payload.columns
        try:
            if not isinstance(columns, pa.Table):
                columns = self.columns.table([columns])
            request = self.columns.request(columns)
        except INPUT_ERRORS as error:
            return invalid(message_of(error))
        # Read once, so that the version is that of the tables that were used.
        variables = self.served.variables
        try:
            # A request of many rows takes minutes, in which no other one is answered. It ends when
            # the endpoint has told its client that it took too long.
            scores = self.served.predict_request(
                request, variables, payload.arrival + self._timeout
            )
        except TimeoutError as error:
            return RequestError(
                504,
                f"the request was not answered within {self._timeout:g} s: {error}; send fewer "
                "rows at once",
            )
        lengths = request.num_candidates
        return Scores(
            {name: Lists(values, lengths) for name, values in scores.items()}, variables.version
        )
