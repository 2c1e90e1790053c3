"""Readers of data sets: click logs, MovieLens, interactions, Parquet and npy files."""

from jaxrec._public import moved_names as _moved_names
from jaxrec._public import public_names as _public_names
from jaxrec.data.arrays import NpyGroups as NpyGroups
from jaxrec.data.arrays import npz_members as npz_members
from jaxrec.data.balance import balanced_order as balanced_order
from jaxrec.data.balance import imbalance as imbalance
from jaxrec.data.balance import sequence_work as sequence_work
from jaxrec.data.clicks import ClickBatch as ClickBatch
from jaxrec.data.clicks import ClickLog as ClickLog
from jaxrec.data.clicks import Clicks as Clicks
from jaxrec.data.clicks import batches as batches
from jaxrec.data.criteo.exports import DayFiles as DayFiles
from jaxrec.data.criteo.exports import RecordGroups as RecordGroups
from jaxrec.data.criteo.exports import write_multi_hot as write_multi_hot
from jaxrec.data.criteo.exports import write_npy as write_npy
from jaxrec.data.criteo.exports import write_records as write_records
from jaxrec.data.criteo.log import CriteoFile as CriteoFile
from jaxrec.data.encoder import TableEncoder as TableEncoder
from jaxrec.data.event_tables import write_events as write_events
from jaxrec.data.files import DataError as DataError
from jaxrec.data.formats.conversion import table_files as table_files
from jaxrec.data.generated import GeneratedLog as GeneratedLog
from jaxrec.data.generated import RandomBatches as RandomBatches
from jaxrec.data.generated_events import GeneratedEvents as GeneratedEvents
from jaxrec.data.groups import TableGroups as TableGroups
from jaxrec.data.infer import infer_schema as infer_schema
from jaxrec.data.interactions import Interactions as Interactions
from jaxrec.data.learn import EncoderLearner as EncoderLearner
from jaxrec.data.learn import learn_encoder as learn_encoder
from jaxrec.data.movielens import movielens_movies as movielens_movies
from jaxrec.data.movielens import movielens_ratings as movielens_ratings
from jaxrec.data.movielens import movielens_users as movielens_users
from jaxrec.data.multi_hot import MultiHot as MultiHot
from jaxrec.data.padding import WeightedBatch as WeightedBatch
from jaxrec.data.padding import empty_batch as empty_batch
from jaxrec.data.padding import pad_batch as pad_batch
from jaxrec.data.parquet import ParquetGroups as ParquetGroups
from jaxrec.data.pipeline import Pipeline as Pipeline
from jaxrec.data.ray import ray_batches as ray_batches
from jaxrec.data.schema import CategoricalColumn as CategoricalColumn
from jaxrec.data.schema import DenseColumn as DenseColumn
from jaxrec.data.schema import LabelColumn as LabelColumn
from jaxrec.data.schema import Schema as Schema
from jaxrec.data.schema import SchemaError as SchemaError
from jaxrec.data.schema import read_schema as read_schema
from jaxrec.data.sequences.batches import SequenceBatches as SequenceBatches
from jaxrec.data.sequences.batches import time_range as time_range
from jaxrec.data.sequences.event_groups import EventGroups as EventGroups
from jaxrec.data.sequences.events import Action as Action
from jaxrec.data.sequences.events import EventSchema as EventSchema
from jaxrec.data.sequences.events import Where as Where
from jaxrec.data.sequences.events import movielens_schema as movielens_schema
from jaxrec.data.sequences.events import yambda_schema as yambda_schema
from jaxrec.data.sequences.histories import group_events as group_events
from jaxrec.data.sequences.histories import write_histories as write_histories
from jaxrec.data.sequences.packing import BatchShape as BatchShape
from jaxrec.data.sequences.request_groups import RequestGroups as RequestGroups
from jaxrec.data.sequences.requests import RequestLimits as RequestLimits
from jaxrec.data.sequences.requests import SequenceCounts as SequenceCounts
from jaxrec.data.sequences.requests import TimeWindow as TimeWindow
from jaxrec.data.sequences.schema import SequenceSchema as SequenceSchema
from jaxrec.data.shuffled import BatchSource as BatchSource
from jaxrec.data.shuffled import Shard as Shard
from jaxrec.data.statistics import ListLengths as ListLengths
from jaxrec.data.statistics import usual_capacity as usual_capacity
from jaxrec.data.streams.batches import StreamBatches as StreamBatches
from jaxrec.data.streams.folder import FolderSource as FolderSource
from jaxrec.data.streams.kafka import KafkaSource as KafkaSource
from jaxrec.data.vocabulary import ValueCounts as ValueCounts
from jaxrec.data.vocabulary import Vocabulary as Vocabulary

__all__ = _public_names(globals())

__getattr__ = _moved_names(__name__, {"Packer": "jaxrec.Packer"})


def __dir__() -> list[str]:
    return __all__
