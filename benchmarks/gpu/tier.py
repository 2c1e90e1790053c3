"""Checks and times tables beyond the card's memory, beside tables on the card, on one GPU.

    python -m benchmarks.gpu.tier [--suites whole dynamic cached_0.1 ...] [--optimizers sgd adam]
    python -m benchmarks.gpu.tier --dry-run           # on the CPU, small
    python -m benchmarks.gpu.tier --compile           # for an H200 that is only described

Ten tables of 128 columns in float32 are looked up without pooling, 1,048,570 ids a batch by a power
law (1.05), as in NVIDIA's benchmark of dynamicemb. The suites are

* whole: plain tables, all rows on the card;
* dynamic: the same with open vocabularies;
* cached_1.0, cached_0.8, cached_0.1: this share of the rows on the card, the others in host memory;
* cached_least: only the rows of the batches under way on the card.

A suite is checked first: from the same first rows, a few updates of small tables must give the rows
of whole tables, whose updates are compared with float64. Then one JSON line has its times: the
lookup of a batch, the update, and an evaluation's lookup, each alone with the rows already on the
card; and ``step``, the lookups and updates of batches that follow one another, with all that plans
the batches and moves rows. ``hits`` is the share of lookups whose row was on the card, ``moved_mb``
the bytes that a step brings to the card and, about as many, takes from it. ``published_ms`` are
forward, backward and evaluation of FBGEMM and of dynamicemb on one H100
(``dynamicemb/benchmark/benchmark_results.json`` in NVIDIA/recsys-examples), whose caches are shares
of other footprints. The exit status is 1 if a check or a call failed.

``--compile`` times nothing: it compiles the programs of a batch of ``cached_0.1``, prints their
memory, copies and transfers, and writes ``benchmarks/results/compiled_tier.h200.md``.
docs/internals/gpu.md says how to set this up.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import sys
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxrec
from benchmarks.gpu.measure import figures
from benchmarks.peer_shapes import zipf_ids
from jaxrec.embed import apply_gradients, lookup
from jaxrec.ragged import KeyedJaggedArray
from jaxrec.tier import Cached, Dynamic
from jaxrec.tier.planning.tier import tier_of
from jaxrec.train import put_batch

RATE = 0.1
OPTIMIZERS = {"sgd": jaxrec.optim.sgd(RATE), "adam": jaxrec.optim.adam(RATE)}
# Share of the rows on the card, by suite; None: all, in plain tables or with open vocabularies.
SUITES = {
    "whole": None,
    "dynamic": None,
    "cached_1.0": 1.0,
    "cached_0.8": 0.8,
    "cached_0.1": 0.1,
    "cached_least": 0.0,
}
# Caches that are smaller than the rows which the checked batches use.
SMALL = ("cached_0.1", "cached_least")
DRY_SUITES = ("whole", "dynamic", "cached_0.1")
LOOK_AHEAD = 2
# Batches before the timed ones.
WARM = 8
# Milliseconds of forward, backward and evaluation.
PUBLISHED = {
    ("whole", "adam"): {"fbgemm": (0.347, 1.005, 0.457)},
    ("whole", "sgd"): {"fbgemm": (0.345, 0.614, 0.415)},
    ("dynamic", "adam"): {"dynamicemb": (1.338, 0.847, 0.645)},
    ("dynamic", "sgd"): {"dynamicemb": (1.330, 0.593, 0.640)},
    ("cached_1.0", "adam"): {"fbgemm": (3.36, 11.01, 3.38), "dynamicemb": (11.31, 0.973, 1.19)},
    ("cached_0.8", "adam"): {"fbgemm": (3.99, 11.01, 4.02), "dynamicemb": (23.36, 0.972, 3.51)},
    ("cached_1.0", "sgd"): {"fbgemm": (3.36, 0.788, 3.37), "dynamicemb": (10.21, 0.658, 1.18)},
    ("cached_0.1", "adam"): {"fbgemm": (7.93, 16.14, 8.08), "dynamicemb": (16.89, 16.42, 20.50)},
    ("cached_least", "adam"): {"fbgemm": (7.93, 16.12, 8.05), "dynamicemb": (22.07, 21.44, 28.48)},
}

_forward = jax.jit(lookup)
_evaluate = jax.jit(lambda tables, features: lookup(tables, features)[0])
_update = jax.jit(apply_gradients, donate_argnums=0)


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of the tables and of ``pool`` batches: rows a table, ids of each table in a batch."""

    tables: int
    rows: int
    dim: int
    ids: int
    pool: int

    def batches(self, id_bits: int = 32) -> Iterator[KeyedJaggedArray]:
        """Yield the batches again and again. Frequent rows are scattered over a table."""
        random = np.random.default_rng(0)
        keys = [f"f{i}" for i in range(self.tables)]
        lengths = np.ones(self.tables * self.ids, np.int32)
        scattered = random.permutation(self.rows)
        pool = [
            scattered[zipf_ids(random.random(self.tables * self.ids), self.rows, 1.05)]
            for _ in range(self.pool)
        ]
        while True:
            for ids in pool:
                yield KeyedJaggedArray.from_lengths(keys, ids, lengths, id_bits=id_bits)


