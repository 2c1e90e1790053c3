"""The planner's quantities: counts of work and storage, seconds by phase, rates of operations."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import TypeAlias

import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class Load:
    """Counts of what devices do and store for tables in one step; arrays of one shape.

    Attributes:
        exchanged: Rows that a device reads for all devices, each a position in a message. With the
            exchange by rows each device requests a row once, with the others once per lookup.
        gathered: The same rows, as gathered from the device's memory.
        updated: Rows that the device updates.
        ids: Positions for the ids of all devices whose bags this device pools, with padding.
        bags: Bags of all devices that this device pools.
        held: Rows that the device stores. They take memory; all other counts take time.
    """

    exchanged: np.ndarray
    gathered: np.ndarray
    updated: np.ndarray
    ids: np.ndarray
    bags: np.ndarray
    held: np.ndarray

    @functools.cached_property
    def stacked(self) -> np.ndarray:
        """All counts in one array, ``[6, ...]``."""
        return np.stack([getattr(self, name) for name in LOADS])

    @classmethod
    def unstack(cls, stacked: np.ndarray) -> Load:
        """Return a load whose counts are views of an array, ``[6, ...]`` as in `LOADS`."""
        load = cls(*stacked)
        # Fills the cached property, so that `stacked` is this array and no copy: writes to a count,
        # as in `ExchangeCosts.load`, show in it.
        load.__dict__["stacked"] = stacked
        return load

    @classmethod
    def zeros(cls, *shape: int) -> Load:
        """Return a load whose counts are zeros of a shape."""
        return cls.unstack(np.zeros((len(LOADS), *shape)))


LOADS = tuple(field.name for field in dataclasses.fields(Load))


Seconds: TypeAlias = float | np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class Perf:
    """Seconds of work on tables in one step, by phase; numbers, or arrays of one shape.

    TorchRec's `Perf`. "Compute" is a device's own work, "exchange" a collective, "prefetch" the
    work of caches.
    """

    forward_compute: Seconds = 0.0
    forward_exchange: Seconds = 0.0
    backward_compute: Seconds = 0.0
    backward_exchange: Seconds = 0.0
    prefetch: Seconds = 0.0

    @property
    def forward(self) -> Seconds:
        return self.forward_compute + self.forward_exchange

    @property
    def backward(self) -> Seconds:
        return self.backward_compute + self.backward_exchange

    @property
    def total(self) -> Seconds:
        return self.forward + self.backward + self.prefetch

    def __add__(self, other: Perf) -> Perf:
        return Perf(**{name: getattr(self, name) + getattr(other, name) for name in _FIELDS})

    def __mul__(self, count: Seconds) -> Perf:
        return Perf(**{name: getattr(self, name) * count for name in _FIELDS})

    def scale(self, forward: Seconds, backward: Seconds) -> Perf:
        """Multiply each pass by its own count, ``forward`` or ``backward``; prefetch becomes 0."""
        return Perf(
            forward * self.forward_compute,
            forward * self.forward_exchange,
            backward * self.backward_compute,
            backward * self.backward_exchange,
        )

    def by_phase(self) -> dict[str, Seconds]:
        """Return the seconds by the names of `PHASES`."""
        return {phase: getattr(self, name) for phase, name in zip(PHASES, _FIELDS, strict=True)}

    def to_dict(self) -> dict[str, float]:
        """Return `by_phase` as plain numbers for JSON; each phase must be one number."""
        return {phase: np.asarray(seconds).item() for phase, seconds in self.by_phase().items()}


_FIELDS = tuple(field.name for field in dataclasses.fields(Perf))
# Names of the phases in reports and files: "forward compute", "forward exchange", ...
PHASES = tuple(name.replace("_", " ") for name in _FIELDS)


@dataclasses.dataclass(frozen=True)
class Rate:
    """Seconds of an operation, ``call * calls + item * items + byte * bytes``.

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
        """Return the seconds of ``calls`` calls on ``items`` items and ``bytes`` bytes in all."""
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
