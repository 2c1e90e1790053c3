"""Plans tables with TorchRec's EmbeddingShardingPlanner, for `benchmarks.plan_versus_torchrec`.

Needs an environment with torch, torchrec and fbgemm-gpu-cpu.

Usage: PEER_PYTHON benchmarks/peer_plan.py < CASES.jsonl
A line of the input is a case as `benchmarks.plan_versus_torchrec` writes it; a line of the output
is ``{"name": ..., "plan": {table: [sharding type, ranks]}, "seconds": ...}``, or has an ``error``
in place of the plan.
"""

import json
import logging
import sys
import time

logging.disable(logging.WARNING)

import torch  # noqa: E402
from torchrec.distributed.embedding_types import EmbeddingComputeKernel  # noqa: E402
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder  # noqa: E402
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology  # noqa: E402
from torchrec.distributed.planner.storage_reservations import (  # noqa: E402
    FixedPercentageStorageReservation,
)
from torchrec.distributed.planner.types import ParameterConstraints, PlannerError  # noqa: E402
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig  # noqa: E402
from torchrec.modules.embedding_modules import EmbeddingBagCollection  # noqa: E402

TYPES = {"float32": DataType.FP32, "float16": DataType.FP16, "bfloat16": DataType.BF16}
KERNELS = [EmbeddingComputeKernel.FUSED.value, EmbeddingComputeKernel.DENSE.value]


def main() -> None:
    for line in sys.stdin:
        case = json.loads(line)
        start = time.perf_counter()
        try:
            found = {"plan": plan(case)}
        except PlannerError as error:
            found = {"error": str(error).strip().split("\n")[0]}
        seconds = time.perf_counter() - start
        print(json.dumps({"name": case["name"], **found, "seconds": seconds}), flush=True)


def plan(case: dict) -> dict:
    """The sharding type and the ranks of each table."""
    machine = case["machine"]
    # TorchRec counts bandwidth in bytes a millisecond.
    topology = Topology(
        world_size=case["devices"],
        local_world_size=case["devices_per_host"],
        compute_device="cuda",
        hbm_cap=machine["memory"],
        hbm_mem_bw=machine["memory_bandwidth"] / 1e3,
        intra_host_bw=machine["link_bandwidth"] / 1e3,
        inter_host_bw=machine["network_bandwidth"] / 1e3,
    )
    tables = [
        EmbeddingBagConfig(
            name=table["name"],
            num_embeddings=table["rows"],
            embedding_dim=table["dim"],
            feature_names=[table["name"]],
            data_type=TYPES[table["dtype"]],
        )
        for table in case["tables"]
    ]
    constraints = {
        table["name"]: ParameterConstraints(
            pooling_factors=[table["pooling_factor"]], compute_kernels=KERNELS
        )
        for table in case["tables"]
    }
    planner = EmbeddingShardingPlanner(
        topology=topology,
        batch_size=case["batch_size"] // case["devices"],
        constraints=constraints,
        # As jaxrec's planner reserves.
        storage_reservation=FixedPercentageStorageReservation(0.15),
        debug=False,
    )
    module = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
    found = planner.plan(module, [EmbeddingBagCollectionSharder()])
    (of_module,) = found.plan.values()
    return {name: [said.sharding_type, list(said.ranks)] for name, said in of_module.items()}


if __name__ == "__main__":
    main()
