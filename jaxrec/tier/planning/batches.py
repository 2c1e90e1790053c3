"""The ids of a batch by vocabulary, and their places in it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence, Set
from typing import Any

import jax
import numpy as np

from jaxrec.ragged import KeyedJaggedArray
from jaxrec.tier.ids import implementation

_MAX_ROW = np.iinfo(np.int32).max


@dataclasses.dataclass(frozen=True)
class Segment:
    """The ids of one key of a batch.

    Attributes:
        batch: Number of the `KeyedJaggedArray` in the batch.
        key: The key.
        start: Where the ids begin in ``values``.
        ids: The ids without padding, int64.
        lengths: Numbers of ids of the bags.
    """

    batch: int
    key: str
    start: int
    ids: np.ndarray
    lengths: np.ndarray

    def describe(self, position: int) -> str:
        """Return the feature and the sample of an id."""
        bag = int(np.searchsorted(np.cumsum(self.lengths), position, side="right"))
        return f"feature {self.key!r}, sample {bag}"


@dataclasses.dataclass(frozen=True)
class HostBatch:
    """A host batch, taken apart.

    Attributes:
        features: Its `KeyedJaggedArray`s.
        others: Its other leaves.
        tree: Its structure.
        places: For each leaf whether it is one of ``features``.
        segments: All keys of all of ``features``.
    """

    features: tuple[KeyedJaggedArray, ...]
    others: tuple[Any, ...]
    tree: Any
    places: tuple[bool, ...]
    segments: tuple[Segment, ...]

    @classmethod
    def of(cls, batch: Any) -> HostBatch:
        """Take a batch apart.

        Raises:
            TypeError: The batch has no `KeyedJaggedArray`, or one on a device.
        """
        leaves, tree = jax.tree.flatten(
            batch, is_leaf=lambda leaf: isinstance(leaf, KeyedJaggedArray)
        )
        places = tuple(isinstance(leaf, KeyedJaggedArray) for leaf in leaves)
        features = tuple(leaf for leaf, is_ids in zip(leaves, places, strict=True) if is_ids)
        others = tuple(leaf for leaf, is_ids in zip(leaves, places, strict=True) if not is_ids)
        if not features:
            raise TypeError(
                f"a batch is a pytree with a KeyedJaggedArray, such as (features, labels), got "
                f"{type(batch).__name__}"
            )
        segments = []
        for number, each in enumerate(features):
            if not isinstance(each.values, np.ndarray) or each.values.ndim != 1:
                raise TypeError(
                    "ids get their rows on the host, but the batch is on a device; give "
                    "jaxrec.tier.ahead host batches, without shard_batch: it puts them on the mesh"
                )
            segments += _segments(number, each)
        return cls(features, others, tree, places, tuple(segments))

    def check_others(self, keys: Set[str]) -> None:
        """Check that ids of keys other than some fit int32.

        Raises:
            ValueError: An id does not fit.
        """
        for segment in self.segments:
            if segment.key not in keys:
                _check_int32(segment)

    def with_rows(self, rows: Sequence[np.ndarray | None]) -> Any:
        """Return the batch with other ids.

        Args:
            rows: For each segment int32 rows that take the place of its ids; None: the ids stay,
                as int32.

        Raises:
            ValueError: An id that stays does not fit int32.
        """
        values = [np.zeros(each.values.shape, np.int32) for each in self.features]
        slot_keys: list[list[str]] = [[] for _ in self.features]
        for segment, of_segment in zip(self.segments, rows, strict=True):
            if of_segment is None:
                _check_int32(segment)
                of_segment = segment.ids
            else:
                slot_keys[segment.batch].append(segment.key)
            stop = segment.start + segment.ids.size
            values[segment.batch][segment.start : stop] = of_segment
        features = iter(
            each._with(values=value, slot_keys=tuple(keys))
            for each, value, keys in zip(self.features, values, slot_keys, strict=True)
        )
        others = iter(self.others)
        leaves = [next(features) if is_ids else next(others) for is_ids in self.places]
        return jax.tree.unflatten(self.tree, leaves)


def fingerprint(ids: Sequence[np.ndarray]) -> tuple[int, int, int]:
    """Return numbers that differ between batches of different ids, with near certainty.

    Args:
        ids: int64 ids of each vocabulary.
    """
    lists = [np.ascontiguousarray(of_vocabulary) for of_vocabulary in ids]
    count, total, mixed = sum(each.size for each in lists), 0, 0
    for of_list, bits in implementation.current().fingerprint(lists).tolist():
        total = (total * 31 + of_list) % 2**63
        mixed ^= bits
    return count, total, mixed % 2**63


def _segments(number: int, features: KeyedJaggedArray) -> list[Segment]:
    segments, start, bag = [], 0, 0
    lengths = np.asarray(features.lengths)
    for key, capacity, stride in zip(
        features.keys, features.capacities, features.strides, strict=True
    ):
        of_key = lengths[bag : bag + stride]
        ids = np.asarray(features.values[start : start + int(of_key.sum())])
        segments.append(Segment(number, key, start, ids.astype(np.int64, copy=False), of_key))
        start, bag = start + capacity, bag + stride
    return segments


def _check_int32(segment: Segment) -> None:
    is_bad = (segment.ids < 0) | (segment.ids > _MAX_ROW)
    if is_bad.any():
        position = int(np.argmax(is_bad))
        raise ValueError(
            f"{segment.describe(position)}: id {segment.ids[position]} is outside every table of "
            "fixed size; hash the feature's ids with jaxrec.ragged.hash_ids(ids, num_embeddings), "
            "or give its tables an open vocabulary with jaxrec.tier.Dynamic()"
        )
