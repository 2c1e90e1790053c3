"""Lookups of packed rows, defined and computed in XLA."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float, Int32, Shaped

from jaxrec.embed.formats import RowFormat
from jaxrec.embed.kernels.base import BagLayout
from jaxrec.embed.kernels.flat_lookups import flatten_bags
from jaxrec.embed.kernels.stretches import sum_stretches


def packed_pooled_lookup(
    packed: Shaped[Array, "rows width"],
    ids: Int32[Array, " ids"],
    lengths: Int32[Array, " all_bags"],
    weights: Float[Array, " ids"] | None,
    layout: BagLayout,
    row_format: RowFormat,
    dim: int,
    dtype: DTypeLike,
) -> Float[Array, "bags dim"]:
    """Return the sum or mean of each bag's rows, which are stored in a row format.

    Rows are unpacked to float32 and added in float32.

    Args:
        packed: The group's rows as they are stored.
        ids: The ids of all keys of a batch.
        lengths: The lengths of all its bags.
        weights: The weight of each id; None: 1.
        layout: Where the group's features lie in these arrays.
        row_format: The format of the rows.
        dim: Number of columns of the rows.
        dtype: Type of the result.

    Returns:
        One row for each bag, at `BagLayout.bag_rows`; NaN for a bag with an id outside its table.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxrec.embed import kernels
        >>> from jaxrec.embed.formats import FORMATS
        >>> layout = kernels.BagLayout((0,), (4,), (0,), (2,), (0,), (3,), (False,))
        >>> packed = FORMATS["int4"].pack(jnp.array([[0.0, 15.0], [16.0, 1.0], [0.0, 0.0]]))
        >>> ids, lengths = jnp.array([0, 1, 1, 0]), jnp.array([2, 1])
        >>> kernels.packed_pooled_lookup(
        ...     packed, ids, lengths, None, layout, FORMATS["int4"], 2, "float32").tolist()
        [[16.0, 16.0], [16.0, 1.0]]
    """
    num_rows = packed.shape[0]
    lookups = flatten_bags(ids, lengths, weights, layout, num_rows)

    def load(terms: tuple[Array, Array | None]) -> Array:
        row, scale = terms
        values = packed_row_lookup(packed, row, row_format, dim, "float32")
        return values if scale is None else values * scale[:, None].astype(jnp.float32)

    assert lookups.bags is not None
    # Padding, whose scales may be NaN, belongs to no bag.
    bags = jnp.where(lookups.rows == num_rows, layout.num_bags, lookups.bags)
    terms = (lookups.rows, lookups.scales)
    return sum_stretches(load, terms, bags, layout.num_bags, dim).astype(dtype)


def packed_row_lookup(
    packed: Shaped[Array, "rows width"],
    rows: Int32[Array, " n"],
    row_format: RowFormat,
    dim: int,
    dtype: DTypeLike,
) -> Float[Array, "n dim"]:
    """Return rows that are stored in a row format: zeros at padding, NaN at a bad row.

    Args:
        packed: The rows as they are stored.
        rows: Row of each lookup.
        row_format: The format of the rows.
        dim: Number of columns of the rows.
        dtype: Type of the result.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxrec.embed import kernels
        >>> from jaxrec.embed.formats import FORMATS
        >>> packed = FORMATS["float8"].pack(jnp.array([[1.0], [2.0]]))
        >>> rows = jnp.array([1, 2, 3])
        >>> kernels.packed_row_lookup(packed, rows, FORMATS["float8"], 1, "float32").tolist()
        [[2.0], [0.0], [nan]]
    """
    num_rows = packed.shape[0]
    is_row = (rows >= 0) & (rows < num_rows)
    values = row_format.unpack(packed.at[jnp.where(is_row, rows, 0)].get(mode="clip"), dim)
    outside = jnp.where(rows == num_rows, 0.0, jnp.nan)
    return jnp.where(is_row[:, None], values, outside[:, None]).astype(dtype)
