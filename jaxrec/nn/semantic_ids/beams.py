"""Beam search over the semantic ids of existing items, compiled, for a batch of users."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from jaxrec.nn.semantic_ids.item_trie import ItemTrie
from jaxrec.ragged.arrays import on_auto_axes

Step = Callable[[int, Int32[Array, "rows beams"], Any], tuple[Float[Array, "rows beams size"], Any]]
"""Maps a level, the codes chosen on the level before and a cache to log-probabilities and a cache.

The cache is a pytree of arrays ``[rows, beams, ...]``. Level 0 has one beam, and its codes mean
nothing.
"""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Beams:
    """Items of each user, the most probable first.

    Attributes:
        items: ``[rows, k]`` int32; -1 where there are no more items.
        scores: ``[rows, k]`` float32 log-probabilities of the items' codes; -inf without an item.
    """

    items: Int32[Array, "*devices rows k"]
    scores: Float[Array, "*devices rows k"]


def beam_search(
    trie: ItemTrie,
    step: Step,
    cache: Any,
    *,
    rows: int,
    k: int,
    beam_size: int,
    diversity: float = 0.0,
    excluded: Int32[Array, "rows excluded"] | None = None,
) -> Beams:
    """Return the ``k`` best items of a beam search whose beams are prefixes of existing items.

    On each level every beam grows by all codes that some item has next, and the ``beam_size`` most
    probable ones remain, exactly. With a ``beam_size`` of all items the result is the exact top
    ``k`` of all items. A prefix whose items are all excluded is dropped.

    Args:
        trie: The items.
        step: The model; see `Step`.
        cache: First cache of the model, ``[rows, 1, ...]``.
        rows: Number of users.
        k: Items of a user, at most ``beam_size``.
        beam_size: Beams of a user.
        diversity: Penalty of the second, third, ... best child of a prefix: ``diversity`` times its
            rank among its siblings, from 0, is subtracted where beams are chosen, and not from
            their scores. Li, Monroe and Jurafsky 2016, "A simple, fast diverse decoding algorithm
            for neural generation" (arXiv:1611.08562), equation 6.
        excluded: ``[rows, n]`` items that a user must not get; -1: none.

    Raises:
        ValueError: ``k`` or ``beam_size`` is out of range, or ``diversity`` negative.
    """
    check_beams(k, beam_size, diversity)
    leaves = None if excluded is None else on_auto_axes(_excluded_leaves, excluded, trie)
    zeros = jnp.zeros((rows, 1), jnp.int32)
    prefixes = _Prefixes(zeros, zeros, jnp.zeros((rows, 1)), zeros, jnp.zeros(rows, bool))
    levels = len(trie.codes)
    for level in range(levels):
        found, cache = step(level, prefixes.codes, cache)
        is_last = level == levels - 1
        grow = functools.partial(
            _grow, level=level, size=k if is_last else beam_size, diversity=diversity
        )
        prefixes = on_auto_axes(grow, found, prefixes, trie, leaves)
        if not is_last:
            cache = on_auto_axes(_reordered, prefixes.parents, cache)
    return on_auto_axes(functools.partial(_beams, k=k), prefixes.nodes, prefixes, trie)


def check_beams(k: int, beam_size: int, diversity: float) -> None:
    """Refuse numbers that a beam search cannot have."""
    if not 1 <= k <= beam_size:
        raise ValueError(f"k must be from 1 to beam_size={beam_size}, got {k}")
    if diversity < 0:
        raise ValueError(f"diversity is 0 or more, got {diversity}")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Prefixes:
    """Beams of one level.

    Attributes:
        nodes: Node of the trie.
        codes: Last code.
        scores: Log-probability; -inf for a beam without a prefix.
        parents: Beam of the level above.
        is_wrong: Whether the model gave a number that is NaN, ``[rows]``.
    """

    nodes: Int32[Array, "rows beams"]
    codes: Int32[Array, "rows beams"]
    scores: Float[Array, "rows beams"]
    parents: Int32[Array, "rows beams"]
    is_wrong: Bool[Array, " rows"]


def _grow(
    found: Float[Array, "rows beams size"],
    prefixes: _Prefixes,
    trie: ItemTrie,
    leaves: Int32[Array, "rows n"] | None,
    *,
    level: int,
    size: int,
    diversity: float,
) -> _Prefixes:
    """Return the best ``size`` children of all prefixes, or all if they are fewer."""
    nodes, scores, width = prefixes.nodes, prefixes.scores, trie.widths[level]
    rows, beams = nodes.shape
    first = trie.children[level][nodes]
    count = trie.children[level].at[nodes + 1].get(mode="clip") - first
    child = jnp.arange(width, dtype=jnp.int32)[None, None]
    children = first[..., None] + child
    is_child = (child < count[..., None]) & (scores != -jnp.inf)[..., None]
    if leaves is not None:
        is_child &= _has_allowed(trie, level, children, leaves)
    codes = trie.codes[level].at[children].get(mode="clip")
    grown = jnp.take_along_axis(found.astype(jnp.float32), codes, axis=2)
    is_wrong = prefixes.is_wrong | (is_child & jnp.isnan(grown)).any(axis=(1, 2))
    grown = jnp.where(is_child, scores[..., None] + grown, -jnp.inf)
    best = _best(grown, min(size, beams * width), diversity)
    nodes, codes, scores = (
        jnp.take_along_axis(x.reshape(rows, -1), best, axis=1) for x in (children, codes, grown)
    )
    # A beam without a prefix: its children are those past the last node, none.
    nodes = jnp.where(scores == -jnp.inf, trie.items.shape[0], nodes)
    return _Prefixes(nodes, codes, scores, best // width, is_wrong)


def _beams(_: Array, prefixes: _Prefixes, trie: ItemTrie, *, k: int) -> Beams:
    """Return the items of the last level's prefixes."""
    nodes, scores = prefixes.nodes, prefixes.scores
    # Diversity chose the items; their order is that of the scores.
    order = jnp.argsort(-scores, axis=1, stable=True)
    scores, nodes = (jnp.take_along_axis(x, order, axis=1) for x in (scores, nodes))
    items = jnp.where(scores > -jnp.inf, trie.items.at[nodes].get(mode="fill", fill_value=-1), -1)
    # A model whose numbers are not finite must not look like one without items.
    is_wrong = prefixes.is_wrong[:, None]
    items, scores = jnp.where(is_wrong, -1, items), jnp.where(is_wrong, jnp.nan, scores)
    missing = [(0, 0), (0, k - items.shape[1])]
    return Beams(
        jnp.pad(items, missing, constant_values=-1),
        jnp.pad(scores, missing, constant_values=-jnp.inf),
    )


