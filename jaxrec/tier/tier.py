"""The vocabularies of a model on the host, and their changes to its tables."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
import pathlib
import threading
import urllib.parse
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, cast

import jax
import numpy as np
from flax import nnx

from jaxrec.embed.found_ids import FoundIds
from jaxrec.tier import snapshots
from jaxrec.tier.batch_ops import distinct
from jaxrec.tier.batches import HostBatch, Segment, fingerprint
from jaxrec.tier.id_map import Lookup, look_up
from jaxrec.tier.id_rows import find_rows, raw_ids
from jaxrec.tier.model_tables import TableVocabulary, collections_of
from jaxrec.tier.moves import NO_MOVE, Move, begin_move, move_rows
from jaxrec.tier.observer import TierObserver
from jaxrec.tier.pending_moves import PendingMoves
from jaxrec.tier.store import TierStore
from jaxrec.tier.transfer import RowTransfer
from jaxrec.tier.vocabulary import LoadedRows, Proposal, TableFullError, VocabularyFullError

# In the place of a row: the id reads what `Dynamic.unknown` says. -1: it has no row yet.
_UNKNOWN = -2

# Key of the state of the whole run; no table has this name.
_RUN = "@run"


@dataclasses.dataclass(frozen=True)
class PlannedBatch:
    """A batch whose ids are replaced by rows.

    Attributes:
        batch: The batch, with rows.
        number: Its number; of a batch of an evaluation, that of the last training batch before.
        sequence: Its place in the order of planning (`PendingMoves`).
        is_training: Whether it is a training batch.
        source: The batch as it was.
    """

    batch: Any
    number: int
    sequence: int
    is_training: bool
    source: Any


class _MustWaitError(Exception):
    """A batch can be planned only after a batch before it was taken."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


Gather: TypeAlias = Callable[[np.ndarray], list[np.ndarray]]


@dataclasses.dataclass(frozen=True)
class GatheredIds:
    """Ids of a vocabulary in the whole batch.

    Attributes:
        ids: The ids of all processes, in their order, int64 ``[n]``.
        mine: Those of this process.
    """

    ids: np.ndarray
    mine: slice

    @classmethod
    def of(cls, ids: np.ndarray, gather: Gather | None) -> GatheredIds:
        """Gather the ids of all processes; None: there is one."""
        if gather is None:
            return cls(ids, slice(None))
        parts = gather(ids)
        start = sum(part.size for part in parts[: jax.process_index()])
        return cls(np.concatenate(parts), slice(start, start + ids.size))


