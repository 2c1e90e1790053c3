"""The table store of models with a `Tier`, and tables that are made with their cache's rows."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, DTypeLike, Float

from jaxrec.embed.config import TableConfig
from jaxrec.embed.formats import TableArray
from jaxrec.embed.functional import default_store, store_factory
from jaxrec.embed.layout import TableLayout
from jaxrec.embed.row_gradients import (
    Activations,
    Residuals,
    Routes,
    RowGradients,
    table_gradient,
)
from jaxrec.embed.rows import FoundIds
from jaxrec.embed.slots import TableRows, group_slots
from jaxrec.embed.store import TableStore
from jaxrec.embed.wrapping_store import WrappingStore
from jaxrec.optim.hyperparameters import Step
from jaxrec.ragged import KeyedJaggedArray

# Largest table with a cache that is read or written as a whole: 4 GiB. Larger ones were put in a
# store because they do not fit the devices, and the array that is read would not fit either.
_MAX_WHOLE_BYTES = 1 << 32


def with_zeros(store: TableStore, tables: Sequence[str]) -> TableStore:
    """Set row 0 of the named tables to zero, with a fresh optimizer state. Traced."""
    first = [TableRows(name, np.zeros(1, np.int64)) for name in tables]
    for name, slots in group_slots(store, first).items():
        group = store.groups[name]
        state = {
            key: jnp.broadcast_to(array[0], (*slots.slots.shape, *array.shape[1:]))
            for key, array in group.optimizer.init(1, group.dim).items()
        }
        rows = jnp.zeros((*slots.slots.shape, group.dim))
        store = store.write_rows(name, *store.devices.spread((slots.slots, rows, state)))
    return store


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TierStore(WrappingStore):
    """Table store of a collection in which a `Tier` gives rows to the ids of some tables.

    It wraps the collection's own store, and looks up only batches with rows in place of ids.
    """

    # The model's `jaxrec.tier.planning.tier.Tier`, static: it lives on the host and has no arrays.
    # Typed as any hashable object, since the tier's module imports this one.
    tier: Hashable = dataclasses.field(metadata={"static": True})
    # Features whose ids the tier replaces.
    features: tuple[str, ...] = dataclasses.field(metadata={"static": True})
    # Tables whose row 0 stays zero, for ids without a row of their own.
    zero_tables: tuple[str, ...] = dataclasses.field(default=(), metadata={"static": True})
    # The tables as the user gave them; `inner` has fewer rows of those with `jaxrec.tier.Cached`.
    whole: tuple[TableConfig, ...] = dataclasses.field(default=(), metadata={"static": True})
    # Path of the collection in the model.
    path: str = dataclasses.field(default="", metadata={"static": True})

    @property
    def configs(self) -> tuple[TableConfig, ...]:
        return self.whole

    @property
    def bounds(self) -> dict[str, int]:
        bounds = self.inner.bounds
        # Ids of open vocabularies have no bound, and those of caches are checked in planning.
        return {key: bound for key, bound in bounds.items() if key not in self.features}

    @property
    def padding_rows(self) -> dict[str, int]:
        # Where the tier gives rows to ids, padding ids get none.
        rows = {
            config.name: config.padding_id
            for config in self.whole
            if config.feature_names[0] not in self.features
        }
        return {name: row for name, row in rows.items() if row is not None}

    def dense_gradients(
        self, name: str, gradient: Float[Array, "rows dim"]
    ) -> dict[str, RowGradients]:
        layout = cast(TableLayout, self.inner.layout)
        return table_gradient(layout, name, gradient, self.padding_rows.get(name))

    def route(self, features: KeyedJaggedArray) -> Routes:
        self._check(features)
        return self.inner.route(features)

    def lookup(
        self,
        features: KeyedJaggedArray,
        *,
        is_weighted: bool = False,
        dtype: DTypeLike = "float32",
        routes: Routes | None = None,
    ) -> tuple[Activations, Residuals]:
        self._check(features)
        return self.inner.lookup(features, is_weighted=is_weighted, dtype=dtype, routes=routes)

    def update(
        self,
        calls: Sequence[dict[str, RowGradients]],
        step: Step | int,
        is_applied: Bool[Array, ""] | None = None,
    ) -> TierStore:
        # Ids without a row read row 0, and their gradients trained it: set it to zero again.
        updated = self.inner.update(calls, step, is_applied)
        return self.with_inner(with_zeros(updated, self.zero_tables))

    def check_dense_gradient(self, name: str) -> None:
        if name in self._cached:
            raise TypeError(
                f"table {name!r} has jaxrec.tier.Cached, and a loss that reads all of its rows "
                "cannot be differentiated; look up the rows that the loss needs as a feature"
            )
        self.inner.check_dense_gradient(name)

    # The general methods of `TableStore` find rows by `find_ids`, and so reach those in the row
    # store; `inner` has the rows on the devices alone.

    def read(self, name: str) -> Float[Array, "num_embeddings embedding_dim"]:
        return self._methods(name).read(self, name)

    def write(
        self, name: str, values: Float[Array | np.ndarray, "num_embeddings embedding_dim"]
    ) -> TierStore:
        config = self._cached.get(name)
        if config is not None and config.padding_id is not None:
            values = np.array(values)
            values[config.padding_id : config.padding_id + 1] = 0
        return cast(TierStore, self._methods(name).write(self, name, values))

    def read_state(self, name: str) -> dict[str, Array]:
        return self._methods(name).read_state(self, name)

    def write_state(self, name: str, state: Mapping[str, Array | np.ndarray]) -> TierStore:
        return cast(TierStore, self._methods(name).write_state(self, name, state))

    def parts(self, name: str, size: int | None = None) -> Iterator[tuple[int, np.ndarray]]:
        if name not in self._cached:
            return self.inner.parts(name, size)
        return TableStore.parts(self, name, size)

    def _part(self, name: str, rows: np.ndarray) -> np.ndarray:
        return self.rows_of(name, rows).read(with_state=False)["rows"]

    def arrays(self, name: str) -> tuple[TableArray, dict[str, TableArray], int] | None:
        return None if name in self._cached else self.inner.arrays(name)

    def find_ids(self, name: str, ids: Any, *, is_written: bool = False) -> FoundIds:
        features = {config.name: config.feature_names for config in self.configs}
        if features.get(name, ("",))[0] not in self.features:
            return self.inner.find_ids(name, ids, is_written=is_written)
        tier: Any = self.tier
        return tier.find_ids(self.path, name, ids, is_written=is_written)

    @property
    def _cached(self) -> dict[str, TableConfig]:
        """Tables with most of their rows in a store, by name."""
        tier: Any = self.tier
        return {config.name: config for config in self.whole if config.name in tier.cached_tables}

    def _methods(self, name: str) -> type[TableStore]:
        """Return the class whose methods read and write a table as a whole.

        Raise a ValueError for a table with a cache that is too large for that.
        """
        if (config := self._cached.get(name)) is None:
            return WrappingStore  # `inner` has all rows
        size = config.num_embeddings * config.row_format.row_bytes(config.embedding_dim)
        if size > _MAX_WHOLE_BYTES:
            raise ValueError(
                f"table {name!r} has {config.num_embeddings:,} rows of {config.embedding_dim} "
                f"columns, {size / 2**30:.0f} GiB; read and write some of its rows by "
                "collection.rows(name, ids) and load_rows(name, ids, values)"
            )
        return TableStore

    def _check(self, features: KeyedJaggedArray) -> None:
        """Raise a TypeError if a batch has the ids of a feature whose tables need rows."""
        raw = [key for key in self.features if key in features.keys]
        raw = [key for key in raw if key not in features.slot_keys]
        if raw:
            raise TypeError(
                f"the tables of feature {raw[0]!r} have an open vocabulary, and the batch has its "
                "ids, not its rows; iterate over jaxrec.tier.ahead(model, batches) and call the "
                "model with what it yields"
            )


@contextlib.contextmanager
def cached_tables(rows: Mapping[str, int]) -> Iterator[dict[str, TableConfig]]:
    """Within this context, make the named tables with at most ``rows[name]`` rows each.

    The yielded mapping gets, as tables are made, their configurations as the user gave them.
    """
    make_store = store_factory()
    whole: dict[str, TableConfig] = {}

    def make(layout: TableLayout, key: Array) -> TableStore:
        for config in layout.configs:
            if config.name in rows:
                other = whole.setdefault(config.name, config)
                if other.num_embeddings != config.num_embeddings:
                    raise ValueError(
                        f"two tables are named {config.name!r}, of {other.num_embeddings} and "
                        f"{config.num_embeddings} rows; jaxrec.tier.Cached goes by name, so rename "
                        "one of them"
                    )
        return make_store(_smaller(layout, rows), key)

    with default_store(make):
        yield whole


def _smaller(layout: TableLayout, rows: Mapping[str, int]) -> TableLayout:
    def configs(tables: tuple[TableConfig, ...]) -> tuple[TableConfig, ...]:
        return tuple(
            _with_rows(table, min(rows[table.name], table.num_embeddings))
            if table.name in rows
            else table
            for table in tables
        )

    groups = tuple(
        dataclasses.replace(group, tables=configs(group.tables)) for group in layout.groups
    )
    return dataclasses.replace(layout, configs=configs(layout.configs), groups=groups)


def _with_rows(table: TableConfig, num_rows: int) -> TableConfig:
    """Return the configuration of the table that has a cache's rows."""
    # Batches have slots for its ids, and `PADDING_SLOT` for a padding id. So its number does not
    # matter here, only that there is one.
    padding_id = None if table.padding_id is None else min(table.padding_id, num_rows - 1)
    return dataclasses.replace(table, num_embeddings=num_rows, padding_id=padding_id)
