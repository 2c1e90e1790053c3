"""Checks of a batch against a collection: ids outside of tables, and capacities that vary."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxrec.embed.padding import PADDING_SLOT
from jaxrec.embed.taps import tapped_modules
from jaxrec.ragged import KeyedJaggedArray
from jaxrec.ragged.bounds import find_bad_ids
from jaxrec.ragged.wide_ids import WideIds

# Combinations of capacities at which we warn of a compilation for each. A `jaxrec.Packer` makes two
# or three in a whole training.
_MANY = 5


def check_ids(features: KeyedJaggedArray, bounds: Mapping[str, int], *, always: bool) -> None:
    """Raise a ValueError if an id is outside its table.

    ``bounds`` maps each feature to the number of its valid ids. A traced batch is checked only with
    ``always``, by a call back to the host.
    """
    if not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(features)):
        _raise_bad_id(bounds, features)
    elif always:
        call_back(functools.partial(_raise_bad_id, bounds), features)


def call_back(function: Callable[..., None], *arrays: Any) -> None:
    """Call a function with arrays on the host; if they are traced, whenever the program runs."""
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(arrays)):
        jax.debug.callback(function, *arrays)
    else:
        function(*arrays)


def _raise_bad_id(bounds: Mapping[str, int], features: KeyedJaggedArray) -> None:
    message = _describe_bad_ids(features, bounds)
    if message is not None:
        raise ValueError(
            f"{message}; to check or clamp ids when batches are made, give bounds=module.bounds of "
            "the module that looks them up to the batch's constructor"
        )


def bad_id_of_batch(model: nnx.Module, batch: Any) -> str | None:
    """Describe an id outside its table in any batch of a pytree; None: there is none.

    Each process reads only the shards of the batch on its own devices.
    """
    leaves = jax.tree.leaves(batch, is_leaf=lambda leaf: isinstance(leaf, KeyedJaggedArray))
    for features in leaves:
        if not isinstance(features, KeyedJaggedArray):
            continue
        for module in tapped_modules(model).values():
            message = _describe_bad_ids(features, module.tables.get_value().layout.bounds)
            if message is not None:
                return message
    return None


def _describe_bad_ids(features: KeyedJaggedArray, bounds: Mapping[str, int]) -> str | None:
    """Describe the bad ids of the first feature that has any; None: there are none."""
    # Ids are checked here, on the host: a kernel can make a bad id NaN, but not say which it was.
    parts = list(_parts(features))
    for key, feature in enumerate(features.keys):
        if feature not in bounds:
            continue
        start, first_bag = sum(features.capacities[:key]), sum(features.strides[:key])
        stride = features.strides[key]
        found = []
        for number, values, all_lengths in parts:
            lengths = all_lengths[first_bag : first_bag + stride]
            ids = values[start : start + int(lengths.sum())]
            if feature in features.slot_keys:
                ids = np.where(ids == PADDING_SLOT, 0, ids)
            found.append(
                find_bad_ids(feature, ids, lengths, bounds[feature], first_sample=number * stride)
            )
        if bad := [each for each in found if each is not None]:
            count = sum(each.positions.size for each in bad)
            return f"{bad[0].message} ({count} such id{'s' * (count > 1)} in the batch)"
    return None


def _parts(features: KeyedJaggedArray) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Yield the number, the ids and the lengths of each device that this process has."""
    values: Any = features.values  # an array, or wide ids
    lengths = features.lengths
    if isinstance(values, WideIds):
        high = _parts(features._with(values=values.high))
        low = _parts(features._with(values=values.low))
        for (device, upper, own), (_, lower, _) in zip(high, low, strict=True):
            yield device, np.asarray(WideIds(upper, lower)), own
    elif np.ndim(values) == 1:
        yield 0, np.asarray(values), np.asarray(lengths)
    elif isinstance(values, jax.Array) and isinstance(lengths, jax.Array):
        # Over a mesh each process sees its own shards. Ids and lengths of a device are found by the
        # index of their shard.
        by_index = {shard.index[0].start or 0: shard.data for shard in lengths.addressable_shards}
        for shard in values.addressable_shards:
            first = shard.index[0].start or 0
            pairs = zip(np.asarray(shard.data), np.asarray(by_index[first]), strict=True)
            for device, (ids, own) in enumerate(pairs, start=first):
                yield device, ids, own
    else:
        yield from zip(range(len(values)), np.asarray(values), np.asarray(lengths), strict=True)


class TracedCapacities:
    """Combinations of capacities that a collection was traced with; too many give a warning."""

    # An attribute of a collection, and so of the copies that Flax makes in each trace. Flax
    # compares attributes to find a compiled program: instances are all equal, or models with equal
    # collections would not share one.

    def __init__(self) -> None:
        self._seen: dict[tuple[object, ...], set[tuple[int, ...]]] = {}
        self._has_warned = False

    def add(self, name: str, features: KeyedJaggedArray) -> None:
        """Record the capacities of a traced batch; ``name`` names the collection in the warning."""
        if self._has_warned or not isinstance(features.lengths, jax.core.Tracer):
            return
        # Batches of other features, or with other numbers of bags, are other calls: no warning.
        kind = (features.keys, features.strides, features.lengths.shape)
        seen = self._seen.setdefault(kind, set())
        seen.add(features.capacities)
        if len(seen) < _MANY:
            return
        self._has_warned = True
        changed = [
            key
            for key, capacities in zip(features.keys, zip(*seen, strict=True), strict=True)
            if len(set(capacities)) > 1
        ]
        names = ", ".join(map(repr, changed[:3])) + (", ..." if len(changed) > 3 else "")
        warnings.warn(
            f"{name} was compiled for {_MANY} combinations of capacities of the same features "
            f"({len(changed)} of {len(features.keys)} differ: {names}), and each new one compiles "
            "the step anew. Pack all batches with one packer = jaxrec.Packer(), which remembers "
            "capacities: packer.from_lists(...) in place of KeyedJaggedArray.from_lists(...), and "
            "packer.fit(batch) for batches that were packed elsewhere",
            stacklevel=4,
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TracedCapacities)

    def __hash__(self) -> int:
        return hash(TracedCapacities)
