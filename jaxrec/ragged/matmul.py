"""Batched matrix products with ragged arrays."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrec.ragged.arrays import AnyArray
from jaxrec.ragged.dense import dense_to_jagged, jagged_to_padded_dense

# Rows are padded to a static `max_length` and multiplied densely. As in FBGEMM, elements past it
# take no part: they give zeros and have no gradient.


def jagged_dense_bmm(
    x_values: Float[AnyArray, "capacity inner"],
    x_offsets: Int[AnyArray, " offsets"],
    y: Float[AnyArray, "batch inner columns"],
    max_length: int,
) -> Float[Array, "capacity columns"]:
    """Multiply each row of ``x`` (``[length, inner]``) by its matrix of ``y``; ragged like ``x``.

    FBGEMM's op of that name.

    Args:
        x_values: ``[capacity, inner]``.
        x_offsets: ``[batch + 1]``, ascending from 0.
        y: ``[batch, inner, columns]``.
        max_length: Static bound of the rows' lengths.
    """
    x = jagged_to_padded_dense(x_values, x_offsets, max_length)
    return dense_to_jagged(jnp.matmul(x, y), x_offsets, x_values.shape[0])


def jagged_jagged_bmm(
    x_values: Float[AnyArray, "capacity rows"],
    y_values: Float[AnyArray, "capacity columns"],
    offsets: Int[AnyArray, " offsets"],
    max_length: int,
) -> Float[Array, "batch rows columns"]:
    """Return ``x_b^T y_b`` for each row ``b`` of two arrays that are ragged alike.

    FBGEMM's op of that name.

    Args:
        x_values: ``[capacity, rows]``.
        y_values: ``[capacity, columns]``.
        offsets: ``[batch + 1]`` of both, ascending from 0.
        max_length: Static bound of the rows' lengths.
    """
    x = jagged_to_padded_dense(x_values, offsets, max_length)
    y = jagged_to_padded_dense(y_values, offsets, max_length)
    return jnp.einsum("blr,blc->brc", x, y)


def batched_dense_vec_jagged_2d_mul(
    v: Float[AnyArray, "batch_heads length"],
    a_values: Float[AnyArray, "capacity heads_dims"],
    a_offsets: Int[AnyArray, " offsets"],
) -> Float[Array, "batch_heads dim"]:
    """Sum each row's vectors, weighted for each head: attention's weights times its values.

    ``out[b * H + h] = sum_n v[b * H + h, n] a_b[n, h * D:(h + 1) * D]``; FBGEMM's op of that name.

    Args:
        v: ``[batch * H, length]``; rows of ``a`` longer than ``length`` are cut, and elements past
            a row are never read.
        a_values: ``[capacity, H * D]``.
        a_offsets: ``[batch + 1]``, ascending from 0.

    Returns:
        ``[batch * H, D]``.

    Raises:
        ValueError: The number of rows of ``v`` is not a multiple of the batch, or the width of
            ``a`` not a multiple of the number of heads.
    """
    batch, length = a_offsets.shape[0] - 1, v.shape[1]
    heads, odd = divmod(v.shape[0], max(batch, 1))
    if odd or a_values.shape[1] % max(heads, 1):
        raise ValueError(
            f"v of shape {v.shape} and a_values of shape {a_values.shape} fit no number of heads "
            f"over a batch of {batch}; expected [batch * H, length] and [capacity, H * D]"
        )
    a = jagged_to_padded_dense(a_values, a_offsets, length).reshape(batch, length, heads, -1)
    lengths = jnp.asarray(a_offsets[1:] - a_offsets[:-1])
    exists = jnp.arange(length)[None, None, :] < lengths[:, None, None]
    v = jnp.where(exists, v.reshape(batch, heads, length), jnp.zeros((), v.dtype))
    return jnp.einsum("bhl,blhd->bhd", v, a).reshape(v.shape[0] * heads, -1)
