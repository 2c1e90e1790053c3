"""First values of rows by id, so that an id begins the same wherever its row is."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32, Int64, Shaped, UInt32

from jaxrec.embed.config import TableConfig
from jaxrec.embed.initialize import draw_and_scale, slice_columns, table_key
from jaxrec.embed.layout import layout_tables
from jaxrec.embed.row_access import TableRows, group_slots, read, size_for
from jaxrec.embed.store import TableStore
from jaxrec.embed.tables import Tables
from jaxrec.optim import RowOptimizer
from jaxrec.tier.rows.row_keys import row_key


@dataclasses.dataclass(frozen=True)
class NewRows:
    """Rows of a table that get new owners.

    Attributes:
        config: The table.
        rows: Row indices, int ``[n]``.
        ids: Ids that the rows are for, int64 ``[n]``.
    """

    config: TableConfig
    rows: np.ndarray
    ids: np.ndarray


def reset(store: TableStore, tables: Sequence[NewRows], seed: int) -> TableStore:
    """Give rows the first values of their ids and a fresh optimizer state, in place.

    A row is drawn by the table's initializer with a key that depends on the seed, the name of the
    table and the id.

    Args:
        store: The store that has the arrays; it is donated.
        tables: The rows; none occurs twice.
        seed: Seed of the draws.
    """
    drawn = [
        draw_and_scale(t.config.initializer, t.config.num_embeddings, t.config.embedding_dim)
        for t in tables
    ]
    keys = _keys(tuple(t.config.name for t in tables), seed)
    words = np.concatenate([np.ascontiguousarray(t.ids).view(np.uint32) for t in tables])
    sizes = [t.rows.size for t in tables]
    per_row: dict[str, np.ndarray] = {
        "low": words[::2],
        "high": words[1::2],
        "table": np.repeat(np.arange(len(tables), dtype=np.int32), sizes),
        "scale": np.repeat(np.array([scale for _, scale in drawn], np.float32), sizes),
    }
    places = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
    # Tables that are drawn alike are drawn together.
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
            on_devices = store.put_rows((slots.slots, per_slot))
            store = _reset(store, *on_devices, keys, group, *kind)
    return store


def first_rows(
    config: TableConfig, optimizer: RowOptimizer, seed: int, ids: Int64[np.ndarray, " n"]
) -> dict[str, np.ndarray]:
    """Return the rows that `reset` gives to ids, on the host, and their optimizer state.

    Args:
        config: The table.
        optimizer: Its row optimizer.
        seed: Seed of the draws.
        ids: The ids.

    Returns:
        The rows ``[n, embedding_dim]`` under ``"rows"``, and the state ``[n, ...]`` by name.
    """
    # The same compiled function as in training, for the same bits.
    table = dataclasses.replace(config, num_embeddings=size_for(ids.size))
    store: TableStore = Tables.init(layout_tables([table], optimizer), jax.random.key(0))
    rows = np.arange(ids.size)
    store = reset(store, [NewRows(config, rows, ids)], seed)
    (first,) = read(store, [TableRows(config.name, rows)]).to_host()
    return first


@functools.lru_cache(maxsize=64)
def _keys(names: tuple[str, ...], seed: int) -> np.ndarray:
    """Return the data of the tables' keys, uint32 ``[tables, 2]``."""
    key = jax.random.key(seed, impl="threefry2x32")
    return np.stack([np.asarray(jax.random.key_data(table_key(key, name))) for name in names])


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

    def row(of_slot, keys):
        key = row_key(keys[of_slot["table"]])
        key = jax.random.fold_in(jax.random.fold_in(key, of_slot["low"]), of_slot["high"])
        values = draw(key, (1, dim), jnp.float32)[0] * of_slot["scale"]
        columns = of_slot["first_column"], of_slot["stop_column"]
        return slice_columns(values, *columns, of_group.dim)

    def rows_and_state(of_slots, keys):
        rows = jax.vmap(row, (0, None))(of_slots, keys)
        return rows, {
            name: jnp.broadcast_to(array[0], (len(rows), *array.shape[1:]))
            for name, array in of_group.optimizer.init(1, of_group.dim).items()
        }

    rows, state = store.map_slots(rows_and_state, per_slot, keys)
    return store.write_rows(group, slots, rows, state)
