"""Requests to a ranker: rows of a history and candidates, checked against the ranker's sizes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from jaxrec.ragged import KeyedJaggedArray
from jaxrec.serve.artifact.batch_spec import BatchSpec, RaggedInput
from jaxrec.serve.artifact.ranker_spec import RankerSpec
from jaxrec.serve.artifact.requests import Column, check_ids, columns_of
from jaxrec.serve.ranker.caches import History, Key


@dataclasses.dataclass(frozen=True, eq=False)
class Row:
    """A user's history and candidates.

    Attributes:
        key: Key of the history's cache; None: the cache is not kept.
        history: Context and events.
        candidates: int32 ``[features, candidates]``.
    """

    key: Key | None
    history: History
    candidates: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class RankerRequest:
    """Rows of a request, whose values fit the ranker.

    Attributes:
        keys: Key of each row.
        context: Each feature of context.
        events: Each feature of events, with equal lengths.
        candidates: Each feature of candidates, with equal lengths.
        request_time: Index of the feature of candidates whose last value is the time that a
            history is encoded for; None: there is none.
    """

    keys: Sequence[Key | None]
    context: Sequence[Column]
    events: Sequence[Column]
    candidates: Sequence[Column]
    request_time: int | None

    @classmethod
    def of_batch(
        cls,
        ranker: RankerSpec,
        spec: BatchSpec,
        batch: KeyedJaggedArray,
        keys: Sequence[Key | None] | None,
    ) -> RankerRequest:
        """Make a request of a batch with all features of history and candidates.

        Without ``keys`` no cache is kept.
        """
        history, candidates = (columns_of(each, batch) for each in spec.ragged)
        size, num_histories = candidates[0].lengths.size, history[0].lengths.size
        if num_histories != size:
            raise ValueError(
                f"a row has a history and candidates; got {num_histories} histories and the "
                f"candidates of {size} rows"
            )
        keys = [None] * size if keys is None else keys
        if len(keys) != size:
            raise ValueError(f"there is a key for each row; got {len(keys)} for {size} rows")
        for each, columns in zip(spec.ragged, (history, candidates), strict=True):
            check_ids(each, columns, 0, size)
        return cls.of_columns(ranker, spec, history, candidates, keys)

    @classmethod
    def of_columns(
        cls,
        ranker: RankerSpec,
        spec: BatchSpec,
        history: Sequence[Column],
        candidates: Sequence[Column],
        keys: Sequence[Key | None],
    ) -> RankerRequest:
        """Make a request of columns, whose ids are those of their tables.

        A ValueError names the feature and the row that does not fit.
        """
        size = len(ranker.context)
        of_history, of_candidates = spec.ragged
        capacities, (most, *_) = spec.sizes[0].capacities
        _check_context(of_history, history[:size], capacities)
        names = of_history.keys[size:]
        _check_equal(names, history[size:], "events")
        _check_equal(of_candidates.keys, candidates, "candidates")
        _check_most(
            names[0], history[size], capacities[-1], "events",
            "send the newest ones, or export it with larger history_sizes",
        )  # fmt: skip
        _check_most(
            of_candidates.keys[0], candidates[0], most, "candidates",
            "send fewer, or export it with larger max_candidates",
        )  # fmt: skip
        time = ranker.request_time
        return cls(
            keys,
            history[:size],
            history[size:],
            candidates,
            None if time is None else of_candidates.keys.index(time),
        )

    @property
    def num_candidates(self) -> np.ndarray:
        """Number of candidates of each row, ``[rows]``."""
        return self.candidates[0].lengths

    def rows(self) -> Iterator[Row]:
        """Yield the rows in order."""
        for number, key in enumerate(self.keys):
            candidates = _values(self.candidates, number)
            time = 0
            if self.request_time is not None and candidates.shape[1]:
                time = int(candidates[self.request_time, -1])
            context = tuple(_values([column], number)[0] for column in self.context)
            yield Row(key, History(context, _values(self.events, number), time), candidates)


def _values(columns: Sequence[Column], row: int) -> np.ndarray:
    """Return a copy of a row's values, int32 ``[features, values]``."""
    parts = [column.ids[column.offsets[row] : column.offsets[row + 1]] for column in columns]
    # A copy: a cache keeps these values when the request is gone.
    return np.stack(parts).astype(np.int32)


def _check_context(each: RaggedInput, columns: Sequence[Column], slots: Sequence[int]) -> None:
    for name, column, most in zip(each.keys, columns, slots, strict=False):
        _check_most(name, column, most, "ids", "send fewer")


def _check_most(name: str, column: Column, most: int, what: str, hint: str) -> None:
    is_long = column.lengths > most
    if is_long.any():
        row = int(np.argmax(is_long))
        raise ValueError(
            f"feature {name!r}, sample {row}: {column.lengths[row]:,} {what}, and the ranker takes "
            f"{most:,} at most; {hint}"
        )


def _check_equal(names: Sequence[str], columns: Sequence[Column], what: str) -> None:
    """Require that a row has equally many values of each feature."""
    for name, column in zip(names[1:], columns[1:], strict=True):
        differs = column.lengths != columns[0].lengths
        if differs.any():
            row = int(np.argmax(differs))
            raise ValueError(
                f"feature {name!r}, sample {row}: {column.lengths[row]:,} values, but "
                f"{columns[0].lengths[row]:,} of feature {names[0]!r}; the features of {what} have "
                "a value for each of them"
            )
