"""The plot of a plan: memory and time of each device, in bars by table."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxrec.plan.estimate import DeviceEstimate, Estimate, TableEstimate

# Number of tables with a bar of their own; smaller ones are drawn together.
_MAX_TABLES = 12

# Colour and pattern of a table, the same in both panels; greys are for everything else.
_Look = tuple[str, str | None]
_COLORS = tuple(f"tab:{name}" for name in (
    "blue", "orange", "green", "red", "purple", "brown", "pink", "olive", "cyan",
))  # fmt: skip


def require_matplotlib() -> Any:
    """Return matplotlib's class of figures, or raise an error that says how to install it."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "drawing a plan needs matplotlib: pip install 'jaxrec[plot]'", name="matplotlib"
        ) from error
    return Figure


def draw(estimate: Estimate, path: str | os.PathLike) -> None:
    """Write the picture; see `ShardingPlan.plot`."""
    figure_class = require_matplotlib()
    devices = len(estimate.devices)
    figure = figure_class(figsize=(min(24, max(8, 4 + 0.3 * devices)), 8), layout="constrained")
    memory, time = figure.subplots(2, 1, sharex=True)
    looks = _looks(estimate)
    _stack(
        memory,
        estimate,
        looks,
        weight=lambda table: table.bytes,
        of_table=lambda table: table.device_bytes,
        scale=1e9,
        others=[
            ("padding", ("0.85", ".."), lambda device: device.bytes["padding"]),
            ("lookups, batches, dense", ("0.7", None), _working_bytes),
            ("reserve", ("0.95", "//"), lambda device: device.bytes["reserve"]),
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
        looks,
        weight=lambda table: sum(table.seconds.values()),
        of_table=lambda table: table.device_seconds,
        scale=1e-3,
        others=[
            (
                "launches, empty positions",
                ("0.85", ".."),
                lambda device: _unassigned(estimate, device),
            )
        ],
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


def _looks(estimate: Estimate) -> dict[str, _Look]:
    """Return the look of each table, by its rank in size."""
    ordered = sorted(estimate.tables, key=lambda table: table.bytes, reverse=True)
    patterns = (None, "xx", "++", "oo")
    return {
        table.name: (
            _COLORS[index % len(_COLORS)],
            patterns[index // len(_COLORS) % len(patterns)],
        )
        for index, table in enumerate(ordered)
    }


def _stack(
    axes: Any,
    estimate: Estimate,
    looks: Mapping[str, _Look],
    *,
    weight: Callable[[TableEstimate], float],
    of_table: Callable[[TableEstimate], Sequence[float]],
    scale: float,
    others: Sequence[tuple[str, _Look, Callable[[DeviceEstimate], float]]],
) -> None:
    """Draw bars of all devices: tables, the largest first, and others on top."""
    count = len(estimate.devices)
    ordered = sorted(estimate.tables, key=weight, reverse=True)
    layers: list[tuple[str, _Look, np.ndarray]] = []
    rest = np.zeros(count)
    for index, table in enumerate(ordered):
        values = np.zeros(count)
        values[list(table.devices)] = of_table(table)
        if index < _MAX_TABLES:
            layers.append((table.name, looks[table.name], values))
        else:
            rest += values
    if len(ordered) > _MAX_TABLES:
        layers.append((f"{len(ordered) - _MAX_TABLES} more tables", ("0.4", None), rest))
    for name, look, value_of in others:
        layers.append((name, look, np.array([value_of(d) for d in estimate.devices])))
    bottom = np.zeros(count)
    for name, (color, pattern), values in layers:
        axes.bar(
            range(count),
            values / scale,
            bottom=bottom / scale,
            width=0.85,
            label=name,
            color=color,
            hatch=pattern,
        )
        bottom += values


def _working_bytes(device: DeviceEstimate) -> float:
    return sum(device.bytes[kind] for kind in ("embeddings", "exchange", "batches", "dense"))


def _unassigned(estimate: Estimate, device: DeviceEstimate) -> float:
    """Return a device's seconds of no single table: launches and empty positions."""
    own = 0.0
    for table in estimate.tables:
        if device.device in table.devices:
            own += table.device_seconds[table.devices.index(device.device)]
    return max(0.0, sum(device.seconds.values()) - own)
