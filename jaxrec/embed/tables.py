"""Tables on one device."""

# Groups
#
# Tables of one width, format and optimizer lie one under the other in one array, their *group*:
#
#     product  4096 rows    rows    0 to 4095 of [8192, 64]    row_offsets = (0, 4096)
#     user     4096 rows    rows 4096 to 8191
#              padding      row  8192: reads give zeros, writes are dropped; it has no memory
#
# One kernel call looks up all tables of a group, and one updates them: a model with 26 tables of
# one width takes one lookup and one update a step, not 26 of each. Row 8192 leaves a position out
# of a lookup or an update without a change of shapes: batches are padded with it, and in a skipped
# step all lookups are of it.
#
# In place
#
# Tables may fill the device, so that two versions of an array never fit. Methods that change rows
# therefore donate: they are traced in the user's step, which donates the model, or are compiled
# functions here with `donate_argnums`. Whatever would make XLA copy a table is avoided: a choice
# between the old and the new rows (`is_applied`), branches, whole arrays of first values or of host
# data beside the table. A store is immutable all the same: methods return a new one, and the old
# one's buffers are gone.

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, DTypeLike, Float, Int32, Shaped

from jaxrec.embed import kernels
from jaxrec.embed.checkpoint_view import LogicalTable, part_rows, put_rows, take_rows
from jaxrec.embed.config import check_num_rows, find_config, refuse_training
from jaxrec.embed.first_values import initialize_rows, table_key
from jaxrec.embed.formats import PackedRows, TableArray, as_bits, as_table, is_packed, of_bits
from jaxrec.embed.kernels.updates import sweep_rows
from jaxrec.embed.layout import Group, TableLayout
from jaxrec.embed.outputs import (
    flatten,
    join_pooled,
    lookup_weights,
    pool_lookups,
    shares_bags,
    split_rows,
)
from jaxrec.embed.padding import without_padding_ids
from jaxrec.embed.row_gradients import (
    Activations,
    Residuals,
    Routes,
    RowGradients,
    bound_samples,
    group_parts,
    merge,
)
from jaxrec.embed.state import new_state
from jaxrec.embed.store import TableStore, check_state
from jaxrec.optim.hyperparameters import Step, as_step
from jaxrec.ragged import KeyedJaggedArray

# Elements of a host array that are copied to the device at a time: 64 MiB of float32.
_COPY_ELEMENTS = 1 << 24