def on_card(rows: int, pool: int = 1) -> Shape:
    """Return the sizes that are timed on a card."""
    return Shape(tables=10, rows=rows, dim=128, ids=104_857, pool=pool)


# The batches have more distinct ids than the smallest caches have rows.
CHECKED = Shape(tables=2, rows=5000, dim=16, ids=64, pool=32)


class Tables:
    """The tables of a suite and the batches for them."""

    def __init__(self, suite: str, optimizer: str, shape: Shape, initializer: str = "uniform"):
        configs = [
            jaxrec.EmbeddingConfig(
                f"t{i}", shape.rows, shape.dim, feature_names=(f"f{i}",), initializer=initializer
            )
            for i in range(shape.tables)
        ]

        def make() -> jaxrec.EmbeddingCollection:
            return jaxrec.EmbeddingCollection(
                configs, optimizer=OPTIMIZERS[optimizer], rngs=nnx.Rngs(0)
            )

        self.step = 0
        if suite == "whole":
            self.model = make()
            self.batches: Iterator[Any] = map(put_batch, shape.batches())
            return
        share = SUITES[suite]
        setting: Any = Dynamic()
        if share is not None:
            # The rows of the batches under way, and of those that come next.
            least = min((LOOK_AHEAD + 3) * shape.ids, shape.rows)
            setting = Cached(max(least, round(share * shape.rows)))
        self.model = jaxrec.tier.make(make, {config.name: setting for config in configs})
        self.batches = jaxrec.tier.ahead(
            self.model,
            shape.batches(id_bits=32 if share is not None else 64),
            look_ahead=LOOK_AHEAD,
            place=put_batch,
        )

    @property
    def store(self) -> Any:
        return self.model.tables.get_value()

    def train(self, features: KeyedJaggedArray, gradient: float = 1e-3) -> Any:
        """Look a batch up and update its rows with equal gradients; return the looked-up rows."""
        activations, residuals = _forward(self.store, features)
        gradients = jax.tree.map(lambda rows: jnp.full_like(rows, gradient), activations)
        self.model.tables.set_value(_update(self.store, residuals, gradients, self.step))
        self.step += 1
        return activations

    def counts(self) -> np.ndarray:
        """Return the lookups so far, those whose row was on the card, and the evicted rows."""
        tier = tier_of(self.model)
        tables = () if tier is None else tier.statistics().values()
        keys = "lookups", "hits", "evicted"
        return np.array([sum(each[key] for each in tables) for key in keys])


def check(suite: str, optimizer: str) -> dict[str, Any]:
    """Return the largest difference of small tables from whole ones, and of those from float64."""
    # A new id of an open vocabulary has other first values than the row of that index.
    initializer = "zeros" if suite == "dynamic" else "uniform"
    tables = Tables(suite, optimizer, CHECKED, initializer)
    whole = Tables("whole", optimizer, CHECKED, initializer)
    first = [np.asarray(whole.model.table(f"t{i}")) for i in range(CHECKED.tables)]
    pool = [np.asarray(each.values) for each in itertools.islice(CHECKED.batches(), CHECKED.pool)]
    ids = np.reshape(pool, (CHECKED.pool, CHECKED.tables, -1))
    difference = error = 0.0

    def compare(*pairs: Any) -> float:
        return max(float(jnp.abs(mine - wanted).max()) for mine, wanted in pairs)

    for number in range(2 * CHECKED.pool):  # evicted rows come again
        looked_up = tables.train(next(tables.batches)), whole.train(next(whole.batches))
        difference = max(difference, compare(*zip(*map(jax.tree.leaves, looked_up), strict=True)))
        for i in range(CHECKED.tables if number == 0 else 0):
            expected = first[i][ids[0, i]] - _first_step(optimizer, ids[0, i])[:, None]
            error = max(error, compare((whole.model.rows(f"t{i}", ids[0, i]), expected)))
    for i in range(CHECKED.tables):
        used = np.unique(ids[:, i])
        rows = (each.model.rows(f"t{i}", used) for each in (tables, whole))
        difference = max(difference, compare(tuple(rows)))
    evicted = int(tables.counts()[2])
    passed = difference == 0 and error < 1e-6 and (evicted > 0 or suite not in SMALL)
    return {"passed": passed, "difference": difference, "error": error, "evicted": evicted}


