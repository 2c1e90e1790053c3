"""HSTU's attention and the layers of a ranker beside the authors' PyTorch, on a CPU.

Usage: python -m benchmarks.ranker_stack --peer-python PATH --checkout PATH [--threads 2]
Forward pass, and forward and backward pass, of attention and of three layers of 128 columns and
four heads. 32 rows have lengths of a power law; the longest has 1,024 tokens, and each row one
target. The peers: the authors' attention and layers (`HammerKernel.PYTORCH`), and PyTorch's
`scaled_dot_product_attention` on padded rows. In each round jaxrec runs, then the peers. Prints the
table of docs/performance.md: medians over rounds of the medians of passes, and the least and
greatest ratio of a round, of processors' time.

--peer-python names a Python with torch, fbgemm-gpu-cpu and triton, --checkout a checkout of
meta-recsys/generative-recommenders.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import subprocess
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tyro


@dataclasses.dataclass(frozen=True)
class Settings:
    peer_python: str
    checkout: str
    threads: int = 2
    rounds: int = 5
    seconds: float = 2.0
    """Seconds of passes of each program in a round."""
    rows: int = 32
    longest: int = 1024
    exponent: float = 1.2
    """Exponent of the power law: (shortest / n) ** exponent of the rows are longer than n."""
    shortest: int = 20
    layers: int = 3
    dim: int = 128
    heads: int = 4


# A program and its passes: milliseconds by the clock, and of processors.
Times = dict[tuple[str, str], tuple[float, float]]
PEERS = {
    "attention": ("attention", "padded scaled_dot_product_attention"),
    "layers": ("layers",),
}


def main(settings: Settings) -> None:
    # XLA takes one thread for each core that the process may run on.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: settings.threads])
    uniform = np.random.default_rng(0).random(settings.rows)
    lengths = settings.shortest * uniform ** (-1 / settings.exponent)
    lengths[0] = settings.longest
    lengths = np.minimum(lengths, settings.longest).astype(np.int32)
    print(f"{settings.rows} rows, {lengths.sum():,} tokens, {settings.threads} threads")
    compiled = programs(settings, lengths)
    rounds: list[tuple[Times, Times]] = []
    with tempfile.TemporaryDirectory() as folder:
        shapes = pathlib.Path(folder) / "shapes.npz"
        sizes = {name: getattr(settings, name) for name in ("longest", "heads", "dim", "layers")}
        np.savez(shapes, lengths=lengths, **sizes)
        for number in range(settings.rounds):
            rounds.append((time_own(settings, compiled), time_peers(settings, shapes)))
            print(json.dumps({"round": number} | described(*rounds[-1])), flush=True)
    print("| program | passes | peer | jaxrec ms | peer ms | ratio (median) | min | max |")
    print("|---|---|---|---|---|---|---|---|")
    for program, passes in rounds[0][0]:
        for peer in PEERS[program]:
            own = [each[program, passes][1] for each, _ in rounds]
            others = [each[peer, passes][1] for _, each in rounds]
            ratios = np.divide(own, others)
            cells = [
                program, passes, peer, f"{np.median(own):.1f}", f"{np.median(others):.1f}",
                *(f"{x:.2f}" for x in (np.median(ratios), ratios.min(), ratios.max())),
            ]  # fmt: skip
            print(f"| {' | '.join(cells)} |")


def programs(settings: Settings, lengths: np.ndarray) -> dict[tuple[str, str], Callable[[], Any]]:
    """Return a function for each program and its passes, compiled."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    import jaxrec
    from jaxrec.nn import TransductionStack, hstu_attention

    jaxrec.keep_freed_memory()
    columns, tokens = settings.dim // settings.heads, int(lengths.sum())
    given = jnp.asarray(lengths), jnp.ones_like(lengths)
    stack = TransductionStack(
        settings.dim,
        settings.layers,
        settings.heads,
        max_length=settings.longest,
        rngs=nnx.Rngs(0),
    )
    graph, parameters, rest = nnx.split(stack, nnx.Param, ...)

    def attention(vectors: Any, lengths: Any, targets: Any) -> Any:
        return hstu_attention(
            *vectors,
            lengths,
            num_targets=targets,
            alpha=columns**-0.5,
            scale=1 / settings.longest,
        )

    def layers(inputs: Any, lengths: Any, targets: Any) -> Any:
        parameters, states = inputs
        return nnx.merge(graph, parameters, rest)(states, lengths, targets)[0]

    keys = jax.random.split(jax.random.key(0), 4)
    shape = (tokens, settings.heads, columns)
    vectors = [jax.random.normal(key, shape) for key in keys[:3]]
    states = jax.random.normal(keys[3], (tokens, settings.dim))
    found = {}
    for name, forward, inputs in (
        ("attention", attention, vectors),
        ("layers", layers, (parameters, states)),
    ):

        def both(inputs: Any, *given: Any, forward: Any = forward) -> Any:
            def loss(inputs: Any) -> Any:
                out = forward(inputs, *given)
                return jnp.vdot(out, jax.lax.stop_gradient(out))

            return jax.grad(loss)(inputs)

        for passes, function in (("forward", forward), ("both", both)):
            compiled = jax.jit(function).lower(inputs, *given).compile()

            def run(compiled: Any = compiled, inputs: Any = inputs) -> None:
                jax.block_until_ready(compiled(inputs, *given))

            found[name, passes] = run
    return found


def time_own(settings: Settings, compiled: dict[tuple[str, str], Callable[[], Any]]) -> Times:
    found = {}
    for name, run in compiled.items():
        run()
        times, end = [], time.perf_counter() + settings.seconds
        while len(times) < 3 or time.perf_counter() < end:
            start, busy = time.perf_counter(), time.process_time()
            run()
            times.append((time.perf_counter() - start, time.process_time() - busy))
        ms, processor_ms = 1e3 * np.median(times, 0)
        found[name] = (float(ms), float(processor_ms))
    return found


def time_peers(settings: Settings, shapes: pathlib.Path) -> Times:
    script = pathlib.Path(__file__).with_name("peer_ranker_stack.py")
    command = [settings.peer_python, str(script), settings.checkout, str(shapes)]
    command += ["--seconds", str(settings.seconds), "--threads", str(settings.threads)]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    lines = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    return {(x["program"], x["passes"]): (x["ms"], x["processor_ms"]) for x in lines}


def described(own: Times, peers: Times) -> dict[str, Any]:
    return {
        side: {f"{program}, {passes}": [round(x, 1) for x in ms] for (program, passes), ms in times}
        for side, times in (("jaxrec", own.items()), ("peers", peers.items()))
    }


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
