"""Writes the tables of the pages of GPUs from the pages of results.

    python -m benchmarks.gpu.doc_tables

A table stands between the lines ``<!-- table: NAME -->`` and ``<!-- end of table -->``; `TABLES`
has the names. The pages are those of `benchmarks.gpu.report` and of `benchmarks.gpu.compile`.
"""

from __future__ import annotations

import pathlib
import re
from collections.abc import Callable, Iterator
from typing import TypeAlias

ROOT = pathlib.Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks/results"
PAGES = (ROOT / "docs/gpu.md", ROOT / "docs/internals/gpu.md")

Row: TypeAlias = dict[str, str]

CARDS = {"h200": "H200", "h100": "H100", "a100": "A100", "l4": "L4"}
TIMED_CARD = "nvidia-h200"
COMPILED_CARD = "h200"
# By shape: tables, samples x ids, and ids.
SHAPES = ("tbe_d128", "wide_d256", "long_d32", "skewed_d64", "short_d128", "onehot_d16")
PLAIN_ROWS = tuple(f"D{dim} {dtype}" for dtype in ("float32", "bfloat16") for dim in (64, 128, 256))
LOOPS = ("pool", "copy_rows", "update")  # kernels that read or write tables
PACKED_ROWS = (
    *("D64 int8", "D128 int8", "D64 int4", "D64 int2", "D64 float8", "D64 trained int8"),
    *("D128 trained int8", "D64 float8_e4m3"),
)


def main() -> None:
    for page in PAGES:
        page.write_text(filled(page.read_text()))


def filled(text: str) -> str:
    """Return the page with all of its tables made anew."""

    def table(match: re.Match[str]) -> str:
        lines = "\n".join(TABLES[match[2]]())
        return f"{match[1]}\n\n{lines}\n\n<!-- end of table -->"

    return re.sub(r"(<!-- table: (.+?) -->)\n.*?<!-- end of table -->", table, text, flags=re.S)


def rows(path: pathlib.Path) -> list[Row]:
    """Return the rows of all tables of a page, by the names of their columns."""
    found, names = [], None
    for line in path.read_text().splitlines():
        if not line.startswith("|"):
            names = None
            continue
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if names is None:
            names = cells
        elif not set(line) <= set("|-"):
            found.append(dict(zip(names, cells, strict=True)))
    return found


def versions(card: str) -> list[str]:
    """Return the versions of JAX by which the kernels were compiled for a card, oldest first."""
    pages = RESULTS.glob(f"compiled.{card}.jax-*.md")
    found = [path.name.removeprefix(f"compiled.{card}.jax-").removesuffix(".md") for path in pages]
    return sorted(found, key=lambda version: [int(x) for x in version.split(".")])


def compiled_rows(card: str, version: str) -> list[Row]:
    """Return the rows of the page of a card and a version of JAX."""
    return rows(RESULTS / f"compiled.{card}.jax-{version}.md")


def cards() -> Iterator[str]:
    """Yield what is known of each card: where it was timed, and what it was compiled for."""
    yield "| card | timed | compiled, without a card, by JAX |"
    yield "|---|---|---|"
    for card, name in CARDS.items():
        timed = [path.name for path in sorted(RESULTS.glob(f"nvidia-{card}*.md"))]
        pages = ", ".join(f"[yes](../benchmarks/results/{page})" for page in timed) or "no"
        compiled = ", ".join(
            f"[{version}](../benchmarks/results/compiled.{card}.jax-{version}.md)"
            f"{_left_out(card, version)}"
            for version in versions(card)
        )
        yield f"| {name} | {pages} | {compiled} |"


def _left_out(card: str, version: str) -> str:
    """Return a remark about a page that has no programs of Mosaic."""
    programs = [row.get("program", "") for row in compiled_rows(card, version)]
    is_whole = any(program.startswith("mosaic ") for program in programs)
    return "" if is_whole else " (older, Triton's alone)"


def times() -> Iterator[str]:
    """Yield the times of lookups and updates beside FBGEMM's."""
    every = rows(RESULTS / f"{TIMED_CARD}.md")

    def find(shape: str, primitive: str, implementation: str) -> Row:
        wanted = {"shape": shape, "primitive": primitive, "implementation": implementation}
        return next((row for row in every if wanted.items() <= row.items()), {})

    yield (
        "| shape | lookup: jaxrec, FBGEMM | ratio | share | update, row-wise Adagrad | ratio "
        "| share | update, SGD | ratio |"
    )
    yield "|---|---|---|---|---|---|---|---|---|"
    for shape in SHAPES:
        cells = [shape]
        for primitive in ("pooled_lookup", "fused_update rowwise_adagrad", "fused_update sgd"):
            own, peer = find(shape, primitive, "triton"), find(shape, primitive, "fbgemm")
            ms, of_peer = own["ms of the card"], peer["ms of the card"]
            cells += [f"{ms}, {of_peer}", f"{float(ms) / float(of_peer):.2f}"]
            if primitive != "fused_update sgd":
                shares = dict.fromkeys(re.findall(r"\d+", own["share"]))
                cells.append(f"{' to '.join(shares)} %")
        yield f"| {' | '.join(cells)} |"


