"""The ids of a batch by vocabulary, of all processes, and the batch with rows in their place."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np

from jaxrec.mesh.agree import fail_together
from jaxrec.tier.planning.batches import HostBatch, Segment, fingerprint
from jaxrec.tier.planning.model_tables import TableVocabulary
from jaxrec.tier.vocabulary.vocabulary import TableFullError, VocabularyFullError

Gather: TypeAlias = Callable[[Sequence[np.ndarray]], list[list[np.ndarray]]]
"""A function that returns the ids of each process (`jaxrec.mesh.agree.gather_id_lists`)."""


@dataclasses.dataclass(frozen=True)
class BatchIds:
    """The ids of a batch, by vocabulary.

    Attributes:
        host: The batch; with several processes this process's part of it.
        vocabularies: The vocabularies.
        segments: Segments of ``host``, for each vocabulary.
        ids: The ids of all processes, in their order, int64 ``[n]``, for each vocabulary.
        mine: Range of this process's ids among them, for each vocabulary.
    """

    host: HostBatch
    vocabularies: tuple[TableVocabulary, ...]
    segments: tuple[tuple[Segment, ...], ...]
    ids: tuple[np.ndarray, ...]
    mine: tuple[slice, ...]

    @classmethod
    def of(
        cls, batch: Any, vocabularies: Sequence[TableVocabulary], gather: Gather | None
    ) -> BatchIds:
        """Take the ids out of a host batch.

        Args:
            batch: The batch; with several processes this process's part of it.
            vocabularies: The vocabularies.
            gather: Gathers the ids of all processes; None: there is one.

        Raises:
            TypeError: The batch has no `KeyedJaggedArray` on the host.
            ValueError: A table of fixed size has no such id, or the ids are replaced already.
            RuntimeError: Another process cannot read its part.
        """
        try:
            host = HostBatch.of(batch)
            segments = tuple(_segments(host, each) for each in vocabularies)
            lists = [_joined(each) for each in segments]
            if gather is not None:
                host.check_others({key for each in vocabularies for key in each.features})
        except Exception as error:
            if gather is None:
                raise
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
        """Numbers that differ between batches, with near certainty."""
        return fingerprint(self.ids)

    def with_rows(self, rows: Sequence[np.ndarray]) -> Any:
        """Return this process's batch with rows in the place of ids.

        Args:
            rows: Row of each of ``ids``, int32 ``[n]``, for each vocabulary.
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
        """Return an error that says where the batch has an id without room, and what to do.

        Args:
            v: Index of the vocabulary.
            error: Its error.
            held: Number of batches under way whose rows stay.
        """
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


def _segments(host: HostBatch, each: TableVocabulary) -> tuple[Segment, ...]:
    """Return the segments of a vocabulary, checked."""
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
    """Check the ids of a table of fixed size.

    Raises:
        ValueError: An id is outside of the table.
    """
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
    """Return the ids of segments, one after the other."""
    if len(segments) == 1:
        return segments[0].ids
    return np.concatenate([np.zeros(0, np.int64), *(segment.ids for segment in segments)])


def _own_range(of_processes: Sequence[np.ndarray]) -> slice:
    """Return the range of this process's ids among those of all processes."""
    process = jax.process_index()
    start = sum(part.size for part in of_processes[:process])
    return slice(start, start + of_processes[process].size)
