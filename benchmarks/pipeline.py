"""What the training pipeline hides, and what it costs.

Usage: python -m benchmarks.pipeline [--what parquet preprocessing] [--log train.txt]

Trains a DLRM on a generated log with 26 tables and prints one JSON line a measurement, each the
best of ``--repeats`` rounds in which what is compared takes turns:

- ``slow_reader``: a reader that sleeps as long as a step computes; seconds of the pipelined run
  over those of the plain loop (read, put, step, wait).
- ``parquet``: rows as ``jaxrec data criteo`` writes them, read by `jaxrec.data.BatchSource` with a
  shuffle; seconds of the pipelined run over those of the steps alone, on batches that are at hand.
  ``busy_ratio`` is the same of processor time: what it were if no core had time to spare.
- ``host_cost``: batches that are at hand, and of a size whose step takes about ``--host-step-ms``.
  ``dispatched_ratio``: seconds of `jaxrec.train`'s step, on batches on the device, over those of
  the bare jitted step in a loop; ``pipelined_ratio``: of the pipelined run, which also puts each
  batch on the device.
- ``preprocessing``: ``jaxrec data criteo`` on ``--log``, or on generated text: megabytes of text a
  second of processor time (on all cores, and on one), and the most memory of the process; and the
  milliseconds of processor time that a megabyte takes to read (text to arrays) and to write.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
import optax
import pyarrow as pa
import tyro
from flax import nnx

import jaxrec
from jaxrec.data import BatchSource, Clicks, GeneratedLog, ParquetGroups, Pipeline, batches
from jaxrec.data.arrays import to_numpy
from jaxrec.data.criteo.parts import parquet_writer
from jaxrec.data.transforms import CATEGORICAL_NAMES, NUM_CATEGORICAL, NUM_DENSE, log_counts
from jaxrec.nn import DLRM
from jaxrec.train import compile_step, put_batch
from jaxrec.train.models.labels import click_loss
from jaxrec.train.step import MAX_PENDING_STEPS

Measure = Literal["slow_reader", "parquet", "host_cost", "preprocessing"]


@dataclasses.dataclass(frozen=True)
class Options:
    """What is measured."""

    what: tuple[Measure, ...] = ("slow_reader", "parquet", "host_cost", "preprocessing")
    """Measurements."""
    batch: int = 2048
    """Samples of a step."""
    host_step_ms: float = 2.0
    """How long the bare step takes beside which the host's cost is measured."""
    steps: int = 240
    """Steps of a round."""
    repeats: int = 5
    """Rounds."""
    log: pathlib.Path | None = None
    """Text in Criteo's format; generated if not given."""
    text_megabytes: int = 200
    """Of generated text."""


def main(options: Options) -> None:
    jaxrec.keep_freed_memory()
    measures = {
        "slow_reader": _slow_reader,
        "parquet": _parquet,
        "host_cost": _host_cost,
        "preprocessing": _preprocessing,
    }
    for name in options.what:
        _print(name, measures[name](options))


def _print(name: str, values: dict[str, float]) -> None:
    rounded = {key: round(value, 4) for key, value in values.items()}
    print(json.dumps({"measure": name, "device": jax.devices()[0].device_kind, **rounded}))
    sys.stdout.flush()


def _rows(options: Options) -> Clicks:
    """Return rows for sixteen batches."""
    count = options.batch * 16
    return Clicks.concatenate(list(GeneratedLog(count).chunks(0, count)))


def _step() -> Any:
    rngs = nnx.Rngs(0)
    tables = [
        jaxrec.EmbeddingBagConfig(name, count, 16)
        for name, count in zip(CATEGORICAL_NAMES, GeneratedLog(1).table_rows, strict=True)
    ]
    model = DLRM(
        jaxrec.EmbeddingBagCollection(tables, rngs=rngs),
        num_dense=NUM_DENSE,
        bottom_layer_sizes=(128, 64, 16),
        top_layer_sizes=(128, 64, 1),
        rngs=rngs,
    )
    return compile_step(train_step, model, jaxrec.Optimizer(model, optax.adam(1e-3)))


def train_step(model: DLRM, optimizer: jaxrec.Optimizer, batch: Any) -> Any:
    """A step of ``jaxrec train``: the loss, with the outputs that running metrics read."""
    result, gradients = jaxrec.value_and_grad(click_loss, has_aux=True)(model, batch)
    optimizer.update(model, gradients)
    return result


def _plain(step: Callable[[Any], Any], reader: Iterable[Any]) -> None:
    for batch in reader:
        jax.block_until_ready(step(put_batch(batch)))


def _pipelined(step: Callable[[Any], Any], reader: Iterable[Any]) -> None:
    with Pipeline(reader, put_batch) as placed:
        _dispatched(step, placed)


