"""The vocabularies of a model on the host, and what they change on the devices."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, cast

import jax
import numpy as np
from flax import nnx

from jaxrec.tier.batches import HostBatch, Segment, fingerprint
from jaxrec.tier.id_map import Lookup, look_up
from jaxrec.tier.model_tables import TableVocabulary, collections_of
from jaxrec.tier.moves import NO_MOVE, Move, begin_move, move_rows
from jaxrec.tier.store import TierStore
from jaxrec.tier.vocabulary import Proposal, TableFullError, VocabularyFullError

# Key of the state of the whole run; no table has this name.
_RUN = "@run"


@dataclasses.dataclass(frozen=True)
class PlannedBatch:
    """A batch whose ids are replaced by rows.

    Attributes:
        batch: The batch, with rows.
        number: Its number; of a batch of an evaluation, that of the last batch before.
        is_training: Whether rows were given to its ids.
        source: The batch as it was.
    """

    batch: Any
    number: int
    is_training: bool
    source: Any


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
    than that: the rows that they overwrite are in use by no batch that is planned before.

    Args:
        vocabularies: The vocabularies.
        seed: Seed of first rows.
    """

    def __init__(self, vocabularies: Sequence[TableVocabulary], seed: int) -> None:
        self.vocabularies, self.seed = tuple(vocabularies), seed
        # Held by whoever reads or changes the vocabularies; the training loop takes the other one.
        self._planning = threading.Lock()
        self._lock = threading.Lock()
        self._last_planned = 0
        self._last_taken = 0
        self._waiting: collections.deque[tuple[int, tuple[Move, ...]]] = collections.deque()
        # Fingerprints of batches that were planned and not taken, in this run or in an earlier one.
        self._planned: collections.deque[tuple[int, tuple[int, int, int]]] = collections.deque()
        self._replayed: collections.deque[tuple[int, tuple[int, int, int]]] = collections.deque()

    @property
    def features(self) -> tuple[str, ...]:
        """Features whose ids the vocabularies have."""
        return tuple(feature for each in self.vocabularies for feature in each.features)

    def statistics(self) -> dict[str, dict[str, float]]:
        """Return the statistics of each vocabulary by name."""
        with self._planning:
            return {each.name: each.vocabulary.statistics.summary() for each in self.vocabularies}

    # Planning: on the host.

    def begin(self) -> None:
        """Prepare for a new sequence of batches, which may begin with those planned before."""
        with self._planning, self._lock:
            # Those planned again come before those that are yet to be.
            self._replayed.extendleft(reversed(self._planned))
            self._planned.clear()

    def plan(self, batch: Any, held: int, gather: Gather | None = None) -> PlannedBatch:
        """Give the ids of a training batch their rows.

        Args:
            batch: A host batch; with several processes this process's part of it.
            held: Number of batches that may be planned and not yet computed; their rows stay.
            gather: Returns the ids of each process (`jaxrec.mesh.agree.gather_ids`). The processes
                then plan the same, each for itself. None: the batch is whole.

        Raises:
            ValueError: More distinct ids are in use than there are rows; nothing has changed.
            TypeError: The batch is none of ids on the host.
        """
        host = HostBatch.of(batch)
        parts = self._parts(host)
        ids = [GatheredIds.of(_joined(part), gather) for part in parts]
        mark = fingerprint([each.ids for each in ids])
        with self._planning:
            if self._replayed and self._replayed[0][1] != mark:
                self._replayed.clear()  # these are other batches than those planned before
            if self._replayed:
                number, _ = self._replayed.popleft()
                rows = self._rows_after([each.ids for each in ids], number)
            else:
                number = self._last_planned + 1
                lookups = look_up(
                    [each.vocabulary.map for each in self.vocabularies], [each.ids for each in ids]
                )
                proposals = [
                    _propose(each, part, of_all, number, held, lookup)
                    for each, part, of_all, lookup in zip(
                        self.vocabularies, parts, ids, lookups, strict=True
                    )
                ]
                assignments = [
                    each.vocabulary.commit(proposal)
                    for each, proposal in zip(self.vocabularies, proposals, strict=True)
                ]
                rows = [assignment.rows for assignment in assignments]
                moves = map(begin_move, self.vocabularies, assignments)
                self._last_planned = number
                with self._lock:
                    self._waiting.append((number, tuple(moves)))
            with self._lock:
                self._planned.append((number, mark))
        for each in self.vocabularies:
            if each.transfer is None:
                each.vocabulary.statistics.warn_if_thrashing(each.name)
        mine = [of_all[each.mine] for of_all, each in zip(rows, ids, strict=True)]
        return PlannedBatch(_translated(host, parts, mine), number, True, batch)

    def look_up(self, batch: Any) -> PlannedBatch:
        """Replace the ids of a batch of an evaluation by their rows; nothing changes.

        Rows are those that the ids had when the last training batch was taken.
        """
        host = HostBatch.of(batch)
        parts = self._parts(host)
        with self._planning:
            number = self._last_taken
            rows = self._rows_after([_joined(part) for part in parts], number)
        return PlannedBatch(_translated(host, parts, rows), number, False, batch)

    def _parts(self, host: HostBatch) -> list[list[Segment]]:
        """Return the segments of each vocabulary."""
        parts = [
            [segment for segment in host.segments if segment.key in each.features]
            for each in self.vocabularies
        ]
        for segment in itertools.chain.from_iterable(parts):
            if segment.key in host.features[segment.batch].slot_keys:
                raise ValueError(
                    f"feature {segment.key!r} of the batch has rows already, not ids; give "
                    "jaxrec.tier.ahead each batch once"
                )
        return parts

    def _rows_after(self, ids: Sequence[np.ndarray], number: int) -> list[np.ndarray]:
        """Return the row that each id had after a batch; later changes are not yet applied.

        Args:
            ids: Ids of each vocabulary.
            number: Number of the batch.
        """
        with self._lock:
            waiting = tuple(self._waiting)
        result = []
        for v, (each, of_vocabulary) in enumerate(zip(self.vocabularies, ids, strict=True)):
            rows = each.vocabulary.find(of_vocabulary, number)
            for later, moves in waiting:
                if later > number:
                    assignment = moves[v].assignment
                    _restore_rows(
                        of_vocabulary, rows, assignment.evicted_ids, assignment.evicted_rows
                    )
            result.append(each.vocabulary.with_unknown(of_vocabulary, rows))
        return result

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
        if not planned.is_training and planned.number != self._last_taken:
            planned = self.look_up(planned.source)
        if planned.is_training:
            with self._lock:
                if not self._planned or self._planned[0][0] != planned.number:
                    raise RuntimeError(
                        "another jaxrec.tier.ahead was begun, or a checkpoint restored, while "
                        "this one gives batches; end one training loop before the next"
                    )
            self._settle(model, planned.number)
            with self._lock:
                self._last_taken = planned.number
                self._planned.popleft()
        return planned.batch

    def settle(self, model: nnx.Module) -> None:
        """Apply the changes of all batches planned so far, and bring evicted rows to their stores.

        Call it in the thread that trains. The tables then agree with the vocabularies.
        """
        self._settle(model, None)
        for each in self.vocabularies:
            if each.transfer is not None:
                each.transfer.wait()

    def _settle(self, model: nnx.Module, number: int | None) -> None:
        """Apply the changes of batches up to a number, None: of all."""
        while True:
            with self._lock:
                if not self._waiting or (number is not None and self._waiting[0][0] > number):
                    return
                _, moves = self._waiting[0]
            move_rows(model, self.vocabularies, moves, self.seed)
            with self._lock:
                self._waiting.popleft()

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
        move_rows(model, self.vocabularies, moves, self.seed)

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
            vocabularies = {each.name: each.vocabulary.state() for each in self.vocabularies}
        for each in self.vocabularies:
            if each.transfer is not None and not each.transfer.store.is_durable:
                vocabularies[each.name] |= each.transfer.state()
        return {**vocabularies, _RUN: run}

    @property
    def state_names(self) -> list[str]:
        """Keys of `state`."""
        return [*(each.name for each in self.vocabularies), _RUN]

    def check_state(self, state: Mapping[str, Mapping[str, np.ndarray]]) -> None:
        """Check that `load_state` can take over a state.

        Raises:
            ValueError: The records of evicted rows are those of other tables.
        """
        for each in self.vocabularies:
            records = state[each.name].get("stored_records")
            if each.transfer is None or records is None:
                continue
            if records.shape[1] != each.transfer.layout.width:
                raise ValueError(
                    f"evicted rows of table {each.name} were saved with {records.shape[1]} bytes "
                    f"each, with their optimizer state, but the model's have "
                    f"{each.transfer.layout.width}"
                )

    def load_state(
        self, state: Mapping[str, Mapping[str, np.ndarray]]
    ) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Take over what `state` returned; tables may have had other numbers of rows.

        Returns:
            For each vocabulary the row that each id had and the row that it has.
        """
        rows = {}
        with self._planning, self._lock:
            self._last_planned, self._last_taken = map(int, state[_RUN]["numbers"])
            self._waiting.clear()
            self._planned.clear()
            self._replayed = collections.deque(
                (int(number), (int(count), int(total), int(mixed)))
                for number, count, total, mixed in state[_RUN]["planned"]
            )
            for each in self.vocabularies:
                saved = dict(state[each.name])
                rows[each.name] = each.vocabulary.load_state(saved, self._last_planned)
        for each in self.vocabularies:
            if each.transfer is not None and not each.transfer.store.is_durable:
                each.transfer.load_state(state[each.name])
        return rows


def tier_of(model: nnx.Module) -> Tier | None:
    """Return the vocabularies of a model that `jaxrec.tier.make` made; None if it has none."""
    for collection in collections_of(model).values():
        return cast(Tier, cast(TierStore, collection.tables.get_value()).tier)
    return None


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
        where = "the part of the batch of another process"
        for segment in part:
            is_first = segment.ids == error.first_id
            if is_first.any():
                where = segment.describe(int(np.argmax(is_first)))
                break
        raise TableFullError(
            f"{where}: no row of table {each.name} is left for id "
            f"{error.first_id}: the batch has {error.needed:,} new ids, and {error.available:,} of "
            f"the {error.room:,} rows for ids are not in use by it or by the {held} batches under "
            "way. Give the table more rows (num_embeddings), make batches smaller, lower "
            "look_ahead, or admit ids later (Dynamic(admit_after=...))"
        ) from None


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
    """Set the rows of ids that were evicted, where there is none."""
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
