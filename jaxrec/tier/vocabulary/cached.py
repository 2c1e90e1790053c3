"""Settings of a table whose rows are mostly elsewhere."""

from __future__ import annotations

import dataclasses

from jaxrec.tier.stores.row_store import RowStore
from jaxrec.tier.vocabulary.dynamic import NO_UNKNOWN, Dynamic
from jaxrec.tier.vocabulary.eviction import Eviction, lru


@dataclasses.dataclass(frozen=True)
class Cached:
    """A table of fixed size with a few rows on the devices and the others in a row store.

    The ids of the table are ``0 .. num_embeddings - 1``. `jaxrec.tier.ahead` brings the rows of
    the coming batches, with their optimizer state, from the store to the devices, and evicts
    others to the store. A row that was never used takes no memory: it gets the values of the
    table's initializer for that id when it is first needed. Results are those of a table that
    lies on the devices whole.

    Attributes:
        rows: Number of rows on the devices, together. They must fit the distinct ids of
            ``look_ahead + 3`` batches.
        store: Where the other rows are, as a URL (``"memory://"``, ``"file:///data/users"``, see
            `jaxrec.tier.stores.open_store`) or a `RowStore`. Each table has a store of its own;
            ``{table}`` in a URL stands for its name.
        eviction: Which rows leave the devices first: `lru`, `lfu`, `lfu_lru`, `distance_lfu`,
            `ttl`, `by_score` or `farthest`.
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
        try:
            _ = self.vocabulary
        except (TypeError, ValueError) as error:
            raise type(error)(str(error).replace("Dynamic:", "Cached:")) from None

    @property
    def vocabulary(self) -> Dynamic:
        """Settings of the assignment of rows to ids: each id that is used gets one."""
        return Dynamic(
            eviction=self.eviction,
            unknown=NO_UNKNOWN,
            evict_fraction=self.evict_fraction,
            store=self.store,
        )
