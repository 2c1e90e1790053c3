"""Schemas of sequences: which columns make the histories, the candidates and the context."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxrec.data.schema import CategoricalColumn, SchemaError

# Encodings that need no pass over the rows.
_ENCODINGS = ("ids", "hash", "modulo")

Pair = tuple[str, str]


@dataclasses.dataclass(frozen=True)
class SequenceSchema:
    """Columns of a table with a row for each request: a history and its candidates.

    A list column of the history has one value for each event, oldest first, and one of the
    candidates one value for each candidate. Names of columns become names of features, and
    ``RankerFeatures(**schema.features())`` names the same ones to `jaxrec.nn.HSTURanker`.

    Attributes:
        items: From each history column of items to the column of candidates, such as
            ``{"history": "candidate"}``. Both sides read one table.
        encodings: Encodings of the history columns of ``items`` and ``additional`` and of the
            context, by column: "ids", "hash" or "modulo". Candidates take that of their history
            column.
        additional: As ``items``, for more ids of an event, such as categories.
        context: Number of values of each column of context, such as ``{"user": 1}``. A column has
            plain values or lists with at most this many.
        times: The two columns, of history and candidates, with whole seconds or Arrow's timestamps;
            None: no times.
        actions: The two columns with actions as bits; those of candidates are labels.
        watch_times: The two columns with watch times in whole seconds.

    Raises:
        SchemaError: A column has two roles, an encoding is missing, or it needs a pass over the
            rows.

    Example:
        >>> schema = SequenceSchema(
        ...     items={"history": "candidate"},
        ...     encodings={"history": CategoricalColumn("ids", 100)},
        ...     actions=("action", "label"),
        ... )
        >>> schema.history, schema.candidates
        (('history', 'action'), ('candidate', 'label'))
    """

    items: Mapping[str, str]
    encodings: Mapping[str, CategoricalColumn]
    additional: Mapping[str, str] = dataclasses.field(default_factory=dict)
    context: Mapping[str, int] = dataclasses.field(default_factory=dict)
    times: Pair | None = None
    actions: Pair | None = None
    watch_times: Pair | None = None

    def __post_init__(self) -> None:
        if not self.items:
            raise SchemaError("items name a history column and its column of candidates at least")
        for name, pair in self._pairs.items():
            if isinstance(pair, str) or len(pair) != 2:
                raise SchemaError(
                    f"{name} are two columns, of history and candidates; got {pair!r}"
                )
        names = self.columns
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise SchemaError(f"column {repeated[0]!r} has two roles; give each column one")
        wanted = {*self.items, *self.additional, *self.context}
        if {*self.encodings} != wanted:
            differ = sorted({*self.encodings} ^ wanted)
            raise SchemaError(
                "encodings name the history columns of items and additional, and the context: "
                f"{', '.join(sorted(wanted))}; {differ[0]!r} is "
                f"{'missing' if differ[0] in wanted else 'none of them'}"
            )
        for name, options in self.encodings.items():
            if options.encoding not in _ENCODINGS:
                raise SchemaError(
                    f"column {name!r}: sequences take the encodings {', '.join(_ENCODINGS)}; got "
                    f"{options.encoding}, whose rows jaxrec.data.Vocabulary can write to a column"
                )
        if wrong := [name for name, tokens in self.context.items() if tokens < 1]:
            raise SchemaError(f"context {wrong[0]!r} has {self.context[wrong[0]]} values, not 1")

    @property
    def _pairs(self) -> dict[str, Pair]:
        named = {name: getattr(self, name) for name in ("times", "actions", "watch_times")}
        return {name: pair for name, pair in named.items() if pair is not None}

    @property
    def history(self) -> tuple[str, ...]:
        """Names of the history's columns, items first."""
        return (*self.items, *self.additional, *(pair[0] for pair in self._pairs.values()))

    @property
    def candidates(self) -> tuple[str, ...]:
        """Names of the candidates' columns, in the order of `history`."""
        ids = {**self.items, **self.additional}
        return (*ids.values(), *(pair[1] for pair in self._pairs.values()))

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of all columns: context, history, candidates."""
        return (*self.context, *self.history, *self.candidates)

    def encoding(self, name: str) -> CategoricalColumn | None:
        """Return a column's encoding; None for times, actions and watch times."""
        of_candidates = {
            candidate: own for own, candidate in {**self.items, **self.additional}.items()
        }
        return self.encodings.get(of_candidates.get(name, name))

    def features(self) -> dict[str, Any]:
        """Return the arguments of `jaxrec.nn.RankerFeatures`."""
        names = ("items", "additional", "context", "times", "actions", "watch_times")
        return {name: getattr(self, name) for name in names}
