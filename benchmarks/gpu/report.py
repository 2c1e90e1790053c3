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
        f"Made by {card.get('made_by', '`bash benchmarks/gpu.sh`')} with JAX {card['jax']}. A "
        "plain copy moves "
        f"{bandwidth / 1e12:.2f} TB/s on this card. Milliseconds of the card are those of its "
        "kernels, without the time between them; those of the host are of calls that follow one "
        "another. Both are the fastest of several rounds. The share is of the time that a copy "
        "would take for the bytes that must move: with all repeated reads served by a cache, and "
        "with none. Updates sort their ids inside the time; the bytes leave the sort out. "
        "[gpu.md](../../docs/gpu.md#times) says what the shapes are.\n",
        *(f"{note}\n" for note in card.get("notes", [])),
        "## Times\n",
        "| shape | primitive | implementation | ms of the card | of FBGEMM's | ms of the host "
        "| of FBGEMM's | share |",
        "|---|---|---|---|---|---|---|---|",
        *(_time_row(line, times, bandwidth) for line in sorted(times, key=_place)),
        "\n## Against float64\n",
        "| implementation | checks | passed | largest error |",
        "|---|---|---|---|",
        *(_check_row(name, checks) for name in _names(checks)),
        "",
        *(_failure(line) for line in checks if not line["passed"]),
    ]
    return "\n".join(parts).rstrip() + "\n"


def _time_row(line: dict[str, Any], times: Sequence[dict[str, Any]], bandwidth: float) -> str:
    start = f"| {line['shape']} | {line['primitive']} | {line['implementation']} |"
    if "exception" in line:
        return f"{start} {_one_line(line['exception'])} | | | | |"
    peer = next((each for each in times if _is_peer(each, line)), {})
    cells = []
    for name in ("device_ms", "ms"):
        ms, peers = _fastest(line.get(name)), _fastest(peer.get(name))
        cells.append("" if ms is None else f"{ms:.3f}")
        cells.append("" if ms is None or peers is None else f"{ms / peers:.2f}")
    share, seconds = "", (_fastest(line.get("device_ms")) or line["ms"][0]) / 1e3
    if line.get("bytes"):
        share = " to ".join(f"{each / bandwidth / seconds:.0%}" for each in line["bytes"])
    return f"{start} {' | '.join(cells)} | {share} |"


def _is_peer(other: dict[str, Any], line: dict[str, Any]) -> bool:
    """Whether a line is FBGEMM's for the same work, and the first is not FBGEMM's itself."""
    is_same = all(other[key] == line[key] for key in ("shape", "primitive"))
    return is_same and other["implementation"] == "fbgemm" != line["implementation"]


def _fastest(ms: float | Sequence[float] | None) -> float | None:
    return min(ms) if isinstance(ms, Sequence) else ms


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
