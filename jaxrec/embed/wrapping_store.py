"""A table store that adds something to another one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from jaxtyping import Array, Bool, DTypeLike, Float, Int32, Shaped

from jaxrec.embed.checkpoint_view import LogicalTable
from jaxrec.embed.config import TableConfig
from jaxrec.embed.found_ids import FoundIds
from jaxrec.embed.layout import Group
from jaxrec.embed.row_gradients import Activations, Residuals, Routes, RowGradients
from jaxrec.embed.row_slots import RowSlots
from jaxrec.embed.store import TableStore
from jaxrec.optim import RowOptimizer
from jaxrec.optim.hyperparameter import Step
from jaxrec.ragged import KeyedJaggedArray

Store = TypeVar("Store", bound="WrappingStore")


@dataclasses.dataclass(frozen=True)
class WrappingStore(TableStore):
    """A store that passes every call on to another store.

    Base of stores that change a few methods of a store, whichever store that is: one that refuses
    some batches, or that counts updates. It works with tables on one device and over a mesh.

    Implementors of such a store do the following:

    1. Derive a frozen dataclass from `WrappingStore`, register it as a pytree
       (`jax.tree_util.register_dataclass`), and add fields after `inner`. Arrays are leaves; other
       fields are static.
    2. Override the methods that change, and call the same method of `inner` in them. A method that
       returns a store returns ``self.with_inner(...)`` of the store that `inner` returned.
    3. Put it around a model's store: ``collection.tables.set_value(Wrapper(store))``.

    Attributes:
        inner: The store that has the rows, or another wrapping one.

    Example:
        >>> import jax, jaxrec
        >>> from flax import nnx
        >>> @jax.tree_util.register_dataclass
        ... @dataclasses.dataclass(frozen=True)
        ... class ReadOnly(WrappingStore):
        ...     def update(self, calls, step, is_applied=None):
        ...         raise TypeError("the tables of this model are not trained")
        >>> config = jaxrec.EmbeddingBagConfig("user", num_embeddings=100, embedding_dim=8)
        >>> embeddings = jaxrec.EmbeddingBagCollection([config], rngs=nnx.Rngs(0))
        >>> embeddings.tables.set_value(ReadOnly(embeddings.tables.get_value()))
        >>> embeddings(jaxrec.KeyedJaggedArray.from_lists({"user": [[3, 5], []]}))["user"].shape
        (2, 8)
    """

    inner: TableStore

    def with_inner(self: Store, inner: TableStore) -> Store:
        """Return this store around another one."""
        return dataclasses.replace(self, inner=inner)

    @property
    def layout(self) -> Any:
        return self.inner.layout

    @property
    def row_optimizers(self) -> tuple[RowOptimizer, ...]:
        return self.inner.row_optimizers

    @property
    def configs(self) -> tuple[TableConfig, ...]:
        return self.inner.configs

    @property
    def groups(self) -> dict[str, Group]:
        return self.inner.groups

    @property
    def bounds(self) -> dict[str, int]:
        return self.inner.bounds

    @property
    def without_rows(self) -> TableStore:
        return self.inner.without_rows

    @property
    def placed(self) -> TableStore:
        return self.inner.placed

    def with_placed(self: Store, placed: TableStore) -> Store:
        return self.with_inner(self.inner.with_placed(placed))

    # The training step.

    def route(self, features: KeyedJaggedArray) -> Routes:
        return self.inner.route(features)

    def lookup(
        self,
        features: KeyedJaggedArray,
        *,
        is_weighted: bool = False,
        dtype: DTypeLike = "float32",
        routes: Routes | None = None,
    ) -> tuple[Activations, Residuals]:
        return self.inner.lookup(features, is_weighted=is_weighted, dtype=dtype, routes=routes)

    def row_gradients(
        self, residuals: Residuals, cotangents: Activations
    ) -> dict[str, RowGradients]:
        return self.inner.row_gradients(residuals, cotangents)

    def update(
        self: Store,
        calls: Sequence[dict[str, RowGradients]],
        step: Step | int,
        is_applied: Bool[Array, ""] | None = None,
    ) -> Store:
        return self.with_inner(self.inner.update(calls, step, is_applied))

    def table_squares(
        self, calls: Sequence[dict[str, RowGradients]]
    ) -> dict[str, Float[Array, ""]]:
        return self.inner.table_squares(calls)

    def refuse_shard(self) -> str | None:
        return self.inner.refuse_shard()

    def check_dense_gradient(self, name: str) -> None:
        self.inner.check_dense_gradient(name)

    def dense_gradients(
        self, name: str, gradient: Float[Array, "rows dim"]
    ) -> dict[str, RowGradients]:
        return self.inner.dense_gradients(name, gradient)

    # Whole tables.

    def read(self, name: str) -> Float[Array, "num_embeddings embedding_dim"]:
        return self.inner.read(name)

    def write(
        self: Store, name: str, values: Float[Array | np.ndarray, "num_embeddings embedding_dim"]
    ) -> Store:
        return self.with_inner(self.inner.write(name, values))

    def stored_rows(self, name: str) -> Shaped[Array, "num_embeddings width"] | None:
        return self.inner.stored_rows(name)

    def read_state(self, name: str) -> dict[str, Array]:
        return self.inner.read_state(name)

    def write_state(self: Store, name: str, state: Mapping[str, Array | np.ndarray]) -> Store:
        return self.with_inner(self.inner.write_state(name, state))

    # Rows.

    def by_row(self, name: str) -> TableStore:
        return self.with_inner(self.inner.by_row(name))

    def optimizer_of(self, name: str) -> RowOptimizer:
        return self.inner.optimizer_of(name)

    def find_ids(self, name: str, ids: Any, *, is_written: bool = False) -> FoundIds:
        return self.inner.find_ids(name, ids, is_written=is_written)

    def check_values(self, name: str, rows: np.ndarray) -> None:
        self.inner.check_values(name, rows)

    def row_slots(self, name: str, rows: np.ndarray) -> list[RowSlots]:
        return self.inner.row_slots(name, rows)

    def read_rows(
        self, group: str, slots: Int32[Array, "*devices n"]
    ) -> tuple[Float[Array, "*devices n dim"], dict[str, Array]]:
        return self.inner.read_rows(group, slots)

    def write_rows(
        self: Store,
        group: str,
        slots: Int32[Array, "*devices n"],
        rows: Float[Array, "*devices n dim"],
        state: Mapping[str, Array],
    ) -> Store:
        return self.with_inner(self.inner.write_rows(group, slots, rows, state))

    def put_rows(self, tree: Any) -> Any:
        return self.inner.put_rows(tree)

    def spread_rows(self, tree: Any) -> Any:
        return self.inner.spread_rows(tree)

    def on_every_process(self, tree: Any) -> Any:
        return self.inner.on_every_process(tree)

    def map_slots(self, function: Callable[[Any, Any], Any], per_slot: Any, shared: Any) -> Any:
        return self.inner.map_slots(function, per_slot, shared)

    # Checkpoints.

    def checkpoint_shapes(self, name: str) -> LogicalTable:
        return self.inner.checkpoint_shapes(name)

    def checkpoint_view(self, name: str) -> LogicalTable:
        return self.inner.checkpoint_view(name)

    def from_checkpoint(self: Store, name: str, logical: LogicalTable, num_rows: int) -> Store:
        return self.with_inner(self.inner.from_checkpoint(name, logical, num_rows))

    def put_beside(self, tree: Any) -> Any:
        return self.inner.put_beside(tree)
