"""Channels: collectives between the devices of a mesh, called inside `jax.shard_map`.

An exchange reaches other devices through a `Channel` alone. So the differences between platforms
stay in this file: `RaggedChannel` is for GPUs and TPUs, `SimulatedChannel` for simulated CPU
devices.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, Bool, Float, Int32, Shaped

from jaxrec.mesh.precision import ExchangePrecision, Format, decode, encode


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ListLengths:
    """Lengths of the lists that a device sends to each device, and receives from it.

    Attributes:
        sent: Length of the list for each device, without its padding.
        received: Length of the list from each device.
    """

    sent: Int32[Array, " devices"]
    received: Int32[Array, " devices"]

    @property
    def reversed(self) -> ListLengths:
        """Lengths of the answers to the lists, one answer for each element."""
        return ListLengths(self.received, self.sent)


class Turns:
    """Order of one program's exchanges. Here each may run as soon as its data is ready."""

    def run(
        self, exchange: Callable[..., Any], awaited: Any, *args: Any, floats: bool = True
    ) -> Any:
        """Return ``exchange(awaited, *args)``. Subclasses make it wait for earlier exchanges.

        Args:
            exchange: A function that communicates.
            awaited: Arrays that all of its communication depends on.
            *args: Its other arguments.
            floats: Whether the communication depends on float arrays of ``awaited``; False: on the
                integer arrays alone.
        """
        return exchange(awaited, *args)


