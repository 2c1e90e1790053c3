"""Draws sequence_mask.svg beside this file: python docs/pictures/sequence_mask.py"""

from __future__ import annotations

import pathlib

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from jaxrec.nn.attention_mask import key_intervals, make_mask

matplotlib.rcParams["svg.fonttype"] = "none"  # text stays text
matplotlib.rcParams["svg.hashsalt"] = "0"  # the same file each time

# Kinds of the keys of one row: first letter of their labels, number, and colour.
KINDS = {
    "context": ("c", 2, "#ddddee"),
    "history": ("h", 6, "#aaccee"),
    "targets": ("t", 4, "#ffcc99"),
}
DEFAULTS = {
    "causal": True,
    "contextual_length": 0,
    "max_attention_length": 0,
    "min_full_attention_length": 0,
    "target_group_size": 1,
}
# The panels: title, and the arguments of `hstu_attention` beside num_targets=4.
PANELS = (
    ("num_targets=4", {}),
    ("contextual_length=2", {"contextual_length": 2}),
    (
        "contextual_length=2,\nmax_attention_length=2",
        {"contextual_length": 2, "max_attention_length": 2},
    ),
    ("target_group_size=2", {"target_group_size": 2}),
)


def visible(arguments: dict[str, int]) -> np.ndarray:
    """Return which key each query sees, ``[queries, keys]``, by the package's own mask."""
    size = sum(count for _, count, _ in KINDS.values())
    lengths, targets = np.array([size]), np.array([KINDS["targets"][1]])
    mask = make_mask(lengths, num_targets=targets, **(DEFAULTS | arguments))
    return np.asarray(key_intervals(mask, lengths, size).see(np.arange(size, dtype=np.int32)))


def main() -> None:
    figure = Figure(figsize=(11, 3.5), layout="constrained")
    names = [f"{letter}{n + 1}" for letter, count, _ in KINDS.values() for n in range(count)]
    places = np.arange(len(names)) + 0.5
    lines = np.arange(len(names) + 1)
    for axes, (title, arguments) in zip(figure.subplots(1, len(PANELS)), PANELS, strict=True):
        start = 0
        for _, count, colour in KINDS.values():
            # The keys of one kind that a query sees are consecutive: one bar.
            seen = visible(arguments)[:, start : start + count]
            left, width = start + seen.argmax(1), seen.sum(1)
            axes.barh(places, width, left=left, height=1, color=colour, linewidth=0)
            start += count
        axes.hlines(lines, 0, start, color="#888888", linewidth=0.5)
        axes.vlines(lines, 0, start, color="#888888", linewidth=0.5)
        axes.set_xlim(0, start)
        axes.set_ylim(start, 0)
        axes.set_xticks(places, labels=names, fontsize=7)
        axes.set_yticks(places, labels=names, fontsize=7)
        axes.set_aspect("equal")
        axes.tick_params(length=0)
        axes.set_xlabel("key", fontsize=8)
        axes.set_title(title, fontsize=9)
    figure.axes[0].set_ylabel("query", fontsize=8)
    patches = [Patch(facecolor=colour, edgecolor="#888888") for _, _, colour in KINDS.values()]
    labels = [f"sees {name}" for name in KINDS]
    figure.legend(patches, labels, loc="outside lower center", ncols=len(KINDS), fontsize=8)
    path = pathlib.Path(__file__).with_suffix(".svg")
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()
