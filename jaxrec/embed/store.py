"""The interface of a table store: where rows live, and everything that is done with them."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import jax
import numpy as np
from jaxtyping import Array, Bool, DTypeLike, Float, Int32, Shaped

from jaxrec.embed.checkpoint_view import LogicalTable
from jaxrec.embed.config import TableConfig
from jaxrec.embed.found_ids import FoundIds, check_distinct, row_indices
from jaxrec.embed.layout import Group, Output, TableLayout
from jaxrec.embed.row_gradients import (
    Activations,
    Residuals,
    Routes,
    RowGradients,
    table_gradient,
)
from jaxrec.embed.row_slots import RowSlots
from jaxrec.optim import RowOptimizer
from jaxrec.optim.hyperparameter import Step
from jaxrec.ragged import KeyedJaggedArray


class StoreLayout(Protocol):
    """Static description of a store's tables; hashable. `TableLayout` is one."""

    @property
    def configs(self) -> tuple[TableConfig, ...]:
        """Configurations of the tables, in the order given."""

    @property
    def outputs(self) -> tuple[Output, ...]:
        """Blocks of the collection's output, in order."""

    @property
    def bounds(self) -> dict[str, int]:
        """Number of ids that all tables of a feature have, by feature."""


class TableStore(abc.ABC):
    """Tables with their optimizer state, wherever their rows live.

    `jaxrec.embed.Tables` keeps them on one device, `jaxrec.mesh.ShardedTables` over a mesh.
    Everything else in jaxrec (collections, `jaxrec.value_and_grad`, `jaxrec.Optimizer`,
    checkpoints) only calls the methods below, so that a store in another package is used like one
    of these: give a collection ``store=`` a `StoreFactory` that makes it.

    Implementors of a store do the following:

    1. Define a frozen dataclass that derives from `TableStore` and is registered as a pytree
       (`jax.tree_util.register_dataclass`). Arrays are leaves, and `layout` is static.
    2. Implement the abstract methods. `lookup`, `row_gradients` and `update` are traced inside the
       user's training step. They return new stores and change nothing in place; JAX reuses donated
       buffers. The other methods run outside of `jax.jit`.
    3. Write each row once a step in `update`, however many lookups read it, and leave every row
       alone where ``is_applied`` is False.
    4. Override `route` if a lookup has to communicate before it needs any row, `put_beside` if
       arrays that are used with the tables must lie on several devices, and `find_ids` if the ids
       of a table are not its row indices.

    A store that changes a few methods of another one derives from `jaxrec.embed.WrappingStore`.

    Attributes:
        layout: The tables, and which features read them; see `StoreLayout`.
    """

    layout: Any

    @property
    @abc.abstractmethod
    def row_optimizers(self) -> tuple[RowOptimizer, ...]:
        """Row optimizers of the tables."""

    @property
    def groups(self) -> dict[str, Group]:
        """Groups of tables by name; over a mesh, of column slices."""
        return {group.name: group for group in self.layout.groups}

    @property
    def configs(self) -> tuple[TableConfig, ...]:
        """Configurations of the tables as the user gave them, in order."""
        return self.layout.configs

    @property
    def bounds(self) -> dict[str, int]:
        """Number of ids of each feature that all its tables have; packing checks ids against it."""
        return self.layout.bounds

    @property
    @abc.abstractmethod
    def without_rows(self) -> TableStore:
        """The same store without arrays, a pytree without leaves: `Gradients` carry it."""

    # The training step.

    def route(self, features: KeyedJaggedArray) -> Routes:
        """Return what a lookup must learn from other devices, computed from the ids alone.

        A training step can call it for the next batch (`jaxrec.train.RoutedSteps`). Tables on one
        device need no routing.

        Args:
            features: The batch.

        Returns:
            Routes by group, for `lookup`.
        """
        return {}

    @abc.abstractmethod
    def lookup(
        self,
        features: KeyedJaggedArray,
        *,
        is_weighted: bool = False,
        dtype: DTypeLike = "float32",
        routes: Routes | None = None,
    ) -> tuple[Activations, Residuals]:
        """Look up all features of a batch; see `jaxrec.embed.lookup`.

        Args:
            features: The batch.
            is_weighted: Whether rows are multiplied by the batch's weights.
            dtype: Type of the activations.
            routes: Result of `route` for the batch; None: compute it now.
        """

    @abc.abstractmethod
    def row_gradients(
        self, residuals: Residuals, cotangents: Activations
    ) -> dict[str, RowGradients]:
        """Return the gradients of the rows of one lookup, by group.

        Args:
            residuals: Residuals that `lookup` returned beside the activations.
            cotangents: The gradient of the loss with respect to the activations.
        """

    @abc.abstractmethod
    def update(
        self,
        calls: Sequence[dict[str, RowGradients]],
        step: Step | int,
        is_applied: Bool[Array, ""] | None = None,
    ) -> TableStore:
        """Update the rows of any number of lookups, each row once.

        Frozen tables stay as they are.

        Args:
            calls: Results of `row_gradients`, one for each lookup of the step.
            step: Number of updates made before.
            is_applied: False leaves every row and its state as it is; None: True.
        """

    @abc.abstractmethod
    def table_squares(
        self, calls: Sequence[dict[str, RowGradients]]
    ) -> dict[str, Float[Array, ""]]:
        """Return the sum of squares of each trained table's gradient, by name.

        The gradients of a row are added up first. It is called on `without_rows`.

        Args:
            calls: Results of `row_gradients`, one for each lookup of the step.
        """

    def refuse_shard(self) -> str | None:
        """Return the reason why the tables cannot be put on a mesh; None: they can."""
        return None

    def check_dense_gradient(self, name: str) -> None:
        """Raise where a loss must not read a whole table, since its gradient would be as large.

        Raises:
            KeyError: No table has that name.
            TypeError: Its gradient would not fit; by default that of any table.
        """
        raise TypeError(
            f"a loss reads the whole table {name!r}, whose rows do not lie on one device: its "
            "gradient would be as large as the table on every device. Look its rows up through a "
            "feature, or read it outside of the loss if it is not to be trained by this term"
        )

    def dense_gradients(
        self, name: str, gradient: Float[Array, "rows dim"]
    ) -> dict[str, RowGradients]:
        """Return the gradient of a table that a loss read whole, as that of a lookup of all rows.

        Args:
            name: Name of the table.
            gradient: ``[num_embeddings, embedding_dim]``.
        """
        return table_gradient(self.layout, name, gradient)

    # Whole tables.

    @abc.abstractmethod
    def read(self, name: str) -> Float[Array, "num_embeddings embedding_dim"]:
        """Return the rows of one table, a copy.

        With several processes all of them call it, and each gets the whole table.

        Raises:
            KeyError: No table has that name.
        """

    @abc.abstractmethod
    def write(
        self, name: str, values: Float[Array | np.ndarray, "num_embeddings embedding_dim"]
    ) -> TableStore:
        """Set the rows of one table, in place: the arrays of this store are donated.

        Args:
            name: Name of the table.
            values: ``[num_embeddings, embedding_dim]``; converted to the table's type.

        Raises:
            KeyError: No table has that name.
            ValueError: The shape differs.
        """

    def stored_rows(self, name: str) -> Shaped[Array, "num_embeddings width"] | None:
        """Return the rows of one table as its format stores them, a copy; by default None.

        None where a row is not stored in one piece. A sharded copy of the store then packs the
        rows of `read` again.

        Raises:
            KeyError: No table has that name.
        """
        return None

    @abc.abstractmethod
    def read_state(self, name: str) -> dict[str, Array]:
        """Return the optimizer state of one table's rows, a copy, by the optimizer's names.

        Raises:
            KeyError: No table has that name.
        """

    @abc.abstractmethod
    def write_state(self, name: str, state: Mapping[str, Array | np.ndarray]) -> TableStore:
        """Set the optimizer state of one table's rows, in place: this store is donated.

        Raises:
            KeyError: No table has that name.
            ValueError: The state is not what the table's optimizer keeps.
        """

    # Rows.

    def by_row(self, name: str) -> TableStore:
        """Return the store whose ids of a table are its row numbers; by default this one."""
        return self

    def optimizer_of(self, name: str) -> RowOptimizer:
        """Return the row optimizer of a table.

        Raises:
            KeyError: No table has that name.
        """
        return self.groups[self.row_slots(name, np.zeros(1, np.int64))[0].group].optimizer

    def find_ids(self, name: str, ids: Any, *, is_written: bool = False) -> FoundIds:
        """Return where the rows of some ids of a table are, for reads and writes of some rows.

        The ids of a plain table are its row indices. A store whose ids are something else, or that
        keeps rows outside of its arrays, overrides this.

        Args:
            name: Name of the table.
            ids: The ids as users know them, any array-like ``[n]``.
            is_written: Whether the rows are to be set; each id must then have a row of its own and
                occur once.

        Raises:
            KeyError: No table has that name.
            TypeError: The ids are of another type.
            ValueError: The table has no such id, or an id to be written is repeated.
        """
        sizes = {config.name: config.num_embeddings for config in self.layout.configs}
        if name not in sizes:
            raise KeyError(f"no table is named {name!r}; there are {', '.join(map(repr, sizes))}")
        rows = row_indices(name, ids, sizes[name])
        if is_written:
            check_distinct(name, rows)
        return FoundIds(rows)

    def check_values(self, name: str, rows: np.ndarray) -> None:
        """Raise a ValueError where a table cannot hold elements of rows that are to be set.

        Args:
            name: Name of the table.
            rows: The rows, ``[n, embedding_dim]``.
        """
        return

    @abc.abstractmethod
    def row_slots(self, name: str, rows: np.ndarray) -> list[RowSlots]:
        """Return where some rows of a table are, one `RowSlots` for each of its column slices.

        Args:
            name: Name of the table.
            rows: Row indices, int ``[n]`` within the table.

        Raises:
            KeyError: No table has that name.
        """

    @abc.abstractmethod
    def read_rows(
        self, group: str, slots: Int32[Array, "*devices n"]
    ) -> tuple[Float[Array, "*devices n dim"], dict[str, Array]]:
        """Return some rows of a group with their optimizer state; traced.

        Args:
            group: Name of the group.
            slots: Indices into the group's array, ``[n]``; over a mesh ``[devices, n]``, into each
                device's own array. A slot outside of the array gives zeros.
        """

    @abc.abstractmethod
    def write_rows(
        self,
        group: str,
        slots: Int32[Array, "*devices n"],
        rows: Float[Array, "*devices n dim"],
        state: Mapping[str, Array],
    ) -> TableStore:
        """Set some rows of a group and their optimizer state; traced, in place where donated.

        Args:
            group: Name of the group.
            slots: As for `read_rows`. A slot outside of the array is skipped.
            rows: The rows.
            state: Their state; arrays that it lacks stay as they are.
        """

    def put_rows(self, tree: Any) -> Any:
        """Return host arrays whose axes begin like those of slots, on the devices of the slots."""
        return jax.tree.map(jax.numpy.asarray, tree)

    def spread_rows(self, tree: Any) -> Any:
        """Return constants whose axes begin like those of slots, as `put_rows` does; traced."""
        return jax.tree.map(jax.numpy.asarray, tree)

    def on_every_process(self, tree: Any) -> Any:
        """Return arrays whose axes begin like those of slots, whole on each process; traced."""
        return tree

    def map_slots(self, function: Callable[[Any, Any], Any], per_slot: Any, shared: Any) -> Any:
        """Return ``function(per_slot, shared)``, computed where the slots are; traced.

        Args:
            function: Maps arrays of ``[n, ...]`` and shared arrays to arrays of ``[n, ...]``.
            per_slot: Arrays whose axes begin like those of slots.
            shared: Arrays that all devices have.

        Returns:
            Arrays whose axes begin like those of slots.
        """
        return function(per_slot, shared)

    # Checkpoints.

    @abc.abstractmethod
    def checkpoint_shapes(self, name: str) -> LogicalTable:
        """Return the shapes, types and shardings of `checkpoint_view`, as `jax.ShapeDtypeStruct`.

        Raises:
            KeyError: No table has that name.
        """

    @abc.abstractmethod
    def checkpoint_view(self, name: str) -> LogicalTable:
        """Return one table with its state in row order, a copy, whatever the placement.

        Over a mesh no device has more than its part of it. With several processes all of them call
        it, and each has its devices' parts.

        Raises:
            KeyError: No table has that name.
        """

    @abc.abstractmethod
    def from_checkpoint(self, name: str, logical: LogicalTable, num_rows: int) -> TableStore:
        """Set the first rows of one table and their state, in place: this store is donated.

        Args:
            name: Name of the table.
            logical: Arrays of the `checkpoint_shapes` of the table, though types may differ. State
                that it lacks stays as it is.
            num_rows: Number of rows to set; the others stay as they are.

        Raises:
            KeyError: No table has that name.
        """

    def put_beside(self, tree: Any) -> Any:
        """Return arrays that are used with the tables, put on all of the tables' devices."""
        return tree

    @property
    def placed(self) -> TableStore:
        """The store that has the rows' arrays: this one, or the one within a `WrappingStore`."""
        return self

    def with_placed(self, placed: TableStore) -> TableStore:
        """Return this store with another in the place of `placed`."""
        return placed


StoreFactory: TypeAlias = Callable[[TableLayout, jax.Array], TableStore]
"""Makes a store of fresh tables from their layout and a random key.

A table's first values depend on the key and on the table's name alone.
"""
