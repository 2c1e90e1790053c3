"""A table store whose rows are given to ids by a `Tier` on the host."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, DTypeLike, Float, Int32

from jaxrec.embed.checkpoint_view import LogicalTable
from jaxrec.embed.found_ids import FoundIds
from jaxrec.embed.layout import Group
from jaxrec.embed.row_access import TableRows, group_slots
from jaxrec.embed.row_gradients import Activations, Residuals, Routes, RowGradients
from jaxrec.embed.row_slots import RowSlots
from jaxrec.embed.store import TableStore
from jaxrec.optim import RowOptimizer
from jaxrec.optim.hyperparameter import Step
from jaxrec.ragged import KeyedJaggedArray


def with_zeros(store: TableStore, tables: Sequence[str]) -> TableStore:
    """Return a store with the first row of some tables set to zero, its state to the first; traced.

    Args:
        store: The store that has the arrays.
        tables: Names of the tables.
    """
    first = [TableRows(name, np.zeros(1, np.int64)) for name in tables]
    for name, slots in group_slots(store, first).items():
        group = store.groups[name]
        state = {
            key: jnp.broadcast_to(array[0], (*slots.slots.shape, *array.shape[1:]))
            for key, array in group.optimizer.init(1, group.dim).items()
        }
        rows = jnp.zeros((*slots.slots.shape, group.dim), group.dtype)
        store = store.write_rows(name, *store.spread_rows((slots.slots, rows, state)))
    return store


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TierStore(TableStore):
    """Tables of which some have an open vocabulary; the arrays are another store's.

    It looks up only batches in which a tier has replaced ids by rows.

    Attributes:
        inner: The store that has the arrays, on one device or over a mesh.
        tier: The `jaxrec.tier.tier.Tier` of the model, its vocabularies on the host.
        features: Features whose ids the tier replaces.
        zero_tables: Tables whose first row stays zero, for ids without a row of their own.
        path: Path of the collection in the model that the tier is of.
    """

    inner: TableStore
    tier: Hashable = dataclasses.field(metadata={"static": True})
    features: tuple[str, ...] = dataclasses.field(metadata={"static": True})
    zero_tables: tuple[str, ...] = dataclasses.field(default=(), metadata={"static": True})
    path: str = dataclasses.field(default="", metadata={"static": True})

    @property
    def layout(self) -> Any:
        return self.inner.layout

    @property
    def groups(self) -> dict[str, Group]:
        return self.inner.groups

    @property
    def row_optimizers(self) -> tuple[RowOptimizer, ...]:
        return self.inner.row_optimizers

    @property
    def without_rows(self) -> TableStore:
        return self.inner.without_rows

    @property
    def bounds(self) -> dict[str, int]:
        bounds = self.inner.bounds
        return {key: bound for key, bound in bounds.items() if key not in self.features}

    @property
    def placed(self) -> TableStore:
        return self.inner

    def with_placed(self, placed: TableStore) -> TierStore:
        return dataclasses.replace(self, inner=placed)

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

    def row_gradients(
        self, residuals: Residuals, cotangents: Activations
    ) -> dict[str, RowGradients]:
        return self.inner.row_gradients(residuals, cotangents)

    def update(
        self,
        calls: Sequence[dict[str, RowGradients]],
        step: Step | int,
        is_applied: Bool[Array, ""] | None = None,
    ) -> TierStore:
        updated = self.inner.update(calls, step, is_applied)
        return self.with_placed(with_zeros(updated, self.zero_tables))

    def table_squares(
        self, calls: Sequence[dict[str, RowGradients]]
    ) -> dict[str, Float[Array, ""]]:
        return self.inner.table_squares(calls)

    def check_dense_gradient(self, name: str) -> None:
        self.inner.check_dense_gradient(name)

    def dense_gradients(
        self, name: str, gradient: Float[Array, "rows dim"]
    ) -> dict[str, RowGradients]:
        return self.inner.dense_gradients(name, gradient)

    def read(self, name: str) -> Float[Array, "num_embeddings embedding_dim"]:
        return self.inner.read(name)

    def write(
        self, name: str, values: Float[Array | np.ndarray, "num_embeddings embedding_dim"]
    ) -> TierStore:
        return self.with_placed(self.inner.write(name, values))

    def read_state(self, name: str) -> dict[str, Array]:
        return self.inner.read_state(name)

    def write_state(self, name: str, state: Mapping[str, Array | np.ndarray]) -> TierStore:
        return self.with_placed(self.inner.write_state(name, state))

    def find_ids(self, name: str, ids: Any, *, is_written: bool = False) -> FoundIds:
        features = {config.name: config.feature_names for config in self.layout.configs}
        if features.get(name, ("",))[0] not in self.features:
            return self.inner.find_ids(name, ids, is_written=is_written)
        tier: Any = self.tier
        return tier.find_ids(self.path, name, ids, is_written=is_written)

    def row_slots(self, name: str, rows: np.ndarray) -> list[RowSlots]:
        return self.inner.row_slots(name, rows)

    def read_rows(
        self, group: str, slots: Int32[Array, "*devices n"]
    ) -> tuple[Float[Array, "*devices n dim"], dict[str, Array]]:
        return self.inner.read_rows(group, slots)

    def write_rows(
        self,
        group: str,
        slots: Int32[Array, "*devices n"],
        rows: Float[Array, "*devices n dim"],
        state: Mapping[str, Array],
    ) -> TierStore:
        return self.with_placed(self.inner.write_rows(group, slots, rows, state))

    def put_rows(self, tree: Any) -> Any:
        return self.inner.put_rows(tree)

    def checkpoint_shapes(self, name: str) -> LogicalTable:
        return self.inner.checkpoint_shapes(name)

    def checkpoint_view(self, name: str) -> LogicalTable:
        return self.inner.checkpoint_view(name)

    def from_checkpoint(self, name: str, logical: LogicalTable, num_rows: int) -> TierStore:
        return self.with_placed(self.inner.from_checkpoint(name, logical, num_rows))

    def put_beside(self, tree: Any) -> Any:
        return self.inner.put_beside(tree)

    def _check(self, features: KeyedJaggedArray) -> None:
        """Raise a TypeError where ids would be taken for rows."""
        raw = [key for key in self.features if key in features.keys]
        raw = [key for key in raw if key not in features.slot_keys]
        if raw:
            raise TypeError(
                f"the tables of feature {raw[0]!r} have an open vocabulary, and the batch has its "
                "ids, not its rows; iterate over jaxrec.tier.ahead(model, batches) and call the "
                "model with what it yields"
            )
