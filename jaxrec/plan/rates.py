"""Rates of operations: seconds by call, by item and by byte."""

from __future__ import annotations

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class Rate:
    """Seconds of an operation, ``call + item * items + byte * bytes``.

    Attributes:
        call: Seconds to start it.
        item: Seconds for each item.
        byte: Seconds for each byte.

    Raises:
        ValueError: If one is negative or not a number.

    Example:
        >>> Rate(call=1.0, byte=0.5).seconds(bytes=4)
        3.0
    """

    call: float = 0.0
    item: float = 0.0
    byte: float = 0.0

    def __post_init__(self) -> None:
        for field in ("call", "item", "byte"):
            value = getattr(self, field)
            if not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
                raise ValueError(f"a rate's {field} is seconds, 0 or more, got {value!r}")

    def seconds(self, *, calls: float = 1, items: float = 0, bytes: float = 0) -> float:
        """Return the seconds of ``calls`` on ``items`` and ``bytes`` in all."""
        return self.call * calls + self.item * items + self.byte * bytes


@dataclasses.dataclass(frozen=True)
class Links:
    """Rates of collectives over one kind of link; bytes are those that leave a device.

    Attributes:
        all_to_all: Every device sends a part of its array to every other device.
        reduce_scatter: Devices add up arrays of one shape, and each keeps a part of the sum.
        all_gather: Every device gets the arrays of all devices.
    """

    all_to_all: Rate
    reduce_scatter: Rate
    all_gather: Rate

    @classmethod
    def of(cls, call: float, bandwidth: float) -> Links:
        """Return links whose collectives all have one rate.

        Args:
            call: Seconds to start a collective.
            bandwidth: Bytes a second that leave a device.
        """
        rate = Rate(call=call, byte=1 / bandwidth)
        return cls(rate, rate, rate)
