"""Writes the files of this directory by the libraries whose names they have.

pip install pandas fastparquet polars duckdb "dask[dataframe]" pyspark
python tests/data/writers/write.py
"""

from __future__ import annotations

import pathlib
import shutil

import dask.dataframe
import duckdb
import numpy as np
import pandas as pd
import polars as pl
from pyspark.sql import SparkSession

HERE = pathlib.Path(__file__).parent
ROWS = 60

rng = np.random.default_rng(0)
rows = pd.DataFrame(
    {
        "user": rng.integers(0, 5, ROWS).astype(str),
        "brand": np.where(np.arange(ROWS) % 7, rng.integers(1, 5, ROWS), np.nan),
        "price": rng.lognormal(size=ROWS).round(2),
        "is_new": rng.random(ROWS) < 0.5,
        "label": rng.integers(0, 2, ROWS),
        "row": np.arange(ROWS),
    }
)

for name in ("pandas", "fastparquet", "polars", "duckdb", "dask", "spark"):
    shutil.rmtree(HERE / name, ignore_errors=True)
    (HERE / name).mkdir()

# A filtered data frame has an index; ids with nulls are floats.
rows[rows.price > 0].query("row != 3").to_parquet(HERE / "pandas/rows.parquet")
rows.query("row != 3").to_parquet(HERE / "fastparquet/rows.parquet", engine="fastparquet")

frame = pl.from_pandas(rows, nan_to_null=True).with_columns(
    pl.col("brand").cast(pl.Int64),
    pl.col("row").cast(pl.Int128).alias("wide"),
    pl.col("user").cast(pl.Categorical).alias("category"),
    pl.lit(None).alias("nothing"),
)
frame.write_parquet(HERE / "polars/rows.parquet")

connection = duckdb.connect()
connection.register("frame", rows)
connection.execute(
    "COPY (SELECT *, 8 + row // 30 AS hour, CASE label WHEN 1 THEN 'a/b' END AS country, "
    f"uuid() AS request, DATE '2024-03-01' AS day FROM frame) TO '{HERE}/duckdb' "
    "(FORMAT parquet, PARTITION_BY (hour, country), OVERWRITE)"
)

# Twelve files; the fourth part has no brand at all.
parts = rows.assign(brand=rows.brand.where(~rows.row.between(15, 19)))
dask.dataframe.from_pandas(parts, npartitions=12).to_parquet(HERE / "dask")

spark = SparkSession.builder.master("local[1]").getOrCreate()
spark.createDataFrame(
    [
        (str(r.user), None if np.isnan(r.brand) else int(r.brand), float(r.price), int(r.label),
         [str(r.user), "x"], f"2024-03-0{1 + r.row % 2}", int(r.row))
        for r in rows.itertuples()
    ],
    "user string, brand long, price double, label int, tags array<string>, date string, row long",
).repartition(2).write.partitionBy("date").parquet(f"{HERE}/spark", mode="overwrite")  # fmt: skip
