"""Training with a table of a terabyte, most of which is holes of a sparse file.

See `benchmarks.tier`, whose command ``huge`` this is.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import resource
import tempfile
import time
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

import jaxrec
from jaxrec.ragged import KeyedJaggedArray
from jaxrec.tier import Cached, ahead
from jaxrec.train import put_batch
from jaxrec.train.checkpoint import restore, save

# An odd number without the factor 5, so that ranks of 10**n rows are permuted by a product.
_SCATTER = 387_420_489

# Training steps after the checkpoint, which the restored model repeats.
_MORE_STEPS = 20


@dataclasses.dataclass(frozen=True)
class Huge:
    """A table of 4 billion rows behind a cache, and its checkpoint."""

    rows: int = 4_000_000_000
    """Rows of the table."""
    dim: int = 64
    """Columns of the table."""
    cached: int = 20_000
    """Rows on the device."""
    batch: int = 64
    """Samples of a step."""
    bag: int = 4
    """Ids of a sample."""
    exponent: float = 1.05
    """The i-th most frequent id is drawn with a probability proportional to i**-exponent."""
    steps: int = 2000
    """Training steps."""
    interval: int = 500
    """Steps after which figures are printed."""
    store: str = "file"
    """Kind of the store: file or rocksdb."""
    directory: pathlib.Path | None = None
    """Where files are written and removed; default: a temporary directory."""

    def run(self) -> None:
        jaxrec.keep_freed_memory()
        with tempfile.TemporaryDirectory(dir=self.directory) as name:
            self._run(pathlib.Path(name))

    def _run(self, directory: pathlib.Path) -> None:
        model = self.model(directory / "first")
        optimizer = jaxrec.Optimizer(model, optax.adam(1e-3))
        used: list[np.ndarray] = []
        start = time.perf_counter()
        for step, batch in enumerate(ahead(model, self.batches(0, self.steps, used)), 1):
            loss = _train_step(model, optimizer, put_batch(batch))
            if step % self.interval == 0:
                jax.block_until_ready(loss)
                seconds = time.perf_counter() - start
                self.report(step, seconds, model, directory / "first")
                start = time.perf_counter()
        # The end of the loop waits until the rows are on the disk.
        line: dict[str, Any] = {"flush_seconds": round(time.perf_counter() - start, 1)}
        ids = np.unique(np.concatenate(used))
        line["distinct_ids"] = ids.size
        start = time.perf_counter()
        checkpoint = save(directory / "run", model, optimizer, batches=self.steps)
        line["save_seconds"] = round(time.perf_counter() - start, 1)
        line["checkpoint_gb_on_disk"] = _gigabytes_on_disk(checkpoint)
        print(json.dumps(line), flush=True)
        sample = np.random.default_rng(1).permutation(ids)[:1000]
        expected = np.asarray(model.embeddings.rows("user", sample))
        losses = self.train_more(model, optimizer)
        jaxrec.tier.close(model)

        other = self.model(directory / "second")
        optimizer = jaxrec.Optimizer(other, optax.adam(1e-3))
        start = time.perf_counter()
        restore(other, directory / "run", optimizer)
        line = {"restore_seconds": round(time.perf_counter() - start, 1)}
        found = np.asarray(other.embeddings.rows("user", sample))
        line["rows_are_the_same"] = bool(np.array_equal(found, expected))
        line["losses_are_the_same"] = self.train_more(other, optimizer) == losses
        line["peak_mb"] = _peak_mb()
        print(json.dumps(line), flush=True)
        jaxrec.tier.close(other)
        if not (line["rows_are_the_same"] and line["losses_are_the_same"]):
            raise SystemExit("the restored model differs")

    def model(self, directory: pathlib.Path) -> Any:
        url = f"{self.store}://{directory}/{{table}}"
        return jaxrec.tier.make(lambda: _Model(self), {"user": Cached(self.cached, url)})

    def train_more(self, model: Any, optimizer: jaxrec.Optimizer) -> list[float]:
        batches = ahead(model, self.batches(self.steps, _MORE_STEPS, []))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return [float(_train_step(model, optimizer, put_batch(batch))) for batch in batches]

    def report(self, step: int, seconds: float, model: Any, directory: pathlib.Path) -> None:
        counts = jaxrec.tier.statistics(model)["user"]
        line = {
            "step": step,
            "steps_per_second": round(self.interval / seconds, 1),
            "hit_rate": round(counts["hit_rate"], 4),
            "stall_ms": round(counts["stall_ms"], 3),
            "rows_written": counts["written"],
            "rows_fetched": counts["fetched"],
            "rss_mb": _rss_mb(),
            "peak_mb": _peak_mb(),
            # With the sum of row-wise Adagrad.
            "logical_gb": round(4 * self.rows * (self.dim + 1) / 1e9, 1),
            "file_gb": round(sum(file.stat().st_size for file in _files(directory)) / 1e9, 1),
            "gb_on_disk": _gigabytes_on_disk(directory),
        }
        print(json.dumps(line), flush=True)

    def batches(self, first: int, steps: int, used: list[np.ndarray]) -> Iterator[Any]:
        """Yield batches of power-law ids scattered over the table; append the ids to a list."""
        lengths = np.full(self.batch, self.bag, np.int32)
        power = 1 - self.exponent
        for step in range(first, first + steps):
            rng = np.random.default_rng(step)
            uniform = rng.random(self.batch * self.bag)
            ranks = (1 + uniform * (float(self.rows) ** power - 1)) ** (1 / power)
            ids = ranks.astype(np.int64) % self.rows * _SCATTER % self.rows
            used.append(np.unique(ids))
            features = KeyedJaggedArray.from_lengths(["user"], ids, lengths, id_bits=64)
            yield features, rng.integers(0, 2, self.batch).astype(np.float32)


class _Model(nnx.Module):
    def __init__(self, settings: Huge) -> None:
        config = jaxrec.EmbeddingBagConfig("user", settings.rows, settings.dim)
        rngs = nnx.Rngs(0)
        optimizer = jaxrec.optim.rowwise_adagrad(0.05)
        self.embeddings = jaxrec.EmbeddingBagCollection([config], optimizer=optimizer, rngs=rngs)
        self.over = nnx.Linear(settings.dim, 1, rngs=rngs)

    def __call__(self, features: KeyedJaggedArray) -> jax.Array:
        return self.over(self.embeddings(features).values)[:, 0]


@nnx.jit(donate_argnums=(0, 1))
def _train_step(model, optimizer, batch):
    features, labels = batch

    def loss_fn(model):
        return optax.sigmoid_binary_cross_entropy(model(features), labels).mean()

    loss, gradients = jaxrec.value_and_grad(loss_fn)(model)
    optimizer.update(model, gradients)
    return loss


def _files(directory: pathlib.Path) -> list[pathlib.Path]:
    return [path for path in directory.rglob("*") if path.is_file()]


def _gigabytes_on_disk(directory: pathlib.Path) -> float:
    """Return the gigabytes that files really take: blocks of 512 bytes."""
    return round(sum(file.stat().st_blocks * 512 for file in _files(directory)) / 1e9, 2)


def _peak_mb() -> int:
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def _rss_mb() -> int:
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return round(int(line.split()[1]) / 1024)
    raise RuntimeError("this system does not tell the memory of a process")
