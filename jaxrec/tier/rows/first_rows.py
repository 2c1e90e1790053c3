"""First values of rows, drawn by id, for rows that already exist."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32, Int64, Shaped, UInt32

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
    drawn = [
        draw_and_scale(t.config.initializer, t.config.num_embeddings, t.config.embedding_dim)
        for t in tables
    ]
    keys = _keys(tuple(t.config.name for t in tables), (int(key[0]), int(key[1])))
    words = np.concatenate([np.ascontiguousarray(t.ids).view(np.uint32) for t in tables])
    sizes = [t.rows.size for t in tables]
    per_row: dict[str, np.ndarray] = {
        "low": words[::2],
        "high": words[1::2],
        "table": np.repeat(np.arange(len(tables), dtype=np.int32), sizes),
        "scale": np.repeat(np.array([scale for _, scale in drawn], np.float32), sizes),
    }
    places = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
    # Tables of one initializer and width share a program. The others stay in the list without rows,
    # since `places` goes by a table's number.
    kinds = [(draw, t.config.embedding_dim) for t, (draw, _) in zip(tables, drawn, strict=True)]
    for kind in dict.fromkeys(kinds):
        alike = [
            TableRows(t.config.name, t.rows if each == kind else t.rows[:0])
            for t, each in zip(tables, kinds, strict=True)
        ]
        for group, slots in group_slots(store, alike).items():
            place = slots.gather(places)
            per_slot = {name: values[place] for name, values in per_row.items()}
            per_slot["first_column"], per_slot["stop_column"] = slots.column_bounds()
            on_devices = store.devices.put((slots.slots, per_slot))
            store = _reset(store, *on_devices, keys, group, *kind)
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
def _keys(names: tuple[str, ...], key: tuple[int, int]) -> np.ndarray:
    """Return the data of each table's random key, uint32 ``[tables, 2]``, by name and ``key``."""
    words = np.array(key, np.uint32)
    return np.stack([np.asarray(table_key(words, name)) for name in names])


@functools.partial(jax.jit, static_argnums=(4, 5, 6), donate_argnums=0)
def _reset(
    store: TableStore,
    slots: Int32[Array, "*devices n"],
    per_slot: dict[str, Shaped[Array, "*devices n"]],
    keys: UInt32[Array, "tables 2"],
    group: str,
    draw: Callable,
    dim: int,
) -> TableStore:
    of_group = store.groups[group]

    def part(row, first_column, stop_column):
        return slice_columns(row, first_column, stop_column, of_group.dim)

    def rows_and_state(of_slots, keys):
        words = keys[of_slots["table"]], of_slots["high"], of_slots["low"]
        rows = draw_rows(draw, of_slots["scale"], *words, dim)
        rows = jax.vmap(part)(rows, of_slots["first_column"], of_slots["stop_column"])
        return rows, {
            name: jnp.broadcast_to(array[0], (len(rows), *array.shape[1:]))
            for name, array in of_group.optimizer.init(1, of_group.dim).items()
        }

    rows, state = store.devices.map(rows_and_state, per_slot, keys)
    return store.write_rows(group, slots, rows, state)
