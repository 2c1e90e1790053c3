"""Rows of tables that changed since a consumer last asked."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from flax import nnx

from jaxrec.data.pipeline import each_batch
from jaxrec.embed.collection import find_collections
from jaxrec.embed.store import TableStore
from jaxrec.mesh.agree import gather_ids
from jaxrec.ragged import KeyedJaggedArray
from jaxrec.tier.changes.change_flags import MAX_CONSUMERS
from jaxrec.tier.changes.tracked_tables import (
    ChangedIds,
    TrackedModel,
    TrackedOpenTable,
    TrackedTable,
)
from jaxrec.tier.planning.batch_ids import HostBatch
from jaxrec.tier.planning.id_rows import raw_ids
from jaxrec.tier.planning.model_tables import TableVocabulary
from jaxrec.tier.planning.tier import TierObserver, tier_of
from jaxrec.tier.vocabulary.assignment import Assignment

Batch = TypeVar("Batch")


_NO_IDS = np.zeros(0, np.int64)


@dataclasses.dataclass(frozen=True)
class ChangedRows:
    """Rows of a table that changed.

    Attributes:
        ids: Sorted distinct ids, int64 ``[n]``; an id of 2**63 or more has its bits as int64.
        rows: The present rows, ``[n, embedding_dim]``; None: not requested.
        state: Their optimizer state by name, ``[n, ...]``; None: not requested.
    """

    ids: np.ndarray
    rows: np.ndarray | None = None
    state: dict[str, np.ndarray] | None = None


@dataclasses.dataclass(frozen=True)
class TableChanges(ChangedRows):
    """Changes of a table: ids with a changed row, ids that lost theirs, and rows of unknown ids.

    Attributes:
        removed: Ids of an open vocabulary that lost their rows, sorted, int64 ``[m]``. Some of them
            may never have been among the consumer's changes.
        unknown: Changed rows that ids without a row of their own read
            (`jaxrec.tier.Dynamic.unknown`); its ``ids`` are row indices of the table.
    """

    removed: np.ndarray = dataclasses.field(default_factory=_NO_IDS.copy)
    unknown: ChangedRows = dataclasses.field(default_factory=lambda: ChangedRows(_NO_IDS.copy()))


@dataclasses.dataclass
class HandOver:
    """Changes that `ChangeTracker.hand_over` gives to a consumer.

    Attributes:
        ids: Changed ids by the collection's path and the table's name.
        position: Name of the model's state at the consumer's last hand-over, which the consumer set
            then. Set a name for the present state here. None: no name was set, or `changes` was
            called since.
    """

    ids: dict[tuple[str, str], ChangedIds]
    position: str | None


class ChangeTracker(TierObserver):
    """Tracks which rows of which tables changed, for several consumers.

    It reads the ids of batches on the host; the compiled step does not change. The ids are a
    superset of those whose rows changed: a batch's step may be skipped, and a gradient may be zero.
    Frozen tables are left out. With up to eight consumers it takes a byte for each row of a table,
    and eight bytes more for each row of an open vocabulary.

    Batches do not show all changes. Call `mark` after ``load_rows``, ``load_table`` or
    `jaxrec.tier.import_rows`, for a table that a loss reads whole, and after a checkpoint was
    restored into plain tables.

    With several processes and tables on a mesh, every process calls `changes`, `state` and
    `load_state`, and gets the changes by the batches of all processes.

    Args:
        model: The model. With open vocabularies, its batches are recorded when `jaxrec.tier.ahead`
            yields them; otherwise by `watch` or `record`.
        consumers: Names of the consumers, up to 64. Each begins without changes.
        ahead: Largest number of batches that are recorded before the step of an earlier one is
            dispatched, because a pipeline between the tracker and the step reads ahead. The changes
            of the last ``ahead`` batches are returned once more with the next ones, so that none is
            lost. 0: each step follows its batch at once, as in a plain loop. `jaxrec.train.Trainer`
            needs 4, twice the number of its stages and twice its ``accumulate``.

    Raises:
        TypeError: The model has no tables, or gives rows to ids in its compiled step.
        ValueError: Names are repeated, missing or too many, or ``ahead`` is negative.

    Example:
        >>> import jaxrec
        >>> config = jaxrec.EmbeddingBagConfig("item", num_embeddings=100, embedding_dim=2)
        >>> model = jaxrec.EmbeddingBagCollection([config], rngs=nnx.Rngs(0))
        >>> tracker = ChangeTracker(model, consumers=("publisher", "checkpoint"))
        >>> batch = jaxrec.KeyedJaggedArray.from_lists({"item": [[7, 3], [7]]})
        >>> for features in tracker.watch([batch]):
        ...     _ = model(features)  # a training step
        >>> tracker.changes("publisher")["item"].ids
        array([3, 7])
        >>> tracker.changes("publisher")["item"].ids
        array([], dtype=int64)
        >>> tracker.changes("checkpoint", with_rows=True)["item"].rows.shape
        (2, 2)
    """

    def __init__(self, model: nnx.Module, consumers: Sequence[str], *, ahead: int = 0) -> None:
        self._bits = _bits(consumers)
        if isinstance(ahead, bool) or not isinstance(ahead, int) or ahead < 0:
            raise ValueError(f"ChangeTracker: ahead is an integer of 0 or more, got {ahead!r}")
        # Taken by threads that read batches, and by the one that trains.
        self._lock = threading.Lock()
        # Tables and rows of the last batches.
        self._recent: collections.deque[list[tuple[TrackedTable, np.ndarray]]] = collections.deque(
            maxlen=ahead
        )
        # Positions by consumer, as the last `hand_over` left them.
        self._positions: dict[str, str] = {}
        self._tier = tier_of(model) if isinstance(model, nnx.Module) else None
        if self._tier is None:
            self._model = TrackedModel.of(model, None, len(self._bits))
            return
        # Until the tracker observes the tier, no row may move between ids.
        with self._tier.settled(model):
            self._model = TrackedModel.of(model, self._tier, len(self._bits))
            self._tier.observers.add(self)

    @property
    def consumers(self) -> tuple[str, ...]:
        """Names of the consumers."""
        return tuple(self._bits)

    @property
    def tables(self) -> tuple[str, ...]:
        """Names of the tracked tables, with the path of the collection where two have one name."""
        return tuple(self._model.tables)

    @property
    def vocabularies(self) -> tuple[TableVocabulary, ...]:
        """The vocabularies of the model."""
        return () if self._tier is None else self._tier.vocabularies

    def check_model(self, model: nnx.Module) -> None:
        """Raise a ValueError unless ``model`` is the one whose changes are tracked."""
        found, tracked = (
            {path: module.configs for path, module in collections.items()}
            for collections in (find_collections(model), self._model.collections)
        )
        if found != tracked or tier_of(model) is not self._tier:
            raise ValueError(
                "the ChangeTracker tracks another model; make it with the model that is trained, "
                "after jaxrec.tier.make and jaxrec.shard"
            )

    # Recording.

    def watch(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Iterate over host batches and record each before it is yielded.

        Iterate over this in the training loop itself, or give the tracker ``ahead`` if a pipeline
        between them reads ahead. With open vocabularies `jaxrec.tier.ahead` records the batches,
        which pass through here.

        Args:
            batches: The batches.

        Raises:
            TypeError: As for `record`.
        """
        for batch in each_batch(batches):
            if self._tier is None:
                self.record(batch)
            yield batch

    def record(self, batch: Any) -> None:
        """Record the rows that a batch's training step changes; call it before the step.

        Args:
            batch: A pytree with `KeyedJaggedArray`s on the host. Keys that no table reads are
                ignored. With several processes, this process's part of the batch.

        Raises:
            TypeError: The batch is on a device or has no `KeyedJaggedArray`; or the model has open
                vocabularies, so that `jaxrec.tier.ahead` records its batches.
        """
        if self._tier is not None:
            raise TypeError(
                "the model has open vocabularies, and its batches are recorded as "
                "jaxrec.tier.ahead yields them; call record for other models alone"
            )
        self._record(batch)

    def mark(self, table: str, ids: Any = None) -> None:
        """Record a change that batches do not show.

        Args:
            table: Name of the table, one of `tables`, or a frozen one, whose marks
                `jaxrec.tier.publish` reads.
            ids: The ids whose rows changed, as for ``collection.rows``; None: all ids.

        Raises:
            KeyError: No tracked table has that name.
            TypeError, ValueError: The table has no such ids.
        """
        tracked, bits = self._table(table), self._all_bits
        if ids is None:
            with self._lock:
                tracked.mark_all(bits)
            return
        found = self._store(tracked).find_ids(tracked.config.name, ids)
        with self._lock:
            tracked.mark(found.rows[found.rows >= 0], bits)
            if found.outside is not None and isinstance(tracked, TrackedOpenTable):
                outside = raw_ids(tracked.config, ids)[found.outside.positions]
                tracked.mark_gone(outside, bits)

    def _record(self, batch: Any) -> None:
        for leaf in jax.tree.leaves(batch, is_leaf=_is_features):
            if _is_features(leaf) and isinstance(leaf.values, jax.Array):
                raise TypeError(
                    "ChangeTracker reads ids on the host, but the batch is on a device; give it "
                    "the batch as it was before shard_batch or put_batch"
                )
        # All ids are read before the lock is taken, which the training thread may wait for.
        marks = [
            (table, segment.ids)
            for segment in HostBatch.of(batch).segments
            for table in self._model.readers.get(segment.key, ())
        ]
        with self._lock:
            for table, rows in marks:
                table.mark(rows, self._all_bits)
            # A batch that is read ahead of its step would be cleared before the step changes its
            # rows, so that the marks of the last batches are kept to be set again.
            self._recent.append(marks)

    def taken(self, batch: Any) -> None:
        self._record(batch)

    def moved(self, assignments: Sequence[Assignment]) -> None:
        with self._lock:
            for each, assignment in zip(self._model.vocabularies, assignments, strict=True):
                each.move(assignment, self._all_bits)

    def restored(self) -> None:
        with self._lock:
            self._recent.clear()
            for each in self._model.vocabularies:
                each.restore(self._all_bits)
            for table in self._model.all_tables.values():
                table.mark_all(self._all_bits)

    # Reading.

    def changes(
        self, consumer: str, *, with_rows: bool = False, with_state: bool = False
    ) -> dict[str, TableChanges]:
        """Return a consumer's changes since its last call, which then count as read.

        Call it in the training thread, after the step of the last batch is dispatched. If it
        raises, no change counts as read.

        Args:
            consumer: Name of the consumer.
            with_rows: Whether the rows are read too, all at once into host memory. To read them in
                parts, pass some of the ids to ``collection.rows``.
            with_state: Whether their optimizer state is read too.

        Returns:
            The changes by table, for each of `tables`.

        Raises:
            KeyError: There is no such consumer.
        """
        bit = self._bit(consumer)
        with self._lock:
            changes = {
                name: self._with_values(table, self._changed(table, bit), with_rows, with_state)
                for name, table in self._model.tables.items()
            }
            self._clear(bit, self._model.tables.values())
            self._positions.pop(consumer, None)
        return changes

    @contextlib.contextmanager
    def hand_over(self, consumer: str) -> Iterator[HandOver]:
        """Yield a consumer's changed ids, which count as read unless the block raises.

        The block may set `HandOver.position` for the next one to find. Frozen tables are among the
        tables. Call it where `changes` may be called.

        Raises:
            KeyError: There is no such consumer.
        """
        bit = self._bit(consumer)
        with self._lock:
            tables = self._model.all_tables.values()
            changed = [(table, self._changed(table, bit)) for table in tables]
            self._clear(bit, tables)
        ids = {(table.collection, table.config.name): each for table, each in changed}
        handed_over = HandOver(ids, position := self._positions.pop(consumer, None))
        try:
            yield handed_over
        # Marks of batches recorded during the block stay; these are added to them.
        except BaseException:
            with self._lock:
                for table, each in changed:
                    table.load(each, bit)
            if position is not None:
                self._positions[consumer] = position
            raise
        if handed_over.position is not None and handed_over.position != position:
            self._positions[consumer] = handed_over.position

    def _clear(self, bit: int, tables: Iterable[TrackedTable]) -> None:
        """Clear ``bit`` of tables, except where a batch whose step may still come has set it."""
        for table in tables:
            table.clear(bit)
        for marks in self._recent:
            for table, rows in marks:
                table.mark(rows, bit)

    def _changed(self, table: TrackedTable, bit: int) -> ChangedIds:
        changed = table.changes(bit)
        if jax.process_count() == 1 or not self._model.is_on_mesh:
            return changed
        ids, unknown = (
            np.unique(np.concatenate(gather_ids(mine))) for mine in (changed.ids, changed.unknown)
        )
        return ChangedIds(ids, changed.removed, unknown)

    def _with_values(
        self, table: TrackedTable, changed: ChangedIds, with_rows: bool, with_state: bool
    ) -> TableChanges:
        store, name = self._store(table), table.config.name

        def values(store: TableStore, ids: np.ndarray) -> dict[str, Any]:
            if not (with_rows or with_state):
                return {}
            state = store.rows_of(name, ids).read(with_state=with_state)
            rows = state.pop("rows")
            return {"rows": rows if with_rows else None, "state": state if with_state else None}

        # The ids of a placed store are row indices.
        unknown = ChangedRows(changed.unknown, **values(store.placed, changed.unknown))
        return TableChanges(
            changed.ids, **values(store, changed.ids), removed=changed.removed, unknown=unknown
        )

    # State, for checkpoints.

    def state(self) -> dict[str, dict[str, dict[str, np.ndarray]]]:
        """Return the unread changes: arrays by consumer, table and field."""
        with self._lock:
            return {
                consumer: {
                    name: vars(self._changed(table, bit))
                    for name, table in self._model.tables.items()
                }
                for consumer, bit in self._bits.items()
            }

    def load_state(self, state: Mapping[str, Mapping[str, Mapping[str, np.ndarray]]]) -> None:
        """Replace all recorded changes by a `state`.

        Consumers and tables that the state lacks have no changes. Consumers and tables that only
        the state has are ignored.
        """
        with self._lock:
            self._recent.clear()
            self._positions.clear()
            for consumer, bit in self._bits.items():
                for name, table in self._model.tables.items():
                    table.clear(bit)
                    saved = state.get(consumer, {}).get(name)
                    if saved is not None:
                        table.load(ChangedIds(**saved), bit)

    @property
    def _all_bits(self) -> int:
        return (1 << len(self._bits)) - 1

    def _bit(self, consumer: str) -> int:
        if consumer not in self._bits:
            names = ", ".join(map(repr, self._bits))
            raise KeyError(f"no consumer is named {consumer!r}; there are {names}")
        return self._bits[consumer]

    def _table(self, name: str) -> TrackedTable:
        tables = self._model.all_tables | self._model.tables
        if name not in tables:
            names = ", ".join(map(repr, self._model.all_tables))
            raise KeyError(f"no table is named {name!r}; there are {names}")
        return tables[name]

    def _store(self, table: TrackedTable) -> TableStore:
        return self._model.collections[table.collection].tables.get_value()


def _bits(consumers: Sequence[str]) -> dict[str, int]:
    """Return a bit for each consumer."""
    names = () if isinstance(consumers, str) else tuple(consumers)
    if not 0 < len(names) <= MAX_CONSUMERS or len(set(names)) < len(names):
        raise ValueError(
            f"ChangeTracker: consumers are 1 to {MAX_CONSUMERS} distinct names such as "
            f"('publisher', 'checkpoint'), got {consumers!r}"
        )
    return {name: 1 << number for number, name in enumerate(names)}


def _is_features(leaf: Any) -> bool:
    return isinstance(leaf, KeyedJaggedArray)
