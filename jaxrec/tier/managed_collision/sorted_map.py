"""Maps of ids to slots that are sorted by id: TorchRec's managed collisions (MCH)."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int32, Num, UInt32

from jaxrec.ragged.wide_ids import argsort_words, equal_words, find_runs, search_words
from jaxrec.tier.managed_collision.policies import EvictedSlots
from jaxrec.tier.vocabulary.eviction import COUNTS, LAST_ACCESS, Eviction, lfu

# The id of an empty slot, 2**63 - 1.
EMPTY_ID = (0x7FFFFFFF, 0xFFFFFFFF)

# The count of the last slot after an update; TorchRec's is 2**63 - 1.
MAX_COUNT = np.iinfo(np.int32).max


@dataclasses.dataclass(frozen=True)
class SortedMapConfig:
    """Settings of a `SortedMap`.

    Attributes:
        history_size: Number of ids that are kept from one update to the next; further ids are not
            counted. TorchRec's default is ``int(1.25 * eviction_interval * ids of the first
            batch)``. Each takes 8 bytes, or 12 with policies that use ``last_access_iter``.
        policy: Policy that chooses the ids that keep a slot: `jaxrec.tier.lfu`, `lru`,
            `distance_lfu`, or these by TorchRec's names, with a filter of the ids that may enter.
        eviction_interval: Number of batches from one update to the next.

    Raises:
        TypeError: The policy has no scores.
        ValueError: A number is less than 1.

    Example:
        >>> SortedMapConfig(history_size=int(1.25 * 10 * 65536), eviction_interval=10).policy
        Lfu()
    """

    history_size: int
    policy: Eviction = dataclasses.field(default_factory=lfu)
    eviction_interval: int = 1

    def __post_init__(self) -> None:
        for name in ("history_size", "eviction_interval"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more, got {getattr(self, name)}")
        policy = self.policy
        if not isinstance(policy, Eviction) or not policy.metadata or policy.foresight:
            raise TypeError(f"policy is one with scores, such as jaxrec.tier.lfu(), got {policy!r}")

    def init(self, num_slots: int) -> SortedMap:
        """Return an empty map.

        Args:
            num_slots: Number of slots, which is the number of rows of the table. The last slot is
                for unknown ids.
        """
        if num_slots < 1:
            raise ValueError(f"a map has 1 slot or more, got {num_slots}")
        uses_last = LAST_ACCESS in self.policy.metadata
        return SortedMap(
            ids=jnp.tile(jnp.array(EMPTY_ID, jnp.uint32), (num_slots, 1)),
            slots=jnp.arange(num_slots, dtype=jnp.int32),
            metadata={name: jnp.zeros(num_slots, jnp.int32) for name in self.policy.metadata},
            history=jnp.zeros((self.history_size, 2), jnp.uint32),
            history_iters=jnp.zeros(self.history_size, jnp.int32) if uses_last else None,
            history_length=jnp.int32(0),
            iteration=jnp.int32(0),
            config=self,
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SortedMap:
    """A map of ids to slots, sorted by id, that is updated every few batches.

    TorchRec's ``MCHManagedCollisionModule`` (``mc_modules.py``). An update counts the ids of the
    batches since the last update. Then the ids of the map and the new ids compete for the slots by
    the policy's scores. The last slot is never given to an id. Methods are pure functions for
    `jax.jit`. Ids are ``[n, 2]`` uint32 words as `jaxrec.ragged.split_int64` makes them. The id
    ``2**63 - 1`` marks empty slots and is always unknown.

    Attributes:
        ids: Ids in ascending order as signed integers, ``[slots, 2]``; empty slots are last.
        slots: Slot of each of ``ids``, ``[slots]``. A slot keeps its number when its id changes.
        metadata: The policy's numbers for each of ``ids``, by name. Counts stay below
            ``2**31 - 1``, which is the count of the last slot.
        history: Ids since the last update, ``[history, 2]``.
        history_iters: Value of ``iteration`` for each id of the history; None if the policy does
            not use it.
        history_length: Number of ids in the history.
        iteration: Number of batches so far.
        config: Settings of the map.

    Example:
        >>> import jax.numpy as jnp, numpy as np
        >>> from jaxrec.ragged import split_int64
        >>> ids = jnp.asarray(split_int64(np.array([10**12, 7, 7])))
        >>> ids_map = SortedMapConfig(history_size=8).init(num_slots=3)
        >>> ids_map, evicted = ids_map.update(ids, jnp.ones(3, bool))
        >>> ids_map.remap(ids).tolist(), evicted.count.item()
        ([1, 0, 0], 2)
    """

    ids: UInt32[Array, "slots 2"]
    slots: Int32[Array, " slots"]
    metadata: dict[str, Int32[Array, " slots"]]
    history: UInt32[Array, "history 2"]
    history_iters: Int32[Array, " history"] | None
    history_length: Int32[Array, ""]
    iteration: Int32[Array, ""]
    config: SortedMapConfig = dataclasses.field(metadata={"static": True})

    @property
    def num_slots(self) -> int:
        """Number of slots, including the one for unknown ids."""
        return self.ids.shape[0]

    @property
    def open_slots(self) -> Int32[Array, ""]:
        """Number of slots without an id, excluding the last."""
        is_empty = equal_words(self.ids, jnp.array(EMPTY_ID, jnp.uint32))
        return jnp.sum(is_empty, dtype=jnp.int32) - 1

    @jax.jit
    def remap(self, ids: UInt32[Array, "n 2"]) -> Int32[Array, " n"]:
        """Return the slot of each id, int32 ``[n]``; the last slot for an unknown id."""
        position, is_known = self._find(ids)
        return jnp.where(is_known, self.slots.at[position].get(mode="clip"), self.num_slots - 1)

    @jax.jit  # for callers outside of jit, where XLA would compile the loops anew at each call
    def update(
        self, ids: UInt32[Array, "n 2"], is_valid: Bool[Array, " n"], key: Array | None = None
    ) -> tuple[SortedMap, EvictedSlots]:
        """Record the ids of a batch, and every ``eviction_interval`` batches update the map.

        Args:
            ids: The ids of the batch, those of all features in one array.
            is_valid: Whether each position has an id, False at padding.
            key: Random key of this batch, for `ProbabilisticThreshold`.

        Returns:
            The new map, and the slots that got another id in the order in which TorchRec evicts
            them. Slots that were empty before are among them.
        """
        recorded = self._record(ids, is_valid)
        if self.config.eviction_interval == 1:
            return recorded._evict(key)
        is_due = recorded.iteration % self.config.eviction_interval == 0
        return jax.lax.cond(is_due, SortedMap._evict, SortedMap._keep, recorded, key)

    def _keep(self, key: Array | None) -> tuple[SortedMap, EvictedSlots]:
        """Return the map as it is, with no evicted slots, for a batch without an update."""
        return self, EvictedSlots.none(self._max_evicted, self.num_slots)

    @property
    def _max_evicted(self) -> int:
        # An update admits at most as many ids as its history has.
        return min(self.num_slots - 1, self.history.shape[0])

    def _find(self, ids: UInt32[Array, "n 2"]) -> tuple[Int32[Array, " n"], Bool[Array, " n"]]:
        """Return the position of each id in ``self.ids``, and whether that position has the id."""
        # The last entry belongs to the slot for unknown ids, which no id may find.
        position = search_words(self.ids[:-1], ids)
        found = equal_words(self.ids.at[position].get(mode="clip"), ids)
        return position, found & ~equal_words(ids, jnp.array(EMPTY_ID, jnp.uint32))

    def _record(self, ids: UInt32[Array, "n 2"], is_valid: Bool[Array, " n"]) -> SortedMap:
        """Return the map with a batch's ids appended to its history."""
        iteration, size = self.iteration + 1, self.history.shape[0]
        is_kept = is_valid & ~equal_words(ids, jnp.array(EMPTY_ID, jnp.uint32))
        place = self.history_length + jnp.cumsum(is_kept, dtype=jnp.int32) - 1
        place = jnp.where(is_kept, place, size)
        count = self.history_length + jnp.sum(is_kept, dtype=jnp.int32)
        history_iters = self.history_iters
        if history_iters is not None:
            history_iters = history_iters.at[place].set(iteration, mode="drop")
        return dataclasses.replace(
            self,
            history=self.history.at[place].set(ids, mode="drop"),
            history_iters=history_iters,
            history_length=jnp.minimum(count, size),
            iteration=iteration,
        )

    def _candidates(
        self, key: Array | None
    ) -> tuple[UInt32[Array, "history 2"], dict[str, Int32[Array, " history"]]]:
        """Return the history's distinct ids, the most frequent first, with their numbers by name.

        The numbers are those that the policy scores. Ids that its filter rejects, and padding, have
        a count of 0 and come last.
        """
        # The order decides between equal scores: the more frequent of two new ids enters.
        size = self.history.shape[0]
        is_valid = jnp.arange(size, dtype=jnp.int32) < self.history_length
        runs = find_runs(self.history, is_valid)
        counts = jnp.zeros(size, jnp.int32).at[runs.run].add(1, mode="drop")
        # Only policies by TorchRec's names have a filter.
        if (threshold := getattr(self.config.policy, "threshold_filter", None)) is not None:
            admitted = threshold.admit(counts, runs.count, key)
            counts = jnp.where(admitted, counts, 0)
        order = jnp.argsort(-counts, stable=True)
        numbers = {COUNTS: counts}
        if self.history_iters is not None:
            last = jnp.zeros(size, jnp.int32).at[runs.run].max(self.history_iters, mode="drop")
            numbers[LAST_ACCESS] = last
        return runs.ids[order], {name: each[order] for name, each in numbers.items()}

    def _evict(self, key: Array | None) -> tuple[SortedMap, EvictedSlots]:
        """Return the map updated by the ids of its history, and the slots that got another id."""
        num_slots, policy = self.num_slots, self.config.policy
        ids, numbers = self._candidates(key)
        is_candidate = numbers[COUNTS] > 0
        position, is_known = self._find(ids)
        is_known &= is_candidate
        known = jnp.where(is_known, position, num_slots)
        metadata = {
            name: _join(name, self.metadata[name], known, numbers[name], self.iteration)
            for name in policy.metadata
        }
        # Ids of the map come before new ones: the sort is stable, so they win at equal scores.
        both = {name: jnp.concatenate([metadata[name], numbers[name]]) for name in policy.metadata}
        scores = policy.scores(both, self.iteration)
        competes = jnp.concatenate([jnp.ones(num_slots, bool), is_candidate & ~is_known])
        order = _ranking(scores, competes, num_slots - 1)
        stays, falls = order[:num_slots], order[num_slots:]
        # The first `num_slots` of the order stay. New ids among them enter, and as many ids of the
        # map fall out: the n-th that enters takes the slot of the n-th that falls.
        size = self._max_evicted
        entering = _pack(stays >= num_slots, stays - num_slots, size, ids.shape[0])
        leaving = _pack(falls < num_slots, falls, size, num_slots)
        count = jnp.sum(stays >= num_slots, dtype=jnp.int32)

        def replace(old: Array, new: Array) -> Array:
            return old.at[leaving].set(new.at[entering].get(mode="clip"), mode="drop")

        evicted = EvictedSlots(
            self.slots.at[leaving].get(mode="fill", fill_value=num_slots),
            ids.at[entering].get(mode="fill", fill_value=0),
            count,
        )
        new_ids = replace(self.ids, ids)
        metadata = {name: replace(metadata[name], numbers[name]) for name in policy.metadata}
        by_id = argsort_words(new_ids)
        updated = dataclasses.replace(
            self,
            ids=new_ids[by_id],
            slots=self.slots[by_id],
            metadata={name: each[by_id] for name, each in metadata.items()},
            history_length=jnp.int32(0),
        )
        return updated, evicted


