"""Exported rankers for tests, and what the training model says of a row."""

from __future__ import annotations

import functools
import pathlib
import shutil
import tempfile
from typing import Any

import numpy as np
from flax import nnx

from jaxrec.serve import export_ranker
from tests.nn import rankers

HISTORY = ["user", "item", "time", "action", "watch"]
EVENTS = ["item", "time", "action", "watch"]
TARGETS = ["c_item", "c_time"]

# Models by name: two whose caches grow, and one that encodes a history for the time of a request.
OPTIONS: dict[str, dict[str, Any]] = {
    "start": {"count_from": "start"},
    "small": {"count_from": "start", "num_layers": 1},
    "end": {"num_layers": 1},
}
SIZES: dict[str, dict[str, Any]] = {
    "start": {"history_sizes": (4, 12), "append_sizes": (3,), "candidate_sizes": (2, 4)},
    "small": {"history_sizes": (12,), "append_sizes": (6,), "candidate_sizes": (4,)},
    "end": {"history_sizes": (12,), "candidate_sizes": (4,)},
}


@functools.cache
def model(name: str) -> Any:
    return rankers.small(**OPTIONS[name])


@functools.cache
def _exported(name: str) -> pathlib.Path:
    path = pathlib.Path(tempfile.mkdtemp(prefix="jaxrec-ranker-"), "ranker")
    export_ranker(
        model(name),
        path,
        max_candidates=20,
        platforms=("cpu",),
        **SIZES[name],
    )
    return path


def exported(name: str, path: pathlib.Path) -> pathlib.Path:
    """Return an exported model in a folder of the test."""
    return pathlib.Path(shutil.copytree(_exported(name), path))


@nnx.jit
def _one_pass(model, batch):
    return model.tasks.predictions(model(batch))


def expected(model: Any, batch: dict[str, list]) -> dict[str, np.ndarray]:
    """Return the scores of one pass over history and candidates by the training model."""
    scores = np.asarray(_one_pass(model, rankers.pack(batch)))
    count = sum(map(len, batch["c_item"]))
    return {task.name: scores[:count, i] for i, task in enumerate(model.tasks.tasks)}


def request(batch: dict[str, list], keys: list) -> dict[str, list]:
    """Return the columns of a request over HTTP."""
    return {"cache_key": keys} | {name: batch[name] for name in (*HISTORY, *TARGETS)}


def row(rng: np.random.Generator, events: int, candidates: int) -> dict[str, list]:
    """Return a batch of one row, as `tests.nn.rankers.lists`."""
    return rankers.lists([events], [candidates], seed=int(rng.integers(2**31)))