def _best(
    grown: Float[Array, "rows beams width"], size: int, diversity: float
) -> Int32[Array, "rows size"]:
    """Return the positions of the best children among all of a user's, the best first."""
    ranked = grown
    if diversity:
        order = jnp.argsort(-grown, axis=2, stable=True)
        ranks = jnp.argsort(order, axis=2, stable=True)
        ranked = grown - diversity * ranks.astype(jnp.float32)
    _, best = jax.lax.top_k(ranked.reshape(grown.shape[0], -1), size)
    return best


def _reordered(parents: Int32[Array, "rows beams"], cache: Any) -> Any:
    """Give each new beam the cache of the beam that it grew from."""
    # Mapped over rows, so that a mesh gathers nothing from other devices.
    of_row = jax.vmap(lambda parents, cached: cached[parents])
    return jax.tree.map(lambda cached: of_row(parents, cached), cache)


def _excluded_leaves(excluded: Int32[Array, "rows n"], trie: ItemTrie) -> Int32[Array, "rows n"]:
    """Return the leaves of excluded items, ascending and each once; others are at the end."""
    capacity = trie.places.shape[0]
    leaves = trie.places.at[excluded].get(mode="fill", fill_value=capacity)
    is_item = (excluded >= 0) & (excluded < capacity)  # -1 would count from the end
    ordered = jnp.sort(jnp.where(is_item, leaves, capacity), axis=1)
    is_again = jnp.pad(ordered[:, 1:] == ordered[:, :-1], [(0, 0), (1, 0)])
    return jnp.sort(jnp.where(is_again, capacity, ordered), axis=1)


def _has_allowed(
    trie: ItemTrie,
    level: int,
    nodes: Int32[Array, "rows beams width"],
    leaves: Int32[Array, "rows n"],
) -> Bool[Array, "rows beams width"]:
    """Return whether a node has a leaf that is not excluded."""
    starts = trie.leaves[level].at[nodes].get(mode="clip")
    ends = trie.leaves[level].at[nodes + 1].get(mode="clip")

    def count(leaves: Array, bounds: Array) -> Array:
        return jnp.searchsorted(leaves, bounds)

    inside = jax.vmap(count)(leaves, ends) - jax.vmap(count)(leaves, starts)
    return inside < ends - starts
