"""Quantized tables some of whose rows are pruned."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, DTypeLike, Float, Shaped

from jaxrec.embed.checkpoint_view import LogicalTable, part_rows
from jaxrec.embed.config import TableConfig
from jaxrec.embed.formats import RowFormat
from jaxrec.embed.found_ids import FoundIds
from jaxrec.embed.layout import TableLayout, layout_tables
from jaxrec.embed.row_gradients import Activations, Residuals, Routes
from jaxrec.embed.row_slots import RowSlots
from jaxrec.embed.store import TableStore
from jaxrec.embed.wrapping_store import WrappingStore
from jaxrec.optim import frozen
from jaxrec.ragged import KeyedArray, KeyedJaggedArray
from jaxrec.serve.quantized.quantized_tables import QuantizedTables
from jaxrec.serve.quantized.row_map import RowMap


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PrunedTables(WrappingStore):
    """Quantized tables that have rows for some of their ids; the others read zeros.

    FBGEMM's pruning of inference tables: the ids of a batch are mapped to the rows that remain, and
    a pruned id adds nothing to its bag. A mean divides by the number of all ids, pruned ones too.
    The table of ``inner`` has one row of zeros at its end, which pruned ids read.

    Rows are read and written by the ids that they had: the whole table has zeros at pruned ids, a
    checkpoint of a float model restores into it, and rows of pruned ids are left out.

    Attributes:
        inner: `QuantizedTables` of the rows that remain, in the order of `layout`.
        row_maps: For each pruned table, where the rows of its ids are.
        whole: The tables as they were before.
    """

    inner: QuantizedTables
    row_maps: dict[str, RowMap]
    whole: TableLayout = dataclasses.field(metadata={"static": True})

    @classmethod
    def zeros(
        cls,
        configs: Sequence[TableConfig],
        formats: Mapping[str, RowFormat],
        row_maps: Mapping[str, RowMap],
    ) -> PrunedTables:
        """Make tables whose stored bytes are zeros.

        Args:
            configs: The tables, with all their rows.
            formats: The format of each table, by name.
            row_maps: The map of each pruned table, by name.
        """
        remaining = [
            dataclasses.replace(
                config,
                num_embeddings=row_maps[config.name].num_rows + 1,
                feature_names=[_renamed(feature, config) for feature in config.feature_names],
            )
            if config.name in row_maps
            else config
            for config in configs
        ]
        quantized = [
            dataclasses.replace(config, trainable=False, inference_format=formats[config.name])
            for config in configs
        ]
        whole = layout_tables(quantized, frozen())
        return cls(QuantizedTables.zeros(remaining, formats), dict(row_maps), whole)

    @property
    def layout(self) -> TableLayout:
        return self.whole

    @property
    def configs(self) -> tuple[TableConfig, ...]:
        return self.whole.configs

    @property
    def bounds(self) -> dict[str, int]:
        return self.whole.bounds

    # Slots are those of the remaining rows: `row_slots` maps ids to them.

    @property
    def placed(self) -> TableStore:
        return self

    def with_placed(self, placed: TableStore) -> TableStore:  # type: ignore[override]
        return placed

    def refuse_shard(self) -> str:
        names = ", ".join(map(repr, self.row_maps))
        return (
            f"tables {names} are pruned, and pruned tables lie on one device; quantize the model "
            "without prune= to put it on a mesh"
        )

    def row_format(self, name: str) -> RowFormat:
        """Return the format of a table's rows.

        Raises:
            KeyError: No table has that name.
        """
        return self.inner.row_format(name)

    def num_bytes(self, name: str) -> int:
        """Return the number of bytes of a table's rows and of its map.

        Raises:
            KeyError: No table has that name.
        """
        size = self.inner.num_bytes(name)
        return size + (self.row_maps[name].num_bytes if name in self.row_maps else 0)

    def packed_rows(self, name: str) -> Shaped[Array, "num_rows width"]:
        """Return the rows that remain as they are stored, a copy; a row of zeros follows them.

        Raises:
            KeyError: No table has that name.
        """
        return self.inner.packed_rows(name)

    def lookup(
        self,
        features: KeyedJaggedArray,
        *,
        is_weighted: bool = False,
        dtype: DTypeLike = "float32",
        routes: Routes | None = None,
    ) -> tuple[Activations, Residuals]:
        for group in self.whole.groups:
            group.bags(features)  # errors that name features as the batch does
        activations, residuals = self.inner.lookup(
            self._remapped(features), is_weighted=is_weighted, dtype=dtype
        )
        if self.whole.is_pooled:
            pooled = cast(KeyedArray, activations)
            named = dataclasses.replace(pooled, keys=self.whole.output_keys)
            return named, residuals
        rows = cast(dict[str, Array], activations)
        return dict(zip(self.whole.output_keys, rows.values(), strict=True)), residuals

    def _remapped(self, features: KeyedJaggedArray) -> KeyedJaggedArray:
        """Return the features of the inner tables, with rows instead of ids of pruned tables."""
        if features.values.ndim != 1:
            return features  # a batch over a mesh, which the inner tables refuse
        sources: dict[str, tuple[str, RowMap | None]] = {}
        for config in self.whole.configs:
            row_map = self.row_maps.get(config.name)
            for feature in config.feature_names:
                name = feature if row_map is None else _renamed(feature, config)
                sources[name] = (feature, row_map)
        chosen = features.select([feature for feature, _ in sources.values()])
        values, start = jnp.asarray(chosen.values), 0
        segments = []
        for capacity, (_, row_map) in zip(chosen.capacities, sources.values(), strict=True):
            segment = values[start : start + capacity]
            segments.append(segment if row_map is None else row_map.find(segment))
            start += capacity
        return dataclasses.replace(
            chosen, values=jnp.concatenate(segments), keys=tuple(sources), slot_keys=()
        )

    def read(self, name: str) -> Float[Array, "num_embeddings embedding_dim"]:
        rows = self.inner.read(name)
        if name not in self.row_maps:
            return rows
        row_map = self.row_maps[name]
        return rows[row_map.find(jnp.arange(row_map.num_ids, dtype=jnp.int32))]

    def write(
        self, name: str, values: Float[Array | np.ndarray, "num_embeddings embedding_dim"]
    ) -> PrunedTables:
        if name not in self.row_maps:
            return self.with_inner(self.inner.write(name, values))
        group, index = self.whole.find(name)
        expected = (group.tables[index].num_embeddings, group.dim)
        if np.shape(values) != expected:
            raise ValueError(f"table {name!r} has shape {expected}, got {np.shape(values)}")
        host = np.asarray(values)
        self.inner.check_values(name, host)
        kept = host[self.row_maps[name].kept_ids()]
        padded = np.concatenate([kept, np.zeros((1, group.dim), kept.dtype)])
        return self.with_inner(self.inner.write(name, padded))

    def find_ids(self, name: str, ids: Any, *, is_written: bool = False) -> FoundIds:
        found = TableStore.find_ids(self, name, ids, is_written=is_written)
        if is_written and name in self.row_maps:
            row_map = self.row_maps[name]
            is_pruned = row_map.find_on_host(found.rows) == row_map.num_rows
            if is_pruned.any():
                raise ValueError(
                    f"table {name!r}: id {found.rows[int(np.argmax(is_pruned))]} is pruned and has "
                    "no row to be set; leave it out, or quantize the model again"
                )
        return found

    def row_slots(self, name: str, rows: np.ndarray) -> list[RowSlots]:
        if name not in self.row_maps:
            return self.inner.row_slots(name, rows)
        row_map = self.row_maps[name]
        found = row_map.find_on_host(rows)
        is_pruned = found == row_map.num_rows
        # A slot outside of the array reads zeros, and is not written.
        return [
            dataclasses.replace(each, slots=np.where(is_pruned, np.int32(-1), each.slots))
            for each in self.inner.row_slots(name, found)
        ]

    def checkpoint_shapes(self, name: str) -> LogicalTable:
        group, index = self.whole.find(name)
        form = self.inner.checkpoint_shapes(name).rows
        shape = (part_rows(group.tables[index].num_embeddings, 1), group.dim)
        return LogicalTable(jax.ShapeDtypeStruct(shape, form.dtype, sharding=form.sharding), {})

    def checkpoint_view(self, name: str) -> LogicalTable:
        if name not in self.row_maps:
            return self.inner.checkpoint_view(name)
        rows = self.read(name)
        padding = part_rows(rows.shape[0], 1) - rows.shape[0]
        return LogicalTable(jnp.pad(rows, ((0, padding), (0, 0))), {})

    def from_checkpoint(self, name: str, logical: LogicalTable, num_rows: int) -> PrunedTables:
        if name in self.row_maps:
            kept = self.row_maps[name].kept_ids()
            kept = kept[kept < num_rows]
            inner_rows = self.inner.checkpoint_shapes(name).rows.shape[0]
            rows = jnp.asarray(logical.rows)[kept]
            padding = inner_rows - len(kept)
            logical = LogicalTable(jnp.pad(rows, ((0, padding), (0, 0))), {})
            num_rows = len(kept)
        return self.with_inner(self.inner.from_checkpoint(name, logical, num_rows))


def _renamed(feature: str, config: TableConfig) -> str:
    """Return the name of a feature's rows in a pruned table: other tables read the ids."""
    return f"{feature}@{config.name}"
