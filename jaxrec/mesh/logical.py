"""Tables on a mesh as checkpoints have them: `jaxrec.embed.logical`, from device to device.

A device sends rows straight to the one that has them in the other order; none ever has more than
its parts and a piece that is under way.
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

from jaxrec.embed.logical import (
    LogicalTable,
    from_logical,
    logical_form,
    part_rows,
    to_logical,
)
from jaxrec.mesh.collectives import Channel
from jaxrec.mesh.layout import PlacedBlock, PlacedGroup
from jaxrec.mesh.storage import PIECE_ELEMENTS, by_device, find_config, new_rows, pieces_of
from jaxrec.mesh.tables import ShardedTables
from jaxrec.ragged.capacity import rung


@dataclasses.dataclass(frozen=True)
class _Run:
    """Consecutive rows of a device that go to consecutive rows of a device.

    Attributes:
        source: The device that has them.
        first: The first of them there.
        target: The device that gets them.
        start: The first of them there.
        count: How many.
    """

    source: int
    first: int
    target: int
    start: int
    count: int

    def reversed(self) -> _Run:
        return _Run(self.target, self.start, self.source, self.first, self.count)


@logical_form.register(ShardedTables)
def logical_form_sharded(tables: ShardedTables, name: str) -> LogicalTable:
    """`jaxrec.embed.logical.logical_form`: in equal parts over the devices of a copy."""
    config, sharding = find_config(tables, name), _sharding(tables)
    room = _devices(tables) * part_rows(config.num_embeddings, _devices(tables))
    placed, _ = tables.layout.places(name)[0]

    def form(array: Array) -> jax.ShapeDtypeStruct:
        # Of rows that are cut by columns the state may be one number all the same.
        shape = (room, config.embedding_dim)[: array.ndim]
        return jax.ShapeDtypeStruct(shape, array.dtype, sharding=sharding)

    arrays = LogicalTable(tables.rows[placed.group.name], tables.state[placed.group.name])
    return jax.tree.map(form, arrays)


@to_logical.register(ShardedTables)
def to_logical_sharded(tables: ShardedTables, name: str) -> LogicalTable:
    """`jaxrec.embed.logical.to_logical`: rows go to the devices that have them in order."""
    form, sharding = logical_form_sharded(tables, name), _sharding(tables)
    devices = _devices(tables)

    def make(wanted: jax.ShapeDtypeStruct) -> Array:
        zeros = np.zeros(wanted.shape[1:], wanted.dtype)
        return new_rows(zeros, wanted.shape[0] // devices, sharding)

    logical = jax.tree.map(make, form)
    rows, state = logical.rows, dict(logical.state)
    for placed, columns, blocks in pieces_of(tables.layout, name):
        runs = list(_runs(placed, blocks, form.rows.shape[0] // devices, devices))
        rows = _move(tables, tables.rows[placed.group.name], rows, runs, into=columns)
        for key, array in tables.state[placed.group.name].items():
            state[key] = _move(tables, array, state[key], runs, into=columns)
    return LogicalTable(rows, state)


@from_logical.register(ShardedTables)
def from_logical_sharded(
    tables: ShardedTables, name: str, logical: LogicalTable, num_rows: int
) -> ShardedTables:
    """`jaxrec.embed.logical.from_logical`: rows go to the devices that keep them."""
    all_rows = dict(tables.rows)
    all_state = {group: dict(arrays) for group, arrays in tables.state.items()}
    devices = _devices(tables)
    for placed, columns, blocks in pieces_of(tables.layout, name):
        group, part = placed.group.name, logical.rows.shape[0] // devices
        runs = [
            run.reversed()
            for copy in range(devices if placed.is_replicated else 1)
            for run in _runs(placed, blocks, part, devices, num_rows, copy)
        ]
        all_rows[group] = _move(tables, logical.rows, all_rows[group], runs, out_of=columns)
        for key, array in logical.state.items():
            old = all_state[group][key]
            all_state[group][key] = _move(tables, array, old, runs, out_of=columns)
    return dataclasses.replace(tables, rows=all_rows, state=all_state)


def _devices(tables: ShardedTables) -> int:
    """The devices of a copy of the tables."""
    return math.prod(tables.mesh.shape[axis] for axis in tables.axes)


def _sharding(tables: ShardedTables) -> NamedSharding:
    return NamedSharding(tables.mesh, PartitionSpec(tables.axes))


def _runs(
    placed: PlacedGroup,
    blocks: list[PlacedBlock],
    part: int,
    devices: int,
    num_rows: int | None = None,
    copy: int | None = None,
) -> Iterator[_Run]:
    """From the blocks of a piece of a table to parts of so many rows.

    Where every device has all rows they come from its own, or from those of device ``copy``.
    """
    for device, block in by_device(placed, blocks):
        first, last = block.block.rows
        last = last if num_rows is None else min(last, num_rows)
        for target in range(devices):
            begin, end = max(first, target * part), min(last, (target + 1) * part)
            if begin < end:
                own = target if copy is None else copy
                source = own if placed.is_replicated else device
                local_row = block.local_row + begin - first
                yield _Run(source, local_row, target, begin - target * part, end - begin)


def _move(
    tables: ShardedTables,
    source: Array,
    target: Array,
    runs: Iterable[_Run],
    out_of: tuple[int, int] | None = None,
    into: tuple[int, int] | None = None,
) -> Array:
    """Copies runs of rows into the target, in place; from some columns, or into some."""
    # State of one number a row is the same for all columns of the row.
    if source.ndim == 1 or source.shape[1:] == target.shape[1:]:
        out_of = into = None
    devices = _devices(tables)
    width = math.prod(target.shape[1:] if out_of is None else source.shape[1:])
    runs = list(runs)
    longest = rung(max((run.count for run in runs), default=0))
    size = max(1, min(longest, PIECE_ELEMENTS // (devices * max(1, width))))
    # For each turn what a device sends to each other, and what it does with what comes from each.
    turns = [[0] * devices for _ in range(devices)]
    moves = []
    for run in runs:
        for done in range(0, run.count, size):
            turn = turns[run.source][run.target]
            turns[run.source][run.target] += 1
            moves.append((turn, run, done))
    num_turns = max(map(max, turns))
    sent = np.zeros((devices, rung(num_turns), devices), np.int32)
    received = np.zeros((devices, rung(num_turns), devices, 2), np.int32)
    for turn, run, done in moves:
        sent[run.source, turn, run.target] = run.first + done
        received[run.target, turn, run.source] = run.start + done, min(size, run.count - done)
    sharding = _sharding(tables)
    places = [_over_devices(entries, sharding) for entries in (sent, received)]
    moved = _exchange(
        target,
        source,
        *places,
        np.int32(num_turns),
        size,
        out_of,
        into,
        tables.channel,
        (target.sharding, source.sharding, sharding),
    )
    # On simulated devices programs with collectives must not wait for each other.
    return jax.block_until_ready(moved)


def _over_devices(values: np.ndarray, sharding: NamedSharding) -> Array:
    return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])


@functools.partial(jax.jit, static_argnums=(5, 6, 7, 8, 9), donate_argnums=0)
def _exchange(
    target: Shaped[Array, "rows ..."],
    source: Shaped[Array, "others ..."],
    sent: Int32[Array, "devices room devices"],
    received: Int32[Array, "devices room devices 2"],
    num_turns: Int32[Array, ""],
    size: int,
    out_of: tuple[int, int] | None,
    into: tuple[int, int] | None,
    channel: Channel,
    shardings: tuple[NamedSharding, NamedSharding, NamedSharding],
) -> Shaped[Array, "rows ..."]:
    """In each turn every device sends a piece of ``size`` rows to every device."""
    of_target, of_source, of_places = shardings

    def on_device(target, source, sent, received, num_turns):
        index = jnp.arange(size, dtype=jnp.int32)[None]

        def one_turn(turn, target):
            rows = source.at[sent[0, turn][:, None] + index].get(mode="clip")
            if out_of is not None:
                rows = rows[..., slice(*out_of)]
            rows = channel.send(rows).astype(target.dtype)
            start, count = received[0, turn][:, :1], received[0, turn][:, 1:]
            places = jnp.where(index < count, start + index, target.shape[0])
            place = target.at[places] if into is None else target.at[places, slice(*into)]
            return place.set(rows, mode="drop")

        return jax.lax.fori_loop(0, num_turns, one_turn, target)

    return jax.shard_map(
        on_device,
        mesh=of_target.mesh,
        in_specs=(
            of_target.spec,
            of_source.spec,
            of_places.spec,
            of_places.spec,
            PartitionSpec(),
        ),
        out_specs=of_target.spec,
        check_vma=False,
    )(target, source, sent, received, num_turns)
