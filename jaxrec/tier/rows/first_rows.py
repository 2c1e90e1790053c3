"""First values of rows, drawn by id, for rows that already exist."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32, Int64, UInt32

from jaxrec.embed.config import TableConfig
from jaxrec.embed.first_values import draw_and_scale, draw_rows, slice_columns, table_key
from jaxrec.embed.layout import layout_tables
from jaxrec.embed.rows import read
from jaxrec.embed.slots import TableRows, group_slots, size_for
from jaxrec.embed.store import TableStore
from jaxrec.embed.tables import Tables
from jaxrec.optim import RowOptimizer


@dataclasses.dataclass(frozen=True)
class NewRows:
    """Rows of a table, int64 ``[n]``, that get new ids, int64 ``[n]``."""

    config: TableConfig
    rows: np.ndarray
    ids: np.ndarray


def reset(store: TableStore, tables: Sequence[NewRows], key: UInt32[np.ndarray, "2"]) -> TableStore:
    """Give rows the first values of their ids and a fresh optimizer state; return the new store.

    ``store`` is donated: its arrays change in place. No row of a table may occur twice. ``key`` is
    the data of the random key of the tables' collection.
    """
    draws, scales_and_keys = _draws(tuple(t.config for t in tables), (int(key[0]), int(key[1])))
    sizes = np.array([t.rows.size for t in tables])
    if not sizes.any():
        return store
    per_row = np.empty((sizes.sum(), 3), np.int32)
    per_row[:, :2] = np.concatenate([t.ids for t in tables]).view(np.int32).reshape(-1, 2)
    per_row[:, 2] = np.repeat(np.arange(len(tables)), sizes)
    places = np.split(np.arange(sizes.sum()), np.cumsum(sizes)[:-1])
    # Tables of one initializer and width share a program. The others stay in the list without rows,
    # since `places` goes by a table's number.
    kinds = [(draw, t.config.embedding_dim) for t, draw in zip(tables, draws, strict=True)]
    for kind in dict.fromkeys(kinds):
        alike = [
            TableRows(t.config.name, t.rows if each == kind else t.rows[:0])
            for t, each in zip(tables, kinds, strict=True)
        ]
        for group, slots in group_slots(store, alike).items():
            # One array goes to the devices: a copy of seven small ones would take longer.
            per_slot = np.stack(
                [slots.slots, *np.moveaxis(per_row[slots.gather(places)], -1, 0),
                 *slots.column_bounds()],
                axis=-1,
            )  # fmt: skip
            on_devices = store.devices.put(per_slot)
            store = _reset(store, on_devices, scales_and_keys, group, *kind)
    return store


def first_rows(
    config: TableConfig,
    optimizer: RowOptimizer,
    key: UInt32[np.ndarray, "2"],
    ids: Int64[np.ndarray, " n"],
) -> dict[str, np.ndarray]:
    """Return, on the host, the rows and the optimizer state that `reset` gives to ids.

    The rows ``[n, embedding_dim]`` are under ``"rows"``, the state ``[n, ...]`` is by name.
    """
    # Through the same compiled function as in training, for the same bits.
    table = dataclasses.replace(config, num_embeddings=size_for(ids.size), padding_id=None)
    store: TableStore = Tables.init(layout_tables([table], optimizer), jax.random.key(0))
    rows = np.arange(ids.size)
    store = reset(store, [NewRows(config, rows, ids)], key)
    (first,) = read(store, [TableRows(config.name, rows)]).to_host()
    if config.padding_id is not None:
        is_padding = (ids == config.padding_id)[:, None]
        first["rows"] = np.where(is_padding, np.zeros((), first["rows"].dtype), first["rows"])
    return first


@functools.lru_cache(maxsize=64)
def _draws(
    configs: tuple[TableConfig, ...], key: tuple[int, int]
) -> tuple[tuple[Callable, ...], np.ndarray]:
    """Return how to draw the rows of each table.

    The array, uint32 ``[tables, 3]``, has for each table the bits of its scale, and the data of its
    random key, by name and ``key``.
    """
    words = np.array(key, np.uint32)
    draws, numbers = [], []
    for config in configs:
        draw, scale = draw_and_scale(
            config.initializer, config.num_embeddings, config.embedding_dim
        )
        draws.append(draw)
        bits = np.float32(scale).view(np.uint32)
        numbers.append([bits, *np.asarray(table_key(words, config.name))])
    return tuple(draws), np.array(numbers, np.uint32)


@functools.partial(jax.jit, static_argnums=(3, 4, 5), donate_argnums=0)
def _reset(
    store: TableStore,
    per_slot: Int32[Array, "*devices n 6"],
    scales_and_keys: UInt32[Array, "tables 3"],
    group: str,
    draw: Callable,
    dim: int,
) -> TableStore:
    # Columns of `per_slot`: the slot, the low and the high word of its id, the number of its table,
    # and the first and the stop column of its slice of the row.
    of_group = store.groups[group]

    def part(row, first_column, stop_column):
        return slice_columns(row, first_column, stop_column, of_group.dim)

    def rows_and_state(of_slots, scales_and_keys):
        _, low, high, table, first_column, stop_column = of_slots.T
        low, high = (jax.lax.bitcast_convert_type(word, jnp.uint32) for word in (low, high))
        of_table = scales_and_keys[table]
        scale = jax.lax.bitcast_convert_type(of_table[:, 0], jnp.float32)
        rows = draw_rows(draw, scale, of_table[:, 1:], high, low, dim)
        rows = jax.vmap(part)(rows, first_column, stop_column)
        return rows, {
            name: jnp.broadcast_to(array[0], (len(rows), *array.shape[1:]))
            for name, array in of_group.optimizer.init(1, of_group.dim).items()
        }

    rows, state = store.devices.map(rows_and_state, per_slot, scales_and_keys)
    return store.write_rows(group, per_slot[..., 0], rows, state)
