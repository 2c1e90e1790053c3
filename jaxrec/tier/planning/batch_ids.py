"""The ids of host batches, by vocabulary and over all processes, and batches with rows instead."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, TypeAlias

import jax
import numpy as np

from jaxrec.embed.padding import PADDING_SLOT, padding_ids
from jaxrec.mesh.agree import fail_together
from jaxrec.ragged import KeyedJaggedArray
from jaxrec.tier.ids import implementation
from jaxrec.tier.planning.model_tables import TableVocabulary
from jaxrec.tier.vocabulary.assignment import TableFullError, VocabularyFullError

_MAX_ROW = np.iinfo(np.int32).max


@dataclasses.dataclass(frozen=True)
class Segment:
    """The ids of one key of a `KeyedJaggedArray` in a batch."""

    batch: int  # index of the KeyedJaggedArray among those of the batch
    key: str
    start: int  # where the ids begin in its `values`
    ids: np.ndarray  # int64 [n], without padding
    lengths: np.ndarray  # [bags]
    # Position of each id behind `start`, where padding ids (`TableConfig.padding_id`) were left out
    # of ``ids``; None: none were.
    positions: np.ndarray | None = None

    def without(self, padding_id: int | None) -> Segment:
        """Return the segment without the ids that are ``padding_id``."""
        is_kept = None if padding_id is None else self.ids != padding_id
        if is_kept is None or is_kept.all():
            return self
        return dataclasses.replace(self, ids=self.ids[is_kept], positions=np.flatnonzero(is_kept))

    def put(self, values: np.ndarray, ids: np.ndarray) -> None:
        """Write int32 ids, ``[n]``, to the batch's values; padding ids become `PADDING_SLOT`."""
        count = self.ids.size if self.positions is None else int(self.lengths.sum())
        place = values[self.start : self.start + count]
        if self.positions is None:
            place[:] = ids
        else:
            place[:] = PADDING_SLOT
            place[self.positions] = ids

    def describe(self, position: int) -> str:
        """Name, for an error, the feature and the sample of the id at a position in ``ids``."""
        if self.positions is not None:
            position = int(self.positions[position])
        bag = int(np.searchsorted(np.cumsum(self.lengths), position, side="right"))
        return f"feature {self.key!r}, sample {bag}"


@dataclasses.dataclass(frozen=True)
class HostBatch:
    """A host batch, flattened, and the ids of all of its `KeyedJaggedArray`s."""

    features: tuple[KeyedJaggedArray, ...]
    leaves: Sequence[Any]  # `features` are among them
    tree: Any
    segments: tuple[Segment, ...]  # every key of every one of `features`

    @classmethod
    def of(cls, batch: Any) -> HostBatch:
        """Flatten a batch, any pytree with a `KeyedJaggedArray`, and find its ids."""
        leaves, tree = jax.tree.flatten(batch, is_leaf=_has_ids)
        features = tuple(filter(_has_ids, leaves))
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
            segments += _segments_of(number, each)
        return cls(features, leaves, tree, tuple(segments))

    def without_padding_ids(self, ids: Mapping[str, int]) -> HostBatch:
        """Return the batch with segments that lack padding ids; ``ids`` are by feature."""
        if not ids:
            return self
        segments = tuple(each.without(ids.get(each.key)) for each in self.segments)
        return dataclasses.replace(self, segments=segments)

    def check_others(self, keys: Set[str]) -> None:
        """Raise a ValueError if an id of a key that is not in ``keys`` does not fit int32."""
        for segment in self.segments:
            if segment.key not in keys:
                _check_int32(segment)

    def with_rows(self, rows: Sequence[np.ndarray | None]) -> Any:
        """Return the batch with ``rows``, int32 ``[n]`` for each segment, in place of its ids.

        A segment whose item is None keeps its ids, as int32.
        """
        # `slot_keys` marks the keys whose values are rows, so that a table store can refuse ids.
        values = [np.zeros(each.values.shape, np.int32) for each in self.features]
        slot_keys: list[list[str]] = [[] for _ in self.features]
        for segment, of_segment in zip(self.segments, rows, strict=True):
            if of_segment is None:
                _check_int32(segment)
                of_segment = segment.ids
            else:
                slot_keys[segment.batch].append(segment.key)
            segment.put(values[segment.batch], of_segment)
        features = iter(
            each._with(values=value, slot_keys=tuple(keys))
            for each, value, keys in zip(self.features, values, slot_keys, strict=True)
        )
        leaves = [next(features) if _has_ids(leaf) else leaf for leaf in self.leaves]
        return jax.tree.unflatten(self.tree, leaves)