def _dispatched(step: Callable[[Any], Any], placed: Iterable[Any]) -> None:
    """Steps on batches that are on the device, a few under way at once."""
    under_way: collections.deque[Any] = collections.deque()
    for batch in placed:
        under_way.append(step(batch))
        if len(under_way) > MAX_PENDING_STEPS:
            jax.block_until_ready(under_way.popleft())
    jax.block_until_ready(list(under_way))


class Least(NamedTuple):
    """The least of some rounds.

    Attributes:
        seconds: From the beginning to the end.
        busy: Of processor time, of all threads; what else the machine does hardly shows in it.
    """

    seconds: float
    busy: float


def _best(repeats: int, **runs: Callable[[], None]) -> dict[str, Least]:
    """The least time of each; they take turns, so that what else the machine does hits all."""
    least = dict.fromkeys(runs, Least(float("inf"), float("inf")))
    for _ in range(repeats + 1):  # the first round compiles, and cannot be the best
        for name, run in runs.items():
            start, busy = time.perf_counter(), time.process_time()
            run()
            took = (time.perf_counter() - start, time.process_time() - busy)
            least[name] = Least(*map(min, least[name], took))
    return least


def _cycle(items: list[Any], count: int) -> Iterator[Any]:
    return (items[i % len(items)] for i in range(count))


def _slow_reader(options: Options) -> dict[str, float]:
    step, rows = _step(), _rows(options)
    made = list(batches([rows], options.batch, CATEGORICAL_NAMES))
    alone = _best(options.repeats, alone=lambda: _plain(step, _cycle(made, options.steps)))["alone"]
    pause = alone.seconds / options.steps

    def reader() -> Iterator[Any]:
        for batch in _cycle(made, options.steps):
            time.sleep(pause)
            yield batch

    took = _best(
        options.repeats,
        plain=lambda: _plain(step, reader()),
        pipelined=lambda: _pipelined(step, reader()),
    )
    return {
        "step_ms": pause * 1e3,
        "plain_seconds": took["plain"].seconds,
        "pipelined_seconds": took["pipelined"].seconds,
        "ratio": took["pipelined"].seconds / took["plain"].seconds,
    }


def _parquet(options: Options) -> dict[str, float]:
    step = _step()
    count = options.steps * options.batch
    rows = Clicks.concatenate(list(GeneratedLog(count).chunks(0, count)))
    columns = {"label": rows.labels.astype(np.int32)}
    columns |= {f"int_{i}": np.exp(rows.dense[:, i]).astype(np.int32) for i in range(NUM_DENSE)}
    columns |= {name: rows.ids[:, i] for i, name in enumerate(CATEGORICAL_NAMES)}
    schema = pa.schema([pa.field(name, pa.int32(), nullable=False) for name in columns])

    def to_batch(table: pa.Table) -> Any:
        counts = np.stack([to_numpy(table[f"int_{i}"]) for i in range(NUM_DENSE)], axis=1)
        ids = np.stack([to_numpy(table[name]) for name in CATEGORICAL_NAMES]).T
        clicks = Clicks(to_numpy(table["label"]).astype(np.float32), log_counts(counts), ids)
        return next(batches([clicks], options.batch, CATEGORICAL_NAMES))

    with tempfile.TemporaryDirectory() as directory:
        path = pathlib.Path(directory) / "rows.parquet"
        with path.open("wb") as file, parquet_writer(file, schema, "lz4") as writer:
            table = pa.table(list(columns.values()), schema)
            writer.write_table(table, row_group_size=options.batch * 16)

        def reader() -> Iterator[Any]:
            groups = ParquetGroups((path,))  # nothing is left of what was read before
            source = BatchSource(groups, options.batch, to_batch, seed=0, window=2)
            return source.from_batch(threads=1, prefetch=2)

        # The same batches, so that rows of tables are as often in caches.
        on_device = [put_batch(batch) for batch in reader()]
        took = _best(
            options.repeats,
            alone=lambda: _dispatched(step, _cycle(on_device, options.steps)),
            pipelined=lambda: _pipelined(step, reader()),
            reading=lambda: collections.deque(reader(), maxlen=0),
        )
    return {
        "step_ms": took["alone"].seconds / options.steps * 1e3,
        "alone_seconds": took["alone"].seconds,
        "pipelined_seconds": took["pipelined"].seconds,
        "ratio": took["pipelined"].seconds / took["alone"].seconds,
        "reading_busy_seconds": took["reading"].busy,
        "busy_ratio": took["pipelined"].busy / took["alone"].busy,
    }


