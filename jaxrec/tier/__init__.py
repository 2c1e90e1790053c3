"""Vocabularies beyond the rows of a table, and tables beyond device memory."""

from jaxrec._public import moved_names as _moved_names
from jaxrec._public import public_names as _public_names
from jaxrec.tier import managed_collision as managed_collision
from jaxrec.tier import stores as stores
from jaxrec.tier.changes.change_tracker import ChangedRows as ChangedRows
from jaxrec.tier.changes.change_tracker import ChangeTracker as ChangeTracker
from jaxrec.tier.changes.change_tracker import TableChanges as TableChanges
from jaxrec.tier.deltas.folder import VersionError as VersionError
from jaxrec.tier.deltas.publication import PublishedVersion as PublishedVersion
from jaxrec.tier.deltas.publication import publish as publish
from jaxrec.tier.deltas.subscriber import Subscriber as Subscriber
from jaxrec.tier.lookahead import ahead as ahead
from jaxrec.tier.model_statistics import MissCounter as MissCounter
from jaxrec.tier.model_statistics import statistics as statistics
from jaxrec.tier.model_tiers import close as close
from jaxrec.tier.model_tiers import make as make
from jaxrec.tier.row_file import export_rows as export_rows
from jaxrec.tier.row_file import import_rows as import_rows
from jaxrec.tier.stores.row_store import RowStore as RowStore
from jaxrec.tier.vocabulary.eviction import Eviction as Eviction
from jaxrec.tier.vocabulary.eviction import Records as Records
from jaxrec.tier.vocabulary.eviction import by_score as by_score
from jaxrec.tier.vocabulary.eviction import distance_lfu as distance_lfu
from jaxrec.tier.vocabulary.eviction import lfu as lfu
from jaxrec.tier.vocabulary.eviction import lfu_lru as lfu_lru
from jaxrec.tier.vocabulary.eviction import lru as lru
from jaxrec.tier.vocabulary.eviction import ttl as ttl
from jaxrec.tier.vocabulary.next_use import farthest as farthest
from jaxrec.tier.vocabulary.settings import Cached as Cached
from jaxrec.tier.vocabulary.settings import Dynamic as Dynamic
from jaxrec.tier.vocabulary.settings import default_row as default_row
from jaxrec.tier.vocabulary.settings import shared as shared
from jaxrec.tier.vocabulary.settings import zeros as zeros

__all__ = _public_names(globals(), "managed_collision", "stores")

# Names of `managed_collision` that earlier versions had here.
_MOVED = (
    "AverageThreshold",
    "DistanceLFUEvictionPolicy",
    "DynamicThreshold",
    "EvictedSlots",
    "LFUEvictionPolicy",
    "LRUEviction",
    "LRUEvictionPolicy",
    "ManagedCollisionEmbeddingBagCollection",
    "ManagedCollisionEmbeddingCollection",
    "MultiProbeConfig",
    "MultiProbeMap",
    "PerFeatureTTLEviction",
    "ProbabilisticThreshold",
    "SingleTTLEviction",
    "SortedMap",
    "SortedMapConfig",
    "ThresholdFilter",
    "id_words",
    "murmur_hash3",
)
__getattr__ = _moved_names(
    __name__, {name: f"jaxrec.tier.managed_collision.{name}" for name in _MOVED}
)


def __dir__() -> list[str]:
    return __all__
