"""Reading and encoding a file of mixed columns on one core, beside polars and DuckDB.

Usage: python -m benchmarks.files [--rows 5000000] [--rounds 3] [--sides jaxrec polars duckdb]
    [--memory 1000]

Each side learns a vocabulary of four columns (values that appear twice or more, the most frequent
first), the mean and the deviation of two, and then writes all rows as row indices and standardized
numbers, from CSV and from Parquet. Prints a JSON line for each file and side: rows a second of
processor time and of wall time, the seconds of both, and the most memory. Ends with exit code 1 if
jaxrec's process took more than ``--memory`` MB. polars and duckdb come from PyPI.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import resource
import statistics
import subprocess
import sys
import tempfile
import time

TEXTS = {"city": 1_000, "device": 50, "item": 50_000}
NUMBERS = ("price", "age")
CATEGORIES = (*TEXTS, "user")
USERS = 300_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=5_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sides", nargs="+", default=["jaxrec", "polars", "duckdb"])
    parser.add_argument("--memory", type=float, default=1000, help="MB")
    parser.add_argument("--run", nargs=2, help=argparse.SUPPRESS)  # in a process of its own
    options = parser.parse_args()
    if options.run:
        return run(options.run[0], pathlib.Path(options.run[1]))
    with tempfile.TemporaryDirectory() as temporary:
        directory = pathlib.Path(temporary)
        write_rows(directory, options.rows)
        figures: dict[tuple[str, str], list[dict]] = {}
        for _ in range(options.rounds):
            for suffix in ("csv", "parquet"):
                for side in options.sides:
                    line = measure(side, directory / f"rows.{suffix}")
                    figures.setdefault((suffix, side), []).append(line)
        for (suffix, side), lines in figures.items():
            median = {name: statistics.median(line[name] for line in lines) for name in lines[0]}
            rates = {
                "rows_per_processor_s": round(options.rows / median["processor_seconds"]),
                "rows_per_s": round(options.rows / median["seconds"]),
            }
            print(json.dumps({"file": suffix, "side": side, **rates, **median}))
            if side == "jaxrec" and max(line["peak_mb"] for line in lines) > options.memory:
                sys.exit(f"jaxrec took more than {options.memory:g} MB")


def write_rows(directory: pathlib.Path, rows: int) -> None:
    """Write the same rows as CSV and as Parquet, in parts that fit memory."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.csv
    import pyarrow.parquet as pq

    rng = np.random.default_rng(0)
    names = {name: pa.array([f"{name}_{n:06d}" for n in range(n)]) for name, n in TEXTS.items()}
    parquet = text = None
    for start in range(0, rows, 1 << 19):
        count = min(rows - start, 1 << 19)

        def power_law(size: int, count: int = count) -> np.ndarray:
            drawn = np.exp(rng.random(count) * np.log(size + 1)).astype(np.int64) - 1
            return np.minimum(drawn, size - 1)

        table = pa.table(
            {
                "label": rng.integers(0, 2, count, np.int8),
                "price": rng.lognormal(3, 1, count).round(2),
                "age": rng.integers(18, 90, count) + 0.5,
                **{name: names[name].take(power_law(size)) for name, size in TEXTS.items()},
                "user": power_law(USERS),
            }
        )
        if parquet is None:
            parquet = pq.ParquetWriter(directory / "rows.parquet", table.schema)
            text = pyarrow.csv.CSVWriter(directory / "rows.csv", table.schema)
        parquet.write_table(table)
        text.write_table(table)
    parquet.close()
    text.close()


def measure(side: str, path: pathlib.Path) -> dict[str, float]:
    """Run a side in a process of its own on one core; return its figures."""
    command = [sys.executable, "-m", "benchmarks.files", "--run", side, str(path)]
    core = sorted(os.sched_getaffinity(0))[:1]
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "JAXREC_CACHE_DIR": cache, "POLARS_MAX_THREADS": "1"}
        done = subprocess.run(
            command,
            check=True,
            stdout=subprocess.PIPE,
            env=environment,
            preexec_fn=lambda: os.sched_setaffinity(0, core),
        )
    return json.loads(done.stdout)


