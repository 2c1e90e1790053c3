"""Host batches on a mesh."""

from __future__ import annotations

import dataclasses
import itertools
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrec.mesh.agree import gather_numbers, require_same
from jaxrec.ragged import KeyedJaggedArray
from jaxrec.ragged.capacity import rung
from jaxrec.ragged.columns import numbers, whole_number

# Numbers that processes tell each other at a time.
_NUMBERS = 256


def shard_batch(batch: Any, mesh: Mesh, *, capacities: Mapping[str, int] | None = None) -> Any:
    """Puts a host batch on a mesh, its samples in equal parts over all devices.

    Where samples share bags (``inverse_indices``), each device has the bags that its own use.

    Args:
        batch: Any pytree of `KeyedJaggedArray`s and arrays with a leading batch axis. With several
            processes, this process's part of the batch; all of them call this together, in the
            same order.
        mesh: The devices.
        capacities: Room for the ids of each key on a device; None: as much as the fullest device
            needs, on which processes agree by a small gather. All of them give the same. They then
            wait for no other, and a thread, such as those of `jaxrec.train.Pipeline`, may put
            batches while others compute: gathers beside a step come in no order that all share.

    Returns:
        The same pytree. Arrays are ``[batch, ...]`` over the devices. A `KeyedJaggedArray` has one
        more axis in front, over the devices: each has its own samples as a batch of its own, all
        of equal capacities and numbers of bags.

    Raises:
        TypeError: If a leaf is no array of numbers, or ``mesh`` no mesh.
        ValueError: If the batch does not divide by the devices, an integer does not fit 32 bits,
            this process has no device of the mesh, processes pass batches of different kinds, or
            the ids of a key have no room.

    Example:
        >>> import jax, jaxrec
        >>> mesh = jax.make_mesh((1,), ("data",))
        >>> batch = jaxrec.KeyedJaggedArray.from_lists({"user": [[1], [2, 3]]})
        >>> shard_batch(batch, mesh).values.shape
        (1, 8)
    """
    if not isinstance(mesh, Mesh):
        raise TypeError(f"a batch is put on a jax.sharding.Mesh, got {mesh!r}")
    if not isinstance(capacities, Mapping | None):
        raise TypeError(f"capacities are by key, {{key: capacity}}, got {capacities!r}")
    devices = len(mesh.local_devices)
    if devices == 0:
        raise ValueError(
            f"process {jax.process_index()} has no device of the mesh; a batch is passed by the "
            "processes that have"
        )
    leaves, tree = jax.tree_util.tree_flatten_with_path(
        batch, is_leaf=lambda leaf: isinstance(leaf, KeyedJaggedArray)
    )
    names = [f"batch{jax.tree_util.keystr(path)}" for path, _ in leaves]
    cuts = [_cut(leaf, devices, name) for name, (_, leaf) in zip(names, leaves, strict=True)]
    of_names = dict(zip(names, cuts, strict=True))
    room = iter(_agree(of_names) if capacities is None else _fit(of_names, capacities))
    sharding = NamedSharding(mesh, PartitionSpec(tuple(mesh.axis_names)))
    placed = []
    for cut in cuts:
        host = cut if isinstance(cut, np.ndarray) else cut.padded([next(room) for _ in cut.needs])
        placed.append(
            jax.tree.map(lambda x: jax.make_array_from_process_local_data(sharding, x), host)
        )
    return jax.tree.unflatten(tree, placed)


@dataclasses.dataclass(frozen=True)
class _Column:
    """A key's ids and bags, device by device.

    Attributes:
        ids: The ids of all devices, one after the other, without padding.
        weights: Their weights, or None.
        lengths: ``[devices, bags]`` lengths of bags; devices with fewer bags have empty ones.
        inverse: ``[devices, samples]`` the bag of each sample, or None.
    """

    ids: np.ndarray
    weights: np.ndarray | None
    lengths: np.ndarray
    inverse: np.ndarray | None

    @property
    def needs(self) -> tuple[int, int]:
        """The capacity and number of bags that every device must have."""
        bags = self.lengths.shape[1]
        if self.inverse is not None:
            # No device uses more bags than it has samples.
            bags = min(rung(bags), self.inverse.shape[1])
        return rung(int(self.lengths.sum(axis=1).max())), bags