@dataclasses.dataclass(frozen=True)
class Channel:
    """Collectives between the devices along some axes of the mesh.

    Attributes:
        axes: Names of the axes.
        precision: Formats in which rows and gradients are sent.
    """

    axes: tuple[str, ...]
    precision: ExchangePrecision

    @property
    def turns(self) -> Turns:
        """A new `Turns`, which orders the exchanges of one program."""
        return Turns()

    @property
    def sent(self) -> dict[str, int]:
        """Keyword arguments of a kernel whose result is sent: ``parts_out``, or none."""
        return {}

    @property
    def received(self) -> dict[str, int]:
        """Keyword arguments of a kernel that reads a received array: ``parts_in``, or none."""
        return {}

    def split(self, values: Array) -> list[Array]:
        """Split a received array into the parts that arrived separately."""
        return [values]

    @property
    def index(self) -> Int32[Array, ""]:
        """Number of this device, from 0 to ``size - 1``."""
        return jax.lax.axis_index(self.axes)

    @property
    def size(self) -> int:
        """Number of devices."""
        return jax.lax.axis_size(self.axes)

    @property
    def across(self) -> Channel:
        """Channel between the devices that have the same number on different hosts.

        The last of `axes` numbers the devices of a host, the others number the hosts.
        """
        return self.along(self.axes[:-1])

    @property
    def within(self) -> Channel:
        """Channel between the devices of one host."""
        return self.along(self.axes[-1:])

    def along(self, axes: tuple[str, ...]) -> Channel:
        """Return the channel along some of the axes."""
        return dataclasses.replace(self, axes=axes)

    def send(self, values: Array, lengths: ListLengths | None = None) -> Array:
        """Send ``values[d]`` to device ``d``; ``result[d]`` comes from it. ``[devices, n, ...]``.

        With ``lengths``, elements of ``values[d]`` past its length may be lost.
        """

        def move(bits: Array) -> Array:
            # A tiled all-to-all over one flat axis: XLA then sees that the devices' arrays are
            # joined only to be taken apart again, and skips both copies.
            flat = bits.reshape(-1, *bits.shape[2:])
            moved = jax.lax.all_to_all(flat, self.axes, split_axis=0, concat_axis=0, tiled=True)
            return moved.reshape(bits.shape)

        return _as_bits(move, values)

    def send_together(self, *values: Int32[Array, "devices _"]) -> list[Int32[Array, "devices _"]]:
        """Send several arrays in one collective."""
        # A collective costs its latency, however small: lengths and demands ride with the ids.
        ends = np.cumsum([each.shape[1] for each in values])
        return jnp.split(self.send(jnp.concatenate(values, axis=1)), ends[:-1], axis=1)

    def send_lists(
        self,
        lists: Int32[Array, "devices n"],
        lengths: Int32[Array, " devices"],
        *more: Int32[Array, "devices _"],
        fill: int,
    ) -> tuple[Int32[Array, "devices n"], ListLengths, list[Int32[Array, "devices _"]]]:
        """Send each device a list of integers, padded with ``fill``, and lines of other arrays.

        Args:
            lists: List for each device.
            lengths: Length of each list.
            *more: Arrays of which each device gets its line.
            fill: Padding of the lists.

        Returns:
            The received lists, padded with ``fill``; the lengths of sent and received lists; and
            the received lines of each array in ``more``.
        """
        lists, received, *rest = self.send_together(lists, lengths[:, None], *more)
        return lists, ListLengths(lengths, received[:, 0]), rest

    def send_rows(
        self, rows: Float[Array, "devices n dim"], lengths: ListLengths | None = None
    ) -> Float[Array, "devices n dim"]:
        """Send table rows in the format `ExchangePrecision.forward`."""
        return self._send_as(rows, self.precision.forward, lengths)

    def send_gradients(
        self, rows: Float[Array, "devices n dim"], lengths: ListLengths | None = None
    ) -> Float[Array, "devices n dim"]:
        """Send gradients in the format `ExchangePrecision.backward`."""
        # Scaled on the way only: small gradients would be zero in float16.
        scale = self.precision.loss_scale
        return self._send_as(rows * scale, self.precision.backward, lengths) / scale

    def sum_rows(self, rows: Float[Array, "devices n dim"]) -> Float[Array, "n dim"]:
        """Send ``rows[d]`` to device ``d``; return the sum of the rows that this device gets."""
        if self.precision.forward == "float32":
            return jax.lax.psum_scatter(rows, self.axes)
        # A collective cannot add encoded values; sending them one by one moves as many bytes.
        return self.send_rows(rows).astype(jnp.float32).sum(axis=0)

    def gather(self, values: Array) -> Array:
        """Return the values of all devices, joined along the first axis."""
        return _as_bits(lambda bits: jax.lax.all_gather(bits, self.axes, tiled=True), values)

    def gather_gradients(self, rows: Float[Array, "n dim"]) -> Float[Array, "all dim"]:
        """Return the gradients of all devices, joined; they travel as in `send_gradients`."""
        scale = self.precision.loss_scale
        parts = encode(rows * scale, self.precision.backward)
        gathered = tuple(self.gather(part) for part in parts)
        return decode(gathered, self.precision.backward) / scale

    def _send_as(self, rows: Array, format: Format, lengths: ListLengths | None) -> Array:
        if format == "float32":
            return self.send(rows, lengths)
        return _send_encoded(rows, lengths, self, format)


class RaggedChannel(Channel):
    """A channel that sends lists of known lengths without their padding.

    It uses XLA's ragged all-to-all, which CPUs lack.
    """

    def send(self, values: Array, lengths: ListLengths | None = None) -> Array:
        return super().send(values) if lengths is None else self._send_ragged(values, lengths, 0)

    def send_lists(self, lists, lengths, *more, fill):
        # Lengths go first: a ragged all-to-all needs to know what it receives.
        received, *rest = self.send_together(lengths[:, None], *more)
        both = ListLengths(lengths, received[:, 0])
        return self._send_ragged(lists, both, fill), both, rest

    def _send_ragged(self, values: Array, lengths: ListLengths, fill: int) -> Array:
        devices, capacity = values.shape[:2]

        def move(bits: Array) -> Array:
            starts = jnp.arange(devices, dtype=jnp.int32) * capacity
            return jax.lax.ragged_all_to_all(
                bits.reshape(-1, *bits.shape[2:]),
                jnp.full((devices * capacity, *bits.shape[2:]), fill, bits.dtype),
                starts,
                lengths.sent,
                # Every other device stores the list from here at this device's line.
                jnp.full(devices, self.index * capacity, jnp.int32),
                lengths.received,
                axis_name=self.axes,
            ).reshape(bits.shape)

        return _as_bits(move, values)


