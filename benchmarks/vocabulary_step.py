"""The step of tables with open vocabularies beside that of plain tables."""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

import jaxrec
from jaxrec.data import Pipeline
from jaxrec.ragged import KeyedJaggedArray
from jaxrec.tier import Dynamic
from jaxrec.tier.planning.tier import tier_of
from jaxrec.train import compile_step, put_batch


@dataclasses.dataclass(frozen=True)
class Step:
    """Step time with open vocabularies over that of plain tables."""

    batch: int = 2048
    """Samples of a step."""
    features: int = 26
    """Features, each with a table."""
    bag: int = 10
    """Ids of a sample, for each feature."""
    rows: int = 50_000
    """Rows of a table."""
    dim: int = 64
    """Columns of a table."""
    fresh: float = 0.01
    """Share of the lookups whose id never came before."""
    steps: int = 20
    """Steps of a round."""
    rounds: int = 7
    """Rounds, in which the models take turns."""

    def run(self) -> None:
        jaxrec.keep_freed_memory()
        runs = {"plain": self.plain(), "dynamic": self.dynamic()}
        tier = tier_of(runs["dynamic"].model)
        assert tier is not None
        full = 10 * self.rows // (self.batch * self.bag)  # by then there is no free row
        for run in runs.values():
            run.train(full + self.steps)
        before = tier.statistics()
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
        for _ in range(self.rounds):
            for name, run in runs.items():
                times[name].append(run.train(self.steps))
        after = tier.statistics()
        hits, lookups, evicted = (
            sum(after[name][key] - before[name][key] for name in after)
            for key in ("hits", "lookups", "evicted")
        )
        ratios = np.array(times["dynamic"]) / np.array(times["plain"])
        for name, of_run in times.items():
            wall, processor = (1e3 * statistics.median(each) for each in zip(*of_run, strict=True))
            line = {"model": name, "step_ms": round(wall, 2), "processor_ms": round(processor, 2)}
            print(json.dumps(line))
        wall, processor = np.transpose(ratios)
        line = {"hit_rate": round(hits / lookups, 4), "evicted_per_step": 0.0}
        line["evicted_per_step"] = round(evicted / (self.rounds * self.steps), 1)
        line |= {"ratio": quantiles(wall), "processor_ratio": quantiles(processor)}
        print(json.dumps(line))

    def plain(self) -> Run:
        with_rows = self.batches(id_bits=32)
        return Run(self.model(), Pipeline(with_rows, put_batch, ahead=4))

    def dynamic(self) -> Run:
        model = self.model()
        tables = {f"f{i}": Dynamic() for i in range(self.features)}
        model = jaxrec.tier.make(model, tables)
        batches = jaxrec.tier.ahead(model, self.batches(id_bits=64), place=put_batch)
        return Run(model, batches)

    def model(self) -> nnx.Module:
        return Model(self)

    def batches(self, id_bits: int) -> Iterator[Any]:
        """Yield batches without end: power-law ids of 9/10 of the rows, and some that are new.

        The first batches have as many new ids as the table has rows. With 32 bits ids are rows,
        and an id that never came before reads one of the other rows. Either way the rows of
        frequent ids are scattered over the table.
        """
        rng = np.random.default_rng(0)
        keys = [f"f{i}" for i in range(self.features)]
        count = self.batch * self.bag
        lengths = np.full(self.features * self.batch, self.bag, np.int32)
        known = self.rows * 9 // 10
        next_id = self.rows
        pool = [
            np.minimum(known ** rng.random((self.features, count)) - 1, known - 1).astype(np.int64)
            for _ in range(8)
        ]
        scattered = rng.permutation(self.rows)
        labels = rng.integers(0, 2, self.batch).astype(np.float32)
        for step in range(2**31):
            ids = pool[step % 8].copy()
            num_fresh = count // 10 if next_id < 2 * self.rows else round(self.fresh * count)
            fresh = np.arange(next_id, next_id + num_fresh)
            next_id += num_fresh
            if id_bits == 32:
                fresh = known + fresh % (self.rows - known)
            ids[:, rng.integers(0, count, num_fresh)] = fresh
            ids = ids.reshape(-1)
            ids = scattered[ids] if id_bits == 32 else ids * 387_420_489 + 2**40
            yield KeyedJaggedArray.from_lengths(keys, ids, lengths, id_bits=id_bits), labels


class Model(nnx.Module):
    def __init__(self, settings: Any):
        configs = [
            jaxrec.EmbeddingBagConfig(f"f{i}", settings.rows, settings.dim)
            for i in range(settings.features)
        ]
        rngs = nnx.Rngs(0)
        optimizer = jaxrec.optim.rowwise_adagrad(0.01)
        self.embeddings = jaxrec.EmbeddingBagCollection(configs, optimizer=optimizer, rngs=rngs)
        self.over = nnx.Linear(settings.features * settings.dim, 1, rngs=rngs)

    def __call__(self, features: KeyedJaggedArray) -> jax.Array:
        return self.over(self.embeddings(features).values)[:, 0]


class Run:
    def __init__(self, model: nnx.Module, batches: Any):
        self.model, self.batches = model, batches
        self.step = compile_step(_train_step, model, jaxrec.Optimizer(model, optax.adam(1e-3)))

    def train(self, steps: int) -> tuple[float, float]:
        """Train; return the seconds and the seconds of processor time of a step."""
        start = time.perf_counter(), time.process_time()
        for _ in range(steps):
            jax.block_until_ready(self.step(next(self.batches)))
        return (time.perf_counter() - start[0]) / steps, (time.process_time() - start[1]) / steps


def _train_step(model, optimizer, batch):
    features, labels = batch

    def loss_fn(model):
        return optax.sigmoid_binary_cross_entropy(model(features), labels).mean()

    loss, gradients = jaxrec.value_and_grad(loss_fn)(model)
    optimizer.update(model, gradients)
    return loss


def quantiles(ratios: np.ndarray) -> dict[str, float]:
    values = np.quantile(ratios, (0, 0.5, 1)).round(3).tolist()
    return dict(zip(("least", "median", "greatest"), values, strict=True))
