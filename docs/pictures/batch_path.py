"""Draws batch_path.svg: python docs/pictures/batch_path.py"""

from __future__ import annotations

import pathlib

import matplotlib
from matplotlib.figure import Figure

matplotlib.rcParams["svg.fonttype"] = "none"  # text stays text
matplotlib.rcParams["svg.hashsalt"] = "0"  # the same file each time

# Row of the picture, text, and where the step runs.
ONE = (
    ("pack: lists to a ragged batch, ids checked", "host"),
    ("lookup: rows of tables, pooled", "device"),
    ("model: loss, and gradients of bags", "device"),
    ("sum: one gradient for each row", "device"),
    ("update: rows and their state, in place", "device"),
)
MESH = (
    ("pack, and shard_batch: samples to devices", "host"),
    ("route: ids travel to the owners of rows", "travel"),
    ("lookup: at the owners", "device"),
    ("rows or bags travel to the samples", "travel"),
    ("model: each device its own samples", "device"),
    ("gradients travel to the owners", "travel"),
    ("update: owners write their rows, once", "device"),
)
COLOURS = {"host": "#eeeeee", "device": "#ddeeff", "travel": "#ffe2c4"}


def draw(axes, title: str, steps) -> None:
    for place, (text, where) in enumerate(steps):
        height = -place * 1.3
        axes.add_patch(
            matplotlib.patches.Rectangle(
                (0, height), 10, 0.9, facecolor=COLOURS[where], edgecolor="k", linewidth=0.8
            )
        )
        axes.text(5, height + 0.45, text, ha="center", va="center", fontsize=9)
        if place:
            axes.annotate("", (5, height + 0.9), (5, height + 1.3), arrowprops={"arrowstyle": "->"})
    axes.set(xlim=(-0.2, 10.2), ylim=(-8.2, 1.1), title=title)
    axes.axis("off")


def main() -> None:
    figure = Figure(figsize=(9, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    draw(left, "one device", ONE)
    draw(right, "a mesh", MESH)
    for place, (name, colour) in enumerate(COLOURS.items()):
        left.add_patch(
            matplotlib.patches.Rectangle(
                (0.2 + 3.3 * place, -8), 0.6, 0.6, facecolor=colour, edgecolor="k"
            )
        )
        words = {"host": "host", "device": "devices", "travel": "between devices"}[name]
        left.text(1 + 3.3 * place, -7.7, words, va="center", fontsize=9)
    figure.savefig(pathlib.Path(__file__).with_suffix(".svg"), metadata={"Date": None})


if __name__ == "__main__":
    main()
