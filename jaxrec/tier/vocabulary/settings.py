"""Settings of tables with an open vocabulary, and of tables with most rows in a store."""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxrec.tier.ids.batch_ops import mix
from jaxrec.tier.stores.row_store import RowStore
from jaxrec.tier.vocabulary.counts import MAX_SIGHTINGS
from jaxrec.tier.vocabulary.eviction import Eviction, lru

# Seed of the hash that chooses a shared row.
_SHARED_SEED = 101


@dataclasses.dataclass(frozen=True)
class Unknown:
    """Rows that ids without a row of their own read: the first ``rows`` of the table."""

    kind: str  # "zeros", "default", "shared" or "none"
    rows: int

    def __post_init__(self) -> None:
        least = 0 if self.kind == "none" else 1
        if isinstance(self.rows, bool) or not isinstance(self.rows, int) or self.rows < least:
            raise ValueError(f"shared: rows is an integer of 1 or more, got {self.rows!r}")

    def rows_of(self, ids: np.ndarray) -> np.ndarray:
        """Return the row that each id reads, int32."""
        if self.kind == "none" and ids.size:
            raise AssertionError(f"id {ids[0]} of a table of fixed size has no row")
        if self.kind == "shared":
            return (mix(ids, _SHARED_SEED) % np.uint64(self.rows)).astype(np.int32)
        return np.zeros(ids.shape, np.int32)


def zeros() -> Unknown:
    """Let ids without a row read zeros and train nothing. This takes one row of the table."""
    return Unknown("zeros", 1)


def default_row() -> Unknown:
    """Let ids without a row share one row, which is trained."""
    return Unknown("default", 1)


def shared(rows: int) -> Unknown:
    """Let ids without a row share some rows, which are trained; a hash of the id chooses one.

    Args:
        rows: Number of the table's ``num_embeddings`` rows that are kept for these ids.
    """
    return Unknown("shared", rows)


# For tables with `Cached`: every id has a row, and a lookup without one is a bug of ours.
NO_UNKNOWN = Unknown("none", 0)


@dataclasses.dataclass(frozen=True)
class Dynamic:
    """Settings of a table keyed by any 64-bit id or string, whose ids get and lose rows.

    The first rows of the table, one by default, are for ids without a row of their own
    (``unknown``). An admitted id gets one of the other rows, with the values of the table's
    initializer for that id and a fresh optimizer state. When no row is free, rows are evicted.

    Tables that read the same features share one assignment of rows. They must have the same
    ``num_embeddings`` and the same `Dynamic`.

    Attributes:
        eviction: Policy that chooses the rows to evict: `lru`, `lfu`, `lfu_lru`, `distance_lfu`,
            `ttl`, `by_score` or `farthest`.
        admit_after: Number of sightings after which an id gets a row, 1 to 255. Above 1, sightings
            of ids without a row are counted in a sketch of bounded size, which rarely counts too
            many. An evicted id gets a row at its next sighting, unless the sketch has forgotten
            the earlier ones.
        admit_probability: Probability that an id with enough sightings gets a row, drawn at each
            batch. The draw depends on the id and the batch's number alone.
        unknown: Rows that ids without a row read: `zeros`, `default_row` or ``shared(rows)``. In
            evaluation new ids read them, too.
        evict_fraction: Share of the rows that are evicted together when no row is free.
        counters: Number of one-byte counters in each of the sketch's four lines; None: the number
            of rows.
        store: Store of evicted rows, as a URL (``"memory://"``, ``"file:///data/items"``, see
            `jaxrec.tier.stores.open_store`) or a `RowStore`. Each table needs a store of its own;
            ``{table}`` in a URL stands for its name. None: evicted rows are lost, and their ids
            begin anew.

    Raises:
        TypeError: A field has another type.
        ValueError: A number is out of range.

    Example:
        >>> import jaxrec
        >>> jaxrec.tier.Dynamic(eviction=jaxrec.tier.lfu(), admit_after=2).admit_after
        2
    """

    eviction: Eviction = dataclasses.field(default_factory=lru)
    admit_after: int = 1
    admit_probability: float = 1.0
    unknown: Unknown = Unknown("zeros", 1)
    evict_fraction: float = 1 / 32
    counters: int | None = None
    store: str | RowStore | None = None

    def __post_init__(self) -> None:
        kinds = {
            "eviction": (Eviction, "a policy such as jaxrec.tier.lfu()"),
            "unknown": (Unknown, "jaxrec.tier.zeros(), default_row() or shared(rows)"),
            "store": (str | RowStore | None, "a URL such as 'memory://' or a jaxrec.tier.RowStore"),
        }
        for name, (kind, wanted) in kinds.items():
            if not isinstance(value := getattr(self, name), kind):
                raise TypeError(f"Dynamic: {name} is {wanted}, got {value!r}")
        if not self.eviction.orders_rows:
            raise TypeError(f"Dynamic: {self.eviction!r} is for maps of managed collisions alone")
        if isinstance(self.admit_after, bool) or not isinstance(self.admit_after, int):
            raise TypeError(f"Dynamic: admit_after is an integer, got {self.admit_after!r}")
        if not 1 <= self.admit_after <= MAX_SIGHTINGS:
            raise ValueError(
                f"Dynamic: admit_after is from 1 to {MAX_SIGHTINGS}, got {self.admit_after}"
            )
        for name in ("admit_probability", "evict_fraction"):
            if not 0 < (value := getattr(self, name)) <= 1:
                raise ValueError(f"Dynamic: {name} is above 0 and at most 1, got {value}")
        if self.counters is not None and self.counters < 1:
            raise ValueError(f"Dynamic: counters is 1 or more, got {self.counters}")


