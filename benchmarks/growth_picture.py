"""The picture of `benchmarks.growth`."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

AXES = {
    "batch": "samples of a batch",
    "bag": "ids of a bag",
    "tables": "tables of 10,000 x 16",
    "rows": "rows of a table",
    "devices": "simulated devices on the same cores",
}


def draw(parts: Mapping[str, Sequence[Mapping[str, Any]]], path: pathlib.Path) -> None:
    """Draw the step times of each part with the bounds, and the times of separate tables."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 8), layout="constrained")
    panels = figure.subplots(2, 3).flat
    for part, label in AXES.items():
        axes = next(panels)
        for curve, points in by_curve(parts.get(part, ())).items():
            sizes = [point[part] for point in points]
            (line,) = axes.plot(sizes, [point["step_ms"] for point in points], "o-", label=curve)
            if not curve.startswith(("separate", "nnx")):
                bounds = [point["bound_ms"] for point in points]
                axes.plot(sizes, bounds, "--", color=line.get_color(), linewidth=1)
        axes.set(xscale="log", yscale="log", xlabel=label, ylabel="ms a step")
        axes.plot([], [], "k--", linewidth=1, label="bound of memory")
        if part == "devices":
            axes.set_ylim(5)
        axes.legend(fontsize="small", loc="lower right" if part in ("rows", "devices") else "best")
    axes = next(panels)
    curves = by_curve(parts.get("tables", ()))
    fused = {point["tables"]: point["step_ms"] for point in curves.pop("fused", [])}
    for number, (curve, points) in enumerate(curves.items(), 1):
        shared = [point for point in points if point["tables"] in fused]
        ratios = [point["step_ms"] / fused[point["tables"]] for point in shared]
        axes.plot([point["tables"] for point in shared], ratios, "o-", color=f"C{number}",
                  label=curve)  # fmt: skip
    axes.axhline(1, color="k", linewidth=1)
    axes.set(xscale="log", ylim=(0, None), xlabel=AXES["tables"], ylabel="time / fused")
    if curves:
        axes.legend(fontsize="small")
    figure.savefig(path, dpi=90)


def by_curve(points: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Return the points of each curve."""
    curves: dict[str, list[Mapping[str, Any]]] = {}
    for point in points:
        curves.setdefault(point["curve"], []).append(point)
    return curves