def _has_ids(leaf: Any) -> bool:
    return isinstance(leaf, KeyedJaggedArray)


def fingerprint(ids: Sequence[np.ndarray]) -> tuple[int, int, int]:
    """Return three numbers that recognize a batch, from its ids, int64 ``[n]`` by vocabulary.

    They are the number of ids, a hash of each vocabulary's sum, and the exclusive or of all ids.
    """
    # Only a replay relies on it: batches that an earlier loop planned come again in the same order.
    # A sum and an exclusive or read the ids once and do not depend on threads or on the platform.
    lists = [np.ascontiguousarray(of_vocabulary) for of_vocabulary in ids]
    count, total, mixed = sum(each.size for each in lists), 0, 0
    for of_list, bits in implementation.current().fingerprint(lists).tolist():
        total = (total * 31 + of_list) % 2**63
        mixed ^= bits
    return count, total, mixed % 2**63


def _segments_of(number: int, features: KeyedJaggedArray) -> list[Segment]:
    # `values` is key after key, each padded to the key's capacity: lengths give the ids in it.
    segments, start, bag = [], 0, 0
    lengths = np.asarray(features.lengths)
    for key, capacity, stride in zip(
        features.keys, features.capacities, features.strides, strict=True
    ):
        of_key = lengths[bag : bag + stride]
        ids = np.asarray(features.values[start : start + int(of_key.sum())])
        segment = Segment(number, key, start, ids.astype(np.int64, copy=False), of_key)
        # Only a batch that has rows already has padding's slot.
        segments.append(segment.without(PADDING_SLOT) if key in features.slot_keys else segment)
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


Gather: TypeAlias = Callable[[Sequence[np.ndarray]], list[list[np.ndarray]]]
"""A function that returns the ids of each process (`jaxrec.mesh.agree.gather_id_lists`)."""


