"""Quality of tables and optimizer state in fewer bits: DLRM on the generated click log.

    python -m benchmarks.precision --output benchmarks/results/precision.json

Models that differ in the format of their tables or of their optimizer state are trained side by
side: the same first values, the same batches. The settings are those of ``jaxrec train``. One more
model with float32 tables has first values that are rounded to bfloat16. Its difference is the noise
of a run: training multiplies differences in the last bits.

Runs of other seeds that are in the output file stay there.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np
import optax
import tyro
from flax import nnx

import jaxrec
from jaxrec.data import ClickBatch, GeneratedLog
from jaxrec.data.clicks import batches
from jaxrec.data.generated import TABLE_ROWS
from jaxrec.data.transforms import CATEGORICAL_NAMES, NUM_DENSE
from jaxrec.embed.formats import TABLE_FORMATS
from jaxrec.embed.state import state_bytes
from jaxrec.optim.base import STATE_DTYPES
from jaxrec.train import compile_step


@dataclasses.dataclass(frozen=True)
class Variant:
    """A model's table format, row optimizer and type of its state."""

    optimizer: str
    table: str = "float32"
    state: str = "float32"
    is_rounded: bool = False  # First values are rounded to bfloat16.

    def __str__(self) -> str:
        rounded = ", rounded first values" if self.is_rounded else ""
        return f"{self.optimizer}, {self.table} table, {self.state} state{rounded}"

    def row_optimizer(self, steps: int) -> jaxrec.optim.RowOptimizer:
        """The optimizer; rates decay linearly to 0."""
        match self.optimizer:
            case "rowwise_adagrad":
                rate = optax.linear_schedule(0.1, 0.0, steps)
                return jaxrec.optim.rowwise_adagrad(rate, state_dtype=self.state)
            case _:
                rate = optax.linear_schedule(0.004, 0.0, steps)
                return jaxrec.optim.adam(rate, state_dtype=self.state)


TABLES = tuple(Variant("rowwise_adagrad", table=name) for name in TABLE_FORMATS)
STATES = tuple(Variant("adam", state=name) for name in STATE_DTYPES)
BOTH = (Variant("adam", table="int8", state="float8"),)
NOISE = (Variant("rowwise_adagrad", is_rounded=True),)


