"""A plan's memory and time under each policy for the data of lookups."""

from __future__ import annotations

import dataclasses

from jaxrec.embed.stash import STASHES
from jaxrec.plan.model_tables import Model
from jaxrec.plan.plan import ShardingPlan
from jaxrec.plan.planner import Planner
from jaxrec.plan.report import format_bytes, format_seconds, render_table


def render_stashes(planner: Planner, model: Model, plan: ShardingPlan, *, batch_size: int) -> str:
    """Return a table of a plan's memory and step under each `jaxrec.embed.stash` policy.

    Args:
        planner: The planner that made the plan.
        model: As for `Planner.plan`.
        plan: The plan. Its placements stay the same.
        batch_size: Samples of all devices in a step.
    """
    rows: list[dict[str, str]] = []
    most = 0.0
    for stash in (None, *STASHES):
        stashed = dataclasses.replace(plan, stash=stash)
        estimate = planner.evaluate(model, stashed, batch_size=batch_size).estimate
        assert estimate is not None
        memory = max(sum(device.bytes.values()) for device in estimate.devices)
        most = memory if stash is None else most
        rows.append(
            {
                "stash": stash or "none",
                "step": format_seconds(estimate.seconds),
                "memory": format_bytes(memory),
                "of": format_bytes(estimate.capacity),
                "saved": "-" if stash is None else format_bytes(most - memory),
                "fits": "yes" if memory <= estimate.capacity else "no",
                "plan": "this" if stash == plan.stash else "-",
            }
        )
    return render_table("Stashes, with the same placements", rows, len(rows))
