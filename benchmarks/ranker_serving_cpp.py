"""Processor time and memory of an exported ranker in C++, with and without cached histories.

    python -m benchmarks.ranker_serving_cpp --cpp BUILD --pjrt DIRECTORY [--rounds 3] [--seconds 10]

BUILD is the directory that cpp/ was built in, DIRECTORY what cpp/get_pjrt.sh filled. The ranker is
that of `benchmarks.ranker_serving`: 3 layers of 128 columns, histories of 1,024 events and 512
candidates. Each line of JSON has a size of the caches in MB:

* ``processor_ms``: median over the rounds of the processor time of a request, of all threads of the
  process, in milliseconds: 0 MB encode every history, and 1,024 MB have all of them;
* ``peak_mb``: peak of the process's memory, after 200 users asked twice in four threads.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import subprocess
import tempfile
from collections.abc import Sequence

import numpy as np
import tyro

from benchmarks.ranker_serving import Options as RankerOptions
from benchmarks.ranker_serving import make_model, rows_of
from jaxrec.embed.kernels import cpu
from jaxrec.serve import export_ranker

USERS = 200


@dataclasses.dataclass(frozen=True)
class Options:
    cpp: pathlib.Path
    pjrt: pathlib.Path
    rounds: int = 3
    seconds: float = 10.0


def command(options: Options, ranker: pathlib.Path, *more: str) -> list[str]:
    library = pathlib.Path(cpu.__file__).parent / "native" / "libjaxrec.so"
    plugin = str(options.pjrt / "plugin.so")
    program = str(options.cpp / "jaxrec_predict")
    return [program, str(ranker), "--plugin", plugin, "--native-library", str(library), *more]


def processor_ms(options: Options, ranker: pathlib.Path, cache_mb: int) -> float:
    """Return the processor time of a request, in milliseconds."""
    measure = ("--benchmark", "--batch", "1", "--seconds", str(options.seconds))
    caches = ("--cache-mb", str(cache_mb))
    output = subprocess.run(
        command(options, ranker, *measure, *caches), check=True, capture_output=True
    ).stdout
    return float(json.loads(output)["processor_us"]) / 1000


def peak_mb(
    options: Options, ranker: pathlib.Path, cache_mb: int, requests: Sequence[str]
) -> tuple[int, int]:
    """Return the peak of the process's memory, and the bytes of its caches at the end, in MB."""
    metrics = ranker / "metrics"
    more = ("--cache-mb", str(cache_mb), "--threads", "4", "--metrics", str(metrics))
    with tempfile.TemporaryFile("w+") as file:
        file.write("\n".join(requests) + "\n")
        file.seek(0)
        process = subprocess.Popen(
            command(options, ranker, *more), stdin=file, stdout=subprocess.DEVNULL
        )
        _, status, usage = os.wait4(process.pid, 0)
    assert status == 0
    counted = metrics.read_text().split("jaxrec_history_cache_bytes ")[-1]
    return usage.ru_maxrss >> 10, int(counted) >> 20


def main(options: Options) -> None:
    of_ranker = RankerOptions()
    with tempfile.TemporaryDirectory() as directory:
        ranker = pathlib.Path(directory, "ranker")
        export_ranker(
            make_model(of_ranker),
            ranker,
            history_sizes=(of_ranker.events,),
            candidate_sizes=(of_ranker.micro_batch,),
            platforms=("cpu",),
        )
        times: dict[int, list[float]] = {0: [], 1024: []}
        for _ in range(options.rounds):
            for cache_mb, of_rounds in times.items():
                of_rounds.append(processor_ms(options, ranker, cache_mb))
        for cache_mb, of_rounds in times.items():
            median = round(float(np.median(of_rounds)), 1)
            print(json.dumps({"cache_mb": cache_mb, "processor_ms": median}), flush=True)
        requests = [
            json.dumps({"cache_key": [user]} | rows_of(of_ranker, of_ranker.events, user))
            for user in range(USERS)
        ]
        for cache_mb in (0, 64, 256):
            peak, counted = peak_mb(options, ranker, cache_mb, requests * 2)
            print(json.dumps({"cache_mb": cache_mb, "peak_mb": peak, "caches_mb": counted}))


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
