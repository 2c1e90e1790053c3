"""The vocabularies of a model on the host, and their changes to its tables."""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import jax
import numpy as np
from flax import nnx

from jaxrec.embed.found_ids import FoundIds
from jaxrec.ragged import Packer
from jaxrec.tier.batch_ids import BatchIds, Gather
from jaxrec.tier.batch_order import BatchOrder
from jaxrec.tier.foresight import ForeseenBatch
from jaxrec.tier.id_rows import find_rows, raw_ids
from jaxrec.tier.ids.batch_ops import distinct
from jaxrec.tier.ids.id_map import Lookup, look_up
from jaxrec.tier.model_tables import TableVocabulary, collections_of
from jaxrec.tier.moves import NO_MOVE, Move, begin_move, move_rows
from jaxrec.tier.observer import TierObserver
from jaxrec.tier.pending_moves import PendingMoves
from jaxrec.tier.planned_batch import PlannedBatch
from jaxrec.tier.rows.store_traffic import step_of
from jaxrec.tier.rows.transfer import RowTransfer
from jaxrec.tier.saved_stores import warn_of_earlier_rows
from jaxrec.tier.store import TierStore
from jaxrec.tier.vocabulary.vocabulary import (
    NO_CHANGE,
    LoadedRows,
    Proposal,
    TableFullError,
    VocabularyFullError,
    commit_all,
)

# In the place of a row: the id reads what `Dynamic.unknown` says. -1: it has no row yet.
_UNKNOWN = -2

# Key of the state of the whole run; no table has this name.
RUN_STATE = "@run"


