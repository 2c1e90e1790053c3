"""The prefixes of all items' codes as sorted arrays on the device: which codes may follow."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from jaxrec.nn.semantic_ids.item_codes import SemanticIds


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ItemTrie:
    """Tree of the items' codes; a node of level ``l`` is a prefix of ``l`` codes of some items.

    Nodes of a level are numbered in the order of their codes, so that the children of a node are
    neighbours on the next level, and so are its leaves, the items. Arrays have room for
    ``capacity`` nodes: nodes past the last have no children.

    Attributes:
        codes: By level ``[capacity]``, the last code of each node.
        children: By level, the first child of each node of the level above, and the number of all
            at the end: ``[2]`` for the root, then ``[capacity + 1]``.
        leaves: By level ``[capacity + 1]``, the first leaf of each node, and the number of all.
        items: ``[capacity]`` item of each leaf.
        places: ``[capacity]`` leaf of each item; ``capacity`` for rows that have none.
        widths: By level, a static bound of the children of one node.
    """

    codes: tuple[Int32[Array, " capacity"], ...]
    children: tuple[Int32[Array, " nodes"], ...]
    leaves: tuple[Int32[Array, " nodes"], ...]
    items: Int32[Array, " capacity"]
    places: Int32[Array, " capacity"]
    widths: tuple[int, ...] = dataclasses.field(metadata={"static": True})

    @classmethod
    def of(
        cls, ids: SemanticIds, *, capacity: int | None = None, widths: tuple[int, ...] | None = None
    ) -> ItemTrie:
        """Sort the codes of items; an item's number is its row in ``ids``.

        Args:
            ids: Items and their codes.
            capacity: Largest number of items; None: as many as there are.
            widths: Most children of a node by level; None: the largest number, rounded up to a
                power of two, with room for as many again.

        Raises:
            ValueError: There are more items or children than these, or ``widths`` has not one
                number for each level.
        """
        count, levels = ids.codes.shape
        size = max(count, 1) if capacity is None else capacity
        if count > size:
            raise ValueError(f"{count} items do not fit a capacity of {size}; give a larger one")
        order = np.lexsort(ids.codes.T[::-1])
        rows = ids.codes[order]
        # Whether a leaf begins a new node of each level.
        changes = np.ones((count, levels), bool)
        if count:
            changes[1:] = np.cumsum(rows[1:] != rows[:-1], axis=1) > 0
        codes, children, leaves, most = [], [], [], []
        above = np.zeros(min(count, 1), np.int64)  # first leaf of each node of the level above
        for level in range(levels):
            first = np.flatnonzero(changes[:, level])
            starts = np.append(np.searchsorted(first, above), len(first))
            most.append(int(np.diff(starts).max(initial=1)))
            codes.append(_filled(rows[first, level], size, 0))
            children.append(_filled(starts, 2 if level == 0 else size + 1, len(first)))
            leaves.append(_filled(first, size + 1, count))
            above = first
        if widths is None:
            widths = tuple(
                min(bound, 2 << (each - 1).bit_length())
                for each, bound in zip(most, ids.sizes, strict=True)
            )
        if len(widths) != levels:
            raise ValueError(
                f"widths has {len(widths)} numbers; give one for each of the {levels} levels, the "
                "last code included"
            )
        for level, (each, bound) in enumerate(zip(most, widths, strict=True)):
            if each > bound:
                raise ValueError(
                    f"level {level}: {each} codes follow one prefix, and there is room for "
                    f"{bound}; make the model with larger widths"
                )
        places = np.full(size, size, np.int32)  # rows without an item have no leaf
        places[order] = np.arange(count)
        return cls(
            tuple(codes),
            tuple(children),
            tuple(leaves),
            _filled(order, size, -1),
            jnp.asarray(places),
            tuple(widths),
        )


def _filled(values: np.ndarray, size: int, filling: int) -> Int32[Array, " size"]:
    """Return values as int32 ``[size]``, padded with ``filling``."""
    array = np.full(size, filling, np.int32)
    array[: len(values)] = values
    return jnp.asarray(array)