def on_each_device(
    function: Callable[..., Any], mesh: Mesh | AbstractMesh, in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """Return `jax.shard_map` of a function, without JAX's check that replicated results agree."""
    # JAX cannot know that replicated tables get equal updates on all devices.
    return jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )


def _as_bits(move: Callable[[Array], Array], values: Array) -> Array:
    """Apply a collective to values; it gets 8-bit and 16-bit floats as unsigned integers."""
    # Where a device has no arithmetic for a narrow float, XLA computes in a wider type, and would
    # send that.
    if values.dtype.itemsize >= 4 or not jnp.issubdtype(values.dtype, jnp.floating):
        return move(values)
    unsigned = {1: jnp.uint8, 2: jnp.uint16}[values.dtype.itemsize]
    bits = jax.lax.bitcast_convert_type(values, unsigned)
    return jax.lax.bitcast_convert_type(move(bits), values.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _send_encoded(
    rows: Array, lengths: ListLengths | None, channel: Channel, format: Format
) -> Array:
    """Send rows in a format; the derivative ignores the rounding."""
    # A packed format has several arrays, such as codes and scales; each is sent.
    parts = encode(rows, format)
    return decode(tuple(channel.send(part, lengths) for part in parts), format)


def _send_encoded_forward(
    rows: Array, lengths: ListLengths | None, channel: Channel, format: Format
) -> tuple[Array, ListLengths | None]:
    return _send_encoded(rows, lengths, channel, format), lengths


def _send_encoded_backward(
    channel: Channel, format: Format, lengths: ListLengths | None, gradient: Array
) -> tuple[Array, None]:
    return channel.send_gradients(gradient, lengths and lengths.reversed), None


_send_encoded.defvjp(_send_encoded_forward, _send_encoded_backward)


def run_if(flag: Bool[Array, ""], body: Callable[[Any], Any], carried: Any) -> Any:
    """Return ``body(carried)`` if the flag holds, else ``carried``, without a copy of it."""
    # A loop of at most one turn. jax.lax.cond would copy the carried tables.

    def once(state: Any) -> Any:
        return jnp.zeros((), bool), body(state[1])

    return jax.lax.while_loop(lambda state: state[0], once, (flag, carried))[1]


class OneByOne(Turns):
    """Order of one program's exchanges in which each waits for the one before it."""

    # XLA removes a jax.lax.optimization_barrier before it schedules, so the dependence is
    # arithmetic: each input is combined with a number from the last result. The number never
    # changes the input, but the compiler cannot know that.

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
    """Return a negative number, which the compiler cannot know before it has the values."""
    # One element is enough to wait for. The number differs with its bits, so XLA cannot fold it.
    value = jax.lax.stop_gradient(values[(0,) * values.ndim])
    if jnp.issubdtype(value.dtype, jnp.floating):
        value = jax.lax.bitcast_convert_type(value.astype(jnp.float32), jnp.int32)
    return jnp.minimum(value, -1)


def is_known(values: Shaped[Array, "..."]) -> Bool[Array, ""]:
    """Return True, which the compiler cannot know before it has the values."""
    return _negative(values) < 0 if values.size else jnp.array(True)


@dataclasses.dataclass(frozen=True)
class SimulatedChannel(Channel):
    """A channel between the ``num_devices`` simulated devices of a CPU."""

    # Two favours that accelerators do not need:
    # - XLA's all-to-all on CPUs works on one array per device and copies an array that is not split
    #   like that. So kernels write and read messages as `num_devices` arrays (`sent`, `received`).
    # - XLA runs collectives that do not depend on each other at the same time. Each holds a thread
    #   of a pool that all simulated devices share. With many under way some device finds no thread
    #   to take part, and all wait for it for ever. So `turns` orders them.

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