class Tier:
    """The vocabularies of a model.

    `plan` works on the host alone, in any thread, a few batches ahead. `apply` changes the model's
    tables, in the thread that trains, before the step of the batch. Changes may be applied earlier
    than that: no batch that was planned before uses the rows that they overwrite.

    Args:
        vocabularies: The vocabularies.
        seed: Seed of first rows.
    """

    def __init__(self, vocabularies: Sequence[TableVocabulary], seed: int) -> None:
        self.vocabularies, self.seed = tuple(vocabularies), seed
        self.observers: weakref.WeakSet[TierObserver] = weakref.WeakSet()
        # `_planning` guards the vocabularies, and `_lock` the numbers and queues below.
        self._planning = threading.Lock()
        self._lock = threading.Lock()
        self._is_taken = threading.Condition(self._lock)
        self._last_planned = 0
        self._last_taken = 0
        self._undispatched = 0
        self._is_ended = False
        self._is_closed = False
        self._pending = PendingMoves()
        # Fingerprints of batches that were planned and not taken, in this run or in an earlier one.
        self._planned: collections.deque[tuple[int, tuple[int, int, int]]] = collections.deque()
        self._replayed: collections.deque[tuple[int, tuple[int, int, int]]] = collections.deque()

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

    def statistics(self) -> dict[str, dict[str, float]]:
        """Return the statistics of each vocabulary by name."""
        with self._planning:
            return {each.name: each.vocabulary.statistics.summary() for each in self.vocabularies}

    # Planning: on the host.

    def begin(self, undispatched: int) -> None:
        """Prepare for a new sequence of batches, which may begin with batches planned before.

        Args:
            undispatched: Number of batches that may be taken before the step of the first of them
                is dispatched.
        """
        for each in self.vocabularies:
            if each.transfer is not None and each.transfer.num_earlier:
                warnings.warn(
                    f"table {each.name} begins with {each.transfer.num_earlier:,} rows of an "
                    f"earlier run, which {each.transfer.store!r} has; restore the checkpoint of "
                    "that run, or train with an empty store",
                    stacklevel=3,
                )
                each.transfer.num_earlier = 0
        with self._planning, self._lock:
            self._undispatched, self._is_ended = undispatched, False
            # Batches planned by the last loop come before batches still to be replayed.
            self._replayed.extendleft(reversed(self._planned))
            self._planned.clear()

    def end(self) -> None:
        """End the sequence of batches: `plan` no longer waits."""
        with self._lock:
            self._undispatched, self._is_ended = 0, True
            self._is_taken.notify_all()

    def plan(self, batch: Any, held: int, gather: Gather | None = None) -> PlannedBatch:
        """Give the ids of a training batch their rows.

        If the batch does not fit beside the batches under way, this waits until fewer of them are.

        Args:
            batch: A host batch; with several processes this process's part of it.
            held: Number of batches that may be planned and not yet computed; their rows stay.
            gather: Returns the ids of each process (`jaxrec.mesh.agree.gather_ids`). The processes
                then plan the same, each for itself. None: the batch is whole.

        Raises:
            ValueError: More distinct ids are in use than there are rows, or a table of
                fixed size has no such id; nothing has changed.
            TypeError: The batch has no `KeyedJaggedArray` on the host.
        """
        host = HostBatch.of(batch)
        parts = self._parts(host)
        ids = [GatheredIds.of(_joined(part), gather) for part in parts]
        mark = fingerprint([each.ids for each in ids])
        while True:
            try:
                with self._planning:
                    rows, number, sequence = self._plan(parts, ids, mark, held)
                break
            except _MustWaitError as wait:
                self._wait_for(wait.number)
        for each in self.vocabularies:
            if each.transfer is None:
                each.vocabulary.statistics.warn_if_thrashing(each.name)
        mine = [of_all[each.mine] for of_all, each in zip(rows, ids, strict=True)]
        return PlannedBatch(_translated(host, parts, mine), number, sequence, True, batch)

    def _plan(
        self,
        parts: list[list[Segment]],
        ids: list[GatheredIds],
        mark: tuple[int, int, int],
        held: int,
    ) -> tuple[list[np.ndarray], int, int]:
        """Return the rows of a training batch's ids, its number and its place in the order."""
        if self._replayed and self._replayed[0][1] != mark:
            self._replayed.clear()  # the batches differ from the planned ones
        if self._replayed:
            number, _ = self._replayed.popleft()
            pending, sequence = self._pending.after(number), self._pending.last
            rows = [self._rows_after(v, each.ids, number, pending) for v, each in enumerate(ids)]
        else:
            number = self._last_planned + 1
            proposals = self._propose(parts, ids, number, held)
            assignments = [
                each.vocabulary.commit(proposal)
                for each, proposal in zip(self.vocabularies, proposals, strict=True)
            ]
            rows = [assignment.rows for assignment in assignments]
            moves = map(begin_move, self.vocabularies, assignments)
            sequence = self._pending.add(number, list(moves))
            self._last_planned = number
        with self._lock:
            self._planned.append((number, mark))
        return rows, number, sequence

    def look_up(self, batch: Any, gather: Gather | None = None) -> PlannedBatch:
        """Replace the ids of a batch of an evaluation by their rows.

        Rows are those that the ids had when the last training batch was taken. Ids whose rows are
        in a store get rows, and other rows may go to the store; else nothing changes.

        Args:
            batch: A host batch; with several processes this process's part of it.
            gather: As for `plan`.

        Raises:
            ValueError: More distinct ids are in use than there are rows, or a table of
                fixed size has no such id.
            TypeError: The batch has no `KeyedJaggedArray` on the host.
        """
        host = HostBatch.of(batch)
        parts = self._parts(host)
        ids = [GatheredIds.of(_joined(part), gather) for part in parts]
        moves = [NO_MOVE] * len(ids)
        with self._planning:
            number = self._last_taken
            pending = self._pending.after(number)
            rows = []
            try:
                for v, (each, part, of_all) in enumerate(
                    zip(self.vocabularies, parts, ids, strict=True)
                ):
                    if each.transfer is None:
                        rows.append(self._rows_after(v, of_all.ids, number, pending))
                    else:
                        brought = self._bring(each, each.transfer, part, of_all.ids, number)
                        moves[v] = brought[1]
                        rows.append(brought[0])
            finally:
                sequence = self._pending.add(self._last_planned, moves)
        mine = [of_all[each.mine] for of_all, each in zip(rows, ids, strict=True)]
        return PlannedBatch(_translated(host, parts, mine), number, sequence, False, batch)

    def _parts(self, host: HostBatch) -> list[list[Segment]]:
        """Return the segments of each vocabulary."""
        parts = [
            [segment for segment in host.segments if segment.key in each.features]
            for each in self.vocabularies
        ]
        for each, part in zip(self.vocabularies, parts, strict=True):
            for segment in part:
                _check_range(each, segment)
        for segment in itertools.chain.from_iterable(parts):
            if segment.key in host.features[segment.batch].slot_keys:
                raise ValueError(
                    f"feature {segment.key!r} of the batch has rows already, not ids; give "
                    "jaxrec.tier.ahead each batch once"
                )
        return parts

    def _propose(
        self, parts: list[list[Segment]], ids: list[GatheredIds], number: int, held: int
    ) -> list[Proposal]:
        """Decide which rows the ids of a batch get, beside as many batches before it as fit.

        Raises:
            TableFullError: The batch does not fit beside those whose steps are not dispatched.
            _MustWaitError: It fits after fewer batches are under way.
        """
        lookups = look_up(
            [each.vocabulary.map for each in self.vocabularies], [each.ids for each in ids]
        )
        least = min(held, self._undispatched)
        for fewer in range(held, least, -1):
            with contextlib.suppress(TableFullError):
                proposals = self._propose_beside(parts, ids, number, fewer, lookups)
                last_before = number - 1 - fewer + least
                if fewer < held and self._last_taken < last_before:
                    raise _MustWaitError(last_before)
                return proposals
        proposals = self._propose_beside(parts, ids, number, least, lookups)
        if least < held and self._last_taken < number - 1:
            raise _MustWaitError(number - 1)
        return proposals

    def _propose_beside(
        self,
        parts: list[list[Segment]],
        ids: list[GatheredIds],
        number: int,
        held: int,
        lookups: Sequence[Lookup],
    ) -> list[Proposal]:
        """Decide which rows the ids of a batch get, beside some batches before it."""
        return [
            _propose(each, part, of_all, number, held, lookup)
            for each, part, of_all, lookup in zip(
                self.vocabularies, parts, ids, lookups, strict=True
            )
        ]

    def _wait_for(self, number: int) -> None:
        """Wait until a training batch was taken.

        Raises:
            RuntimeError: The sequence of batches was ended.
        """
        with self._is_taken:
            self._is_taken.wait_for(lambda: self._last_taken >= number or self._is_ended)
            if self._is_ended:
                raise RuntimeError("the iterator over jaxrec.tier.ahead was closed")

    def _rows_after(
        self, v: int, ids: np.ndarray, number: int, pending: Sequence[tuple[Move, ...]]
    ) -> np.ndarray:
        """Return the row that each id had after a training batch.

        Args:
            v: Index of the vocabulary.
            ids: Its ids.
            number: Number of the batch.
            pending: Later changes that are not yet carried out.
        """
        vocabulary = self.vocabularies[v].vocabulary
        rows = vocabulary.find(ids, number)
        for moves in pending:
            assignment = moves[v].assignment
            _restore_rows(ids, rows, assignment.evicted_ids, assignment.evicted_rows)
        return vocabulary.with_unknown(ids, rows)

    def _bring(
        self,
        each: TableVocabulary,
        transfer: RowTransfer,
        part: list[Segment],
        ids: np.ndarray,
        number: int,
    ) -> tuple[np.ndarray, Move]:
        """Return the rows of an evaluation's ids; those that a store has get one.

        Args:
            each: A vocabulary with a store.
            transfer: Its transfer.
            part: Segments of the batch, for errors.
            ids: Its ids.
            number: Number of the last training batch that was taken.
        """
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
            last_use = max(0, number - self._undispatched)
            try:
                assignment = vocabulary.bring(missing, rows, last_use, self._last_planned + 1)
            except VocabularyFullError as error:
                raise _table_full(each, part, error, self._last_planned - last_use) from None
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
        return find_rows(each, number, raw, rows, self.seed, returning, is_written=is_written)

    def _rows_now(self, v: int, ids: np.ndarray) -> np.ndarray:
        """Return the row that each id has on the devices, -1 where it has none."""
        rows = self.vocabularies[v].vocabulary.map.find(ids)
        for moves in reversed(self._pending.after(-1)):
            assignment = moves[v].assignment
            rows[np.isin(ids, assignment.new_ids)] = -1
            _restore_rows(ids, rows, assignment.evicted_ids, assignment.evicted_rows)
        return rows

    @contextlib.contextmanager
    def _returning(self, v: int) -> Iterator[np.ndarray]:
        """Give ids that later batches bring to a vocabulary's tables; no batch is planned now."""
        with self._planning:
            ids = [moves[v].assignment.new_ids for moves in self._pending.after(-1)]
            yield np.concatenate([np.zeros(0, np.int64), *ids])

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
            if planned.number != self._last_taken or planned.sequence < self._pending.settled:
                planned = self.look_up(planned.source)
            has_store = [each.transfer is not None for each in self.vocabularies]
            self._settle(model, planned.sequence, has_store)
            return planned.batch
        with self._lock:
            if not self._planned or self._planned[0][0] != planned.number:
                raise RuntimeError(
                    "another jaxrec.tier.ahead was begun, or a checkpoint restored, while "
                    "this one gives batches; end one training loop before the next"
                )
        self._settle(model, planned.sequence)
        with self._is_taken:
            self._last_taken = planned.number
            self._planned.popleft()
            self._is_taken.notify_all()
        for observer in self.observers:
            observer.taken(planned.batch)
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
        move_rows(model, self.vocabularies, moves, self.seed)
        for observer in self.observers:
            observer.moved([move.assignment for move in moves])

    # Checkpoints.

    @contextlib.contextmanager
    def settled(self, model: nnx.Module) -> Iterator[None]:
        """Keep the model's tables in agreement with the vocabularies, while this lasts.

        Threads that plan wait.
        """
        with self._planning:
            self.settle(model)
            yield

    def give_rows(self, model: nnx.Module, of: TableVocabulary, ids: np.ndarray) -> None:
        """Give rows of one vocabulary to ids without any; call it within `settled`.

        Rows get the values that the store has, or first values.

        Args:
            model: The model.
            of: The vocabulary.
            ids: Distinct ids, int64 ``[n]``, not more than there are free rows.
        """
        with self._lock:
            assignment = of.vocabulary.give_rows(ids, self._last_taken)
        moves = [
            begin_move(of, assignment) if each is of else NO_MOVE for each in self.vocabularies
        ]
        self._move(model, moves)

    def state(self) -> dict[str, dict[str, np.ndarray]]:
        """Return all that later batches depend on, as arrays by vocabulary.

        Call it, and copy the tables, within `settled`.
        """
        with self._lock:
            marks = [(number, *mark) for number, mark in (*self._planned, *self._replayed)]
            run = {
                "planned": np.array(marks, np.int64).reshape(-1, 4),
                "numbers": np.array([self._last_planned, self._last_taken], np.int64),
            }
            vocabularies = {
                each.name: {
                    **each.vocabulary.state(),
                    "num_ids": np.array([each.num_ids or 0], np.int64),
                }
                for each in self.vocabularies
            }
        for each in self.vocabularies:
            if each.transfer is not None and not each.transfer.store.is_durable:
                vocabularies[each.name] |= each.transfer.state()
        return {**vocabularies, _RUN: run}

    def snapshot_stores(self, directory: pathlib.Path) -> None:
        """Write the records of durable stores; call it within `settled`.

        Args:
            directory: Directory of the snapshots, made if there is a durable store.

        Raises:
            OSError: It cannot be written.
        """
        for each in self.vocabularies:
            if each.transfer is not None and each.transfer.store.is_durable:
                directory.mkdir(exist_ok=True)
                each.transfer.store.snapshot(directory / _file_name(each))

    def check_snapshots(self, directory: pathlib.Path) -> None:
        """Check that `load_stores` can read the snapshots of a directory.

        Raises:
            ValueError: A snapshot is damaged, or of another format.
        """
        for each in self.vocabularies:
            path = directory / _file_name(each)
            if each.transfer is not None and path.exists():
                snapshots.check(path, each.transfer.store.format)

    def load_stores(
        self, state: Mapping[str, Mapping[str, np.ndarray]], directory: pathlib.Path
    ) -> None:
        """Replace the records of all stores by those of a state or of snapshots.

        Args:
            state: Result of `state`, which has the records of stores in memory.
            directory: Directory of the snapshots; it need not exist.

        Raises:
            ValueError: A snapshot is damaged.
            OSError: A record cannot be read or written.
        """
        for each in self.vocabularies:
            if each.transfer is None:
                continue
            path = directory / _file_name(each)
            if path.exists():
                each.transfer.load_snapshot(path)
            else:
                each.transfer.load_state(state[each.name])

    def close(self, model: nnx.Module) -> None:
        """Bring all evicted rows to their stores, and close these; a second call does nothing."""
        if self._is_closed:
            return
        with self.settled(model):
            for each in self.vocabularies:
                if each.transfer is not None:
                    each.transfer.store.close()
        self._is_closed = True

    @property
    def state_names(self) -> list[str]:
        """Keys of `state`."""
        return [*(each.name for each in self.vocabularies), _RUN]

    def check_state(self, state: Mapping[str, Mapping[str, np.ndarray]]) -> None:
        """Check that `load_state` can take over a state.

        Raises:
            ValueError: The records of evicted rows are those of other tables, or a table with a
                cache had another number of rows.
        """
        for each in self.vocabularies:
            saved, wanted = int(state[each.name]["num_ids"][0]), each.num_ids or 0
            if saved != wanted:
                saved_as, is_now = (
                    f"jaxrec.tier.Cached and num_embeddings={x}" if x else "jaxrec.tier.Dynamic"
                    for x in (saved, wanted)
                )
                raise ValueError(
                    f"table {each.name} was saved with {saved_as}, but the model's has {is_now}"
                )
            records = state[each.name].get("stored_records")
            if each.transfer is None or records is None:
                continue
            if records.shape[1] != each.transfer.layout.width:
                raise ValueError(
                    f"evicted rows of table {each.name} were saved with {records.shape[1]} bytes "
                    f"each, with their optimizer state, but the model's have "
                    f"{each.transfer.layout.width}"
                )

    def load_state(self, state: Mapping[str, Mapping[str, np.ndarray]]) -> dict[str, LoadedRows]:
        """Take over the result of `state`; tables may have had other numbers of rows.

        Returns:
            For each vocabulary the rows of its ids before and after. The caller moves the rows
            themselves, and brings those of dropped ids to the store.
        """
        rows = {}
        with self._planning, self._lock:
            self._last_planned, self._last_taken = map(int, state[_RUN]["numbers"])
            self._pending.clear()
            self._planned.clear()
            self._replayed = collections.deque(
                (int(number), (int(count), int(total), int(mixed)))
                for number, count, total, mixed in state[_RUN]["planned"]
            )
            for each in self.vocabularies:
                saved = dict(state[each.name])
                rows[each.name] = each.vocabulary.load_state(saved, self._last_planned)
            if any(each.dropped_ids.size for each in rows.values()):
                self._replayed.clear()  # planned batches may have used dropped rows
        for observer in self.observers:
            observer.restored()
        return rows