@dataclasses.dataclass(frozen=True)
class _Cut:
    """A batch cut by samples."""

    keys: tuple[str, ...]
    columns: tuple[_Column, ...]
    devices: int
    samples: int

    @property
    def needs(self) -> tuple[int, ...]:
        """For each key its `_Column.needs`."""
        return tuple(itertools.chain.from_iterable(column.needs for column in self.columns))

    @property
    def kind(self) -> str:
        """What must be the same on all processes."""
        kind = ", ".join(sorted({column.ids.dtype.name for column in self.columns}))
        shared = any(column.inverse is not None for column in self.columns)
        weighted = any(column.weights is not None for column in self.columns)
        return (
            f"{self.samples} samples a device of {kind} ids"
            f"{' with weights' if weighted else ''}{' and inverse_indices' if shared else ''}, "
            f"keys {', '.join(self.keys)}"
        )

    def padded(self, room: Sequence[int]) -> KeyedJaggedArray:
        """The batch with an axis over the devices, each key with room for its needs."""
        capacities, strides = tuple(room[::2]), tuple(room[1::2])
        values = _fill([column.ids for column in self.columns], self.columns, capacities)
        lengths = np.zeros((self.devices, sum(strides)), np.int32)
        for column, start in zip(self.columns, np.cumsum((0, *strides)), strict=False):
            lengths[:, start : start + column.lengths.shape[1]] = column.lengths
        weights = inverse = None
        if any(column.weights is not None for column in self.columns):
            weights = _fill([column.weights for column in self.columns], self.columns, capacities)
        if shared := [column.inverse for column in self.columns if column.inverse is not None]:
            inverse = np.stack(shared, axis=1)
        arrays = [array for array in (values, lengths, weights, inverse) if array is not None]
        first = KeyedJaggedArray(
            values[0],
            lengths[0],
            None if weights is None else weights[0],
            None if inverse is None else inverse[0],
            self.keys,
            capacities,
            strides,
        )
        return jax.tree.unflatten(jax.tree.structure(first), arrays)


