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

# Where XLA has a ragged all-to-all.
_RAGGED_PLATFORMS = ("gpu", "tpu")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Used:
    """How much is of use of what devices send each other.

    Attributes:
        sent: To each device, of as many places as there are.
        received: From each device.
    """

    sent: Int32[Array, " devices"]
    received: Int32[Array, " devices"]

    @property
    def reversed(self) -> Used:
        """That of answers, a place for a place."""
        return Used(self.received, self.sent)


@dataclasses.dataclass(frozen=True)
class Channel:
    """What joins the devices that share the tables.

    Attributes:
        axes: Names of the mesh's axes.
        precision: The formats of what travels.
        parts: In how many parts what is sent had best be made, and received read. On CPUs XLA's
            all-to-all takes and gives an array a device; elsewhere it moves one as it is.
    """

    axes: tuple[str, ...]
    precision: Precision
    parts: int

    @property
    def index(self) -> Int32[Array, ""]:
        """This device's number among them."""
        return jax.lax.axis_index(self.axes)

    def send(self, values: Array, used: Used | None = None) -> Array:
        """Line ``d`` goes to device ``d``; line ``d`` of the result came from there.

        Args:
            values: ``[devices, n, ...]``.
            used: How much of each line is of use; the rest may be lost. None: all.
        """

        def move(bits: Array) -> Array:
            # In this shape XLA sees that parts are joined to be taken apart, and does neither.
            flat = bits.reshape(-1, *bits.shape[2:])
            moved = jax.lax.all_to_all(flat, self.axes, split_axis=0, concat_axis=0, tiled=True)
            return moved.reshape(bits.shape)

        return _as_bits(move, values)

    def send_together(self, *values: Int32[Array, "devices _"]) -> list[Int32[Array, "devices _"]]:
        """`send`, of several arrays at once: what a collective costs, it costs but once."""
        ends = np.cumsum([each.shape[1] for each in values])
        return jnp.split(self.send(jnp.concatenate(values, axis=1)), ends[:-1], axis=1)

    def send_lists(
        self,
        lists: Int32[Array, "devices n"],
        lengths: Int32[Array, " devices"],
        *more: Int32[Array, "devices _"],
        fill: int,
    ) -> tuple[Int32[Array, "devices n"], Used, list[Int32[Array, "devices _"]]]:
        """Sends a list to each device, and more with it.

        Args:
            lists: The lists, in as much room each; filled up beyond their ends.
            lengths: Their lengths.
            *more: What else is sent.
            fill: What they are filled with.

        Returns:
            The lists that came in, filled up; how much is of use; and what else came.
        """
        lists, received, *rest = self.send_together(lists, lengths[:, None], *more)
        return lists, Used(lengths, received[:, 0]), rest

    def send_rows(
        self, rows: Float[Array, "devices n dim"], used: Used | None = None
    ) -> Float[Array, "devices n dim"]:
        """`send`, of rows of tables."""
        return self._send_as(rows, self.precision.forward, used)

    def send_gradients(
        self, rows: Float[Array, "devices n dim"], used: Used | None = None
    ) -> Float[Array, "devices n dim"]:
        """`send`, of gradients."""
        scale = self.precision.loss_scale
        return self._send_as(rows * scale, self.precision.backward, used) / scale

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

    def _send_as(self, rows: Array, format: Format, used: Used | None) -> Array:
        if format == "float32":
            return self.send(rows, used)
        return _send_encoded(rows, used, self, format)


class RaggedChannel(Channel):
    """A channel on which only what is of use travels, where a device knows how much that is.

    It takes XLA's ragged all-to-all, which CPUs do not have.
    """

    def send(self, values: Array, used: Used | None = None) -> Array:
        return super().send(values) if used is None else self._send_ragged(values, used, 0)

    def send_lists(self, lists, lengths, *more, fill):
        received, *rest = self.send_together(lengths[:, None], *more)
        used = Used(lengths, received[:, 0])
        return self._send_ragged(lists, used, fill), used, rest

    def _send_ragged(self, values: Array, used: Used, fill: int) -> Array:
        devices, room = values.shape[:2]

        def move(bits: Array) -> Array:
            begins = jnp.arange(devices, dtype=jnp.int32) * room
            return jax.lax.ragged_all_to_all(
                bits.reshape(-1, *bits.shape[2:]),
                jnp.full((devices * room, *bits.shape[2:]), fill, bits.dtype),
                begins,
                used.sent,
                # Each of the others puts what comes from here where this device's line is.
                jnp.full(devices, self.index * room, jnp.int32),
                used.received,
                axis_name=self.axes,
            ).reshape(bits.shape)

        return _as_bits(move, values)


def check_ragged(mesh: Mesh) -> None:
    """Raises where a mesh's devices have no ragged all-to-all."""
    platform = mesh.devices.flat[0].platform
    if platform not in _RAGGED_PLATFORMS:
        raise ValueError(
            f"XLA has no ragged all-to-all for {platform} devices; shard with is_ragged=False there"
        )


def _as_bits(move: Callable[[Array], Array], values: Array) -> Array:
    """Moves values as bits: XLA widens narrow floats where a device has no arithmetic for them."""
    if values.dtype.itemsize >= 4 or not jnp.issubdtype(values.dtype, jnp.floating):
        return move(values)
    unsigned = {1: jnp.uint8, 2: jnp.uint16}[values.dtype.itemsize]
    bits = jax.lax.bitcast_convert_type(values, unsigned)
    return jax.lax.bitcast_convert_type(move(bits), values.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _send_encoded(rows: Array, used: Used | None, channel: Channel, format: Format) -> Array:
    """Rows sent in a format; to derivatives it is as if they were sent as they are."""
    parts = encode(rows, format)
    return decode(tuple(channel.send(part, used) for part in parts), format)


def _send_encoded_forward(
    rows: Array, used: Used | None, channel: Channel, format: Format
) -> tuple[Array, Used | None]:
    return _send_encoded(rows, used, channel, format), used


def _send_encoded_backward(
    channel: Channel, format: Format, used: Used | None, gradient: Array
) -> tuple[Array, None]:
    return channel.send_gradients(gradient, used and used.reversed), None


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
            # In float32, whose range has all int32; in float16 it would be -inf * 0, which is NaN.
            return values + (self._last.astype(jnp.float32) * 0).astype(values.dtype)
        return jnp.maximum(values, self._last)


def run_if(flag: Bool[Array, ""], body: Callable[[Any], Any], carried: Any) -> Any:
    """``body(carried)`` if the flag holds, else ``carried``; in place, as `jax.lax.cond` is not."""

    def once(state: Any) -> Any:
        return jnp.zeros((), bool), body(state[1])

    return jax.lax.while_loop(lambda state: state[0], once, (flag, carried))[1]
