"""Compares the planner's predictions with the programs that XLA makes for TPUs, without one.

    python -m benchmarks.tpu.estimates [--chip v5e v6e v5p]

For training steps of tables on one chip and on eight, prints bytes and microseconds:

* the bytes that the program moves in memory: operands and results of its instructions, of which
  those that read or write rows by number count the rows that they reach;
* its least time, at the data sheet's rates of memory and links;
* the planner's time at the same rates, and the ratio of the two;
* the planner's time at its own rates;
* "bytes accessed" of XLA's cost analysis, which counts whole tables and arrays inside of fusions,
  too. No instruction reads these from memory.

Nothing is timed. The exit status is 1 if a ratio is outside of [1/2, 2]. A run without options
writes ``benchmarks/results/estimates.tpu.jax-<version>.md``. docs/tpu.md says how to set this up.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Iterator
from typing import Any, Literal

from benchmarks.tpu.compile import RESULTS, missing  # first: it sets what JAX reads at its import

from benchmarks.gpu import mesh, programs  # isort: skip
from benchmarks.gpu.roofline import instructions_of_entry, shape_bytes  # isort: skip
import jax
import tyro

import jaxrec
from benchmarks.tpu.chips import CHIPS, Chip
from benchmarks.tpu.findings import bytes_moved
from benchmarks.tpu.programs import on_one_chip, over_eight_chips, sharded_step
from jaxrec.plan import Planner, Topology
from jaxrec.plan.costs.base import all_gather, all_to_all, reduce_scatter
from jaxrec.plan.quantities import Links, Rate

HEADER = (
    "| step | chip | MB moved | µs by bytes | planner's µs at the same rates | ratio "
    "| planner's µs | XLA's MB accessed |",
    "|---|---|---|---|---|---|---|---|",
)
TABLES, ROWS, BATCH, IDS = 4, 100_000, 96, 20
_NO_WORK = re.compile(
    r"parameter|constant|get-tuple-element|bitcast|tuple|partition-id|iota|after-all|while"
    r"|conditional|.*-done|copy-start|slice-start"
)


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the comparison.

    Attributes:
        chip: Chips to compile for.
    """

    chip: tuple[Literal[tuple(CHIPS)], ...] = tuple(CHIPS)  # type: ignore[valid-type]


def main(options: Options) -> None:
    if (reason := missing()) is not None:
        sys.exit(reason)
    lines, ratios = [], []
    print(*HEADER, sep="\n")
    for name in options.chip:
        for line, ratio in estimates(CHIPS[name]):
            print(line, flush=True)
            lines.append(line)
            ratios.append(ratio)
    if options == Options():
        path = RESULTS / f"estimates.tpu.jax-{jax.__version__}.md"
        title = "# The planner's predictions beside programs compiled for TPUs"
        made = "Made by `python -m benchmarks.tpu.estimates` without a TPU. Nothing was timed."
        path.write_text("\n".join([title, "", made, "", *HEADER, *lines, ""]))
        print(path)
    sys.exit(not all(0.5 <= ratio <= 2 for ratio in ratios))


def estimates(chip: Chip) -> Iterator[tuple[str, float]]:
    """Yield the line and the ratio of each step."""
    program = on_one_chip(programs.tables_step("reference", tables=TABLES, rows=ROWS, batch=BATCH))
    configs = [
        jaxrec.EmbeddingBagConfig(
            f"t{i}",
            ROWS,
            128,
            feature_names=(f"f{i}",),
            optimizer=jaxrec.optim.rowwise_adagrad(0.01),
        )
        for i in range(TABLES)
    ]
    whole = {each.name: jaxrec.mesh.table_wise(device=0) for each in configs}
    plan = jaxrec.plan.ShardingPlan.from_dict(whole)
    yield _compare("one chip", chip, 1, program, configs, plan, BATCH)
    for exchange in ("rows", "bags"):
        step = sharded_step(exchange)
        program = over_eight_chips(step)
        batch = 8 * step.samples
        yield _compare(
            f"8 chips {exchange}", chip, 8, program, step.configs(), mesh.plan(step), batch
        )


def _compare(
    name: str, chip: Chip, count: int, program: Any, configs: Any, plan: Any, batch: int
) -> tuple[str, float]:
    machine = chip.machine(count)
    sheet = data_sheet(machine, chip)
    compiled = program.lower(chip).lowered.compile()
    moved, seconds = work_on_memory(compiled.as_text(), chip, sheet)
    ids = {each.name: jaxrec.plan.ParameterConstraints(pooling_factors=IDS) for each in configs}

    def planned(topology: Topology) -> float:
        evaluated = Planner(topology, ids).evaluate(configs, plan, batch_size=batch)
        assert evaluated.estimate is not None
        return evaluated.estimate.seconds

    same, own = planned(sheet), planned(machine)
    costs, ratio = compiled.cost_analysis() or {}, same / seconds
    line = (
        f"| {name} | {chip.name} | {moved / 1e6:.1f} | {1e6 * seconds:.0f} | {1e6 * same:.0f} "
        f"| {ratio:.2f} | {1e6 * own:.0f} | {costs.get('bytes accessed', 0) / 1e6:.0f} |"
    )
    return line, ratio


def data_sheet(topology: Topology, chip: Chip) -> Topology:
    """Return chips whose memory and links start at once and reach the data sheet's rates."""
    byte = Rate(byte=2 / chip.memory_rate)
    links = Links.of(0.0, chip.link_rate)
    sort = dataclasses.replace(topology.sort, call=0.0)
    return dataclasses.replace(
        topology, gather=byte, update=byte, copy=byte, sort=sort, within=links, between=links
    )


def work_on_memory(program: str, chip: Chip, topology: Topology) -> tuple[float, float]:
    """Return the bytes that a program's entry moves in memory, and its least seconds.

    Loops and branches of the entry, which later rounds of an exchange take, do not run. Copies
    into the chip's own memory stand for reads of the instructions after them.
    """
    moved = on_links = 0.0
    # The dense part of a sharded step is outside of every `shard_map`.
    within = "shard_map" if topology.num_devices > 1 else ""
    entry = instructions_of_entry(program)
    for each in entry.values():
        if _NO_WORK.fullmatch(each.kind) or within not in each.line:
            continue
        operands = [entry[name].shape for name in each.operands if name in entry]
        kind, sent = each.kind.removesuffix("-start"), sum(map(shape_bytes, operands))
        if kind.endswith("all-to-all"):
            on_links += all_to_all(sent, topology)
        elif kind == "reduce-scatter":
            on_links += reduce_scatter(sent, topology)
        elif kind == "all-gather":
            on_links += all_gather(sent * topology.num_devices, topology)
        elif kind == "all-reduce":  # of the dense part, which the planner leaves out
            continue
        moved += bytes_moved(each, operands)
    return moved, moved / chip.memory_rate + on_links


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
