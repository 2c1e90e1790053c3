"""Tables over many devices: placements, shards, and exchanges of ids and rows."""

from jaxrec._public import moved_names as _moved_names
from jaxrec._public import public_names as _public_names
from jaxrec.mesh.batch import shard_batch as shard_batch
from jaxrec.mesh.batch_counts import even_batches as even_batches
from jaxrec.mesh.creation import shard_tables as shard_tables
from jaxrec.mesh.dense import MIN_SHARDED_SIZE as MIN_SHARDED_SIZE
from jaxrec.mesh.exchange import Exchange as Exchange
from jaxrec.mesh.placement import Placement as Placement
from jaxrec.mesh.precision import ExchangePrecision as ExchangePrecision
from jaxrec.mesh.processes import join_processes as join_processes
from jaxrec.mesh.replicas import average_replicas as average_replicas
from jaxrec.mesh.replicas import synchronize_replicas as synchronize_replicas
from jaxrec.mesh.sharding import shard as shard
from jaxrec.mesh.sharding_types import column_wise as column_wise
from jaxrec.mesh.sharding_types import data_parallel as data_parallel
from jaxrec.mesh.sharding_types import grid as grid
from jaxrec.mesh.sharding_types import row_wise as row_wise
from jaxrec.mesh.sharding_types import table_column_wise as table_column_wise
from jaxrec.mesh.sharding_types import table_row_wise as table_row_wise
from jaxrec.mesh.sharding_types import table_wise as table_wise
from jaxrec.mesh.tables import ShardedTables as ShardedTables

__all__ = _public_names(globals())

__getattr__ = _moved_names(__name__, {"Precision": "jaxrec.mesh.ExchangePrecision"})


def __dir__() -> list[str]:
    return __all__
