"""Host batches on a mesh."""

from __future__ import annotations

import dataclasses
import itertools
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrec.mesh.agree import gather_numbers, require_same
from jaxrec.ragged import KeyedJaggedArray
from jaxrec.ragged.bounds import INT32_BOUND
from jaxrec.ragged.capacity import capacity_for
from jaxrec.ragged.columns import numbers, whole_number
from jaxrec.ragged.packing import id_bits_of
from jaxrec.ragged.shared_bags import sample_capacity
from jaxrec.ragged.wide_ids import WideIds

# Count of the numbers that processes gather at a time.
_NUMBERS = 256


def shard_batch(
    batch: Any,
    mesh: Mesh,
    *,
    capacities: Mapping[str, int] | None = None,
    id_bits: Literal[32, 64] = 32,
) -> Any:
    """Put a host batch on a mesh, its samples in equal parts over all devices.

    Where samples share bags (``inverse_indices``), each device gets the bags of its own samples.

    Args:
        batch: Any pytree of `KeyedJaggedArray`s and arrays with a leading batch axis. With several
            processes, this process's part of the batch; all of them call this together, in the
            same order.
        mesh: The devices.
        capacities: Capacity of each key on a device, the same in all processes. None: the demand of
            the fullest device, on which processes agree by a small gather. With capacities they
            need not wait for each other, and a thread of `jaxrec.data.Pipeline` may put batches
            while a step runs; gathers beside a step would have no common order.
        id_bits: 64: the ids of all batches are row indices of 64 bits, two words on the devices
            (`jaxrec.ragged.WideIds`), as tables of more than 2**31 rows take them; collections
            without such tables take them, too. Then a batch may have been packed with
            ``id_bits=64``.

    Returns:
        The same pytree. Arrays are ``[batch, ...]`` over the devices. A `KeyedJaggedArray` has one
        more axis in front, over the devices: each device has its own samples as a batch. All have
        equal capacities and numbers of bags.

    Raises:
        TypeError: A leaf is not an array of numbers, or ``mesh`` is not a mesh.
        ValueError: The batch does not divide by the devices; an integer does not fit 32 bits; this
            process has no device of the mesh; processes pass batches of different kinds; a key has
            more ids than its capacity.

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
    is_wide = id_bits_of({"id_bits": id_bits}) == 64
    cuts = [
        _cut(leaf, devices, name, is_wide) for name, (_, leaf) in zip(names, leaves, strict=True)
    ]
    of_names = dict(zip(names, cuts, strict=True))
    sizes = iter(_agree(of_names) if capacities is None else _fit(of_names, capacities))
    sharding = NamedSharding(mesh, PartitionSpec(tuple(mesh.axis_names)))
    placed = []
    for cut in cuts:
        host = cut if isinstance(cut, np.ndarray) else cut.padded([next(sizes) for _ in cut.demand])
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
    def demand(self) -> tuple[int, int, int]:
        """Capacity, number of bags and ids of all samples that the fullest device needs."""
        capacity, bags = capacity_for(int(self.lengths.sum(axis=1).max())), self.lengths.shape[1]
        if self.inverse is None:
            return capacity, bags, 0
        # No device uses more bags than it has samples.
        return capacity, min(capacity_for(bags), self.inverse.shape[1]), self.ids_of_samples

    @property
    def ids_of_samples(self) -> int:
        """Number of ids of all samples of the fullest device, as far as int32 holds it."""
        if self.inverse is None:
            return 0
        of_samples = np.take_along_axis(self.lengths.astype(np.int64), self.inverse, axis=1)
        return min(int(of_samples.sum(axis=1).max(initial=0)), INT32_BOUND - 1)


@dataclasses.dataclass(frozen=True)
class _Cut:
    """A batch cut by samples."""

    keys: tuple[str, ...]
    columns: tuple[_Column, ...]
    devices: int
    samples: int
    slot_keys: tuple[str, ...]
    is_wide: bool

    @property
    def demand(self) -> tuple[int, ...]:
        """The `_Column.demand` of each key, one after the other."""
        return tuple(itertools.chain.from_iterable(column.demand for column in self.columns))

    @property
    def kind(self) -> str:
        """Description of the batch that must be the same on all processes."""
        kind = ", ".join(sorted({column.ids.dtype.name for column in self.columns}))
        shared = any(column.inverse is not None for column in self.columns)
        weighted = any(column.weights is not None for column in self.columns)
        return (
            f"{self.samples} samples a device of {kind} ids"
            f"{' with weights' if weighted else ''}{' and inverse_indices' if shared else ''}, "
            f"keys {', '.join(self.keys)}"
            f"{', slots of ' + ', '.join(self.slot_keys) if self.slot_keys else ''}"
        )

    def padded(self, sizes: Sequence[int]) -> KeyedJaggedArray:
        """Return the batch with an axis over the devices.

        Args:
            sizes: `_Column.demand` of each key, one after the other, agreed on by all processes.
        """
        capacities, strides = tuple(sizes[::3]), tuple(sizes[1::3])
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
            np.zeros(values.shape[1:], np.int32) if self.is_wide else values[0],
            lengths[0],
            None if weights is None else weights[0],
            None if inverse is None else inverse[0],
            self.keys,
            capacities,
            strides,
            self.slot_keys,
            ()
            if inverse is None
            else tuple(
                sample_capacity(capacity, count, self.samples)
                for capacity, count in zip(capacities, sizes[2::3], strict=True)
            ),
        )
        batch = jax.tree.unflatten(jax.tree.structure(first), arrays)
        return batch._with(values=WideIds.of(values)) if self.is_wide else batch


def _cut(leaf: Any, devices: int, name: str, is_wide: bool) -> _Cut | np.ndarray:
    """Return a leaf of a batch cut by devices; a dense array stays whole."""
    if not isinstance(leaf, KeyedJaggedArray):
        array = numbers(name, leaf)
        if array.ndim == 0:
            raise TypeError(f"{name} is the number {array}; a batch has arrays of samples")
        _check_divides(array.shape[0], devices, name)
        # JAX reads the host's memory later, when a reader may have filled it anew.
        return array.copy() if np.may_share_memory(array, leaf) else array
    if np.ndim(leaf.values) != 1:
        raise ValueError(f"{name} is on a mesh already; shard_batch takes batches on the host")
    wide, narrow = None, leaf
    if is_wide and jnp.issubdtype(leaf.values.dtype, np.integer):
        wide, narrow = np.asarray(leaf.values, np.int64), leaf._with(values=None)
    batch = jax.tree_util.tree_map_with_path(
        lambda path, array: numbers(f"{name}{jax.tree_util.keystr(path)}", array), narrow
    )
    if wide is not None:
        batch = batch._with(values=wide)
    if batch.inverse_indices is None and len(set(batch.strides)) > 1:
        raise ValueError(
            f"{name}: its keys have different numbers of bags, {batch.strides}, and no "
            "inverse_indices say which sample has which"
        )
    _check_divides(batch.batch_size, devices, name)
    columns = tuple(_column(batch, key, devices) for key in range(len(batch.keys)))
    samples = batch.batch_size // devices
    return _Cut(batch.keys, columns, devices, samples, batch.slot_keys, wide is not None)


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
    # Position where each bag's ids begin in the batch, minus that where they will begin.
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
    """Return each device's part of an array, each key in a segment of its capacity."""
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
    """Return the sizes for given capacities, in the order of the cuts."""
    sizes = []
    for name, cut in cuts.items():
        if not isinstance(cut, _Cut):
            continue
        for key, column in zip(cut.keys, cut.columns, strict=True):
            needed = int(column.lengths.sum(axis=1).max())
            whole_number(f"capacities, key {key!r}", capacities.get(key, 0))
            if needed > capacities.get(key, 0):
                raise ValueError(
                    f"{name}: a device has {needed} ids of key {key!r}, but its capacity is "
                    f"{capacities.get(key, 0)}"
                )
            # No device uses more bags than it has samples. Several processes would have to agree on
            # the number of ids of samples, so it is the largest possible.
            alone = jax.process_count() == 1
            ids_of_samples = column.ids_of_samples if alone else INT32_BOUND - 1
            sizes += [capacities[key], cut.samples, ids_of_samples]
    return sizes


def _agree(cuts: dict[str, _Cut | np.ndarray]) -> list[int]:
    """Return the sizes that all processes need, in the order of the cuts."""
    demand = [size for cut in cuts.values() if isinstance(cut, _Cut) for size in cut.demand]
    if jax.process_count() == 1:
        return demand
    facts = {
        name: cut.kind if isinstance(cut, _Cut) else f"{cut.dtype}{list(cut.shape)}"
        for name, cut in cuts.items()
    }
    # The number of gathers must not depend on the batch, or processes with different batches would
    # wait for each other.
    kind = zlib.crc32(repr(facts).encode()) >> 1
    numbers = [kind, *demand]
    agreed: list[int] = []
    for start in range(0, len(numbers), _NUMBERS):
        part = numbers[start : start + _NUMBERS]
        gathered = gather_numbers(part + [0] * (_NUMBERS - len(part)))
        if start == 0 and len(set(gathered[:, 0].tolist())) > 1:
            require_same("batch", facts)
        agreed += gathered.max(axis=0)[: len(part)].tolist()
    return agreed[1:]
