"""Ranks the last item of each user by popularity and by implicit matrix factorization.

Usage: python -m benchmarks.interaction_baselines FILE... [--dim 32] [--iterations 10]
           [--output NAME]
FILE is a Parquet file with the columns "user", "item" and "timestamp", such as those that
`benchmarks.kinds` writes. The last item of each user is held out and ranked among all items of the
other rows, without those that the user had, as `jaxrec train --model two_tower --hold-out last
--user user` ranks it. Prints a JSON line for each file and method, and writes the lines to
NAME.json with --output:

popularity   the number of the item's training rows
als          alternating least squares of Hu, Koren and Volinsky 2008, "Collaborative filtering for
             implicit feedback datasets" (ICDM), equations 4 and 5, with one confidence for all
             pairs of the training rows
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import tyro
from jaxtyping import Float, Int

# Users whose scores are computed at once.
_USERS = 256


@dataclasses.dataclass(frozen=True)
class Options:
    """The data and the factors."""

    files: tyro.conf.Positional[tuple[pathlib.Path, ...]]
    dim: int = 32
    """Number of factors."""
    iterations: int = 10
    regularization: float = 10.0
    confidence: float = 10.0
    """Weight of a pair of the training rows beyond that of all other pairs, which is 1."""
    seed: int = 0
    output: pathlib.Path | None = None
    """File name without its ending."""


@dataclasses.dataclass(frozen=True)
class Interactions:
    """Pairs of users and items, numbered from 0; ``last`` is the held-out item of each user."""

    users: Int[np.ndarray, " pairs"]
    items: Int[np.ndarray, " pairs"]
    last: Int[np.ndarray, " users"]
    num_items: int

    @classmethod
    def read(cls, path: pathlib.Path) -> Interactions:
        table = pq.read_table(path, columns=["user", "item", "timestamp"]).sort_by(
            [("user", "ascending"), ("timestamp", "ascending")]
        )
        _, users = np.unique(table["user"].to_numpy(), return_inverse=True)
        names, items = np.unique(table["item"].to_numpy(), return_inverse=True)
        is_last = np.append(users[1:] != users[:-1], True)
        return cls(users[~is_last], items[~is_last], items[is_last], len(names))


def values(
    data: Interactions, scores: Callable[[slice], Float[np.ndarray, "users items"]]
) -> dict[str, float]:
    """Return NDCG@10 and recall@10 of the held-out items by the scores of users."""
    had = np.split(data.items, np.searchsorted(data.users, np.arange(1, len(data.last))))
    is_known = np.bincount(data.items, minlength=data.num_items) > 0
    ranks = np.zeros(len(data.last))
    for start in range(0, len(data.last), _USERS):
        part = scores(slice(start, start + _USERS)).astype(np.float64)
        for user, row in enumerate(part, start):
            own = row[data.last[user]]
            row[had[user]] = -np.inf
            row[data.last[user]] = -np.inf
            ranks[user] = 1 + (row[is_known] >= own).sum()
    is_hit = (ranks <= 10) & is_known[data.last]
    ndcg = float((is_hit / np.log2(ranks + 1)).mean())
    return {"ndcg@10": round(ndcg, 4), "recall@10": round(float(is_hit.mean()), 4)}


def factors(
    rows: Int[np.ndarray, " pairs"],
    columns: Int[np.ndarray, " pairs"],
    others: Float[np.ndarray, "columns dim"],
    count: int,
    options: Options,
) -> Float[np.ndarray, "rows dim"]:
    """Return the factors of ``count`` rows that fit those of the columns best."""
    order = np.argsort(rows, kind="stable")
    starts = np.searchsorted(rows[order], np.arange(count + 1))
    everywhere = others.T @ others + options.regularization * np.eye(others.shape[1])
    result = np.zeros((count, others.shape[1]))
    for row in range(count):
        own = others[columns[order[starts[row] : starts[row + 1]]]]
        matrix = everywhere + options.confidence * own.T @ own
        result[row] = np.linalg.solve(matrix, (1 + options.confidence) * own.sum(axis=0))
    return result


def main(options: Options) -> None:
    lines: list[dict[str, Any]] = []
    for path in options.files:
        data = Interactions.read(path)
        counts = np.bincount(data.items, minlength=data.num_items)
        users, items = len(data.last), data.num_items
        popular = values(data, lambda part: np.tile(counts, (len(range(users)[part]), 1)))  # noqa: B023
        lines.append({"data": path.stem, "method": "popularity", **popular})
        print(json.dumps(lines[-1]), flush=True)
        rng = np.random.default_rng(options.seed)
        of_items = rng.normal(0, 0.1, (items, options.dim))
        for _ in range(options.iterations):
            of_users = factors(data.users, data.items, of_items, users, options)
            of_items = factors(data.items, data.users, of_users, items, options)
        fitted = values(data, lambda part: of_users[part] @ of_items.T)  # noqa: B023
        lines.append({"data": path.stem, "method": "als", **fitted})
        print(json.dumps(lines[-1]), flush=True)
    if options.output is not None:
        options.output.with_suffix(".json").write_text(json.dumps(lines, indent=1) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
