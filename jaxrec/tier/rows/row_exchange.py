"""Rows on their way between the devices that use them and the processes whose stores have them.

Every process knows which device has the slot of a row and which process owns its record. So one
all-to-all sends each row straight to its destination:

    slot's device  -- evicted row -->  a device of the owner  -->  the owner's store
    slot's device  <-- returning row --  a device of the owner  <--  the owner's store

A message between two devices has a static capacity, a power of two. A device sends and receives
about ``n / d`` of ``n`` rows over ``d`` devices if they are spread evenly.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Int32, UInt8

from jaxrec.embed.rows import RowsOnDevices, table_dims
from jaxrec.embed.slots import GroupSlots, RowSlots, TableRows
from jaxrec.mesh.agree import on_host
from jaxrec.mesh.store import MeshStore


def send_to_owners(store: MeshStore, requests: Sequence[TableRows]) -> RowsOnDevices:
    """Gather rows with their optimizer state, and send each to the process that owns its record.

    Every process passes the same requests, with owners, and gets the rows that it owns.
    """
    plan = _Plan(store, requests, is_read=True)
    arrays = {
        group: _read(store, plan.put(_by_device(slots.slots)), group)
        for group, slots in plan.groups.items()
    }
    own = tuple(TableRows(each.table, each.rows[each.owners == plan.process]) for each in requests)
    return RowsOnDevices(own, table_dims(store, own), plan.at_owner, arrays, _own_part)


def write_from_owners(
    store: MeshStore, requests: Sequence[TableRows], values: Sequence[Mapping[str, np.ndarray]]
) -> MeshStore:
    """Set rows and their optimizer state, in place: the store is donated.

    Every process passes the same requests, and the values of the rows that it owns: for each
    request its rows, under ``"rows"``, and their state.
    """
    plan = _Plan(store, requests, is_read=False)
    for group, slots in plan.groups.items():
        at_owner = plan.at_owner[group]
        numbers = {number for number, _, _ in at_owner.parts}
        names = set.intersection(*[set(values[number]) for number in numbers])
        arrays = {
            name: plan.put_own(_by_device(at_owner.gather([_some(each, name) for each in values])))
            for name in names
        }
        rows = arrays.pop("rows")
        store = _write(store, plan.put(_by_device(slots.slots)), rows, arrays, group)
    return store


class _Plan:
    """Plan of an exchange of rows: which device sends which of them to which device.

    With ``is_read`` the rows go to their owners, otherwise they come from there, to every replica.

    Attributes:
        process: Index of this process.
        groups: For each group the slots ``[devices, devices, n]``. Slot ``[d, e, i]`` is the row of
            device ``d``'s array that is number ``i`` of those that travel between ``d`` and ``e``.
        at_owner: For each group positions among the rows that this process owns, ``[own devices,
            devices, n]``. The first device is an owner's, the second one has the slot.
    """

    def __init__(self, store: MeshStore, requests: Sequence[TableRows], *, is_read: bool) -> None:
        devices = store.mesh.devices.flat
        processes = np.array([device.process_index for device in devices])
        self.process = jax.process_index()
        # Process index and device order come from the mesh, so that all processes compute the same
        # plan from the same requests, without an exchange.
        self._own_devices = np.flatnonzero(processes == self.process)
        self._sharding = NamedSharding(store.mesh, PartitionSpec(store.axes))
        replicated = {placed.name for placed in store.layout.groups if placed.is_replicated}
        slots: dict[str, list[np.ndarray]] = {}
        parts: dict[str, list[tuple[int, RowSlots, int]]] = {}
        for number, request in enumerate(requests):
            if not len(request.rows) or request.owners is None:
                continue
            is_own = request.owners == self.process
            # One more element, -1, so that padding, which indexes with -1, finds padding.
            position = np.append(np.where(is_own, np.cumsum(is_own) - 1, -1), -1).astype(np.int32)
            for part in store.row_slots(request.table, request.rows):
                index = part.index
                if is_read and part.group in replicated:
                    # One replica sends the row: the first device of the owner.
                    firsts = np.unique(processes, return_index=True)[1]
                    is_first = np.arange(len(index))[:, None] == firsts[request.owners]
                    index = np.where(is_first, index, -1)
                places, sent = _messages(index, request.owners, processes)
                of_group = slots.setdefault(part.group, [])
                start = sum(each.shape[-1] for each in of_group)
                of_group.append(_taken(part.slots.reshape(-1), places))
                mine = position[sent].swapaxes(0, 1)[self._own_devices]
                parts.setdefault(part.group, []).append(
                    (number, RowSlots(part.group, part.columns, mine, mine), start)
                )
        self.groups: dict[str, GroupSlots] = {}
        self.at_owner: dict[str, GroupSlots] = {}
        for group, of_group in slots.items():
            joined, dim = np.concatenate(of_group, axis=-1), store.groups[group].dim
            self.groups[group] = GroupSlots(joined, (), dim)
            own = np.zeros((len(self._own_devices), *joined.shape[1:]), np.int32)
            self.at_owner[group] = GroupSlots(own, tuple(parts[group]), dim)

    def put(self, values: np.ndarray) -> Array:
        """Put ``values[d]`` on device ``d``; every process has all values, ``[devices, ...]``."""
        return jax.make_array_from_callback(
            values.shape, self._sharding, lambda index: values[index]
        )

    def put_own(self, values: np.ndarray) -> Array:
        """Put ``values[d]`` on the ``d``-th device of this process, ``[own devices, ...]``."""
        place = {int(device): number for number, device in enumerate(self._own_devices)}
        shape = (self._sharding.mesh.devices.size, *values.shape[1:])

        def of_device(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None
            return values[place[index[0].start or 0]][None]

        return jax.make_array_from_callback(shape, self._sharding, of_device)


def _messages(
    index: np.ndarray, owners: np.ndarray, processes: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the messages between the devices of slots and the devices of owners.

    ``index`` is the row of each slot, ``[devices, m]``, -1 at padding. ``owners`` has the process
    of each row, ``processes`` the process of each device.

    Returns:
        Two int64 arrays ``[devices, devices, capacity]``, -1 at padding. Message ``[d, e]`` goes
        between device ``d``, which has the slots, and device ``e`` of the rows' owner. The first
        array has the slots' positions in the flat ``index``, the second one the rows.
    """
    num_devices = len(processes)
    places = np.flatnonzero(index >= 0)
    rows = index.reshape(-1)[places]
    here, owner = places // max(1, index.shape[1]), owners[rows]
    # A device's rows for one process go to the process's devices in turn, for even messages.
    by_process = np.argsort(processes, kind="stable")
    counts = np.bincount(processes, minlength=processes.max() + 1)
    firsts = np.cumsum(counts) - counts
    turn = _ranks(here * counts.size + owner) % counts[owner]
    pair = here * num_devices + by_process[firsts[owner] + turn]
    rank = _ranks(pair)
    capacity = _size_for(int(rank.max()) + 1 if rank.size else 0)
    messages = np.full((2, num_devices * num_devices, capacity), -1, np.int64)
    messages[0, pair, rank], messages[1, pair, rank] = places, rows
    shape = num_devices, num_devices, capacity
    return messages[0].reshape(shape), messages[1].reshape(shape)


