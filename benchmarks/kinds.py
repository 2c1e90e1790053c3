"""Measures the kinds of models of `jaxrec train` at their defaults, over several seeds.

Usage: python -m benchmarks.kinds WORK [--movielens DIR] [--beauty FILE] [--seeds 0 1 2]
           [--models mmoe ple two_tower sasrec bert4rec] [--output NAME]
Each data set becomes WORK/NAME.parquet, with a row for each interaction in the order of time:

movielens   MovieLens 100K, with the columns of users and movies. `liked` is four stars or more,
            `loved` five
beauty      lines "user item" in the order of each user's time, as published with BERT4Rec, of every
            fourth user; `previous` is the user's item before
generated   `jaxrec.data.GeneratedLog`, 300,000 rows, and 100,000 held out; one label

`mmoe` and `ple` predict the two labels of movielens and the one of generated; the last rows are
held out, a tenth of movielens. `two_tower`, `sasrec` and `bert4rec` learn from movielens and beauty
without their labels, and rank the last item of each user: `two_tower` among the items that the user
has not had, `sasrec` and `bert4rec` among all items, so that their values do not compare with its
values. Prints a JSON line for each run, with the processor seconds of the whole command, and for
each of these protocols a table of the means over the seeds. With --output it writes the lines to
NAME.json.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import tyro

from benchmarks.defaults import LABEL, generated, run
from jaxrec.data import movielens_movies, movielens_ratings, movielens_users

# Models whose values compare, by what is held out.
PROTOCOLS: Mapping[str, Sequence[str]] = {
    "Labels of held-out rows": ("mmoe", "ple"),
    "Last item of each user among those that the user has not had": ("two_tower",),
    "Last item of each user among all items": ("sasrec", "bert4rec"),
}
KINDS = tuple(model for models in PROTOCOLS.values() for model in models)
INTERACTIONS = ("--user", "user", "--time", "timestamp", "--item", "item")
MEASURES = ("auc", "log_loss", "recall@10", "ndcg@10", "mrr")
FACTS = ("steps", "best_step", "batch_size")
RANKED = ("--hold-out", "last", *INTERACTIONS)


@dataclasses.dataclass(frozen=True)
class Options:
    """The runs."""

    work: tyro.conf.Positional[pathlib.Path]
    """Directory of the files and of the runs."""
    movielens: pathlib.Path | None = None
    beauty: pathlib.Path | None = None
    generated_rows: int = 300_000
    """Number of rows of the generated log; 0: none."""
    seeds: tuple[int, ...] = (0, 1, 2)
    models: tuple[str, ...] = KINDS
    train: tuple[str, ...] = ()
    """More options of `jaxrec train`, to try others than the defaults."""
    output: pathlib.Path | None = None
    """File name without its ending."""


def movielens(path: pathlib.Path) -> pa.Table:
    """Return a row for each rating, with the columns of its user and its movie."""
    ratings = movielens_ratings(path).sort_by("timestamp")
    users, movies = movielens_users(path), movielens_movies(path)
    user = users.take(pc.index_in(ratings["user_id"], users["user_id"]))
    movie = movies.take(pc.index_in(ratings["movie_id"], movies["movie_id"]))
    columns = {
        "user": ratings["user_id"],
        "item": ratings["movie_id"],
        "timestamp": ratings["timestamp"],
        "liked": pc.greater_equal(ratings["rating"], 4),
        "loved": pc.equal(ratings["rating"], 5),
        "age": user["age"].cast(pa.float32()),
        **{name: user[name] for name in ("gender", "occupation")},
        **{name: movie[name] for name in ("genres", "year")},
    }
    return pa.table(columns)


def beauty(path: pathlib.Path) -> pa.Table:
    """Return a row for each item of every fourth user, and the user's item before."""
    users, items = np.loadtxt(path, dtype=np.int64).T
    kept = users % 4 == 0
    users, items = users[kept], items[kept]
    is_first = np.append(True, users[1:] != users[:-1])
    columns = {
        "user": users,
        "item": items,
        "timestamp": np.arange(len(users)),
        "previous": np.where(is_first, 0, np.roll(items, 1)),
    }
    return pa.table(columns)


