"""Times an exported DLRM in Python, in C++ and over HTTP, beside TorchRec's quantized DLRM.

Usage: python -m benchmarks.serving RUN --cpp BUILD --pjrt DIRECTORY [--peer-python PATH] [--http]
                                    [--open-share 0.5] [--rounds 3] [--seconds 2] [--threads 2]
                                    [--output FILE]
       python -m benchmarks.serving RUN --cpp BUILD --fuzz 1000000

RUN is the directory of a run of `jaxrec train` on the generated log, BUILD the directory that cpp/
was built in, DIRECTORY what cpp/get_pjrt.sh filled, and PATH the Python of an environment with
torch, torchrec and fbgemm-gpu-cpu. A round answers the same requests of 1,
64 and 1,024 samples with each side in turn, one request after the other, and prints a JSON line for
each. The last line of each side and batch is the median over the rounds. Each process may use
`threads` cores. C++ is timed with as many callers, too, and the peer with one thread, with
`threads` of them and with as many callers of one thread each: the latencies are those of the
fastest of these, `samples_per_s` is the highest.

`--http` times `jaxrec serve` as well, with JSON and with Arrow bodies of raw columns, sent over one
connection from this process on the same cores; it needs the extra `serve`. The other sides get row
indices.

`--open-share` times requests that are due at fixed times, too, at this share of the rate that the
side had with one request after the other: `open_p50_us` and `open_p99_us` are from when a request
is due to its scores, so that they have the time that it waits for others.

With `--fuzz` the C++ program reads that many changed manifests and requests; build it with
-DJAXREC_SANITIZE=ON -DJAXREC_ONLY_PARSERS=ON.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any

import numpy as np
import tyro

_HERE = pathlib.Path(__file__).parent
SAMPLES = 16384  # that requests are cut from
FIGURES = ("p50_us", "p99_us", "samples_per_s", "open_per_s", "open_p50_us", "open_p99_us")


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the measurement.

    Attributes:
        run: Directory of a run of `jaxrec train` on the generated log.
        cpp: Directory that cpp/ was built in; None: Python alone.
        pjrt: Directory that cpp/get_pjrt.sh filled.
        peer_python: Python of the peer's environment; None: do not time the peer.
        http: Whether `jaxrec serve` is timed.
        open_share: Rate of requests that are due at fixed times, as a share of the rate of one
            request after the other; 0: none are.
        rounds: How often each side is timed.
        seconds: Time for each batch size of a round.
        threads: Processor cores to use.
        batches: Samples of a request.
        dtypes: Types of the tables.
        fuzz: Number of changed inputs that the C++ program reads; nothing is timed then.
        seed: Seed of the changes.
        output: File that the lines are added to, too.
    """

    run: Annotated[pathlib.Path, tyro.conf.Positional]
    cpp: pathlib.Path | None = None
    pjrt: pathlib.Path | None = None
    peer_python: pathlib.Path | None = None
    http: bool = False
    open_share: float = 0.0
    rounds: int = 3
    seconds: float = 2.0
    threads: int = 2
    batches: tuple[int, ...] = (1, 64, 1024)
    dtypes: tuple[str, ...] = ("float32", "int8")
    fuzz: int = 0
    seed: int = 0
    output: pathlib.Path | None = None


def main(options: Options) -> None:
    # XLA takes one thread for each core that the process may run on.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.threads])
    with tempfile.TemporaryDirectory() as temporary:
        directory = pathlib.Path(temporary)
        config = export_models(options, directory)
        write_requests(config, directory)
        if options.fuzz:
            return fuzz(options, directory)
        measure_all(options, directory)


def export_models(options: Options, directory: pathlib.Path) -> Any:
    """Export the run's model with tables of each type; return its configuration."""
    from jaxrec.serve import export, quantize
    from jaxrec.serve.exported_run import column_encoder, predictions
    from jaxrec.train import load_model
    from jaxrec.train.config import CONFIG_FILE, load_config

    model, encoder = load_model(options.run), column_encoder(options.run)
    for dtype in options.dtypes:
        export(
            model if dtype == "float32" else quantize(model, dtype),
            directory / dtype,
            function=predictions(options.run, encoder),
            encoder=encoder,
            batch_sizes=options.batches,
            platforms=("cpu",),
        )
    return load_config(options.run / CONFIG_FILE)


def write_requests(config: Any, directory: pathlib.Path) -> None:
    """Write samples with one random id for each table, for all sides."""
    from jaxrec.train.features import text_table_rows

    rng, rows = np.random.default_rng(0), np.array(text_table_rows(config))
    ids = (rng.random((len(rows), SAMPLES)) * rows[:, None]).astype(np.int32)
    dense = rng.standard_normal((SAMPLES, 13), np.float32)
    sizes = {"bottom": [*config.model.bottom_layer_sizes, config.model.embedding_dim]}
    sizes |= {"top": [*config.model.top_layer_sizes, 1], "dim": config.model.embedding_dim}
    np.savez(directory / "requests.npz", dense=dense, ids=ids, rows=rows, **sizes)


