"""Turns the JSON lines of `bash benchmarks/gpu.sh` into a page.

    python -m benchmarks.gpu.report results.jsonl

Writes ``benchmarks/results/<card>.md`` and prints its path. Where several lines tell of the same
work, the last one counts. Lines of checks alone name no card, and make no page.
"""

from __future__ import annotations

import json
import pathlib
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

RESULTS = pathlib.Path(__file__).parents[1] / "results"
Line = dict[str, Any]


def main() -> None:
    lines = read(pathlib.Path(sys.argv[1]))
    card = card_of(lines)
    if card is None:
        print(f"{sys.argv[1]} names no card yet: nothing was timed")
        return
    RESULTS.mkdir(exist_ok=True)
    name = re.sub(r"[^a-z0-9]+", "-", card["card"].lower()).strip("-")
    path = RESULTS / f"{name}.md"
    path.write_text(page(card, lines))
    print(path)


def read(path: pathlib.Path) -> list[Line]:
    """Return the lines of a file, the last of each kind, implementation, shape and primitive.

    The last line of a run that was cut may be incomplete; it is left out.
    """
    lines: dict[tuple[Any, ...], Line] = {}
    for text in path.read_text().splitlines():
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            continue
        names = ("kind", "implementation", "shape", "primitive", "precision")
        key = tuple(line.get(name) for name in names)
        lines.pop(key, None)
        lines[key] = line
    return list(lines.values())


def card_of(lines: Sequence[Line]) -> Line | None:
    """Return the line of the card; without one, what the steps say of it."""
    for line in lines:
        if line["kind"] == "card":
            return line
    steps = [line for line in lines if line["kind"] in ("step", "tier") and "card" in line]
    return {"card": steps[0]["card"], "jax": "", "copy_bytes_per_s": None} if steps else None


def page(card: Line, lines: Sequence[Line]) -> str:
    """The page, in Markdown."""
    bandwidth = card["copy_bytes_per_s"]
    times = [line for line in lines if line["kind"] == "time"]
    checks = [line for line in lines if line["kind"] == "check"]
    steps = [line for line in lines if line["kind"] == "step"]
    parts = [
        f"# Kernels and training steps on {card['card']}\n",
        f"Made by {card.get('made_by', '`bash benchmarks/gpu.sh`')} with JAX {card['jax']}. A "
        "plain copy moves "
        f"{'?' if bandwidth is None else f'{bandwidth / 1e12:.2f}'} TB/s on this card. "
        "Milliseconds of the card are those of its "
        "kernels, without the time between them; those of the host are of calls that follow one "
        "another. Both are the fastest of several rounds. The share is of the time that a copy "
        "would take for the bytes that must move: with all repeated reads served by a cache, and "
        "with none. Updates sort their ids inside the time; the bytes leave the sort out. "
        "[gpu.md](../../docs/gpu.md#times) says what the shapes are.\n",
        *(f"{note}\n" for note in card.get("notes", [])),
        *_steps(steps),
        *_attention([line for line in lines if line["kind"] == "attention"]),
        *_tier([line for line in lines if line["kind"] == "tier"]),
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
        *_left_out(lines),
    ]
    return "\n".join(parts).rstrip() + "\n"


def _tier(lines: Sequence[Line]) -> Iterator[str]:
    """Yield the table of tables beyond the card's memory; nothing without any."""
    if not lines:
        return
    yield "## Tables beyond the card's memory\n"
    yield (
        "Milliseconds of a step, with all that plans batches and moves rows, and of its calls "
        "alone; `python -m benchmarks.gpu.tier --help` says what the suites are. Published: "
        "forward, backward and evaluation on one H100.\n"
    )
    yield "| suite | call | ms | hits | MB moved | FBGEMM's | dynamicemb's |"
    yield "|---|---|---|---|---|---|---|"
    for line in lines:
        if "passed" in line:
            text = "passed" if line["passed"] else "**failed**"
        else:
            text = line["exception"].replace("|", "/") if "exception" in line else ""
            text = text or f"{line['ms'][0]:.3f}"
        published = line.get("published_ms", {})
        peers = (" / ".join(map(str, published.get(name, ()))) for name in ("fbgemm", "dynamicemb"))
        cells = line["shape"], line["primitive"], text, line.get("hits", "")
        yield f"| {' | '.join(map(str, (*cells, line.get('moved_mb', ''), *peers)))} |"
    yield ""


