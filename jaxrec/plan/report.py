"""The report of a plan, in tables and as a picture."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxrec.mesh.placement import SHARDING_TYPES
from jaxrec.plan.estimate import DeviceEstimate, Estimate, TableEstimate, imbalance
from jaxrec.plan.quantities import PHASES


def format_bytes(bytes: float) -> str:
    """Format bytes in decimal units: 1.50 GB."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if bytes >= scale:
            digits = ".3g" if bytes >= 100 * scale else ".2f"
            return f"{bytes / scale:{digits}} {unit}"
    return f"{bytes:.0f} bytes"


def format_seconds(seconds: float) -> str:
    """Format seconds: 1.5 ms."""
    if seconds == 0:
        return "0"
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            value = seconds / scale
            return f"{value:.3g} {unit}" if value < 1000 else f"{value:,.0f} {unit}"
    return f"{seconds * 1e6:.3g} us"


def format_numbers(numbers: Sequence[int], total: int) -> str:
    """Format numbers below ``total`` as ranges; "all" if none is missing."""
    if len(numbers) == total and total > 1:
        return "all"
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


# Number of devices and of tables that a report lists.
_MAX_DEVICES, _MAX_TABLES = 32, 100

_EXCHANGE_SUFFIXES = {"pooled": "/pooled"}
_ALWAYS_SHOWN = ("forward compute", "forward exchange", "backward compute", "backward exchange")


def render(estimate: Estimate, *, color: bool | None = None) -> str:
    """Return the report that ``print(plan)`` shows.

    ``color`` needs rich; None: on a terminal with rich.
    """
    sections = [
        _summary(estimate),
        render_table("Devices", _devices(estimate), len(estimate.devices)),
        render_table("Tables", _tables(estimate), len(estimate.tables)),
    ]
    if len(estimate.groups) > 1:
        sections.append(render_table("Groups", _groups(estimate), len(estimate.groups)))
    text = "\n\n".join(sections)
    if color is None:
        color = sys.stdout.isatty()
    return _colored(text) if color else text


def _summary(estimate: Estimate) -> str:
    memory = [sum(device.bytes.values()) for device in estimate.devices]
    busy = [sum(device.seconds.values()) for device in estimate.devices]
    tables = [device.bytes["tables"] for device in estimate.devices]
    gap = "" if estimate.gap == float("inf") else f", {estimate.gap:.2%} above it at most"
    lines = [
        f"Step    {format_seconds(estimate.seconds)} for tables; no plan takes less than "
        f"{format_seconds(estimate.bound)}{gap}",
        "Path    "
        + ", ".join(
            f"{name} {format_seconds(value)}"
            for name, value in estimate.phases.items()
            if value > 0
        ),
        f"Memory  {format_bytes(max(memory))} of {format_bytes(estimate.capacity)} on each device",
        f"Balance slowest device over mean: time {imbalance(busy)['max over mean']:.3f}, "
        f"table bytes {imbalance(tables)['max over mean']:.3f} "
        f"(KL {imbalance(busy)['KL divergence']:.1e}, {imbalance(tables)['KL divergence']:.1e})",
        f"Types   {_types(estimate.tables)}",
        f"Search  {estimate.search} in {estimate.search_seconds:.1f} s",
    ]
    return "\n".join(lines)


def _types(tables: Sequence[TableEstimate]) -> str:
    counts = Counter(_kind(table) for table in tables)
    return ", ".join(f"{count} x {kind}" for kind, count in counts.most_common())


def _kind(table: TableEstimate) -> str:
    kind = SHARDING_TYPES[table.sharding_type].abbreviation
    return kind + _EXCHANGE_SUFFIXES.get(table.exchange, "")


def _devices(estimate: Estimate) -> list[dict[str, str]]:
    rows = []
    for device in estimate.devices[:_MAX_DEVICES]:
        held = device.bytes
        other = sum(bytes for kind, bytes in held.items() if kind not in ("tables", "padding"))
        free = max(0.0, (device.memory or estimate.capacity) - sum(held.values()))
        shards = sorted(device.shards.items())
        rows.append(
            {
                "device": str(device.device),
                "tables": format_bytes(held["tables"]),
                "padding": format_bytes(held["padding"]),
                "other": format_bytes(other),
                "free": format_bytes(free),
                **_by_phase(estimate, device.seconds),
                "waits": format_seconds(device.waits),
                "shards": " ".join(
                    f"{SHARDING_TYPES[kind].abbreviation}:{n}" for kind, n in shards
                ),
            }
        )
    return rows


def _tables(estimate: Estimate) -> list[dict[str, str]]:
    # The tables that cost most come first, since a long report is cut off.
    ordered = sorted(estimate.tables, key=lambda table: -sum(table.seconds.values()))
    rows = []
    for table in ordered[:_MAX_TABLES]:
        cache = "" if table.storage == "device" else f" {table.cache_ratio:.0%} cached"
        dtype = _DTYPES.get(table.dtype, table.dtype)
        rows.append(
            {
                "table": table.name,
                "rows x dim": f"{table.rows:,} x {table.dim} {dtype}",
                "type": _kind(table),
                "storage": table.storage + cache,
                "devices": format_numbers(table.devices, len(estimate.devices)),
                "bytes": format_bytes(table.bytes),
                "ids/device": f"{table.lookups:,.0f}",
                "distinct": f"{table.distinct:,.0f}",
                **_by_phase(estimate, table.seconds),
                "cost": format_seconds(sum(table.seconds.values())),
            }
        )
    return rows


