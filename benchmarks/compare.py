"""Times jaxrec and its peers in turn, several rounds, and prints the ratios with their spread.

Usage: python -m benchmarks.compare --peer-python PATH [--rounds 3] [--seconds 2] [--threads 2]
                                    [--what embedding dlrm models] [--keras-python PATH]
The first PATH is the Python of an environment with torch, fbgemm-gpu-cpu and torchrec, the second
of one with tensorflow-cpu. A ratio is jaxrec's median time over the peer's in the same round; below
1 jaxrec is faster. Where the distance of the cores changes while the sides run, the round's figures
are taken again (benchmarks/core_distance.py says why); the last column has the distances. Ctrl-C
ends the run and prints the rounds so far.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import subprocess
import sys
from collections import defaultdict
from typing import Any, Literal

import numpy as np
import tyro

from benchmarks.core_distance import core_distance

_HERE = pathlib.Path(__file__).parent


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the comparison.

    Attributes:
        peer_python: Python of the peers' environment.
        rounds: How often each side is timed.
        seconds: Time for each figure of a round, of lookups and updates.
        steps: Steps of a model timed in a round.
        threads: Processor cores to use.
        shapes: JSON file of shapes of lookups and updates.
        batches: Batch sizes of models.
        what: Benchmarks to compare; models: DeepFM and DCN-v2.
        optimizer: Optimizer of DeepFM and DCN-v2.
        max_rows: Bound on the rows of their tables; 0 for none.
        keras_python: Python of an environment with TensorFlow, for DeepFM and DCN-v2.
    """

    peer_python: pathlib.Path
    rounds: int = 3
    seconds: float = 2.0
    steps: int = 40
    threads: int = 2
    shapes: pathlib.Path = _HERE / "shapes.json"
    batches: tuple[int, ...] = (2048, 8192)
    what: tuple[Literal["embedding", "dlrm", "models"], ...] = ("embedding", "dlrm")
    optimizer: Literal["sgd", "adagrad"] = "sgd"
    max_rows: int = 0
    keras_python: pathlib.Path | None = None


Key = tuple[str, str, str]  # shape, figure, peer
MOST_TRIES = 4
NEAR_NS = 200  # Cores that share a cache are nearer.


def main(options: Options) -> None:
    ratios: dict[Key, list[float]] = defaultdict(list)
    times: dict[Key, list[tuple[float, float]]] = defaultdict(list)
    distances: dict[Key, list[int]] = defaultdict(list)
    try:
        for done in range(options.rounds):
            # The sides of each comparison directly after each other: these machines change speed.
            for module, commands, arguments in comparisons(options):
                mine, peers, distance = time_sides(module, commands, arguments)
                for (shape, figure, name), theirs_ms in peers.items():
                    ours_ms = mine[shape, figure, "jaxrec"]
                    ratios[shape, figure, name].append(ours_ms / theirs_ms)
                    times[shape, figure, name].append((ours_ms, theirs_ms))
                    distances[shape, figure, name].append(distance)
            print(f"round {done + 1} of {options.rounds} done", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        print("stopped; these rounds were done", file=sys.stderr)
    print("| shape | figure | peer | jaxrec ms | peer ms | ratio (median) | min | max | cores ns |")
    print("|---|---|---|---|---|---|---|---|---|")
    for key, values in ratios.items():
        ours_ms, theirs_ms = np.median(times[key], axis=0)
        cells = [*key, f"{ours_ms:.2f}", f"{theirs_ms:.2f}"]
        cells += [f"{value:.2f}" for value in (np.median(values), min(values), max(values))]
        cells.append(f"{min(distances[key])}-{max(distances[key])}")
        print("| " + " | ".join(cells) + " |")


def comparisons(options: Options) -> list[tuple[str, list[list[str]], list[str]]]:
    """Our module, the command of each peer, and the arguments of all."""
    found: list[tuple[str, list[list[str]], list[str]]] = []

    def peer(python: pathlib.Path, script: str, *more: str) -> list[str]:
        return [str(python), str(_HERE / script), *more]

    torch = options.peer_python
    threads = f"--threads={options.threads}"
    if "embedding" in options.what:
        common = [f"--shapes={options.shapes}", threads, f"--seconds={options.seconds}"]
        for shape in json.loads(options.shapes.read_text())["shapes"]:
            only = [*common, f"--only={shape['name']}"]
            found.append(("benchmarks.embedding", [peer(torch, "peer_tbe.py")], only))
    for batch in options.batches:
        sizes = [f"--batch={batch}", threads, f"--steps={options.steps}"]
        if "dlrm" in options.what:
            found.append(("benchmarks.dlrm", [peer(torch, "peer_dlrm.py")], sizes))
        for model in ("deepfm", "dcn_v2") if "models" in options.what else ():
            peers = [peer(torch, "peer_click_models.py")]
            if options.keras_python is not None:
                peers += [peer(options.keras_python, "peer_keras.py", *x) for x in ((), ("--xla",))]
            of_model = [f"--model={model}", f"--optimizer={options.optimizer}", *sizes]
            of_model.append(f"--max-rows={options.max_rows}")
            found.append(("benchmarks.click_models", peers, of_model))
    return found


def time_sides(
    module: str, commands: list[list[str]], arguments: list[str]
) -> tuple[dict[Key, float], dict[Key, float], int]:
    """Our figures, the peers' and the cores' largest distance; sides directly after each other."""
    for tries_left in reversed(range(MOST_TRIES)):
        distances = [core_distance()]
        mine = medians(run([sys.executable, "-m", module, *arguments]))
        distances.append(core_distance())
        peers: dict[Key, float] = {}
        for command in commands:
            peers |= medians(run([*command, *arguments]))
            distances.append(core_distance())
        if len({distance > NEAR_NS for distance in distances}) == 1 or not tries_left:
            break
        print(f"again, since cores moved: {arguments}, {distances} ns", file=sys.stderr, flush=True)
    return mine, peers, max(distances)


def run(command: list[str]) -> list[dict[str, Any]]:
    """The JSON lines that a benchmark prints."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with status {done.returncode}:\n{done.stderr}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def medians(lines: list[dict[str, Any]]) -> dict[Key, float]:
    """The median of each figure; the lookup's is that of both optimizers' runs."""
    found: dict[Key, list[float]] = defaultdict(list)
    for line in lines:
        peer = line["peer"].removesuffix("_dlrm")
        if "step_ms" in line:
            model = line.get("model", "dlrm")
            found[f"{model} {line['batch']}", "step", peer].append(line["step_ms"][1])
            continue
        found[line["shape"], "lookup", peer].append(line["forward_ms"][1])
        if "backward_ms" in line:
            figure = f"update, {line['optimizer']}"
            found[line["shape"], figure, peer].append(line["backward_ms"][1])
    return {key: float(np.mean(values)) for key, values in found.items()}


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
