"""A dry run: the plans of one model for several clusters, in one table."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from jaxrec.plan.model_tables import Model
from jaxrec.plan.plan import ShardingPlan
from jaxrec.plan.planner import Planner
from jaxrec.plan.quantities import PHASES
from jaxrec.plan.report import format_bytes, format_seconds, render_table, short_phase
from jaxrec.plan.topology import Topology

_MACHINES = re.compile(r"(?:(?P<hosts>[0-9]+)x)?(?P<devices>[0-9]+)x(?P<machine>[a-z].*)", re.I)


@dataclasses.dataclass(frozen=True)
class Trial:
    """A cluster and the plan for it, or the reason why there is none.

    Attributes:
        machines: The cluster as it was named, such as "2x8xh200".
        topology: The cluster.
        batch_size: Samples of all devices in a step.
        plan: The plan; None: no plan fits, or none can be made.
        reason: Why there is no plan, in sentences; empty if there is one.
        price: Price of one device for an hour; None: unknown.
    """

    machines: str
    topology: Topology
    batch_size: int
    plan: ShardingPlan | None
    reason: str = ""
    price: float | None = None

    @property
    def cost(self) -> float | None:
        """Price of the work on tables for 10^9 samples; None: unknown."""
        if self.plan is None or self.plan.estimate is None or self.price is None:
            return None
        hours = self.plan.estimate.seconds / 3600
        return self.price * self.topology.num_devices * hours * 1e9 / self.batch_size


def parse_machines(text: str) -> Topology:
    """Parse a cluster's name: "8xh200" is eight devices, "2x8xh200" two hosts of eight.

    Raises:
        ValueError: If the text has another form, names no known machine, or the devices do not fill
            whole hosts.

    Example:
        >>> both = parse_machines("2x4xh200"), parse_machines("16xh100")
        >>> [(each.name, each.hosts, each.devices_per_host) for each in both]
        [('h200', 2, 4), ('h100', 2, 8)]
    """
    match = _MACHINES.fullmatch(text)
    if match is None:
        raise ValueError(
            f"machines are DEVICESxMACHINE or HOSTSxDEVICESxMACHINE, such as 8xh100 or 2x8xh200, "
            f"got {text!r}"
        )
    devices, machine = int(match["devices"]), match["machine"]
    if match["hosts"] is None:
        return Topology.named(machine, devices=devices)
    hosts = int(match["hosts"])
    return Topology.named(machine, devices=hosts * devices, devices_per_host=devices or 1)


def dry_run(
    planner: Planner,
    model: Model,
    machines: Sequence[str],
    *,
    batch_size: int,
    prices: Mapping[str, float] | None = None,
) -> Iterator[Trial]:
    """Plan a model for several clusters, one after the other.

    Args:
        planner: A planner with all settings; its topology does not count.
        model: As for `Planner.plan`.
        machines: The clusters, as for `parse_machines`.
        batch_size: Samples of all devices in a step, on every cluster.
        prices: Price of one device for an hour, by machine, in any currency.

    Raises:
        ValueError: If one of ``machines`` is not a known cluster.

    Example:
        >>> import jaxrec
        >>> table = jaxrec.EmbeddingBagConfig("user", 10**9, 64)
        >>> planner = Planner(Topology.named("h100", devices=1))
        >>> trials = dry_run(planner, [table], ["2xh100", "8xh100"], batch_size=4096)
        >>> [(trial.machines, trial.plan is not None) for trial in trials]
        [('2xh100', False), ('8xh100', True)]
    """
    topologies = [(text, parse_machines(text)) for text in machines]
    for text, topology in topologies:
        price = (prices or {}).get(topology.name)
        plan, reason = None, ""
        try:
            plan = dataclasses.replace(planner, topology=topology).plan(
                model, batch_size=batch_size
            )
        except ValueError as error:  # `PlanError`, or a constraint that this cluster cannot meet
            reason = str(error)
        yield Trial(text, topology, batch_size, plan, reason, price)


def render_trials(trials: Iterable[Trial]) -> str:
    """Return the table of a dry run, and below it why some clusters have no plan."""
    trials = tuple(trials)
    estimates = [trial.plan.estimate for trial in trials if trial.plan and trial.plan.estimate]
    # A phase without work on any cluster, such as that of caches, has no column.
    phases = [phase for phase in PHASES if any(each.phases[phase] for each in estimates)]
    costs = [trial.cost for trial in trials if trial.cost is not None]
    is_stashed = any(trial.plan is not None and trial.plan.stash for trial in trials)
    rows = []
    for trial in trials:
        row = {"machines": trial.machines, "fits": "no" if trial.plan is None else "yes"}
        cells = dict.fromkeys(["step", *map(short_phase, phases), "memory", "of", "gap"], "-")
        if trial.plan is not None and trial.plan.estimate is not None:
            estimate = trial.plan.estimate
            memory = max(sum(device.bytes.values()) for device in estimate.devices)
            shares = {
                short_phase(phase): f"{estimate.phases[phase] / sum(estimate.phases.values()):.0%}"
                for phase in phases
            }
            cells = {
                "step": format_seconds(estimate.seconds),
                **shares,
                "memory": format_bytes(memory),
                "of": format_bytes(estimate.capacity),
                "gap": f"{estimate.gap:.1%}" if math.isfinite(estimate.gap) else "-",
            }
        row |= cells
        if is_stashed:
            row["stash"] = "-" if trial.plan is None else trial.plan.stash or "none"
        if costs:
            row["cost"] = "-" if trial.cost is None else f"{trial.cost:.4g}"
        rows.append(row)
    lines = [render_table("Dry run", rows, len(rows)), "", _LEGEND]
    if costs:
        lines.append("Cost: the price of the devices during that work, for 10^9 samples.")
    lines += [f"{trial.machines}: {trial.reason}" for trial in trials if trial.reason]
    return "\n".join(lines)


_LEGEND = (
    "Step: the work on tables, without the model's other layers; then the share of each of its "
    "phases.\nMemory: on the fullest device. Gap: to the fastest plan that may exist, at most."
)
