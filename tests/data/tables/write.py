"""Writes the files of this directory by the libraries whose names they have.

pip install pandas polars duckdb datasets pyspark
python tests/data/tables/write.py

Each holds the same 40 rows, those of ``pandas/rows.parquet``.
"""

from __future__ import annotations

import pathlib
import shutil

import datasets
import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pyarrow.parquet as pq
from pyspark.sql import SparkSession

HERE = pathlib.Path(__file__).parent
ROWS = 40

rng = np.random.default_rng(0)
cities = np.array(["Oslo", "São Paulo", "Paris, Texas", 'the "Hub"', "two\nlines", None])
rows = pd.DataFrame(
    {
        "user": rng.integers(0, 5, ROWS),
        "item": rng.choice([2**60 + 1, 2**60 + 2, 2**60 + 3], ROWS),  # hashes
        "city": rng.choice(cities, ROWS),
        "price": rng.lognormal(size=ROWS).round(2),
        "is_new": rng.random(ROWS) < 0.5,
        "label": rng.integers(0, 2, ROWS),
        "row": np.arange(ROWS),
    }
)


def directory(name: str) -> pathlib.Path:
    shutil.rmtree(HERE / name, ignore_errors=True)
    (HERE / name).mkdir(parents=True)
    return HERE / name


to = directory("pandas")
rows.to_parquet(to / "rows.parquet", index=False)
rows.to_csv(to / "rows.csv", index=False)
rows.to_csv(to / "rows.tsv.bz2", sep="\t", index=False)
rows.to_json(to / "rows.jsonl.gz", orient="records", lines=True)
rows.to_feather(to / "rows.feather")

to = directory("polars")
frame = pl.from_pandas(rows)
frame.write_csv(to / "rows.csv")
frame.write_ndjson(to / "rows.ndjson")
frame.write_ipc(to / "rows.arrow", compression="zstd")
frame.write_ipc_stream(to / "rows.arrows")
frame.write_parquet(to / "rows.parquet")

to = directory("duckdb")
connection = duckdb.connect()
connection.register("frame", rows)
copy = "COPY (SELECT *, 1 + row // 20 AS part FROM frame ORDER BY row) TO"
connection.execute(f"{copy} '{to}/rows.csv.gz' (FORMAT csv, HEADER, COMPRESSION gzip)")
connection.execute(f"{copy} '{to}/rows.json' (FORMAT json)")
connection.execute(f"{copy} '{to}/keys' (FORMAT csv, HEADER, PARTITION_BY (part))")
options = "FORMAT parquet, PARTITION_BY (part), WRITE_PARTITION_COLUMNS"
connection.execute(f"{copy} '{to}/both' ({options})")

to = directory("datasets")
table = datasets.Dataset.from_pandas(rows)
table.save_to_disk(to / "saved", num_shards=2)
table.to_parquet(to / "rows.parquet")
table.to_csv(to / "rows.csv")
table.to_json(to / "rows.jsonl")
datasets.DatasetDict({"train": table, "test": table}).save_to_disk(to / "splits")
for path in to.rglob("cache-*"):
    path.unlink()

to = directory("spark")
spark = SparkSession.builder.master("local[1]").getOrCreate()
columns = "user long, item long, city string, price double, is_new boolean, label int, row int"
spark_rows = spark.createDataFrame(
    [
        (
            int(r.user),
            int(r.item),
            None if pd.isna(r.city) else r.city,
            float(r.price),
            bool(r.is_new),
            int(r.label),
            int(r.row),
        )
        for r in rows.itertuples()
    ],
    columns,
).coalesce(1)
for part in (1, 2):
    some = spark_rows.where(f"1 + floor(row / 20) = {part}")
    # A line end within a value needs quotes of its own in Spark.
    some.write.csv(f"{to}/csv/part={part}", header=True, escape='"', quoteAll=True)
    some.write.json(f"{to}/json/part={part}", compression="gzip")
    some.write.parquet(f"{to}/parquet/part={part}")
spark.stop()

assert pq.read_table(HERE / "pandas/rows.parquet").num_rows == ROWS
