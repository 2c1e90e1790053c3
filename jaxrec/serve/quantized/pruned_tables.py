"""Quantized tables with some rows pruned, and the map from ids to the rows that remain."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, DTypeLike, Float, Int32, UInt32

from jaxrec.embed.checkpoint_view import LogicalTable, part_rows
from jaxrec.embed.config import TableConfig
from jaxrec.embed.formats import RowFormat, TableArray
from jaxrec.embed.layout import TableLayout, inference_layout
from jaxrec.embed.padding import without_padding_ids
from jaxrec.embed.row_gradients import Activations, Residuals, Routes
from jaxrec.embed.rows import FoundIds, rows_per_part
from jaxrec.embed.slots import RowSlots
from jaxrec.embed.store import TableStore
from jaxrec.embed.tables import Tables
from jaxrec.embed.wrapping_store import WrappingStore
from jaxrec.ragged import KeyedArray, KeyedJaggedArray
from jaxrec.ragged.bounds import BAD_ID

_WORD_BITS = 32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowMap:
    """Map from the ids of a pruned table to the rows that remain, which keep their order.

    The row of an id is the number of ids before it that have rows: ``before`` of its word, plus the
    set bits of ``kept`` below its own bit.

    Attributes:
        kept: ``[words]`` bit ``id % 32`` of word ``id // 32`` is set if the id has a row.
        before: ``[words]`` number of rows of the ids of all earlier words.
        num_ids: Number of ids.
        num_rows: Number of rows that remain.
    """

    # Two bits an id. An array of row numbers would take 32, as much as 16 codes of an int2 row.
    kept: UInt32[Array, " words"]
    before: Int32[Array, " words"]
    num_ids: int = dataclasses.field(metadata={"static": True})
    num_rows: int = dataclasses.field(metadata={"static": True})

    @classmethod
    def of_kept(cls, is_kept: Bool[np.ndarray, " ids"]) -> RowMap:
        """Make the map of a table from whether each id keeps its row."""
        words = -(-is_kept.size // _WORD_BITS)
        bits = np.zeros(words * _WORD_BITS, np.bool_)
        bits[: is_kept.size] = is_kept
        kept = np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32)
        counts = np.bitwise_count(kept).astype(np.int32)
        before = np.cumsum(counts, dtype=np.int32) - counts
        return cls(jnp.asarray(kept), jnp.asarray(before), int(is_kept.size), int(np.sum(is_kept)))

    @classmethod
    def zeros(cls, num_ids: int, num_rows: int) -> RowMap:
        """Make a map whose arrays are yet to be set."""
        words = -(-num_ids // _WORD_BITS)
        return cls(jnp.zeros(words, jnp.uint32), jnp.zeros(words, jnp.int32), num_ids, num_rows)

    def find(self, ids: Int32[Array, " n"]) -> Int32[Array, " n"]:
        """Return the row of each id: ``num_rows`` if pruned, `BAD_ID` if it is no id; traced."""
        return _find(jnp, self.kept, self.before, ids, self.num_ids, self.num_rows)

    def find_on_host(self, ids: np.ndarray) -> np.ndarray:
        """Return what `find` returns for ids ``[n]``, computed by NumPy."""
        kept, before = np.asarray(self.kept), np.asarray(self.before)
        return _find(np, kept, before, ids.astype(np.int32), self.num_ids, self.num_rows)

    def kept_ids(self) -> np.ndarray:
        """Return the ids that have rows, ascending, int64 ``[num_rows]``."""
        as_bytes = np.asarray(self.kept).astype("<u4").view(np.uint8)
        return np.flatnonzero(np.unpackbits(as_bytes, bitorder="little"))

    @property
    def num_bytes(self) -> int:
        """Number of bytes of the map."""
        return int(self.kept.nbytes + self.before.nbytes)


def _find(xp: Any, kept: Any, before: Any, ids: Any, num_ids: int, num_rows: int) -> Any:
    is_id = (ids >= 0) & (ids < num_ids)
    words = xp.where(is_id, ids, 0) // _WORD_BITS
    word = kept[words]
    bit = xp.left_shift(xp.uint32(1), (ids % _WORD_BITS).astype(xp.uint32))
    below = xp.bitwise_count(word & (bit - xp.uint32(1))).astype(xp.int32)
    row = xp.where((word & bit) != 0, before[words] + below, xp.int32(num_rows))
    return xp.where(is_id, row, xp.int32(BAD_ID))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PrunedTables(WrappingStore):
    """Quantized tables that have rows for some of their ids; the other ids read zeros.

    FBGEMM's pruning of inference tables: the ids of a batch are mapped to the rows that remain, and
    a pruned id adds nothing to its bag. A mean divides by the number of all ids, pruned ones too.
    The table of ``inner`` has one row of zeros at its end, which pruned ids read.

    Rows are read and written by their original ids: the whole table has zeros at pruned ids, a
    checkpoint of a float model restores into it, and rows of pruned ids are left out.

    Attributes:
        inner: `jaxrec.embed.Tables` of the rows that remain, in the order of `layout`.
        row_maps: Map of each pruned table, by name.
        whole: Layout of the tables with all rows.
    """

    inner: Tables
    row_maps: dict[str, RowMap]
    whole: TableLayout = dataclasses.field(metadata={"static": True})

    @classmethod
    def of(
        cls,
        configs: Sequence[TableConfig],
        formats: Mapping[str, RowFormat],
        row_maps: Mapping[str, RowMap],
    ) -> PrunedTables:
        """Make tables without arrays, which `like` and `zeros` fill.

        Args:
            configs: The tables, with all their rows.
            formats: The format of each table, by name.
            row_maps: The map of each pruned table, by name.
        """
        remaining = [
            dataclasses.replace(
                config,
                # One more for the row of zeros: a pruned id is then a lookup as any other, without
                # a mask.
                num_embeddings=row_maps[config.name].num_rows + 1,
                padding_id=None,
                feature_names=[_renamed(feature, config) for feature in config.feature_names],
            )
            if config.name in row_maps
            else dataclasses.replace(config, padding_id=None)
            for config in configs
        ]
        inner = Tables({}, {}, inference_layout(remaining, formats))
        return cls(inner, dict(row_maps), inference_layout(configs, formats))

    def zeros(self) -> PrunedTables:
        """Return these tables with all bytes of their rows 0."""
        return self.with_inner(self.inner.zeros())

    @property
    def layout(self) -> TableLayout:
        return self.whole

    @property
    def configs(self) -> tuple[TableConfig, ...]:
        return self.whole.configs

    @property
    def bounds(self) -> dict[str, int]:
        return self.whole.bounds

    def formats(self) -> dict[str, RowFormat]:
        return TableStore.formats(self)

    # Slots are those of the remaining rows: `row_slots` maps ids to them.

    @property
    def placed(self) -> TableStore:
        return self

    def with_placed(self, placed: TableStore) -> TableStore:
        return placed

    def refuse_shard(self) -> str:
        names = ", ".join(map(repr, self.row_maps))
        return (
            f"tables {names} are pruned, and pruned tables lie on one device; quantize the model "
            "without prune= to put it on a mesh"
        )

    def num_bytes(self, name: str) -> int:
        """Return the number of bytes of a table's rows and of its map."""
        size = self.inner.num_bytes(name)
        return size + (self.row_maps[name].num_bytes if name in self.row_maps else 0)

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
        # Here, where ids are those of the whole tables. A padding id that is looked up by itself
        # reads its row, which is zeros or pruned.
        if self.whole.is_pooled and features.values.ndim == 1:
            features = without_padding_ids(features, self.configs)
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
        """Return a batch for the inner tables: ids of pruned tables are replaced by their rows."""
        if features.values.ndim != 1:
            return features  # a batch over a mesh, which the inner tables refuse
        # A feature that several tables read has other rows in each pruned one, so it becomes one
        # feature per pruned table.
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
        config = group.tables[index]
        expected = (config.num_embeddings, group.dim)
        if np.shape(values) != expected:
            raise ValueError(f"table {name!r} has shape {expected}, got {np.shape(values)}")
        host = np.asarray(values)
        config.check_rows(f"table {name!r}, given ", host)
        kept = host[self.row_maps[name].kept_ids()]
        padded = np.concatenate([kept, np.zeros((1, group.dim), kept.dtype)])
        return self.with_inner(self.inner.write(name, padded))

    def parts(self, name: str, size: int | None = None) -> Iterator[tuple[int, np.ndarray]]:
        return TableStore.parts(self, name, size)

    def arrays(self, name: str) -> tuple[TableArray, dict[str, TableArray], int] | None:
        return None if name in self.row_maps else self.inner.arrays(name)

    def to_one_device(self) -> PrunedTables:
        return self

    def like(self, other: TableStore) -> PrunedTables:
        """Return a copy with another store's rows of the ids that are not pruned here."""
        inner = self.inner.zeros()
        for config in self.configs:
            parts = other.parts(config.name)
            if config.name in self.row_maps:
                parts = _kept_parts(parts, self.row_maps[config.name], config)
            inner = inner.pack_parts(config.name, parts)
        return self.with_inner(inner)

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
        return _padded(rows, part_rows(rows.shape[0], 1))

    def from_checkpoint(self, name: str, logical: LogicalTable, num_rows: int) -> PrunedTables:
        if name in self.row_maps:
            kept = self.row_maps[name].kept_ids()
            kept = kept[kept < num_rows]
            inner_rows = self.inner.checkpoint_shapes(name).rows.shape[0]
            logical = _padded(jnp.asarray(logical.rows)[kept], inner_rows)
            num_rows = len(kept)
        return self.with_inner(self.inner.from_checkpoint(name, logical, num_rows))


