"""What to change when no plan fits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from jaxrec.plan.workload import TableWork


class PlanError(ValueError):
    """No plan fits the devices; the message says what is missing and what would help."""


@dataclasses.dataclass(frozen=True)
class Shortage:
    """What does not fit.

    Attributes:
        missing: Bytes that the fullest device lacks in the best plan found.
        capacity: Bytes of a device.
        room: Bytes of a device for tables and their lookups.
        works: The tables.
        binding: Constraints without which it would fit, in words.
        changes: Changes that would make it fit, in words.
    """

    missing: float
    capacity: float
    room: float
    works: Sequence[TableWork]
    binding: Sequence[str]
    changes: Sequence[str]

    def __str__(self) -> str:
        largest = sorted(self.works, key=lambda work: -work.table_bytes)[:3]
        total = sum(work.table_bytes for work in self.works)
        lines = [
            f"no plan fits: each device lacks {size(self.missing)} in the best one found. Of its "
            f"{size(self.capacity)}, {size(self.room)} are left for tables, which take "
            f"{size(total)} in all with their optimizer state.",
            "Largest tables: "
            + ", ".join(f"{work.name} {size(work.table_bytes)}" for work in largest)
            + ".",
        ]
        if self.binding:
            lines.append(f"It would fit without {'; or without '.join(self.binding)}.")
        if self.changes:
            lines.append(f"It would fit {'; or '.join(self.changes)}.")
        else:
            lines.append(
                "Nothing tried would make it fit: fewer or smaller rows, or larger devices, are "
                "needed."
            )
        return "\n".join(lines)


def size(bytes: float) -> str:
    """Bytes for people.

    Example:
        >>> size(1.5e9)
        '1.50 GB'
    """
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if bytes >= scale:
            digits = ".3g" if bytes >= 100 * scale else ".2f"
            return f"{bytes / scale:{digits}} {unit}"
    return f"{bytes:.0f} bytes"


def smallest(fits: Callable[[int], bool], start: int, most: int) -> int | None:
    """The smallest number from ``start`` for which ``fits`` holds, if it keeps on holding.

    Doubles, then bisects: few calls, each of which plans.
    """
    low, high = start - 1, start
    while not fits(high):
        if high >= most:
            return None
        low, high = high, min(2 * high, most)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high
