"""Attention in which a number that is not finite reaches only results that depend on it.

A tile holds pairs of several rows. The weight of a pair that the mask hides is 0, but 0 * NaN is
NaN, so one NaN would reach every element of its tile. Elements with NaN or infinity are therefore
zeros in the products, and NaN is written afterwards to what depends on them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from jaxrec.nn.jagged_tiles import TilePlan
from jaxrec.ragged import complete_cumsum, segment_ids
from jaxrec.ragged.arrays import take

# A function of the plan, shared arrays such as biases, queries, keys and values. Its result has an
# element for each query.
Attend = Callable[..., Array]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def isolate(
    attend: Attend,
    plan: TilePlan,
    shared: Any,
    query: Float[Array, "queries heads dim"],
    key: Float[Array, "keys heads dim"],
    value: Float[Array, "keys heads value_dim"],
) -> Float[Array, "queries heads value_dim"]:
    """Compute ``attend(plan, shared, query, key, value)``, where NaN stays with what sees it.

    A query gets NaN if it is not finite, or sees a key or a value that is not. All gradients of a
    row are NaN if the row has such a number, in the result's gradient too. Gradients of ``shared``
    sum over rows, and any such number makes them NaN.
    """
    cleaned, wrong = _cleaned(query, key, value)
    return _marked(attend(plan, shared, *cleaned), _wrong_results(plan, *wrong))


def _forward(attend: Attend, plan: TilePlan, shared: Any, *arrays: Array) -> tuple[Array, Any]:
    cleaned, wrong = _cleaned(*arrays)
    out, vjp = jax.vjp(functools.partial(attend, plan), shared, *cleaned)
    return _marked(out, _wrong_results(plan, *wrong)), (vjp, plan.offsets, wrong)


def _backward(_: Attend, residuals: Any, cotangent: Array) -> Any:
    vjp, (query_offsets, key_offsets), (query, key, value) = residuals
    given, wrong = _finite(cotangent)
    of_shared, of_query, of_key, of_value = vjp(given)
    rows = _rows_with(query | wrong, query_offsets) | _rows_with(key | value, key_offsets)
    any_row = rows.any()
    of_queries = take(rows, segment_ids(query_offsets, query.shape[0]), fill_value=False)
    of_keys = take(rows, segment_ids(key_offsets, key.shape[0]), fill_value=False)
    return (
        None,
        jax.tree.map(lambda gradient: jnp.where(any_row, jnp.nan, gradient), of_shared),
        _marked(of_query, of_queries),
        _marked(of_key, of_keys),
        _marked(of_value, of_keys),
    )


isolate.defvjp(_forward, _backward)


def _cleaned(*arrays: Array) -> tuple[list[Array], list[Array]]:
    """Zero elements ``[heads, dim]`` with NaN or infinity; return arrays, masks ``[elements]``."""
    pairs = [_finite(array) for array in arrays]
    return [array for array, _ in pairs], [wrong for _, wrong in pairs]


def _finite(
    array: Float[Array, "elements heads dim"],
) -> tuple[Float[Array, "elements heads dim"], Bool[Array, " elements"]]:
    wrong = ~jnp.isfinite(array).all((1, 2))
    return jnp.where(wrong[:, None, None], jnp.zeros((), array.dtype), array), wrong


def _marked(
    array: Float[Array, "elements heads dim"], wrong: Bool[Array, " elements"]
) -> Float[Array, "elements heads dim"]:
    return jnp.where(wrong[:, None, None], jnp.nan, array)


def _wrong_results(
    plan: TilePlan,
    query: Bool[Array, " queries"],
    key: Bool[Array, " keys"],
    value: Bool[Array, " keys"],
) -> Bool[Array, " queries"]:
    """Mark the queries that are wrong, or see a wrong key or value."""
    # Every mask shows intervals of keys, and a running sum has the number of wrong keys in each.
    before = jnp.asarray(complete_cumsum((key | value).astype(jnp.int32)))

    def count(first: Int32[Array, "..."], last: Int32[Array, "..."]) -> Int32[Array, "..."]:
        # Below 0 for an interval without keys.
        ends = jnp.minimum(jnp.stack([first, last + 1]), key.shape[0])
        return take(before, ends[1]) - take(before, ends[0])

    seen = plan.intervals
    wrong = count(seen.first, seen.last) > 0
    if seen.group is not None:
        wrong |= count(seen.group, seen.own) > 0
    flat = [array.reshape(-1)[: query.shape[0]] for array in (wrong, seen.own)]
    return (flat[0] | query) & (flat[1] >= 0)


def _rows_with(
    wrong: Bool[Array, " elements"], offsets: Int32[Array, " starts"]
) -> Bool[Array, " rows"]:
    """Return whether each row has a wrong element."""
    before = jnp.asarray(complete_cumsum(wrong.astype(jnp.int32)))
    return jnp.diff(take(before, jnp.minimum(offsets, wrong.shape[0]))) > 0