# Largest gradient, in bytes, of a table that a loss reads whole: it is held in float32 beside the
# table.
MAX_DENSE_GRADIENT_BYTES = 1 << 30


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tables(TableStore):
    """Tables whose rows all lie on one device, trained or stored for inference.

    Attributes:
        rows: By group, its tables one under the other: ``[num_rows, dim]`` in its row format.
        state: By group, the arrays of its optimizer state, each with ``num_rows`` rows.
        layout: The tables in groups, and which features read them.
    """

    rows: dict[str, Float[TableArray, "rows dim"]]
    state: dict[str, dict[str, TableArray]]
    layout: TableLayout = dataclasses.field(metadata={"static": True})

    @classmethod
    def init(cls, layout: TableLayout, key: Array) -> Tables:
        """Make fresh tables. This is a `StoreFactory`.

        Rows are drawn in place, block by block: memory holds the tables and one block.

        Raises:
            ValueError: int32 cannot number the rows of a table.
        """
        check_num_rows(layout.configs)
        rows = {group.name: _init_rows(group, key) for group in layout.groups}
        return cls(rows, _first_state(layout), layout)

    def zeros(self) -> Tables:
        """Return tables of this layout whose stored bytes are zeros, with fresh optimizer state.

        Raises:
            ValueError: int32 cannot number the rows of a table.
        """
        layout = self.layout
        check_num_rows(layout.configs)
        rows = {}
        for group in layout.groups:
            row_format = group.row_format
            zeros = jnp.zeros(row_format.width(group.dim), row_format.dtype)
            bits = kernels.new_rows(zeros, group.num_rows)
            rows[group.name] = as_table(bits, row_format, group.dim)
        return Tables(rows, _first_state(layout), layout)

    @property
    def without_rows(self) -> Tables:
        return dataclasses.replace(self, rows={}, state={})

    def lookup(
        self,
        features: KeyedJaggedArray,
        *,
        is_weighted: bool = False,
        dtype: DTypeLike = "float32",
        routes: Routes | None = None,
    ) -> tuple[Activations, Residuals]:
        _check_batch(features)
        if self.layout.is_pooled:
            features = without_padding_ids(features, self.layout.configs)
        weights = lookup_weights(features, is_weighted, self.layout.configs)
        layouts = {group.name: group.bags(features) for group in self.layout.groups}
        looked_up, lookups = {}, {}
        for group in self.layout.groups:
            name, layout = group.name, layouts[group.name]
            lookups[name] = flatten(features, weights, layout, group)
            if group.is_pooled:
                # Samples that share a bag get copies of its output. The gradients of the copies are
                # added, so output and gradients stay float32 until then.
                wide = "float32" if shares_bags(features, layout) else dtype
                ids, lengths = jnp.asarray(features.values), jnp.asarray(features.lengths)
                looked_up[name], lookups[name] = pool_lookups(
                    self.rows[name],
                    ids,
                    lengths,
                    weights,
                    layout,
                    wide,
                    lookups[name],
                    group.optimizer.is_trained,
                )
            else:
                looked_up[name] = kernels.row_lookup(self.rows[name], lookups[name].rows)
        if self.layout.is_pooled:
            return join_pooled(self.layout, features, layouts, looked_up, lookups, dtype)
        return split_rows(self.layout, features, layouts, looked_up, lookups, dtype)

    def update(
        self,
        calls: Sequence[dict[str, RowGradients]],
        step: Step | int,
        is_applied: Bool[Array, ""] | None = None,
    ) -> Tables:
        refuse_training(self.configs)
        step = as_step(step)
        # One pass over a group: all calls' lookups become one list, so that a row that two features
        # or two micro-batches read is written once.
        rows, state = dict(self.rows), dict(self.state)
        parts = group_parts(calls)
        for group in self.layout.groups:
            if group.name not in parts or not group.optimizer.is_trained:
                continue
            bounded, optimizer = bound_samples(parts[group.name], group.optimizer)
            gradient = dataclasses.replace(merge(bounded), is_applied=is_applied)
            lookups = gradient.lookups
            # In a skipped step every lookup is of padding.
            written = gradient.rows_to_write(lookups.rows, group.num_rows)
            updated, state[group.name] = kernels.fused_update(
                self.rows[group.name],
                self.state[group.name],
                dataclasses.replace(lookups, rows=written),
                gradient.values,
                optimizer.of_batch,
                step,
                group.row_offsets,
            )
            rows[group.name] = sweep_rows(updated, optimizer, step, is_applied)
        return dataclasses.replace(self, rows=rows, state=state)

    def check_dense_gradient(self, name: str) -> None:
        refuse_training(self.configs)
        group, rows = self.find(name)
        size = (rows.stop - rows.start) * group.dim * 4
        if size > MAX_DENSE_GRADIENT_BYTES:
            raise TypeError(
                f"a loss reads the whole table {name!r}, whose gradient takes {size:,} bytes, more "
                f"than {MAX_DENSE_GRADIENT_BYTES:,}. Look up the rows that the loss needs through "
                "a feature (sampled negatives, the rows of the batch), or read the table outside "
                "of the loss if it is not to be trained by this term"
            )

    def read(self, name: str) -> Float[Array, "num_embeddings embedding_dim"]:
        group, rows = self.find(name)
        return copy_rows(self.rows[group.name], rows)

    def write(
        self, name: str, values: Float[Array | np.ndarray, "num_embeddings embedding_dim"]
    ) -> Tables:
        group, rows = self.find(name)
        _check_shape(values, (rows.stop - rows.start, group.dim), f"table {name!r}")
        find_config(self.configs, name).check_rows(f"table {name!r}, ", values)
        array = _write(self.rows[group.name], rows, values, f"table {name!r}")
        return dataclasses.replace(self, rows=self.rows | {group.name: array})

    def read_state(self, name: str) -> dict[str, Array]:
        group, rows = self.find(name)
        return {key: copy_rows(array, rows) for key, array in self.state[group.name].items()}

    def write_state(self, name: str, state: Mapping[str, Array | np.ndarray]) -> Tables:
        group, rows = self.find(name)
        arrays = self.state[group.name]
        check_state(name, arrays, state)
        arrays = {
            key: _write(array, rows, state[key], f"state {key!r} of table {name!r}")
            for key, array in arrays.items()
        }
        return dataclasses.replace(self, state=self.state | {group.name: arrays})

    def read_rows(
        self, group: str, slots: Int32[Array, " n"]
    ) -> tuple[Float[Array, "n dim"], dict[str, Array]]:
        return read_slots(self.rows[group], self.state[group], slots)

    def write_rows(
        self,
        group: str,
        slots: Int32[Array, " n"],
        rows: Float[Array, "n dim"],
        state: Mapping[str, Array],
    ) -> Tables:
        new_rows, new_state = write_slots(self.rows[group], self.state[group], slots, rows, state)
        return dataclasses.replace(
            self, rows=self.rows | {group: new_rows}, state=self.state | {group: new_state}
        )

    def checkpoint_shapes(self, name: str) -> LogicalTable:
        group, rows = self.find(name)
        # A checkpoint pads rows to a size that does not depend on the placement: one part here.
        padded_rows = part_rows(rows.stop - rows.start, 1)

        def shape(array: TableArray) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(
                (padded_rows, *array.shape[1:]), array.dtype, sharding=array.sharding
            )

        stored = LogicalTable(self.rows[group.name], self.state[group.name])
        return jax.tree.map(shape, stored, is_leaf=is_packed)

    def checkpoint_view(self, name: str) -> LogicalTable:
        group, rows = self.find(name)
        count = rows.stop - rows.start
        # First row and count are arrays, not Python numbers: tables of one padded size share a
        # compiled program.
        take = functools.partial(
            take_rows,
            first=jnp.int32(rows.start),
            count=jnp.int32(count),
            padded_rows=part_rows(count, 1),
        )
        stored = LogicalTable(self.rows[group.name], self.state[group.name])
        return jax.tree.map(take, stored, is_leaf=is_packed)

    def from_checkpoint(self, name: str, logical: LogicalTable, num_rows: int) -> Tables:
        group, rows = self.find(name)
        find_config(self.configs, name).check_rows(f"table {name!r}, saved ", logical.rows)
        first, count = jnp.int32(rows.start), jnp.int32(num_rows)

        # From the host, since a program makes committed arrays of committed ones, as Orbax's are: a
        # training step would be compiled for the restored model, and again for its results. Not
        # with memory of its own: the card would hold a table twice beside the new one.
        def put(array: TableArray, values: Array) -> TableArray:
            is_on_host = all(each.platform == "cpu" for each in jnp.asarray(values).devices())
            return put_rows(array, np.asarray(values) if is_on_host else values, first, count)

        state = dict(self.state[group.name])
        state |= {key: put(state[key], array) for key, array in logical.state.items()}
        return dataclasses.replace(
            self,
            rows=self.rows | {group.name: put(self.rows[group.name], logical.rows)},
            state=self.state | {group.name: state},
        )

    def arrays(self, name: str) -> tuple[TableArray, dict[str, TableArray], int]:
        group, rows = self.find(name)
        return self.rows[group.name], self.state[group.name], rows.start

    def write_stored(
        self, name: str, values: Shaped[Array | np.ndarray, "num_embeddings width"]
    ) -> Tables:
        """Set a table's rows from stored bytes, in place: the tables are donated."""
        group, rows = self.find(name)
        array = self.rows[group.name]
        new: Any = _write(stored(array), rows, values, f"table {name!r}, as it is stored,")
        if isinstance(array, PackedRows):
            new = array.with_stored(new)
        return dataclasses.replace(self, rows=self.rows | {group.name: new})

    def like(self, other: TableStore) -> Tables:
        # Zeros, not first values: every row is overwritten, and drawing them takes longer.
        filled = self.zeros()
        theirs = {config.name: config for config in other.configs}
        for config in self.configs:
            name, arrays = config.name, other.arrays(config.name)
            if arrays is not None and config.stores_like(theirs[name]):
                # Bytes, not floats: packing again could round a packed row a second time.
                rows, _, first = arrays
                bits = stored(rows)[first : first + config.num_embeddings]
                filled = filled.write_stored(name, bits)
            else:
                filled = filled.pack_parts(name, other.parts(name))
            if filled.state[self.layout.find(name)[0].name]:
                filled = filled.write_state(name, other.read_state(name))
        return filled

    def pack_parts(self, name: str, parts: Iterable[tuple[int, np.ndarray]]) -> Tables:
        """Set a table's rows part by part, in place: the tables are donated.

        Args:
            name: Name of the table.
            parts: As `TableStore.parts` yields them. Parts of one size share a compiled program.

        Raises:
            ValueError: The table's format cannot hold an element.
        """
        group, rows = self.find(name)
        array = self.rows[group.name]
        for start, part in parts:
            find_config(self.configs, name).check_rows(f"table {name!r}, ", part, start)
            array = write_part(array, part, jnp.int32(rows.start + start))
        return dataclasses.replace(self, rows=self.rows | {group.name: array})

    def find(self, name: str) -> tuple[Group, slice]:
        """Return the group of a table, and the slice of the group's rows that is the table."""
        group, index = self.layout.find(name)
        start = group.row_offsets[index]
        return group, slice(start, start + group.tables[index].num_embeddings)