def kernels(primitive: str, kernel: str, of_rows: tuple[str, ...]) -> Iterator[str]:
    """Yield warps, round trips and bytes under way of one kernel, by backend and version of JAX."""
    pages = {version: compiled_rows(COMPILED_CARD, version) for version in versions(COMPILED_CARD)}
    columns = [
        (backend, version)
        for backend in _backends(pages)
        for version, page in pages.items()
        if not {f"{backend} {primitive} {name} L20" for name in of_rows}.isdisjoint(
            row.get("program") for row in page
        )
    ]
    yield f"| rows | {' | '.join(f'{backend}, {version}' for backend, version in columns)} |"
    yield "|---|" + "---|" * len(columns)
    for name in of_rows:
        cells = []
        for backend, version in columns:
            program = f"{backend} {primitive} {name} L20"
            wanted = {"program": program, "kernel": kernel}
            row = next((row for row in pages[version] if wanted.items() <= row.items()), None)
            cells.append("" if row is None else _figures(row))
        if not any(cells):
            continue
        yield f"| {name.removeprefix('D').replace(' ', ' columns, ', 1)} | {' | '.join(cells)} |"


def behind() -> Iterator[str]:
    """Yield the kernels of Mosaic that have fewer bytes under way than Triton's, or wait more."""
    yield "| program | JAX | kernel | Triton | Mosaic |"
    yield "|---|---|---|---|---|"
    for version in versions(COMPILED_CARD):
        page = [row for row in compiled_rows(COMPILED_CARD, version) if "program" in row]
        by_name = {(row["program"], row["kernel"]): row for row in page}
        for (program, kernel), row in by_name.items():
            peer = by_name.get((program.replace("mosaic", "triton", 1), kernel))
            if program.startswith("mosaic") and peer and kernel in LOOPS and _is_behind(row, peer):
                name = program.removeprefix("mosaic ")
                yield f"| {name} | {version} | {kernel} | {_figures(peer)} | {_figures(row)} |"


def _is_behind(row: Row, peer: Row) -> bool:
    """Whether a kernel's first loop has fewer bytes under way, or its first store comes later."""

    def figures(row: Row) -> tuple[float, int]:
        under_way = re.search(r"\((\d+)\)", row["round trips a turn (KB under way)"])
        waits = float(row["round trips before first store"])
        return waits, int(under_way[1]) if under_way else 0

    (waits, under_way), (of_peer, under_way_of_peer) = figures(row), figures(peer)
    return waits > of_peer or under_way < under_way_of_peer


def _figures(row: Row) -> str:
    turns = row["round trips a turn (KB under way)"]
    return f"{row['warps resident']}; {turns}; {row['round trips before first store']}"


def _backends(pages: dict[str, list[Row]]) -> list[str]:
    names = [
        row["program"].split()[0] for page in pages.values() for row in page if "program" in row
    ]
    return [name for name in dict.fromkeys(names) if name != "reference"]


def launches() -> Iterator[str]:
    """Yield what calls launch, by backend and version of JAX."""
    calls = ("pooled_lookup D128 float32 L20", "fused_update rowwise_adagrad D128 float32 L20")
    yield from _launches("call", calls)


def steps() -> Iterator[str]:
    """Yield memory and launches of training steps, by backend and version of JAX."""
    pages = [compiled_rows(COMPILED_CARD, version) for version in versions(COMPILED_CARD)]
    found = [row for page in pages[-1:] for row in page if "step" in row]
    columns = (
        *("arguments GB", "of them in place", "temporaries GB"),
        *("launches", "loops", "started by the host"),
    )
    yield f"| step | {' | '.join(columns)} |"
    yield "|---|" + "---|" * len(columns)
    for row in found:
        name = row["step"].removeprefix("step ")
        yield f"| {name} | {' | '.join(row[column] for column in columns)} |"


def _launches(column: str, names: tuple[str, ...]) -> Iterator[str]:
    pages = {version: compiled_rows(COMPILED_CARD, version) for version in versions(COMPILED_CARD)}
    first = next((row for page in pages.values() for row in page if column in row), {})
    kinds = [name for name in first if name != column]
    yield f"| call | JAX | {' | '.join(kinds)} |"
    yield "|---|---|" + "---|" * len(kinds)
    for name in names:
        for backend in _backends(pages):
            for version, page in pages.items():
                row = next((row for row in page if row.get(column) == f"{backend} {name}"), None)
                if row is not None:
                    cells = " | ".join(row[kind] for kind in kinds)
                    yield f"| {backend} {name} | {version} | {cells} |"


def attention() -> Iterator[str]:
    """Yield the loops of HSTU attention's kernels, by the newest JAX."""
    path = sorted(RESULTS.glob(f"compiled_attention.{COMPILED_CARD}.jax-*.md"))[-1]
    names = (
        "matrix products a turn",
        "clocks of the tensor cores",
        "of special functions",
        "instructions",
        "with a mask",
        "spilled bytes",
    )
    yield f"| columns | kernel | {' | '.join(names)} |"
    yield "|---|---|" + "---|" * len(names)
    for row in rows(path):
        found = re.search(r"D(64|128|256) bfloat16 targets", row.get("program", ""))
        if found is not None:
            cells = found[1], f"`{row['kernel']}`", *(row[name] for name in names)
            yield f"| {' | '.join(cells)} |"


TABLES: dict[str, Callable[[], Iterator[str]]] = {
    "cards": cards,
    "attention": attention,
    "times": times,
    "pooled lookup": lambda: kernels("pooled_lookup", "pool", PLAIN_ROWS),
    "update": lambda: kernels("fused_update rowwise_adagrad", "update", PLAIN_ROWS),
    "packed lookup": lambda: kernels("pooled_lookup", "pool", PACKED_ROWS),
    "packed update": lambda: kernels("fused_update rowwise_adagrad", "update", PACKED_ROWS),
    "behind": behind,
    "launches": launches,
    "steps": steps,
}

if __name__ == "__main__":
    main()
