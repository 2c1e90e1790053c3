"""Times an exported DLRM in Python and in C++, beside TorchRec's scripted quantized DLRM.

Usage: python -m benchmarks.serving RUN --cpp BUILD --pjrt DIRECTORY [--peer-python PATH]
                                    [--rounds 3] [--seconds 2] [--threads 2] [--output FILE]
       python -m benchmarks.serving RUN --cpp BUILD --fuzz 1000000

RUN is the directory of a run of `jaxrec train` on the generated log, BUILD the directory that cpp/
was built in, DIRECTORY what cpp/get_pjrt.sh filled, and PATH the Python of an environment with
torch, torchrec and fbgemm-gpu-cpu. A round answers the same requests of 1,
64 and 1,024 samples with each side in turn, one request after the other, and prints a JSON line for
each. The last line of each side and batch is the median over the rounds. Each process may use
`threads` cores; the peer is timed with one thread, too, and its better figures count.

With `--fuzz` the C++ program reads that many changed manifests and requests; build it with
-DJAXREC_SANITIZE=ON -DJAXREC_ONLY_PARSERS=ON.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from typing import Annotated, Any

import numpy as np
import tyro

_HERE = pathlib.Path(__file__).parent
SAMPLES = 16384  # that requests are cut from
FIGURES = ("p50_us", "p99_us", "samples_per_s")


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the measurement.

    Attributes:
        run: Directory of a run of `jaxrec train` on the generated log.
        cpp: Directory that cpp/ was built in; None: Python alone.
        pjrt: Directory that cpp/get_pjrt.sh filled.
        peer_python: Python of the peer's environment; None: do not time the peer.
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
    from jaxrec.serve.commands.export import click_scores, column_encoder
    from jaxrec.train import load_model
    from jaxrec.train.model import CONFIG_FILE
    from jaxrec.train.options import load_config

    model, encoder = load_model(options.run), column_encoder(options.run)
    for dtype in options.dtypes:
        export(
            model if dtype == "float32" else quantize(model, dtype),
            directory / dtype,
            function=click_scores,
            encoder=encoder,
            batch_sizes=options.batches,
            platforms=("cpu",),
        )
    return load_config(options.run / CONFIG_FILE)


def write_requests(config: Any, directory: pathlib.Path) -> None:
    """Write samples with one random id for each table, for all sides."""
    from jaxrec.train.model import table_rows

    rng, rows = np.random.default_rng(0), np.array(table_rows(config))
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
            if options.peer_python is not None and dtype == "int8":
                sides["torchrec"] = measure_peer(options, directory)
            for side, lines in sides.items():
                for line in lines:
                    figures[side, dtype, line["batch"]].append(line)
                    say(options, {"round": number, "side": side, "tables": dtype, **line})
    for (side, dtype, batch), lines in figures.items():
        medians = {name: float(np.median([line[name] for line in lines])) for name in FIGURES}
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

        def predict(part: slice, size: int = size) -> None:
            ids = np.ascontiguousarray(given["ids"][:, part]).reshape(-1)
            features = jaxrec.KeyedJaggedArray.from_lengths(
                keys=keys, values=ids, lengths=np.ones(len(keys) * size, np.int32)
            )
            served.predict(given["dense"][part], features)

        for number in range(20):
            predict(parts[number % len(parts)])
        latencies: list[float] = []
        start = time.perf_counter()
        while time.perf_counter() - start < options.seconds or len(latencies) < 3:
            begin = time.perf_counter()
            predict(parts[len(latencies) % len(parts)])
            latencies.append(time.perf_counter() - begin)
        elapsed = time.perf_counter() - start
        p50, p99 = np.percentile(latencies, (50, 99)) * 1e6
        line = {"batch": size, "p50_us": round(p50, 1), "p99_us": round(p99, 1)}
        lines.append(line | {"samples_per_s": round(len(latencies) * size / elapsed)})
    return lines


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
    return run(
        [
            str(options.cpp / "jaxrec_predict"),
            str(model),
            "--benchmark",
            *("--plugin", str(options.pjrt / "plugin.so")),
            *("--native-library", str(library)),
            *("--input", str(requests)),
            *("--seconds", str(options.seconds)),
            *("--batch", *map(str, options.batches)),
        ]
    )


def measure_peer(options: Options, directory: pathlib.Path) -> list[dict[str, Any]]:
    """Time the peer with one thread and with all; return the faster figures of each batch."""
    best: dict[int, dict[str, Any]] = {}
    for threads in sorted({1, options.threads}):
        lines = run(
            [
                str(options.peer_python),
                str(_HERE / "peer_serving.py"),
                str(directory / "requests.npz"),
                *("--seconds", str(options.seconds)),
                *("--threads", str(threads)),
                *("--batches", *map(str, options.batches)),
            ]
        )
        for line in lines:
            known = best.setdefault(line["batch"], line)
            if line["p50_us"] < known["p50_us"]:
                best[line["batch"]] = line
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
    with np.load(directory / "requests.npz") as file:
        given = dict(file)
    requests = directory / "fuzz.jsonl"
    json_requests(requests, model, {name: given[name] for name in ("dense", "ids")})
    # Short requests: their changes meet more of what is read.
    lines = []
    for line in requests.read_text().splitlines():
        columns = json.loads(line)
        lines.append(json.dumps({name: values[:3] for name, values in columns.items()}))
    requests.write_text("\n".join(lines) + "\n")
    program = str(options.cpp / "jaxrec_fuzz")
    arguments = [str(model), str(requests), str(options.fuzz), str(options.seed)]
    sys.exit(subprocess.run([program, *arguments]).returncode)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
