"""Static capacities for ragged data: a short ladder of them, so that few programs compile."""

from __future__ import annotations

from collections.abc import Mapping

SMALLEST = 8


def rung(count: int) -> int:
    """The smallest capacity of the ladder 8, 12, 16, 24, 32, 48, 64, ... that holds ``count``.

    The rungs are ``2**k`` and ``3 * 2**(k - 1)``: less than a third of a capacity above the
    smallest one is padding, and all counts up to a million fall on 35 of them.

    Example:
        >>> [rung(n) for n in (0, 8, 9, 13, 17, 25, 1000)]
        [8, 8, 12, 16, 24, 32, 1024]
    """
    if count < 0:
        raise ValueError(f"a capacity holds a count of 0 or more, not {count}")
    power = max(SMALLEST, 1 << max(count - 1, 0).bit_length())
    three_quarters = power // 4 * 3
    return three_quarters if three_quarters >= SMALLEST and count <= three_quarters else power


def grown(capacities: Mapping[str, int], needed: Mapping[str, int]) -> dict[str, int]:
    """Capacities that hold both what they held and what is needed now.

    For loops over batches: capacities only ever grow, a rung at a time, so the step compiles a
    handful of times in all rather than once per combination of rungs.

    Args:
        capacities: Capacity of each key so far; empty to begin with.
        needed: Ids of each key of the batch at hand, or its capacities.

    Returns:
        A new mapping: the larger of the old capacity and the `rung` of the need, for each key.

    Example:
        >>> from jaxrec.ragged import KeyedJaggedArray
        >>> capacities = {}
        >>> for rows in ([[1, 2], [3]], [list(range(9)), []], [[4], [5]]):
        ...     batch = KeyedJaggedArray.from_lists({"f": rows})
        ...     capacities = grown(capacities, batch.capacity_per_key)
        ...     batch = batch.with_capacities(capacities)
        ...     print(batch.values.shape)
        (8,)
        (12,)
        (12,)
    """
    return dict(capacities) | {
        key: max(capacities.get(key, 0), rung(count)) for key, count in needed.items()
    }
