"""The tables of a model that have open vocabularies."""

from __future__ import annotations

import dataclasses
import warnings

from flax import nnx

from jaxrec.embed.collection import Collection, find_collections
from jaxrec.embed.config import TableConfig
from jaxrec.optim import RowOptimizer
from jaxrec.tier.rows.transfer import RowTransfer
from jaxrec.tier.store import TierStore
from jaxrec.tier.vocabulary.vocabulary import Vocabulary


@dataclasses.dataclass(frozen=True)
class TieredTable:
    """A table of a model with `jaxrec.tier.Dynamic` or `jaxrec.tier.Cached`."""

    collection: str  # path of its collection in the model
    config: TableConfig  # as the user gave it; the table on the devices may have fewer rows
    optimizer: RowOptimizer


@dataclasses.dataclass(frozen=True)
class TableVocabulary:
    """A vocabulary, the features whose ids it holds, and the tables whose rows it gives them."""

    # Tables that read one feature share a vocabulary: the batch holds one row index for each id,
    # which all its tables read. Hence they have the same number of rows.
    name: str  # names of the tables, joined by "+"
    features: tuple[str, ...]
    tables: tuple[TieredTable, ...]
    vocabulary: Vocabulary
    transfer: RowTransfer | None  # None: evicted rows are lost
    num_ids: int | None = None  # size of tables with `jaxrec.tier.Cached`; None: any id

    def statistics(self) -> dict[str, float]:
        """Return the counts of the vocabulary and of its store."""
        counts = self.vocabulary.statistics.summary(len(self.vocabulary))
        return counts if self.transfer is None else counts | self.transfer.traffic.summary()

    def warn_of_earlier_rows(self) -> None:
        """Warn, once, if the store had rows of an earlier run that no checkpoint has replaced."""
        if self.transfer is not None and self.transfer.num_earlier:
            warnings.warn(
                f"table {self.name} begins with {self.transfer.num_earlier:,} rows of an earlier "
                f"run, which {self.transfer.store!r} has; restore the checkpoint of that run, or "
                "train with an empty store",
                stacklevel=4,
            )
            self.transfer.num_earlier = 0


def collections_of(model: nnx.Module) -> dict[str, Collection]:
    """Return the collections that `jaxrec.tier.make` gave vocabularies, by path."""
    found = find_collections(model).items()
    return {path: each for path, each in found if isinstance(each.tables.get_value(), TierStore)}


def collection_at(model: nnx.Module, path: str) -> Collection:
    """Return the collection of a model at a path, a key of `collections_of`."""
    # Attribute by attribute: a walk over the model takes about a millisecond, at every batch.
    node: object = model
    for name in path.split("/") if path else ():
        node = getattr(node, "__dict__", {}).get(name)
    return node if isinstance(node, Collection) else collections_of(model)[path]
