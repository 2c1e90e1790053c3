"""`TableStore`: the interface to tables, wherever their rows live."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding
from jaxtyping import Array, Bool, DTypeLike, Float, Int32

from jaxrec.embed.checkpoint_view import LogicalTable, part_rows
from jaxrec.embed.config import TableConfig, find_config, refuse_training
from jaxrec.embed.formats import RowFormat, TableArray
from jaxrec.embed.layout import Group, TableLayout
from jaxrec.embed.row_gradients import (
    Activations,
    Residuals,
    Routes,
    RowGradients,
    group_gradients,
    table_gradient,
    table_squares,
)
from jaxrec.embed.rows import FoundIds, Rows, check_distinct, read, row_indices, rows_per_part
from jaxrec.embed.slots import ONE_DEVICE, RowSlots, SlotDevices, TableRows
from jaxrec.optim.hyperparameters import Step
from jaxrec.ragged import KeyedJaggedArray


class TableStore(abc.ABC):
    """Tables with their optimizer state, wherever their rows live.

    `jaxrec.embed.Tables` keeps them on one device, `jaxrec.mesh.ShardedTables` over a mesh.
    Everything else in jaxrec (collections, `jaxrec.value_and_grad`, `jaxrec.Optimizer`,
    checkpoints) only calls the methods below, so that a store in another package is used like one
    of these: give a collection ``store=`` a `StoreFactory` that makes it.

    Implementors of a store do the following:

    1. Define a frozen dataclass that derives from `TableStore` and is registered as a pytree
       (`jax.tree_util.register_dataclass`). Arrays are leaves, and `layout` is static.
    2. Implement the abstract methods: `lookup`, `update`, `read_rows` and `write_rows`. They are
       traced inside the user's training step. They return new stores and change nothing in place;
       JAX reuses donated buffers. The other methods run outside of `jax.jit`.
    3. Write each row once a step in `update`, however many lookups read it, and leave every row
       alone where ``is_applied`` is False.
    4. Override what the store does in another way, or faster. By default the slots of a table are
       those of the groups of a `TableLayout`, on one device, and whole tables and checkpoints are
       read and written by their rows, over the host. Override `route` if a lookup has to
       communicate before it needs any row, `devices` and `row_slots` if slots lie on several
       devices, and `find_ids` if the ids of a table are not its row indices.

    A store that changes a few methods of another one derives from `jaxrec.embed.WrappingStore`.

    Attributes:
        layout: The tables, and which features read them: a `TableLayout`, or an object with the
            attributes that the inherited methods read. Static and hashable.
    """

    layout: Any

    # The tables.

    @property
    def groups(self) -> dict[str, Group]:
        """Groups by name: tables stored as one array, or over a mesh column slices of tables."""
        return {group.name: group for group in self.layout.groups}

    @property
    def configs(self) -> tuple[TableConfig, ...]:
        """Configurations of the tables as the user gave them, in order."""
        return self.layout.configs

    @property
    def bounds(self) -> dict[str, int]:
        """Number of valid ids of each feature: the rows of the smallest table that it reads."""
        return self.layout.bounds

    @property
    def padding_rows(self) -> dict[str, int]:
        """Row index of each table's padding id, by name, for tables that have such a row.

        `jaxrec.embed.padding` keeps it zeros.
        """
        rows = {config.name: config.padding_id for config in self.configs}
        return {name: row for name, row in rows.items() if row is not None}

    @property
    def devices(self) -> SlotDevices:
        """The devices of the store's slots, and their mesh if there is one."""
        return ONE_DEVICE

    @property
    def without_rows(self) -> TableStore:
        """The same store without arrays, a pytree without leaves, for `Gradients` to carry."""
        # None has no leaves, so nothing is left of the pytree but its static fields.
        return jax.tree.map(lambda leaf: None, self)

    @property
    def placed(self) -> TableStore:
        """The store that has the arrays: this one, or the innermost of wrapping stores."""
        return self

    def with_placed(self, placed: TableStore) -> TableStore:
        """Return this store with another `placed`."""
        return placed

    def formats(self) -> dict[str, RowFormat]:
        """Return the format of each table's stored rows, by name."""
        return {config.name: config.row_format for config in self.configs}

    def num_bytes(self, name: str) -> int:
        """Return the bytes of a table's rows; replicated rows count once.

        Raises:
            KeyError: No table has that name.
        """
        # Every row has the same column slices; row 0 stands for all.
        slices, config = (
            self.row_slots(name, np.zeros(1, np.int64)),
            find_config(self.configs, name),
        )
        # A packed row that is cut by columns has a scale for each slice, so slices are added up.
        widths = [stop - start for start, stop in (part.columns for part in slices)]
        return config.num_embeddings * sum(map(config.row_format.row_bytes, widths))

    # The training step.

    def route(self, features: KeyedJaggedArray) -> Routes:
        """Plan the exchange of a batch's lookup, from its ids alone.

        A training step can call it for the next batch while it computes the current one
        (`jaxrec.train.RoutedSteps`). Tables on one device need no routing: ``{}``.

        Args:
            features: The batch.

        Returns:
            Routes by group, for `lookup`.
        """
        return {}

    def fetch(
        self,
        features: KeyedJaggedArray,
        routes: Routes,
        waiting: Any,
        *,
        is_weighted: bool = False,
        dtype: DTypeLike = "float32",
    ) -> tuple[Routes, Any, Bool[Array, ""]]:
        """Fetch rows for a batch's lookup from other devices, ahead of an update.

        By default nothing is fetched: the lookup reads all rows.

        Args:
            features: The batch.
            routes: Result of `route` for the batch.
            waiting: A pytree of arrays that the step uses next. Where exchanges take turns, the
                returned copy waits for the rows; its values do not change.
            is_weighted: As for `lookup`.
            dtype: As for `lookup`.

        Returns:
            The routes with the rows; ``waiting``; and a boolean that is True once the rows are
            read. Make an update of the tables depend on it, so that it writes no row before.
        """
        return routes, waiting, jnp.array(True)

    def refetch(
        self,
        features: KeyedJaggedArray,
        routes: Routes,
        updated: Sequence[Routes],
        *,
        is_weighted: bool = False,
        dtype: DTypeLike = "float32",
    ) -> Routes:
        """Fetch those rows again that an update changed; return the routes with all rows.

        Args:
            features: The batch.
            routes: Result of `fetch`, from before the update.
            updated: Routes of the lookups whose rows the update wrote.
            is_weighted: As for `lookup`.
            dtype: As for `lookup`.
        """
        return routes

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

    def row_gradients(
        self, residuals: Residuals, cotangents: Activations
    ) -> dict[str, RowGradients]:
        """Return the gradients of the rows of one lookup, by group.

        Args:
            residuals: Residuals that `lookup` returned beside the activations.
            cotangents: The gradient of the loss with respect to the activations.

        Raises:
            TypeError: Tables are for inference.
        """
        refuse_training(self.configs)
        return group_gradients(self.layout, residuals, cotangents)

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
            is_applied: A traced boolean. False leaves every row and its state as it is; None: True.
        """

    def table_squares(
        self, calls: Sequence[dict[str, RowGradients]]
    ) -> dict[str, Float[Array, ""]]:
        """Return the sum of squares of each trained table's gradient, by name.

        The gradients of a row are added up first. `Gradients` call it on `without_rows`, so it
        must not read an array of the store.

        Args:
            calls: Results of `row_gradients`, one for each lookup of the step.
        """
        return table_squares(self.layout.groups, calls)

    def check_dense_gradient(self, name: str) -> None:
        """Raise if a loss must not read this whole table, because of the size of its gradient.

        Raises:
            KeyError: No table has that name.
            TypeError: The gradient would not fit. By default, a store refuses every table.
        """
        raise TypeError(
            f"a loss reads the whole table {name!r}, whose rows do not lie on one device: its "
            "gradient would be as large as the table on every device. Look its rows up through a "
            "feature, or read it outside of the loss if it is not to be trained by this term"
        )

    def dense_gradients(
        self, name: str, gradient: Float[Array, "rows dim"]
    ) -> dict[str, RowGradients]:
        """Return the gradient of a table that a loss read whole, as one lookup of all its rows.

        Args:
            name: Name of the table.
            gradient: ``[num_embeddings, embedding_dim]``.
        """
        return table_gradient(self.layout, name, gradient, self.padding_rows.get(name))

    # Rows. Users name a row by its id, a table by its row index, an array by its slot. `find_ids`
    # goes from ids to row indices, `row_slots` from row indices to slots.

    def rows_of(self, name: str, ids: Any) -> Rows:
        """Return a handle on the rows of some ids, with methods ``read()`` and ``write(values)``.

        Args:
            name: Name of the table.
            ids: The ids as users know them, any array-like ``[n]``. Ids to be written are distinct,
                and each has a row of its own.
        """
        return Rows(self, name, ids)

    def find_ids(self, name: str, ids: Any, *, is_written: bool = False) -> FoundIds:
        """Return the row indices of some ids, for `rows_of`.

        The ids of a plain table are its row indices. A store with other ids, or with rows outside
        of its arrays, overrides this.

        Args:
            name: Name of the table.
            ids: The ids as users know them, any array-like ``[n]``.
            is_written: Whether the rows will be set. Each id must then occur once and have a row
                of its own.

        Raises:
            KeyError: No table has that name.
            TypeError: The ids are of another type.
            ValueError: The table has no such id, or an id to be written is repeated.
        """
        rows = row_indices(name, ids, find_config(self.configs, name).num_embeddings)
        if is_written:
            check_distinct(name, rows)
        return FoundIds(rows)

    def row_slots(self, name: str, rows: np.ndarray) -> list[RowSlots]:
        """Return the slots of some rows of a table, one `RowSlots` for each column slice.

        Args:
            name: Name of the table.
            rows: Row indices, int ``[n]`` within the table.

        Raises:
            KeyError: No table has that name.
        """
        group, number = self.layout.find(name)
        slots = (group.row_offsets[number] + rows).astype(np.int32)
        index = np.arange(slots.size, dtype=np.int32)
        return [RowSlots(group.name, (0, group.dim), slots, index, is_in_order=True)]

    # The two below are all that partial reads, caches, resets, deltas and checkpoints need of a new
    # store: everything else that moves rows has a default that calls them.

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
            state: Arrays of their state by name; those that it lacks stay as they are.
        """

    # Whole tables. These defaults go over the host, by the rows of all row indices; a store with
    # arrays of its own overrides them.

    def read(self, name: str) -> Float[Array, "num_embeddings embedding_dim"]:
        """Return the rows of one table, a copy.

        With several processes all of them call it, and each gets the whole table.

        Raises:
            KeyError: No table has that name.
        """
        return jnp.asarray(self._all_rows(name).read(with_state=False)["rows"])

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
        return self._all_rows(name).write({"rows": values})

    def read_state(self, name: str) -> dict[str, Array]:
        """Return the optimizer state of one table's rows, a copy, by the optimizer's names.

        Raises:
            KeyError: No table has that name.
        """
        state = self._all_rows(name).read()
        del state["rows"]
        return {key: jnp.asarray(array) for key, array in state.items()}

    def write_state(self, name: str, state: Mapping[str, Array | np.ndarray]) -> TableStore:
        """Set the optimizer state of one table's rows, in place: this store is donated.

        Raises:
            KeyError: No table has that name.
            ValueError: The state is not what the table's optimizer keeps.
        """
        check_state(name, self.checkpoint_shapes(name).state, state)
        return self._all_rows(name).write(state)

    def parts(self, name: str, size: int | None = None) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the rows of a table on the host, in order: the first row's index, and the rows.

        With several processes all of them iterate, and each gets all rows.

        Args:
            name: Name of the table.
            size: Number of rows of a part; None: those of 16 MiB in float32.
        """
        config = find_config(self.configs, name)
        size = size or rows_per_part(config.embedding_dim)
        for start in range(0, config.num_embeddings, size):
            rows = np.arange(start, min(start + size, config.num_embeddings))
            yield start, self._part(name, rows)

    def arrays(self, name: str) -> tuple[TableArray, dict[str, TableArray], int] | None:
        """Return arrays that hold a table's rows and their state, and the table's first row there.

        None, the default, if the rows do not lie in order on one device. Callers then use `read`
        and `read_state`.

        Raises:
            KeyError: No table has that name.
        """
        return None

    # Moves between devices.

    def refuse_shard(self) -> str | None:
        """Return why the tables cannot be put on a mesh; None: they can."""
        return None

    def to_one_device(self) -> TableStore:
        """Return these tables on one device, bytes unchanged.

        Raises:
            TypeError: Packed rows that are cut by columns would have to be packed again, or the
                tables lie over several processes.
        """
        return self

    def like(self, other: TableStore) -> TableStore:
        """Return a copy of this store with the rows and the state of another store.

        Formats, placement and settings are those of this store. Rows of the same format are copied
        byte by byte; others are packed, part by part.

        Args:
            other: A store of the same tables, anywhere.

        Raises:
            TypeError: This store cannot take whole tables over.
            ValueError: The format of a table cannot hold one of its elements.
        """
        raise TypeError(f"a {type(self).__name__} takes no tables of other stores over")

    # Checkpoints.

    def checkpoint_shapes(self, name: str) -> LogicalTable:
        """Return the shapes, types and shardings of `checkpoint_view`, as `jax.ShapeDtypeStruct`.

        Raises:
            KeyError: No table has that name.
        """
        (part,) = self.row_slots(name, np.zeros(1, np.int64))
        # One row tells the types and the names of the state; nothing is computed.
        rows, state = jax.eval_shape(lambda slots: self.read_rows(part.group, slots), part.slots)
        padded_rows = part_rows(find_config(self.configs, name).num_embeddings, 1)
        sharding = SingleDeviceSharding(jax.local_devices()[0])

        def shape(row: Any) -> jax.ShapeDtypeStruct:
            sizes = padded_rows, *row.shape[1:]
            return jax.ShapeDtypeStruct(sizes, row.dtype, sharding=sharding)

        return jax.tree.map(shape, LogicalTable(rows, state))

    def checkpoint_view(self, name: str) -> LogicalTable:
        """Return a copy of one table with its state in row order, whatever the placement.

        Over a mesh each device has an equal part of it. With several processes all of them call
        it, and each has its devices' parts.

        Raises:
            KeyError: No table has that name.
        """
        shapes = self.checkpoint_shapes(name)

        def padded(array: Array, shape: jax.ShapeDtypeStruct) -> Array:
            missing = shape.shape[0] - array.shape[0]
            return jnp.pad(array, ((0, missing), *[(0, 0)] * (array.ndim - 1)))

        view = LogicalTable(self.read(name), self.read_state(name))
        return jax.tree.map(padded, view, shapes)

    def from_checkpoint(self, name: str, logical: LogicalTable, num_rows: int) -> TableStore:
        """Set the first rows of one table and their state, in place: this store is donated.

        Args:
            name: Name of the table.
            logical: Arrays of the shapes of `checkpoint_shapes`; types may differ. State that it
                lacks stays as it is.
            num_rows: Number of rows to set; the others stay as they are.

        Raises:
            KeyError: No table has that name.
        """
        arrays = {"rows": logical.rows, **logical.state}
        first = {key: np.asarray(array[:num_rows]) for key, array in arrays.items()}
        return self.rows_of(name, np.arange(num_rows)).write(first)

    def _part(self, name: str, rows: np.ndarray) -> np.ndarray:
        """Copy the rows of some row indices to the host, ``[n, embedding_dim]``."""
        (values,) = read(self, [TableRows(name, rows)], with_state=False).to_host()
        return values["rows"]

    def _all_rows(self, name: str) -> Rows:
        """Return a handle on all rows of a table, whose ids are its row indices."""
        return self.rows_of(name, np.arange(find_config(self.configs, name).num_embeddings))


def check_state(name: str, kept: Mapping[str, object], given: Mapping[str, object]) -> None:
    """Raise a ValueError if ``given`` has other names than the optimizer's state ``kept``."""
    if set(given) != set(kept):
        raise ValueError(f"table {name!r}: its optimizer keeps {sorted(kept)}, got {sorted(given)}")


StoreFactory: TypeAlias = Callable[[TableLayout, jax.Array], TableStore]
"""Function from a layout and a random key to a store of fresh tables.

A table's first values depend on the key and on the table's name alone.
"""
