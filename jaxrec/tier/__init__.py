"""Vocabularies beyond the rows of a table, and tables beyond device memory."""

from jaxrec.tier.changes.change_tracker import ChangeTracker as ChangeTracker
from jaxrec.tier.changes.changes import ChangedRows as ChangedRows
from jaxrec.tier.changes.changes import TableChanges as TableChanges
from jaxrec.tier.deltas.folder import VersionError as VersionError
from jaxrec.tier.deltas.publication import PublishedVersion as PublishedVersion
from jaxrec.tier.deltas.publication import publish as publish
from jaxrec.tier.deltas.subscriber import Subscriber as Subscriber
from jaxrec.tier.lookahead import ahead as ahead
from jaxrec.tier.managed_collision.evicted import EvictedSlots as EvictedSlots
from jaxrec.tier.managed_collision.id_words import IdWords as IdWords
from jaxrec.tier.managed_collision.id_words import id_words as id_words
from jaxrec.tier.managed_collision.modules import (
    ManagedCollisionEmbeddingBagCollection as ManagedCollisionEmbeddingBagCollection,
)
from jaxrec.tier.managed_collision.modules import (
    ManagedCollisionEmbeddingCollection as ManagedCollisionEmbeddingCollection,
)
from jaxrec.tier.managed_collision.multi_probe import MultiProbeConfig as MultiProbeConfig
from jaxrec.tier.managed_collision.multi_probe import MultiProbeMap as MultiProbeMap
from jaxrec.tier.managed_collision.murmur import murmur_hash3 as murmur_hash3
from jaxrec.tier.managed_collision.policies import AverageThreshold as AverageThreshold
from jaxrec.tier.managed_collision.policies import (
    DistanceLFUEvictionPolicy as DistanceLFUEvictionPolicy,
)
from jaxrec.tier.managed_collision.policies import DynamicThreshold as DynamicThreshold
from jaxrec.tier.managed_collision.policies import EvictionPolicy as EvictionPolicy
from jaxrec.tier.managed_collision.policies import LFUEvictionPolicy as LFUEvictionPolicy
from jaxrec.tier.managed_collision.policies import LRUEvictionPolicy as LRUEvictionPolicy
from jaxrec.tier.managed_collision.policies import ProbabilisticThreshold as ProbabilisticThreshold
from jaxrec.tier.managed_collision.policies import ThresholdFilter as ThresholdFilter
from jaxrec.tier.managed_collision.sorted_map import SortedMap as SortedMap
from jaxrec.tier.managed_collision.sorted_map import SortedMapConfig as SortedMapConfig
from jaxrec.tier.managed_collision.time_to_live import LRUEviction as LRUEviction
from jaxrec.tier.managed_collision.time_to_live import (
    PerFeatureTTLEviction as PerFeatureTTLEviction,
)
from jaxrec.tier.managed_collision.time_to_live import SingleTTLEviction as SingleTTLEviction
from jaxrec.tier.managed_collision.time_to_live import TTLEviction as TTLEviction
from jaxrec.tier.miss_counter import MissCounter as MissCounter
from jaxrec.tier.model_statistics import statistics as statistics
from jaxrec.tier.model_tiers import close as close
from jaxrec.tier.model_tiers import make as make
from jaxrec.tier.row_file import export_rows as export_rows
from jaxrec.tier.row_file import import_rows as import_rows
from jaxrec.tier.stores.row_store import RowStore as RowStore
from jaxrec.tier.vocabulary.cached import Cached as Cached
from jaxrec.tier.vocabulary.dynamic import Dynamic as Dynamic
from jaxrec.tier.vocabulary.dynamic import default_row as default_row
from jaxrec.tier.vocabulary.dynamic import shared as shared
from jaxrec.tier.vocabulary.dynamic import zeros as zeros
from jaxrec.tier.vocabulary.eviction import Eviction as Eviction
from jaxrec.tier.vocabulary.eviction import by_score as by_score
from jaxrec.tier.vocabulary.eviction import distance_lfu as distance_lfu
from jaxrec.tier.vocabulary.eviction import lfu as lfu
from jaxrec.tier.vocabulary.eviction import lfu_lru as lfu_lru
from jaxrec.tier.vocabulary.eviction import lru as lru
from jaxrec.tier.vocabulary.eviction import ttl as ttl
from jaxrec.tier.vocabulary.next_use import farthest as farthest
from jaxrec.tier.vocabulary.records import Records as Records
