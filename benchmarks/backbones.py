"""Compares the networks of click models on the same rows: AUC, log loss, parameters, step time.

Usage: python -m benchmarks.backbones WORK [--movielens DIR] [--criteo FILE] [--seeds 0 1 2]
           [--models dlrm wukong ...] [--scaling] [--output NAME]

Each model of `jaxrec train` that predicts one label is trained with the command's default options,
but for --batch-size and --epochs, in this process. One compiled step serves all seeds, which make
first values and the order of rows. Data sets are those of `benchmarks.defaults`: the generated log,
MovieLens in the order of time and a sample of Criteo's log. The models of histories are trained on
MovieLens, where each row also has the last twenty films that its user liked before.

Prints a JSON line for each run, and a table of the means over the seeds: parameters are those of
dense layers, and times the processor milliseconds of a training step, all threads together, without
reading and without compiling. With --scaling it trains DLRM and Wukong in growing sizes on the
generated log instead, and draws the normalized entropy over the parameters. With --output it writes
NAME.json, and NAME.png with --scaling. Runs of other models, data sets and seeds stay in NAME.json.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import pathlib
import time
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
import optax
import pyarrow as pa
import pyarrow.parquet as pq
import tyro
from flax import nnx
from rich.console import Console

import jaxrec
from benchmarks.defaults import LABEL, criteo, generated, movielens, write
from jaxrec.data import Shard
from jaxrec.train import compile_step
from jaxrec.train.config import parse_options
from jaxrec.train.models import KINDS, default_config
from jaxrec.train.models.kind import HeldOutBatches, ModelKind
from jaxrec.train.models.wukong import WukongKind
from jaxrec.train.run_size import with_sizes

ROWS = ("dlrm", "dcn_v2", "deepfm", "wukong", "rankmixer", "masknet", "finalmlp", "gdcn", "pepnet")
HISTORIES = ("din", "transact", "longer", "onetrans")
KEYS = ("data", "model", "seed")  # of a run
SCALES = (1, 2, 4, 8)


@dataclasses.dataclass(frozen=True)
class Options:
    """The runs."""

    work: tyro.conf.Positional[pathlib.Path]
    """Directory of the files."""
    movielens: pathlib.Path | None = None
    criteo: pathlib.Path | None = None
    seeds: tuple[int, ...] = (0, 1, 2)
    models: tuple[str, ...] = (*ROWS, *HISTORIES)
    generated_rows: int = 300_000
    """Training rows of the generated log; a third as many are held out. 0: leave the log out."""
    batch_size: int = 0
    """Samples of a step; 0: they follow from the number of rows, as for the command."""
    epochs: int = 0
    """0: they follow from the rows."""
    scaling: bool = False
    """Whether to train DLRM and Wukong in growing sizes instead."""
    output: pathlib.Path | None = None
    """File name without its ending."""

    @property
    def words(self) -> list[str]:
        """The options as those of `jaxrec train`."""
        return [f"--batch-size={self.batch_size}", f"--epochs={self.epochs}"]


def with_history(table: pa.Table, length: int = 20) -> pa.Table:
    """Add the films that the user of each row liked before, the last ones; rows are in time."""
    histories: list[list[Any]] = []
    before: dict[Any, list[Any]] = {}
    columns = (table[name].to_pylist() for name in ("user", "movie", LABEL))
    for user, movie, likes in zip(*columns, strict=True):
        films = before.setdefault(user, [])
        histories.append(films[-length:])
        if likes:
            films.append(movie)
    return table.append_column("history", pa.array(histories, pa.list_(pa.int64())))


def kind_of(folder: pathlib.Path, name: str, words: Iterable[str] = ()) -> ModelKind:
    """Return a model of `jaxrec train` for a data set, with the command's default sizes."""
    columns = pq.read_schema(folder / "train.parquet").names
    if name in HISTORIES:
        words = [*words, "--history=history", "--item=movie"]
    elif "history" in columns:
        words = [*words, "--exclude=history"]
    paths = [f"--data={folder / 'train.parquet'}", f"--data.eval-path={folder / 'test.parquet'}"]
    config = parse_options(
        [*paths, f"--label={LABEL}", f"--model={name}", *words], default_config(name)
    )
    kind = KINDS[name](config, KINDS[name].learn(config, Console(quiet=True)))
    rows = pq.read_metadata(folder / "train.parquet").num_rows
    return dataclasses.replace(kind, config=with_sizes(config, rows, 1, kind.epochs))


