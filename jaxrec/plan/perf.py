"""Seconds of a step by phase."""

from __future__ import annotations

import dataclasses
from typing import TypeAlias

import numpy as np

Seconds: TypeAlias = float | np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class Perf:
    """Seconds of work on tables in one step, by phase; numbers, or arrays of one shape.

    TorchRec's `Perf`. "Compute" is a device's own work, "exchange" a collective.
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
        """Multiply the forward and the backward pass by a count each; there is no prefetch."""
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
        """Return `by_phase` as JSON has it; each phase is one number."""
        return {phase: np.asarray(seconds).item() for phase, seconds in self.by_phase().items()}


_FIELDS = tuple(field.name for field in dataclasses.fields(Perf))
PHASES = tuple(name.replace("_", " ") for name in _FIELDS)
