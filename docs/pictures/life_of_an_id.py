"""Draws life_of_an_id.svg beside this file: python docs/pictures/life_of_an_id.py"""

from __future__ import annotations

import pathlib

import matplotlib
from matplotlib.figure import Figure

matplotlib.rcParams["svg.fonttype"] = "none"  # text stays text
matplotlib.rcParams["svg.hashsalt"] = "0"  # the same file each time

# Boxes by name: text, centre, and colour.
BOXES = {
    "id": ("id in a batch\n64 bits, or a string", (1.3, 4.2), "#ddeeff"),
    "has": ("has a row?", (4.2, 4.2), "#ffffff"),
    "admitted": ("admitted?\nenough sightings, draw", (4.2, 2.5), "#ffffff"),
    "reads": ("reads its row,\nwhich is trained", (8.0, 4.2), "#ddffdd"),
    "unknown": ("reads zeros,\na default row\nor a shared row", (1.3, 2.5), "#eeeeee"),
    "free": ("gets a free row", (8.0, 2.5), "#ddffdd"),
    "evicted": ("lowest in the\neviction policy", (8.0, 0.8), "#ffeedd"),
    "store": ("row store\nrow and optimizer state", (4.2, 0.8), "#ffeedd"),
}
# Arrows: from, to, text, and where the text stands beside their middle.
ARROWS = (
    ("id", "has", "", (0, 0)),
    ("has", "reads", "yes", (0, 0.14)),
    ("has", "admitted", "no", (0.2, 0)),
    ("admitted", "unknown", "no", (0, 0.14)),
    ("admitted", "free", "yes", (0, 0.14)),
    ("free", "reads", "first value by its id,\nor as it left", (0.95, 0)),
    ("evicted", "free", "its row, if\nnone is free", (0.7, 0)),
    ("evicted", "store", "with a store", (0, 0.14)),
    ("store", "free", "comes back", (-0.45, 0.2)),
)


def main() -> None:
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    axes.set_xlim(0, 9.9)
    axes.set_ylim(0.2, 4.8)
    axes.axis("off")
    boxes = {
        name: axes.text(*place, text, ha="center", va="center", fontsize=9, zorder=2,
                        bbox={"boxstyle": "round,pad=0.5", "facecolor": colour})
        for name, (text, place, colour) in BOXES.items()
    }  # fmt: skip
    for start, end, text, beside in ARROWS:
        first, last = BOXES[start][1], BOXES[end][1]
        axes.annotate(
            "", last, first,
            arrowprops={"arrowstyle": "->", "shrinkA": 0, "shrinkB": 5,
                        "patchA": boxes[start].get_bbox_patch(),
                        "patchB": boxes[end].get_bbox_patch()},
        )  # fmt: skip
        middle = [(a + b) / 2 + shift for a, b, shift in zip(first, last, beside, strict=True)]
        axes.text(*middle, text, ha="center", va="center", fontsize=8)
    path = pathlib.Path(__file__).with_suffix(".svg")
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()
