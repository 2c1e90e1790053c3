"""The planner at scale: a thousand tables on many devices, and a step on up to 1,024 GPUs.

    python -m benchmarks.plan_scale large [--devices 128 1024] [--tables 1000]
    python -m benchmarks.plan_scale hosts [--hosts 1 2 4 8 16 32 64 128] [--machine h100]

``large`` plans tables of 10 to 50 million rows, 32 to 256 columns and 1 to 50 ids a sample, and
prints a JSON line for each number of devices: seconds of the search and of the processor, the gap
to the bound, and the memory that the search took.

``hosts`` draws the time of a step's work on tables by part over the number of hosts, with 8 GPUs a
host and 8,192 samples a GPU, for MLPerf's 26 tables of DLRM-DCNv2 under each exchange. It writes
OUTPUT.json and OUTPUT.png. The times are those of the planner's model with published rates: nothing
is measured, and the model's dense layers are left out.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
import resource
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import numpy as np
import tyro

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jaxrec
from benchmarks.gpu.step_shapes import MLPERF_BAGS, MLPERF_ROWS
from jaxrec.plan import ParameterConstraints, Planner, Topology
from jaxrec.plan.quantities import PHASES

# Constraints of all tables, by the name of the exchange.
EXCHANGES: dict[str, dict[str, Any]] = {
    "rows": {"sharding_types": ["row_wise"], "exchanges": ["rows"]},
    "pooled": {"sharding_types": ["row_wise"], "exchanges": ["pooled"]},
    "bags": {"sharding_types": ["table_wise", "column_wise"], "exchanges": ["pooled"]},
    "pooled by host": {"sharding_types": ["table_row_wise", "grid"], "exchanges": ["pooled"]},
    "the planner's choice": {},
}


@dataclasses.dataclass(frozen=True)
class Large:
    """Plan many tables on many devices.

    Attributes:
        devices: Numbers of GPUs.
        tables: Number of tables.
        samples: Samples of each GPU in a step.
        time_limit: Seconds that a search may take.
        seed: Seed of the tables.
    """

    devices: tuple[int, ...] = (128, 1024)
    tables: int = 1000
    samples: int = 512
    time_limit: float = 120.0
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class Hosts:
    """Draw the time of a step by part over the number of hosts.

    Attributes:
        hosts: Numbers of hosts of 8 GPUs.
        machine: Kind of GPUs.
        samples: Samples of each GPU in a step.
        time_limit: Seconds that a search may take.
        output: Where figures and picture go, without their endings.
    """

    hosts: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128)
    machine: str = "h100"
    samples: int = 8192
    time_limit: float = 30.0
    output: pathlib.Path = pathlib.Path("benchmarks/results/plan_hosts")


Part = (
    Annotated[Large, tyro.conf.subcommand("large")]
    | Annotated[Hosts, tyro.conf.subcommand("hosts")]
)


def main(part: Large | Hosts) -> None:
    if isinstance(part, Large):
        for devices in part.devices:
            print(json.dumps(plan_large(part, devices)), flush=True)
        return
    lines = []
    for name in EXCHANGES:
        for hosts in part.hosts:
            lines.append(step_on(part, name, hosts))
            print(json.dumps(lines[-1]), flush=True)
    part.output.with_suffix(".json").write_text(json.dumps(lines, indent=1) + "\n")
    draw(lines, part)


def plan_large(part: Large, devices: int) -> dict[str, Any]:
    """Plan random tables; return the seconds, the gap and the memory of the search."""
    random = np.random.default_rng(part.seed)
    rows = np.round(10 ** random.uniform(1, np.log10(5e7), part.tables)).astype(int)
    dims = random.choice([32, 64, 128, 256], part.tables)
    poolings = np.round(10 ** random.uniform(0, np.log10(50), part.tables))
    tables = [
        jaxrec.EmbeddingBagConfig(f"table_{i}", int(n), int(dim))
        for i, (n, dim) in enumerate(zip(rows, dims, strict=True))
    ]
    constraints = {
        f"table_{i}": ParameterConstraints(pooling_factors=float(pooling))
        for i, pooling in enumerate(poolings)
    }
    start, worked = time.perf_counter(), time.process_time()
    planner = Planner(
        Topology.named("h100", devices=devices), constraints, time_limit=part.time_limit
    )
    estimate = planner.plan(tables, batch_size=part.samples * devices).estimate
    assert estimate is not None
    return {
        "tables": part.tables,
        "table_tb": round(sum(table.bytes for table in estimate.tables) / 1e12, 3),
        "devices": devices,
        "seconds": round(time.perf_counter() - start, 1),
        "processor_seconds": round(time.process_time() - worked, 1),
        "gap": round(estimate.gap, 5),
        "step_ms": round(estimate.seconds * 1e3, 3),
        "device_gb": round(sum(estimate.devices[0].bytes.values()) / 1e9, 1),
        "search": estimate.search,
        "memory_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, 2),
    }


def step_on(part: Hosts, exchange: str, hosts: int) -> dict[str, Any]:
    """Return the milliseconds of a step's parts on some hosts, or why there is no plan."""
    devices = 8 * hosts
    tables = [
        jaxrec.EmbeddingBagConfig(f"cat_{i}", rows, 128) for i, rows in enumerate(MLPERF_ROWS)
    ]
    constraints = {
        f"cat_{i}": ParameterConstraints(pooling_factors=pooling, **EXCHANGES[exchange])
        for i, pooling in enumerate(MLPERF_BAGS)
    }
    topology = Topology.named(part.machine, devices=devices)
    planner = Planner(topology, constraints, time_limit=part.time_limit)
    line: dict[str, Any] = {"exchange": exchange, "hosts": hosts, "devices": devices}
    try:
        estimate = planner.plan(tables, batch_size=part.samples * devices).estimate
    except ValueError as error:
        return line | {"reason": str(error).splitlines()[0]}
    assert estimate is not None
    phases = {phase: round(seconds * 1e3, 4) for phase, seconds in estimate.phases.items()}
    return line | {
        "step_ms": round(estimate.seconds * 1e3, 4),
        "phases_ms": phases,
        "gap": round(estimate.gap, 4) if math.isfinite(estimate.gap) else None,
        "device_gb": round(max(sum(d.bytes.values()) for d in estimate.devices) / 1e9, 1),
    }


