"""Processor time of requests to an exported ranker, with and without cached histories.

    python -m benchmarks.ranker_serving [--output benchmarks/results/ranker_serving.json]

An HSTU ranker of 3 layers of 128 columns scores 512 candidates against a history of 1,024 events.
Each line of JSON has the median and the p99 of the processor time of a request, in milliseconds, so
that other programs on the machine do not count. The ways:

* ``one pass``: the training model on history and candidates, compiled;
* ``pass per micro-batch``: the same for each micro-batch of candidates, without a cache between;
* ``miss``: the history is encoded, and the candidates are scored in micro-batches;
* ``append``: 16 new events are appended to the cache first;
* ``hit``: the history is cached;
* ``hit, JSON``: from the JSON body of a request to that of the response, as `jaxrec serve` does.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import tyro
from flax import nnx

import jaxrec
from jaxrec.nn import HSTURanker, RankerFeatures, TargetTask
from jaxrec.serve import export_ranker, load_ranker

ITEMS, USERS, NEW = 100_000, 10_000, 16


@dataclasses.dataclass(frozen=True)
class Options:
    events: int = 1024
    candidates: int = 512
    layers: int = 3
    dim: int = 128
    heads: int = 4
    micro_batch: int = 128
    requests: int = 200
    """Requests of each way."""
    output: pathlib.Path | None = None
    """JSON file of the results."""


def make_model(options: Options) -> HSTURanker:
    rngs = nnx.Rngs(0)
    tables = [
        jaxrec.EmbeddingConfig("item", ITEMS, 64, feature_names=("history", "candidate")),
        jaxrec.EmbeddingConfig("user", USERS, 64),
    ]
    model = HSTURanker(
        jaxrec.EmbeddingCollection(tables, rngs=rngs),
        RankerFeatures(
            {"history": "candidate"},
            context={"user": 1},
            times=("time", "candidate_time"),
            actions=("action", "label"),
        ),
        [TargetTask("click", bit=1), TargetTask("like", bit=2)],
        dim=options.dim,
        num_layers=options.layers,
        num_heads=options.heads,
        max_length=1 + options.events + NEW,
        action_bits=(1, 2),
        count_from="start",
        rngs=rngs,
    )
    model.eval()
    return model


def rows_of(options: Options, events: int, seed: int) -> dict[str, list[list[int]]]:
    """Return the columns of one row."""
    rng = np.random.default_rng(seed)
    times = np.arange(events) * 60
    return {
        "user": [[int(rng.integers(USERS))]],
        "history": [rng.integers(0, ITEMS, events).tolist()],
        "time": [times.tolist()],
        "action": [rng.integers(0, 4, events).tolist()],
        "candidate": [rng.integers(0, ITEMS, options.candidates).tolist()],
        "candidate_time": [[events * 60] * options.candidates],
    }


def pack(columns: dict[str, list[list[int]]]) -> jaxrec.KeyedJaggedArray:
    return jaxrec.KeyedJaggedArray.from_lists(columns)


def one_pass(options: Options, model: HSTURanker, size: int) -> Iterator[Callable[[], Any]]:
    """Yield requests that score ``size`` candidates in each pass."""
    predict = nnx.jit(lambda model, batch: model.tasks.predictions(model(batch)), graph=False)
    for seed in range(options.requests + 1):
        columns = rows_of(options, options.events, seed)
        parts = []
        for start in range(0, options.candidates, size):
            part = dict(columns)
            for name in ("candidate", "candidate_time"):
                part[name] = [columns[name][0][start : start + size]]
            parts.append(pack(part))
        yield lambda parts=parts: [np.asarray(predict(model, part)) for part in parts]


def cached(options: Options, path: pathlib.Path, way: str) -> Iterator[Callable[[], Any]]:
    """Yield requests to the exported ranker, whose histories are cached as the way says."""
    ranker = load_ranker(path)
    for seed in range(options.requests + 1):
        columns = rows_of(options, options.events, seed)
        batch, known = pack(columns), dict(columns)
        if way == "append":
            for name in ("history", "time", "action"):
                known[name] = [columns[name][0][: options.events - NEW]]
        if way != "miss":
            ranker.predict(pack(known), ["a user"])
        yield lambda batch=batch: ranker.predict(batch, ["a user"])
    counts = ranker.cache_counts
    wanted = counts.misses if way == "miss" else counts.appends if way == "append" else counts.hits
    assert wanted == options.requests + 1, counts


def over_json(options: Options, path: pathlib.Path) -> Iterator[Callable[[], Any]]:
    """Yield requests from a JSON body to another one."""
    from jaxrec.serve.http.bodies import JsonDecoder, encode_json
    from jaxrec.serve.http.ranker_predictor import RankerPredictor

    predictor = RankerPredictor(load_ranker(path))
    decoder = JsonDecoder(predictor.columns, 1000)

    def answer(body: bytes) -> bytes:
        (scores,) = predictor.predict([decoder.decode(body)])
        return encode_json(scores.columns)

    for seed in range(options.requests + 1):
        columns: dict[str, Any] = {"cache_key": ["a user"]}
        body = json.dumps(columns | rows_of(options, options.events, seed)).encode()
        answer(body)
        yield lambda body=body: answer(body)


def milliseconds(requests: Iterator[Callable[[], Any]]) -> np.ndarray:
    """Return the processor time of each request; the first one compiles and is left out."""
    times = []
    for request in requests:
        start = time.process_time()
        request()
        times.append(1000 * (time.process_time() - start))
    return np.array(times[1:])


def main(options: Options) -> None:
    model = make_model(options)
    with tempfile.TemporaryDirectory() as directory:
        path = pathlib.Path(directory, "ranker")
        export_ranker(
            model,
            path,
            history_sizes=(options.events,),
            candidate_sizes=(options.micro_batch,),
            append_sizes=(NEW,),
            platforms=("cpu",),
        )
        ways = {
            "one pass": one_pass(options, model, options.candidates),
            "pass per micro-batch": one_pass(options, model, options.micro_batch),
            "miss": cached(options, path, "miss"),
            "append": cached(options, path, "append"),
            "hit": cached(options, path, "hit"),
            "hit, JSON": over_json(options, path),
        }
        lines: list[dict[str, Any]] = []
        for way, requests in ways.items():
            times = milliseconds(requests)
            lines.append(
                {
                    "way": way,
                    "cpu_ms_p50": round(float(np.median(times)), 2),
                    "cpu_ms_p99": round(float(np.quantile(times, 0.99)), 2),
                }
            )
            print(json.dumps(lines[-1]), flush=True)
    hit = next(line["cpu_ms_p50"] for line in lines if line["way"] == "hit")
    for line in lines:
        line["hit_share"] = round(hit / line["cpu_ms_p50"], 3)
    result = {
        "jax": jax.__version__,
        "options": {k: v for k, v in dataclasses.asdict(options).items() if k != "output"},
        "ways": lines,
    }
    print(json.dumps({"hit_share": {line["way"]: line["hit_share"] for line in lines}}))
    if options.output is not None:
        options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