def _host_cost(options: Options) -> dict[str, float]:
    step, rows, count = _step(), _rows(options), options.steps
    rounds = options.repeats * 10  # of rounds as short as these some fall into quiet moments

    def bare_loop(on_device: list[Any], steps: int) -> Callable[[], None]:
        values = [variable.get_raw_value() for variable in step._variables]
        bare = step._compiled.lower(values, on_device[0]).compile()

        def loop() -> None:
            values = jax.tree.map(jax.numpy.array, [v.get_raw_value() for v in step._variables])
            under_way: collections.deque[Any] = collections.deque()
            for batch in _cycle(on_device, steps):
                values, result = bare(values, batch)
                under_way.append(result)
                if len(under_way) > MAX_PENDING_STEPS:
                    jax.block_until_ready(under_way.popleft())
            jax.block_until_ready(values)

        return loop

    def bare_ms(batch_size: int) -> float:
        batch = jax.device_put(next(batches([rows], batch_size, CATEGORICAL_NAMES)))
        took = _best(rounds, bare=bare_loop([batch], count))
        return took["bare"].seconds / count * 1e3

    # Nearly linear in the size of the batch.
    small, large = bare_ms(256), bare_ms(512)
    size = 256 + (options.host_step_ms - small) / (large - small) * 256
    made = list(batches([rows], max(16, round(size / 16) * 16), CATEGORICAL_NAMES))
    on_device = jax.device_put(made)
    took = _best(
        rounds,
        bare=bare_loop(on_device, count),
        dispatched=lambda: _dispatched(step, _cycle(on_device, count)),
        pipelined=lambda: _pipelined(step, _cycle(made, count)),
    )
    bare, dispatched, pipelined = (took[k] for k in ("bare", "dispatched", "pipelined"))
    return {
        "batch": made[0].labels.shape[0],
        "bare_ms": bare.seconds / count * 1e3,
        "dispatched_ms": dispatched.seconds / count * 1e3,
        "pipelined_ms": pipelined.seconds / count * 1e3,
        "dispatched_ratio": dispatched.seconds / bare.seconds,
        "pipelined_ratio": pipelined.seconds / bare.seconds,
        "dispatched_busy_ratio": dispatched.busy / bare.busy,
        "pipelined_busy_ratio": pipelined.busy / bare.busy,
    }


_CONVERT = """
import json, pathlib, resource, sys, time
from jaxrec.data.criteo.conversion import BLOCK_BYTES, convert
from jaxrec.data.criteo.parts import Conversion
from jaxrec.data.criteo.text import blocks_of_lines, parse_lines
source, output = map(pathlib.Path, sys.argv[1:])
before, start = time.process_time(), time.perf_counter()
if output.name == "read":
    for block in blocks_of_lines(source, BLOCK_BYTES):
        parse_lines(block, source)
else:
    convert(source, output, Conversion(), threads=1 if output.name == "one" else None)
busy, seconds = time.process_time() - before, time.perf_counter() - start
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
status = pathlib.Path("/proc/self/status")
if status.exists():  # there the other number is the parent's, where that is larger
    peak = next(int(x.split()[1]) for x in status.read_text().splitlines() if "VmHWM" in x)
print(json.dumps([busy, seconds, peak]))
"""


def _preprocessing(options: Options) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as directory:
        log = options.log or _text(pathlib.Path(directory) / "log", options.text_megabytes)
        size = log.stat().st_size / 1e6

        # Processor seconds, seconds and peak memory of each round; the kinds take turns.
        made: dict[str, list[list[float]]] = {"read": [], "one": [], "all": []}
        for _ in range(options.repeats):
            for kind, rounds in made.items():
                output = pathlib.Path(directory) / kind
                command = [sys.executable, "-c", _CONVERT, str(log), str(output)]
                done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
                rounds.append(json.loads(done.stdout))
                shutil.rmtree(output, ignore_errors=True)
    read, one = (min(busy for busy, _, _ in made[kind]) for kind in ("read", "one"))
    busy, seconds, peaks = zip(*made["all"], strict=True)
    return {
        "megabytes": size,
        "megabytes_per_core_second": size / min(busy),
        "one_core_megabytes_per_core_second": size / one,
        "read_ms_per_megabyte": read / size * 1e3,
        "write_ms_per_megabyte": (one - read) / size * 1e3,
        "megabytes_per_second": size / min(seconds),
        "peak_megabytes": max(peaks) / (1e3 if sys.platform != "darwin" else 1e6),
    }


def _text(path: pathlib.Path, megabytes: int) -> pathlib.Path:
    """Lines as in Criteo's log: small counts, a few negative, some missing, and hashes."""
    rng = np.random.default_rng(0)
    with path.open("wb") as file:
        while file.tell() < megabytes * 1e6:
            counts = np.exp(rng.standard_normal((10_000, NUM_DENSE)) * 1.2 + 2).astype(int)
            counts[:, 1] -= 3
            missing = rng.random((10_000, NUM_DENSE + NUM_CATEGORICAL)) < 0.1
            hashes = rng.integers(0, 2**32, (10_000, NUM_CATEGORICAL))
            for label, row, ids, left_out in zip(
                rng.integers(0, 2, 10_000), counts, hashes, missing, strict=True
            ):
                fields = [str(x) for x in row] + [f"{x:08x}" for x in ids]
                fields = ["" if out else x for x, out in zip(fields, left_out, strict=True)]
                file.write("\t".join([str(label), *fields]).encode() + b"\n")
    return path


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
