"""Schemas of events: actions and candidates as conditions on columns of what users did."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Bool

from jaxrec.data.files import DataError
from jaxrec.data.schema import CategoricalColumn, SchemaError
from jaxrec.data.sequences.schema import SequenceSchema

# Begins the names of the features of candidates.
CANDIDATE = "candidate_"
ACTION, WATCH_TIME = "action", "watch_time"


@dataclasses.dataclass(frozen=True)
class Where:
    """Events whose columns satisfy all of some conditions; a null satisfies none.

    Attributes:
        values: By column, the values that it may have.
        at_least: By column of numbers, the smallest number that it may have.
        below: By column of numbers, a bound: its numbers must be smaller.

    Example:
        >>> listened = Where(values={"event_type": ["listen"]}, at_least={"played_ratio_pct": 50})
        >>> columns = {"event_type": pa.array(["listen", "listen", "like"]),
        ...            "played_ratio_pct": pa.array([80, 20, None])}
        >>> listened.mask(columns, 3).tolist()
        [True, False, False]
    """

    values: Mapping[str, Sequence[Any]] = dataclasses.field(default_factory=dict)
    at_least: Mapping[str, float] = dataclasses.field(default_factory=dict)
    below: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, values in self.values.items():
            if isinstance(values, str) or not values:
                raise SchemaError(
                    f"column {name!r} has a list of one value or more to be among; got {values!r}"
                )

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns."""
        return tuple(dict.fromkeys((*self.values, *self.at_least, *self.below)))

    def mask(self, columns: Mapping[str, pa.Array], events: int) -> Bool[np.ndarray, " events"]:
        """Return which events satisfy the conditions.

        Args:
            columns: ``[events]`` values by column.
            events: Number of events.

        Raises:
            DataError: A column cannot be compared with a condition's value.
        """
        mask = np.ones(events, bool)
        conditions: list[tuple[str, Any, Callable[[pa.Array, Any], pa.Array]]] = [
            *((name, values, _among) for name, values in self.values.items()),
            *((name, bound, pc.greater_equal) for name, bound in self.at_least.items()),
            *((name, bound, pc.less) for name, bound in self.below.items()),
        ]
        for name, wanted, compare in conditions:
            column = columns[name]
            try:
                holds = compare(column, wanted)
            except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as error:
                raise DataError(
                    f"column {name!r} is of type {column.type}, which cannot be compared with "
                    f"{wanted!r} ({error})"
                ) from None
            mask &= holds.fill_null(False).to_numpy(zero_copy_only=False)
        return mask


def _among(column: pa.Array, wanted: Sequence[Any]) -> pa.Array:
    if isinstance(column.type, pa.DictionaryType):
        # One look at each distinct value, not at each event.
        known = _among(column.dictionary, wanted)
        return known.take(column.indices)
    return pc.is_in(column, pa.array(list(wanted)).cast(column.type))


@dataclasses.dataclass(frozen=True)
class Action:
    """Something that a user does, as a bit of an event's actions.

    Attributes:
        name: Name, which a task of the ranker gets.
        bit: The bit: 1, 2, 4, ...
        where: Events with the bit.
    """

    name: str
    bit: int
    where: Where

    def __post_init__(self) -> None:
        if not 0 < self.bit < 2**31 or self.bit & (self.bit - 1):
            raise SchemaError(f"action {self.name!r} has the bit {self.bit}; bits are 1, 2, 4, ...")


