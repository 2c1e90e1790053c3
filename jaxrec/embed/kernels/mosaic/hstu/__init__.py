"""HSTU attention on Hopper cards: copies by the copy engine, products by warpgroups.

* `blocks`: which blocks of queries and keys meet, computed before the kernels. Begin there.
* `tiles`: what the kernels have in common.
* `output`, `query_gradients`, `key_gradients`: the kernels.
"""

# How these kernels are built
#
# * Rows are ragged and are not padded: the flat arrays are cut into blocks, whatever rows these
#   hold. Each query has its intervals of keys, and they tell rows, causality, targets, windows,
#   context and padding alike.
# * A program loads only blocks that meet its own, and masks only those that are not seen whole.
# * Products have 16-bit operands and float32 sums. SiLU needs no statistics of rows, so that the
#   gradients are two kernels that compute the scores again; neither adds to memory, and every run
#   gives the same bits.
# * Padding may be NaN. Scores with it are replaced, and where it is a factor of a sum the block is
#   read from a copy with zeros.

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from jaxrec.embed.kernels.mosaic.hstu.blocks import Ranges, padded, padded_ranges
from jaxrec.embed.kernels.mosaic.hstu.key_gradients import compute_key_gradients
from jaxrec.embed.kernels.mosaic.hstu.output import compute_output
from jaxrec.embed.kernels.mosaic.hstu.query_gradients import compute_query_gradients

MOST_COLUMNS = 256  # of a head
_TYPES = ("bfloat16", "float16")
_HOPPER = "9.0"


def attention(
    query: Float[Array, "queries heads dim"],
    key: Float[Array, "keys heads dim"],
    value: Float[Array, "keys heads value_dim"],
    ranges: Ranges,
    offsets: Int32[Array, "2 starts"],
    bias: Float[Array, "distances heads"],
    alpha: float,
    scale: float = 1.0,
    *,
    interpret: bool = False,
) -> Float[Array, "queries heads value_dim"]:
    """Return the output of attention; see `jaxrec.embed.kernels.reference`."""
    out = compute_output(
        padded(query),
        padded(key),
        padded(value),
        padded_ranges(ranges),
        offsets[1, -1],
        alpha=alpha,
        scale=scale,
        interpret=interpret,
    )
    return out[: query.shape[0], :, : value.shape[2]]


def attention_gradients(
    query: Float[Array, "queries heads dim"],
    key: Float[Array, "keys heads dim"],
    value: Float[Array, "keys heads value_dim"],
    ranges: Ranges,
    offsets: Int32[Array, "2 starts"],
    bias: Float[Array, "distances heads"],
    gradient: Float[Array, "queries heads value_dim"],
    alpha: float,
    scale: float = 1.0,
    *,
    interpret: bool = False,
) -> tuple[Array, Array, Array, Array]:
    """Return the gradients of query, key, value and bias; see `jaxrec.embed.kernels.reference`."""
    inputs: tuple[Array, Array, Array, Array, Array] = (
        padded(query),
        padded(key),
        padded(value),
        padded(gradient.astype(query.dtype)),
        padded_ranges(ranges),
    )
    options: dict[str, Any] = {"alpha": alpha, "scale": scale, "interpret": interpret}
    of_query = compute_query_gradients(*inputs, offsets[1, -1], **options)
    of_key, of_value = compute_key_gradients(*inputs, offsets[:, -1], **options)
    return (
        of_query[: query.shape[0], :, : query.shape[2]],
        of_key[: key.shape[0], :, : key.shape[2]],
        of_value[: value.shape[0], :, : value.shape[2]],
        jnp.zeros_like(bias),
    )


def refuse_attention(arguments: Mapping[str, Any]) -> str | None:
    """Return why the kernels do not take a call; None: they do."""
    query, key, value = (arguments[name] for name in ("query", "key", "value"))
    types = [jnp.dtype(each.dtype).name for each in (query, key, value)]
    if len(set(types)) > 1 or types[0] not in _TYPES:
        return f"queries, keys and values are all {' or '.join(_TYPES)}, not {', '.join(types)}"
    if arguments["bias"].shape[0]:
        return "it adds no bias to the scores"
    if 0 in query.shape or 0 in value.shape:
        return f"an array is empty: queries {query.shape}, values {value.shape}"
    columns = max(query.shape[2], value.shape[2])
    if columns > MOST_COLUMNS:
        return f"a head has up to {MOST_COLUMNS} columns, and these have {columns}"
    capability = _capability()
    if capability not in (None, _HOPPER):
        return (
            f"it is for Hopper cards, of compute capability {_HOPPER}, and this one has "
            f"{capability}"
        )
    return None


@functools.cache
def _capability() -> str | None:
    """Return the compute capability of this process's GPU; None without one."""
    try:
        return str(jax.local_devices(backend="cuda")[0].compute_capability)
    except RuntimeError:
        return None