def _steps(steps: Sequence[Line]) -> Iterator[str]:
    """Yield the table of training steps; nothing without any."""
    if not steps:
        return
    yield "## Training steps\n"
    yield (
        "Milliseconds of a step in a row of steps, of the card's kernels, and of the host until it "
        "has launched a step; each with its ratio to the fastest line of TorchRec.\n"
    )
    yield (
        "| step | implementation | ms | of TorchRec's | ms of the card | of TorchRec's "
        "| ms of the host | launches | peak GB | GB of tables |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for line in sorted(steps, key=lambda x: (x["shape"], x["implementation"])):
        start = f"| {line['shape']} | {line['implementation']} |"
        if "exception" in line:
            yield f"{start} {_one_line(line['exception'])} | | | | | | | |"
            continue
        peers = [each for each in steps if _is_peer_step(each, line)]
        cells = []
        for name in ("ms", "device_ms"):
            ms = _fastest(line.get(name))
            of_peers = [peer for each in peers if (peer := _fastest(each.get(name))) is not None]
            cells.append("" if ms is None else f"{ms:.3f}")
            cells.append("" if ms is None or not of_peers else f"{ms / min(of_peers):.2f}")
        others: tuple[tuple[str, Callable[[Any], str]], ...] = (
            ("host_ms", "{:.3f}".format),
            ("launches", str),
            ("peak_gb", "{:.2f}".format),
            ("table_gb", "{:.2f}".format),
        )
        cells += [show(line[name]) if name in line else "" for name, show in others]
        yield f"{start} {' | '.join(cells)} |"
    yield ""


def _attention(lines: Sequence[Line]) -> Iterator[str]:
    """Yield the table of HSTU attention; nothing without any."""
    if not lines:
        return
    yield "## HSTU attention\n"
    yield (
        "Causal attention of rows, bfloat16, forward and both ways together. TFLOP/s count the "
        "work that the lengths need: four operations for each pair, head and column forward, ten "
        "backward.\n"
    )
    yield "| shape | direction | implementation | ms | ms of the card | launches | TFLOP/s |"
    yield "|---|---|---|---|---|---|---|"
    for line in sorted(lines, key=_place):
        shape = line["shape"].removeprefix("attention ")
        start = f"| {shape} | {line['primitive']} | {line['implementation']} |"
        if "exception" in line:
            yield f"{start} {_one_line(line['exception'])} | | | |"
            continue
        device = f"{line['device_ms']:.3f}" if "device_ms" in line else ""
        cells = f"{_fastest(line['ms']):.3f}", device, line.get("launches", "")
        yield f"{start} {' | '.join(map(str, cells))} | {line['tflop_per_s']:.0f} |"
    yield ""


def _is_peer_step(other: Line, line: Line) -> bool:
    """Whether a line is TorchRec's for the same step, and the first is not TorchRec's itself."""
    is_of_peer = other["implementation"].startswith("torchrec") and "exception" not in other
    names = ("shape", "precision")
    is_same = all(other.get(name) == line.get(name) for name in names)
    return is_of_peer and is_same and not line["implementation"].startswith("torchrec")


def _time_row(line: Line, times: Sequence[Line], bandwidth: float | None) -> str:
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
    if line.get("bytes") and bandwidth:
        share = " to ".join(f"{each / bandwidth / seconds:.0%}" for each in line["bytes"])
    return f"{start} {' | '.join(cells)} | {share} |"


def _is_peer(other: Line, line: Line) -> bool:
    """Whether a line is FBGEMM's for the same work, and the first is not FBGEMM's itself."""
    is_same = all(other[key] == line[key] for key in ("shape", "primitive"))
    return is_same and other["implementation"] == "fbgemm" != line["implementation"]


def _fastest(ms: float | Sequence[float] | None) -> float | None:
    return min(ms) if isinstance(ms, Sequence) else ms


def _check_row(name: str, checks: Sequence[Line]) -> str:
    own = [line for line in checks if line["implementation"] == name]
    worst = max((line["error"] for line in own if "error" in line), default=float("nan"))
    return f"| {name} | {len(own)} | {sum(line['passed'] for line in own)} | {worst:.1e} |"


def _failure(line: Line) -> str:
    reason = line.get("exception") or f"error {line['error']:.1e}, repeats: {line['repeats']}"
    where = f"{line['implementation']}, {line['primitive']}, {line['shape']}"
    return f"- Failed: {where}: {_one_line(reason)}"


def _left_out(lines: Sequence[Line]) -> Iterator[str]:
    """Yield what did not begin in time and was not run later."""
    ran = {(line.get("implementation"), line.get("shape")) for line in _that_ran(lines)}
    names = [
        f"{line['implementation']} {line['shape']}"
        for line in lines
        if line["kind"] == "left out" and (line["implementation"], line["shape"]) not in ran
    ]
    if names:
        yield f"\nLeft out, for want of time: {', '.join(dict.fromkeys(names))}."


def _that_ran(lines: Sequence[Line]) -> list[Line]:
    return [line for line in lines if line["kind"] in ("time", "check", "step", "attention")]


def _place(line: Line) -> tuple[str, str, str]:
    return line["shape"], line["primitive"], line["implementation"]


def _names(lines: Sequence[Line]) -> list[str]:
    return list(dict.fromkeys(line["implementation"] for line in lines))


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    main()
