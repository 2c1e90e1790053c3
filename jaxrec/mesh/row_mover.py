"""Moves of rows between a checkpoint's logical arrays and the shards.

A logical array has the table's rows in order, in equal parts over the devices. Each device sends
its rows straight to the devices that need them. It never holds more than its parts of both arrays
and the rows of one turn.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Int32, Shaped

from jaxrec.embed.formats import TableArray, as_bits, of_bits
from jaxrec.mesh.channel import Channel, on_each_device
from jaxrec.mesh.placed_group import PlacedGroup, PlacedShard
from jaxrec.mesh.shard_access import COPY_ELEMENTS, over_devices, owners
from jaxrec.ragged.capacity import capacity_for


@dataclasses.dataclass(frozen=True)
class Move:
    """A copy of consecutive rows from one device's array to another's.

    Attributes:
        source: Device that has the rows.
        first: First row in the source's array.
        target: Device that gets the rows.
        start: First row in the target's array.
        count: Number of rows.
    """

    source: int
    first: int
    target: int
    start: int
    count: int

    def reversed(self) -> Move:
        """Return the move in the other direction."""
        return Move(self.target, self.start, self.source, self.first, self.count)


@dataclasses.dataclass(frozen=True)
class RowMover:
    """Moves rows between the devices of one replica.

    Attributes:
        sharding: Sharding of the logical arrays.
        channel: Channel between the devices.
    """

    sharding: NamedSharding
    channel: Channel

    @property
    def devices(self) -> int:
        """Number of devices."""
        return math.prod(self.sharding.mesh.shape[axis] for axis in self.channel.axes)

    def moves(
        self,
        placed: PlacedGroup,
        shards: list[PlacedShard],
        part: int,
        num_rows: int | None = None,
        replica: int | None = None,
    ) -> Iterator[Move]:
        """Iterate over the moves that copy a column slice's shards to the logical array.

        Args:
            placed: The group.
            shards: The shards of the slice.
            part: Number of rows of each device's part of the logical array.
            num_rows: Number of rows to move; None: all.
            replica: Device that sends the rows of a replicated group; None: each target copies its
                own.
        """
        for device, shard in owners(placed, shards):
            first, last = shard.shard.rows
            last = last if num_rows is None else min(last, num_rows)
            for target in range(self.devices):
                begin, end = max(first, target * part), min(last, (target + 1) * part)
                if begin < end:
                    own = target if replica is None else replica
                    source = own if placed.is_replicated else device
                    local_row = shard.local_row + begin - first
                    yield Move(source, local_row, target, begin - target * part, end - begin)

    def move(
        self,
        source: TableArray,
        target: TableArray,
        moves: Iterable[Move],
        out_of: tuple[int, int] | None = None,
        into: tuple[int, int] | None = None,
    ) -> TableArray:
        """Copy rows of ``source`` into ``target``, which is donated.

        ``out_of`` and ``into`` are the first column and the column after the last, in the source
        and in the target; None: all columns.
        """
        # State with one number per row is equal in all column slices, and has no columns to cut.
        if source.ndim == 1 or source.shape[1:] == target.shape[1:]:
            out_of = into = None
        devices, moves = self.devices, list(moves)
        width = math.prod(target.shape[1:] if out_of is None else source.shape[1:])
        longest = capacity_for(max((move.count for move in moves), default=0))
        size = max(1, min(longest, COPY_ELEMENTS // (devices * max(1, width))))
        # In a turn each device sends one range of up to `size` rows to each device. So all moves
        # are one program, whose number of turns is an argument.
        turns = [[0] * devices for _ in range(devices)]
        steps = []
        for move in moves:
            for done in range(0, move.count, size):
                turn = turns[move.source][move.target]
                turns[move.source][move.target] += 1
                steps.append((turn, move, done))
        num_turns = max(map(max, turns))
        sent = np.zeros((devices, capacity_for(num_turns), devices), np.int32)
        received = np.zeros((devices, capacity_for(num_turns), devices, 2), np.int32)
        for turn, move, done in steps:
            sent[move.source, turn, move.target] = move.first + done
            rows = move.start + done, min(size, move.count - done)
            received[move.target, turn, move.source] = rows
        moved = _exchange(
            target,
            source,
            over_devices(sent, self.sharding),
            over_devices(received, self.sharding),
            np.int32(num_turns),
            size,
            out_of,
            into,
            self.channel,
            (target.sharding, source.sharding, self.sharding),
        )
        # Two programs with collectives may wait for each other on simulated devices, so this one
        # ends before the next begins.
        return jax.block_until_ready(moved)


@functools.partial(jax.jit, static_argnums=(5, 6, 7, 8, 9), donate_argnums=0)
def _exchange(
    target: Shaped[TableArray, "rows ..."],
    source: Shaped[TableArray, "others ..."],
    sent: Int32[Array, "devices turns devices"],
    received: Int32[Array, "devices turns devices 2"],
    num_turns: Int32[Array, ""],
    size: int,
    out_of: tuple[int, int] | None,
    into: tuple[int, int] | None,
    channel: Channel,
    shardings: tuple[NamedSharding, NamedSharding, NamedSharding],
) -> Shaped[TableArray, "rows ..."]:
    """Send rows between all devices in turns, up to ``size`` rows for each pair in a turn.

    Args:
        target: Array that gets the rows.
        source: Array that has the rows.
        sent: First row of the source's array for each turn and target.
        received: First row of the target's array, and number of rows, for each turn and source.
        num_turns: Number of turns; the other ones are padding.
        size: Largest number of rows in a turn.
        out_of: Columns of the source, as for `RowMover.move`.
        into: Columns of the target.
        channel: Channel between the devices.
        shardings: Shardings of the target, of the source, and of ``sent`` and ``received``.
    """
    of_target, of_source, of_places = shardings

    def on_device(target, source, sent, received, num_turns):
        index = jnp.arange(size, dtype=jnp.int32)[None]

        def one_turn(turn, bits):
            rows = source.at[sent[0, turn][:, None] + index].get(mode="clip")
            if out_of is not None:
                rows = rows[..., slice(*out_of)]
            rows = channel.send(rows).astype(target.dtype)
            if into is not None:  # the source may be wider than the columns, with zeros behind them
                rows = rows[..., : into[1] - into[0]]
            elif out_of is not None:
                missing = target.shape[1] - rows.shape[-1]
                rows = jnp.pad(rows, ((0, 0), (0, 0), (0, missing)))
            start, count = received[0, turn][:, :1], received[0, turn][:, 1:]
            places = jnp.where(index < count, start + index, target.shape[0])
            place = bits.at[places] if into is None else bits.at[places, slice(*into)]
            return place.set(as_bits(rows), mode="drop")

        moved = jax.lax.fori_loop(0, num_turns, one_turn, as_bits(target))
        return of_bits(moved, target.dtype)

    in_specs = of_target.spec, of_source.spec, of_places.spec, of_places.spec, PartitionSpec()
    exchange = on_each_device(on_device, of_target.mesh, in_specs, of_target.spec)
    return exchange(target, source, sent, received, num_turns)
