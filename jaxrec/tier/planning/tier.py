"""The vocabularies of a model on the host, and their changes to its tables."""

from __future__ import annotations

import abc
import contextlib
import functools
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import jax
import numpy as np
from flax import nnx

from jaxrec.embed.rows import FoundIds
from jaxrec.ragged import Packer
from jaxrec.tier.ids.batch_ops import distinct
from jaxrec.tier.ids.id_map import Lookup, lookup_all
from jaxrec.tier.planning.batch_ids import BatchIds, Gather
from jaxrec.tier.planning.batch_order import BatchOrder, ForeseenBatch, PlannedBatch
from jaxrec.tier.planning.id_rows import find_rows, raw_ids
from jaxrec.tier.planning.model_tables import TableVocabulary, collections_of
from jaxrec.tier.planning.moves import NO_MOVE, Move, PendingMoves, begin_moves, move_rows
from jaxrec.tier.rows.records import step_of
from jaxrec.tier.rows.transfer import RowTransfer
from jaxrec.tier.store import TierStore
from jaxrec.tier.vocabulary.assignment import (
    NO_CHANGE,
    Assignment,
    LoadedRows,
    Proposal,
    TableFullError,
    VocabularyFullError,
)
from jaxrec.tier.vocabulary.vocabulary import commit_all, propose_all

# In place of a row: the id reads the row that `Dynamic.unknown` says, even after rows were brought
# from the store. An id with -1 has no row yet and may get one.
_UNKNOWN = -2

# Key of the state of the whole run; no table has this name.
RUN_STATE = "@run"


