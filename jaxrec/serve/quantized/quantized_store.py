"""Quantized copies of table stores, made in parts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

import numpy as np

from jaxrec.embed.formats import RowFormat
from jaxrec.embed.store import TableStore
from jaxrec.serve.quantized.packing import rows_per_part, table_parts, write_parts
from jaxrec.serve.quantized.pruned_tables import PrunedTables
from jaxrec.serve.quantized.quantized_tables import QuantizedTables
from jaxrec.serve.quantized.row_map import RowMap
from jaxrec.serve.quantized.rows import check_rows


def quantized_store(
    store: TableStore, formats: Mapping[str, RowFormat], row_maps: Mapping[str, RowMap]
) -> QuantizedTables | PrunedTables:
    """Return a quantized copy of a store's tables; each part of a table is read once.

    Args:
        store: A store that has all of its rows.
        formats: The format of each table, by name.
        row_maps: The map of each pruned table, by name; other tables keep all rows.

    Raises:
        ValueError: The format of a table cannot hold one of its elements.
    """
    names = [config.name for config in store.configs]
    row_maps = {name: row_map for name, row_map in row_maps.items() if name in names}
    if not row_maps:
        return _filled(QuantizedTables.zeros(store.configs, formats), store, row_maps)
    pruned = PrunedTables.zeros(store.configs, formats, row_maps)
    return pruned.with_inner(_filled(pruned.inner, store, row_maps))


def _filled(
    quantized: QuantizedTables, store: TableStore, row_maps: Mapping[str, RowMap]
) -> QuantizedTables:
    """Return tables with the rows of a store, in place: the tables are donated."""
    rows = dict(quantized.rows)
    for group, row_format in zip(quantized.layout.groups, quantized.formats, strict=True):
        for table, first_row in zip(group.tables, group.row_offsets, strict=True):
            parts = table_parts(store, table.name)
            if table.name in row_maps:
                parts = _kept_parts(parts, row_maps[table.name], row_format, table.name)
            rows[group.name] = write_parts(
                rows[group.name], row_format, table.name, parts, first_row
            )
    return dataclasses.replace(quantized, rows=rows)


def _kept_parts(
    parts: Iterator[tuple[int, np.ndarray]], row_map: RowMap, row_format: RowFormat, name: str
) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the rows that remain, in parts of one size: the first row's index, and the rows.

    Raises:
        ValueError: The format cannot hold an element; the row is named by its id.
    """
    first, waiting = 0, np.zeros((0, 0), np.float32)
    for start, rows in parts:
        check_rows(row_format, f"table {name!r}, ", rows, start)
        found = row_map.find_on_host(np.arange(start, start + len(rows)))
        kept = rows[found < row_map.num_rows]
        waiting = np.concatenate([waiting, kept]) if len(waiting) else kept
        size = rows_per_part(rows.shape[1])
        while len(waiting) >= size:
            yield first, waiting[:size]
            first, waiting = first + size, waiting[size:]
    if len(waiting):
        yield first, waiting