@dataclasses.dataclass(frozen=True)
class EventSchema:
    """Columns of a table with a row for each user: lists of all events of the user, oldest first.

    `group_events` and `write_histories` make such rows of a log with a row for each event. An event
    may be part of a history, and it may be a candidate: the user did it, and the model predicts its
    actions from the events before it. The features of candidates are named like those of the
    history, after ``candidate_``. `sequences` has all names.

    Attributes:
        items: List columns of items.
        encodings: Encodings of ``items``, ``additional`` and ``context`` by column.
        actions: The bits of an event's actions.
        user: Column of the user.
        time: List column of times, in whole seconds or Arrow's timestamps.
        additional: List columns of more ids of an event.
        context: Columns with one id for each user, such as ``("uid",)``.
        candidates: Events that are candidates.
        history: Events that are part of histories.
        watch_time: List columns of a percentage and of a length in seconds, whose product is the
            watch time of an event; None: no watch times.

    Raises:
        SchemaError: There is no action, two actions share a name or a bit, or as for
            `SequenceSchema`.

    Example:
        >>> schema = EventSchema(
        ...     items=("item_id",),
        ...     encodings={"item_id": CategoricalColumn("ids", 100)},
        ...     actions=(Action("like", 1, Where(at_least={"rating": 4})),),
        ... )
        >>> schema.sequences.candidates
        ('candidate_item_id', 'candidate_timestamp', 'candidate_action')
    """

    items: tuple[str, ...]
    encodings: Mapping[str, CategoricalColumn]
    actions: tuple[Action, ...]
    user: str = "uid"
    time: str = "timestamp"
    additional: tuple[str, ...] = ()
    context: tuple[str, ...] = ()
    candidates: Where = Where()
    history: Where = Where()
    watch_time: tuple[str, str] | None = None

    def __post_init__(self) -> None:
        names, bits = [a.name for a in self.actions], [a.bit for a in self.actions]
        if not names or len({*names}) < len(names) or len({*bits}) < len(bits):
            raise SchemaError(
                f"actions are one or more, each with a name and a bit of its own; got {names} with "
                f"the bits {bits}"
            )
        _ = self.sequences  # checks the columns

    @property
    def sequences(self) -> SequenceSchema:
        """The features of batches."""

        def pair(name: str) -> tuple[str, str]:
            return name, CANDIDATE + name

        return SequenceSchema(
            dict(map(pair, self.items)),
            self.encodings,
            dict(map(pair, self.additional)),
            dict.fromkeys(self.context, 1),
            pair(self.time),
            pair(ACTION),
            None if self.watch_time is None else pair(WATCH_TIME),
        )

    @property
    def conditions(self) -> tuple[str, ...]:
        """Names of the list columns that actions, candidates and histories depend on."""
        parts = (*(action.where for action in self.actions), self.candidates, self.history)
        return tuple(dict.fromkeys(name for where in parts for name in where.columns))


def yambda_schema(num_items: int, num_users: int | None = None) -> EventSchema:
    """Return the schema of Yambda's files ``multi_event.parquet``.

    The actions are those of MLPerf's DLRMv4: 1 for a listen to half of the track or more, 2 for a
    like, 4 for a shorter listen. Candidates are listens. Yambda is described by Ploshkin et al.
    2025, arXiv:2505.22238.

    Args:
        num_items: Rows of the table of items. Ids beyond are taken modulo this number.
        num_users: The same for users; None: the user is not a feature.
    """
    listens, likes = {"event_type": ["listen"]}, {"event_type": ["like"]}
    half = {"played_ratio_pct": 50.0}
    users = {} if num_users is None else {"uid": CategoricalColumn("modulo", num_users)}
    return EventSchema(
        items=("item_id",),
        encodings={"item_id": CategoricalColumn("modulo", num_items), **users},
        actions=(
            Action("listen_plus", 1, Where(listens, at_least=half)),
            Action("like", 2, Where(likes)),
            Action("skip", 4, Where(listens, below=half)),
        ),
        context=tuple(users),
        candidates=Where(listens),
        history=Where({"event_type": ["listen", "like"]}),
    )


def movielens_schema(num_movies: int, num_users: int | None = None) -> EventSchema:
    """Return the schema of `movielens_ratings`; the action 1 is a rating of 4 or more.

    Args:
        num_movies: Rows of the table of movies, above the largest id.
        num_users: The same for users; None: the user is not a feature.
    """
    users = {} if num_users is None else {"user_id": CategoricalColumn("ids", num_users)}
    return EventSchema(
        items=("movie_id",),
        encodings={"movie_id": CategoricalColumn("ids", num_movies), **users},
        actions=(Action("like", 1, Where(at_least={"rating": 4.0})),),
        user="user_id",
        context=tuple(users),
    )
