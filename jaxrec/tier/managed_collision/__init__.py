"""Ids of any size in tables of fixed size, by maps that change in the training step."""

from jaxrec._public import public_names as _public_names
from jaxrec.tier.managed_collision.id_batch import IdBatch as IdBatch
from jaxrec.tier.managed_collision.id_batch import id_words as id_words
from jaxrec.tier.managed_collision.modules import (
    ManagedCollisionEmbeddingBagCollection as ManagedCollisionEmbeddingBagCollection,
)
from jaxrec.tier.managed_collision.modules import (
    ManagedCollisionEmbeddingCollection as ManagedCollisionEmbeddingCollection,
)
from jaxrec.tier.managed_collision.multi_probe import MultiProbeConfig as MultiProbeConfig
from jaxrec.tier.managed_collision.multi_probe import MultiProbeMap as MultiProbeMap
from jaxrec.tier.managed_collision.policies import AverageThreshold as AverageThreshold
from jaxrec.tier.managed_collision.policies import (
    DistanceLFUEvictionPolicy as DistanceLFUEvictionPolicy,
)
from jaxrec.tier.managed_collision.policies import DynamicThreshold as DynamicThreshold
from jaxrec.tier.managed_collision.policies import EvictedSlots as EvictedSlots
from jaxrec.tier.managed_collision.policies import LFUEvictionPolicy as LFUEvictionPolicy
from jaxrec.tier.managed_collision.policies import LRUEviction as LRUEviction
from jaxrec.tier.managed_collision.policies import LRUEvictionPolicy as LRUEvictionPolicy
from jaxrec.tier.managed_collision.policies import PerFeatureTTLEviction as PerFeatureTTLEviction
from jaxrec.tier.managed_collision.policies import ProbabilisticThreshold as ProbabilisticThreshold
from jaxrec.tier.managed_collision.policies import SingleTTLEviction as SingleTTLEviction
from jaxrec.tier.managed_collision.policies import ThresholdFilter as ThresholdFilter
from jaxrec.tier.managed_collision.probing import murmur_hash3 as murmur_hash3
from jaxrec.tier.managed_collision.sorted_map import SortedMap as SortedMap
from jaxrec.tier.managed_collision.sorted_map import SortedMapConfig as SortedMapConfig

__all__ = _public_names(globals())


def __dir__() -> list[str]:
    return __all__