@dataclasses.dataclass(frozen=True)
class ExchangePrecision:
    """Normalized entropy with tables and optimizer state in fewer bits."""

    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of the log and of the models."""
    rows: int = 5_000_000
    """Training rows of the log."""
    eval_rows: int = 200_000
    """Held-out rows of the log."""
    batch: int = 2048
    """Samples of a step."""
    dim: int = 16
    """Columns of each table."""
    only: tuple[str, ...] = ()
    """Words of which a variant's name must have one, such as int8; all variants by default."""
    scale: float = 1.0
    """Factor of the tables' first values; runs with 0.999, 1.001, ... show the noise of a run."""
    output: pathlib.Path | None = None
    """JSON file to write."""

    def run(self) -> None:
        variants = [
            each
            for each in (*TABLES, *NOISE, *STATES, *BOTH)
            if not self.only or any(word in str(each) for word in self.only)
        ]
        for seed in self.seeds:
            start = time.perf_counter()
            entropies = dict(zip(variants, self._train(seed, variants), strict=True))
            for variant, entropy in entropies.items():
                print(json.dumps({"seed": seed, "model": str(variant), "ne": entropy}), flush=True)
            print(f"seed {seed}: {time.perf_counter() - start:.0f} s", flush=True)
            self._write(seed, entropies)

    def _write(self, seed: int, entropies: Mapping[Variant, float]) -> None:
        """Print the differences of a seed, and add them to the output file."""
        summary = [self._summary(seed, variant, entropies) for variant in entropies]
        for line in summary:
            print(json.dumps(line), flush=True)
        if self.output is None:
            return
        runs = json.loads(self.output.read_text())["runs"] if self.output.exists() else []
        runs = [run for run in runs if run["seed"] != seed] + summary
        runs.sort(key=lambda run: run["seed"])
        settings = {name: getattr(self, name) for name in ("rows", "eval_rows", "batch", "dim")}
        by_model: dict[str, list[float]] = {}
        for run in runs:
            by_model.setdefault(run["model"], []).append(run["change_percent"])
        means = {model: round(float(np.mean(changes)), 4) for model, changes in by_model.items()}
        text = json.dumps(
            {"settings": settings, "mean_change_percent": means, "runs": runs}, indent=1
        )
        self.output.write_text(text + "\n")

    def _train(self, seed: int, variants: Sequence[Variant]) -> list[float]:
        """Train one model of each variant; return their entropies of the held-out rows."""
        log = GeneratedLog(self.rows + self.eval_rows, seed=seed)
        models = [self._model(variant, seed) for variant in variants]
        for batch in batches(log.chunks(0, self.rows), self.batch, CATEGORICAL_NAMES):
            for step, _ in models:
                step(batch)
        sums = np.zeros((len(models), 3))
        held_out = log.chunks(self.rows, self.rows + self.eval_rows)
        for batch in batches(held_out, self.batch, CATEGORICAL_NAMES):
            for number, (_, predict) in enumerate(models):
                sums[number] += _sums(np.asarray(predict(batch), np.float64), batch)
        return [_normalized_entropy(*of_model) for of_model in sums]

    def _model(self, variant: Variant, seed: int) -> tuple[Callable, Callable]:
        """Return a training step and the predictions of a fresh model."""
        steps = -(-self.rows // self.batch)
        rngs = nnx.Rngs(seed)
        tables = [
            jaxrec.EmbeddingBagConfig(name, rows, self.dim, dtype=variant.table)
            for name, rows in zip(CATEGORICAL_NAMES, TABLE_ROWS, strict=True)
        ]
        embeddings = jaxrec.EmbeddingBagCollection(
            tables, optimizer=variant.row_optimizer(steps), rngs=rngs
        )
        for name in CATEGORICAL_NAMES if variant.is_rounded or self.scale != 1 else ():
            rows = embeddings.table(name).astype("float32") * self.scale
            if variant.is_rounded:
                rows = rows.astype("bfloat16").astype("float32")
            embeddings.load_table(name, rows)
        model = jaxrec.nn.DLRM(
            embeddings,
            num_dense=NUM_DENSE,
            bottom_layer_sizes=(128, 64, self.dim),
            top_layer_sizes=(128, 64, 1),
            rngs=rngs,
        )
        optimizer = jaxrec.Optimizer(model, optax.adam(optax.linear_schedule(0.004, 0.0, steps)))

        def step(model, optimizer, batch):
            def loss_fn(model):
                logits = model(batch.dense, batch.features)
                losses = optax.sigmoid_binary_cross_entropy(logits, batch.labels)
                return (losses * batch.weights).sum() / batch.weights.sum()

            loss, gradients = jaxrec.value_and_grad(loss_fn)(model)
            optimizer.update(model, gradients)
            return loss

        train = compile_step(step, model, optimizer)
        return train, nnx.cached_partial(nnx.jit(_predict), model)

    def _summary(self, seed: int, variant: Variant, entropies: Mapping[Variant, float]) -> dict:
        """Return the entropy, its difference to float32 in percent, and bytes of a row."""
        base = entropies.get(Variant(variant.optimizer), entropies[variant])
        return {
            "seed": seed,
            "model": str(variant),
            "ne": round(entropies[variant], 6),
            "change_percent": round(100 * (entropies[variant] / base - 1), 4),
            "row_bytes": TABLE_FORMATS[variant.table].row_bytes(self.dim),
            "state_bytes": state_bytes(variant.row_optimizer(1), self.dim),
        }


def _predict(model: nnx.Module, batch: ClickBatch) -> jax.Array:
    return model(batch.dense, batch.features)


def _sums(logits: np.ndarray, batch: ClickBatch) -> np.ndarray:
    """Return the sums of cross entropy, labels and weights."""
    weights, labels = np.asarray(batch.weights), np.asarray(batch.labels)
    entropy = np.logaddexp(0, logits) - labels * logits
    values = (entropy, labels, np.ones_like(logits))
    return np.array([(weights * each).sum() for each in values])


def _normalized_entropy(entropy: float, clicks: float, samples: float) -> float:
    rate = clicks / samples
    best = -(rate * np.log(rate) + (1 - rate) * np.log1p(-rate))
    return float(entropy / samples / best)


if __name__ == "__main__":
    tyro.cli(ExchangePrecision).run()
