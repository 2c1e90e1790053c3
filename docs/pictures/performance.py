"""Draws performance.svg from the results of benchmarks: python docs/pictures/performance.py"""

from __future__ import annotations

import pathlib
import sys

import matplotlib
from matplotlib.figure import Figure

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks import report  # noqa: E402

matplotlib.rcParams["svg.fonttype"] = "none"  # text stays text
matplotlib.rcParams["svg.hashsalt"] = "0"  # the same file each time


def main() -> None:
    _, _, *lines = report.summary()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    figure = Figure(figsize=(8, 3.4), layout="constrained")
    axes = figure.subplots()
    for place, (what, peer, *ratios, _) in enumerate(reversed(rows)):
        median, least, greatest = map(float, ratios)
        axes.barh(place, median, height=0.6, color="#8fb8de")
        axes.plot([least, greatest], [place, place], color="#24476b", linewidth=2)
        label = f"{what} / {peer.strip('`')}"
        axes.text(-0.015, place, label, ha="right", va="center", fontsize=9)
        axes.text(greatest + 0.015, place, f"{median:.2f}", va="center", fontsize=9)
    axes.axvline(1, color="black", linewidth=1)
    axes.text(1, len(rows) - 0.35, "equal", ha="center", fontsize=9)
    axes.set_xlim(0, 1.08)
    axes.set_ylim(-0.6, len(rows) - 0.1)
    axes.set_yticks([])
    axes.set_xlabel(
        "time of jaxrec / time of the other; the line is from the least to the greatest"
    )
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    figure.savefig(pathlib.Path(__file__).with_suffix(".svg"), metadata={"Date": None})


if __name__ == "__main__":
    main()