class _MustWaitError(Exception):
    """A batch can be planned only after the loop takes batch ``number``."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class TierObserver(abc.ABC):
    """Interface of an observer of a `Tier`; its methods run in the thread that trains."""

    @abc.abstractmethod
    def moved(self, assignments: Sequence[Assignment]) -> None:
        """Note that rows lost and got ids, and that the tables have changed so too."""

    def taken(self, batch: Any) -> None:
        """Note that the loop takes a training batch, on the host, with rows in place of ids."""
        return

    def given(self, planned: PlannedBatch) -> None:
        """Note that the loop takes a batch, of training or evaluation, whose rows are in place."""
        return

    @abc.abstractmethod
    def restored(self) -> None:
        """Note that the vocabularies of a checkpoint have replaced those of the model."""


class Tier:
    """The vocabularies of a model, and the moves of rows that follow from them.

    `plan` works on the host alone, in any thread, a few batches ahead. `apply` changes the model's
    tables, in the thread that trains, before the step of the batch. ``keys`` are the keys of first
    rows, uint32 ``[2]``, by path of the collection.
    """

    # Planning ahead hides the work on the host and the reads of stores behind the steps of earlier
    # batches. It is safe because a planned batch never evicts a row that one of the `held` batches
    # before it uses: its rows are overwritten only after the loop has dispatched their last reader.

    def __init__(
        self, vocabularies: Sequence[TableVocabulary], keys: Mapping[str, np.ndarray]
    ) -> None:
        self.vocabularies, self.keys = tuple(vocabularies), dict(keys)
        # Weak, so that an observer which its user drops no longer costs time.
        self.observers: weakref.WeakSet[TierObserver] = weakref.WeakSet()
        self.order = BatchOrder()
        self.packer = Packer()  # capacities of batches that no packer made
        # Guards the vocabularies. A thread that waits until a batch is taken releases it first: the
        # training thread may need it before it takes that batch.
        self._planning = threading.Lock()
        self._pending = PendingMoves()
        self._is_closed = False

    @property
    def features(self) -> tuple[str, ...]:
        """Features whose ids get rows."""
        return tuple(feature for each in self.vocabularies for feature in each.features)

    @property
    def has_stores(self) -> bool:
        """Whether evicted rows of some table go to a store."""
        return bool(self.transfers)

    @property
    def transfers(self) -> list[RowTransfer]:
        """The transfers of the vocabularies whose evicted rows go to a store."""
        return [each.transfer for each in self.vocabularies if each.transfer is not None]

    @property
    def cached_tables(self) -> set[str]:
        """Names of the tables with `jaxrec.tier.Cached`, most of whose rows are in a store."""
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
        """Start a new loop and return its number; an earlier loop may have planned its batches.

        The loop may take ``undispatched`` batches before it dispatches the step of the first.
        """
        for each in self.vocabularies:
            each.warn_of_earlier_rows()
        with self._planning:
            return self.order.begin(undispatched)

    def end(self, loop: int) -> None:
        """End a loop, unless a later one has begun; `plan` no longer waits."""
        self.order.end(loop)

    def plan(self, foreseen: ForeseenBatch, held: int) -> PlannedBatch:
        """Give the ids of a training batch rows, keeping those of the ``held`` batches before it.

        Every process plans for the ids of all, so that all get the same rows. A ValueError leaves
        the vocabularies as they were.
        """
        while True:
            try:
                with self._planning:
                    rows, number, sequence = self._plan(foreseen, held)
                break
            except _MustWaitError as wait:
                # Outside of the lock; the batch is proposed anew, since evaluations may have
                # brought rows meanwhile.
                self.order.wait_for(wait.number)
        for each in self.vocabularies:
            # With a store an evicted row comes back as it was; without one its training is lost.
            if each.transfer is None:
                each.vocabulary.statistics.warn_if_thrashing(each.name)
        return PlannedBatch(foreseen.ids.with_rows(rows), number, sequence, True, foreseen.batch)

    def _plan(self, foreseen: ForeseenBatch, held: int) -> tuple[list[np.ndarray], int, int]:
        """Return the rows of a training batch by vocabulary, its number and its sequence."""
        ids = foreseen.ids
        mark = ids.mark
        if (number := self.order.replay(mark)) is not None:
            # An earlier loop planned it and ended. Its ids have their rows, and must not be counted
            # again: a run from a checkpoint would differ from one that goes on.
            sequence = self._pending.last
            rows = [self._rows_after(v, each, number) for v, each in enumerate(ids.ids)]
        else:
            number = self.order.last_planned + 1
            # All vocabularies propose before any commits: a full table then changes no other.
            proposals = self._propose(foreseen, number, held)
            assignments = commit_all([each.vocabulary for each in self.vocabularies], proposals)
            rows = [assignment.rows for assignment in assignments]
            moves = begin_moves(self.vocabularies, assignments)
            sequence = self._pending.add(number, moves)
        self.order.add(number, mark)
        return rows, number, sequence

    def lookup(self, batch: Any, gather: Gather | None = None) -> PlannedBatch:
        """Replace the ids of an evaluation's batch by rows, as of the last training batch taken.

        Ids whose rows are in a store get rows, for which other rows may go to the store. ``gather``
        is None if the process has the whole batch.
        """
        # Batches planned beyond the last one taken have changed the vocabularies, but not yet the
        # tables. Without a store the evaluation reads the rows from before, since the waiting moves
        # will lose rows. With a store `apply` carries these moves out first: they lose nothing.
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
                # If a later table is full, the moves of earlier vocabularies are committed already,
                # and must be carried out in any case.
                sequence = self._pending.add(self.order.last_planned, moves)
        return PlannedBatch(ids.with_rows(rows), number, sequence, False, batch)

    def _propose(self, foreseen: ForeseenBatch, number: int, held: int) -> list[Proposal]:
        """Propose rows for batch ``number``, one proposal for each vocabulary.

        The rows of the last ``held`` batches keep their places. Where the tables have no room for
        all of them, fewer batches keep theirs.
        """
        # A step that sums several batches is dispatched only when it has the last of them, maybe
        # this one: to wait for the step would be to wait for ever. So the rows of the last
        # `undispatched` batches always stay. Above that bound, looking fewer batches ahead is
        # better than an error: plan beside fewer batches, once the loop has taken the others.
        maps = [each.vocabulary.map for each in self.vocabularies]
        lookups = lookup_all(maps, foreseen.ids.ids)
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
        """Propose rows for batch ``number``, keeping those of exactly ``held`` earlier batches."""
        ids = foreseen.ids
        vocabularies = [each.vocabulary for each in self.vocabularies]
        coming = [[of_batch[v] for of_batch in foreseen.coming] for v in range(len(vocabularies))]
        try:
            return propose_all(vocabularies, ids.ids, number, held, lookups, coming)
        except VocabularyFullError as error:
            raise ids.table_full(error.index, error, held) from None

    def _rows_after(self, v: int, ids: np.ndarray, number: int) -> np.ndarray:
        """Return the row of each id of vocabulary ``v`` after training batch ``number``, int32."""
        # The map has the rows after all planned batches. `find` hides ids that came later, and
        # `restore_rows` brings back ids that left later.
        vocabulary = self.vocabularies[v].vocabulary
        rows = vocabulary.find(ids, number)
        self._pending.restore_rows(v, ids, rows, number)
        return vocabulary.with_unknown(ids, rows)

    def _bring(
        self, v: int, transfer: RowTransfer, batch: BatchIds, number: int
    ) -> tuple[np.ndarray, Move]:
        """Return the rows of an evaluation's ids, int32 ``[n]``, and the move that brings some.

        The ids are those of vocabulary ``v`` in a batch; ``number`` is the last training batch
        taken.
        """
        each, ids = self.vocabularies[v], batch.ids[v]
        vocabulary = each.vocabulary
        rows = vocabulary.map.find(ids)
        if each.num_ids is None:
            # An id that a coming batch admits is still unknown now, unless the store has its row
            # from an earlier life. In a table of fixed size every id has a row.
            is_unsure = (rows < 0) | (vocabulary.records.born[rows] > number)
            unsure, index, _ = distinct(ids[is_unsure])
            are_stored = transfer.fetch(unsure).are_stored()
            rows[np.flatnonzero(is_unsure)[~are_stored[index]]] = _UNKNOWN
        is_missing = rows == -1
        move = NO_MOVE
        if is_missing.any():
            missing = distinct(ids[is_missing])[0]
            # Batches that were taken may wait for the dispatch of their step: their rows stay.
            last_use = max(0, number - self.order.undispatched)
            try:
                assignment = vocabulary.bring(missing, rows, last_use, self.order.last_planned + 1)
            except VocabularyFullError as error:
                raise batch.table_full(v, error, self.order.last_planned - last_use) from None
            (move,) = begin_moves([each], [assignment])
            rows[is_missing] = vocabulary.map.find(ids[is_missing])
        return vocabulary.with_unknown(ids, rows), move

    # Rows by id.

    def find_ids(
        self, collection: str, table: str, ids: Any, *, is_written: bool = False
    ) -> FoundIds:
        """Return where the rows of a table's ids are now (see `jaxrec.embed.TableStore.find_ids`).

        ``collection`` is the path of the table's collection. Call it in the thread that trains.
        """
        v, each, found = next(
            (v, each, each_table)
            for v, each in enumerate(self.vocabularies)
            for each_table in each.tables
            if (each_table.collection, each_table.config.name) == (collection, table)
        )
        raw = raw_ids(found.config, ids, each.num_ids)
        with self._planning:
            rows = each.vocabulary.map.find(raw)
            self._pending.undo(v, raw, rows)
        returning = functools.partial(self._returning, v)
        number = each.tables.index(found)
        return find_rows(each, number, raw, rows, self.keys, returning, is_written=is_written)

    @contextlib.contextmanager
    def _returning(self, v: int) -> Iterator[np.ndarray]:
        """Yield the ids that planned batches will bring to the tables; planning waits meanwhile."""
        with self._planning:
            yield self._pending.coming_ids(v)

    # Application: on the devices.

    def apply(self, model: nnx.Module, planned: PlannedBatch) -> Any:
        """Evict rows of the model's tables and bring the batch's new ones; return the batch.

        Call it in the order of `plan`, in the thread that trains, between two steps.
        """
        if not planned.is_training:
            if planned.number != self.order.last_taken or planned.sequence < self._pending.settled:
                # The evaluation's batch was planned ahead, and since then its rows may have gone to
                # other ids.
                planned = self.lookup(planned.source)
            # Moves without a store wait for their training batch: what they evict is lost, and this
            # evaluation may still read it.
            has_store = [each.transfer is not None for each in self.vocabularies]
            self._settle(model, planned.sequence, has_store)
            for observer in self.observers:
                observer.given(planned)
            return planned.batch
        self.order.check_next(planned.number)
        with step_of(transfer.traffic for transfer in self.transfers):
            self._settle(model, planned.sequence)
        self.order.take(planned.number)
        for observer in self.observers:
            observer.taken(planned.batch)
            observer.given(planned)
        return planned.batch

    def settle(self, model: nnx.Module) -> None:
        """Apply the changes of all planned batches, and wait until stores have the evicted rows.

        Call it in the thread that trains. The tables then agree with the vocabularies.
        """
        self._settle(model, None)
        for transfer in self.transfers:
            transfer.wait()

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
        """Within this context the model's tables agree with the vocabularies; planning waits.

        With divided stores every process enters it.
        """
        with self._planning:
            self._settle(model, None)
            for transfer in self.transfers:
                transfer.wait_together()
            yield

    def give_rows(self, model: nnx.Module, of: TableVocabulary, ids: np.ndarray) -> None:
        """Give free rows to distinct ids, ``[n]``, with stored or first values.

        Call it within `settled`.
        """
        assignment = of.vocabulary.give_rows(ids, self.order.last_taken)
        (move,) = begin_moves([of], [assignment])
        self._move(model, [move if each is of else NO_MOVE for each in self.vocabularies])

    def forget(self, model: nnx.Module, of: TableVocabulary, ids: np.ndarray) -> None:
        """Remove distinct ids, ``[n]``, from the table and its store; skip those without a row.

        Call it within `settled`.
        """
        self.order.forget_planned()
        assignment = of.vocabulary.remove(ids)
        # A place in the order of its own: `settle` then moves `settled` past the batches of an
        # evaluation that were planned before, and `apply` plans them anew.
        self._pending.add(self.order.last_planned, [NO_MOVE] * len(self.vocabularies))
        self.settle(model)
        if of.transfer is not None:
            of.transfer.delete(ids)
        for observer in self.observers:
            observer.moved([assignment if each is of else NO_CHANGE for each in self.vocabularies])

    def state(self) -> dict[str, dict[str, np.ndarray]]:
        """Return all that later batches depend on, except rows, as arrays by vocabulary and name.

        Call it within `settled`.
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
        """Let each process keep in its row stores only the rows of the ids that it owns.

        Every process must have devices of the tables' mesh.
        """
        for transfer in self.transfers:
            transfer.divide(jax.process_index(), jax.process_count())

    def close(self, model: nnx.Module) -> None:
        """Wait until the stores have all evicted rows, and close them."""
        if self._is_closed:
            return
        with self._planning:
            self.settle(model)
            for transfer in self.transfers:
                transfer.store.close()
        self._is_closed = True

    def load_state(self, state: Mapping[str, Mapping[str, np.ndarray]]) -> dict[str, LoadedRows]:
        """Take over a `state`, whose tables may have had other numbers of rows.

        Vocabularies that it lacks stay as they are. The result has, by vocabulary, the rows that
        the caller moves, and those of dropped ids, which it writes to the store.
        """
        rows = {}
        with self._planning:
            staying = [each for each in self.vocabularies if each.name not in state]
            has_ids = any(len(each.vocabulary) for each in staying)
            last_planned = self.order.last_planned if has_ids else 0
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


def tier_of(model: nnx.Module) -> Tier | None:
    """Return the tier of a model that `jaxrec.tier.make` made; None if the model has none."""
    # All collections of a model share one tier, so the first one will do.
    for collection in collections_of(model).values():
        return cast(Tier, cast(TierStore, collection.tables.get_value()).tier)
    return None
