"""Times training steps of ``jaxrec train`` whose dense layers compute in float32 and in bfloat16.

Usage: python -m benchmarks.dense_dtype [--models dlrm dcn_v2 deepfm] [--wide] [--rounds 6]
The two take turns, on the same batches. Prints a JSON line for each model: milliseconds of a step
by the clock and in processor time, the least of all rounds.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from typing import Any, Literal

import tyro


@dataclasses.dataclass(frozen=True)
class Options:
    """The models and the rounds.

    Attributes:
        models: Models of ``jaxrec train``.
        wide: Dense layers of 512 to 1024 columns and tables of 64, instead of the default sizes.
        batch: Samples of a step.
        steps: Steps of a round.
        rounds: Rounds after the first, which compiles.
    """

    models: tuple[Literal["dlrm", "dcn_v2", "deepfm"], ...] = ("dlrm", "dcn_v2", "deepfm")
    wide: bool = False
    batch: int = 2048
    steps: int = 8
    rounds: int = 6


def main(options: Options) -> None:
    import jax

    from jaxrec.train.config import DataConfig, ModelConfig, TrainConfig
    from jaxrec.train.datasets import split_datasets
    from jaxrec.train.placed_batches import put_batch

    data = DataConfig(generated_rows=options.batch * options.steps, generated_eval_rows=1)
    sizes: dict[str, Any] = {}
    if options.wide:
        sizes = {"bottom_layer_sizes": (512, 256), "top_layer_sizes": (1024, 1024, 512)}
        sizes["embedding_dim"] = 64
    rows, _ = split_datasets(TrainConfig(data=data))
    batches = [put_batch(batch) for batch in rows.batches(options.batch)]
    for name in options.models:
        steps = {
            dtype: make_step(
                TrainConfig(data=data, model=ModelConfig(name=name, dense_dtype=dtype, **sizes))
            )
            for dtype in ("float32", "bfloat16")
        }
        times: dict[str, list[tuple[float, float]]] = {dtype: [] for dtype in steps}
        for _ in range(1 + options.rounds):
            for dtype, step in steps.items():
                start, used = time.perf_counter(), time.process_time()
                for batch in batches:
                    loss = step(batch)
                jax.block_until_ready(loss)
                times[dtype].append((time.perf_counter() - start, time.process_time() - used))
        figures: dict[str, Any] = {"model": name, "wide": options.wide}
        for dtype, of_dtype in times.items():
            for kind, seconds in zip(
                ("ms", "cpu_ms"), zip(*of_dtype[1:], strict=True), strict=True
            ):
                figures[f"{dtype}_{kind}"] = round(min(seconds) / options.steps * 1e3, 2)
        print(json.dumps(figures), flush=True)


def make_step(config: Any) -> Callable[[Any], Any]:
    """Return a function that trains a model on a batch and returns the loss."""
    import jax
    from flax import nnx

    import jaxrec
    from jaxrec.train.model import make_model
    from jaxrec.train.models.labels import click_loss

    graph, state = nnx.split(make_model(config, num_steps=1000))

    @jax.jit(donate_argnums=0)
    def update(state, batch):
        model, optimizer = nnx.merge(graph, state)
        loss, gradients = jaxrec.value_and_grad(lambda model: click_loss(model, batch)[0])(model)
        optimizer.update(model, gradients)
        return nnx.state((model, optimizer)), loss

    def step(batch: Any) -> Any:
        nonlocal state
        state, loss = update(state, batch)
        return loss

    return step


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
