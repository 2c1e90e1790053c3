"""The planner's plans beside those of TorchRec's planner, under jaxrec's cost model.

Usage: python -m benchmarks.plan_versus_torchrec --peer-python PATH [--models 60]
                                                 [--devices 2 8 16] [--output FILE.json]
PATH is the Python of an environment with torch, torchrec and fbgemm-gpu-cpu. Both planners get the
same tables, devices, memory and bandwidths, and keep tables on devices. Of TorchRec's plan, each
table takes the exchange that makes the plan fastest.
Prints one JSON line per model and number of devices, and one that sums up.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tyro

import jaxrec
from jaxrec.mesh import sharding_types as placements
from jaxrec.mesh.placement import Placement
from jaxrec.plan import ParameterConstraints, PlanError, Planner, ShardingPlan, Topology

_HERE = pathlib.Path(__file__).parent
_GB = 10**9

SIX_TABLES = (
    # Rows, columns, ids a sample.
    *((5_000_000, 64, 1), (20_000_000, 128, 30), (300_000, 64, 5)),
    *((50_000, 32, 60), (8_000, 64, 1), (24, 16, 1)),
)
# MLPerf's DLRM-DCNv2.
CRITEO_ROWS = (
    *(40000000, 39060, 17295, 7424, 20265, 3, 7122, 1543, 63, 40000000, 3067956, 405282, 10),
    *(2209, 11938, 155, 4, 976, 14, 40000000, 40000000, 40000000, 590152, 12973, 108, 36),
)
CRITEO_POOLING = (
    *(3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1),
)
# TorchRec's planner counts no optimizer state here, so there is none; and any table may be cut.
SGD = jaxrec.optim.sgd(0.1)
# Figures from NVIDIA's data sheets; see jaxrec.plan.machines.
BANDWIDTHS = {
    "h100": {"memory": 3.35e12, "link": 450e9, "network": 50e9},
    "h200": {"memory": 4.8e12, "link": 450e9, "network": 50e9},
}


@dataclasses.dataclass(frozen=True)
class Options:
    """What to compare.

    Attributes:
        peer_python: Python of TorchRec's environment.
        models: Random models, beside the six tables and Criteo's.
        devices: Numbers of devices.
        time_limit: Seconds that a search may take.
        output: File for all figures.
    """

    peer_python: pathlib.Path
    models: int = 60
    devices: tuple[int, ...] = (2, 8, 16)
    time_limit: float = 30.0
    output: pathlib.Path | None = None


def main(options: Options) -> None:
    cases = draw_cases(options)
    lines = "".join(json.dumps(case) + "\n" for case in cases)
    command = [str(options.peer_python), str(_HERE / "peer_plan.py")]
    answered = subprocess.run(
        command, input=lines, stdout=subprocess.PIPE, text=True, check=True
    ).stdout
    found = []
    for case, answer in zip(cases, map(json.loads, answered.splitlines()), strict=True):
        found.append(compare(case, answer, options.time_limit))
        print(json.dumps(found[-1]), flush=True)
    summary = summarize(found)
    print(json.dumps(summary))
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        figures = {"summary": summary, "cases": found}
        options.output.write_text(json.dumps(figures, indent=1) + "\n")


def draw_cases(options: Options) -> list[dict[str, Any]]:
    """All models on all numbers of devices."""
    criteo = tuple(zip(CRITEO_ROWS, [128] * 26, CRITEO_POOLING, strict=True))
    shapes = {"six tables": tuple(SIX_TABLES), "criteo": criteo}
    cases = [
        case(name, tables, devices, "h200", 141 * _GB, 65536)
        for name, tables in shapes.items()
        for devices in options.devices
    ]
    for seed in range(options.models):
        random = np.random.default_rng(seed)
        tables = tuple(
            (
                int(10 ** random.uniform(0.5, 7)),
                int(2 ** random.integers(3, 9)),
                float(np.round(10 ** random.uniform(0, 2), 1)),
            )
            for _ in range(random.integers(2, 13))
        )
        batch = int(2 ** random.integers(8, 13))
        # Devices from tight to roomy, with 2 GB for what lookups need.
        spare = random.uniform(1.5, 6)
        total = sum(rows * dim * 4 for rows, dim, _ in tables)
        for devices in options.devices:
            memory = int(2 * _GB + spare * total / devices)
            cases.append(case(f"random {seed}", tables, devices, "h100", memory, batch * devices))
    return cases


def case(
    name: str,
    tables: Sequence[tuple[int, int, float]],
    devices: int,
    machine: str,
    memory: int,
    batch_size: int,
) -> dict[str, Any]:
    bandwidths = {f"{link}_bandwidth": value for link, value in BANDWIDTHS[machine].items()}
    return {
        "name": f"{name}, {devices} devices",
        "devices": devices,
        "devices_per_host": min(devices, 8),
        "machine": {"name": machine, "memory": memory, **bandwidths},
        "batch_size": batch_size,
        "tables": [
            {
                "name": f"t{i}",
                "rows": rows,
                "dim": dim,
                "dtype": "float32",
                "pooling_factor": float(pooling),
            }
            for i, (rows, dim, pooling) in enumerate(tables)
        ],
    }


def compare(case: Mapping[str, Any], answer: Mapping[str, Any], limit: float) -> dict[str, Any]:
    """Both plans of a case, by the same cost model."""
    machine = case["machine"]
    topology = dataclasses.replace(
        Topology.named(
            machine["name"], devices=case["devices"], devices_per_host=case["devices_per_host"]
        ),
        memory=machine["memory"],
    )
    tables = [
        jaxrec.EmbeddingBagConfig(t["name"], t["rows"], t["dim"], dtype=t["dtype"], optimizer=SGD)
        for t in case["tables"]
    ]
    constraints = {
        t["name"]: ParameterConstraints(pooling_factors=t["pooling_factor"]) for t in case["tables"]
    }
    planner = Planner(topology, constraints, time_limit=limit)
    line: dict[str, Any] = {"case": case["name"], "tables": len(tables)}
    try:
        plan = planner.plan(tables, batch_size=case["batch_size"])
    except PlanError as error:
        line["error"] = str(error).split("\n")[0]
    else:
        found = plan.estimate
        assert found is not None
        line |= {
            "ms": found.seconds * 1e3,
            "bound_ms": found.bound * 1e3,
            "gap": found.gap,
            "is_cut_short": "cut short" in found.search,
            "fits": _fits(plan),
            "seconds": found.search_seconds,
        }
    if "plan" in answer:
        theirs = fastest_exchanges(planner, tables, answer["plan"], case)
        assert theirs.estimate is not None
        line |= {
            "torchrec_ms": theirs.estimate.seconds * 1e3,
            "torchrec_fits": _fits(theirs),
            "torchrec_seconds": answer["seconds"],
        }
    else:
        line["torchrec_error"] = answer["error"]
    return line


def fastest_exchanges(
    planner: Planner,
    tables: Sequence[Any],
    plan: Mapping[str, tuple[str, Sequence[int]]],
    case: Mapping[str, Any],
) -> ShardingPlan:
    """TorchRec's plan with the exchanges that make it fastest, table by table until none helps."""
    rows = {table["name"]: table["rows"] for table in case["tables"]}
    each = case["devices_per_host"]
    chosen = {n: to_placement(kind, ranks, rows[n], each) for n, (kind, ranks) in plan.items()}

    def evaluate(placements: Mapping[str, Placement]) -> ShardingPlan:
        made = ShardingPlan.from_dict(placements)
        return planner.evaluate(tables, made, batch_size=case["batch_size"])

    def seconds(plan: ShardingPlan) -> float:
        assert plan.estimate is not None
        return plan.estimate.seconds

    def with_exchange(names: Sequence[str], exchange: str) -> dict[str, Placement]:
        return chosen | {n: dataclasses.replace(chosen[n], exchange=exchange) for n in names}

    names = [name for name, placement in chosen.items() if not placement.is_replicated]
    starts = [with_exchange(names, "rows"), with_exchange(names, "pooled")]
    chosen = min(starts, key=lambda start: seconds(evaluate(start)))
    best = evaluate(chosen)
    helped = True
    while helped:
        helped = False
        for name in names:
            (other,) = {"rows", "pooled"} - {chosen[name].exchange}
            tried = with_exchange([name], other)
            made = evaluate(tried)
            if seconds(made) < seconds(best):
                chosen, best, helped = tried, made, True
    return best


