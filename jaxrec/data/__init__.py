"""Data sets and readers: click logs, generated ones, MovieLens, interactions, Parquet, npy."""

from jaxrec.data.batches import ClickBatch as ClickBatch
from jaxrec.data.batches import batches as batches
from jaxrec.data.clicks import ClickLog as ClickLog
from jaxrec.data.clicks import Clicks as Clicks
from jaxrec.data.criteo import CriteoFile as CriteoFile
from jaxrec.data.generated import GeneratedLog as GeneratedLog
from jaxrec.data.groups import GroupRange as GroupRange
from jaxrec.data.groups import NpyGroups as NpyGroups
from jaxrec.data.groups import ParquetGroups as ParquetGroups
from jaxrec.data.groups import RowGroups as RowGroups
from jaxrec.data.groups import to_numpy as to_numpy
from jaxrec.data.interactions import Interactions as Interactions
from jaxrec.data.movielens import movielens_movies as movielens_movies
from jaxrec.data.movielens import movielens_ratings as movielens_ratings
from jaxrec.data.movielens import movielens_users as movielens_users
from jaxrec.data.multi_hot import MultiHot as MultiHot
from jaxrec.data.packer import Packer as Packer
from jaxrec.data.packer import usual_capacity as usual_capacity
from jaxrec.data.prefetch import prefetch as prefetch
from jaxrec.data.shuffled import BatchSource as BatchSource
from jaxrec.data.shuffled import Shard as Shard
from jaxrec.data.text import DataError as DataError
from jaxrec.data.vocabulary import ValueCounts as ValueCounts
from jaxrec.data.vocabulary import Vocabulary as Vocabulary
