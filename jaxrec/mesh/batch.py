"""Host batches on a mesh: `shard_batch` cuts a batch by samples and pads each device's part.

All devices must have equal shapes. So the fullest device decides a key's capacity, and several
processes have to agree on it.
"""

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
from jaxtyping import Int

from jaxrec.mesh.agree import gather_numbers, require_same
from jaxrec.mesh.call_checks import check_call
from jaxrec.ragged import KeyedJaggedArray
from jaxrec.ragged.bounds import INT32_BOUND
from jaxrec.ragged.capacity import CapacityMemory, capacity_for
from jaxrec.ragged.columns import numbers, whole_number
from jaxrec.ragged.packing import id_bits_of
from jaxrec.ragged.shared_bags import sample_capacity
from jaxrec.ragged.wide_ids import WideIds

# How many numbers processes gather at a time. A fixed count compiles one gather for all batches.
_NUMBERS = 256


def shard_batch(
    batch: Any,
    mesh: Mesh,
    *,
    capacities: Mapping[str, int] | None = None,
    id_bits: Literal[32, 64] = 32,
) -> Any:
    """Put a host batch on a mesh, with an equal number of samples on each device.

    If samples share bags (``inverse_indices``), each device gets the bags of its own samples.

    Args:
        batch: Any pytree of `KeyedJaggedArray`s and arrays with a leading batch axis. With several
            processes, each passes its own part of the batch. All call `shard_batch` together, in
            the same order.
        mesh: The devices.
        capacities: Capacity of each key on a device, the same in all processes. None: a batch of a
            `jaxrec.Packer` gets the capacities that the packer remembers; any other batch gets
            the demand of its fullest device, rounded up. Processes agree on these by a small
            gather. With ``capacities`` they need no gather, so a thread of `jaxrec.data.Pipeline`
            may put batches while a step runs. (A gather beside a step may come before the step's
            collectives in one process and after them in another.)
        id_bits: 64: ids are row indices of 64 bits, stored as two words
            (`jaxrec.ragged.WideIds`). Tables of more than 2**31 rows need them, and other tables
            accept them. The batch may then have been packed with ``id_bits=64``.

    Returns:
        The same pytree. Arrays are ``[batch, ...]``, sharded over the devices. A `KeyedJaggedArray`
        has one more axis in front, over the devices: each device has its samples as a batch of its
        own. All devices have equal capacities and numbers of bags.

    Raises:
        TypeError: A leaf is not an array of numbers, or ``mesh`` is not a mesh.
        ValueError: The number of samples does not divide by the devices; an integer does not fit
            32 bits; this process has no device of the mesh; processes pass batches of different
            kinds; a key has more ids than its capacity.

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
    if not len(mesh.local_devices):
        raise ValueError(
            f"process {jax.process_index()} has no device of the mesh; a batch is passed by the "
            "processes that have"
        )
    leaves, tree = jax.tree_util.tree_flatten_with_path(
        batch, is_leaf=lambda leaf: isinstance(leaf, KeyedJaggedArray)
    )
    names = [f"batch{jax.tree_util.keystr(path)}" for path, _ in leaves]
    is_wide = id_bits_of({"id_bits": id_bits}) == 64
    checked = {
        name: _cut(leaf, mesh, name, is_wide) for name, (_, leaf) in zip(names, leaves, strict=True)
    }
    check_call("batches", "shard_batch", lambda: _facts(checked) | {"capacities": str(capacities)})
    cuts = {name: leaf for name, leaf in checked.items() if isinstance(leaf, _Cut)}
    if capacities is None:
        sizes = iter(_agree(checked, list(cuts.values())))
    else:
        sizes = iter(_fit(cuts, capacities))
    padded = {name: cut.padded([next(sizes) for _ in cut.demand]) for name, cut in cuts.items()}
    sharding = NamedSharding(mesh, PartitionSpec(tuple(mesh.axis_names)))
    return jax.tree.map(
        lambda x: jax.make_array_from_process_local_data(sharding, x),
        jax.tree.unflatten(tree, (checked | padded).values()),
    )


@dataclasses.dataclass(frozen=True)
class _Column:
    """Ids and bags of one key, device by device.

    Attributes:
        ids: The ids of all devices, one after the other, without padding.
        weights: Their weights, or None.
        lengths: Lengths of bags, ``[devices, bags]``. Devices with fewer bags end with empty ones.
        inverse: Bag of each sample, ``[devices, samples]``; None: samples share no bags.
    """

    ids: np.ndarray
    weights: np.ndarray | None
    lengths: np.ndarray
    inverse: np.ndarray | None

    @property
    def demand(self) -> tuple[int, int, int]:
        """Largest numbers of ids, of bags, and of the samples' ids, on any device.

        The third counts the ids of a shared bag once for each of its samples.
        """
        ids, bags = int(self.lengths.sum(axis=1).max()), self.lengths.shape[1]
        # Processes exchange int32, and ids of shared bags may count up to more.
        return ids, bags, min(int(self.of_samples.sum(axis=1).max(initial=0)), INT32_BOUND - 1)

    @property
    def of_samples(self) -> Int[np.ndarray, "devices samples"]:
        """Number of ids of each sample; ``[devices, 0]`` if samples share no bags."""
        if self.inverse is None:
            return np.zeros((len(self.lengths), 0), np.int64)
        return np.take_along_axis(self.lengths.astype(np.int64), self.inverse, axis=1)


@dataclasses.dataclass(frozen=True)
class _Cut:
    """A `KeyedJaggedArray` cut by samples, before each device's part is padded.

    Attributes:
        keys: Keys of the batch.
        columns: Ids and bags of each key.
        devices: Number of devices of this process.
        samples: Number of samples of a device.
        slot_keys: `KeyedJaggedArray.slot_keys`.
        is_wide: Whether ids have 64 bits.
        all_devices: Number of devices of the mesh.
        memory: Capacities that the batch's `jaxrec.Packer` remembers; None: it has no packer.
    """

    keys: tuple[str, ...]
    columns: tuple[_Column, ...]
    devices: int
    samples: int
    slot_keys: tuple[str, ...]
    is_wide: bool
    all_devices: int
    memory: CapacityMemory | None

    @property
    def demand(self) -> tuple[int, ...]:
        """The three numbers of `_Column.demand`, key after key."""
        return tuple(itertools.chain.from_iterable(column.demand for column in self.columns))

    @property
    def is_shared(self) -> bool:
        """Whether samples share bags."""
        return any(column.inverse is not None for column in self.columns)

    @property
    def kind(self) -> str:
        """Description of the batch, which must be the same in all processes."""
        kind = ", ".join(sorted({column.ids.dtype.name for column in self.columns}))
        weighted = any(column.weights is not None for column in self.columns)
        packer = ""
        if self.memory is not None:
            sizes = self.memory.sizes(self.keys, self.samples, self.all_devices)
            packer = f", a Packer with sizes {sizes}"
        return (
            f"{self.samples} samples a device of {kind} ids"
            f"{' with weights' if weighted else ''}"
            f"{' and inverse_indices' if self.is_shared else ''}, "
            f"keys {', '.join(self.keys)}"
            f"{', slots of ' + ', '.join(self.slot_keys) if self.slot_keys else ''}"
            f"{packer}"
        )

    def sizes(self, demand: Sequence[int]) -> list[int]:
        """Return three sizes, key after key: the capacity, number of bags and sample capacity.

        ``demand`` has the numbers of `_Cut.demand`, each the largest of all processes.
        """
        ids, bags, of_samples = demand[::3], list(demand[1::3]), demand[2::3]
        # No device uses more bags than it has samples.
        if self.is_shared:
            bags = [min(capacity_for(count), self.samples) for count in bags]
        if self.memory is None:
            capacities = [capacity_for(count) for count in ids]
            sample_capacities = [
                sample_capacity(*each, self.samples)
                for each in zip(capacities, of_samples, strict=True)
            ]
        else:
            # A packer promises batches of one shape, so the number of bags must never change.
            bags = [self.samples] * len(bags)
            fitting = self._fitting(self.memory, ids, of_samples)
            capacities, sample_capacities = map(list, fitting)
        triples = zip(capacities, bags, sample_capacities, strict=True)
        return list(itertools.chain.from_iterable(triples))

    def _fitting(
        self, memory: CapacityMemory, ids: Sequence[int], of_samples: Sequence[int]
    ) -> tuple[Sequence[int], Sequence[int]]:
        """Return each key's capacity and sample capacity, as a packer's memory chooses them.

        ``ids`` and ``of_samples`` have the first and the third number of each key's
        `_Column.demand`.
        """
        # The memory expects a bag for each sample; where samples share bags, empty ones fill up.
        missing = [self.samples - column.lengths.shape[1] for column in self.columns]
        of_bags = [
            np.pad(column.lengths, ((0, 0), (0, empty))).reshape(-1)
            for column, empty in zip(self.columns, missing, strict=True)
        ]
        devices = self.all_devices
        if not self.is_shared:
            capacities = memory.fit(
                self.keys, self.samples, ids, of_bags, devices=devices, agree=_most
            )
            return capacities, of_samples
        shared = [column.of_samples.reshape(-1) for column in self.columns]
        demand = (*ids, *of_samples)
        return memory.fit_shared(
            self.keys, self.samples, demand, of_bags, shared, devices=devices, agree=_most
        )

    def padded(self, sizes: Sequence[int]) -> KeyedJaggedArray:
        """Pad each device's part to `sizes`; arrays get an axis over the devices in front."""
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
        # The constructor checks shapes, so it gets the first device's arrays. The tree of that
        # batch then takes the arrays of all devices.
        first = KeyedJaggedArray(
            np.zeros(values.shape[1:], np.int32) if self.is_wide else values[0],
            lengths[0],
            None if weights is None else weights[0],
            None if inverse is None else inverse[0],
            self.keys,
            capacities,
            strides,
            self.slot_keys,
            () if inverse is None else tuple(sizes[2::3]),
        )
        batch = jax.tree.unflatten(jax.tree.structure(first), arrays)
        return batch._with(values=WideIds.of(values)) if self.is_wide else batch