_DTYPES = {
    "float32": "f32",
    "bfloat16": "bf16",
    "float16": "f16",
    "int8": "i8",
    "float8_e4m3": "f8",
    "float8_e5m2": "f8",
}


def _groups(estimate: Estimate) -> list[dict[str, str]]:
    return [
        {
            "group": group.name,
            "tables": str(group.tables),
            "time": format_seconds(group.seconds),
            "slowest device": "all alike" if group.slowest is None else str(group.slowest),
        }
        for group in sorted(estimate.groups, key=lambda group: -group.seconds)
    ]


def _by_phase(estimate: Estimate, seconds: Mapping[str, float]) -> dict[str, str]:
    """Return the seconds by phase as text, by headers such as "fwd compute"."""
    return {
        short_phase(phase): format_seconds(seconds[phase])
        for phase in PHASES
        if phase in _ALWAYS_SHOWN or estimate.phases[phase] > 0
    }


def short_phase(phase: str) -> str:
    """Return the header of a phase's column, such as "fwd compute"."""
    return phase.replace("forward", "fwd").replace("backward", "bwd")


def render_table(title: str, rows: Sequence[Mapping[str, str]], count: int) -> str:
    """Return a table of text, by rows that map headers to cells; words are left, numbers right.

    A last line says how many more of ``count`` rows there are.
    """
    header = list(rows[0])
    cells = [header, *(list(row.values()) for row in rows)]
    if (left_out := count - len(rows)) > 0:
        cells.append([f"and {left_out} more", *[""] * (len(header) - 1)])
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    left = {0, *(i for i, name in enumerate(header) if name in _LEFT)}
    lines = [
        "  ".join(
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]
    return "\n".join([title, lines[0], "-" * len(lines[0]), *lines[1:]])


_LEFT = ("shards", "type", "storage", "devices", "group")


def _colored(text: str) -> str:
    """Color headings, sharding types, times and sizes; without rich, return the text as it is."""
    try:
        from rich.console import Console
        from rich.text import Text
    except ModuleNotFoundError:
        return text
    colored = Text(text)
    colored.highlight_regex(
        r"(?m)^(Devices|Tables|Groups|Step|Path|Memory|Balance|Types|Search)\b", "bold cyan"
    )
    colored.highlight_regex(r"(?m)^(device|table|group) .*$", "bold")
    kinds = "|".join(kind.abbreviation for kind in SHARDING_TYPES.values())
    colored.highlight_regex(rf"\b({kinds})(/pooled)?\b", "magenta")
    colored.highlight_regex(r"\b[\d.,]+ (s|ms|us)\b", "green")
    colored.highlight_regex(r"\b[\d.,]+ (TB|GB|MB|kB|bytes)\b", "yellow")
    # Wider than any line and without rich's own highlights: only colours are added, so that the
    # text can be cut out of a terminal.
    console = Console(force_terminal=True, width=10_000, highlight=False)
    with console.capture() as capture:
        console.print(colored, soft_wrap=True, end="")
    return capture.get()


# Number of tables with a bar of their own; smaller ones are drawn together.
_MAX_BARS = 12

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
            "drawing needs matplotlib: pip install 'jaxrec[plot]'", name="matplotlib"
        ) from error
    return Figure


def draw(estimate: Estimate, path: str | os.PathLike) -> None:
    """Write the picture; see `ShardingPlan.plot`."""
    figure_class = require_matplotlib()
    devices = len(estimate.devices)
    # Not through pyplot, which keeps figures and picks a window system.
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
    """Return the colour and pattern of each table's bars, by the table's rank in size."""
    ordered = sorted(estimate.tables, key=lambda table: table.bytes, reverse=True)
    patterns = (None, "xx", "++", "oo")
    return {
        table.name: (_COLORS[index % len(_COLORS)], patterns[index // len(_COLORS) % len(patterns)])
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
    """Draw a stacked bar for each device: tables, the largest lowest, then ``others``."""
    count = len(estimate.devices)
    ordered = sorted(estimate.tables, key=weight, reverse=True)
    layers: list[tuple[str, _Look, np.ndarray]] = []
    rest = np.zeros(count)
    for index, table in enumerate(ordered):
        values = np.zeros(count)
        values[list(table.devices)] = of_table(table)
        if index < _MAX_BARS:
            layers.append((table.name, looks[table.name], values))
        else:
            rest += values
    if len(ordered) > _MAX_BARS:
        layers.append((f"{len(ordered) - _MAX_BARS} more tables", ("0.4", None), rest))
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
    """Return a device's seconds that belong to no table: launches and empty positions."""
    own = 0.0
    for table in estimate.tables:
        if device.device in table.devices:
            own += table.device_seconds[table.devices.index(device.device)]
    return max(0.0, sum(device.seconds.values()) - own)
