"""Assignment of a table's rows to ids: which ids have, get and lose a row."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from jaxrec.embed.config import MAX_ROWS
from jaxrec.tier.ids.batch_ops import Search, mix, search, smallest
from jaxrec.tier.ids.id_map import IdMap, Lookup, MapChange, commit, lookup_all
from jaxrec.tier.vocabulary.assignment import (
    Assignment,
    LoadedRows,
    Proposal,
    VocabularyFullError,
)
from jaxrec.tier.vocabulary.counts import Sightings, Statistics, Uses
from jaxrec.tier.vocabulary.eviction import FIRST_POWER, Eviction, Records
from jaxrec.tier.vocabulary.next_use import spare_coming
from jaxrec.tier.vocabulary.settings import Dynamic

# Seed of the draws of admission; beyond those of the hashes of `Sightings`.
_ADMISSION_SEED = 1 << 20

_NO_IDS = np.zeros(0, np.int64)
_NO_ROWS = np.zeros(0, np.int32)


@dataclasses.dataclass(frozen=True)
class _Shortage:
    """A batch that evicts rows, since its new ids may need more than are free or some expired."""

    new_ids: np.ndarray  # int64 [m]
    batch: int
    bound: int  # rows used from this batch on stay
    hits: np.ndarray  # int32 [n], rows that stay; negative items are skipped
    coming: Sequence[np.ndarray] = ()  # ids of the next batches, if the policy spares their rows
    expired: np.ndarray | None = None  # bool [rows]

    @property
    def is_plain(self) -> bool:
        """Whether the rows of the smallest keys are evicted, and no others."""
        return not self.coming and self.expired is None


class Vocabulary:
    """Assigns the rows of a table to 64-bit ids, batch by batch.

    Two runs over the same batches assign the same rows, unless the policy reads the clock. Ids are
    0 to ``num_ids`` - 1, or any int64 but -1 where ``num_ids`` is None.
    """

    # Several processes plan the same batches on their own and must agree on every row, and a run
    # from a checkpoint must go on as if it had never stopped. Hence draws are hashes of the id and
    # the batch's number, and ties are broken by the row index.

    def __init__(self, num_rows: int, settings: Dynamic, num_ids: int | None = None) -> None:
        self.num_rows, self.settings = num_rows, settings
        # Rows below `first_row` are for ids without a row of their own.
        self.first_row = settings.unknown.rows
        self.room = num_rows - self.first_row
        if self.room < 1:
            raise ValueError(
                f"num_embeddings is {num_rows}, but {self.first_row} rows are kept for unknown ids"
            )
        if num_rows > MAX_ROWS:
            raise ValueError(
                f"ids get rows that int32 numbers, at most {MAX_ROWS}, but {num_rows} are wanted"
            )
        self._set_records(Records.empty(num_rows))
        self.map = IdMap(self.room, num_ids=num_ids)
        self.sightings = None
        if settings.admit_after > 1:
            self.sightings = Sightings(settings.counters or num_rows)
        self.statistics = Statistics(self.room)
        # Fresh rows are given in steps of about 0.618 of the table (the golden ratio), so that
        # shards of consecutive rows fill evenly. The step has no common divisor with the number of
        # rows: otherwise the steps would come back to a row before they have visited all.
        self._stride = _coprime_near(self.room, 0.618)
        self._num_fresh_given = 0
        self._freed = _NO_ROWS  # a queue: rows are given again in the order of their eviction

    def __len__(self) -> int:
        return len(self.map)

    @property
    def records(self) -> Records:
        """Use of the rows by all batches."""
        # The property is for readers of counts and last uses. Code that needs `ids` and `born`
        # alone reads `_records`, which holds them at any time.
        self._uses.record()
        return self._records

    def find(self, ids: np.ndarray, batch: int) -> np.ndarray:
        """Return the row that each id had after a batch, int32 ``[n]``, -1 for none.

        Ids that a later batch evicted have -1, too.
        """
        rows = self.map.find(ids)
        rows[(rows >= 0) & (self._records.born[rows] > batch)] = -1
        return rows

    def with_unknown(self, ids: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Replace each negative row of ``rows``, in place, by the row that its unknown id reads."""
        unknown = rows < 0
        if unknown.any():
            rows[unknown] = self.settings.unknown.rows_of(ids[unknown])
        return rows

    def propose(
        self,
        ids: np.ndarray,
        batch: int,
        held: int,
        lookup: Lookup | None = None,
        coming: Sequence[np.ndarray] = (),
    ) -> Proposal:
        """Decide which rows the ids of a batch get, changing nothing.

        Rows that the last ``held`` batches before this one use are not evicted. ``coming`` has the
        ids of the next batches, nearest first, for policies with a `foresight`.
        """
        lookups = lookup_all([self.map], [ids]) if lookup is None else [lookup]
        (proposal,) = propose_all([self], [ids], batch, held, lookups, [coming])
        return proposal

    def _begin_proposal(self, ids: np.ndarray, batch: int, lookup: Lookup) -> Proposal:
        """Decide which ids of a batch get rows; return a proposal without victims."""
        sightings = lookup.counts
        if self.sightings is not None:
            sightings = self.sightings.count(lookup.absent, lookup.counts)
        admitted = self._admit(lookup.absent, sightings, batch)
        return Proposal(ids, batch, lookup, sightings, admitted, _NO_ROWS)

    def commit(self, proposal: Proposal) -> Assignment:
        """Carry out a proposal; the vocabulary must not have changed since `propose`."""
        (assignment,) = commit_all([self], [proposal])
        return assignment

    def _begin(self, proposal: Proposal) -> MapChange:
        """Choose rows for a proposal's new ids, and return the changes to the map and records."""
        slots, misses, absent, inverse, _ = proposal.lookup
        admitted = proposal.admitted
        if self.sightings is not None:
            self.sightings.record(absent, proposal.sightings)
        self._free(proposal.victims)
        if admitted is None:
            new_ids, absent_rows = absent, self._take_free(absent.size)
            new_rows = absent_rows
        else:
            new_ids = absent[admitted]
            new_rows = self._take_free(new_ids.size)
            absent_rows = np.full(absent.size, -1, np.int32)
            absent_rows[admitted] = new_rows
        changes = proposal.victims, new_ids, new_rows, slots, misses, inverse, absent_rows
        return MapChange(self.map, self._records, *changes)

    def _end(self, proposal: Proposal, change: MapChange, evicted_ids: np.ndarray) -> Assignment:
        """Note the uses and counts of a batch whose map was changed, and return its assignment."""
        ids, rows, misses = proposal.ids, change.slots, change.misses
        self._uses.add(rows, proposal.batch)
        unknown = _NO_ROWS
        if change.new_ids.size < change.absent_slots.size:
            unknown = misses[rows[misses] < 0]
        self.statistics.add(
            lookups=ids.size,
            hits=ids.size - misses.size,
            new=change.absent_slots.size,
            admitted=change.new_ids.size,
            evicted=change.victims.size,
            refused=unknown.size,
        )
        if unknown.size:
            rows = rows.copy()  # `_uses` holds them as they are
            rows[unknown] = self.settings.unknown.rows_of(ids[unknown])
        return Assignment(rows, change.new_ids, change.new_slots, evicted_ids, change.victims)

    def bring(self, ids: np.ndarray, hits: np.ndarray, last_use: int, batch: int) -> Assignment:
        """Give rows to distinct stored ids, ``[n]``, for an evaluation; evict others if necessary.

        Rows in ``hits`` stay, as do rows used after training batch ``last_use``; ``batch`` is the
        number of the next training batch.
        """
        # The new rows count as used at `last_use`, not now, so that the next training batch may
        # evict them when it is short of rows: an evaluation must not make training fail.
        records, victims = self.records, _NO_ROWS
        if ids.size > self._num_free:
            victims = self._find_victims(_Shortage(ids, batch, last_use + 1, hits))
        evicted_ids = self._evict(victims)
        rows = self._take_free(ids.size)
        self._insert(ids, rows, batch)
        records.last_use[rows] = last_use
        if self.settings.eviction.uses_seconds:
            records.last_seconds[rows] = int(self.settings.eviction.seconds())
        return Assignment(_NO_ROWS, ids, rows, evicted_ids, victims)

    def give_rows(self, ids: np.ndarray, batch: int) -> Assignment:
        """Give free rows to distinct ids without a row, int64 ``[n]``, skipping admission.

        There must be ``n`` free rows. The ids have them after ``batch``.
        """
        new_rows = self._take_free(ids.size)
        self._insert(ids, new_rows, batch)
        self._uses.add(new_rows, batch)
        return Assignment(new_rows, ids, new_rows, _NO_IDS, _NO_ROWS)

    def remove(self, ids: np.ndarray) -> Assignment:
        """Take the rows of ids, int64 ``[n]``, away; ids without a row are skipped."""
        self._uses.record()
        rows = self.map.find(ids)
        rows = rows[rows >= 0]
        evicted_ids = self._evict(rows)
        return Assignment(_NO_ROWS, _NO_IDS, _NO_ROWS, evicted_ids, rows)

    def _admit(self, ids: np.ndarray, sightings: np.ndarray, batch: int) -> np.ndarray | None:
        """Return whether each id gets a row, bool ``[n]``; None: all do."""
        if self.settings.admit_after <= 1 and self.settings.admit_probability >= 1:
            return None
        admitted = sightings >= self.settings.admit_after
        if self.settings.admit_probability < 1:
            draws = mix(ids, _ADMISSION_SEED + batch).astype(np.float64) / 2.0**64
            admitted &= draws < self.settings.admit_probability
        return admitted

    def _shortage(
        self, proposal: Proposal, held: int, coming: Sequence[np.ndarray]
    ) -> _Shortage | None:
        """Return what a proposal lacks; None: it evicts no row."""
        policy, batch, expired = self.settings.eviction, proposal.batch, None
        # Up-to-date records cost a pass over the uses that wait.
        if type(policy).expired is not Eviction.expired and batch % policy.expiry_interval == 0:
            expired = policy.expired(self.records, batch)
        # The usual batch of a table with free rows ends here; all else reads every record.
        if expired is None and proposal.new_ids.size <= self._num_free:
            return None
        hits, coming = proposal.lookup.slots, coming[: policy.foresight]
        return _Shortage(proposal.new_ids, batch, batch - held, hits, coming, expired)

    def _is_by_last_use(self, shortage: _Shortage) -> bool:
        """Whether the rows with the smallest last uses are evicted, and no others."""
        return shortage.is_plain and self.settings.eviction.orders_by_last_use

    def _search(self, shortage: _Shortage) -> Search:
        """Return the search for the rows to evict, or just for all that may be."""
        bound, hits = shortage.bound, shortage.hits
        if not shortage.is_plain:
            eligible = np.empty(self.num_rows, np.bool_)
            return Search(self.records, (), bound, hits, None, 0, 0, eligible)
        policy, lacking = self.settings.eviction, shortage.new_ids.size - self._num_free
        keys = None
        if not policy.orders_by_last_use:
            keys = policy.keys(self.records, shortage.batch)
        uses, most = self._uses.take(), self._most(lacking)
        return Search(self._records, uses, bound, hits, keys, lacking, most)

    def _find_victims(self, shortage: _Shortage) -> np.ndarray:
        """Return the rows to evict, int32 ``[e]``."""
        searched = self._search(shortage)
        return self._victims(shortage, searched, *search([searched])[0])

    def _victims(
        self, shortage: _Shortage, searched: Search, available: int, found: np.ndarray
    ) -> np.ndarray:
        """Return the rows to evict, int32 ``[e]``: expired ones, and others if new ids need them.

        ``available`` rows are eligible; ``found`` are those that the search found.
        """
        new_ids, free, expired = shortage.new_ids, self._num_free, shortage.expired
        eligible, victims = searched.eligible, _NO_ROWS
        if expired is not None and eligible is not None:
            victims = np.flatnonzero(expired & eligible).astype(np.int32)
            eligible[victims] = False
            free, available = free + victims.size, available - victims.size
            if new_ids.size <= free:
                return victims
        lacking = new_ids.size - free
        if lacking > available:
            fitting = free + available
            raise VocabularyFullError(new_ids.size, fitting, self.room, int(new_ids[fitting]))
        if eligible is None:
            return found
        keys = self.settings.eviction.keys(self.records, shortage.batch)
        count = min(self._most(lacking), available)
        if shortage.coming:
            found = spare_coming(keys, eligible, lacking, count, self.map, shortage.coming)
        else:
            found = smallest(keys, eligible, count)
        return np.concatenate([victims, found]) if victims.size else found

    def _most(self, lacking: int) -> int:
        """Return the number of rows to evict where ``lacking`` rows are missing."""
        # Choosing victims reads the keys of all rows, however few are needed. Evicting a share of
        # the table at once leaves free rows for many batches, which then skip this.
        return max(lacking, int(self.settings.evict_fraction * self.room))

    def _evict(self, rows: np.ndarray) -> np.ndarray:
        """Take rows, int32 ``[n]``, away from their ids; return these ids, int64 ``[n]``."""
        if rows.size == 0:
            return _NO_IDS
        ids = self._records.ids[rows]
        self.map.remove(ids)
        self._records.born[rows] = -1
        self._free(rows)
        return ids

    def _free(self, rows: np.ndarray) -> None:
        if rows.size:
            self._freed = np.concatenate([self._freed, rows])

    def _set_records(self, records: Records) -> None:
        self._records = records
        self._uses = Uses(records, self.settings.eviction)

    @property
    def _num_free(self) -> int:
        return self.room - self._num_fresh_given + self._freed.size

    def _take_free(self, count: int) -> np.ndarray:
        """Take ``count`` free rows, int32: rows that had no id yet, then those freed first."""
        # Fresh rows are computed, not listed: a list would take 4 bytes for each row of the table
        # before the first id came.
        num_fresh = min(count, self.room - self._num_fresh_given)
        steps = np.arange(self._num_fresh_given, self._num_fresh_given + num_fresh, dtype=np.int64)
        fresh = (self.first_row + steps * self._stride % self.room).astype(np.int32)
        self._num_fresh_given += num_fresh
        num_reused = count - num_fresh
        reused, self._freed = self._freed[:num_reused], self._freed[num_reused:]
        return np.concatenate([fresh, reused]) if num_fresh else reused

    def _insert(self, ids: np.ndarray, rows: np.ndarray, batch: int) -> None:
        self.map.insert(ids, rows)
        self._records.ids[rows] = ids
        self._records.born[rows] = batch
        self._records.count[rows] = 0
        self._records.power[rows] = FIRST_POWER

    # State, for checkpoints.

    def state(self) -> dict[str, np.ndarray]:
        """Return all that the rows of later batches depend on, as arrays by name."""
        # Records of rows with an id alone: their size in a checkpoint follows the ids, not the
        # table. The map is not saved, since the records have its ids and rows.
        records = self.records
        rows = np.flatnonzero(records.born >= 0).astype(np.int32)
        state = {f"record_{name}": x for name, x in records.take(rows).arrays().items()}
        state |= {
            "rows": rows,
            "freed": self._freed.copy(),
            "numbers": np.array([self.num_rows, self.first_row, self._num_fresh_given], np.int64),
        }
        if self.sightings is not None:
            state["sightings"] = self.sightings.lines.copy()
            state["sightings_new_ids"] = np.array([self.sightings.new_ids], np.int64)
        return state

    def load_state(self, state: dict[str, np.ndarray], batch: int) -> LoadedRows:
        """Take over the ids of a saved vocabulary, which may have had another number of rows.

        A vocabulary with fewer rows keeps the ids that its policy would evict last, judged at the
        number of a training batch, ``batch``.
        """
        saved_rows, first_saved, num_fresh_given = map(int, state["numbers"])
        old_rows = state["rows"].astype(np.int32)
        records = Records(
            **{
                name: state[f"record_{name}"].astype(empty.dtype)
                for name, empty in self._records.arrays().items()
            }
        )
        dropped_ids, dropped_rows = _NO_IDS, _NO_ROWS
        if old_rows.size > self.room:
            keys = self.settings.eviction.keys(records, batch)
            gone = smallest(keys, None, old_rows.size - self.room)
            kept = np.setdiff1d(np.arange(old_rows.size), gone)
            dropped_ids, dropped_rows = records.ids[gone], old_rows[gone]
            old_rows, records = old_rows[kept], records.take(kept)
        if (saved_rows, first_saved) == (self.num_rows, self.first_row):
            rows = old_rows
            self._num_fresh_given, self._freed = num_fresh_given, state["freed"].astype(np.int32)
        else:
            # The order of the free rows depends on the table's size, so the saved order is of no
            # use. Ids keep their row where this table has it, so that few rows must be moved.
            self._num_fresh_given, self._freed = 0, _NO_ROWS
            is_free = np.ones(self.num_rows, np.bool_)
            stays = (old_rows >= self.first_row) & (old_rows < self.num_rows)
            is_free[old_rows[stays]] = False
            # This counts all rows as given; those without an id become the queue of freed rows.
            in_order = self._take_free(self.room)
            free = in_order[is_free[in_order]]
            rows = old_rows.copy()
            rows[~stays], self._freed = np.split(free, [np.count_nonzero(~stays)])
        self.map = IdMap(self.room, num_ids=self.map.num_ids)
        self.map.insert(records.ids, rows)
        self._set_records(Records.empty(self.num_rows))
        for name, array in self._records.arrays().items():
            array[rows] = getattr(records, name)
        # A sketch of another width cannot be converted: ids are then counted from 0 again.
        lines = state.get("sightings")
        if self.sightings is not None:
            self.sightings = Sightings(self.sightings.lines.shape[1])
            if lines is not None and lines.shape == self.sightings.lines.shape:
                self.sightings.lines[:] = lines
                self.sightings.new_ids = int(state["sightings_new_ids"][0])
        self.statistics = Statistics(self.room)
        return LoadedRows(old_rows, rows, dropped_ids, dropped_rows)


