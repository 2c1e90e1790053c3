"""A plan as a picture: devices by memory and by time, in bars by table."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxrec.plan.estimate import DeviceEstimate, Estimate, TableEstimate

# Tables beyond the largest are drawn together.
_MOST_TABLES = 12


def draw(estimate: Estimate, path: str | os.PathLike) -> None:
    """Writes the picture; see `ShardingPlan.plot`."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "drawing a plan needs matplotlib: pip install 'jaxrec[plot]'", name="matplotlib"
        ) from error
    devices = len(estimate.devices)
    figure = Figure(figsize=(min(24, max(8, 4 + 0.3 * devices)), 8), layout="constrained")
    memory, time = figure.subplots(2, 1, sharex=True)
    _stack(
        memory,
        estimate,
        weight=lambda table: table.bytes,
        of_table=lambda table: table.device_bytes,
        scale=1e9,
        others=[
            ("padding", "0.8", lambda device: device.bytes["padding"]),
            ("lookups, batches, dense", "0.6", _working_bytes),
            ("reserve", "0.9", lambda device: device.bytes["reserve"]),
        ],
    )
    memory.axhline(estimate.capacity / 1e9, color="tab:red", linestyle="--", label="device memory")
    memory.set_ylabel("memory (GB)")
    memory.set_title(
        f"{estimate.seconds * 1e3:.3g} ms a step for tables; "
        f"no plan takes less than {estimate.bound * 1e3:.3g} ms"
    )
    _stack(
        time,
        estimate,
        weight=lambda table: sum(table.seconds.values()),
        of_table=lambda table: table.device_seconds,
        scale=1e-3,
        others=[("room, launches", "0.8", lambda device: _unassigned(estimate, device))],
    )
    time.axhline(estimate.seconds * 1e3, color="tab:red", linestyle="--", label="the step")
    time.set_ylabel("time (ms)")
    time.set_xlabel("device")
    if devices <= 64:
        time.set_xticks(range(devices))
    for axes in (memory, time):
        axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1.01, 0.5))
        axes.margins(x=0.01)
    figure.savefig(path, dpi=120)


def _stack(
    axes: Any,
    estimate: Estimate,
    *,
    weight: Callable[[TableEstimate], float],
    of_table: Callable[[TableEstimate], Sequence[float]],
    scale: float,
    others: Sequence[tuple[str, str, Callable[[DeviceEstimate], float]]],
) -> None:
    """Bars of all devices: tables, the largest first, and others on top."""
    count = len(estimate.devices)
    ordered = sorted(estimate.tables, key=weight, reverse=True)
    layers: list[tuple[str, str, np.ndarray]] = []
    rest = np.zeros(count)
    for index, table in enumerate(ordered):
        values = np.zeros(count)
        values[list(table.devices)] = of_table(table)
        if index < _MOST_TABLES:
            layers.append((table.name, f"C{index % 10}", values))
        else:
            rest += values
    if len(ordered) > _MOST_TABLES:
        layers.append((f"{len(ordered) - _MOST_TABLES} more tables", "tab:gray", rest))
    for name, color, value_of in others:
        layers.append((name, color, np.array([value_of(d) for d in estimate.devices])))
    bottom = np.zeros(count)
    for index, (name, color, values) in enumerate(layers):
        hatch = "//" if 10 <= index < min(_MOST_TABLES, len(ordered)) else None
        axes.bar(
            range(count),
            values / scale,
            bottom=bottom / scale,
            width=0.85,
            label=name,
            color=color,
            hatch=hatch,
        )
        bottom += values


def _working_bytes(device: DeviceEstimate) -> float:
    return sum(device.bytes[kind] for kind in ("embeddings", "exchange", "batches", "dense"))


def _unassigned(estimate: Estimate, device: DeviceEstimate) -> float:
    """A device's seconds that are no table's own: starting kernels, and room that nobody uses."""
    own = 0.0
    for table in estimate.tables:
        if device.device in table.devices:
            own += table.device_seconds[table.devices.index(device.device)]
    return max(0.0, sum(device.seconds.values()) - own)