def runs(kind: ModelKind, seeds: Iterable[int]) -> Iterable[dict[str, Any]]:
    """Train and evaluate a kind of model with each seed; yield the values."""
    data = kind.config.data
    rows, held_out = kind.datasets(Shard())
    steps = data.epochs * rows.num_batches(data.batch_size)
    rate = optax.linear_schedule(kind.config.optimizer.learning_rate, 0.0, steps)

    def make(seed: int) -> tuple[nnx.Module, nnx.Module]:
        model = kind.make(steps, nnx.Rngs(seed))
        return model, jaxrec.Optimizer(model, optax.adam(rate))

    def train_step(model: Any, optimizer: Any, batch: Any) -> jax.Array:
        (loss, _), gradients = jaxrec.value_and_grad(
            lambda model: kind.loss(model, batch), has_aux=True
        )(model)
        optimizer.update(model, gradients)
        return loss

    model, optimizer = make(0)
    step = compile_step(train_step, model, optimizer)
    evaluation = HeldOutBatches(model, held_out, data.batch_size)
    # Compiles; the first values come after. The second call takes the first one's arrays.
    for batch in itertools.islice(rows.batches(data.batch_size), 2):
        jax.block_until_ready(step(batch))
    for seed in seeds:
        for one, other in zip((model, optimizer), make(seed), strict=True):
            # Arrays alone: each model has schedules of its own, and others need another program.
            kept = jax.tree.structure(nnx.state(one))
            nnx.update(one, jax.tree.unflatten(kept, jax.tree.leaves(nnx.state(other))))
        model.train()
        of_seed = dataclasses.replace(kind, config=dataclasses.replace(kind.config, seed=seed))
        rows, _ = of_seed.datasets(Shard())
        seconds = 0.0
        for epoch in range(data.epochs):
            for batch in rows.batches(data.batch_size, epoch=epoch):
                begun = time.process_time()
                jax.block_until_ready(step(batch))
                seconds += time.process_time() - begun
        model.eval()
        values = kind.evaluate(evaluation)
        yield {
            "seed": seed,
            **{x: round(values[x], 5) for x in ("auc", "log_loss", "normalized_entropy")},
            "parameters": sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param))),
            "step_ms": round(1e3 * seconds / steps, 2),
            "steps": steps,
            "batch_size": data.batch_size,
        }


def compare(options: Options) -> Iterable[dict[str, Any]]:
    """Train each model on each data set that it can take."""
    sets: dict[str, tuple[pa.Table, int]] = {}
    if options.criteo is not None:
        sets["criteo"] = criteo(options.criteo)
    if options.movielens is not None:
        table, held_out = movielens(options.movielens)
        sets["movielens"] = with_history(table), held_out
    if options.generated_rows:
        sets["generated"] = generated(options.generated_rows)
    for name, (table, held_out) in sets.items():
        write(options.work / name, table, held_out)
        for model in options.models:
            if model in HISTORIES and "history" not in table.column_names:
                continue
            gates = ["--user=user", "--item=movie"] if name == "movielens" else []
            words = [*options.words, *(gates if model in ("finalmlp", "pepnet") else [])]
            for values in runs(kind_of(options.work / name, model, words), options.seeds):
                yield {"data": name, "model": model, "rows": len(table) - held_out, **values}


def scale(options: Options) -> Iterable[dict[str, Any]]:
    """Train DLRM and Wukong in growing sizes on the generated log."""
    table, held_out = generated(options.generated_rows)
    folder = options.work / "generated"
    write(folder, table, held_out)
    for factor in SCALES:
        sizes = [str(32 * factor), str(16 * factor)]
        words = [
            *options.words,
            "--model.bottom-layer-sizes",
            *sizes,
            "--model.top-layer-sizes",
            *sizes,
        ]
        wukong = kind_of(folder, "wukong", [*words, "--model.cross-layers=2"])
        grown = type("Grown", (WukongKind,), {"width": 2 * factor})
        dlrm = kind_of(folder, "dlrm", words)
        for name, kind in (("dlrm", dlrm), ("wukong", grown(wukong.config, wukong.encoder))):
            for values in runs(kind, options.seeds):
                model = f"{name} x{factor}"
                yield {"data": "generated", "model": model, "rows": len(table) - held_out, **values}


def draw(lines: Iterable[dict[str, Any]], path: pathlib.Path) -> None:
    """Draw the normalized entropy over the parameters, and each seed's as a point."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    for color, name in enumerate(("dlrm", "wukong")):
        of_model = [x for x in lines if x["model"].startswith(name)]
        sizes = sorted({x["parameters"] for x in of_model})
        by_size = [[x["normalized_entropy"] for x in of_model if x["parameters"] == size]
                   for size in sizes]  # fmt: skip
        axes.plot(sizes, [np.mean(x) for x in by_size], f"C{color}o-", label=name)
        for size, values in zip(sizes, by_size, strict=True):
            axes.plot([size] * len(values), values, f"C{color}_")
    axes.set(xscale="log", xlabel="parameters of dense layers", ylabel="normalized entropy")
    axes.legend()
    figure.savefig(path, dpi=120)


def as_table(lines: Iterable[dict[str, Any]]) -> str:
    """Return a table of means over the seeds, and the deviation from them."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for line in lines:
        groups.setdefault((line["data"], line["model"]), []).append(line)
    rows = ["| data | model | AUC | log loss | parameters | step |", "|---|---|---|---|---|---|"]
    for (data, model), each in groups.items():
        means = [np.array([x[name] for x in each]) for name in ("auc", "log_loss")]
        cells = [f"{x.mean():.4f} ± {x.std():.4f}" for x in means]
        milliseconds = np.median([x["step_ms"] for x in each])
        size = f"{each[0]['parameters']:,}"
        cells += [size, f"{milliseconds:.1f} ms"]
        rows.append(f"| {data} | `{model}` | {' | '.join(cells)} |")

    return "\n".join(rows)


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    path = None if options.output is None else options.output.with_suffix(".json")
    known = json.loads(path.read_text()) if path is not None and path.exists() else []
    lines = {tuple(x[key] for key in KEYS): x for x in known}
    for line in (scale if options.scaling else compare)(options):
        lines[tuple(line[key] for key in KEYS)] = line
        print(json.dumps(line), flush=True)
        if path is not None:
            text = ",\n".join(json.dumps(x) for x in lines.values())
            path.write_text(f"[\n{text}\n]\n")
    print(as_table(lines.values()))
    if options.scaling and options.output is not None:
        draw(list(lines.values()), options.output.with_suffix(".png"))


if __name__ == "__main__":
    main()
