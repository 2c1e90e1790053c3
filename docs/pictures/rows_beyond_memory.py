"""Draws rows_beyond_memory.svg beside this file: python docs/pictures/rows_beyond_memory.py"""

from __future__ import annotations

import pathlib

import matplotlib
from matplotlib.figure import Figure

matplotlib.rcParams["svg.fonttype"] = "none"  # text stays text
matplotlib.rcParams["svg.hashsalt"] = "0"  # the same file each time

# What each thread does with batch n, by its place: (batch, first tenth of a step, last, text).
LANES = {
    "reading": [(n + 4, 10 * n, 7, "read batch {}") for n in range(3)],
    "planning": [(n + 3, 10 * n + 1, 6, "rows for ids of batch {}") for n in range(3)],
    "store, reads": [(n + 3, 10 * n + 4, 6, "missing rows of {}") for n in range(3)],
    "training": [(n, 10 * n, 2, "move") for n in range(3)],
    "store, writes": [(n, 10 * n + 2, 6, "rows evicted for {}") for n in range(3)],
    "device": [(n, 10 * n + 2, 8, "step of batch {}") for n in range(3)],
}
COLOURS = {
    "reading": "#eeeeee",
    "planning": "#ddeeff",
    "store, reads": "#ffeedd",
    "training": "#ffdddd",
    "device": "#ddffdd",
    "store, writes": "#ffeedd",
}


def main() -> None:
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    axes = figure.subplots()
    names = list(LANES)
    for place, (name, works) in enumerate(LANES.items()):
        height = len(names) - place
        for batch, start, width, text in works:
            axes.barh(height, width, left=start, height=0.7, color=COLOURS[name], edgecolor="k")
            label = text.format(batch)
            axes.text(start + width / 2, height, label, ha="center", va="center", fontsize=8)
    arrow = {"arrowstyle": "->", "shrinkA": 0, "shrinkB": 0}
    lanes = {name: len(names) - place for place, name in enumerate(names)}
    # The rows that a batch's rows replace leave before its step.
    for step in range(3):
        start, end = 10 * step + 1, 10 * step + 2.5
        axes.annotate(
            "", (end, lanes["store, writes"] + 0.35), (start, lanes["training"] - 0.35),
            arrowprops=arrow,
        )  # fmt: skip
    axes.set_yticks(list(lanes.values()), labels=names)
    axes.set_xticks([10 * n for n in range(4)], labels=[f"{n} steps" for n in range(4)])
    axes.set_xlim(0, 30.2)
    axes.tick_params(length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    path = pathlib.Path(__file__).with_suffix(".svg")
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()
