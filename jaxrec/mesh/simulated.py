"""The channel between simulated CPU devices, which need favours that accelerators do not.

XLA's all-to-all on CPUs takes and gives one array a device, and copies an array that is not split
like that. And XLA runs CPU collectives that do not depend on each other at the same time, each
holding a thread of a pool that all simulated devices share: with many of them under way, some
device finds no thread to take part, and all wait for it for ever.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32, Shaped

from jaxrec.mesh.channel import Channel, Turns


class OneByOne(Turns):
    """Makes each exchange depend on the one before it."""

    def __init__(self) -> None:
        self._last: Int32[Array, ""] | None = None

    def run(self, exchange, awaited, *args, floats=True):
        def wait(values: Array) -> Array:
            is_float = jnp.issubdtype(values.dtype, jnp.floating)
            if self._last is None or not (values.dtype == jnp.int32 or (floats and is_float)):
                return values
            if is_float:
                # In float32, whose range has all int32; float16 would make -inf * 0, which is NaN.
                return values + (self._last.astype(jnp.float32) * 0).astype(values.dtype)
            return jnp.maximum(values, self._last)  # indices are -1 or more

        result = exchange(jax.tree.map(wait, awaited), *args)
        self._record(result)
        return result

    def _record(self, result: Any) -> None:
        """Record an exchange's result so that the next exchange waits for it."""
        for leaf in jax.tree.leaves(result):
            if leaf.size and (leaf.dtype == jnp.int32 or jnp.issubdtype(leaf.dtype, jnp.floating)):
                last = _negative(leaf)
                self._last = last if self._last is None else jnp.minimum(last, self._last)


def _negative(values: Shaped[Array, "..."]) -> Int32[Array, ""]:
    """Return a negative number that depends on the values and that the compiler cannot know."""
    value = jax.lax.stop_gradient(values[(0,) * values.ndim])
    if jnp.issubdtype(value.dtype, jnp.floating):
        value = jax.lax.bitcast_convert_type(value.astype(jnp.float32), jnp.int32)
    return jnp.minimum(value, -1)


@dataclasses.dataclass(frozen=True)
class SimulatedChannel(Channel):
    """A channel between simulated CPU devices.

    Attributes:
        num_devices: Number of devices, and of arrays that a message is split into.
    """

    num_devices: int = 1

    @property
    def turns(self) -> Turns:
        return OneByOne()

    @property
    def sent(self) -> dict[str, int]:
        return {"parts_out": self.num_devices}

    @property
    def received(self) -> dict[str, int]:
        return {"parts_in": self.num_devices}

    def along(self, axes: tuple[str, ...]) -> Channel:
        return dataclasses.replace(self, axes=axes, num_devices=jax.lax.axis_size(axes))

    def split(self, values: Array) -> list[Array]:
        return jnp.split(values, self.num_devices)