def _cut(leaf: Any, devices: int, name: str) -> _Cut | np.ndarray:
    """A leaf of a batch as it will lie; a dense array lies as it is."""
    if not isinstance(leaf, KeyedJaggedArray):
        array = numbers(name, leaf)
        if array.ndim == 0:
            raise TypeError(f"{name} is the number {array}; a batch has arrays of samples")
        _check_divides(array.shape[0], devices, name)
        # JAX reads the host's memory later, when a reader may have filled it anew.
        return array.copy() if np.may_share_memory(array, leaf) else array
    if np.ndim(leaf.values) != 1:
        raise ValueError(f"{name} is on a mesh already; shard_batch takes batches on the host")
    batch = jax.tree_util.tree_map_with_path(
        lambda path, array: numbers(f"{name}{jax.tree_util.keystr(path)}", array), leaf
    )
    if batch.inverse_indices is None and len(set(batch.strides)) > 1:
        raise ValueError(
            f"{name}: its keys have different numbers of bags, {batch.strides}, and no "
            "inverse_indices say which sample has which"
        )
    _check_divides(batch.batch_size, devices, name)
    columns = tuple(_column(batch, key, devices) for key in range(len(batch.keys)))
    return _Cut(batch.keys, columns, devices, batch.batch_size // devices)


def _column(batch: KeyedJaggedArray, key: int, devices: int) -> _Column:
    first_id, first_bag = sum(batch.capacities[:key]), sum(batch.strides[:key])
    lengths = np.asarray(batch.lengths)[first_bag : first_bag + batch.strides[key]]
    ids = slice(first_id, first_id + int(lengths.sum()))
    values = np.asarray(batch.values)[ids]
    weights = None if batch.weights is None else np.asarray(batch.weights)[ids]
    if batch.inverse_indices is None:
        return _Column(values, weights, lengths.reshape(devices, -1), None)

    inverse = np.asarray(batch.inverse_indices)[key].reshape(devices, -1)
    on_device = np.arange(devices)[:, None]
    is_used = np.zeros((devices, lengths.size), bool)
    is_used[on_device, inverse] = True
    renumbered = np.cumsum(is_used, axis=1, dtype=np.int32) - np.int32(1)
    owners, bags = np.nonzero(is_used)
    taken = lengths[bags]
    cut = np.zeros((devices, int(is_used.sum(axis=1).max(initial=0))), np.int32)
    cut[owners, renumbered[owners, bags]] = taken
    # Where each bag's ids begin, less where they will.
    shifts = (np.cumsum(lengths) - lengths)[bags] - (np.cumsum(taken) - taken)
    source = np.repeat(shifts, taken) + np.arange(int(taken.sum()))
    return _Column(
        values[source],
        None if weights is None else weights[source],
        cut,
        renumbered[on_device, inverse],
    )


def _fill(
    arrays: Sequence[np.ndarray | None], columns: Sequence[_Column], capacities: Sequence[int]
) -> np.ndarray:
    """The devices' parts of an array for each key, each in a segment of its own."""
    present = [array for array in arrays if array is not None]
    devices = columns[0].lengths.shape[0]
    filled = np.zeros((devices, sum(capacities)), np.result_type(*present))
    starts = np.cumsum((0, *capacities))
    for array, column, start in zip(present, columns, starts, strict=False):
        ends = np.cumsum(column.lengths.sum(axis=1))
        for device, (first, last) in enumerate(itertools.pairwise((0, *ends))):
            filled[device, start : start + last - first] = array[first:last]
    return filled


def _check_divides(samples: int, devices: int, name: str) -> None:
    if samples == 0 or samples % devices:
        raise ValueError(
            f"{name}: a batch of {samples} samples does not divide by the {devices} devices of the "
            f"mesh in this process; add {-samples % devices or devices} samples of weight 0 with "
            "jaxrec.data.pad_batch(batch, batch_size), which Trainer(batch_size=...) does, or drop "
            f"{samples % devices}"
        )


def _fit(cuts: dict[str, _Cut | np.ndarray], capacities: Mapping[str, int]) -> list[int]:
    """Room for the given capacities, in the order of the cuts."""
    room = []
    for name, cut in cuts.items():
        if not isinstance(cut, _Cut):
            continue
        for key, column in zip(cut.keys, cut.columns, strict=True):
            needed = int(column.lengths.sum(axis=1).max())
            whole_number(f"capacities, key {key!r}", capacities.get(key, 0))
            if needed > capacities.get(key, 0):
                raise ValueError(
                    f"{name}: a device has {needed} ids of key {key!r}, but capacities has room "
                    f"for {capacities.get(key, 0)}"
                )
            # No device uses more bags than it has samples.
            room += [capacities[key], cut.samples]
    return room


def _agree(cuts: dict[str, _Cut | np.ndarray]) -> list[int]:
    """Room for the needs of all processes, in the order of the cuts."""
    needs = [need for cut in cuts.values() if isinstance(cut, _Cut) for need in cut.needs]
    if jax.process_count() == 1:
        return needs
    facts = {
        name: cut.kind if isinstance(cut, _Cut) else f"{cut.dtype}{list(cut.shape)}"
        for name, cut in cuts.items()
    }
    # As many numbers whatever the batch, or processes that differ would wait for each other.
    kind = zlib.crc32(repr(facts).encode()) >> 1
    numbers = [kind, *needs]
    agreed: list[int] = []
    for start in range(0, len(numbers), _NUMBERS):
        part = numbers[start : start + _NUMBERS]
        gathered = gather_numbers(part + [0] * (_NUMBERS - len(part)))
        if start == 0 and len(set(gathered[:, 0].tolist())) > 1:
            require_same("batch", facts)
        agreed += gathered.max(axis=0)[: len(part)].tolist()
    return agreed[1:]