def _first_step(optimizer: str, ids: np.ndarray) -> np.ndarray:
    """Return what the first update takes from the row of each id, in float64."""
    _, place, counts = np.unique(ids, return_inverse=True, return_counts=True)
    gradient = 1e-3 * counts[place]
    # Adam's first step: both averages are corrected to the gradient and its square.
    return RATE * (gradient if optimizer == "sgd" else gradient / (gradient + 1e-8))


def measure(suite: str, optimizer: str, shape: Shape, steps: int) -> Iterator[dict[str, Any]]:
    """Yield the lines of a suite and an optimizer."""
    tables = Tables(suite, optimizer, shape)
    for _ in range(WARM):  # compiles, and brings the rows that most batches read
        tables.train(next(tables.batches))
    jax.block_until_ready(tables.store)
    counts = tables.counts()
    start = time.perf_counter()
    for _ in range(steps):
        tables.train(next(tables.batches))
    jax.block_until_ready(tables.store)
    step_ms = (time.perf_counter() - start) / steps * 1e3
    line: dict[str, Any] = {"primitive": f"step {optimizer}", "ms": [step_ms, step_ms]}
    line |= {"card": jax.devices()[0].device_kind, "rows": shape.rows}
    if suite != "whole":
        lookups, hits, _ = tables.counts() - counts
        stored = [array for array in jax.tree.leaves(tables.store) if array.ndim]
        row_bytes = sum(array.nbytes / array.shape[0] for array in stored)
        line["hits"] = round(hits / lookups, 4)
        # Repeated misses of a batch count once each: an upper bound of the rows that travel.
        line["moved_mb"] = round((lookups - hits) / steps * row_bytes / 1e6, 3)
    if published := PUBLISHED.get((suite, optimizer)):
        line["published_ms"] = published
    yield line
    features = next(tables.batches)
    activations, residuals = _forward(tables.store, features)
    gradients = jax.tree.map(lambda rows: jnp.full_like(rows, 1e-3), activations)
    del activations

    def update() -> Any:
        tables.model.tables.set_value(_update(tables.store, residuals, gradients, tables.step))
        return tables.store

    row = 4 * shape.dim
    traffic = (shape.tables * shape.ids * (2 * row + 4),) * 2
    yield figures(f"forward {optimizer}", lambda: _forward(tables.store, features), traffic)
    yield figures(f"backward {optimizer}", update, traffic)
    yield figures(f"evaluation {optimizer}", lambda: _evaluate(tables.store, features), traffic)


def compile_programs(table_rows: int) -> bool:
    """Compile the programs of a batch of ``cached_0.1``; return whether one breaks a rule."""
    # Describes a card, which is not to be looked for here.
    jax.config.update("jax_platforms", "cpu")
    from benchmarks.gpu.tier_programs import write_page

    return bool(write_page(OPTIMIZERS, on_card(table_rows), round(0.1 * table_rows)))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--suites", nargs="*", choices=SUITES, help="default all")
    parser.add_argument("--optimizers", nargs="*", choices=OPTIMIZERS, help="default all")
    parser.add_argument("--rows", type=int, default=1_677_721, help="of a table on the card")
    parser.add_argument("--cached-rows", type=int, default=2**21, help="of a table with a cache")
    parser.add_argument("--steps", type=int, default=20, help="batches that a step's time is of")
    parser.add_argument("--seconds", type=float, default=math.inf, help="then no suite begins")
    parser.add_argument("--dry-run", action="store_true", help="run small tables on this machine")
    parser.add_argument("--compile", action="store_true", help="compile for a described H200")
    options = parser.parse_args()
    if options.compile:
        sys.exit(compile_programs(options.cached_rows))
    end, failures = time.monotonic() + options.seconds, 0
    suites = options.suites or (DRY_SUITES if options.dry_run else SUITES)
    for suite in suites:
        for optimizer in options.optimizers or (("adam",) if options.dry_run else OPTIMIZERS):
            start = {"kind": "tier", "implementation": "jaxrec", "shape": suite}
            if time.monotonic() > end:
                left_out = start | {"kind": "left out", "primitive": f"tier {optimizer}"}
                print(json.dumps(left_out), flush=True)
                continue
            steps, share = options.steps, SUITES[suite]
            rows = options.rows if share is None else options.cached_rows
            shape = on_card(rows, WARM + steps)
            if options.dry_run:
                shape, steps = CHECKED, 2
            try:
                checked = {"primitive": f"check {optimizer}"} | check(suite, optimizer)
                print(json.dumps(start | checked), flush=True)
                failures += not checked["passed"]
                for line in measure(suite, optimizer, shape, steps):
                    print(json.dumps(start | line), flush=True)
                    failures += "exception" in line
            except Exception as exception:
                failures += 1
                text = f"{type(exception).__name__}: {exception}"[:300]
                line = {"primitive": f"step {optimizer}", "exception": text}
                print(json.dumps(start | line), flush=True)
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
