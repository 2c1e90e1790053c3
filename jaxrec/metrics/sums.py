"""Sums over samples on the device: exact sums over all batches, and sums of the last batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int


def sum_by_place(
    x: Float[Array, "tasks batch"], places: Int[Array, "tasks batch"], count: int
) -> Float[Array, "tasks count"]:
    """Sum the samples of each place from 0 to ``count - 1``; samples at other places are dropped.

    A place must not be negative.
    """
    return jax.vmap(lambda x, places: jax.ops.segment_sum(x, places, count))(x, places)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Total:
    """A running sum ``high + low``: float32 arrays of the rounded sum and of its rounding error.

    An addition is off by about 2^-48 of the sum, where float32 is off by 2^-24 (Knuth, "The Art of
    Computer Programming", volume 2, section 4.2.2, theorem B; Dekker 1971, "A floating-point
    technique for extending the available precision").
    """

    # A plain float32 sum of ones stops at 16,777,216, and JAX has no float64 by default.

    high: Float[Array, "*shape"]
    low: Float[Array, "*shape"]

    @classmethod
    def zeros(cls, shape: tuple[int, ...]) -> Total:
        # Two arrays, not one twice: a step that donates the state must not get a buffer twice.
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
        # One transfer for both.
        high, low = jax.device_get((self.high, self.low))
        return np.asarray(np.float64(high) + np.float64(low))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class BatchWindow:
    """A ring buffer of the sums of the last batches.

    Attributes:
        sums: ``[slots, tasks, ...]`` float32 by name; each slot has the sums of one batch.
        sizes: ``[slots, tasks]`` int32, number of samples of each batch; 0 in unused slots.
        steps: ``[tasks]`` int32, number of batches so far. Batch ``i`` is in slot ``i % slots``.
    """

    # The window is summed when it is read, and batches that leave it are not subtracted from a
    # running sum: their rounding errors would stay.

    sums: dict[str, Float[Array, "slots tasks ..."]]
    sizes: Int[Array, "slots tasks"]
    steps: Int[Array, " tasks"]

    @classmethod
    def empty(cls, slots: int, shapes: Mapping[str, tuple[int, ...]], tasks: int) -> BatchWindow:
        """Return an empty window for sums of the given shapes ``[tasks, ...]``."""
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
        """Add a batch's sums and sizes in place of the oldest; only for tasks in ``counts``."""
        tasks = jnp.arange(len(self.steps))
        # mode="drop" ignores the slot beyond the last.
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
        """Merge two windows of one size: add their newest batches, then the second newest, ..."""
        slots, tasks = self.sizes.shape
        steps = jnp.maximum(self.steps, other.steps)

        def aligned(window: BatchWindow) -> BatchWindow:
            came_from = (jnp.arange(slots)[:, None] - (steps - window.steps)[None]) % slots
            ring, sizes = jax.tree.map(
                lambda x: x[came_from, jnp.arange(tasks)[None]], (window.sums, window.sizes)
            )
            return BatchWindow(ring, sizes, steps)

        # Devices that took the same steps have the batches of a step in the same slot. Otherwise
        # the ring of the device with fewer steps is turned on.
        a, b = aligned(self), aligned(other)
        return BatchWindow(
            {name: a.sums[name] + b.sums[name] for name in a.sums}, a.sizes + b.sizes, steps
        )

    def on_host(self, samples: int) -> dict[str, Float[np.ndarray, "tasks ..."]]:
        """Return the sums over the newest batches, ``[tasks, ...]`` float64; wait for the device.

        The newest batch always counts. Earlier ones count while all together have at most
        ``samples`` samples.
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
