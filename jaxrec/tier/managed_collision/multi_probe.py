"""Maps of ids to slots by hashing and probing: TorchRec's MPZCH."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int32, UInt32

from jaxrec.ragged.wide_ids import (
    IdRuns,
    WideIds,
    equal_words,
    find_runs,
    search_words,
    split_int64,
)
from jaxrec.tier.managed_collision.policies import EvictedSlots
from jaxrec.tier.managed_collision.probing import NEVER, NO_SLOT, Windows, match_slots, murmur_hash3
from jaxrec.tier.vocabulary.eviction import Eviction

# The id of an empty slot, -1.
EMPTY_ID = (0xFFFFFFFF, 0xFFFFFFFF)


@dataclasses.dataclass(frozen=True)
class MultiProbeConfig:
    """Settings of a `MultiProbeMap`, by the names of TorchRec's HashZchManagedCollisionModule.

    Attributes:
        total_num_buckets: Number of buckets, equal parts of the slots. Each id belongs to a bucket.
        max_probe: Number of slots that an id probes, from the slot of its hash on.
        eviction: Policy by which ids lose their slots: `jaxrec.tier.ttl` of whole hours, or
            TorchRec's `SingleTTLEviction`, `LRUEviction`, `PerFeatureTTLEviction`. None: ids keep
            their slots.
        input_hash_size: 0: the bucket of an id is ``id % total_num_buckets``. Otherwise the upper
            bound of ids, which are divided among the buckets in equal ranges.
        opt_in_prob: Probability in percent, 1 to 100, that a new id gets a slot, at each
            occurrence. Other new ids share the reserved slots. None: every new id may get a slot,
            and no slots are reserved.
        percent_reserved_slots: Percentage of slots that are reserved for ids without a slot; only
            with ``opt_in_prob``.
        disable_fallback: Whether an id that finds no slot is dropped from its bag. False: it shares
            the slot of its hash with another id, or takes a reserved slot.

    Raises:
        TypeError: The policy has no hours.
        ValueError: A number is out of its range.

    Example:
        >>> MultiProbeConfig(max_probe=64).init(num_slots=1000).identities.shape
        (1000, 2)
    """

    total_num_buckets: int = 1
    max_probe: int = 128
    eviction: Eviction | None = None
    input_hash_size: int = 0
    opt_in_prob: int | None = None
    percent_reserved_slots: float = 0
    disable_fallback: bool = False

    def __post_init__(self) -> None:
        for name in ("total_num_buckets", "max_probe"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more, got {getattr(self, name)}")
        if self.eviction is not None:
            self.eviction.hours_to_live(())  # raises its error
        if not 0 <= self.input_hash_size < 2**63:
            raise ValueError(f"input_hash_size must be 0 to 2**63-1, got {self.input_hash_size}")
        if not 0 <= self.percent_reserved_slots < 100:
            raise ValueError(
                f"percent_reserved_slots must be 0 to below 100, got {self.percent_reserved_slots}"
            )
        if self.opt_in_prob is not None and not 1 <= self.opt_in_prob <= 100:
            raise ValueError(f"opt_in_prob must be None or 1 to 100, got {self.opt_in_prob}")
        if (self.opt_in_prob is not None) != (self.percent_reserved_slots > 0):
            raise ValueError(
                "opt_in_prob and percent_reserved_slots go together: ids without a slot share the "
                f"reserved ones; got {self.opt_in_prob} and {self.percent_reserved_slots}"
            )

    def reserved_slots(self, num_slots: int) -> int:
        """Return the number of reserved slots of each bucket."""
        percentage = self.percent_reserved_slots
        return math.floor(num_slots * percentage / 100 / self.total_num_buckets)

    def init(self, num_slots: int) -> MultiProbeMap:
        """Return an empty map.

        Args:
            num_slots: Number of slots, which is the number of rows of the table.

        Raises:
            ValueError: The buckets do not divide the slots, or the percentage reserves none or all
                of a bucket's slots.
        """
        if num_slots < 1 or num_slots % self.total_num_buckets:
            raise ValueError(
                f"{num_slots} slots do not divide into total_num_buckets={self.total_num_buckets}; "
                "choose num_embeddings as a multiple"
            )
        reserved = self.reserved_slots(num_slots)
        if self.opt_in_prob is not None and not 0 < reserved < num_slots // self.total_num_buckets:
            raise ValueError(
                f"percent_reserved_slots={self.percent_reserved_slots} reserves {reserved} of the "
                f"{num_slots // self.total_num_buckets} slots of a bucket; it must reserve 1 or "
                "more and leave 1 or more"
            )
        return MultiProbeMap(
            identities=jnp.full((num_slots, 2), EMPTY_ID[0], jnp.uint32),
            metadata=jnp.full(num_slots, -1, jnp.int32) if self.eviction else None,
            config=self,
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MultiProbeMap:
    """A map of ids to slots in which an id takes the first free slot from its hash on.

    TorchRec's multi-probe zero-collision hashing (``hash_mc_modules.py``) with FBGEMM's
    ``zero_collision_hash`` (``faster_hash.cu``). FBGEMM's result depends on the order of its
    threads; here it is that of a kernel that processes one id after the other. Methods are pure
    functions for `jax.jit`. Ids are ``[n, 2]`` uint32 words as `jaxrec.ragged.split_int64` makes
    them. The id -1 marks empty slots and never gets one.

    Attributes:
        identities: Id of each slot, ``[slots, 2]``, -1 for an empty slot.
        metadata: Hour after which the slot's id may be evicted, ``[slots]``, -1 for an empty slot;
            None without eviction.
        config: Settings of the map.

    Example:
        >>> import jax.numpy as jnp, numpy as np
        >>> from jaxrec.ragged import split_int64
        >>> ids = jnp.asarray(split_int64(np.array([10**12, 7, 7])))
        >>> probed = MultiProbeConfig(max_probe=4).init(num_slots=8)
        >>> probed, slots, _ = probed.update(ids, jnp.ones(3, bool))
        >>> slots.tolist() == probed.remap(ids).tolist()
        True
    """

    identities: UInt32[Array, "slots 2"]
    metadata: Int32[Array, " slots"] | None
    config: MultiProbeConfig = dataclasses.field(metadata={"static": True})

    @property
    def num_slots(self) -> int:
        """Number of slots, reserved ones included."""
        return self.identities.shape[0]

    @property
    def open_slots(self) -> Int32[Array, ""]:
        """Number of slots without an id, reserved ones excluded."""
        reserved = self.config.reserved_slots(self.num_slots) * self.config.total_num_buckets
        return jnp.sum(self._is_empty, dtype=jnp.int32) - reserved

    @jax.jit  # for callers outside of jit, where XLA would compile the loops anew at each call
    def remap(self, ids: UInt32[Array, "n 2"]) -> Int32[Array, " n"]:
        """Return the slot of each id, int32 ``[n]``, for evaluation.

        An id that is not in the map reads its fallback slot, or has -1 with `disable_fallback`.
        """
        probed = self._probe(ids)
        found = probed.windows.find(self.identities, ids)
        return jnp.where(found == NO_SLOT, probed.fallback, found)

    @jax.jit
    def update(
        self,
        ids: UInt32[Array, "n 2"],
        is_valid: Bool[Array, " n"],
        expiry: Int32[Array, " n"] | None = None,
        hour: Int32[Array, ""] | None = None,
        rolls: Int32[Array, " n"] | None = None,
    ) -> tuple[MultiProbeMap, Int32[Array, " n"], EvictedSlots]:
        """Give slots to the ids of a batch.

        Args:
            ids: The ids, with repeats.
            is_valid: Whether each position has an id, False at padding.
            expiry: Hour after which each id may be evicted, ``hour`` or later; only with eviction.
            hour: The present hour. Ids whose expiry is before it may be evicted.
            rolls: Random number from 0 to 99 for each id. An id without a slot may get one if its
                number is below ``opt_in_prob``. None: every id may.

        Returns:
            The new map; the slot of each id, -1 for none and arbitrary at padding; and the slots
            that were taken from another id, in the order of the ids that took them.

        Raises:
            ValueError: Hours are missing and the map evicts.
        """
        if (self.config.eviction is not None) and (expiry is None or hour is None):
            raise ValueError("a map with eviction needs the hours: expiry= and hour=")
        count, num_slots, config = ids.shape[0], self.num_slots, self.config
        if count == 0:
            return self, jnp.zeros(0, jnp.int32), EvictedSlots.none(0, num_slots)
        probed = self._probe(ids)
        is_valid &= ~equal_words(ids, jnp.array(EMPTY_ID, jnp.uint32))
        position = jnp.arange(count, dtype=jnp.int32)
        is_admitted = jnp.ones(count, bool)
        if rolls is not None and config.opt_in_prob is not None:
            is_admitted = rolls < config.opt_in_prob
        # Ids take turns in the order of the batch. Each distinct id is computed once, with the turn
        # of its first occurrence and that of the first occurrence which may take a new slot.
        runs = find_runs(ids, is_valid)
        first = _first_positions(runs, position)
        first_admitted = _first_positions(runs, jnp.where(is_admitted, position, count))
        windows = probed.windows.take(first)
        # Slots fill from the start of a window and are never emptied, only given to another id. So
        # the search for an id may end at the first empty slot.
        own = windows.find(self.identities, runs.ids, until=self._is_empty)
        own = jnp.where(position < runs.count, own, NO_SLOT)
        taken = match_slots(windows, self._preferences(hour), own, first, first_admitted)

        is_new = (taken < num_slots) & (taken != own)
        target = jnp.where(is_new, taken, num_slots)
        is_evicted = is_new & ~self._is_empty.at[taken].get(mode="clip")
        turn = jnp.where(is_evicted, first_admitted, count)
        order = jnp.argsort(turn)[: min(count, num_slots)]
        listed = is_evicted[order]
        evicted = EvictedSlots(
            jnp.where(listed, taken[order], num_slots),
            jnp.where(listed[:, None], runs.ids[order], jnp.uint32(0)),
            jnp.sum(is_evicted, dtype=jnp.int32),
        )

        of_id = jnp.minimum(runs.run, count - 1)
        # A new id has its slot from its first admitted occurrence on.
        has_slot = (taken == own)[of_id] | (position >= first_admitted[of_id])
        has_slot &= is_valid & (taken < num_slots)[of_id]
        is_shared = is_valid & ~has_slot & ~is_admitted
        result = jnp.where(is_shared, probed.shared, probed.fallback)
        result = jnp.where(has_slot, taken[of_id], result)
        metadata = self.metadata
        if metadata is not None and expiry is not None:
            touched = jnp.where(has_slot | is_shared, result, num_slots)
            metadata = metadata.at[touched].max(expiry, mode="drop")
        identities = self.identities.at[target].set(runs.ids, mode="drop")
        return dataclasses.replace(self, identities=identities, metadata=metadata), result, evicted

    @property
    def _is_empty(self) -> Bool[Array, " slots"]:
        return equal_words(self.identities, jnp.array(EMPTY_ID, jnp.uint32))

    def _probe(self, ids: UInt32[Array, "n 2"]) -> _Probed:
        """Return the slots that each id probes, and the slot that it reads if it gets none."""
        config = self.config
        size = self.num_slots // config.total_num_buckets
        reserved = 0 if config.opt_in_prob is None else config.reserved_slots(self.num_slots)
        first = _bucket(ids, config) * size
        hashes = WideIds.of_words(murmur_hash3(ids))
        start = hashes % (size - reserved)
        windows = Windows(first, start, size - reserved, min(config.max_probe, size - reserved))
        shared = first + start
        if reserved:
            shared = first + size - reserved + hashes % reserved
        fallback = jnp.full_like(shared, NO_SLOT) if config.disable_fallback else shared
        return _Probed(windows, shared, fallback)

    def _preferences(self, hour: Int32[Array, ""] | None) -> Int32[Array, " slots"]:
        """Return the preference of each slot for a new id, as `match_slots` defines it."""
        preference = jnp.where(self._is_empty, jnp.int32(-1), NEVER)
        metadata, eviction = self.metadata, self.config.eviction
        if hour is None or metadata is None or eviction is None:
            return preference
        # -1 is the preference of empty slots: without LRU expired slots are as good as empty ones.
        key = metadata if eviction.is_lru else jnp.full_like(metadata, -1)
        return jnp.where(~self._is_empty & (metadata < hour), key, preference)


@dataclasses.dataclass(frozen=True)
class _Probed:
    """Slots that each id probes, and the slot that it reads if it gets none of them."""

    windows: Windows
    shared: Int32[Array, " n"]  # a reserved slot, or without any the slot of the id's hash
    fallback: Int32[Array, " n"]  # `shared`, or `NO_SLOT` with `disable_fallback`


def _first_positions(runs: IdRuns, position: Int32[Array, " n"]) -> Int32[Array, " n"]:
    """Return the smallest ``position`` of each distinct id; ``n`` where there is none."""
    size = position.shape[0]
    return jnp.full(size, size, jnp.int32).at[runs.run].min(position, mode="drop")


def _bucket(ids: UInt32[Array, "n 2"], config: MultiProbeConfig) -> Int32[Array, " n"]:
    """Return the bucket of each id, int32 ``[n]``, by the id's value."""
    buckets = config.total_num_buckets
    if buckets == 1:
        return jnp.zeros(ids.shape[0], jnp.int32)
    if config.input_hash_size:
        size = -(-config.input_hash_size // buckets)
        starts = split_int64(np.array([size * i for i in range(1, buckets)], np.uint64))
        # The number of starts at or below an id is the number of starts below id + 1.
        return search_words(jnp.asarray(starts), (WideIds.of_words(ids) + 1).words)
    # As an unsigned number a negative id is 2**64 too large: subtract the rest of 2**64.
    rest = WideIds.of_words(ids) % buckets
    is_negative = ids[:, 0] >> np.uint32(31) == 1
    return jnp.where(is_negative, (rest + buckets - 2**64 % buckets) % buckets, rest)
