"""Draws sequence_tokens.svg beside this file: python docs/pictures/sequence_tokens.py"""

from __future__ import annotations

import pathlib

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

matplotlib.rcParams["svg.fonttype"] = "none"  # text stays text
matplotlib.rcParams["svg.hashsalt"] = "0"  # the same file each time

COLOURS = {"user": "#ddddee", "item": "#aaccee", "action": "#cceecc", "unknown": "#eeeeee"}
EVENTS, TARGETS = 3, 2
# The tokens of one row by form: each is a list of its parts, (kind, text).
CONTEXT = [[("user", "user")]]
HISTORY = [[("item", f"item {n + 1}"), ("action", f"actions {n + 1}")] for n in range(EVENTS)]
CANDIDATES = [[("item", f"candidate {n + 1}"), ("unknown", "unknown")] for n in range(TARGETS)]
FORMS = {
    'form="sum"': CONTEXT + HISTORY + CANDIDATES,
    'form="interleaved"': CONTEXT + [[part] for event in HISTORY + CANDIDATES for part in event],
}


def draw(axes: Axes, tokens: list[list[tuple[str, str]]], title: str, row: list[int]) -> None:
    for place, parts in enumerate(tokens):
        for height, (kind, text) in enumerate(reversed(parts)):
            axes.bar(place, 1, bottom=height, width=0.9, color=COLOURS[kind], edgecolor="k")
            axes.text(place, height + 0.5, text, ha="center", va="center", fontsize=8)
            if height:
                axes.text(place, height, "+", ha="center", va="center", fontsize=9,
                          bbox={"boxstyle": "circle,pad=0.1", "facecolor": "w"})  # fmt: skip
    start = 0
    for name, count in zip(("context", "history", "targets"), row, strict=True):
        ends = (start - 0.42, start + count - 0.58)
        axes.plot(ends, (-0.25, -0.25), color="k", linewidth=1)
        axes.text(sum(ends) / 2, -0.4, name, ha="center", va="top", fontsize=8)
        start += count
    axes.set_xlim(-0.6, 10.6)
    axes.set_ylim(-0.9, max(map(len, tokens)) + 0.1)
    axes.set_title(title, fontsize=9, loc="left")
    axes.axis("off")


def main() -> None:
    figure = Figure(figsize=(9, 3), layout="constrained")
    panels = figure.subplots(2, 1, height_ratios=(3, 2))
    for axes, (title, tokens) in zip(panels, FORMS.items(), strict=True):
        per_event = (len(tokens) - len(CONTEXT)) // (EVENTS + TARGETS)
        row = [len(CONTEXT), EVENTS * per_event, TARGETS * per_event]
        draw(axes, tokens, title, row)
    path = pathlib.Path(__file__).with_suffix(".svg")
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()
