"""Requests with the values of their features, and the batches that are made of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Int, Int32

from jaxrec.data.sequences.lists import FlatColumn
from jaxrec.data.sequences.ranges import Ranges
from jaxrec.data.sequences.schema import SequenceSchema
from jaxrec.ragged import KeyedJaggedArray


@dataclasses.dataclass(frozen=True, eq=False)
class Features:
    """Features that have one length in each request, such as those of the history.

    Attributes:
        values: ``[values]`` int32 by feature.
        ranges: Range of each request's values.
    """

    values: Mapping[str, Int32[np.ndarray, " values"]]
    ranges: Ranges

    @classmethod
    def concatenate(cls, parts: Sequence[Features]) -> Features:
        """Return the features of all requests of several parts."""
        names = parts[0].values
        sizes = [len(next(iter(part.values.values()))) for part in parts]
        return cls(
            {name: np.concatenate([part.values[name] for part in parts]) for name in names},
            Ranges.concatenate([part.ranges for part in parts], sizes),
        )


def context_features(
    column: FlatColumn, most: int, sources: Int[np.ndarray, " requests"]
) -> Features:
    """Return a column of context for each request; ``sources`` are the rows of the requests.

    Raises:
        DataError: A row has more than ``most`` values.
    """
    ranges = Ranges.between(column.offsets)
    if (ranges.lengths > most).any():
        row = int(np.argmax(ranges.lengths > most))
        problem = f"it has {ranges.lengths[row]} values; the schema's context says {most}"
        raise column.location.error(row, problem)
    return Features({column.location.column: column.values}, ranges[sources])


@dataclasses.dataclass(frozen=True, eq=False)
class SequenceRows:
    """Requests with the values of their features, in host memory.

    Attributes:
        context: Features of the context, each by itself.
        history: Features of the history.
        candidates: Features of the candidates.
    """

    context: tuple[Features, ...]
    history: Features
    candidates: Features

    def __len__(self) -> int:
        return len(self.candidates.ranges)

    @classmethod
    def empty(cls, schema: SequenceSchema) -> SequenceRows:
        """Return no requests of a schema."""

        def nothing(names: Sequence[str]) -> Features:
            return Features(dict.fromkeys(names, np.zeros(0, np.int32)), Ranges.empty(0))

        context = tuple(nothing([name]) for name in schema.context)
        return cls(context, nothing(schema.history), nothing(schema.candidates))

    @classmethod
    def concatenate(cls, parts: Sequence[SequenceRows]) -> SequenceRows:
        """Return the requests of several parts of one schema."""
        context = zip(*(part.context for part in parts), strict=True)
        return cls(
            tuple(map(Features.concatenate, context)),
            Features.concatenate([part.history for part in parts]),
            Features.concatenate([part.candidates for part in parts]),
        )

    def batch(
        self, rows: Int[np.ndarray, " rows"], capacities: Mapping[str, int]
    ) -> KeyedJaggedArray:
        """Make a batch of some requests.

        Args:
            rows: ``[rows]`` numbers of requests; -1 is a row of padding, without events,
                candidates and context.
            capacities: Capacity of each feature.

        Raises:
            ValueError: The requests have more values than a capacity.
        """
        columns: dict[str, Int32[np.ndarray, " values"]] = {}
        lengths = []
        for side in (*self.context, self.history, self.candidates):
            ranges = side.ranges.take(rows)
            # One gather of positions serves all features of a side.
            positions = ranges.positions()
            for name, values in side.values.items():
                if len(positions) > capacities[name]:
                    raise ValueError(
                        f"feature {name!r}: the rows have {len(positions)} values, but the "
                        f"capacity is {capacities[name]}"
                    )
                column = columns[name] = np.zeros(capacities[name], np.int32)
                column[: len(positions)] = values[positions]
                lengths.append(ranges.lengths)
        return KeyedJaggedArray(
            np.concatenate([*columns.values()]),
            np.concatenate(lengths).astype(np.int32),
            keys=tuple(columns),
            capacities=tuple(map(len, columns.values())),
            strides=(len(rows),) * len(columns),
        )
