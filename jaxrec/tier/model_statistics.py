"""Statistics of a model's open vocabularies, caches and row stores, and a check for misses."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from flax import nnx

from jaxrec.tier.planning.batch_ids import HostBatch
from jaxrec.tier.planning.batch_order import PlannedBatch
from jaxrec.tier.planning.model_tables import TableVocabulary
from jaxrec.tier.planning.tier import Tier, TierObserver, tier_of
from jaxrec.tier.vocabulary.assignment import Assignment


def statistics(model: nnx.Module) -> dict[str, dict[str, float]]:
    """Return the counts of lookups, evictions and stored rows since the start of the process.

    Counts are over training batches, including those that `ahead` has planned but not yielded.
    Tables that read the same features have the same statistics.

    Args:
        model: A model of `jaxrec.tier.make`.

    Returns:
        For each table, by name:

        - ``lookups``: number of ids in batches, with repeats;
        - ``hits``: lookups of ids that had a row before the batch;
        - ``new``: number of distinct ids without a row, summed over batches;
        - ``admitted``: number of ids that got a row;
        - ``evicted``: number of ids that lost their row;
        - ``refused``: lookups that read the rows of `Dynamic.unknown`;
        - ``resident``: number of ids that have a row now;
        - ``load``: ``resident`` divided by the number of rows for ids;
        - ``hit_rate``: ``hits`` divided by ``lookups``.

        Each table with a row store also has the following. Bytes include the optimizer state, and
        rows that evaluations move are counted. With several processes, counts are those of this
        process's store. Milliseconds are wall-clock time in this process, per training batch that
        the loop has taken:

        - ``fetched``, ``fetched_bytes``: rows that came back to the devices, and their bytes;
        - ``initialized``: rows that the store did not have, which got their first values;
        - ``written``, ``written_bytes``: evicted rows that were written to the store;
        - ``read_ms``, ``write_ms``: time that the store took to read and to write;
        - ``stall_ms``: time that the training thread waited for rows of the table;
        - ``last_stall_ms``: the time that it waited at the last batch.

    Raises:
        TypeError: The model has no table of `jaxrec.tier.make`.

    Example:
        >>> import jaxrec
        >>> config = jaxrec.EmbeddingBagConfig("item", num_embeddings=9, embedding_dim=4)
        >>> model = jaxrec.tier.make(
        ...     lambda: jaxrec.EmbeddingBagCollection([config], rngs=nnx.Rngs(0)),
        ...     {"item": jaxrec.tier.Dynamic()})
        >>> batch = jaxrec.KeyedJaggedArray.from_lists({"item": [[2**60, 7], [7]]}, id_bits=64)
        >>> for features in jaxrec.tier.ahead(model, [batch, batch]):
        ...     _ = model(features)
        >>> values = statistics(model)["item"]
        >>> values["lookups"], values["hits"], values["admitted"], values["load"]
        (6, 3, 2, 0.25)
    """
    tier = _tier(model)
    of_vocabulary = tier.statistics()
    return {
        table.config.name: dict(of_vocabulary[each.name])
        for each in tier.vocabularies
        for table in each.tables
    }


def totals(model: nnx.Module) -> dict[str, float]:
    """Return the `statistics` of all tables together, each vocabulary once, for logs of a loop."""
    tier = _tier(model)
    each = list(tier.statistics().values())
    names = dict.fromkeys(name for values in each for name in values)
    summed = {name: sum(values.get(name, 0) for values in each) for name in names}
    room = sum(of_table.vocabulary.room for of_table in tier.vocabularies)
    return summed | {
        "load": summed["resident"] / room,
        "hit_rate": summed["hits"] / max(1, summed["lookups"]),
    }


def _tier(model: nnx.Module) -> Tier:
    if (tier := tier_of(model)) is None:
        raise TypeError(
            "the model has no table with an open vocabulary; make it with jaxrec.tier.make(model, "
            "{table: jaxrec.tier.Dynamic()})"
        )
    return tier


# In place of the id of a free row; -1 is never an id.
_FREE = -1


class MissCounter(TierObserver):
    """Counts lookups whose rows are not on the devices; the count must stay 0.

    `jaxrec.tier.ahead` brings all rows of a batch to the devices before its step. `MissCounter`
    checks this while a model is trained and evaluated. It follows the moves of rows to know the id
    of each row on the devices, and compares the ids of each batch with the ids of the rows that
    replace them. A lookup of a row of `jaxrec.tier.Dynamic.unknown` is not a miss.

    The check takes the training thread about 5 ns per lookup, and 8 bytes per row. It ends when the
    object is deleted.

    Args:
        model: A model of `jaxrec.tier.make`.

    Attributes:
        lookups: Number of checked lookups, by table.
        misses: Number of lookups whose row was not on the devices, by table.

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
        # Evictions first: a new id may get a row that the same batch evicts.
        for ids, assignment in zip(self._ids, assignments, strict=True):
            ids[assignment.evicted_rows] = _FREE
            ids[assignment.new_rows] = assignment.new_ids

    def given(self, planned: PlannedBatch) -> None:
        before, after = HostBatch.of(planned.source), HostBatch.of(planned.batch)
        for ids, each in zip(self._ids, self._vocabularies, strict=True):
            for segment, with_rows in zip(before.segments, after.segments, strict=True):
                if segment.key in each.features:
                    rows = with_rows.ids
                    # Rows below `first_row` are those of unknown ids.
                    is_own = rows >= each.vocabulary.first_row
                    num_misses = int(np.count_nonzero(is_own & (ids[rows] != segment.ids)))
                    for table in each.tables:
                        self.lookups[table.config.name] += segment.ids.size
                        self.misses[table.config.name] += num_misses


def _ids_of_rows(each: TableVocabulary) -> np.ndarray:
    """Return the id of each row, int64 ``[rows]``, `_FREE` for rows without one."""
    ids, rows = each.vocabulary.map.items()
    of_rows = np.full(each.vocabulary.num_rows, _FREE, np.int64)
    of_rows[rows] = ids
    return of_rows
