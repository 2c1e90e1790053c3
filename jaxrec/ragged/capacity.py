"""Static capacities for ragged data: a short ladder of them, so that few programs compile."""

from __future__ import annotations

from collections.abc import Mapping

SMALLEST = 8


def capacity_for(count: int) -> int:
    """Return the smallest capacity of the ladder 8, 12, 16, 24, 32, 48, ... that holds ``count``.

    The ladder has ``2**k`` and ``3 * 2**(k - 1)``: less than a third of a capacity above the
    smallest one is padding, and the counts up to a million need 35 capacities.

    Example:
        >>> [capacity_for(n) for n in (0, 8, 9, 13, 17, 25, 1000)]
        [8, 8, 12, 16, 24, 32, 1024]
    """
    if count < 0:
        raise ValueError(f"a capacity holds a count of 0 or more, not {count}")
    power = max(SMALLEST, 1 << max(count - 1, 0).bit_length())
    three_quarters = power // 4 * 3
    return three_quarters if three_quarters >= SMALLEST and count <= three_quarters else power


def grow_capacities(capacities: Mapping[str, int], needed: Mapping[str, int]) -> dict[str, int]:
    """Grow the capacities of a loop over batches to hold the next batch.

    Capacities that only grow, along the ladder of `capacity_for`, let the step compile a handful of
    times in all rather than once per combination of capacities.

    Args:
        capacities: Capacity of each key so far; empty at first.
        needed: Number of ids of each key of the next batch, or its capacities.

    Returns:
        For each key the larger of its old capacity and `capacity_for` its need.

    Example:
        >>> from jaxrec.ragged import KeyedJaggedArray
        >>> capacities = {}
        >>> for rows in ([[1, 2], [3]], [list(range(9)), []], [[4], [5]]):
        ...     batch = KeyedJaggedArray.from_lists({"f": rows})
        ...     capacities = grow_capacities(capacities, batch.capacity_per_key)
        ...     batch = batch.with_capacities(capacities)
        ...     print(batch.values.shape)
        (8,)
        (12,)
        (12,)
    """
    return dict(capacities) | {
        key: max(capacities.get(key, 0), capacity_for(count)) for key, count in needed.items()
    }
