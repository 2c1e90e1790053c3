"""Sums over samples on the device: of all batches, exactly, and of the last batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Total:
    """A running sum as two float32 numbers: the sum and its rounding error.

    A plain float32 sum of ones stops at 16,777,216. Here the rounding error of each addition is
    found exactly and kept (Knuth, "The Art of Computer Programming", volume 2, section 4.2.2,
    theorem B; Dekker 1971, "A floating-point technique for extending the available precision"), so
    that an addition is off by about 2^-48 of the sum, and not by 2^-24.

    Attributes:
        high: Any shape, the sum, rounded.
        low: The same shape, the rounding error: the sum is ``high + low``.
    """

    high: Float[Array, "*shape"]
    low: Float[Array, "*shape"]

    @classmethod
    def zeros(cls, shape: tuple[int, ...]) -> Total:
        """Return a sum of zero terms."""
        return cls(jnp.zeros(shape, jnp.float32), jnp.zeros(shape, jnp.float32))

    def __add__(self, other: Total | Float[Array, "*shape"]) -> Total:
        term, rest = (other.high, other.low) if isinstance(other, Total) else (other, 0.0)
        # XLA does not reassociate floats, so that these differences are the rounding error itself.
        high = self.high + term
        added = high - self.high
        error = (self.high - (high - added)) + (term - added)
        low = (self.low + rest) + error
        rounded = high + low
        return Total(rounded, low - (rounded - high))

    def on_host(self) -> Float[np.ndarray, "*shape"]:
        """Return the sum in float64; wait for the device."""
        high, low = jax.device_get((self.high, self.low))
        return np.asarray(np.float64(high) + np.float64(low))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class BatchWindow:
    """A ring of the sums of the last batches, task by task.

    Which of them count is settled when the window is read: nothing is subtracted, so batches
    that left the window leave no rounding errors behind.

    Attributes:
        sums: By name ``[slots, tasks, ...]`` float32, the sums of one batch a slot.
        sizes: ``[slots, tasks]`` int32, samples of each of these batches; 0 in unused slots.
        steps: ``[tasks]`` int32, batches so far. Batch ``i`` is in slot ``i % slots``.
    """

    sums: dict[str, Float[Array, "slots tasks ..."]]
    sizes: Int[Array, "slots tasks"]
    steps: Int[Array, " tasks"]

    @classmethod
    def empty(cls, slots: int, shapes: Mapping[str, tuple[int, ...]], tasks: int) -> BatchWindow:
        """Return a window without batches, for sums of the given shapes ``[tasks, ...]``."""
        return cls(
            {name: jnp.zeros((slots, *shape), jnp.float32) for name, shape in shapes.items()},
            jnp.zeros((slots, tasks), jnp.int32),
            jnp.zeros(tasks, jnp.int32),
        )

    def append(
        self,
        sums: Mapping[str, Float[Array, "tasks ..."]],
        sizes: Int[Array, " tasks"],
        counts: Bool[Array, " tasks"],
    ) -> BatchWindow:
        """Add a batch to the window, in place of the oldest.

        Args:
            sums: Sums of the batch.
            sizes: Samples of the batch.
            counts: False where a task leaves this batch out; its window stays as it is.
        """
        tasks = jnp.arange(len(self.steps))
        # A slot beyond the last writes nothing.
        slot = jnp.where(counts, self.steps % len(self.sizes), len(self.sizes))
        return BatchWindow(
            {
                name: ring.at[slot, tasks].set(sums[name], mode="drop")
                for name, ring in self.sums.items()
            },
            self.sizes.at[slot, tasks].set(sizes, mode="drop"),
            self.steps + counts,
        )

    def merge(self, other: BatchWindow) -> BatchWindow:
        """Merge two windows: their newest batches become one, and so on back in time."""
        slots, tasks = self.sizes.shape
        steps = jnp.maximum(self.steps, other.steps)

        def aligned(window: BatchWindow) -> BatchWindow:
            came_from = (jnp.arange(slots)[:, None] - (steps - window.steps)[None]) % slots
            ring, sizes = jax.tree.map(
                lambda x: x[came_from, jnp.arange(tasks)[None]], (window.sums, window.sizes)
            )
            return BatchWindow(ring, sizes, steps)

        # Devices that took the same steps have the batches of one step in one slot.
        a, b = aligned(self), aligned(other)
        return BatchWindow(
            {name: a.sums[name] + b.sums[name] for name in a.sums}, a.sizes + b.sizes, steps
        )

    def on_host(self, samples: int) -> dict[str, Float[np.ndarray, "tasks ..."]]:
        """Return the sums over the last batches, in float64; wait for the device.

        Args:
            samples: As many of the newest batches are taken as have, together, no more samples
                than this; the newest one always.
        """
        window = jax.device_get(self)
        slots, tasks = window.sizes.shape
        age = (window.steps - 1 - np.arange(slots)[:, None]) % slots
        order = np.argsort(age, axis=0)  # the newest first
        samples_until = np.cumsum(np.take_along_axis(window.sizes, order, 0), axis=0)
        is_used = np.zeros((slots, tasks), bool)
        np.put_along_axis(is_used, order, samples_until <= samples, 0)
        is_used |= age == 0
        return {
            name: np.where(is_used.reshape(is_used.shape + (1,) * (ring.ndim - 2)), ring, 0).sum(
                axis=0, dtype=np.float64
            )
            for name, ring in window.sums.items()
        }