def propose_all(
    vocabularies: Sequence[Vocabulary],
    ids: Sequence[np.ndarray],
    batch: int,
    held: int,
    lookups: Sequence[Lookup],
    coming: Sequence[Sequence[np.ndarray]],
) -> list[Proposal]:
    """Propose rows for the ids of one batch in several vocabularies; see `Vocabulary.propose`.

    All but ``batch`` and ``held`` have an item for each vocabulary.

    Raises:
        VocabularyFullError: The index of the first vocabulary without room is its `index`.
    """
    # Nothing changes here, so that a caller whose batch does not fit may try again with a smaller
    # `held`, or raise an error that leaves all vocabularies of the model as they were.
    proposals = [
        each._begin_proposal(of_ids, batch, lookup)
        for each, of_ids, lookup in zip(vocabularies, ids, lookups, strict=True)
    ]

    shortages = {}
    for i, (each, proposal) in enumerate(zip(vocabularies, proposals, strict=True)):
        shortage = each._shortage(proposal, held, coming[i])
        if shortage is not None:
            shortages[i] = shortage
    # One native call searches all tables by last uses. Others are searched in turn: their keys take
    # memory.
    together = {i: vocabularies[i]._search(shortage) for i, shortage in shortages.items()
                if vocabularies[i]._is_by_last_use(shortage)}  # fmt: skip
    results = dict(zip(together, search(list(together.values())), strict=True))
    for i, shortage in shortages.items():
        each = vocabularies[i]
        try:
            if i in together:
                victims = each._victims(shortage, together[i], *results[i])
            else:
                victims = each._find_victims(shortage)
        except VocabularyFullError as error:
            error.index = i
            raise
        proposals[i] = dataclasses.replace(proposals[i], victims=victims)
    return proposals


def commit_all(
    vocabularies: Sequence[Vocabulary], proposals: Sequence[Proposal]
) -> list[Assignment]:
    """Carry out the proposals of several vocabularies, one each, for one batch."""
    # One native call changes the maps of all vocabularies. A model may have dozens, and the calls
    # from Python would add up.
    changes = [each._begin(of) for each, of in zip(vocabularies, proposals, strict=True)]
    evicted = commit(changes, proposals[0].batch, FIRST_POWER) if proposals else []
    return [
        each._end(proposal, change, ids)
        for each, proposal, change, ids in zip(
            vocabularies, proposals, changes, evicted, strict=True
        )
    ]


def _coprime_near(number: int, share: float) -> int:
    """Return the next number from ``share * number`` up that is coprime to ``number``."""
    candidate = max(1, round(number * share))
    while math.gcd(candidate, number) > 1:
        candidate += 1
    return candidate