# Options of `jaxrec train`, by data set and model.
RUNS: Mapping[str, Mapping[str, Sequence[str]]] = {
    "movielens": {
        **dict.fromkeys(
            ("mmoe", "ple"), ("--label", "liked", "loved", "--exclude", "timestamp")
        ),
        "two_tower": (
            *RANKED, "genres", "year", "--exclude", "timestamp", "liked", "loved",
        ),
        **dict.fromkeys(("sasrec", "bert4rec"), INTERACTIONS),
    },
    "beauty": {
        "two_tower": (*RANKED, "--exclude", "timestamp"),
        **dict.fromkeys(("sasrec", "bert4rec"), INTERACTIONS),
    },
    "generated": dict.fromkeys(("mmoe", "ple"), ("--label", LABEL)),
}  # fmt: skip


def train(
    options: Options, data: Iterable[Any], columns: Iterable[str], model: str, seed: int
) -> dict[str, Any]:
    """Run `jaxrec train`; return its held-out values, its steps and its processor seconds."""
    output = options.work / "run"
    shutil.rmtree(output, ignore_errors=True)
    common = ["--data", *data, "--model", model, "--seed", seed, "--output", output]
    command = [sys.executable, "-m", "jaxrec", "train", *common, *columns, *options.train]
    _, seconds = run(command)
    results = json.loads((output / "results.json").read_text())
    values = {x: results[x] for x in results if x.rpartition("/")[2] in (*MEASURES, *FACTS)}
    return {
        "model": model,
        "seed": seed,
        **values,
        "train": list(options.train),
        "processor_seconds": round(seconds, 1),
        "version": results["versions"]["jaxrec"],
    }


def main(options: Options) -> None:
    options.work.mkdir(parents=True, exist_ok=True)
    data: dict[str, list[Any]] = {}
    for read in (movielens, beauty):
        if (path := getattr(options, read.__name__)) is not None:
            file = options.work / f"{read.__name__}.parquet"
            pq.write_table(read(path), file)
            data[read.__name__] = [file]
    if options.generated_rows:
        table, held_out = generated(options.generated_rows)
        files = [options.work / f"generated_{name}.parquet" for name in ("train", "test")]
        middle = len(table) - held_out
        for part, file in zip((table[:middle], table[middle:]), files, strict=True):
            pq.write_table(part, file)
        data["generated"] = [files[0], "--hold-out-data", files[1]]
    lines = []
    for model in options.models:
        for name, paths in data.items():
            if (columns := RUNS[name].get(model)) is None:
                continue
            for seed in options.seeds:
                lines.append({"data": name, **train(options, paths, columns, model, seed)})
                print(json.dumps(lines[-1]), flush=True)
    for protocol, models in PROTOCOLS.items():
        if compared := [line for line in lines if line["model"] in models]:
            print(f"\n{protocol}:\n\n{as_table(compared)}")
    if options.output is not None:
        text = json.dumps(lines, indent=1)
        options.output.with_suffix(".json").write_text(text + "\n")


def as_table(lines: Iterable[dict[str, Any]]) -> str:
    """Return a table of means over the seeds, and the deviation from them."""
    runs: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for line in lines:
        runs.setdefault((line["model"], line["data"]), []).append(line)
    rows = ["| model | data | held out | steps | processor |", "|---|---|---|---|---|"]
    for (model, data), each in runs.items():
        shown = []
        for name in each[0]:
            if name.rpartition("/")[2] in MEASURES:
                values = np.array([x[name] for x in each])
                shown.append(f"{name} {values.mean():.4f} ± {values.std():.4f}")
        steps, seconds = (
            np.mean([x[name] for x in each]) for name in ("steps", "processor_seconds")
        )
        cells = [f"`{model}`", data, ", ".join(shown), f"{steps:,.0f}", f"{seconds:.0f} s"]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
