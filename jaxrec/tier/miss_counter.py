"""A check that the devices hold the rows that batches read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from flax import nnx

from jaxrec.tier.planning.batch_ids import HostBatch
from jaxrec.tier.planning.batch_order import PlannedBatch
from jaxrec.tier.planning.model_tables import TableVocabulary
from jaxrec.tier.planning.tier import TierObserver, tier_of
from jaxrec.tier.vocabulary.vocabulary import Assignment

# The id of a row that no id has; ids are never -1.
_FREE = -1


class MissCounter(TierObserver):
    """Counts lookups whose rows are not on the devices; there must be none.

    `jaxrec.tier.ahead` brings all rows of a batch before its step, so that the devices never miss
    one. This checks it while a model is trained and evaluated: it keeps the id of each row on the
    devices, as rows were moved, and compares the ids of each batch with the ids of the rows that
    take their place. A lookup of a row of `jaxrec.tier.Dynamic.unknown` is not a miss.

    It takes the training thread about 5 ns a lookup and 8 bytes for each row. Keep the object as
    long as it is to count.

    Args:
        model: A model of `jaxrec.tier.make`.

    Attributes:
        lookups: Number of lookups that were checked, by table.
        misses: Number of them whose row was not on the devices, by table.

    Raises:
        TypeError: The model has no table of `jaxrec.tier.make`.

    Example:
        >>> import jaxrec
        >>> config = jaxrec.EmbeddingBagConfig("user", num_embeddings=1000, embedding_dim=4)
        >>> model = jaxrec.tier.make(
        ...     lambda: jaxrec.EmbeddingBagCollection([config], rngs=nnx.Rngs(0)),
        ...     {"user": jaxrec.tier.Cached(rows=10)})
        >>> counter = jaxrec.tier.MissCounter(model)
        >>> batch = jaxrec.KeyedJaggedArray.from_lists({"user": [[999, 7], [7]]})
        >>> for features in jaxrec.tier.ahead(model, [batch]):
        ...     _ = model(features)
        >>> counter.lookups, counter.misses
        ({'user': 3}, {'user': 0})
    """

    def __init__(self, model: nnx.Module) -> None:
        tier = tier_of(model)
        if tier is None:
            raise TypeError(
                "MissCounter is for a model of jaxrec.tier.make; all rows of other models are on "
                "the devices"
            )
        self._vocabularies = tier.vocabularies
        names = [table.config.name for each in tier.vocabularies for table in each.tables]
        self.lookups, self.misses = dict.fromkeys(names, 0), dict.fromkeys(names, 0)
        with tier.settled(model):
            self.restored()
            tier.observers.add(self)

    def restored(self) -> None:
        self._ids = [_ids_of_rows(each) for each in self._vocabularies]

    def moved(self, assignments: Sequence[Assignment]) -> None:
        for ids, assignment in zip(self._ids, assignments, strict=True):
            ids[assignment.evicted_rows] = _FREE
            ids[assignment.new_rows] = assignment.new_ids

    def taken(self, batch: Any) -> None:
        return

    def given(self, planned: PlannedBatch) -> None:
        before, after = HostBatch.of(planned.source), HostBatch.of(planned.batch)
        for ids, each in zip(self._ids, self._vocabularies, strict=True):
            for segment, with_rows in zip(before.segments, after.segments, strict=True):
                if segment.key in each.features:
                    rows = with_rows.ids
                    is_own = rows >= each.vocabulary.first_row
                    num_misses = np.count_nonzero(is_own & (ids[rows] != segment.ids))
                    self._add(each, segment.ids.size, int(num_misses))

    def _add(self, each: TableVocabulary, lookups: int, misses: int) -> None:
        for table in each.tables:
            self.lookups[table.config.name] += lookups
            self.misses[table.config.name] += misses


def _ids_of_rows(each: TableVocabulary) -> np.ndarray:
    """Return the id that each row has, int64 ``[rows]``."""
    ids, rows = each.vocabulary.map.items()
    of_rows = np.full(each.vocabulary.num_rows, _FREE, np.int64)
    of_rows[rows] = ids
    return of_rows
