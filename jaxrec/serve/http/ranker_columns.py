"""Requests to a ranker: a key of the cache, and a list for each feature of a row."""

from __future__ import annotations

import dataclasses

import pyarrow as pa

from jaxrec.data.encode import joined
from jaxrec.serve.artifact.batch_spec import BatchSpec
from jaxrec.serve.artifact.ranker_spec import RankerSpec
from jaxrec.serve.http.argument_columns import ArgumentColumns
from jaxrec.serve.http.input_columns import InputColumn, InputColumns
from jaxrec.serve.ranker.caches import KEY_TYPES
from jaxrec.serve.ranker.export import CACHE_KEY
from jaxrec.serve.ranker.rows import RankerRequest


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
