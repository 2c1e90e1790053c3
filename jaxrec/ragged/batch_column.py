"""Columns with what a batch knows of them: bags that samples share, slots."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
from jax.tree_util import GetAttrKey
from jaxtyping import Int32

from jaxrec.ragged.arrays import AnyArray
from jaxrec.ragged.jagged import JaggedArray
from jaxrec.ragged.raw_ids import as_raw, is_raw


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class BatchColumn(JaggedArray):
    """A column of a batch whose samples share bags, or of slots of `jaxrec.tier`.

    `KeyedJaggedArray.from_dict` takes what `to_dict` gave: a column keeps what the batch knew of
    it. The rows are bags, of which samples may share one.

    Attributes:
        inverse_indices: ``[batch]`` int32, the row of each sample; None: row ``b`` is sample
            ``b``'s.
        sample_capacity: See `KeyedJaggedArray.sample_capacities`; 0: unknown.
        are_slots: Whether the values are slots assigned by `jaxrec.tier`.
    """

    inverse_indices: Int32[AnyArray, " samples"] | None = None
    sample_capacity: int = 0
    are_slots: bool = False


def _flatten(column: BatchColumn) -> tuple[tuple[Any, ...], tuple[int, bool, bool]]:
    arrays = (column.values, column.lengths, column.weights, column.inverse_indices)
    return arrays, (column.sample_capacity, column.are_slots, is_raw(column.values))


def _unflatten(static: tuple[int, bool, bool], arrays: Iterable[Any]) -> BatchColumn:
    sample_capacity, are_slots, has_raw_ids = static
    values, lengths, weights, inverse_indices = arrays
    values = as_raw(values) if has_raw_ids else values
    return BatchColumn(values, lengths, weights, inverse_indices, sample_capacity, are_slots)


_PATHS = tuple(map(GetAttrKey, ("values", "lengths", "weights", "inverse_indices")))

jax.tree_util.register_pytree_with_keys(
    BatchColumn,
    lambda column: (tuple(zip(_PATHS, _flatten(column)[0], strict=True)), _flatten(column)[1]),
    _unflatten,
    _flatten,
)
