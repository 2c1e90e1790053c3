"""A ranker behind the endpoint: columns of its requests, one request answered after the other."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import pyarrow as pa

from jaxrec.data.encode import joined
from jaxrec.serve.artifact.batch_spec import BatchSpec
from jaxrec.serve.artifact.ranker_spec import RankerSpec
from jaxrec.serve.http.argument_columns import ArgumentColumns
from jaxrec.serve.http.bodies import Lists, Payload
from jaxrec.serve.http.input_columns import InputColumn, InputColumns
from jaxrec.serve.http.limits import RequestError, invalid
from jaxrec.serve.http.predictor import INPUT_ERRORS, Scores, message_of
from jaxrec.serve.ranker.caches import KEY_TYPES
from jaxrec.serve.ranker.export import CACHE_KEY
from jaxrec.serve.ranker.rows import RankerRequest
from jaxrec.serve.ranker.served import ServedRanker


class RankerColumns(InputColumns[RankerRequest]):
    """The column ``cache_key``, and one for each feature of context, history and candidates.

    The features' columns are those of `ArgumentColumns`.
    """

    def __init__(self, ranker: RankerSpec, spec: BatchSpec) -> None:
        self._ranker, self._spec = ranker, spec
        self._arguments = ArgumentColumns(spec)
        key = InputColumn(
            CACHE_KEY, "text or integer", may_be_null=True, example=("a user", "another")
        )
        super().__init__([key, *map(self._with_example, self._arguments.columns)])

    def _with_example(self, column: InputColumn) -> InputColumn:
        """Give a feature an example that the others fit: one id of context, two of the rest."""
        if column.name in self._ranker.context:
            return dataclasses.replace(column, example=([0], []))
        return dataclasses.replace(column, example=(column.example[0], column.example[0]))

    def request(self, table: pa.Table) -> RankerRequest:
        history, candidates = self._arguments.inputs(table)
        keys = joined(table[CACHE_KEY]).to_pylist()
        if wrong := [key for key in keys if type(key) not in KEY_TYPES]:
            raise TypeError(
                f"column {CACHE_KEY!r}: {wrong[0]!r} is neither text nor an integer; give the id "
                "of a user, or null to keep no cache"
            )
        assert isinstance(history, list)
        assert isinstance(candidates, list)
        return RankerRequest.of_columns(self._ranker, self._spec, history, candidates, keys)


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
