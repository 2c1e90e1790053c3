"""Batches of 64-bit ids on devices, with their hour."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Int32

from jaxrec.mesh.agree import on_every_device
from jaxrec.mesh.batch import shard_batch
from jaxrec.ragged import KeyedJaggedArray, WideIds
from jaxrec.ragged.arrays import AnyArray

_HOUR_SECONDS = 3600


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class IdBatch:
    """A batch of 64-bit ids for a training step, made by `id_words`.

    Attributes:
        features: The batch, with `jaxrec.ragged.WideIds` as values. Over a mesh, the first axis of
            its arrays is over the devices.
        hour: int32 hour of the batch since 1970, by which maps with a time to live evict ids; -1 if
            the hour is not known.
    """

    features: KeyedJaggedArray
    hour: Int32[AnyArray, ""]

    @property
    def ids(self) -> WideIds:
        """The ids of the batch, each as two 32-bit words."""
        return cast(WideIds, self.features.values)

    @property
    def segments(self) -> dict[str, slice]:
        """Range of each key's ids in ``ids``, padding included."""
        keys, capacities = self.features.keys, self.features.capacities
        ends = itertools.accumulate(capacities)
        pairs = zip(keys, ends, capacities, strict=True)
        return {key: slice(end - capacity, end) for key, end, capacity in pairs}

    @property
    def is_valid(self) -> Bool[Array, " capacity"]:
        """Whether each position has an id, False at padding; only for a batch on one device."""
        parts, bag = [], 0
        for capacity, stride in zip(self.features.capacities, self.features.strides, strict=True):
            of_key = jnp.asarray(self.features.lengths[bag : bag + stride])
            length = jnp.sum(of_key, dtype=jnp.int32)
            parts.append(jnp.arange(capacity, dtype=jnp.int32) < length)
            bag += stride
        return jnp.concatenate(parts) if parts else jnp.zeros(0, bool)


def id_words(
    features: KeyedJaggedArray,
    mesh: Mesh | None = None,
    *,
    capacities: Mapping[str, int] | None = None,
    hour: int | None = None,
) -> IdBatch:
    """Turn a host batch of raw ids into a batch that a training step takes.

    Each 64-bit id becomes two 32-bit words, since JAX has no 64-bit integers unless
    ``jax_enable_x64`` is set.

    Args:
        features: A batch on the host, with 64-bit ids (``id_bits=64``) or 32-bit ids.
        mesh: Mesh on which `jaxrec.mesh.shard_batch` puts the batch; None: one device.
        capacities: Capacity of each key on a device, as for `jaxrec.mesh.shard_batch`; only with a
            mesh.
        hour: Hour of the batch, for maps with a time to live; None: hours since 1970, by the host's
            clock. Several processes must give the same hour.

    Raises:
        TypeError: The batch is not a `KeyedJaggedArray` on the host.
        ValueError: The batch does not fit the mesh.

    Example:
        >>> import jaxrec
        >>> batch = jaxrec.KeyedJaggedArray.from_lists(
        ...     {"item": [[10**12], [7, 10**12]]}, id_bits=64)
        >>> id_words(batch).features.values.shape  # 3 ids, padded to the capacity
        (8,)
    """
    values = getattr(features, "values", None)
    if not isinstance(features, KeyedJaggedArray) or not isinstance(values, np.ndarray):
        raise TypeError(
            "id_words takes a KeyedJaggedArray on the host, as its constructors with id_bits=64 "
            f"make it, got {type(features).__name__} of {type(values).__name__}"
        )
    hours = np.asarray(np.int32(time.time() // _HOUR_SECONDS if hour is None else hour))
    if mesh is None:
        return IdBatch(features._with(values=WideIds.of(values)), hours)
    placed = shard_batch(features, mesh, capacities=capacities, id_bits=64)
    return IdBatch(placed, on_every_device(hours, mesh))


def as_id_batch(features: KeyedJaggedArray | IdBatch) -> IdBatch:
    """Return an `IdBatch`: the batch itself, or one of its raw ids on the host or 32-bit ids."""
    if isinstance(features, IdBatch):
        return features
    if not isinstance(features, KeyedJaggedArray):
        raise TypeError(
            "the batch is a KeyedJaggedArray, or the result of id_words(batch), got "
            f"{type(features).__name__}"
        )
    values: Any = features.values
    if isinstance(values, np.ndarray):
        return id_words(features)
    if not isinstance(values, WideIds):
        # Not `widen`, which would make -1 the id that marks empty slots.
        low = jax.lax.bitcast_convert_type(values, jnp.uint32)
        values = WideIds(jnp.zeros_like(low), low)
    return IdBatch(features._with(values=values), jnp.int32(-1))