def measure_all(options: Options, directory: pathlib.Path) -> None:
    figures: dict[tuple[str, str, int], list[dict[str, Any]]] = defaultdict(list)
    with np.load(directory / "requests.npz") as file:
        given = dict(file)
    for number in range(options.rounds):
        for dtype in options.dtypes:
            sides = {"python": measure_python(options, directory / dtype, given)}
            if options.cpp is not None:
                sides["c++"] = measure_cpp(options, directory / dtype, given)
            if options.http:
                sides |= measure_http(options, directory / dtype)
            if options.peer_python is not None and dtype == "int8":
                sides["torchrec"] = measure_peer(options, directory)
            for side, lines in sides.items():
                for line in lines:
                    figures[side, dtype, line["batch"]].append(line)
                    say(options, {"round": number, "side": side, "tables": dtype, **line})
    for (side, dtype, batch), lines in figures.items():
        medians = {
            name: float(np.median([line[name] for line in lines]))
            for name in FIGURES
            if name in lines[0]
        }
        say(options, {"median": side, "tables": dtype, "batch": batch, **medians})


def say(options: Options, line: dict[str, Any]) -> None:
    text = json.dumps(line | {"load": round(os.getloadavg()[0], 1)})
    print(text, flush=True)
    if options.output is not None:
        with options.output.open("a") as file:
            file.write(text + "\n")


def measure_python(
    options: Options, model: pathlib.Path, given: dict[str, np.ndarray]
) -> list[dict[str, Any]]:
    """Time `ServedModel.predict`, and the batch that a request is made into."""
    import jaxrec

    served = jaxrec.serve.load(model)
    keys = served.manifest.batch.ragged[0].keys
    lines = []
    for size in options.batches:
        parts = [slice(start, start + size) for start in range(0, SAMPLES - size + 1, size)]

        def predict(number: int, size: int = size, parts: Sequence[slice] = parts) -> None:
            part = parts[number % len(parts)]
            ids = np.ascontiguousarray(given["ids"][:, part]).reshape(-1)
            features = jaxrec.KeyedJaggedArray.from_lengths(
                keys=keys, values=ids, lengths=np.ones(len(keys) * size, np.int32)
            )
            served.predict(given["dense"][part], features)

        lines.append(figures_of(options, size, predict))
    return lines


def figures_of(options: Options, size: int, predict: Callable[[int], None]) -> dict[str, Any]:
    """Time a function that predicts the request of a number, which has ``size`` samples."""
    for number in range(20):
        predict(number)
    latencies: list[float] = []
    start = time.perf_counter()
    while time.perf_counter() - start < options.seconds or len(latencies) < 3:
        begin = time.perf_counter()
        predict(len(latencies))
        latencies.append(time.perf_counter() - begin)
    rate = len(latencies) / (time.perf_counter() - start)
    line = {"batch": size, "samples_per_s": round(rate * size)} | percentiles(latencies)
    if options.open_share:
        rate *= options.open_share
        latencies, start = [], time.perf_counter()
        for number in range(max(20, int(rate * options.seconds))):
            due = start + number / rate
            if (wait := due - time.perf_counter()) > 0:
                time.sleep(wait)
            predict(number)
            latencies.append(time.perf_counter() - due)
        line |= {"open_per_s": round(rate, 1)} | percentiles(latencies, "open_")
    return line


def percentiles(seconds: Sequence[float], prefix: str = "") -> dict[str, float]:
    """Return the median and the 99th percentile in microseconds."""
    p50, p99 = np.percentile(seconds, (50, 99)) * 1e6
    return {f"{prefix}p50_us": round(p50, 1), f"{prefix}p99_us": round(p99, 1)}


def measure_http(options: Options, model: pathlib.Path) -> dict[str, list[dict[str, Any]]]:
    """Time requests to `jaxrec serve`, which holds no request back to join it with others."""
    from benchmarks import serving_http

    lines: dict[str, list[dict[str, Any]]] = {}
    with serving_http.server(model, "--max-delay-ms", "0") as running:
        for kind, side in ((serving_http.JSON, "http json"), (serving_http.ARROW, "http arrow")):
            lines[side] = []
            for size in options.batches:
                request = serving_http.request_of(serving_http.columns_of(model, size), kind)
                lines[side].append(asyncio.run(_over_http(options, running.port, request, size)))
    return lines


