"""Schemas of a ranker's data, by the names and types of its columns."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from jaxrec.arguments import ConfigError
from jaxrec.data import (
    Action,
    CategoricalColumn,
    EventSchema,
    Schema,
    SequenceSchema,
    Where,
    yambda_schema,
)
from jaxrec.data.column_types import is_dense, is_list
from jaxrec.data.movielens import has_ratings
from jaxrec.data.sequences.events import ACTION, CANDIDATE
from jaxrec.train.config import DataConfig, TrainConfig

# Names of the columns of users, items and times, if no option names them.
_USERS, _ITEMS, TIME = ("uid", "user_id"), ("item_id", "movie_id"), "timestamp"


@dataclasses.dataclass(frozen=True)
class Columns:
    """Names of the columns of a ranker's data.

    Attributes:
        user: Column of users; None: users are not a feature.
        items: Columns of the items: the id, and more ids of an event.
        time: Column of times.
    """

    user: str | None
    items: tuple[str, ...]
    time: str

    @classmethod
    def find(cls, data: DataConfig, names: Sequence[str]) -> Columns:
        """Return the columns that the options name, or those with usual names.

        Raises:
            ConfigError: There is no such column.
        """

        def one_of(usual: Sequence[str], option: str) -> str:
            for name in usual:
                if name in names:
                    return name
            raise ConfigError(
                f"{data.path} has no column {' or '.join(map(repr, usual))}; name it with "
                f"{option}; its columns are {', '.join(names)}"
            )

        given = [one_of((name,), "--item") for name in data.item]
        items = given or [one_of(_ITEMS, "--item")]
        time = one_of((data.time or TIME,), "--time")
        if data.user is not None:
            return cls(one_of((data.user,), "--user"), tuple(items), time)
        return cls(next((x for x in _USERS if x in names), None), tuple(items), time)


def known_columns(path: pathlib.Path | None) -> Columns | None:
    """Return the columns of a generated log and of a file of ratings; None for other data."""
    if path is None:
        # Each user makes one request, so that the user tells nothing.
        return Columns(None, _ITEMS[:1], TIME)
    if not path.is_dir() and has_ratings(path):
        return Columns(_USERS[1], _ITEMS[1:], TIME)
    return None


def table_schema(config: TrainConfig, names: Columns, columns: pa.Schema | None) -> Schema:
    """Return the encodings of a ranker's columns of ids; the label is the feature of actions.

    ``columns`` are their types; None: integers.
    """
    categorical = {}
    for name in (*names.items, *([] if names.user is None else [names.user])):
        kind = pa.int64() if columns is None else columns.field(name).type
        kind = kind.value_type if is_list(kind) else kind
        kind = kind.value_type if isinstance(kind, pa.DictionaryType) else kind
        encoding: Any = "modulo" if is_dense(kind) else "hash"
        categorical[name] = CategoricalColumn(encoding, config.data.table_rows)
    return Schema(CANDIDATE + ACTION, {}, categorical)


def sequence_schema(names: Columns, schema: Schema) -> SequenceSchema:
    """Return the features of a ranker's batches."""

    def pair(name: str) -> tuple[str, str]:
        return name, CANDIDATE + name

    first, *others = names.items
    return SequenceSchema(
        dict([pair(first)]),
        schema.categorical,
        dict(map(pair, others)),
        {} if names.user is None else {names.user: 1},
        pair(names.time),
        pair(ACTION),
    )


def event_schema(
    data: DataConfig, columns: Sequence[str], names: Columns, schema: Schema
) -> EventSchema:
    """Return the schema of a table of events, whose columns tell its actions and candidates.

    Raises:
        ConfigError: No column says what to predict.
    """
    candidates = history = Where()
    if data.label:
        if len(data.label) > 1:
            raise ConfigError(f"model.name hstu_ranker predicts one label, got {len(data.label)}")
        actions: tuple[Action, ...] = (Action(data.label[0], 1, Where({data.label[0]: [1]})),)
    elif "played_ratio_pct" in columns:
        yambda = yambda_schema(2)
        actions = yambda.actions
        if "event_type" in columns:
            candidates, history = yambda.candidates, yambda.history
        else:
            # A file of listens alone.
            actions = tuple(
                dataclasses.replace(x, where=dataclasses.replace(x.where, values={}))
                for x in actions
                if x.name != "like"
            )
    elif "rating" in columns:
        actions = (Action("like", 1, Where(at_least={"rating": 4.0})),)
    else:
        raise ConfigError(
            f"{data.path} has neither a column played_ratio_pct nor rating; name the column that "
            "is 1 where a user did what is to be predicted, with --label"
        )
    first, *others = names.items
    return EventSchema(
        (first,),
        schema.categorical,
        actions,
        user=names.user or "",
        time=names.time,
        additional=tuple(others),
        context=() if names.user is None else (names.user,),
        candidates=candidates,
        history=history,
    )
