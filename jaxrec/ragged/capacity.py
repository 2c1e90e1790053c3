"""Static capacities for ragged data: a short ladder of them, so that few programs compile."""

from __future__ import annotations

SMALLEST = 8


def capacity_for(count: int) -> int:
    """Return the smallest capacity of the ladder 8, 12, 16, 24, 32, 48, ... that holds ``count``.

    The ladder has ``2**k`` and ``3 * 2**(k - 1)``: less than a third of a capacity above the
    smallest one is padding, and the counts up to a million need 35 capacities.
    """
    if count < 0:
        raise ValueError(f"a capacity holds a count of 0 or more, not {count}")
    power = max(SMALLEST, 1 << max(count - 1, 0).bit_length())
    three_quarters = power // 4 * 3
    return three_quarters if three_quarters >= SMALLEST and count <= three_quarters else power