async def _over_http(options: Options, port: int, request: bytes, size: int) -> dict[str, Any]:
    from benchmarks.serving_http import Connection, open_loop

    connection = await Connection.open(port)

    async def predict() -> float:
        begin = time.perf_counter()
        status, body = await connection.send(request)
        assert status == 200, body
        return time.perf_counter() - begin

    for _ in range(20):
        await predict()
    latencies, start = [], time.perf_counter()
    while time.perf_counter() - start < options.seconds or len(latencies) < 3:
        latencies.append(await predict())
    rate = len(latencies) / (time.perf_counter() - start)
    connection.close()
    line = {"batch": size, "samples_per_s": round(rate * size)} | percentiles(latencies)
    if options.open_share:
        rate *= options.open_share
        milliseconds = await open_loop(port, request, rate, options.seconds)
        line |= {"open_per_s": round(rate, 1)} | percentiles(milliseconds / 1e3, "open_")
    return line


def json_requests(path: pathlib.Path, model: pathlib.Path, given: dict[str, np.ndarray]) -> None:
    """Write the requests as JSON lines, which the C++ program reads before it measures."""
    import jaxrec

    keys = jaxrec.serve.load(model, verify=False).manifest.batch.ragged[0].keys
    with path.open("w") as file:
        for start in range(0, SAMPLES, 1024):
            part = slice(start, start + 1024)
            columns = {"input0": given["dense"][part].tolist()}
            ids = zip(keys, given["ids"][:, part], strict=True)
            columns |= {key: row[:, None].tolist() for key, row in ids}
            file.write(json.dumps(columns) + "\n")


def measure_cpp(
    options: Options, model: pathlib.Path, given: dict[str, np.ndarray]
) -> list[dict[str, Any]]:
    assert options.cpp is not None
    if options.pjrt is None:
        raise SystemExit("give --pjrt, the directory that cpp/get_pjrt.sh filled")
    import jaxrec.embed.kernels

    requests = model.parent / "requests.jsonl"
    if not requests.exists():
        json_requests(requests, model, given)
    library = pathlib.Path(jaxrec.embed.kernels.__file__).parent / "native" / "libjaxrec.so"
    command = [
        str(options.cpp / "jaxrec_predict"),
        str(model),
        "--benchmark",
        *("--plugin", str(options.pjrt / "plugin.so")),
        *("--native-library", str(library)),
        "--encoded",
        *("--input", str(requests)),
        *("--seconds", str(options.seconds)),
        *("--open-share", str(options.open_share), "--max-delay-us", "0"),
        *("--batch", *map(str, options.batches)),
    ]
    return best_of(
        run([*command, "--threads", str(callers)]) for callers in sorted({1, options.threads})
    )


def measure_peer(options: Options, directory: pathlib.Path) -> list[dict[str, Any]]:
    """Time the peer with one thread and with all, and with as many callers of one thread."""
    command = [
        str(options.peer_python),
        str(_HERE / "peer_serving.py"),
        str(directory / "requests.npz"),
        *("--seconds", str(options.seconds)),
        *("--open-share", str(options.open_share)),
        *("--batches", *map(str, options.batches)),
    ]
    ways = sorted({(1, 1), (options.threads, 1), (1, options.threads)})
    return best_of(
        run([*command, "--threads", str(threads), "--callers", str(callers)])
        for threads, callers in ways
    )


def best_of(ways: Iterable[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return for each batch the latencies of the fastest way, and the highest throughput."""
    best: dict[int, dict[str, Any]] = {}
    for line in (line for lines in ways for line in lines):
        known = best.setdefault(line["batch"], line)
        fastest = min(known, line, key=lambda each: each["p50_us"])
        highest = max(known, line, key=lambda each: each["samples_per_s"])
        best[line["batch"]] = fastest | {"samples_per_s": highest["samples_per_s"]}
    return list(best.values())


def run(command: list[str]) -> list[dict[str, Any]]:
    """Run a program that prints JSON lines."""
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def fuzz(options: Options, directory: pathlib.Path) -> None:
    """Let the C++ program read changed manifests and requests."""
    if options.cpp is None:
        raise SystemExit("give --cpp, the directory that cpp/ was built in")
    model = directory / options.dtypes[0]
    from benchmarks.serving_http import columns_of

    requests = directory / "fuzz.jsonl"
    # Short requests: their changes meet more of what is read.
    lines = [json.dumps(columns_of(model, samples)) for samples in (1, 2, 3, 3, 3)]
    requests.write_text("\n".join(lines) + "\n")
    program = str(options.cpp / "jaxrec_fuzz")
    arguments = [str(model), str(requests), str(options.fuzz), str(options.seed)]
    sys.exit(subprocess.run([program, *arguments]).returncode)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
