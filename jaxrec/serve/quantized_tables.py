"""Tables of packed rows on one device, for inference."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, DTypeLike, Float, Int32, Shaped

from jaxrec.embed import kernels
from jaxrec.embed.checkpoint_view import LogicalTable, part_rows, put_rows
from jaxrec.embed.config import TableConfig, check_num_rows
from jaxrec.embed.formats import RowFormat
from jaxrec.embed.formats.plain import PlainRows
from jaxrec.embed.layout import Group, TableLayout, layout_tables
from jaxrec.embed.lookup import flatten, join_pooled, lookup_weights, pool, shares_bags, split_rows
from jaxrec.embed.row_gradients import Activations, Residuals, Routes, RowGradients
from jaxrec.embed.row_slots import RowSlots
from jaxrec.embed.store import TableStore
from jaxrec.embed.tables import check_state, write_slots
from jaxrec.optim import RowOptimizer, frozen
from jaxrec.optim.hyperparameter import Step
from jaxrec.ragged import KeyedJaggedArray
from jaxrec.serve.packing import write_parts
from jaxrec.serve.rows import check_rows


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizedTables(TableStore):
    """Tables whose rows are stored in a `RowFormat` and looked up straight from it.

    They are read in float32. Rows that are written are packed. `update` and the gradients of rows
    are refused: quantized tables are for inference.

    Attributes:
        rows: Packed rows of each group, ``[num_rows, width]``.
        layout: The tables in groups of one width and format, none of them trained.
        formats: The format of each of the layout's groups, in their order.
    """

    rows: dict[str, Shaped[Array, "rows width"]]
    layout: TableLayout = dataclasses.field(metadata={"static": True})
    formats: tuple[RowFormat, ...] = dataclasses.field(metadata={"static": True})

    @classmethod
    def zeros(
        cls, configs: Sequence[TableConfig], formats: Mapping[str, RowFormat]
    ) -> QuantizedTables:
        """Make tables whose stored bytes are zeros.

        Args:
            configs: The tables.
            formats: The format of each table, by name.

        Raises:
            ValueError: int32 cannot number the rows of a table.
        """
        check_num_rows(configs)
        configs = [dataclasses.replace(config, trainable=False) for config in configs]
        layout = layout_tables(configs, frozen(), apart=lambda table: formats[table.name])
        of_groups = tuple(formats[group.tables[0].name] for group in layout.groups)
        groups = tuple(
            dataclasses.replace(group, name=f"{row_format.name}_{group.name}")
            for group, row_format in zip(layout.groups, of_groups, strict=True)
        )
        rows = {
            group.name: kernels.new_rows(
                jnp.zeros(row_format.width(group.dim), row_format.dtype), group.num_rows
            )
            for group, row_format in zip(groups, of_groups, strict=True)
        }
        return cls(rows, dataclasses.replace(layout, groups=groups), of_groups)

    @property
    def row_optimizers(self) -> tuple[RowOptimizer, ...]:
        return tuple(group.optimizer for group in self.layout.groups)

    @property
    def without_rows(self) -> QuantizedTables:
        return dataclasses.replace(self, rows={})

    def row_format(self, name: str) -> RowFormat:
        """Return the format of a table's rows.

        Raises:
            KeyError: No table has that name.
        """
        return self._format(self.layout.find(name)[0].name)

    def num_bytes(self, name: str) -> int:
        """Return the number of bytes of a table's rows.

        Raises:
            KeyError: No table has that name.
        """
        group, rows = self._find(name)
        return self._format(group.name).row_bytes(group.dim) * (rows.stop - rows.start)

    def packed_rows(self, name: str) -> Shaped[Array, "num_embeddings width"]:
        """Return the rows of a table as they are stored, a copy.

        Raises:
            KeyError: No table has that name.
        """
        group, rows = self._find(name)
        return self.rows[group.name][rows]

    def lookup(
        self,
        features: KeyedJaggedArray,
        *,
        is_weighted: bool = False,
        dtype: DTypeLike = "float32",
        routes: Routes | None = None,
    ) -> tuple[Activations, Residuals]:
        if features.values.ndim != 1:
            raise ValueError(
                f"the batch has values of shape {tuple(features.values.shape)}, with an axis over "
                "the devices of a mesh, but quantized tables are on one device; give them the "
                "batch as it was before shard_batch"
            )
        weights = lookup_weights(features, is_weighted)
        layouts = {group.name: group.bags(features) for group in self.layout.groups}
        looked_up = {}
        for group in self.layout.groups:
            layout = layouts[group.name]
            if group.is_pooled:
                wide = "float32" if shares_bags(features, layout) else dtype
                looked_up[group.name] = self._pool(group, features, weights, layout, wide)
            else:
                flat = flatten(features, None, layout, group)
                looked_up[group.name] = self._look_up(group, flat.rows, dtype)
        if self.layout.is_pooled:
            return join_pooled(self.layout, features, layouts, looked_up, {}, dtype)
        return split_rows(self.layout, layouts, looked_up, {}, dtype)

    def _pool(
        self,
        group: Group,
        features: KeyedJaggedArray,
        weights: Float[Array, " capacity"] | None,
        layout: kernels.BagLayout,
        dtype: DTypeLike,
    ) -> Float[Array, "bags dim"]:
        rows, row_format = self.rows[group.name], self._format(group.name)
        ids, lengths = jnp.asarray(features.values), jnp.asarray(features.lengths)
        if isinstance(row_format, PlainRows):
            return pool(rows, ids, lengths, weights, layout, dtype)
        return kernels.packed_pooled_lookup(
            rows, ids, lengths, weights, layout, row_format, group.dim, dtype
        )

    def _look_up(
        self, group: Group, slots: Int32[Array, " n"], dtype: DTypeLike
    ) -> Float[Array, "n dim"]:
        rows, row_format = self.rows[group.name], self._format(group.name)
        if isinstance(row_format, PlainRows):
            return kernels.row_lookup(rows, slots).astype(dtype)
        return kernels.packed_row_lookup(rows, slots, row_format, group.dim, dtype)

    def _refuse_update(self) -> NoReturn:
        formats = ", ".join(
            f"{config.name!r} ({self.row_format(config.name).name})" for config in self.configs
        )
        raise TypeError(
            f"tables {formats} are quantized for inference and cannot be trained; train the model "
            "that jaxrec.serve.quantize was given, and quantize it again"
        )

    def row_gradients(
        self, residuals: Residuals, cotangents: Activations
    ) -> dict[str, RowGradients]:
        self._refuse_update()

    def update(
        self,
        calls: Sequence[dict[str, RowGradients]],
        step: Step | int,
        is_applied: Bool[Array, ""] | None = None,
    ) -> QuantizedTables:
        self._refuse_update()

    def table_squares(
        self, calls: Sequence[dict[str, RowGradients]]
    ) -> dict[str, Float[Array, ""]]:
        self._refuse_update()

    def check_dense_gradient(self, name: str) -> None:
        self._refuse_update()

    def read(self, name: str) -> Float[Array, "num_embeddings embedding_dim"]:
        group, _ = self._find(name)
        return self._format(group.name).unpack(self.packed_rows(name), group.dim)

    def write(
        self, name: str, values: Float[Array | np.ndarray, "num_embeddings embedding_dim"]
    ) -> QuantizedTables:
        group, rows = self._find(name)
        expected = (rows.stop - rows.start, group.dim)
        if np.shape(values) != expected:
            raise ValueError(f"table {name!r} has shape {expected}, got {np.shape(values)}")
        row_format, host = self._format(group.name), np.asarray(values)
        array = write_parts(self.rows[group.name], row_format, name, [(0, host)], rows.start)
        return self._with_rows(group.name, array)

    def read_state(self, name: str) -> dict[str, Array]:
        self.layout.find(name)
        return {}

    def write_state(self, name: str, state: Mapping[str, Array | np.ndarray]) -> QuantizedTables:
        self.layout.find(name)
        check_state(name, {}, state)
        return self

    def check_values(self, name: str, rows: np.ndarray) -> None:
        check_rows(self.row_format(name), f"table {name!r}, given ", rows, 0)

    def row_slots(self, name: str, rows: np.ndarray) -> list[RowSlots]:
        group, where = self._find(name)
        slots = (where.start + rows).astype(np.int32)
        return [RowSlots(group.name, (0, group.dim), slots, np.arange(slots.size, dtype=np.int32))]

    def read_rows(
        self, group: str, slots: Int32[Array, " n"]
    ) -> tuple[Float[Array, "n dim"], dict[str, Array]]:
        this = self.groups[group]
        is_slot = (slots >= 0) & (slots < this.num_rows)
        return self._look_up(this, jnp.where(is_slot, slots, this.num_rows), "float32"), {}

    def write_rows(
        self,
        group: str,
        slots: Int32[Array, " n"],
        rows: Float[Array, "n dim"],
        state: Mapping[str, Array],
    ) -> QuantizedTables:
        packed = self._format(group).pack(rows)
        array, _ = write_slots(self.rows[group], {}, slots, packed, {})
        return self._with_rows(group, array)

    def checkpoint_shapes(self, name: str) -> LogicalTable:
        group, index = self.layout.find(name)
        shape = (part_rows(group.tables[index].num_embeddings, 1), group.dim)
        sharding = self.rows[group.name].sharding
        return LogicalTable(jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding), {})

    def checkpoint_view(self, name: str) -> LogicalTable:
        rows = self.read(name)
        padded_rows = part_rows(rows.shape[0], 1)
        return LogicalTable(jnp.pad(rows, ((0, padded_rows - rows.shape[0]), (0, 0))), {})

    def from_checkpoint(self, name: str, logical: LogicalTable, num_rows: int) -> QuantizedTables:
        group, rows = self._find(name)
        row_format = self._format(group.name)
        if not jnp.all(jnp.abs(logical.rows) <= row_format.max_abs):
            check_rows(row_format, f"table {name!r}, saved ", np.asarray(logical.rows), 0)
        packed = jax.jit(row_format.pack)(logical.rows)
        array = put_rows(self.rows[group.name], packed, jnp.int32(rows.start), jnp.int32(num_rows))
        return self._with_rows(group.name, array)

    def _with_rows(self, group: str, array: Shaped[Array, "rows width"]) -> QuantizedTables:
        return dataclasses.replace(self, rows=self.rows | {group: array})

    def _format(self, group: str) -> RowFormat:
        names = [each.name for each in self.layout.groups]
        return self.formats[names.index(group)]

    def _find(self, name: str) -> tuple[Group, slice]:
        """Return the group of a table, and the table's rows in it."""
        group, index = self.layout.find(name)
        start = group.row_offsets[index]
        return group, slice(start, start + group.tables[index].num_embeddings)