def draw(lines: Sequence[Mapping[str, Any]], part: Hosts) -> None:
    """Draw a panel for each exchange: stacked parts over the number of hosts."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 4.5), layout="constrained")
    # Axes of their own: exchanges differ by a hundred times at most hosts.
    panels = figure.subplots(1, len(EXCHANGES))
    phases = [phase for phase in PHASES if phase != "prefetch"]
    for axes, exchange in zip(panels, EXCHANGES, strict=True):
        own = [line for line in lines if line["exchange"] == exchange]
        bottom = np.zeros(len(own))
        for phase in phases:
            values = np.array([line.get("phases_ms", {}).get(phase, 0.0) for line in own])
            axes.bar(range(len(own)), values, bottom=bottom, label=phase)
            bottom += values
        for place, line in enumerate(own):
            if "reason" in line:
                axes.text(place, 0, " no plan", rotation=90, ha="center", va="bottom", fontsize=8)
        axes.set_xticks(range(len(own)), [line["hosts"] for line in own])
        axes.set(title=exchange, xlabel="hosts of 8 GPUs")
    panels[0].set_ylabel("ms of work on tables in a step")
    # Beside the panels: inside of one it would hide bars.
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    figure.suptitle(
        f"The planner's model, nothing measured: DLRM-DCNv2's 26 tables, {part.samples:,} samples "
        f"a GPU, {part.machine} by its data sheet; the dense layers are left out"
    )
    figure.savefig(part.output.with_suffix(".png"), dpi=90)


if __name__ == "__main__":
    main(tyro.cli(Part, description=__doc__))