def tier_of(model: nnx.Module) -> Tier | None:
    """Return the vocabularies of a model that `jaxrec.tier.make` made; None if it has none."""
    for collection in collections_of(model).values():
        return cast(Tier, cast(TierStore, collection.tables.get_value()).tier)
    return None


def _file_name(each: TableVocabulary) -> str:
    return urllib.parse.quote(each.name, safe="+")


def _propose(
    each: TableVocabulary,
    part: list[Segment],
    ids: GatheredIds,
    number: int,
    held: int,
    lookup: Lookup,
) -> Proposal:
    try:
        return each.vocabulary.propose(ids.ids, number, held, lookup)
    except VocabularyFullError as error:
        raise _table_full(each, part, error, held) from None


def _table_full(
    each: TableVocabulary, part: list[Segment], error: VocabularyFullError, held: int
) -> TableFullError:
    """Describe that a batch does not fit beside some batches under way."""
    where = "the part of the batch of another process"
    for segment in part:
        is_first = segment.ids == error.first_id
        if is_first.any():
            where = segment.describe(int(np.argmax(is_first)))
            break
    rows = each.vocabulary.num_rows + error.needed - error.available
    more = "num_embeddings" if each.num_ids is None else "jaxrec.tier.Cached(rows=...)"
    later = ", or admit ids later (Dynamic(admit_after=...))" if each.num_ids is None else ""
    return TableFullError(
        f"{where}: no row of table {each.name} is left for id "
        f"{error.first_id}: the batch has {error.needed:,} new ids, and {error.available:,} of "
        f"the {error.room:,} rows for ids are not in use by it or by the {held} batches under "
        f"way. Give the table {rows:,} rows or more ({more}), or make batches smaller{later}"
    )