def _ranks(keys: np.ndarray) -> np.ndarray:
    """Return the number of equal keys before each key: ``[5, 7, 5]`` to ``[0, 0, 1]``."""
    # A stable sort puts equal keys in their order, where a rank is the distance from the first.
    order = np.argsort(keys, kind="stable")
    in_order = keys[order]
    is_first = np.append(True, in_order[1:] != in_order[:-1])[: keys.size]
    firsts = np.flatnonzero(is_first)
    ranks = np.empty(keys.size, np.int64)
    ranks[order] = np.arange(keys.size) - np.repeat(firsts, np.diff(np.append(firsts, keys.size)))
    return ranks


def _size_for(count: int) -> int:
    """Return the smallest power of two that holds a count, so that few programs compile."""
    return 1 << max(0, count - 1).bit_length()


def _taken(slots: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Return ``slots[places]``, int32, with -1 where ``places`` is -1."""
    return np.where(places < 0, np.int32(-1), slots[places]) if slots.size else places


def _some(values: Mapping[str, np.ndarray], name: str) -> np.ndarray:
    """Return the array ``name`` of a request's values; an empty one as a row of zeros."""
    array = values.get(name, np.zeros(1))
    return array if len(array) else np.zeros((1, *array.shape[1:]), array.dtype)


def _by_device(values: np.ndarray) -> np.ndarray:
    """Join the second and third axes: ``[devices, d, n, ...]`` to ``[devices, d * n, ...]``."""
    return values.reshape(values.shape[0], -1, *values.shape[3:])


def _own_part(array: Array, slots: GroupSlots) -> np.ndarray:
    """Return the shards of an array on this process's devices, in the shape of ``slots``."""
    return on_host(array).reshape(*slots.slots.shape, *array.shape[2:])


@functools.partial(jax.jit, static_argnums=2)
def _read(
    store: MeshStore, slots: Int32[Array, "devices n"], group: str
) -> tuple[Array, dict[str, Array]]:
    return _send(store, store.read_rows(group, slots))


@functools.partial(jax.jit, static_argnums=4, donate_argnums=0)
def _write(
    store: MeshStore,
    slots: Int32[Array, "devices n"],
    rows: Array,
    state: dict[str, Array],
    group: str,
) -> MeshStore:
    return store.write_rows(group, slots, *_send(store, (rows, state)))


def _send(store: MeshStore, tree: Any) -> Any:
    """Send message ``d`` of each device to device ``d``; traced.

    The arrays of ``tree`` are ``[devices, devices * n, ...]``.
    """
    over = PartitionSpec(store.axes)

    def on_device(tree: Any) -> Any:
        arrays, structure = jax.tree.flatten(tree)
        # As bytes, arrays of all types go by one collective: its latency counts more than its
        # bytes.
        messages = [_as_bytes(array[0], store.channel.size) for array in arrays]
        ends = np.cumsum([each.shape[-1] for each in messages])
        sent = store.channel.send(jnp.concatenate(messages, axis=-1))
        parts = jnp.split(sent, ends[:-1], axis=-1)
        received = [_from_bytes(part, like[0]) for part, like in zip(parts, arrays, strict=True)]
        return jax.tree.unflatten(structure, [each[None] for each in received])

    return store.shard_map(on_device, over, over)(tree)


def _as_bytes(array: Array, devices: int) -> UInt8[Array, "devices n bytes"]:
    bits = jax.lax.bitcast_convert_type(array, jnp.uint8)
    return bits.reshape(devices, array.shape[0] // devices, -1)


def _from_bytes(bits: UInt8[Array, "devices n bytes"], like: Array) -> Array:
    width = (like.dtype.itemsize,) if like.dtype.itemsize > 1 else ()
    return jax.lax.bitcast_convert_type(bits.reshape(*like.shape, *width), like.dtype)
