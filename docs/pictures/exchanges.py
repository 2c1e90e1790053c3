"""Draws exchanges.svg from `Exchange.traffic`: python docs/pictures/exchanges.py"""

from __future__ import annotations

import pathlib

import matplotlib
from matplotlib.figure import Figure

from jaxrec.mesh.exchange import EXCHANGES
from jaxrec.mesh.exchange.base import Workload

matplotlib.rcParams["svg.fonttype"] = "none"  # text stays text
matplotlib.rcParams["svg.hashsalt"] = "0"  # the same file each time

DEVICES, BAGS, DIM = 8, 1024, 64  # one feature; a device has 1,024 samples
LENGTHS = (1, 2, 5, 10, 20, 50, 100)
STYLES = {"rows": "-", "pooled": "--", "bags": "-.", "replicated": ":"}


def megabytes(name: str, length: int, distinct: float = 1.0) -> float:
    """Return what a device sends in a step; ``distinct`` is the share of ids without repeats."""
    lookups = BAGS * length
    per_owner = round(lookups * (distinct if name == "rows" else 1) / DEVICES)
    work = Workload(DEVICES, DIM, lookups, BAGS, per_owner, lookups // DEVICES, BAGS // DEVICES)
    return sum(EXCHANGES[name].traffic(work).values()) / 1e6


def main() -> None:
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for name, style in STYLES.items():
        axes.plot(LENGTHS, [megabytes(name, length) for length in LENGTHS], style, label=name)
    skewed = [megabytes("rows", length, distinct=0.2) for length in LENGTHS]
    axes.plot(LENGTHS, skewed, "-", color="C0", alpha=0.5, label="rows, of 5 ids 1 distinct")
    axes.set(
        xscale="log", yscale="log", xlabel="ids in a bag", ylabel="MB a device sends in a step"
    )
    axes.set_xticks(LENGTHS, labels=map(str, LENGTHS))
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize=9)
    figure.savefig(pathlib.Path(__file__).with_suffix(".svg"), metadata={"Date": None})


if __name__ == "__main__":
    main()
