"""Batches of 64-bit ids on devices."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Int32, UInt32

from jaxrec.mesh.agree import on_every_device, on_host
from jaxrec.mesh.batch import shard_batch
from jaxrec.ragged import KeyedJaggedArray, split_int64
from jaxrec.ragged.arrays import AnyArray

_HOUR_SECONDS = 3600


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class IdWords:
    """A `KeyedJaggedArray` of 64-bit ids for a training step, each id as two words of 32 bits.

    Made by `id_words`. The fields are those of the `KeyedJaggedArray`, except for:

    Attributes:
        words: ``[..., sum(capacities), 2]`` uint32, the high and the low word of each id; over a
            mesh with an axis over the devices in front, as all arrays of the batch.
        hour: int32, the hour of the batch since 1970, by which maps with a time to live evict ids.
    """

    words: UInt32[AnyArray, "*devices capacity 2"]
    lengths: Int32[AnyArray, "*devices bags"]
    weights: Any
    inverse_indices: Any
    hour: Int32[AnyArray, ""]
    keys: tuple[str, ...] = dataclasses.field(metadata={"static": True})
    capacities: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    strides: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    sample_capacities: tuple[int, ...] = dataclasses.field(default=(), metadata={"static": True})

    @property
    def segments(self) -> dict[str, slice]:
        """Positions of each key's ids."""
        ends = itertools.accumulate(self.capacities)
        pairs = zip(self.keys, ends, self.capacities, strict=True)
        return {key: slice(end - capacity, end) for key, end, capacity in pairs}

    @property
    def is_valid(self) -> Bool[Array, " capacity"]:
        """False at padding; of a batch on one device."""
        parts, bag = [], 0
        for capacity, stride in zip(self.capacities, self.strides, strict=True):
            length = jnp.sum(jnp.asarray(self.lengths[bag : bag + stride]), dtype=jnp.int32)
            parts.append(jnp.arange(capacity, dtype=jnp.int32) < length)
            bag += stride
        return jnp.concatenate(parts) if parts else jnp.zeros(0, bool)

    def with_values(
        self,
        values: Int32[Array, "*devices capacity"],
        lengths: Int32[Array, "*devices bags"] | None = None,
        weights: Any = None,
    ) -> KeyedJaggedArray:
        """Return the batch with 32-bit values in place of the ids.

        Args:
            values: The values.
            lengths: Lengths of the bags; None: those of this batch.
            weights: Weights of the values; None: those of this batch.
        """
        return KeyedJaggedArray(
            values,
            jnp.asarray(self.lengths) if lengths is None else lengths,
            self.weights if weights is None else weights,
            self.inverse_indices,
            self.keys,
            self.capacities,
            self.strides,
            sample_capacities=self.sample_capacities,
        )


def id_words(
    features: KeyedJaggedArray,
    mesh: Mesh | None = None,
    *,
    capacities: Mapping[str, int] | None = None,
    hour: int | None = None,
) -> IdWords:
    """Turn a host batch of raw ids into a batch that a training step takes.

    JAX has no 64-bit integers unless ``jax_enable_x64`` is set; two words of 32 bits arrive whole.

    Args:
        features: A batch on the host, of ``id_bits=64`` or of 32-bit ids.
        mesh: Puts the batch on a mesh, as `jaxrec.mesh.shard_batch` does, under whose conditions.
        capacities: Capacity of each key on a device; see `jaxrec.mesh.shard_batch`. Only for a
            mesh.
        hour: Hour of the batch, for maps with a time to live; None: hours since 1970, by the host's
            clock. With several processes, give all the same.

    Raises:
        TypeError: The batch is not a `KeyedJaggedArray` on the host.
        ValueError: The batch does not fit the mesh.

    Example:
        >>> import jaxrec
        >>> batch = jaxrec.KeyedJaggedArray.from_lists(
        ...     {"item": [[10**12], [7, 10**12]]}, id_bits=64)
        >>> id_words(batch).words.shape  # 3 ids, padded to the capacity
        (8, 2)
    """
    if not isinstance(features, KeyedJaggedArray) or not isinstance(features.values, np.ndarray):
        raise TypeError(
            "id_words takes a KeyedJaggedArray on the host, as its constructors with id_bits=64 "
            f"make it, got {type(features).__name__} of {type(_values(features)).__name__}"
        )
    hours = np.int32(time.time() // _HOUR_SECONDS if hour is None else hour)
    words = split_int64(np.asarray(features.values))
    if mesh is None:
        return _with_words(features, words, np.asarray(hours))
    places = np.arange(words.shape[0], dtype=np.int32)
    placed = shard_batch(dataclasses.replace(features, values=places), mesh, capacities=capacities)
    # At padding the place is 0.
    local = words[on_host(placed.values)] if words.size else np.zeros((1, 0, 2), np.uint32)
    on_mesh = jax.make_array_from_process_local_data(placed.values.sharding, local)
    return _with_words(placed, on_mesh, on_every_device(np.asarray(hours), mesh))


def as_id_words(features: KeyedJaggedArray | IdWords) -> IdWords:
    """Return a batch of any kind as `IdWords`; without a clock, ``hour`` is -1.

    Raises:
        TypeError: The batch is something else.
    """
    if isinstance(features, IdWords):
        return features
    if not isinstance(features, KeyedJaggedArray):
        raise TypeError(
            "the batch is a KeyedJaggedArray, or the result of id_words(batch), got "
            f"{type(features).__name__}"
        )
    if isinstance(features.values, np.ndarray):
        return id_words(features)
    low = jax.lax.bitcast_convert_type(features.values, jnp.uint32)
    words = jnp.stack([jnp.zeros_like(low), low], -1)
    return _with_words(features, words, jnp.int32(-1))


def _with_words(features: KeyedJaggedArray, words: Any, hour: Any) -> IdWords:
    return IdWords(
        words,
        features.lengths,
        features.weights,
        features.inverse_indices,
        hour,
        features.keys,
        features.capacities,
        features.strides,
        features.sample_capacities,
    )


def _values(features: Any) -> Any:
    return getattr(features, "values", None)
