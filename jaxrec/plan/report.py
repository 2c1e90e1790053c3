"""A plan in words and tables."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence

from jaxrec.plan.cost import PHASES
from jaxrec.plan.estimate import Estimate, TableEstimate, imbalance
from jaxrec.plan.failure import size

# Plans of more devices or tables than this are summed up.
_MOST_DEVICES, _MOST_TABLES = 32, 100

_SHORT = {
    "data_parallel": "DP",
    "table_wise": "TW",
    "row_wise": "RW",
    "column_wise": "CW",
    "table_row_wise": "TWRW",
    "table_column_wise": "TWCW",
    "grid": "GRID",
}
_COLUMNS = ("forward compute", "forward exchange", "backward compute", "backward exchange")


def render(estimate: Estimate, *, color: bool | None = None) -> str:
    """The report that ``print(plan)`` shows.

    Args:
        estimate: What the plan is expected to take.
        color: Whether to colour it, which takes rich; None: on a terminal, if rich is there.
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
        f"Step    {seconds(estimate.seconds)} for tables; no plan takes less than "
        f"{seconds(estimate.bound)}{gap}",
        "Path    "
        + ", ".join(
            f"{name} {seconds(value)}" for name, value in estimate.phases.items() if value > 0
        ),
        f"Memory  {size(max(memory))} of {size(estimate.capacity)} on each device",
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
    kind = _SHORT[table.sharding_type]
    return f"{kind}/sums" if table.exchange == "sums" else kind


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
    for device in estimate.devices[:_MOST_DEVICES]:
        held = device.bytes
        other = sum(bytes for kind, bytes in held.items() if kind not in ("tables", "padding"))
        rows.append(
            [
                str(device.device),
                size(held["tables"]),
                size(held["padding"]),
                size(other),
                size(max(0.0, estimate.capacity - sum(held.values()))),
                *(seconds(device.seconds[phase]) for phase in _phases(estimate)),
                seconds(device.waits),
                " ".join(f"{_SHORT[kind]}:{n}" for kind, n in sorted(device.shards.items())),
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
    for table in ordered[:_MOST_TABLES]:
        cache = "" if table.storage == "device" else f" {table.cache_ratio:.0%} cached"
        rows.append(
            [
                table.name,
                f"{table.rows:,} x {table.dim} {_DTYPES[table.dtype]}",
                _kind(table),
                table.storage + cache,
                numbers(table.devices, len(estimate.devices)),
                size(table.bytes),
                f"{table.lookups:,.0f}",
                f"{table.distinct:,.0f}",
                *(seconds(table.seconds[phase]) for phase in _phases(estimate)),
                seconds(sum(table.seconds.values())),
            ]
        )
    if (left := len(ordered) - len(rows)) > 0:
        rows.append([f"and {left} more", *[""] * (len(header) - 1)])
    return header, rows


_DTYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}


def _groups(estimate: Estimate) -> tuple[list[str], list[list[str]]]:
    rows = [
        [
            group.name,
            str(group.tables),
            seconds(group.seconds),
            "all alike" if group.slowest is None else str(group.slowest),
        ]
        for group in sorted(estimate.groups, key=lambda group: -group.seconds)
    ]
    return ["group", "tables", "time", "slowest device"], rows


def _phases(estimate: Estimate) -> list[str]:
    return [phase for phase in PHASES if phase in _COLUMNS or estimate.phases[phase] > 0]


def _headers(estimate: Estimate) -> list[str]:
    short = {"forward": "fwd", "backward": "bwd"}
    return [
        " ".join(short.get(word, word) for word in phase.split()) for phase in _phases(estimate)
    ]


def seconds(value: float) -> str:
    """Seconds for people.

    Example:
        >>> seconds(0.00123)
        '1.23 ms'
    """
    if value == 0:
        return "0"
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}" if value < 1000 * scale else f"{value:,.0f} {unit}"
    return f"{value * 1e6:.3g} us"


def numbers(values: Sequence[int], of: int) -> str:
    """Numbers for people.

    Example:
        >>> numbers([0, 1, 2, 5], of=8)
        '0-2, 5'
    """
    if len(values) == of and of > 1:
        return "all"
    runs: list[list[int]] = []
    for value in values:
        if runs and runs[-1][-1] == value - 1:
            runs[-1].append(value)
        else:
            runs.append([value])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _table(title: str, header: list[str], rows: list[list[str]]) -> str:
    """Columns side by side, the first and last to the left and numbers to the right."""
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
    """The text with headings in bold and what matters in colour; as it is without rich."""
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
    colored.highlight_regex(r"\b(DP|TW|RW|CW|TWRW|TWCW|GRID)(/sums)?\b", "magenta")
    colored.highlight_regex(r"\b[\d.,]+ (s|ms|us)\b", "green")
    colored.highlight_regex(r"\b[\d.,]+ (TB|GB|MB|kB|bytes)\b", "yellow")
    console = Console(force_terminal=True, width=10_000, highlight=False)
    with console.capture() as capture:
        console.print(colored, soft_wrap=True, end="")
    return capture.get()
