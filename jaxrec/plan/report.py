"""The report of a plan, in tables."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence

from jaxrec.mesh.placement import SHARDING_TYPES
from jaxrec.plan.estimate import Estimate, TableEstimate, imbalance
from jaxrec.plan.formatting import format_bytes, format_numbers, format_seconds
from jaxrec.plan.perf import PHASES

# Number of devices and of tables that a report lists.
_MAX_DEVICES, _MAX_TABLES = 32, 100

_EXCHANGE_SUFFIXES = {"pooled": "/pooled"}
_ALWAYS_SHOWN = ("forward compute", "forward exchange", "backward compute", "backward exchange")


def render(estimate: Estimate, *, color: bool | None = None) -> str:
    """Return the report that ``print(plan)`` shows.

    Args:
        estimate: The plan's estimate.
        color: Whether to colour the report, which needs rich; None: on a terminal with rich.
    """
    sections = [
        _summary(estimate),
        _table("Devices", *_devices(estimate)),
        _table("Tables", *_tables(estimate)),
    ]
    if len(estimate.groups) > 1:
        sections.append(_table("Groups", *_groups(estimate)))
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


def _devices(estimate: Estimate) -> tuple[list[str], list[list[str]]]:
    header = [
        "device",
        "tables",
        "padding",
        "other",
        "free",
        *_headers(estimate),
        "waits",
        "shards",
    ]
    rows = []
    for device in estimate.devices[:_MAX_DEVICES]:
        held = device.bytes
        other = sum(bytes for kind, bytes in held.items() if kind not in ("tables", "padding"))
        rows.append(
            [
                str(device.device),
                format_bytes(held["tables"]),
                format_bytes(held["padding"]),
                format_bytes(other),
                format_bytes(max(0.0, (device.memory or estimate.capacity) - sum(held.values()))),
                *(format_seconds(device.seconds[phase]) for phase in _phases(estimate)),
                format_seconds(device.waits),
                " ".join(
                    f"{SHARDING_TYPES[kind].abbreviation}:{n}"
                    for kind, n in sorted(device.shards.items())
                ),
            ]
        )
    if (left := len(estimate.devices) - len(rows)) > 0:
        rows.append([f"and {left} more", *[""] * (len(header) - 1)])
    return header, rows


def _tables(estimate: Estimate) -> tuple[list[str], list[list[str]]]:
    header = ["table", "rows x dim", "type", "storage", "devices", "bytes"]
    header += ["ids/device", "distinct", *_headers(estimate), "cost"]
    ordered = sorted(estimate.tables, key=lambda table: -sum(table.seconds.values()))
    rows = []
    for table in ordered[:_MAX_TABLES]:
        cache = "" if table.storage == "device" else f" {table.cache_ratio:.0%} cached"
        rows.append(
            [
                table.name,
                f"{table.rows:,} x {table.dim} {_DTYPES.get(table.dtype, table.dtype)}",
                _kind(table),
                table.storage + cache,
                format_numbers(table.devices, len(estimate.devices)),
                format_bytes(table.bytes),
                f"{table.lookups:,.0f}",
                f"{table.distinct:,.0f}",
                *(format_seconds(table.seconds[phase]) for phase in _phases(estimate)),
                format_seconds(sum(table.seconds.values())),
            ]
        )
    if (left := len(ordered) - len(rows)) > 0:
        rows.append([f"and {left} more", *[""] * (len(header) - 1)])
    return header, rows


_DTYPES = {
    "float32": "f32",
    "bfloat16": "bf16",
    "float16": "f16",
    "int8": "i8",
    "float8_e4m3": "f8",
    "float8_e5m2": "f8",
}


def _groups(estimate: Estimate) -> tuple[list[str], list[list[str]]]:
    rows = [
        [
            group.name,
            str(group.tables),
            format_seconds(group.seconds),
            "all alike" if group.slowest is None else str(group.slowest),
        ]
        for group in sorted(estimate.groups, key=lambda group: -group.seconds)
    ]
    return ["group", "tables", "time", "slowest device"], rows


def _phases(estimate: Estimate) -> list[str]:
    return [phase for phase in PHASES if phase in _ALWAYS_SHOWN or estimate.phases[phase] > 0]


def _headers(estimate: Estimate) -> list[str]:
    short = {"forward": "fwd", "backward": "bwd"}
    return [
        " ".join(short.get(word, word) for word in phase.split()) for phase in _phases(estimate)
    ]


def _table(title: str, header: list[str], rows: list[list[str]]) -> str:
    """Return a table of text: words are aligned to the left, numbers to the right."""
    cells = [header, *rows]
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
    """Colour headings, sharding types, times and sizes; without rich, return the text as it is."""
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
    console = Console(force_terminal=True, width=10_000, highlight=False)
    with console.capture() as capture:
        console.print(colored, soft_wrap=True, end="")
    return capture.get()
