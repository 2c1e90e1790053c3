"""Draws pipeline.svg: python docs/pictures/pipeline.py"""

from __future__ import annotations

import pathlib

import matplotlib
from matplotlib.figure import Figure

matplotlib.rcParams["svg.fonttype"] = "none"  # text stays text
matplotlib.rcParams["svg.hashsalt"] = "0"  # the same file each time

# What each thread does with batch n, by its place: (batch, first tenth of a step, tenths, text).
LANES = {
    "reading thread": [(n + 2, 10 * n + 1, 7, "read and pack {}") for n in range(3)],
    "placing thread": [(n + 1, 10 * n + 2, 4, "transfer {}") for n in range(3)],
    "training loop": [(n, 10 * n, 1.2, "{}") for n in range(3)],
    "devices": [(n, 10 * n + 0.6, 9.4, "step of batch {}") for n in range(3)],
}
COLOURS = dict(zip(LANES, ("#eeeeee", "#ffeedd", "#ffdddd", "#ddffdd"), strict=True))


def main() -> None:
    figure = Figure(figsize=(9, 2.6), layout="constrained")
    axes = figure.subplots()
    for place, (name, works) in enumerate(LANES.items()):
        height = len(LANES) - place
        for batch, start, width, text in works:
            axes.barh(height, width, left=start, height=0.7, color=COLOURS[name], edgecolor="k")
            label = text.format(batch)
            axes.text(start + width / 2, height, label, ha="center", va="center", fontsize=8)
    axes.set_yticks([len(LANES) - place for place in range(len(LANES))], labels=list(LANES))
    axes.set_xticks([10 * n for n in range(4)], labels=[f"{n} steps" for n in range(4)])
    axes.set_xlim(0, 30.2)
    axes.tick_params(length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    figure.savefig(pathlib.Path(__file__).with_suffix(".svg"), metadata={"Date": None})


if __name__ == "__main__":
    main()
