"""Measures what quantized and pruned tables cost in quality, on the generated click log.

Usage: python -m benchmarks.quantized_quality [--seeds 0 1 2] [--runs DIR] [--output NAME]
Trains a DLRM by ``jaxrec train`` for each seed, or takes the run DIR/SEED if it is
there, quantizes it in each way, and compares both models on the held-out rows. Prints a JSON line
for each seed and way: the bytes of the tables over those of float32, the largest relative error
(root mean square) of a table, and NE and AUC before and after. With --output it also writes
NAME.json and the picture NAME.png.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import tyro

# All that the defaults, which may change, would decide.
OPTIONS = (
    "--model=dlrm",
    "--batch-size=2048",
    "--epochs=1",
    "--lr=0.004",
    "--optimizer.table-learning-rate=0.1",
)


@dataclasses.dataclass(frozen=True)
class Options:
    """The runs.

    Attributes:
        seeds: A run for each; the seed makes the model and the log.
        runs: Directory of the runs.
        rows: Training rows.
        eval_rows: Held-out rows.
        share: Share of the rows of every table that pruning takes.
        output: File name without its ending, for the figures and the picture.
    """

    seeds: tuple[int, ...] = (0, 1, 2)
    runs: pathlib.Path = pathlib.Path("runs")
    rows: int = 5_000_000
    eval_rows: int = 200_000
    share: float = 0.3
    output: pathlib.Path | None = None


def main(options: Options) -> None:
    lines = []
    for seed in options.seeds:
        for line in compare(options, seed):
            print(json.dumps(line), flush=True)
            lines.append(line)
    if options.output is not None:
        text = "[\n" + ",\n".join(map(json.dumps, lines)) + "\n]\n"
        options.output.with_suffix(".json").write_text(text)
        try:
            draw(lines, options.output.with_suffix(".png"))
        except ModuleNotFoundError as error:
            print(f"no picture: {error}; pip install '.[plot]'")


def compare(options: Options, seed: int) -> Iterator[dict[str, Any]]:
    """Yield the figures of each way to make the tables of a run smaller."""
    from jaxrec.commands import main as jaxrec
    from jaxrec.serve import by_frequency, by_norm, count_ids, quality, quantize
    from jaxrec.train import load_model
    from jaxrec.train.config import load_config
    from jaxrec.train.datasets import split_datasets
    from jaxrec.train.model import predict

    run = options.runs / str(seed)
    if not run.exists():
        sizes = ["--data.generated-rows", options.rows, "--data.generated-eval-rows",
                 options.eval_rows]  # fmt: skip
        words = [*map(str, sizes), *OPTIONS, "--seed", str(seed), "--output", str(run)]
        if code := jaxrec(["train", *words]):
            raise SystemExit(code)
    config = load_config(run / "config.yaml")
    rows, held_out = split_datasets(config)
    batches = list(held_out.batches(config.data.batch_size))
    model = load_model(run)
    counts = count_ids(model, (each.features for each in rows.batches(config.data.batch_size)))
    share = options.share
    norms = {name: by_norm(share=share) for name in counts}
    uses = {name: by_frequency(each, share=share) for name, each in counts.items()}
    ways: dict[str, Callable[[], Any]] = {
        dtype: lambda dtype=dtype: quantize(model, dtype)
        for dtype in ("float16", "float8", "int8", "int4", "int2")
    } | {
        f"float32, {share:.0%} pruned by norm": lambda: quantize(model, "float32", prune=norms),
        f"float32, {share:.0%} pruned by frequency": lambda: quantize(model, "float32", prune=uses),
    }
    for way, make in ways.items():
        report = quality(
            model,
            make(),
            batches,
            predict=lambda model, batch: (predict(model, batch), batch.labels, batch.weights),
        )
        assert report.before is not None
        assert report.after is not None
        assert report.entropy_change is not None
        yield {
            "seed": seed,
            "way": way,
            "bytes": round(report.bytes_after / report.bytes_before, 4),
            "rms_error_percent": round(
                100 * max(table.relative_rms_error for table in report.tables), 4
            ),
            "ne_before": round(report.before.normalized_entropy, 7),
            "ne_after": round(report.after.normalized_entropy, 7),
            "ne_change_percent": round(100 * report.entropy_change, 5),
            "auc_before": round(report.before.auc, 7),
            "auc_after": round(report.after.auc, 7),
        }


def draw(lines: list[dict[str, Any]], path: pathlib.Path) -> None:
    """Draw the change of NE over the size of the tables, a point for each seed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    points = defaultdict(list)
    for line in lines:
        points[line["way"]].append((line["bytes"], line["ne_change_percent"]))
    for way, of_way in points.items():
        sizes, changes = zip(*of_way, strict=True)
        axes.plot(sizes, changes, "o", markersize=5, label=way)
    axes.set_yscale("symlog", linthresh=1e-3)
    axes.axhline(0, color="0.7", linewidth=0.8)
    axes.set(xlabel="bytes of the tables / float32", ylabel="change of NE (%), higher is worse")
    axes.set_xlim(0, None)
    axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1.01, 0.5))
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
