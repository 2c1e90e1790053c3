"""Training on a stream of ids without end, whose popularity drifts."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

import jaxrec
from jaxrec.metrics import NormalizedEntropy
from jaxrec.ragged import KeyedJaggedArray, hash_ids
from jaxrec.tier import Dynamic, lfu
from jaxrec.tier.ids.batch_ops import mix
from jaxrec.tier.planning.tier import tier_of
from jaxrec.train import compile_step

# Steps in which programs compile; their processor time is not counted.
_WARM_UP = 100

_NAMES = {
    "admission": "dynamic, lfu, admit_after=2",
    "no admission": "dynamic, lfu, admit_after=1",
    "hashing": "plain, ids hashed to as many rows",
}


@dataclasses.dataclass(frozen=True)
class Stream:
    """Memory, step time and accuracy over a stream of ids without end."""

    steps: int = 20_000
    """Steps of each model."""
    batch: int = 128
    """Samples of a step."""
    bag: int = 8
    """Ids of a sample."""
    possible: int = 10**9
    """Ids that may occur."""
    exponent: float = 1.05
    """The id of rank r occurs in proportion to 1 / r ** exponent."""
    drift: float = 0.25
    """Places that the top of the ranking moves with each step."""
    rows: int = 8192
    """Rows of the table."""
    dim: int = 8
    """Columns of the table."""
    counters: int = 131_072
    """Counters of sightings, in each of four lines."""
    interval: int = 500
    """Steps after which the models take turns, and figures are printed."""
    output: pathlib.Path | None = None
    """File name without its ending, for OUTPUT.json and the picture OUTPUT.png."""

    def run(self) -> None:
        if self.steps % self.interval or 1000 % self.interval or self.steps < 2000:
            raise SystemExit("steps must be 2000 or more and, like 1000, a multiple of interval")
        jaxrec.keep_freed_memory()
        runs = [_Run(self, name) for name in _NAMES]
        lines = []
        for end in range(self.interval, self.steps + 1, self.interval):
            for run in runs:
                run.train(self.interval)
            line = {
                "step": end,
                "rss_mb": _rss_mb(),
                "ne": {run.name: round(run.window_ne(), 4) for run in runs},
                "best_ne": round(_best_ne(self, end), 4),
                "step_ms": {run.name: run.recent_ms(self.interval) for run in runs},
            }
            lines.append(line)
            print(json.dumps(line), flush=True)
        summary = [run.summary() for run in runs]
        for line in summary:
            print(json.dumps(line), flush=True)
        if self.output is not None:
            settings = dataclasses.asdict(self) | {"output": self.output.name}
            result = {"settings": settings, "summary": summary, "intervals": lines}
            text = json.dumps(result, indent=1)
            self.output.with_suffix(".json").write_text(text + "\n")
            draw(self, lines, self.output.with_suffix(".png"))

    def batches(self) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Yield ids ``[batch, bag]``, labels and true probabilities, always the same."""
        for step in range(self.steps):
            yield self.draw(step)

    def draw(self, step: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        rng = np.random.default_rng((step, 1))
        half = self.possible // 2
        # The inverse of the distribution function of 1 / r ** exponent on [1, half].
        power = 1 - self.exponent
        uniform = rng.random((self.batch, self.bag))
        ranks = (1 + uniform * (float(half) ** power - 1)) ** (1 / power)
        # The ranking is the distance from a point that moves along all ids, so that an id rises
        # to the top and falls again. A multiplication scatters neighbours.
        sides = rng.integers(0, 2, ranks.shape) * 2 - 1
        places = (int(step * self.drift) + sides * ranks.astype(np.int64)) % self.possible
        ids = places * 387_420_489 % self.possible
        weights = mix(ids.reshape(-1), 7).astype(np.float64).reshape(ids.shape) / 2**64 - 0.5
        probability = 1 / (1 + np.exp(-(2.0 * weights.sum(axis=1) - 1)))
        labels = (rng.random(self.batch) < probability).astype(np.float32)
        return ids, labels, probability


class _Model(nnx.Module):
    def __init__(self, stream: Stream):
        config = jaxrec.EmbeddingBagConfig("item", stream.rows, stream.dim)
        rngs = nnx.Rngs(0)
        optimizer = jaxrec.optim.rowwise_adagrad(0.1)
        self.embeddings = jaxrec.EmbeddingBagCollection([config], optimizer=optimizer, rngs=rngs)
        self.over = nnx.Linear(stream.dim, 1, rngs=rngs)

    def __call__(self, features: KeyedJaggedArray) -> jax.Array:
        return self.over(self.embeddings(features).values)[:, 0]


class _Run:
    """The training of one model; the metric is of predictions before the update."""

    def __init__(self, stream: Stream, name: str):
        self.name = name
        model = _Model(stream)
        batches: Iterator[Any] = _packed(stream, is_hashed=name == "hashing")
        if name != "hashing":
            settings = Dynamic(
                eviction=lfu(), admit_after=2 if name == "admission" else 1,
                counters=stream.counters,
            )  # fmt: skip
            model = jaxrec.tier.make(model, {"item": settings})
            batches = jaxrec.tier.ahead(model, batches)
        self.model, self.batches = model, batches
        optimizer = jaxrec.Optimizer(model, optax.adagrad(0.05))
        self.metric = NormalizedEntropy(window=stream.interval * stream.batch)
        self.metric_state = nnx.Variable(self.metric.init())
        self.step = compile_step(self._step, model, optimizer, self.metric_state)
        self.num_steps = 0
        # Wall and processor milliseconds of each step.
        self.milliseconds = np.zeros((stream.steps, 2))

    def _step(self, model, optimizer, metric_state, features, labels):
        def loss_fn(model):
            logits = model(features)
            return optax.sigmoid_binary_cross_entropy(logits, labels).mean(), logits

        (loss, logits), gradients = jaxrec.value_and_grad(loss_fn, has_aux=True)(model)
        optimizer.update(model, gradients)
        state = metric_state.get_value()
        metric_state.set_value(self.metric.update(state, jax.nn.sigmoid(logits), labels))
        return loss

    def train(self, steps: int) -> None:
        for _ in range(steps):
            start = np.array([time.perf_counter(), time.process_time()])
            jax.block_until_ready(self.step(*next(self.batches)))
            end = np.array([time.perf_counter(), time.process_time()])
            self.milliseconds[self.num_steps] = (end - start) * 1e3
            self.num_steps += 1

    def ne(self) -> dict[str, float]:
        values = self.metric.compute(self.metric_state.get_value())
        return {name: float(value[0]) for name, value in values.items()}

    def window_ne(self) -> float:
        return self.ne()["window_ne"]

    def recent_ms(self, steps: int) -> float:
        """Return the median milliseconds of the last steps."""
        recent = self.milliseconds[self.num_steps - steps : self.num_steps, 0]
        return round(float(np.median(recent)), 3)

    def summary(self) -> dict[str, Any]:
        wall, processor = self.milliseconds.T
        ends = {
            "ms": (np.median(wall[:1000]), np.median(wall[-1000:])),
            "processor_ms": (processor[_WARM_UP:1000].mean(), processor[-1000:].mean()),
        }
        line: dict[str, Any] = {"model": self.name, "ne": round(self.ne()["lifetime_ne"], 4)}
        for name, (first, last) in ends.items():
            line[f"first_1000_{name}"] = round(float(first), 3)
            line[f"last_1000_{name}"] = round(float(last), 3)
            line[f"{name.removesuffix('ms')}ratio"] = round(float(last / first), 3)
        tier = tier_of(self.model)
        return line if tier is None else line | {"statistics": tier.statistics()["item"]}


def _packed(stream: Stream, *, is_hashed: bool) -> Iterator[tuple[KeyedJaggedArray, np.ndarray]]:
    lengths = np.full(stream.batch, stream.bag, np.int32)
    for ids, labels, _ in stream.batches():
        values = ids.reshape(-1)
        bits = 32 if is_hashed else 64
        if is_hashed:
            values = hash_ids(values, stream.rows)
        yield KeyedJaggedArray.from_lengths(["item"], values, lengths, id_bits=bits), labels


def _best_ne(stream: Stream, end: int) -> float:
    """Return the normalized entropy of the true probabilities, in the steps before one."""
    drawn = [stream.draw(step)[1:] for step in range(end - 100, end)]
    labels, probability = (np.concatenate(each) for each in zip(*drawn, strict=True))
    return float(_entropy(labels, probability) / _entropy(labels, labels.mean()))


def _entropy(labels: np.ndarray, probability: Any) -> np.ndarray:
    return -(labels * np.log(probability) + (1 - labels) * np.log1p(-probability)).mean()


def _rss_mb() -> float:
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return round(int(line.split()[1]) / 1024, 1)
    raise RuntimeError("this system does not tell the memory of a process")


def draw(stream: Stream, lines: list[dict[str, Any]], path: pathlib.Path) -> None:
    """Draw normalized entropy and memory by step."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 5), layout="constrained")
    entropy, memory = figure.subplots(2, sharex=True, height_ratios=(3, 1))
    steps = [line["step"] for line in lines]
    for name, label in _NAMES.items():
        entropy.plot(steps, [line["ne"][name] for line in lines], label=label)
    entropy.plot(steps, [line["best_ne"] for line in lines], "k:", label="true probabilities")
    entropy.set_ylabel("normalized entropy")
    entropy.set_title(f"{stream.possible:,} possible ids, {stream.rows:,} rows")
    entropy.legend()
    memory.plot(steps, [line["rss_mb"] for line in lines], "k")
    memory.set_ylim(0, 1.25 * max(line["rss_mb"] for line in lines))
    memory.set_ylabel("memory (MB)")
    memory.set_xlabel("step")
    figure.savefig(path, dpi=100)