def _cut(leaf: Any, mesh: Mesh, name: str, is_wide: bool) -> _Cut | np.ndarray:
    """Check a leaf of a batch, and cut it by samples if it is ragged."""
    devices = len(mesh.local_devices)
    if not isinstance(leaf, KeyedJaggedArray):
        array = numbers(name, leaf)
        if array.ndim == 0:
            raise TypeError(f"{name} is the number {array}; a batch has arrays of samples")
        _check_divides(array.shape[0], devices, name)
        # JAX reads the host's memory later, when a reader may have filled it anew.
        return array.copy() if np.may_share_memory(array, leaf) else array
    if np.ndim(leaf.values) != 1:
        raise ValueError(f"{name} is on a mesh already; shard_batch takes batches on the host")
    # 64-bit ids skip the check that every integer fits 32 bits.
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
    return _Cut(
        batch.keys,
        columns,
        devices,
        samples,
        batch.slot_keys,
        wide is not None,
        mesh.size,
        leaf.memory,
    )


def _column(batch: KeyedJaggedArray, key: int, devices: int) -> _Column:
    """Cut the ids and bags of one key, given by its number, into equal parts for the devices."""
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
    # Each device numbers the bags that its samples use from 0, in the batch's order.
    renumbered = np.cumsum(is_used, axis=1, dtype=np.int32) - np.int32(1)
    owners, bags = np.nonzero(is_used)
    taken = lengths[bags]
    cut = np.zeros((devices, int(is_used.sum(axis=1).max(initial=0))), np.int32)
    cut[owners, renumbered[owners, bags]] = taken
    # How far each bag's ids move: their first position in the batch, minus that in the result.
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
    """Copy each key's flat ids or weights to its columns of ``[devices, sum(capacities)]``.

    A key has as many columns as its capacity. Zeros follow the elements of each device.
    """
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


