"""The features of an HSTU ranker: their names, and how they are read from a batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Int32

from jaxrec.embed import EmbeddingCollection
from jaxrec.ragged import JaggedArray, KeyedJaggedArray

Side = Literal["history", "targets"]


@dataclasses.dataclass(frozen=True)
class RankerFeatures:
    """Names of the features that an `HSTURanker` reads from a batch.

    A batch is one `KeyedJaggedArray` with a row a user. The features of a history have one value
    an event, oldest first, and those of targets one value a target. Times, actions and watch times
    are integers, not ids, and no table reads them.

    Attributes:
        items: From each history feature of an item to the target's, such as
            ``{"history": "candidate"}``. Both sides usually read one table.
        additional: The same for additional features, such as categories.
        context: Number of context tokens of each feature of the user, such as ``{"user": 1}``.
        min_lengths: By feature of the context, the number of events and targets that a row needs
            for the feature to be read.
        times: The two features, of history and targets, with times in seconds; None: no times.
        actions: The two features with actions as bits. Those of targets are read for labels alone.
            None: events have no actions.
        watch_times: The same with watch times in seconds.

    Raises:
        ValueError: ``items`` is empty, or a pair does not have two names.

    Example:
        >>> RankerFeatures({"history": "candidate"}, context={"user": 1},
        ...                times=("time", "candidate_time")).times
        ('time', 'candidate_time')
    """

    items: Mapping[str, str]
    additional: Mapping[str, str] = dataclasses.field(default_factory=dict)
    context: Mapping[str, int] = dataclasses.field(default_factory=dict)
    min_lengths: Mapping[str, int] = dataclasses.field(default_factory=dict)
    times: tuple[str, str] | None = None
    actions: tuple[str, str] | None = None
    watch_times: tuple[str, str] | None = None

    def __post_init__(self) -> None:
        if not self.items:
            raise ValueError("items name a history feature and its target feature at least")
        for name in ("times", "actions", "watch_times"):
            pair = getattr(self, name)
            if pair is not None and (isinstance(pair, str) or len(pair) != 2):
                raise ValueError(
                    f"{name} are the names of two features, of history and of targets; got {pair!r}"
                )
        if unknown := sorted(set(self.min_lengths) - set(self.context)):
            raise ValueError(f"min_lengths name {unknown}, but the context is {list(self.context)}")

    # A model's static attributes are hashed for each call of a compiled function.
    def __hash__(self) -> int:
        return hash(repr(self))

    def of(self, side: Side, kind: Literal["items", "additional"]) -> list[str]:
        """Return the names of one side's features that tables read."""
        pairs = getattr(self, kind)
        return list(pairs) if side == "history" else list(pairs.values())

    def number(self, side: Side, kind: Literal["times", "actions", "watch_times"]) -> str | None:
        """Return the name of one side's feature of integers; None if there is none."""
        pair: tuple[str, str] | None = getattr(self, kind)
        return None if pair is None else pair[side == "targets"]


@dataclasses.dataclass(frozen=True)
class Events:
    """One side of a batch: the events of histories, or the targets.

    Attributes:
        lengths: ``[rows]``, number of events of each row.
        content: ``[capacity, columns]`` embeddings of the items.
        additional: ``[capacity, columns]`` embeddings of additional features, or None.
        times: ``[capacity]`` seconds, or None.
        actions: ``[capacity]`` bits, or None.
        watch_times: ``[capacity]`` seconds, or None.
    """

    lengths: Int32[Array, "*devices rows"]
    content: Float[Array, "*devices capacity columns"]
    additional: Float[Array, "*devices capacity more_columns"] | None
    times: Int[Array, "*devices capacity"] | None
    actions: Int[Array, "*devices capacity"] | None
    watch_times: Int[Array, "*devices capacity"] | None

    @property
    def capacity(self) -> int:
        return self.content.shape[-2]