@dataclasses.dataclass(frozen=True)
class Cached:
    """Settings of a table of fixed size with some rows on the devices and the others in a store.

    The ids of the table are ``0 .. num_embeddings - 1``. `jaxrec.tier.ahead` brings the rows of
    the coming batches, with their optimizer state, from the store to the devices, and evicts
    other rows to the store. A row that was never used takes no memory: it gets the values of the
    table's initializer when it is first needed. Results equal those of a table that is on the
    devices as a whole.

    Attributes:
        rows: Number of rows on the devices, over all of them. It must be at least the number of
            distinct ids of 3 consecutive batches (``2 * accumulate + 1`` of them). Below the number
            of ``look_ahead + 3`` batches, `jaxrec.tier.ahead` looks fewer batches ahead.
        store: Store of the other rows, as a URL (``"memory://"``, ``"file:///data/users"``, see
            `jaxrec.tier.stores.open_store`) or a `RowStore`. Each table needs a store of its own;
            ``{table}`` in a URL stands for its name.
        eviction: Policy that chooses the rows that leave the devices: `lru`, `lfu`, `lfu_lru`,
            `distance_lfu`, `ttl`, `by_score` or `farthest`.
        evict_fraction: Share of ``rows`` that are evicted together.

    Raises:
        TypeError: A field has another type.
        ValueError: A number is out of range.

    Example:
        >>> import jaxrec
        >>> from flax import nnx
        >>> config = jaxrec.EmbeddingBagConfig("user", num_embeddings=10**9, embedding_dim=4)
        >>> model = jaxrec.tier.make(
        ...     lambda: jaxrec.EmbeddingBagCollection([config], rngs=nnx.Rngs(0)),
        ...     {"user": jaxrec.tier.Cached(rows=100)})
        >>> batch = jaxrec.KeyedJaggedArray.from_lists({"user": [[999_999_999, 7], []]})
        >>> [model(features).values.shape for features in jaxrec.tier.ahead(model, [batch])]
        [(2, 4)]
    """

    rows: int
    store: str | RowStore = "memory://"
    eviction: Eviction = dataclasses.field(default_factory=lru)
    evict_fraction: float = 1 / 32

    def __post_init__(self) -> None:
        if isinstance(self.rows, bool) or not isinstance(self.rows, int):
            raise TypeError(f"Cached: rows is an integer, got {self.rows!r}")
        if self.rows < 1:
            raise ValueError(f"Cached: rows is 1 or more, got {self.rows}")
        if self.store is None:
            raise TypeError("Cached: store is a URL such as 'memory://' or a jaxrec.tier.RowStore")
        # The checks are those of `Dynamic`, with our name in their messages.
        try:
            _ = self.vocabulary
        except (TypeError, ValueError) as error:
            raise type(error)(str(error).replace("Dynamic:", "Cached:")) from None

    @property
    def vocabulary(self) -> Dynamic:
        """Settings of the vocabulary that gives the rows on the devices to ids."""
        return Dynamic(
            eviction=self.eviction,
            unknown=NO_UNKNOWN,
            evict_fraction=self.evict_fraction,
            store=self.store,
        )