def _fit(cuts: Mapping[str, _Cut], capacities: Mapping[str, int]) -> list[int]:
    """Return `_Cut.sizes` of all cuts in turn, with the given capacities."""
    sizes = []
    for name, cut in cuts.items():
        for key, column in zip(cut.keys, cut.columns, strict=True):
            needed, capacity = int(column.lengths.sum(axis=1).max()), capacities.get(key, 0)
            whole_number(f"capacities, key {key!r}", capacity)
            if needed > capacity:
                raise ValueError(
                    f"{name}: a device has {needed} ids of key {key!r}, but its capacity is "
                    f"{capacity}"
                )
            # A device uses at most one bag per sample. Processes would have to agree on the
            # samples' number of ids, so with several it is the largest possible.
            alone = jax.process_count() == 1
            of_samples = column.demand[2] if alone or not cut.is_shared else INT32_BOUND - 1
            sizes += [capacity, cut.samples, sample_capacity(capacity, of_samples, cut.samples)]
    return sizes


def _facts(leaves: Mapping[str, _Cut | np.ndarray]) -> dict[str, str]:
    """Describe each leaf of a batch; the descriptions must be the same in all processes."""
    return {
        name: leaf.kind if isinstance(leaf, _Cut) else f"{leaf.dtype}{list(leaf.shape)}"
        for name, leaf in leaves.items()
    }


def _agree(leaves: Mapping[str, _Cut | np.ndarray], cuts: Sequence[_Cut]) -> list[int]:
    """Return `_Cut.sizes` of all cuts in turn, which hold the demand of all processes."""
    demand = [number for cut in cuts for number in cut.demand]
    if jax.process_count() > 1:
        demand = _most(demand, _facts(leaves))
    numbers = iter(demand)
    return [size for cut in cuts for size in cut.sizes([next(numbers) for _ in cut.demand])]


def _most(numbers: Sequence[int], facts: Mapping[str, str] | None = None) -> list[int]:
    """Return the maximum of each number over all processes.

    Raises a ValueError in all processes if their ``facts`` differ.
    """
    if jax.process_count() == 1:
        return list(numbers)
    # A checksum of the facts goes first, so that equal batches need no gather of the facts. All
    # processes with equal facts have equally many numbers; others stop after the first gather.
    numbers = [zlib.crc32(repr(facts).encode()) >> 1, *numbers]
    agreed: list[int] = []
    for start in range(0, len(numbers), _NUMBERS):
        part = numbers[start : start + _NUMBERS]
        gathered = gather_numbers(part + [0] * (_NUMBERS - len(part)))
        if start == 0 and len(set(gathered[:, 0].tolist())) > 1:
            require_same("batch", facts or {})
        agreed += gathered.max(axis=0)[: len(part)].tolist()
    return agreed[1:]