def run(side: str, path: pathlib.Path) -> None:
    encode = {"jaxrec": by_jaxrec, "polars": by_polars, "duckdb": by_duckdb}[side]
    output = path.with_name(f"{side}.encoded")
    encode = encode(path, output)  # with its imports made
    started, processor = time.perf_counter(), time.process_time()
    encode()
    line = {
        "seconds": round(time.perf_counter() - started, 2),
        "processor_seconds": round(time.process_time() - processor, 2),
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1000,
    }
    print(json.dumps(line))


def by_jaxrec(path: pathlib.Path, output: pathlib.Path):
    import pyarrow.parquet as pq

    from jaxrec.data import ParquetGroups, Schema, learn_encoder
    from jaxrec.data.encoder import EncodedGroups
    from jaxrec.data.formats.conversion import as_parquet, format_of
    from jaxrec.data.groups import GroupRange

    schema = Schema.from_dict(
        {"label": "label", "dense": list(NUMBERS), "categorical": list(CATEGORIES)}
    )

    def encode() -> None:
        paths = (path,) if format_of(path) is None else as_parquet(path).paths
        groups = ParquetGroups(paths, schema.columns, dictionaries=True)
        rows = GroupRange(groups, 0, sum(groups.sizes))
        encoded = EncodedGroups(rows, learn_encoder(schema, rows))
        writer = None
        for group in range(len(encoded.sizes)):
            table = encoded.read(group)
            # Row indices and standardized numbers gain little by dictionaries, which take long.
            writer = writer or pq.ParquetWriter(output, table.schema)
            writer.write_table(table)
        writer.close()

    return encode


def by_polars(path: pathlib.Path, output: pathlib.Path):
    import polars as pl

    def encode() -> None:
        scan = pl.scan_csv if path.suffix == ".csv" else pl.scan_parquet
        rows = scan(path)
        frame = rows
        for name in CATEGORIES:
            counts = rows.group_by(name).len().filter(pl.col("len") >= 2)
            counts = counts.sort("len", descending=True).with_row_index(f"{name}_row", 1)
            known = counts.select(name, pl.col(f"{name}_row").cast(pl.Int32)).collect()
            frame = frame.join(known.lazy(), on=name, how="left").with_columns(
                pl.col(f"{name}_row").fill_null(0)
            )
        moments = rows.select(
            *(pl.col(name).mean().alias(f"{name}_mean") for name in NUMBERS),
            *(pl.col(name).std(ddof=0).alias(f"{name}_std") for name in NUMBERS),
        ).collect()
        numbers = [
            ((pl.col(n) - moments[f"{n}_mean"][0]) / moments[f"{n}_std"][0]).cast(pl.Float32)
            for n in NUMBERS
        ]
        names = [f"{name}_row" for name in CATEGORIES]
        frame.select(pl.col("label").cast(pl.Float32), *numbers, *names).sink_parquet(output)

    return encode


def by_duckdb(path: pathlib.Path, output: pathlib.Path):
    import duckdb

    def encode() -> None:
        base = duckdb.connect()
        base.execute("set threads = 1")
        read = "read_csv" if path.suffix == ".csv" else "read_parquet"
        rows = f"{read}('{path}')"
        columns, joins = ["label::float"], []
        for name in CATEGORIES:
            base.execute(
                f"create table {name}_rows as select {name}, "
                f"row_number() over (order by count(*) desc)::int as row_index from {rows} "
                f"group by {name} having count(*) >= 2"
            )
            columns.append(f"coalesce({name}_rows.row_index, 0)")
            joins.append(f"left join {name}_rows using ({name})")
        for name in NUMBERS:
            mean, deviation = base.execute(
                f"select avg({name}), stddev_pop({name}) from {rows}"
            ).fetchone()
            columns.append(f"(({name} - {mean}) / {deviation})::float")
        select = f"select {', '.join(columns)} from {rows} {' '.join(joins)}"
        base.execute(f"copy ({select}) to '{output}' (format parquet)")

    return encode


if __name__ == "__main__":
    main()