def copy_rows(array: Shaped[TableArray, "rows ..."], rows: slice) -> Shaped[Array, "n ..."]:
    """Copy some rows of an array, so that donating the array later does not delete them."""
    part = array[rows]
    # JAX returns the array itself for a slice of all rows, and the next step donates that.
    return jnp.copy(part) if part is array else part


def stored(array: TableArray) -> Array:
    """Return the array that is stored: a plain array itself, or the bytes of packed rows."""
    return array.stored if isinstance(array, PackedRows) else array


def read_slots(
    rows: Float[TableArray, "rows dim"],
    state: Mapping[str, TableArray],
    slots: Int32[Array, " n"],
) -> tuple[Float[Array, "n dim"], dict[str, Array]]:
    """Return the rows of some slots and their state; slots outside of the array give zeros."""

    def read(array: TableArray) -> Array:
        # JAX would count a negative index from the end. The index of padding gives zeros.
        is_outside = (slots < 0) | (slots >= array.shape[0])
        index = jnp.where(is_outside, array.shape[0], slots)
        if array.ndim == 2 and not is_packed(array):
            return kernels.row_lookup(array, index)
        return array.at[index].get(mode="fill", fill_value=0)

    return read(rows), {key: read(array) for key, array in state.items()}


def write_slots(
    rows: Shaped[TableArray, "rows dim"],
    state: Mapping[str, TableArray],
    slots: Int32[Array, " n"],
    new_rows: Shaped[Array, "n dim"],
    new_state: Mapping[str, Array],
) -> tuple[Shaped[TableArray, "rows dim"], dict[str, TableArray]]:
    """Set the rows of some slots and their state; slots outside of the array are skipped."""

    def write(array: TableArray, values: Array) -> TableArray:
        # Past the end, where "drop" skips it; JAX would count a negative index from the end.
        index = jnp.where(slots < 0, array.shape[0], slots)
        new = as_bits(values.astype(array.dtype))
        return of_bits(as_bits(array).at[index].set(new, mode="drop"), array.dtype)

    written = {key: write(state[key], values) for key, values in new_state.items()}
    return write(rows, new_rows), dict(state) | written