def _join(
    name: str,
    old: Int32[Array, " slots"],
    known: Int32[Array, " history"],
    new: Int32[Array, " history"],
    iteration: Int32[Array, ""],
) -> Int32[Array, " slots"]:
    """Update the map's numbers ``old``, counts or last batches, by the history's numbers ``new``.

    ``known`` is the position in the map of each id of the history, past the end for new ids.
    """
    # The last slot gets the largest count and the latest access. Before the additions counts are
    # cut so far that the sums stay below the largest count.
    if name == COUNTS:
        more = jnp.zeros_like(old).at[known].add(new, mode="drop")
        return jnp.minimum(old, MAX_COUNT - 1 - more).at[-1].set(0) + more.at[-1].set(MAX_COUNT)
    return old.at[known].set(new, mode="drop").at[-1].set(iteration)


def _ranking(
    scores: Num[Array, " n"], competes: Bool[Array, " n"], safe: int
) -> Int32[Array, " n"]:
    """Return the stable order of scores: position ``safe`` first, then the highest score first.

    Positions that do not compete come last.
    """
    # ~score orders integers from the highest to the lowest without overflow.
    descending = -scores if jnp.issubdtype(scores.dtype, jnp.floating) else ~scores
    rank = jnp.where(competes, jnp.int32(1), jnp.int32(2)).at[safe].set(0)
    position = jnp.arange(scores.shape[0], dtype=jnp.int32)
    return jax.lax.sort((rank, descending, position), num_keys=2, is_stable=True)[-1]


def _pack(
    is_wanted: Bool[Array, " n"], values: Int32[Array, " n"], size: int, fill: int
) -> Int32[Array, " _size"]:
    """Return the wanted values in order, padded with ``fill`` to ``size``."""
    place = jnp.where(is_wanted, jnp.cumsum(is_wanted, dtype=jnp.int32) - 1, size)
    return jnp.full(size, fill, jnp.int32).at[place].set(values, mode="drop")
