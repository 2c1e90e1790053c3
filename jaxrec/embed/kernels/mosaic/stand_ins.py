"""Functions of `indexing` for interpreters: they index arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxrec.embed.kernels.mosaic.lanes import Lanes


def load(array: Any, index: Array, is_used: Array, lanes: Lanes, is_nan: Array | None) -> Array:
    values = array[...]
    index = jnp.where(is_used, index, 0)
    if values.ndim == 1:
        found = jnp.where(is_used, values[index], 0)
        return found if is_nan is None else jnp.where(is_nan, jnp.nan, found)
    column = jnp.arange(lanes.columns, dtype=jnp.int32)[None]
    inside = is_used[:, None] & (column < lanes.width)
    place = jnp.where(column < lanes.width, lanes.first + column, 0)
    found = jnp.where(inside, values[index[:, None], place], 0).astype(values.dtype)
    return found if is_nan is None else jnp.where(is_nan[:, None], jnp.nan, found)


def load_words(array: Any, index: Array, is_used: Array, first: int, count: int) -> list[Array]:
    octets = array[...][jnp.where(is_used, index, 0), first : first + 4 * count]
    octets = jnp.where(is_used[:, None], octets, 0).reshape(-1, count, 4)
    return list(jnp.unstack(jax.lax.bitcast_convert_type(octets, jnp.int32), axis=1))


def store_words(
    array: Any, index: Array, is_used: Array, first: int, words: Sequence[Array]
) -> None:
    whole = array[...]
    octets = jax.lax.bitcast_convert_type(jnp.stack(words, axis=1), jnp.uint8)
    octets = octets.reshape(index.size, -1)
    place = jnp.where(is_used, index, whole.shape[0])
    array[...] = whole.at[place, first : first + octets.shape[1]].set(octets, mode="drop")


def store(
    array: Any, index: Array, is_used: Array, first: int, width: int, planes: Sequence[Array]
) -> None:
    whole = array[...]
    place = jnp.where(is_used, index, whole.shape[0])
    if whole.ndim == 1:
        array[...] = whole.at[place].set(planes[0], mode="drop")
        return
    values = jnp.stack(planes, axis=-1).reshape(index.size, -1)[:, :width]
    array[...] = whole.at[place, first : first + width].set(values, mode="drop")