def _check_batch(features: KeyedJaggedArray) -> None:
    if features.values.ndim != 1:
        raise ValueError(
            f"the batch has values of shape {tuple(features.values.shape)}, with an axis over the "
            "devices of a mesh, but the tables are on one device; put the model on the mesh with "
            "jaxrec.shard(model, plan, mesh), or give it the batch as it was before shard_batch"
        )


def _init_rows(group: Group, key: Array) -> Float[TableArray, "rows dim"]:
    """Make a group's rows with the first values of its tables."""
    row_format = group.row_format
    # `kernels.new_rows` gives the native library the choice of memory: huge pages, in which random
    # reads miss the TLB less often.
    zeros = row_format.pack(jnp.zeros((1, group.dim)))[0]
    rows = as_table(kernels.new_rows(zeros, group.num_rows), row_format, group.dim)
    for table, offset in zip(group.tables, group.row_offsets, strict=True):
        rows = initialize_rows(
            rows, table_key(key, table.name), table.initializer, offset, table.num_embeddings
        )
    return rows


def _first_state(layout: TableLayout) -> dict[str, dict[str, TableArray]]:
    """Return the optimizer state of fresh rows, by group and by name."""

    def equal_rows(row: np.ndarray, num_rows: int) -> Array:
        return kernels.new_rows(jnp.asarray(row), num_rows)

    return {
        group.name: new_state(
            group.optimizer, group.dim, functools.partial(equal_rows, num_rows=group.num_rows)
        )
        for group in layout.groups
    }


def _check_shape(values: Array | np.ndarray, expected: tuple[int, ...], what: str) -> None:
    if np.shape(values) != expected:
        raise ValueError(f"{what} has shape {expected}, got {np.shape(values)}")


def _write(array: TableArray, rows: slice, values: Array | np.ndarray, what: str) -> TableArray:
    """Set some rows of an array, in place; an error calls the values ``what``."""
    expected = (rows.stop - rows.start, *array.shape[1:])
    _check_shape(values, expected, what)
    if not isinstance(values, jax.Array):
        values = np.asarray(values)
    # A host array, perhaps a memory map, is copied in steps: a whole copy of it on the device would
    # double the table's memory.
    step = max(1, _COPY_ELEMENTS // max(1, int(np.prod(array.shape[1:]))))
    for start in range(0, expected[0], step):
        part = jnp.asarray(values[start : start + step], array.dtype)
        array = write_part(array, part, jnp.int32(rows.start + start))
    return array


@functools.partial(jax.jit, donate_argnums=0)
def write_part(
    array: Shaped[TableArray, "rows ..."], part: Shaped[Array, "n ..."], start: Int32[Array, ""]
) -> Shaped[TableArray, "rows ..."]:
    """Set the rows from ``start`` on to ``part``, in place: the array is donated."""
    # Consecutive rows are one copy of memory; a scatter would go row by row.
    if isinstance(array, PackedRows):
        packed = array.row_format.pack(part)
        return array.with_stored(
            jax.lax.dynamic_update_slice_in_dim(array.stored, packed, start, 0)
        )
    return jax.lax.dynamic_update_slice_in_dim(array, part.astype(array.dtype), start, 0)
