"""The storage model beside TorchRec's, of every sharding option that both have.

What differs and why is in docs/planner.md ("Differences to TorchRec").
"""

from __future__ import annotations

import numpy as np
import pytest

import jaxrec
from jaxrec import optim
from jaxrec.plan import ParameterConstraints, Topology
from jaxrec.plan.model_tables import read_model
from jaxrec.plan.options import enumerate_options
from jaxrec.plan.workload import measure_workloads
from tests import golden

pytestmark = pytest.mark.every_case

_DTYPES = {"fp32": "float32", "fp16": "float16"}
_TYPES = ("data_parallel", "table_wise", "row_wise", "column_wise")
_PER_HOST = ("table_row_wise", "table_column_wise")


def works_of(meta):
    """The case's tables as the planner sees them, with the devices and constraints."""
    kind = jaxrec.EmbeddingBagConfig if meta["kind"] == "ebc" else jaxrec.EmbeddingConfig
    tables = [
        kind(
            table["name"],
            table["rows"],
            table["dim"],
            feature_names=tuple(table["features"]),
            dtype=_DTYPES[table["dtype"]],
            optimizer=optim.rowwise_adagrad() if meta["fused_params"] else optim.sgd(0.1),
        )
        for table in meta["tables"]
    ]
    constraints = {
        table["name"]: ParameterConstraints(
            # A cache has the rows of the batches under way, and these batches are small.
            pooling_factors=1,
            is_weighted=meta["is_weighted"],
            min_column_width=16,
            cache_ratio=0.2,
            sharding_types=(*_TYPES, *_PER_HOST),
        )
        for table in meta["tables"]
    }
    devices = meta["world_size"]
    topology = Topology.named("h100", devices=devices, devices_per_host=devices)
    works = measure_workloads(
        read_model(tables),
        batch_size=devices,
        num_devices=devices,
        constraints=constraints,
        statistics=None,
    )
    return works, topology, constraints


def their_inputs_and_outputs(meta, table, sharding_type, columns):
    """TorchRec's bytes of ids and embeddings of one shard, as its sources have them."""
    world, batch = meta["world_size"], meta["batch_size"]
    features = len(table["features"])
    ids = table["pooling_factor"] * features * batch
    bags = features * batch
    itemsize = 4 if table["dtype"] == "fp32" else 2
    devices = 1 if sharding_type == "data_parallel" else world
    if sharding_type in ("row_wise", "table_row_wise"):
        ids /= world
    if meta["kind"] == "ec":
        bags = ids
    return ids * devices * 8 + bags * devices * columns * itemsize


@pytest.mark.parametrize(("name", "case"), golden.cases("planner"), ids=golden.names("planner"))
def test_rows_of_every_shard(name, case):
    arrays, meta = golden.load("planner", name), case["meta"]
    works, topology, constraints = works_of(meta)
    compared = 0
    for index, work in enumerate(works):
        table = meta["tables"][index]
        mine = {
            (o.sharding_type, o.group.width, o.storage): o
            for o in enumerate_options(
                work, topology, constraints[work.name], storages=("device", "host")
            )
        }
        for shard in np.flatnonzero(arrays["table"] == index):
            kind, kernel = str(arrays["sharding_type"][shard]), str(arrays["compute_kernel"][shard])
            columns = int(arrays["shard_size"][shard][1])
            bytes_of_row = work.table.row_format.row_bytes(columns)
            # Where they cut columns into one part, that is a table by itself.
            whole = columns == work.dim and "column" in kind
            storage = {"dense": "device", "fused": "device", "fused_uvm_caching": "host"}.get(
                kernel
            )
            option = mine.get(("table_wise" if whole else kind, columns, storage))
            if option is None:
                assert kernel == "fused_uvm" or kind in _PER_HOST
                continue
            theirs = float(arrays["storage_hbm"][shard])
            theirs -= their_inputs_and_outputs(meta, table, kind, columns)
            part = int(arrays["shard_index"][shard]) % len(option.load.held)
            rows = float(option.load.held[part]) * bytes_of_row
            if storage == "host":
                # Their cache keeps books: 4 bytes for each row, and 16 for each that it holds.
                theirs -= int(arrays["shard_size"][shard][0]) * (4 + 16 * 0.2)
            # Within one row: of rows that do not divide, who has one more is no matter.
            assert rows == pytest.approx(theirs, rel=0.05, abs=bytes_of_row + 1)
            compared += 1
    assert compared > len(works)
