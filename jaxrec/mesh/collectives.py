"""The collectives of the exchange, in a chosen format; all inside `jax.shard_map`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int32, Shaped

from jaxrec.mesh.precision import Format, Precision, decode, encode


@dataclasses.dataclass(frozen=True)
class Channel:
    """What joins the devices that share the tables.

    Attributes:
        axes: Names of the mesh's axes.
        precision: The formats of what travels.
    """

    axes: tuple[str, ...]
    precision: Precision

    @property
    def index(self) -> Int32[Array, ""]:
        """This device's number among them."""
        return jax.lax.axis_index(self.axes)

    def send(self, values: Array) -> Array:
        """Line ``d`` goes to device ``d``; line ``d`` of the result came from there."""
        return _as_bits(
            lambda bits: jax.lax.all_to_all(
                bits, self.axes, split_axis=0, concat_axis=0, tiled=True
            ),
            values,
        )

    def send_together(self, *values: Int32[Array, "devices _"]) -> list[Int32[Array, "devices _"]]:
        """`send`, of several arrays at once: what a collective costs, it costs but once."""
        ends = np.cumsum([each.shape[1] for each in values])
        return jnp.split(self.send(jnp.concatenate(values, axis=1)), ends[:-1], axis=1)

    def send_with_most(
        self, count: Int32[Array, ""], *values: Int32[Array, "devices _"]
    ) -> tuple[Int32[Array, ""], list[Int32[Array, "devices _"]]]:
        """`send_together`, and with it the most that any device counts."""
        to_all = jnp.broadcast_to(count.astype(jnp.int32), (values[0].shape[0], 1))
        counts, *received = self.send_together(to_all, *values)
        return jnp.max(counts), received

    def send_rows(self, rows: Float[Array, "devices n dim"]) -> Float[Array, "devices n dim"]:
        """`send`, of rows of tables."""
        return self._send_as(rows, self.precision.forward)

    def send_gradients(self, rows: Float[Array, "devices n dim"]) -> Float[Array, "devices n dim"]:
        """`send`, of gradients."""
        scale = self.precision.loss_scale
        return self._send_as(rows * scale, self.precision.backward) / scale

    def sum_rows(self, rows: Float[Array, "devices n dim"]) -> Float[Array, "n dim"]:
        """The sum of what all devices have for this one."""
        if self.precision.forward == "float32":
            return jax.lax.psum_scatter(rows, self.axes)
        # Encoded values cannot be added on the way; as many bytes travel one by one.
        return self.send_rows(rows).astype(jnp.float32).sum(axis=0)

    def gather(self, values: Array) -> Array:
        """The values of all devices, one after the other."""
        return _as_bits(lambda bits: jax.lax.all_gather(bits, self.axes, tiled=True), values)

    def gather_gradients(self, rows: Float[Array, "n dim"]) -> Float[Array, "all dim"]:
        """`gather`, of gradients."""
        scale = self.precision.loss_scale
        parts = encode(rows * scale, self.precision.backward)
        gathered = tuple(self.gather(part) for part in parts)
        return decode(gathered, self.precision.backward) / scale

    def _send_as(self, rows: Array, format: Format) -> Array:
        if format == "float32":
            return self.send(rows)
        return _send_encoded(rows, self, format)


def _as_bits(move: Callable[[Array], Array], values: Array) -> Array:
    """Moves values as bits: XLA widens narrow floats where a device has no arithmetic for them."""
    if values.dtype.itemsize >= 4 or not jnp.issubdtype(values.dtype, jnp.floating):
        return move(values)
    unsigned = {1: jnp.uint8, 2: jnp.uint16}[values.dtype.itemsize]
    bits = jax.lax.bitcast_convert_type(values, unsigned)
    return jax.lax.bitcast_convert_type(move(bits), values.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _send_encoded(rows: Array, channel: Channel, format: Format) -> Array:
    """Rows sent in a format; to derivatives it is as if they were sent as they are."""
    return decode(tuple(channel.send(part) for part in encode(rows, format)), format)


def _send_encoded_forward(rows: Array, channel: Channel, format: Format) -> tuple[Array, None]:
    return _send_encoded(rows, channel, format), None


def _send_encoded_backward(
    channel: Channel, format: Format, _: None, gradient: Array
) -> tuple[Array]:
    return (channel.send_gradients(gradient),)


_send_encoded.defvjp(_send_encoded_forward, _send_encoded_backward)


class Turns:
    """Has the exchanges of a program's groups take place one after the other, on CPUs.

    There XLA runs collectives that do not depend on each other at the same time, and each holds a
    thread of a pool that all simulated devices share: with many of them under way, some device
    finds no thread to take part, and all wait for it for ever. So each exchange is made to depend
    on the one before it. Elsewhere collectives have an order of their own.
    """

    def __init__(self, mesh: Mesh):
        self._is_needed = mesh.devices.flat[0].platform == "cpu"
        self._last: Int32[Array, ""] | None = None

    def end(self, result: Shaped[Array, "..."]) -> None:
        """Says what an exchange brought."""
        if self._is_needed and result.size:
            value = jax.lax.stop_gradient(result[(0,) * result.ndim])
            if jnp.issubdtype(value.dtype, jnp.floating):
                value = jax.lax.bitcast_convert_type(value.astype(jnp.float32), jnp.int32)
            # Some negative number that the compiler cannot know.
            self._last = jnp.minimum(value, -1)

    def begin(self, values: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
        """What an exchange needs first, once the last has ended: floats, or integers from -1."""
        if self._last is None:
            return values
        if jnp.issubdtype(values.dtype, jnp.floating):
            return values + self._last.astype(values.dtype) * 0
        return jnp.maximum(values, self._last)


def run_if(flag: Bool[Array, ""], body: Callable[[Any], Any], carried: Any) -> Any:
    """``body(carried)`` if the flag holds, else ``carried``; in place, as `jax.lax.cond` is not."""

    def once(state: Any) -> Any:
        return jnp.zeros((), bool), body(state[1])

    return jax.lax.while_loop(lambda state: state[0], once, (flag, carried))[1]
