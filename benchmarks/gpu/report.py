"""Turns the JSON lines of `check` and `measure` into a page.

    python -m benchmarks.gpu.report results.jsonl

Writes ``benchmarks/results/<card>.md`` and prints its path.
"""

from __future__ import annotations

import json
import pathlib
import re
import sys
from collections.abc import Sequence
from typing import Any

RESULTS = pathlib.Path(__file__).parents[1] / "results"


def main() -> None:
    lines = [json.loads(line) for line in pathlib.Path(sys.argv[1]).read_text().splitlines()]
    card = next((line for line in lines if line["kind"] == "card"), None)
    if card is None:
        sys.exit(f"{sys.argv[1]} names no card: no implementation could be timed")
    RESULTS.mkdir(exist_ok=True)
    name = re.sub(r"[^a-z0-9]+", "-", card["card"].lower()).strip("-")
    path = RESULTS / f"{name}.md"
    path.write_text(page(card, lines))
    print(path)


def page(card: dict[str, Any], lines: Sequence[dict[str, Any]]) -> str:
    """The page, in Markdown."""
    bandwidth = card["copy_bytes_per_s"]
    times = [line for line in lines if line["kind"] == "time"]
    checks = [line for line in lines if line["kind"] == "check"]
    parts = [
        f"# Kernels on {card['card']}\n",
        f"Made by `bash benchmarks/gpu.sh` with JAX {card['jax']}. A plain copy moves "
        f"{bandwidth / 1e12:.2f} TB/s on this card. The share is of the time that copy would take "
        "for the bytes that must move: with all repeated reads served by a cache, and with none. "
        "Updates sort their ids inside the time; the bytes leave the sort out.\n",
        "## Times\n",
        "| shape | primitive | implementation | ms (min) | ms (median) | share |",
        "|---|---|---|---|---|---|",
        *(_time_row(line, bandwidth) for line in sorted(times, key=_place)),
        "\n## Against float64\n",
        "| implementation | checks | passed | largest error |",
        "|---|---|---|---|",
        *(_check_row(name, checks) for name in _names(checks)),
        "",
        *(_failure(line) for line in checks if not line["passed"]),
    ]
    return "\n".join(parts).rstrip() + "\n"


def _time_row(line: dict[str, Any], bandwidth: float) -> str:
    start = f"| {line['shape']} | {line['primitive']} | {line['implementation']} |"
    if "exception" in line:
        return f"{start} {_one_line(line['exception'])} | | |"
    fastest, median = line["ms"]
    share = ""
    if line["bytes"]:
        low, high = (bytes_ / bandwidth / (fastest / 1e3) for bytes_ in line["bytes"])
        share = f"{low:.0%} to {high:.0%}"
    return f"{start} {fastest:.3f} | {median:.3f} | {share} |"


def _check_row(name: str, checks: Sequence[dict[str, Any]]) -> str:
    own = [line for line in checks if line["implementation"] == name]
    worst = max((line["error"] for line in own if "error" in line), default=float("nan"))
    return f"| {name} | {len(own)} | {sum(line['passed'] for line in own)} | {worst:.1e} |"


def _failure(line: dict[str, Any]) -> str:
    reason = line.get("exception") or f"error {line['error']:.1e}, repeats: {line['repeats']}"
    where = f"{line['implementation']}, {line['primitive']}, {line['shape']}"
    return f"- Failed: {where}: {_one_line(reason)}"


def _place(line: dict[str, Any]) -> tuple[str, str, str]:
    return line["shape"], line["primitive"], line["implementation"]


def _names(lines: Sequence[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(line["implementation"] for line in lines))


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    main()