def _padded(rows: Float[Array, "rows dim"], count: int) -> LogicalTable:
    """Return rows, padded with zeros to ``count`` rows, as a `LogicalTable` without state."""
    return LogicalTable(jnp.pad(rows, ((0, count - rows.shape[0]), (0, 0))), {})


def row_maps_of(store: TableStore) -> dict[str, RowMap]:
    """Return the map of each pruned table of a store, by name."""
    return store.row_maps if isinstance(store, PrunedTables) else {}


def _renamed(feature: str, config: TableConfig) -> str:
    """Return the name of a feature whose ids are replaced by rows of one pruned table."""
    return f"{feature}@{config.name}"


def _kept_parts(
    parts: Iterator[tuple[int, np.ndarray]], row_map: RowMap, config: TableConfig
) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the rows of ids that are not pruned, in parts: the first row's index, and the rows.

    ``parts`` are all rows of the table, in the same form.
    """
    # Parts of one size again, since each size would compile the packing anew.
    first, waiting = 0, np.zeros((0, 0), np.float32)
    for start, rows in parts:
        # Before pruning, so that an error names the row by its id.
        config.check_rows(f"table {config.name!r}, ", rows, start)
        found = row_map.find_on_host(np.arange(start, start + len(rows)))
        kept = rows[found < row_map.num_rows]
        waiting = np.concatenate([waiting, kept]) if len(waiting) else kept
        size = rows_per_part(rows.shape[1])
        while len(waiting) >= size:
            yield first, waiting[:size]
            first, waiting = first + size, waiting[size:]
    if len(waiting):
        yield first, waiting
