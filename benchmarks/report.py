"""Writes the tables of the performance pages from ``benchmarks/results/performance``.

    python -m benchmarks.report

A table stands between the lines ``<!-- table: NAME -->`` and ``<!-- end of table -->`` of a page.
``NAME.json`` has its rows, the machine, the date and the commit that recorded them, and the command
that measured them. ``summary`` has a line for each comparison with another library. The pages of
GPUs have `benchmarks.gpu.doc_tables`.
"""

from __future__ import annotations

import json
import pathlib
import re
import statistics
from collections.abc import Iterator
from typing import Any

ROOT = pathlib.Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results/performance"
PAGES = (ROOT / "docs/performance.md", ROOT / "docs/internals/measurements.md")

# Rows of the summary: what is compared, with what, and where the ratios of its times are. A ratio
# belongs to the rows whose cells begin with the given texts.
SUMMARY = (
    ("lookups of tables", "FBGEMM", "lookups", {"figure": "lookup", "peer": "fbgemm"}),
    ("lookups of tables", "`nn.EmbeddingBag`", "lookups", {"figure": "lookup", "peer": "nn."}),
    ("updates, SGD", "FBGEMM", "lookups", {"figure": "update, sgd"}),
    ("updates, row-wise Adagrad", "FBGEMM", "lookups", {"figure": "update, rowwise"}),
    ("a step of DLRM, Zen 5", "TorchRec", "dlrm", {"shape": "Zen 5"}),
    ("a step of DLRM, Zen 4", "TorchRec", "dlrm", {"shape": "Zen 4"}),
    ("three layers of a ranker", "its authors' PyTorch", "ranker_layers_even", {"program": "lay"}),
)
RATIO = "ratio (median)"


def main() -> None:
    for page in PAGES:
        page.write_text(filled(page.read_text()))


def filled(text: str) -> str:
    """Return a page with all of its tables made anew."""

    def table(match: re.Match[str]) -> str:
        name = match[2]
        lines = summary() if name == "summary" else recorded_table(name)
        return f"{match[1]}\n\n" + "\n".join(lines) + "\n\n<!-- end of table -->"

    return re.sub(r"(<!-- table: (\w+) -->)\n.*?<!-- end of table -->", table, text, flags=re.S)


def read(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())


def recorded_table(name: str) -> Iterator[str]:
    """Yield the lines of a table, and a sentence that says where its figures are from."""
    result = read(name)
    rows = result["rows"]
    decimals = {column: most_decimals(row[column] for row in rows) for column in rows[0]}
    yield from markdown(
        list(rows[0]),
        [[cell(value, decimals[column]) for column, value in row.items()] for row in rows],
    )
    command = f", by `{result['command']}`" if result["command"] else ""
    machine = result["machine"][:1].upper() + result["machine"][1:]
    yield ""
    yield f"{machine}; recorded on {result['recorded']} in commit {result['commit']}{command}."


def summary() -> Iterator[str]:
    """Yield the lines of the table of all comparisons: medians and extremes of their ratios."""
    rows = []
    for what, peer, name, wanted in SUMMARY:
        result = read(name)
        ratios = [row[RATIO] for row in result["rows"] if fits(row, wanted)]
        times = [statistics.median(ratios), min(ratios), max(ratios)]
        rows.append([what, peer, *(f"{time:.2f}" for time in times), result["recorded"]])
    yield from markdown(["what", "beside", "time", "least", "greatest", "recorded"], rows)


def fits(row: dict[str, Any], wanted: dict[str, str]) -> bool:
    return all(row[column].startswith(text) for column, text in wanted.items())


def most_decimals(values: Iterator[Any]) -> int:
    """Return the largest number of decimals among the floats of a column."""
    return max((len(str(x).partition(".")[2]) for x in values if isinstance(x, float)), default=0)


def cell(value: Any, decimals: int) -> str:
    if isinstance(value, float):
        return f"{value:.{decimals}f}"
    return f"{value:,}" if isinstance(value, int) else value


def markdown(columns: list[str], rows: list[list[str]]) -> Iterator[str]:
    for line in (columns, ["---"] * len(columns), *rows):
        yield f"| {' | '.join(line)} |" if line[0] != "---" else f"|{'|'.join(line)}|"


if __name__ == "__main__":
    main()