@dataclasses.dataclass(frozen=True)
class BatchIds:
    """The ids of a batch, of all processes, by vocabulary."""

    host: HostBatch  # this process's part of the batch
    # Each of the following has an item for each vocabulary.
    vocabularies: tuple[TableVocabulary, ...]
    segments: tuple[tuple[Segment, ...], ...]  # of `host`
    ids: tuple[np.ndarray, ...]  # int64 [n], of process 0, then of process 1, ...
    mine: tuple[slice, ...]  # range of this process's ids in `ids`

    @classmethod
    def of(
        cls, batch: Any, vocabularies: Sequence[TableVocabulary], gather: Gather | None
    ) -> BatchIds:
        """Collect the ids of a host batch; ``gather`` is None where one process has all of it."""
        try:
            host = HostBatch.of(batch)
            host = host.without_padding_ids(_padding_ids(vocabularies))
            segments = tuple(_checked_segments(host, each) for each in vocabularies)
            lists = [_joined(each) for each in segments]
            if gather is not None:
                host.check_others({key for each in vocabularies for key in each.features})
        except Exception as error:
            if gather is None:
                raise
            # The others wait in `gather` for ids of this process: it must tell them.
            fail_together(error, len(vocabularies))
        if gather is None:
            mine = [slice(None)] * len(lists)
        else:
            gathered = gather(lists)
            mine = [_own_range(of_processes) for of_processes in gathered]
            lists = [np.concatenate(of_processes) for of_processes in gathered]
        return cls(host, tuple(vocabularies), segments, tuple(lists), tuple(mine))

    @property
    def mark(self) -> tuple[int, int, int]:
        """The `fingerprint` of the batch's ids."""
        return fingerprint(self.ids)

    def with_rows(self, rows: Sequence[np.ndarray]) -> Any:
        """Return this process's part of the batch, with rows in place of ids.

        ``rows`` has for each vocabulary an int32 ``[n]`` array: the row of each of its ``ids``.
        """
        of_segment: dict[tuple[int, str], np.ndarray] = {}
        for segments, of_all, mine in zip(self.segments, rows, self.mine, strict=True):
            of_process, start = of_all[mine], 0
            for segment in segments:
                stop = start + segment.ids.size
                of_segment[segment.batch, segment.key] = of_process[start:stop]
                start = stop
        return self.host.with_rows(
            [of_segment.get((each.batch, each.key)) for each in self.host.segments]
        )

    def table_full(self, v: int, error: VocabularyFullError, held: int) -> TableFullError:
        """Return the error for vocabulary ``v``: the first id without a row, its sample, a remedy.

        The rows of ``held`` earlier batches must stay.
        """
        # The id may be in another process's part, whose features and samples are not known here.
        each, where = self.vocabularies[v], "the part of the batch of another process"
        for segment in self.segments[v]:
            is_first = segment.ids == error.first_id
            if is_first.any():
                where = segment.describe(int(np.argmax(is_first)))
                break
        rows = each.vocabulary.num_rows + error.needed - error.available
        more = "num_embeddings" if each.num_ids is None else "jaxrec.tier.Cached(rows=...)"
        later = ", or admit ids later (Dynamic(admit_after=...))" if each.num_ids is None else ""
        return TableFullError(
            f"{where}: no row of table {each.name} is left for id {error.first_id}: the batch has "
            f"{error.needed:,} new ids, and {error.available:,} of the {error.room:,} rows for ids "
            f"are not in use by it or by the {held} batches under way. Give the table {rows:,} "
            f"rows or more ({more}), or make batches smaller{later}"
        )


def _padding_ids(vocabularies: Sequence[TableVocabulary]) -> dict[str, int]:
    """Return the padding id of each feature that has one."""
    return padding_ids([table.config for each in vocabularies for table in each.tables])


def _checked_segments(host: HostBatch, each: TableVocabulary) -> tuple[Segment, ...]:
    """Return the segments of a vocabulary's features; raise a ValueError for an unusable id."""
    segments = tuple(segment for segment in host.segments if segment.key in each.features)
    for segment in segments:
        if segment.key in host.features[segment.batch].slot_keys:
            raise ValueError(
                f"feature {segment.key!r} of the batch has rows already, not ids; give "
                "jaxrec.tier.ahead each batch once"
            )
        _check_range(each, segment)
    return segments


def _check_range(each: TableVocabulary, segment: Segment) -> None:
    """Raise a ValueError for the first id outside a table of fixed size."""
    if each.num_ids is None or not segment.ids.size:
        return
    if segment.ids.min() >= 0 and segment.ids.max() < each.num_ids:
        return
    position = int(np.argmax((segment.ids < 0) | (segment.ids >= each.num_ids)))
    raise ValueError(
        f"{segment.describe(position)}: id {segment.ids[position]} is not in table {each.name}, "
        f"whose ids are 0 to {each.num_ids - 1}; give the table more rows (num_embeddings), or "
        "hash the feature's ids with jaxrec.ragged.hash_ids(ids, num_embeddings)"
    )


def _joined(segments: Sequence[Segment]) -> np.ndarray:
    """Return the concatenated ids of segments."""
    if len(segments) == 1:
        return segments[0].ids  # without a copy
    return np.concatenate([np.zeros(0, np.int64), *(segment.ids for segment in segments)])


def _own_range(of_processes: Sequence[np.ndarray]) -> slice:
    """Return the range of this process's ids in the concatenated ids of all processes."""
    process = jax.process_index()
    start = sum(part.size for part in of_processes[:process])
    return slice(start, start + of_processes[process].size)