def to_placement(
    sharding_type: str, ranks: Sequence[int], rows: int, devices_per_host: int
) -> Placement:
    """TorchRec's placement of a table as jaxrec's."""
    host = ranks[0] // devices_per_host
    if sharding_type.endswith("row_wise") and rows < len(ranks):
        return placements.row_wise(ranks[:rows])  # the other ranks have none of its rows
    match sharding_type:
        case "data_parallel":
            return placements.data_parallel()
        case "table_wise":
            return placements.table_wise(ranks[0])
        case "row_wise":
            return placements.row_wise(ranks)
        case "column_wise" | "table_column_wise":
            return placements.column_wise(ranks)
        case "table_row_wise":
            return placements.table_row_wise(host)
    raise ValueError(f"TorchRec planned a table {sharding_type}")


def _fits(plan: ShardingPlan) -> bool:
    assert plan.estimate is not None
    most = max(sum(device.bytes.values()) for device in plan.estimate.devices)
    return most <= plan.estimate.capacity * (1 + 1e-9)


def summarize(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """How often ours is better, and how close to the bound it is."""
    planned = [line for line in lines if "ms" in line]
    both = [line for line in planned if "torchrec_ms" in line]
    ratios = [line["ms"] / line["torchrec_ms"] for line in both if line["torchrec_fits"]]
    every = [line["ms"] / line["torchrec_ms"] for line in both]
    gaps = [line["gap"] for line in planned if not line["is_cut_short"]]
    return {
        "cases": len(lines),
        "planned": len(planned),
        "all_fit": all(line["fits"] for line in planned),
        "torchrec_planned": sum("torchrec_ms" in line for line in lines),
        "torchrec_fit": sum(line.get("torchrec_fits", False) for line in lines),
        "not_planned_though_torchrec_fits": sum(
            "ms" not in line and line.get("torchrec_fits", False) for line in lines
        ),
        "above_torchrec": sum(ratio > 1 + 1e-9 for ratio in ratios),
        "above_torchrec_that_does_not_fit": sum(r > 1 + 1e-9 for r in every)
        - sum(r > 1 + 1e-9 for r in ratios),
        "ratio_to_torchrec": [round(float(q), 3) for q in np.quantile(every, (0, 0.5, 1))],
        "finished": len(gaps),
        "largest_gap_of_finished": round(max(gaps, default=0.0), 5),
        "largest_gap": round(max((line["gap"] for line in planned), default=0.0), 5),
        "seconds": [
            round(float(q), 2) for q in np.quantile([p["seconds"] for p in planned], (0.5, 1))
        ],
    }


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