def widths_of(
    embeddings: EmbeddingCollection, names: Sequence[str], pairs: Mapping[str, str]
) -> dict[str, int]:
    """Return the width of each feature's table; each has one, and pairs have equal ones."""
    tables = {
        name: [t.embedding_dim for t in embeddings.configs if name in t.feature_names]
        for name in names
    }
    for name, widths in tables.items():
        if len(widths) != 1:
            known = sorted(f for t in embeddings.configs for f in t.feature_names)
            raise ValueError(
                f"HSTURanker reads the feature {name!r}, which {len(widths)} tables have among "
                f"their features, of {known}; one must"
            )
    for history, target in pairs.items():
        if tables[history] != tables[target]:
            raise ValueError(
                f"features {history!r} and {target!r} are a pair, but their tables are of "
                f"{tables[history][0]} and {tables[target][0]} columns; both sides need the same"
            )
    return {name: widths[0] for name, widths in tables.items()}


def look_up(embeddings: EmbeddingCollection, features: KeyedJaggedArray) -> dict[str, JaggedArray]:
    """Look up a batch's features in one call; features that the batch lacks are empty."""
    # One lookup for history, context and targets: a row that several of them read is updated once.
    wanted = {name for table in embeddings.configs for name in table.feature_names}
    known = {name: features[name] for name in features.keys if name in wanted}
    if not known:
        raise KeyError(
            f"the batch has the features {list(features.keys)}, but the tables read "
            f"{sorted(wanted)}"
        )
    lengths = next(iter(known.values())).lengths
    empty = JaggedArray(jnp.zeros((*lengths.shape[:-1], 0), jnp.int32), jnp.zeros_like(lengths))
    missing = dict.fromkeys(sorted(wanted - set(known)), empty)
    if not missing:
        return embeddings(features)
    return embeddings(KeyedJaggedArray.from_dict(known | missing))


def read_events(
    names: RankerFeatures,
    side: Side,
    features: KeyedJaggedArray,
    embedded: Mapping[str, JaggedArray],
    *,
    with_actions: bool,
) -> Events:
    """Return one side of a batch; its features must have the same lengths."""
    items, additional = (names.of(side, kind) for kind in ("items", "additional"))
    numbers = {
        kind: names.number(side, kind)
        for kind in ("times", "actions", "watch_times")
        if with_actions or kind == "times"
    }
    present = [name for name in numbers.values() if name is not None]
    wanted = [*items, *additional, *present]
    if missing := [name for name in wanted if name not in features.keys]:
        raise KeyError(f"the batch lacks {missing}, features of the {side}; it has {features.keys}")
    plain = features.select(present).expanded() if present else None
    columns = {name: embedded[name] for name in (*items, *additional)}
    columns |= {name: plain[name] for name in present} if plain is not None else {}
    lengths, agree = _common_lengths(side, columns)

    def joined(of: Sequence[str]) -> Array | None:
        arrays = [jnp.asarray(columns[name].values) for name in of]
        return None if not arrays else jnp.concatenate(arrays, axis=-1)

    content = joined(items)
    assert content is not None
    if agree is not None:
        content = jnp.where(agree, content, jnp.nan)
    values = {
        kind: None if name is None else jnp.asarray(columns[name].values)
        for kind, name in numbers.items()
    }
    return Events(
        lengths,
        content,
        joined(additional),
        values["times"],
        values.get("actions"),
        values.get("watch_times"),
    )


def _common_lengths(side: Side, columns: Mapping[str, JaggedArray]) -> tuple[Array, Array | None]:
    """Return the lengths of all columns; under jit also whether they agree."""
    capacities = {name: column.capacity for name, column in columns.items()}
    if len(set(capacities.values())) > 1:
        raise ValueError(
            f"the features of the {side} have a value for each of its events and so one capacity; "
            f"got {capacities}; give the batch's constructor capacities="
        )
    (first, of_first), *others = columns.items()
    lengths = jnp.asarray(of_first.lengths)
    known = not any(isinstance(c.lengths, jax.core.Tracer) for c in columns.values())
    if not others or known:
        for name, column in others:
            if not np.array_equal(np.asarray(column.lengths), np.asarray(of_first.lengths)):
                raise ValueError(
                    f"the features of the {side} have a value for each of its events, but "
                    f"{first!r} and {name!r} differ in the lengths of their rows"
                )
        return lengths, None
    # Compiled code cannot raise an error: NaN reaches the loss.
    same = [jnp.all(jnp.asarray(column.lengths) == lengths) for _, column in others]
    return lengths, jnp.all(jnp.stack(same))