class _MustWaitError(Exception):
    """A batch can be planned only after a batch before it was taken."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Tier:
    """The vocabularies of a model.

    `plan` works on the host alone, in any thread, a few batches ahead. `apply` changes the model's
    tables, in the thread that trains, before the step of the batch. Changes may be applied earlier
    than that: no batch that was planned before uses the rows that they overwrite.

    Args:
        vocabularies: The vocabularies.
        keys: Data of the key of first rows, uint32 ``[2]``, by path of the collection.
    """

    def __init__(
        self, vocabularies: Sequence[TableVocabulary], keys: Mapping[str, np.ndarray]
    ) -> None:
        self.vocabularies, self.keys = tuple(vocabularies), dict(keys)
        self.observers: weakref.WeakSet[TierObserver] = weakref.WeakSet()
        self.order = BatchOrder()
        self.packer = Packer()  # capacities of batches that no packer made
        self._planning = threading.Lock()  # guards the vocabularies
        self._pending = PendingMoves()
        self._is_closed = False

    @property
    def features(self) -> tuple[str, ...]:
        """Features whose ids the vocabularies have."""
        return tuple(feature for each in self.vocabularies for feature in each.features)

    @property
    def has_stores(self) -> bool:
        """Whether evicted rows of some table go to a store."""
        return any(each.transfer is not None for each in self.vocabularies)

    @property
    def cached_tables(self) -> set[str]:
        """Names of the tables of fixed size, most of whose rows are in a store."""
        return {
            table.config.name
            for each in self.vocabularies
            if each.num_ids is not None
            for table in each.tables
        }

    @property
    def foresight(self) -> int:
        """Number of batches after a planned one whose ids eviction policies look at."""
        return max(each.vocabulary.settings.eviction.foresight for each in self.vocabularies)

    def statistics(self) -> dict[str, dict[str, float]]:
        """Return the statistics of each vocabulary by name."""
        with self._planning:
            return {each.name: each.statistics() for each in self.vocabularies}

    # Planning: on the host.

    def begin(self, undispatched: int) -> int:
        """Prepare for a new sequence of batches, which may begin with batches planned before.

        Args:
            undispatched: Number of batches that may be taken before the step of the first of them
                is dispatched.

        Returns:
            The number of the sequence, for `end`.
        """
        warn_of_earlier_rows(self.vocabularies)
        with self._planning:
            return self.order.begin(undispatched)

    def end(self, loop: int) -> None:
        """End a sequence of batches, if it is the last that was begun: `plan` no longer waits."""
        self.order.end(loop)

    def plan(self, foreseen: ForeseenBatch, held: int) -> PlannedBatch:
        """Give the ids of a training batch their rows.

        If the batch does not fit beside the batches under way, this waits until fewer of them are.

        Args:
            foreseen: The batch with its ids, and those of the batches after it as far as eviction
                policies look at them. Several processes, which have the same ids, plan the same.
            held: Number of batches that may be planned and not yet computed; their rows stay.

        Raises:
            ValueError: More distinct ids are in use than there are rows; nothing has changed.
        """
        while True:
            try:
                with self._planning:
                    rows, number, sequence = self._plan(foreseen, held)
                break
            except _MustWaitError as wait:
                self.order.wait_for(wait.number)
        for each in self.vocabularies:
            if each.transfer is None:
                each.vocabulary.statistics.warn_if_thrashing(each.name)
        return PlannedBatch(foreseen.ids.with_rows(rows), number, sequence, True, foreseen.batch)

    def _plan(self, foreseen: ForeseenBatch, held: int) -> tuple[list[np.ndarray], int, int]:
        """Return the rows of a training batch's ids, its number and its place in the order."""
        ids = foreseen.ids
        mark = ids.mark
        if (number := self.order.replay(mark)) is not None:
            sequence = self._pending.last
            rows = [self._rows_after(v, each, number) for v, each in enumerate(ids.ids)]
        else:
            number = self.order.last_planned + 1
            proposals = self._propose(foreseen, number, held)
            assignments = commit_all([each.vocabulary for each in self.vocabularies], proposals)
            rows = [assignment.rows for assignment in assignments]
            moves = map(begin_move, self.vocabularies, assignments)
            sequence = self._pending.add(number, list(moves))
        self.order.add(number, mark)
        return rows, number, sequence

    def look_up(self, batch: Any, gather: Gather | None = None) -> PlannedBatch:
        """Replace the ids of a batch of an evaluation by their rows.

        Rows are those that the ids had when the last training batch was taken. Ids whose rows are
        in a store get rows, and other rows may go to the store; else nothing changes.

        Args:
            batch: A host batch; with several processes this process's part of it.
            gather: Returns the ids of each process (`jaxrec.mesh.agree.gather_id_lists`). None:
                the batch is whole.

        Raises:
            ValueError: More distinct ids are in use than there are rows, or a table of
                fixed size has no such id.
            TypeError: The batch has no `KeyedJaggedArray` on the host.
        """
        ids = BatchIds.of(batch, self.vocabularies, gather)
        rows, moves = [], [NO_MOVE] * len(self.vocabularies)
        with self._planning:
            number = self.order.last_taken
            try:
                for v, each in enumerate(self.vocabularies):
                    if each.transfer is None:
                        of_vocabulary = self._rows_after(v, ids.ids[v], number)
                    else:
                        of_vocabulary, moves[v] = self._bring(v, each.transfer, ids, number)
                    rows.append(of_vocabulary)
            finally:
                sequence = self._pending.add(self.order.last_planned, moves)
        return PlannedBatch(ids.with_rows(rows), number, sequence, False, batch)

    def _propose(self, foreseen: ForeseenBatch, number: int, held: int) -> list[Proposal]:
        """Decide which rows the ids of a batch get, beside as many batches before it as fit.

        Raises:
            TableFullError: The batch does not fit beside those whose steps are not dispatched.
            _MustWaitError: It fits after fewer batches are under way.
        """
        maps = [each.vocabulary.map for each in self.vocabularies]
        lookups = look_up(maps, foreseen.ids.ids)
        least = min(held, self.order.undispatched)
        for fewer in range(held, least, -1):
            with contextlib.suppress(TableFullError):
                proposals = self._propose_beside(foreseen, number, fewer, lookups)
                last_before = number - 1 - fewer + least
                if fewer < held and self.order.last_taken < last_before:
                    raise _MustWaitError(last_before)
                return proposals
        proposals = self._propose_beside(foreseen, number, least, lookups)
        if least < held and self.order.last_taken < number - 1:
            raise _MustWaitError(number - 1)
        return proposals

    def _propose_beside(
        self, foreseen: ForeseenBatch, number: int, held: int, lookups: Sequence[Lookup]
    ) -> list[Proposal]:
        """Decide which rows the ids of a batch get, beside some batches before it."""
        ids, proposals = foreseen.ids, []
        for v, each in enumerate(self.vocabularies):
            try:
                coming = [of_batch[v] for of_batch in foreseen.coming]
                proposal = each.vocabulary.propose(ids.ids[v], number, held, lookups[v], coming)
            except VocabularyFullError as error:
                raise ids.table_full(v, error, held) from None
            proposals.append(proposal)
        return proposals

    def _rows_after(self, v: int, ids: np.ndarray, number: int) -> np.ndarray:
        """Return the row that each id of a vocabulary had after a training batch."""
        vocabulary = self.vocabularies[v].vocabulary
        rows = vocabulary.find(ids, number)
        self._pending.restore_rows(v, ids, rows, number)
        return vocabulary.with_unknown(ids, rows)

    def _bring(
        self, v: int, transfer: RowTransfer, batch: BatchIds, number: int
    ) -> tuple[np.ndarray, Move]:
        """Return the rows of an evaluation's ids; those that a store has get one.

        Args:
            v: Index of a vocabulary with a store.
            transfer: Its transfer.
            batch: The ids.
            number: Number of the last training batch that was taken.
        """
        each, ids = self.vocabularies[v], batch.ids[v]
        vocabulary = each.vocabulary
        rows = vocabulary.map.find(ids)
        if each.num_ids is None:
            # Ids that were admitted for a batch to come are unknown, if the store has none of them.
            is_unsure = (rows < 0) | (vocabulary.records.born[rows] > number)
            unsure, index, _ = distinct(ids[is_unsure])
            are_stored = transfer.fetch(unsure).are_stored()
            rows[np.flatnonzero(is_unsure)[~are_stored[index]]] = _UNKNOWN
        is_missing = rows == -1
        move = NO_MOVE
        if is_missing.any():
            missing = distinct(ids[is_missing])[0]
            last_use = max(0, number - self.order.undispatched)
            try:
                assignment = vocabulary.bring(missing, rows, last_use, self.order.last_planned + 1)
            except VocabularyFullError as error:
                raise batch.table_full(v, error, self.order.last_planned - last_use) from None
            move = begin_move(each, assignment)
            rows[is_missing] = vocabulary.map.find(ids[is_missing])
        return vocabulary.with_unknown(ids, rows), move

    # Rows by id.

    def find_ids(
        self, collection: str, table: str, ids: Any, *, is_written: bool = False
    ) -> FoundIds:
        """`jaxrec.embed.TableStore.find_ids` of a table whose rows a vocabulary assigns.

        Rows are those of the tables as they are now. Call it in the thread that trains.

        Args:
            collection: Path of the table's collection.
            table: Name of the table.
            ids: Ids as batches have them, ``[n]``.
            is_written: Whether the rows are to be set.
        """
        v, each, found = next(
            (v, each, each_table)
            for v, each in enumerate(self.vocabularies)
            for each_table in each.tables
            if (each_table.collection, each_table.config.name) == (collection, table)
        )
        raw = raw_ids(found.config, ids, each.num_ids)
        with self._planning:
            rows = self._rows_now(v, raw)
        returning = functools.partial(self._returning, v)
        number = each.tables.index(found)
        return find_rows(each, number, raw, rows, self.keys, returning, is_written=is_written)

    def _rows_now(self, v: int, ids: np.ndarray) -> np.ndarray:
        """Return the row that each id has on the devices, -1 where it has none."""
        rows = self.vocabularies[v].vocabulary.map.find(ids)
        self._pending.undo(v, ids, rows)
        return rows

    @contextlib.contextmanager
    def _returning(self, v: int) -> Iterator[np.ndarray]:
        """Give ids that later batches bring to a vocabulary's tables; no batch is planned now."""
        with self._planning:
            yield self._pending.coming_ids(v)

    # Application: on the devices.

    def apply(self, model: nnx.Module, planned: PlannedBatch) -> Any:
        """Make a model ready for a batch: evict rows, bring new ones. Return the batch.

        Call it in the order of `plan`, in the thread that trains, between two steps.

        Args:
            model: The model, or a copy of it with its own tables.
            planned: The batch.

        Raises:
            RuntimeError: A row store failed, or two loops train at once.
        """
        if not planned.is_training:
            if planned.number != self.order.last_taken or planned.sequence < self._pending.settled:
                planned = self.look_up(planned.source)
            has_store = [each.transfer is not None for each in self.vocabularies]
            self._settle(model, planned.sequence, has_store)
            for observer in self.observers:
                observer.given(planned)
            return planned.batch
        self.order.check_next(planned.number)
        with step_of(each.transfer.traffic for each in self.vocabularies if each.transfer):
            self._settle(model, planned.sequence)
        self.order.take(planned.number)
        for observer in self.observers:
            observer.taken(planned.batch)
            observer.given(planned)
        return planned.batch

    def settle(self, model: nnx.Module) -> None:
        """Apply the changes of all batches planned so far, and bring evicted rows to their stores.

        Call it in the thread that trains. The tables then agree with the vocabularies.
        """
        self._settle(model, None)
        for each in self.vocabularies:
            if each.transfer is not None:
                each.transfer.wait()

    def _settle(
        self, model: nnx.Module, sequence: int | None, wanted: Sequence[bool] | None = None
    ) -> None:
        self._pending.carry_out(functools.partial(self._move, model), sequence, wanted)

    def _move(self, model: nnx.Module, moves: Sequence[Move]) -> None:
        move_rows(model, self.vocabularies, moves, self.keys)
        for observer in self.observers:
            observer.moved([move.assignment for move in moves])

    # Checkpoints.

    @contextlib.contextmanager
    def settled(self, model: nnx.Module) -> Iterator[None]:
        """Keep the model's tables in agreement with the vocabularies, while this lasts.

        Threads that plan wait. With divided stores every process calls this.
        """
        with self._planning:
            self._settle(model, None)
            for each in self.vocabularies:
                if each.transfer is not None:
                    each.transfer.wait_together()
            yield

    def give_rows(self, model: nnx.Module, of: TableVocabulary, ids: np.ndarray) -> None:
        """Give rows of one vocabulary to ids without any; call it within `settled`.

        Rows get the values that the store has, or first values.

        Args:
            model: The model.
            of: The vocabulary.
            ids: Distinct ids, int64 ``[n]``, not more than there are free rows.
        """
        assignment = of.vocabulary.give_rows(ids, self.order.last_taken)
        moves = [
            begin_move(of, assignment) if each is of else NO_MOVE for each in self.vocabularies
        ]
        self._move(model, moves)

    def forget(self, model: nnx.Module, of: TableVocabulary, ids: np.ndarray) -> None:
        """Take rows of one vocabulary away from ids, also in its store; call it within `settled`.

        Batches of an evaluation that have the rows are planned anew.

        Args:
            model: The model.
            of: The vocabulary.
            ids: Distinct ids, int64 ``[n]``; those without a row are skipped.

        Raises:
            RuntimeError: A training loop has planned batches with the rows.
        """
        self.order.forget_planned()
        assignment = of.vocabulary.remove(ids)
        self._pending.add(self.order.last_planned, [NO_MOVE] * len(self.vocabularies))
        self.settle(model)
        if of.transfer is not None:
            of.transfer.delete(ids)
        for observer in self.observers:
            observer.moved([assignment if each is of else NO_CHANGE for each in self.vocabularies])

    def state(self) -> dict[str, dict[str, np.ndarray]]:
        """Return all that later batches depend on, but for rows, as arrays by vocabulary.

        Call it, and copy the tables and the row stores, within `settled`.
        """
        run = self.order.state()
        vocabularies = {
            each.name: {
                **each.vocabulary.state(),
                "num_ids": np.array([each.num_ids or 0], np.int64),
                "first_keys": np.stack([self.keys[table.collection] for table in each.tables]),
            }
            for each in self.vocabularies
        }
        return {**vocabularies, RUN_STATE: run}

    def divide_stores(self) -> None:
        """Give each process the part of the rows in its store that it owns.

        All processes have devices of the mesh on which the tables lie.
        """
        for each in self.vocabularies:
            if each.transfer is not None:
                each.transfer.divide(jax.process_index(), jax.process_count())

    def close(self, model: nnx.Module) -> None:
        """Bring all evicted rows to their stores, and close these; a second call does nothing."""
        if self._is_closed:
            return
        with self._planning:
            self.settle(model)
            for each in self.vocabularies:
                if each.transfer is not None:
                    each.transfer.store.close()
        self._is_closed = True

    def load_state(self, state: Mapping[str, Mapping[str, np.ndarray]]) -> dict[str, LoadedRows]:
        """Take over the result of `state`; tables may have had other numbers of rows.

        Args:
            state: The state of `RUN_STATE` and of vocabularies; others stay as they are.

        Returns:
            For each of these vocabularies the rows of its ids before and after. The caller moves
            the rows themselves, and brings those of dropped ids to the store.
        """
        rows = {}
        with self._planning:
            staying = [each for each in self.vocabularies if each.name not in state]
            last_planned = self.order.last_planned if any(map(_has_ids, staying)) else 0
            # Ids that stay were used in batches up to the last one: its number never decreases.
            if last_planned <= int(state[RUN_STATE]["numbers"][0]):
                self.order.load_state(state[RUN_STATE])
            self._pending.clear()
            for each in self.vocabularies:
                if each.name not in state:
                    continue
                saved = dict(state[each.name])
                # Rows that nothing has read yet begin as in the run that was saved.
                for table, key in zip(each.tables, saved.get("first_keys", ()), strict=False):
                    self.keys[table.collection] = key
                rows[each.name] = each.vocabulary.load_state(saved, self.order.last_planned)
            if any(each.dropped_ids.size for each in rows.values()):
                self.order.forget_replayed()  # planned batches may have used dropped rows
        for observer in self.observers:
            observer.restored()
        return rows


def _has_ids(vocabulary: TableVocabulary) -> bool:
    return len(vocabulary.vocabulary.map) > 0


def tier_of(model: nnx.Module) -> Tier | None:
    """Return the vocabularies of a model that `jaxrec.tier.make` made; None if it has none."""
    for collection in collections_of(model).values():
        return cast(Tier, cast(TierStore, collection.tables.get_value()).tier)
    return None
