"""Prediction of several requests by one call of a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa

from jaxrec.serve.artifact.load import ServedModel
from jaxrec.serve.artifact.outputs import output_columns
from jaxrec.serve.artifact.requests import Request
from jaxrec.serve.http.argument_columns import ArgumentColumns
from jaxrec.serve.http.errors import RequestError, invalid
from jaxrec.serve.http.input_columns import InputColumns
from jaxrec.serve.http.payload import Payload
from jaxrec.serve.http.raw_columns import RawColumns

# Errors of values that a model cannot take.
_INPUT_ERRORS = (ValueError, TypeError, KeyError, OverflowError, pa.ArrowException)


@dataclasses.dataclass(frozen=True, eq=False)
class Scores:
    """The response to a request.

    Attributes:
        columns: The outputs by name, ``[samples, ...]`` each.
        version: Version of the tables that all of them were computed with.
    """

    columns: Mapping[str, np.ndarray]
    version: int


class Predictor:
    """Predicts the samples of several requests together.

    Args:
        served: The model.
    """

    def __init__(self, served: ServedModel) -> None:
        self.served = served
        self.columns: InputColumns = (
            ArgumentColumns(served.manifest.batch)
            if served.encoder is None
            else RawColumns(served.encoder, served.manifest.batch)
        )

    def predict(self, payloads: Sequence[Payload]) -> list[Scores | RequestError]:
        """Return the scores of each request, or what is wrong with it.

        A wrong request does not change the results of others. All scores are of one version.
        """
        results: list[Scores | RequestError | None] = [None] * len(payloads)
        order = list(range(len(payloads)))
        try:
            order, request = self._joined(order, payloads)
        except _INPUT_ERRORS as error:
            requests = {}
            for number, payload in enumerate(payloads):
                if len(payloads) > 1:
                    try:
                        requests[number] = self._joined([number], payloads)[1]
                        continue
                    except _INPUT_ERRORS as own:
                        error = own
                results[number] = invalid(_message(error))
            order = list(requests)
            if order:
                request = Request.joined([*requests.values()])
        if order:
            self._predict(request, order, payloads, results)
        return [each for each in results if each is not None]

    def _predict(
        self,
        request: Request,
        order: Sequence[int],
        payloads: Sequence[Payload],
        results: list[Scores | RequestError | None],
    ) -> None:
        """Set the results of some requests, whose samples follow each other in one request."""
        variables = self.served.variables
        columns = output_columns(self.served.predict_request(request, variables))
        start = 0
        for number in order:
            stop = start + payloads[number].num_samples
            parts = {name: array[start:stop] for name, array in columns.items()}
            results[number] = Scores(parts, variables.version)
            start = stop

    def _joined(
        self, numbers: Sequence[int], payloads: Sequence[Payload]
    ) -> tuple[list[int], Request]:
        """Return some requests in the order of their samples, and these samples."""
        lists = [i for i in numbers if not isinstance(payloads[i].columns, pa.Table)]
        tables: dict[pa.Schema, list[int]] = {}
        for number in numbers:
            columns = payloads[number].columns
            if isinstance(columns, pa.Table):
                tables.setdefault(columns.schema.remove_metadata(), []).append(number)
        requests = []
        if lists:
            table = self.columns.table([payloads[i].columns for i in lists])
            requests.append(self.columns.request(table))
        for schema, of_schema in tables.items():
            parts = [payloads[i].columns.cast(schema) for i in of_schema]
            requests.append(self.columns.request(pa.concat_tables(parts)))
        return [*lists, *(i for each in tables.values() for i in each)], Request.joined(requests)


def _message(error: Exception) -> str:
    text = error.args[0] if isinstance(error, KeyError) and error.args else error
    return " ".join(str(text).split())
