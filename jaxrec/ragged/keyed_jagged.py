"""Many ragged columns as one padded array: the batch of a recommender model."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Unpack

import jax
import numpy as np
from jaxtyping import Array, Int32, Num

from jaxrec.ragged import columns, printing
from jaxrec.ragged.arrays import AnyArray, require_one_batch
from jaxrec.ragged.fields import (
    checked_columns,
    checked_fields,
    column_facts,
    joined,
    present,
    with_raw_ids,
)
from jaxrec.ragged.jagged import BatchColumn, JaggedArray
from jaxrec.ragged.key_segments import concatenate, concatenate_weights, refit, runs
from jaxrec.ragged.keyed_constructors import KeyedConstructors
from jaxrec.ragged.offsets import bag_ids, complete_cumsum
from jaxrec.ragged.packing import (
    PackOptions,
    checked_values,
    id_bits_of,
    pinned_capacities,
    pinned_sample_capacities,
)
from jaxrec.ragged.raw_ids import as_raw, is_raw, register_ragged
from jaxrec.ragged.shared_bags import expand


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class KeyedJaggedArray(KeyedConstructors):
    """A batch of named ragged columns, TorchRec's KeyedJaggedTensor with static capacities.

    Key-major: first all ids of the first key, then all of the second. Each key has its own segment
    of ``values``, filled from its front and padded at its end. So selecting, permuting and
    splitting keys are static slices. A batch made from host data has NumPy arrays, and reshaping
    them stays on the host. They move to a device with the first computation there.

    Over a mesh (`jaxrec.mesh.shard_batch`) each array has one more axis in front, with the batch of
    each device. ``batch[key]``, `permute`, `select`, `split`, `concat` and `with_capacities` work
    on it. `offsets`, `segment_ids`, `to_lists` and methods that use them raise a ValueError.

    The constructor takes these fields. It checks host arrays fully, and arrays that are on a device
    or traced by shape and type. Without ``capacities`` it takes TorchRec's arrays, which have no
    padding, as `from_lengths` does: ``KeyedJaggedArray(keys=, values=, lengths=)``.

    Attributes:
        values: ``[sum(capacities)]`` ids (int32 on a device), the keys' segments in order. Raw ids
            (``id_bits=64``) are int64 on the host, and JAX refuses them with a ValueError.
        lengths: ``[sum(strides)]`` int32, ids of each bag; ``[keys * batch]`` where all keys have
            the same number of bags.
        weights: ``[sum(capacities)]`` a weight for each id, or None.
        inverse_indices: ``[keys, batch]`` int32 or None. With it, sample ``b`` of the batch has bag
            ``inverse_indices[k, b]`` of key ``k`` (TorchRec's variable batch per feature).
        keys: Names of the columns.
        capacities: Length of each key's segment of ``values``.
        strides: Number of bags of each key.
        slot_keys: Keys whose values are slots assigned by `jaxrec.tier`, not ids.
        sample_capacities: Capacity of each key in the `expanded` batch, where samples share bags;
            `jaxrec.EmbeddingCollection` looks that batch up. Computed from host arrays. Empty:
            unknown. Under jit the largest possible one (the key's capacity times the number of
            samples) then takes its place.

    Raises:
        TypeError: A field is of another type, or traced arrays come without ``capacities``.
        ValueError: Shapes do not fit, an id is negative or beyond int32, lengths are negative or
            exceed a capacity, a weight is not finite, an inverse index names no bag.

    Example:
        >>> batch = KeyedJaggedArray.from_lists({"user": [[7], [8]], "item": [[1, 2], []]})
        >>> batch
        KeyedJaggedArray(batch_size=2, {
            'user': [[7], [8]],
            'item': [[1, 2], []],
        })
        >>> batch.lengths
        array([1, 1, 2, 0], dtype=int32)
        >>> batch["item"].to_lists()
        [[1, 2], []]
    """

    values: Num[AnyArray, " capacity"]
    lengths: Int32[AnyArray, " bags"]
    weights: Num[AnyArray, " capacity"] | None = None
    inverse_indices: Int32[AnyArray, "keys batch"] | None = None
    keys: tuple[str, ...] = dataclasses.field(default=(), metadata={"static": True})
    capacities: tuple[int, ...] = dataclasses.field(default=(), metadata={"static": True})
    strides: tuple[int, ...] = dataclasses.field(default=(), metadata={"static": True})
    slot_keys: tuple[str, ...] = dataclasses.field(default=(), metadata={"static": True})
    sample_capacities: tuple[int, ...] = dataclasses.field(default=(), metadata={"static": True})

    # The constructor is for users, so it checks. Methods that make a batch from another batch's
    # arrays call `_of` instead: JAX rebuilds batches many times a step, from tracers and
    # placeholders, which have no numbers to check.
    def __post_init__(self) -> None:
        vars(self).update(checked_fields(**vars(self))._asdict())

    @classmethod
    def from_dict(
        cls, columns: Mapping[str, JaggedArray], **options: Unpack[PackOptions]
    ) -> KeyedJaggedArray:
        """Make a batch of columns, with their capacities; the inverse of `to_dict`.

        A static concatenation that works under jit and over a mesh. Columns of different batch
        sizes make a batch of variable strides, as in TorchRec. Columns of a batch whose samples
        share bags bring their ``inverse_indices``.

        Args:
            columns: Columns of scalars by name, all with weights or none.
            **options: `PackOptions`. ``capacities`` refit the segments (`with_capacities`).
                ``bounds`` check the ids against their tables (`with_checked_ids`; not under jit).
                ``inverse_indices`` replace those of the columns. The batch has raw ids if one
                column has, whatever ``id_bits``.

        Raises:
            TypeError: A column is not a `JaggedArray`.
            ValueError: The elements of a column are not scalars, weights are missing, only some
                columns have ``inverse_indices``, or the constructor, `with_capacities` or
                `with_checked_ids` refuses the columns.
        """
        columns = checked_columns(columns)
        if id_bits_of(options) == 64:
            columns = {key: with_raw_ids(key, column) for key, column in columns.items()}
        if deep := [key for key, c in columns.items() if c.values.ndim != c.lengths.ndim]:
            raise ValueError(f"features {deep} have elements that are not scalars, as ids are")
        parts = tuple(columns.values())
        inverse = options.get("inverse_indices")
        own, slot_keys, sample_capacities = column_facts(columns, inverse is not None)
        batch = cls(
            concatenate([part.values for part in parts], np.int32),
            concatenate([part.lengths for part in parts], np.int32),
            concatenate_weights([part.weights for part in parts]),
            own if inverse is None else inverse,
            tuple(columns),
            tuple(part.capacity for part in parts),
            tuple(part.batch_size for part in parts),
            slot_keys,
            sample_capacities,
        )
        if (capacities := options.get("capacities")) is not None:
            batch = batch.with_capacities(capacities)
        if (of_samples := options.get("sample_capacities")) is not None:
            batch = batch._with_sample_capacities(of_samples)
        if (bounds := options.get("bounds")) is not None:
            batch = batch.with_checked_ids(bounds, options.get("bounds_mode", "raise"))
        return batch

    from_jt_dict = from_dict  # TorchRec's name

    @classmethod
    def empty(cls, *, weighted: bool = False) -> KeyedJaggedArray:
        """Make a batch without keys."""
        nothing = np.zeros(0, np.int32)
        weights = np.zeros(0, np.float32) if weighted else None
        return cls._of(nothing, nothing, weights, None, (), (), ())

    @property
    def batch_size(self) -> int:
        """Number of samples in the batch; on a mesh, per device."""
        if self.inverse_indices is not None:
            return self.inverse_indices.shape[-1]
        return max(self.strides, default=0)

    @property
    def capacity_per_key(self) -> dict[str, int]:
        """`capacities` by name."""
        return dict(zip(self.keys, self.capacities, strict=True))

    @property
    def offsets(self) -> Int32[AnyArray, " offsets"]:
        """``[bags + 1]``: running sum of ``lengths``, from 0. TorchRec's, as if without padding."""
        require_one_batch(self.lengths, "offsets")
        return complete_cumsum(self.lengths)

    @property
    def length_per_key(self) -> Int32[AnyArray, " keys"]:
        """Number of ids of each key."""
        offset_per_key = self.offset_per_key
        return offset_per_key[1:] - offset_per_key[:-1]

    @property
    def offset_per_key(self) -> Int32[AnyArray, " offsets"]:
        """``[keys + 1]``: where each key's ids begin, as if without padding; then the total."""
        return self.offsets[np.cumsum((0, *self.strides))]

    @property
    def segment_ids(self) -> Int32[Array, " capacity"]:
        """Bag of each value, numbered over all keys; ``sum(strides)`` at padding."""
        require_one_batch(self.lengths, "segment_ids")
        return bag_ids(self.lengths, self.strides, self.capacities)

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys)

    def __getitem__(self, key: str) -> JaggedArray:
        """Return the column of ``key``; a static slice.

        Raises:
            KeyError: There is no such key.
        """
        if key not in self.keys:
            raise KeyError(f"no key {key!r} among {list(self.keys)}")
        return self._column(self.keys.index(key))

    def to_dict(self) -> dict[str, JaggedArray]:
        """Return all columns by name; `from_dict` makes the same batch of them."""
        return dict(zip(self.keys, self._columns(), strict=True))

    def to_lists(self) -> dict[str, list[list[Any]]]:
        """Return the ids as nested lists by name; on the host.

        Raises:
            ValueError: The batch lies over a mesh.
        """
        require_one_batch(self.lengths, "to_lists")
        columns = jax.device_get(self).to_dict()
        return {key: column.to_lists() for key, column in columns.items()}

    def permute(self, indices: Sequence[int]) -> KeyedJaggedArray:
        """Return the keys in another order; a static slice of each run of keys.

        Args:
            indices: Positions of keys; they may repeat and leave keys out. `inverse_indices` follow
                (TorchRec drops them). A batch without keys keeps its batch size, by
                ``inverse_indices`` of ``[0, batch]``.

        Raises:
            IndexError: A position has no key.

        Example:
            >>> batch = KeyedJaggedArray.from_lists({"a": [[1]], "b": [[2, 3]]})
            >>> batch.permute([1, 0, 0]).keys
            ('b', 'a', 'a')
        """
        count = len(self.keys)
        if wrong := [index for index in indices if not 0 <= index < count]:
            raise IndexError(f"no key at {wrong}: the batch has {count} keys {list(self.keys)}")
        # Selecting all keys is common, in models that read all of a batch, and then costs nothing.
        if list(indices) == list(range(count)):
            return self
        if not len(indices):
            return self._without_keys()
        ids, bags = np.cumsum((0, *self.capacities)), np.cumsum((0, *self.strides))
        spans = runs(indices)
        inverse = self.inverse_indices

        def cut(array: Any, ends: np.ndarray) -> Any:
            parts = [array[..., ends[a] : ends[b]] for a, b in spans]
            return concatenate(parts, array.dtype)

        keys = tuple(self.keys[index] for index in indices)
        return KeyedJaggedArray._of(
            cut(self.values, ids),
            cut(self.lengths, bags),
            None if self.weights is None else cut(self.weights, ids),
            None
            if inverse is None
            else concatenate([inverse[..., a:b, :] for a, b in spans], np.int32, axis=-2),
            keys,
            tuple(self.capacities[index] for index in indices),
            tuple(self.strides[index] for index in indices),
            present(self.slot_keys, keys),
            tuple(self.sample_capacities[index] for index in indices if self.sample_capacities),
            self.memory,
        )

    def select(self, keys: Sequence[str]) -> KeyedJaggedArray:
        """Return the named keys, in that order; names may repeat.

        Raises:
            KeyError: There is no such key.
        """
        if missing := [key for key in keys if key not in self.keys]:
            raise KeyError(f"no keys {missing} among {list(self.keys)}")
        return self.permute([self.keys.index(key) for key in keys])

    def split(self, segments: Sequence[int]) -> list[KeyedJaggedArray]:
        """Return consecutive groups of keys.

        Args:
            segments: Number of keys in each group, summing to the number of keys; 0 is allowed.

        Raises:
            ValueError: The group sizes do not sum to the number of keys.
        """
        if sum(segments) != len(self.keys) or min(segments, default=0) < 0:
            raise ValueError(
                f"segments {list(segments)} must be sizes that sum to {len(self.keys)}, "
                f"the number of keys"
            )
        ends = np.cumsum((0, *segments)).tolist()
        return [self.permute(range(start, end)) for start, end in itertools.pairwise(ends)]

    @staticmethod
    def concat(batches: Sequence[KeyedJaggedArray]) -> KeyedJaggedArray:
        """Concatenate the keys of several batches of the same samples.

        Raises:
            ValueError: Only some are weighted or have inverse indices, batch sizes differ, a key is
                in two of them, or only some lie over a mesh.
        """
        with_keys = [batch for batch in batches if batch.keys]
        if not with_keys:
            return batches[0] if batches else KeyedJaggedArray.empty()
        memories = [batch.memory for batch in with_keys]
        # Capacities of two packers never come back together, so the result remembers neither.
        memory = memories[0] if all(each is memories[0] for each in memories) else None
        return KeyedJaggedArray._of(*joined(with_keys), memory)

    def with_capacities(self, capacities: Mapping[str, int] | Sequence[int]) -> KeyedJaggedArray:
        """Return the batch with segments of other capacities; keys not named keep theirs.

        Under jit segments may only grow, since the number of their ids is unknown.

        Raises:
            ValueError: A capacity is too small, or names a key that the batch lacks.
        """
        if isinstance(self.lengths, jax.core.Tracer):
            needed = self.capacities
        else:
            counts = [column.lengths.sum(axis=-1) for column in jax.device_get(self)._columns()]
            needed = tuple(int(np.max(count, initial=0)) for count in counts)
        if isinstance(capacities, Mapping):
            capacities = self.capacity_per_key | dict(capacities)
        wanted = pinned_capacities(self.keys, needed, capacities)
        if wanted == self.capacities:
            return self
        return self._with(
            values=refit(self.values, self.capacities, wanted),
            weights=None if self.weights is None else refit(self.weights, self.capacities, wanted),
            capacities=wanted,
        )

    def expanded(self) -> KeyedJaggedArray:
        """Return the batch with a bag per sample, where samples share bags.

        Bag ``b`` of each key is then sample ``b``'s. The capacities are `sample_capacities`;
        outside of jit, unknown ones are computed.

        Returns:
            The batch itself if it has no ``inverse_indices``. Under jit, if the ids of a key exceed
            its capacity, all ids of that key are -1 (and all weights NaN), which makes its
            embeddings NaN.

        Raises:
            ValueError: The ids of all samples exceed int32.

        Example:
            >>> batch = KeyedJaggedArray.from_lists(
            ...     {"f": [[1], [2, 3]]}, inverse_indices={"f": [1, 0, 1]})
            >>> batch.expanded()
            KeyedJaggedArray(batch_size=3, {
                'f': [[2, 3], [1], [2, 3]],
            })
        """
        return self if self.inverse_indices is None else expand(self)

    def with_checked_ids(
        self, bounds: Mapping[str, int], bounds_mode: str = "raise"
    ) -> KeyedJaggedArray:
        """Check the batch's ids on the host, as `PackOptions` describes.

        Returns:
            The batch itself if all ids are in range, else one with repaired ids in NumPy arrays.

        Raises:
            TypeError: The batch is traced.
            ValueError: An id is out of range, a key occurs twice, or the batch lies over a mesh.
        """
        require_one_batch(self.lengths, "with_checked_ids")
        host = self._with(values=columns.concrete("values", self.values))
        given = []
        for column in host._columns():
            lengths = np.asarray(column.lengths)
            given.append(columns.Column(np.asarray(column.values)[: lengths.sum()], lengths))
        values = checked_values(
            self.keys,
            given,
            self.capacities,
            bounds,
            bounds_mode,
            64 if is_raw(self.values) else 32,
        )
        return self if values is None else self._with(values=values)

    def _with(self, **fields: Any) -> KeyedJaggedArray:
        return KeyedJaggedArray._of(**(vars(self) | fields))

    def _with_sample_capacities(self, given: Mapping[str, int] | Sequence[int]) -> KeyedJaggedArray:
        if self.inverse_indices is None:
            return self
        lengths = columns.concrete("lengths", self.lengths)
        inverse = columns.concrete("inverse_indices", self.inverse_indices)
        pinned = pinned_sample_capacities(
            self.keys, lengths, inverse, self.strides, self.capacities, given
        )
        return self._with(sample_capacities=pinned)

    def _without_keys(self) -> KeyedJaggedArray:
        """Return a batch of the same samples without any key, for an empty `permute`."""
        axes = self.lengths.shape[:-1]
        # Strides are per key, so without keys only ``inverse_indices`` (``[0, batch]``) tell the
        # number of samples.
        values = np.zeros((*axes, 0), self.values.dtype)
        return KeyedJaggedArray._of(
            as_raw(values) if is_raw(self.values) else values,
            np.zeros((*axes, 0), np.int32),
            None if self.weights is None else np.zeros((*axes, 0), np.float32),
            np.zeros((*axes, 0, self.batch_size), np.int32),
            (),
            (),
            (),
        )

    def _columns(self) -> list[JaggedArray]:
        return [self._column(index) for index in range(len(self.keys))]

    def _column(self, index: int) -> JaggedArray:
        start, bag = sum(self.capacities[:index]), sum(self.strides[:index])
        # `...` is the axis of the devices, which only a batch over a mesh has.
        ids = (..., slice(start, start + self.capacities[index]))
        arrays = (
            self.values[ids],
            self.lengths[..., bag : bag + self.strides[index]],
            None if self.weights is None else self.weights[ids],
        )
        # A plain column for a plain batch: most code only asks for a `JaggedArray`.
        inverse, are_slots = self.inverse_indices, self.keys[index] in self.slot_keys
        if inverse is None and not are_slots:
            return JaggedArray(*arrays)
        inverse = None if inverse is None else inverse[..., index, :]
        sample_capacity = self.sample_capacities[index] if self.sample_capacities else 0
        return BatchColumn(*arrays, inverse, sample_capacity, are_slots)

    def __repr__(self) -> str:
        return printing.keyed_jagged(self)


# By `_of`: the constructor would check the batch.
register_ragged(
    KeyedJaggedArray,
    ("values", "lengths", "weights", "inverse_indices"),
    ("keys", "capacities", "strides", "slot_keys", "sample_capacities"),
    make=KeyedJaggedArray._of,
)
