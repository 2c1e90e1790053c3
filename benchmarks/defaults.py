"""Compares the default run of `jaxrec train` with other programs' on the same rows and columns.

Usage: python -m benchmarks.defaults WORK [--movielens DIR] [--criteo FILE] [--beauty FILE]
           [--trees PYTHON] [--torchrec PYTHON] [--seeds 0 1 2] [--models dlrm] [--output NAME]
Each data set becomes WORK/NAME/train.parquet and test.parquet with the column "label":

movielens   ratings of MovieLens in the order of time, label: four stars or more; the last tenth is
            held out
criteo      Criteo's display-advertising log as CSV with a header, rows in its order; the last fifth
            is held out
beauty      lines "user item" in the order of each user's time, as published with BERT4Rec, of every
            fourth user: did the user take the item, or is it a random one? The last item of each
            user, and a random one, are held out
generated   `jaxrec.data.GeneratedLog`, 300,000 rows, and 100,000 held out

Only data sets with a path are taken, and the generated one. Held-out rows decide nothing: not when
training stops, nor which model stays. PYTHON is the interpreter of an environment for
`peer_trees.py` or `peer_torchrec_run.py`. Prints a JSON line for each run, with the processor
seconds of the whole command for jaxrec and of training and prediction for the others, and a table
of the means over the seeds. With --output it writes the lines to NAME.json.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq
import tyro

from jaxrec.data import GeneratedLog, movielens_movies, movielens_ratings, movielens_users

PEERS = pathlib.Path(__file__).parent
LABEL = "label"


@dataclasses.dataclass(frozen=True)
class Options:
    """The runs."""

    work: tyro.conf.Positional[pathlib.Path]
    """Directory of the files and of the runs."""
    movielens: pathlib.Path | None = None
    criteo: pathlib.Path | None = None
    beauty: pathlib.Path | None = None
    trees: str | None = None
    torchrec: str | None = None
    seeds: tuple[int, ...] = (0, 1, 2)
    models: tuple[str, ...] = ("",)
    """Values of --model; the empty text is the default."""
    generated_rows: int = 300_000
    train: tuple[str, ...] = ()
    """More options of `jaxrec train`, to try others than the defaults."""
    output: pathlib.Path | None = None
    """File name without its ending."""


def movielens(path: pathlib.Path) -> tuple[pa.Table, int]:
    """Return the rows in the order of time, and the number of held-out rows."""
    ratings = movielens_ratings(path).sort_by("timestamp")
    users, movies = movielens_users(path), movielens_movies(path)
    user = users.take(pc.index_in(ratings["user_id"], users["user_id"]))
    movie = movies.take(pc.index_in(ratings["movie_id"], movies["movie_id"]))
    columns = {
        LABEL: pc.greater_equal(ratings["rating"], 4),
        "user": ratings["user_id"],
        "movie": ratings["movie_id"],
        "age": user["age"].cast(pa.float32()),
        **{name: user[name] for name in ("gender", "occupation")},
        "year": movie["year"].cast(pa.string()),
        # One text, since the other programs take no lists.
        "genres": pc.binary_join(movie["genres"], " "),
    }
    return pa.table(columns), len(ratings) // 10


def criteo(path: pathlib.Path) -> tuple[pa.Table, int]:
    """Return the rows in the order of the file; the last fifth is held out."""
    names = [f"I{i}" for i in range(1, 14)], [f"C{i}" for i in range(1, 27)]
    types = dict.fromkeys(names[0], pa.float32()) | dict.fromkeys(names[1], pa.string())
    options = pyarrow.csv.ConvertOptions(column_types=types, strings_can_be_null=True)
    table = pyarrow.csv.read_csv(path, convert_options=options)
    label = next(name for name in table.column_names if name.lower() == LABEL)
    table = table.select([label, *names[0], *names[1]])
    return table.rename_columns([LABEL, *names[0], *names[1]]), len(table) // 5


def beauty(path: pathlib.Path) -> tuple[pa.Table, int]:
    """Return a row for each item of a user and one for a random item; the last ones held out."""
    users, items = np.loadtxt(path, dtype=np.int64).T
    kept = users % 4 == 0
    users, items = users[kept], items[kept]
    is_first = np.append(True, users[1:] != users[:-1])
    is_last = np.append(is_first[1:], True)
    places = np.arange(len(users))
    position = places - np.maximum.accumulate(np.where(is_first, places, 0))
    rng = np.random.default_rng(0)
    random = rng.choice(np.unique(items), len(items))
    parts = []
    for mask in (~is_last, is_last):
        count = int(mask.sum())
        columns = {
            LABEL: np.repeat(np.array([1, 0], np.int8), count),
            "user": np.tile(users[mask], 2),
            "item": np.concatenate([items[mask], random[mask]]),
            "previous": np.tile(np.where(is_first, 0, np.roll(items, 1))[mask], 2),
            "position": np.tile(np.log1p(position[mask]).astype(np.float32), 2),
        }
        parts.append(pa.table(columns).take(rng.permutation(2 * count)))
    return pa.concat_tables(parts), len(parts[1])


def generated(rows: int) -> tuple[pa.Table, int]:
    """Return rows of the generated log, and a third of them held out."""
    held_out = rows // 3
    (clicks,) = [
        [np.concatenate([getattr(x, name) for x in chunks]) for name in ("labels", "dense", "ids")]
        for chunks in [[*GeneratedLog(rows + held_out).chunks(0, rows + held_out)]]
    ]
    labels, dense, ids = clicks
    columns = {LABEL: labels.astype(np.int8)}
    columns |= {f"int_{i}": column for i, column in enumerate(dense.T)}
    columns |= {f"cat_{i}": column for i, column in enumerate(ids.T)}
    return pa.table(columns), held_out


def write(folder: pathlib.Path, table: pa.Table, held_out: int) -> None:
    """Write the training rows and the held-out rows, the last ones."""
    folder.mkdir(parents=True, exist_ok=True)
    middle = len(table) - held_out
    pq.write_table(table[:middle], folder / "train.parquet")
    pq.write_table(table[middle:], folder / "test.parquet")


def run(command: Iterable[Any]) -> tuple[str, float]:
    """Run a command; return its output and the processor seconds that it took."""
    before = os.times()
    done = subprocess.run([*map(str, command)], stdout=subprocess.PIPE, text=True, check=True)
    after = os.times()
    seconds = [getattr(after, x) - getattr(before, x) for x in ("children_user", "children_system")]
    return done.stdout, sum(seconds)


def train(options: Options, folder: pathlib.Path, model: str, seed: int) -> dict[str, Any]:
    """Run `jaxrec train`; return its results."""
    output = folder / "run"
    shutil.rmtree(output, ignore_errors=True)
    paths = ["--data", folder / "train.parquet", "--data.eval-path", folder / "test.parquet"]
    more = [*options.train, *(["--model", model] if model else [])]
    common = [*paths, "--label", LABEL, "--seed", seed, "--output", output]
    _, seconds = run([sys.executable, "-m", "jaxrec", "train", *common, *more])
    results = json.loads((output / "results.json").read_text())
    return {
        "model": f"jaxrec {results['model']}",
        "seed": seed,
        "auc": results["auc"],
        "log_loss": results["log_loss"],
        "processor_seconds": round(seconds, 1),
        "version": results["versions"]["jaxrec"],
    }


def peers(options: Options, folder: pathlib.Path, seed: int) -> Iterable[dict[str, Any]]:
    """Run the other programs; yield their results."""
    commands = []
    if options.trees is not None:
        script = PEERS / "peer_trees.py"
        commands += [[options.trees, script, x, folder] for x in ("lightgbm", "catboost")]
    if options.torchrec is not None:
        commands.append([options.torchrec, PEERS / "peer_torchrec_run.py", folder])
    for command in commands:
        yield json.loads(run([*command, "--seed", seed])[0].splitlines()[-1])


def main() -> None:
    options = tyro.cli(Options)
    sets: dict[str, Callable[[], tuple[pa.Table, int]]] = {
        "generated": lambda: generated(options.generated_rows)
    }
    for read, path in (
        (movielens, options.movielens), (criteo, options.criteo), (beauty, options.beauty),
    ):  # fmt: skip
        if path is not None:
            sets[read.__name__] = lambda read=read, path=path: read(path)
    lines = []
    for name, make in sets.items():
        folder = options.work / name
        write(folder, *make())
        for seed in options.seeds:
            own = (train(options, folder, model, seed) for model in options.models)
            for each in (*own, *peers(options, folder, seed)):
                lines.append({"data": name, **each})
                print(json.dumps(lines[-1]), flush=True)
    print(as_table(lines))
    if options.output is not None:
        text = json.dumps(lines, indent=1)
        options.output.with_suffix(".json").write_text(text + "\n")


def as_table(lines: Iterable[dict[str, Any]]) -> str:
    """Return a table of means over the seeds, and the deviation from them."""
    runs: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for line in lines:
        runs.setdefault((line["data"], line["model"]), []).append(line)
    rows = ["| data | model | AUC | log loss | processor |", "|---|---|---|---|---|"]
    for (data, model), each in runs.items():
        values = [np.array([x[name] for x in each]) for name in ("auc", "log_loss")]
        cells = [f"{x.mean():.4f} ± {x.std():.4f}" for x in values]
        seconds = np.mean([x["processor_seconds"] for x in each])
        rows.append(f"| {data} | {model} | {cells[0]} | {cells[1]} | {seconds:.0f} s |")
    return "\n".join(rows)


if __name__ == "__main__":
    main()
