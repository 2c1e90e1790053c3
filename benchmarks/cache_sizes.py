"""Step time by the share of a table's rows that are on the device.

See `benchmarks.tier`, whose command ``sizes`` this is.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import statistics
import tempfile
from typing import Any

import numpy as np

import jaxrec
from benchmarks.cache_step import Cache
from benchmarks.vocabulary_step import Model, Run, quantiles
from jaxrec.data import Pipeline
from jaxrec.train import put_batch


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Step time with caches of several sizes over that of whole tables."""

    batch: int = 512
    """Samples of a step."""
    features: int = 8
    """Features, each with a table."""
    bag: int = 10
    """Ids of a sample, for each feature."""
    rows: int = 400_000
    """Rows of a table."""
    dim: int = 64
    """Columns of a table."""
    exponent: float = 1.05
    """The i-th most frequent id is drawn with a probability proportional to i**-exponent."""
    shares: tuple[float, ...] = (0.05, 0.1, 0.2, 0.4)
    """Shares of the rows that are on the device."""
    stores: tuple[str, ...] = ("memory", "file")
    """Stores of the other rows."""
    steps: int = 20
    """Steps of a round."""
    warm_up: int = 400
    """Steps before, in which the caches fill."""
    rounds: int = 5
    """Rounds, in which the models take turns."""
    output: pathlib.Path | None = None
    """File name without its ending, for OUTPUT.json and the picture OUTPUT.png."""

    def run(self) -> None:
        jaxrec.keep_freed_memory()
        lines = [line for share in self.shares for line in self.measure(share)]
        if self.output is not None:
            settings = dataclasses.asdict(self) | {"output": self.output.name}
            text = json.dumps({"settings": settings, "lines": lines}, indent=1)
            self.output.with_suffix(".json").write_text(text + "\n")
            draw(self, lines, self.output.with_suffix(".png"))

    def measure(self, share: float) -> list[dict[str, Any]]:
        """Return figures of each store with a share of the rows on the device."""
        cache = Cache(
            batch=self.batch, features=self.features, bag=self.bag, rows=self.rows,
            dim=self.dim, exponent=self.exponent, cached=share,
            distinct=self.warm_up + self.rounds * self.steps,
        )  # fmt: skip
        with tempfile.TemporaryDirectory() as directory:
            batches = Pipeline(cache.batches(), put_batch, ahead=4)
            runs = {"whole": Run(Model(cache), batches)}
            runs |= {store: cache.cached_run(store, directory) for store in self.stores}
            for run in runs.values():
                run.train(self.warm_up)
            before = {store: _totals(runs[store]) for store in self.stores}
            times: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
            for _ in range(self.rounds):
                for name, run in runs.items():
                    times[name].append(run.train(self.steps))
            lines = []
            for store in self.stores:
                counts = _totals(runs[store])
                hits, lookups = (counts[x] - before[store][x] for x in ("hits", "lookups"))
                wall, processor = (
                    1e3 * statistics.median(each) for each in zip(*times[store], strict=True)
                )
                ratios = np.transpose(np.array(times[store]) / np.array(times["whole"]))
                line = {"share": share, "store": store, "hit_rate": round(hits / lookups, 4)}
                line |= {"step_ms": round(wall, 2), "processor_ms": round(processor, 2)}
                line |= {"ratio": quantiles(ratios[0]), "processor_ratio": quantiles(ratios[1])}
                line["stall_ms"] = round(counts["stall_ms"], 2)
                lines.append(line)
                print(json.dumps(line), flush=True)
            for run in runs.values():
                run.batches.close()
                jaxrec.tier.close(run.model)
        return lines


def _totals(run: Run) -> dict[str, float]:
    from jaxrec.tier.model_statistics import totals

    return totals(run.model)


def draw(sizes: Sizes, lines: list[dict[str, Any]], path: pathlib.Path) -> None:
    """Draw the ratio of step times and the hit rate by the share of the rows."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 5), layout="constrained")
    ratio, hits = figure.subplots(2, sharex=True, height_ratios=(3, 1))
    for store in sizes.stores:
        of_store = [line for line in lines if line["store"] == store]
        shares = [100 * line["share"] for line in of_store]
        (curve,) = ratio.plot(
            shares, [line["ratio"]["median"] for line in of_store], "o-", label=store
        )
        ratio.plot(
            shares,
            [line["processor_ratio"]["median"] for line in of_store],
            "o:",
            color=curve.get_color(),
            label=f"{store}, processor time",
        )
    of_store = [line for line in lines if line["store"] == sizes.stores[0]]
    hits.plot(
        [100 * line["share"] for line in of_store],
        [100 * line["hit_rate"] for line in of_store],
        "ko-",
    )
    ratio.axhline(1, color="k", linestyle="--", label="whole tables")
    ratio.set_ylabel("time of a step over that of whole tables")
    ratio.set_ylim(0)
    ratio.set_title(
        f"{sizes.features} tables of {sizes.rows:,} x {sizes.dim}, "
        f"{sizes.batch * sizes.bag:,} lookups each, power law {sizes.exponent}"
    )
    ratio.legend()
    hits.set_ylabel("hits (%)")
    hits.set_ylim(0, 100)
    hits.set_xlabel("rows on the device (%)")
    hits.set_xscale("log")
    hits.set_xticks([100 * share for share in sizes.shares])
    hits.set_xticklabels([f"{100 * share:g}" for share in sizes.shares])
    hits.minorticks_off()
    figure.savefig(path, dpi=100)