def _check_range(each: TableVocabulary, segment: Segment) -> None:
    """Check the ids of a table of fixed size.

    Raises:
        ValueError: An id is none of the table's.
    """
    if each.num_ids is None or not segment.ids.size:
        return
    if segment.ids.min() >= 0 and segment.ids.max() < each.num_ids:
        return
    position = int(np.argmax((segment.ids < 0) | (segment.ids >= each.num_ids)))
    raise ValueError(
        f"{segment.describe(position)}: id {segment.ids[position]} is not in table {each.name}, "
        f"whose ids are 0 to {each.num_ids - 1}; give the table more rows (num_embeddings), or "
        "hash the feature's ids with jaxrec.ragged.hash_ids(ids, num_embeddings)"
    )


def _translated(
    host: HostBatch, parts: Sequence[Sequence[Segment]], rows: Sequence[np.ndarray]
) -> Any:
    """Return a batch with the rows of the ids of each vocabulary."""
    of_segment: dict[tuple[int, str], np.ndarray] = {}
    for part, of_part in zip(parts, rows, strict=True):
        start = 0
        for segment in part:
            of_segment[segment.batch, segment.key] = of_part[start : start + segment.ids.size]
            start += segment.ids.size
    return host.with_rows([of_segment.get((each.batch, each.key)) for each in host.segments])


def _restore_rows(
    ids: np.ndarray, rows: np.ndarray, evicted_ids: np.ndarray, evicted_rows: np.ndarray
) -> None:
    """Set the rows of evicted ids, where ids have none."""
    missing = np.flatnonzero(rows < 0)
    if not missing.size or not evicted_ids.size:
        return
    order = np.argsort(evicted_ids)
    place = np.searchsorted(evicted_ids, ids[missing], sorter=order)
    place = order[np.minimum(place, order.size - 1)]
    is_match = evicted_ids[place] == ids[missing]
    rows[missing[is_match]] = evicted_rows[place[is_match]]


def _joined(part: Sequence[Segment]) -> np.ndarray:
    """Return the ids of segments, one after the other."""
    if len(part) == 1:
        return part[0].ids
    return np.concatenate([np.zeros(0, np.int64), *(segment.ids for segment in part)])
