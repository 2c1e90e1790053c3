"""Work and storage that tables need of devices."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class Load:
    """Counts of what devices do and store for tables in one step; arrays of one shape.

    Attributes:
        exchanged: Rows that a device reads for all devices. With the exchange by rows, each device
            asks for a row once; with the others, for each lookup. Each is a position in a message.
        gathered: The same rows, as they are gathered from the device's memory.
        updated: Rows that it updates.
        ids: Positions for the ids of all devices, whose bags it pools, padding included.
        bags: Bags of all devices that it pools.
        held: Rows that it stores. They take memory; all other counts take time.
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
        """Return the load whose counts are views of one array, ``[6, ...]``."""
        load = cls(*stacked)
        load.__dict__["stacked"] = stacked
        return load

    @classmethod
    def zeros(cls, *shape: int) -> Load:
        """Return a load whose counts are 0."""
        return cls.unstack(np.zeros((len(LOADS), *shape)))


LOADS = tuple(field.name for field in dataclasses.fields(Load))
