"""Writes a Parquet file of strings, lists, ids and numbers, with labels of a known best AUC.

python -m benchmarks.columns clicks.parquet --rows 500000
jaxrec train --data clicks.parquet
"""

from __future__ import annotations

import argparse
import pathlib

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from jaxrec.metrics import auc

# Distinct values of each categorical column.
SIZES = {"city": 1_000, "device": 50, "user": 300_000, "item": 50_000, "tags": 5_000}
MOST_TAGS = 8

# Users that are drawn by a power law, with effects; half of all rows have another, without.
USUAL_USERS = 5_000


def generate(rows: int, seed: int = 0) -> tuple[pa.Table, np.ndarray]:
    """The rows, and the true probability of each label.

    The log-odds are a sum of an effect of each value, of the mean of a list's, and of lines over
    two of the four numbers. Ids follow power laws.
    """
    rng = np.random.default_rng(seed)

    def power_law(size: int, count: int) -> np.ndarray:
        return np.minimum(np.exp(rng.random(count) * np.log(size + 1)).astype(int) - 1, size - 1)

    ids = {name: power_law(size, rows) for name, size in SIZES.items() if name != "tags"}
    ids["user"] = np.where(
        rng.random(rows) < 0.5,
        power_law(USUAL_USERS, rows),
        rng.integers(USUAL_USERS, SIZES["user"], rows),
    )
    effects = {name: rng.normal(0, 0.8, size) for name, size in SIZES.items()}
    effects["user"][USUAL_USERS:] = 0
    lengths = rng.integers(0, MOST_TAGS + 1, rows)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    tags = power_law(SIZES["tags"], int(offsets[-1]))
    owners = np.repeat(np.arange(rows), lengths)
    of_tags = np.bincount(owners, effects["tags"][tags], rows) / np.maximum(lengths, 1)

    price, age, hour, noise = rng.lognormal(3, 1, rows), *rng.normal(size=(3, rows))
    score = sum(effects[name][values] for name, values in ids.items()) + 1.5 * of_tags
    score += 0.6 * (np.log(price) - 3) - 0.5 * age - 1
    probabilities = 1 / (1 + np.exp(-score))
    columns = {
        "label": pa.array((rng.random(rows) < probabilities).astype(np.int8)),
        "price": pa.array(price, mask=rng.random(rows) < 0.02),
        "age": age, "hour": hour, "noise": noise,
        "city": _names("city", SIZES["city"]).take(ids["city"]),
        "device": _names("device", SIZES["device"]).take(ids["device"]),
        "user": _names("user", SIZES["user"]).take(ids["user"]),
        # Hashes of 64 bits.
        "item": rng.integers(-(2**63), 2**63, SIZES["item"])[ids["item"]],
        "tags": pa.ListArray.from_arrays(
            offsets.astype(np.int32), _names("tag", SIZES["tags"]).take(tags)
        ),
    }  # fmt: skip
    return pa.table(columns), probabilities


def _names(prefix: str, count: int) -> pa.Array:
    return pa.array([f"{prefix}_{number}" for number in range(count)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=pathlib.Path)
    parser.add_argument("--rows", type=int, default=500_000)
    parser.add_argument("--row-group", type=int, default=50_000)
    options = parser.parse_args()
    table, probabilities = generate(options.rows)
    pq.write_table(table, options.path, row_group_size=options.row_group)
    last = slice(-options.rows // 10, None)
    best = auc(probabilities[last], table["label"].to_numpy()[last])
    print(f"{options.rows:,} rows; the best AUC on the last tenth is {best:.4f}")


if __name__ == "__main__":
    main()
