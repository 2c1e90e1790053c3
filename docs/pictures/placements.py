"""Draws placements.svg from the shards of each placement: python docs/pictures/placements.py"""

from __future__ import annotations

import pathlib

import matplotlib
from matplotlib.figure import Figure

import jaxrec
from jaxrec.mesh.shards import MeshShape

matplotlib.rcParams["svg.fonttype"] = "none"  # text stays text
matplotlib.rcParams["svg.hashsalt"] = "0"  # the same file each time

MESH = MeshShape(hosts=2, devices_per_host=4)
TABLE = jaxrec.EmbeddingBagConfig("table", num_embeddings=16, embedding_dim=16)
PLACEMENTS = {
    "data_parallel()": jaxrec.mesh.data_parallel(),
    "table_wise(device=3)": jaxrec.mesh.table_wise(device=3),
    "row_wise()": jaxrec.mesh.row_wise(),
    "column_wise(devices=(0, 1))": jaxrec.mesh.column_wise(devices=(0, 1)),
    "table_row_wise(host=0)": jaxrec.mesh.table_row_wise(host=0),
    "table_column_wise(host=1)": jaxrec.mesh.table_column_wise(host=1),
    "grid(hosts=(0, 1))": jaxrec.mesh.grid(hosts=(0, 1)),
}
BLUES = ("#c6dbef", "#9ecae1", "#6baed6", "#4292c6")
ORANGES = ("#fdd0a2", "#fdae6b", "#fd8d3c", "#e6732e")


def main() -> None:
    figure = Figure(figsize=(9, 4.8), layout="constrained")
    every = figure.subplots(2, 4)
    for axes, (name, placement) in zip(every.flat, PLACEMENTS.items(), strict=False):
        for shard in placement.cut(TABLE, MESH):
            (top, bottom), (left, right), device = shard.rows, shard.columns, shard.device
            is_everywhere = placement == jaxrec.mesh.data_parallel()
            colour = "#dddddd" if is_everywhere else (BLUES + ORANGES)[device]
            text = "all devices" if is_everywhere else str(device)
            size = {"width": right - left, "height": bottom - top}
            axes.add_patch(
                matplotlib.patches.Rectangle((left, top), facecolor=colour, edgecolor="k", **size)
            )
            axes.text((left + right) / 2, (top + bottom) / 2, text, ha="center", va="center")
        axes.set_title(name, fontsize=9)
        axes.set_xlabel("columns", fontsize=8)
        axes.set_ylabel("rows", fontsize=8)
    for axes in every.flat:
        axes.set(xlim=(0, 16), ylim=(16, 0), xticks=[], yticks=[], aspect="equal")
    legend = every.flat[-1]
    legend.axis("off")
    text = "number: the owner of the shard\nblue: devices of host 0\norange: devices of host 1"
    legend.text(0, 8, text, fontsize=9, va="center")
    figure.savefig(pathlib.Path(__file__).with_suffix(".svg"), metadata={"Date": None})


if __name__ == "__main__":
    main()
