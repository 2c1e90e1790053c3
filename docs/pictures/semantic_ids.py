"""Draws semantic_ids.svg beside this file: python docs/pictures/semantic_ids.py"""

from __future__ import annotations

import pathlib

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

matplotlib.rcParams["svg.fonttype"] = "none"  # text stays text
matplotlib.rcParams["svg.hashsalt"] = "0"  # the same file each time

# Nodes of the trie by level: place, code, place of the parent, log-probability; None: no item has
# the code.
LEVELS = [
    [(1.5, "3", 3.5, -0.4), (5.5, "7", 3.5, -1.1)],
    [(0.5, "1", 1.5, -0.9), (2.5, "4", 1.5, -1.6), (5.5, "2", 5.5, -1.3)],
    [(0.0, "0", 0.5, -1.0), (1.0, "1", 0.5, -2.9), (2.5, "0", 2.5, -1.7), (5.5, "0", 5.5, -1.4)],
]
ITEMS = {0.0: "item 9", 1.0: "item 4", 2.5: "item 1", 5.5: "item 6"}
BEAM = 2
NAMES = ["first code", "second code", "last code"]


def draw(axes: Axes) -> None:
    axes.text(3.5, 0, "history", ha="center", va="center", fontsize=9,
              bbox={"boxstyle": "round,pad=0.4", "facecolor": "#ddddee"})  # fmt: skip
    for level, nodes in enumerate(LEVELS):
        best = sorted((node[3] for node in nodes), reverse=True)[:BEAM]
        height = -1.0 - level
        axes.text(-1.6, height, NAMES[level], ha="center", va="center", fontsize=8)
        for place, code, parent, score in nodes:
            in_beam = score in best
            colour = "#aaccee" if in_beam else "#eeeeee"
            width = 2.0 if in_beam else 0.7
            axes.plot((parent, place), (height + 0.82, height + 0.2), color="k", linewidth=width)
            axes.text(place, height, code, ha="center", va="center", fontsize=9,
                      bbox={"boxstyle": "circle,pad=0.3", "facecolor": colour})  # fmt: skip
            axes.text(place + 0.25, height - 0.02, f"{score:.1f}", ha="left", va="center",
                      fontsize=7)  # fmt: skip
    for place, name in ITEMS.items():
        axes.text(place, -3.55, name, ha="center", va="top", fontsize=8)
    axes.set_xlim(-2.4, 6.6)
    axes.set_ylim(-3.9, 0.4)
    axes.axis("off")


def main() -> None:
    figure = Figure(figsize=(7, 3.2), layout="constrained")
    draw(figure.subplots())
    path = pathlib.Path(__file__).with_suffix(".svg")
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()
