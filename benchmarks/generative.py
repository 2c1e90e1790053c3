"""Next items of Amazon Beauty by SASRec, by HSTU and by generation of semantic ids.

Usage: python -m benchmarks.generative amazon-beauty.txt [--models SASRec HSTU generative]
[--seeds 0 1 2] [--output NAME] [--vectors DIRECTORY]

The file has ``user item`` lines in the order of time, as published with BERT4Rec. Its 5-core has
22,363 users and 12,101 items. The last item of each user is the test, the one before the
validation: models train on all others, and the epoch with the best NDCG@10 of the validation items
counts. All items but those that the user had before are ranked. The semantic ids come from the item
vectors of the SASRec of the same seed, kept in ``--vectors`` from one call to the next.

Prints a JSON line for each model and seed: recall and NDCG at 5 and 10, the epoch, and seconds of
all processors. The line of generation also has the processor milliseconds a user that a beam search
takes, beside those of the scores of all items by SASRec. Progress goes to stderr. With --output it
also writes the lines to NAME.json; lines of other models and seeds stay there.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from flax import nnx

import jaxrec
from benchmarks import generative_models, sequence_baselines
from benchmarks.beauty import Histories
from benchmarks.generative_models import GenerativeSettings
from benchmarks.sequence_baselines import SequenceSettings

# Users of a batch whose time is taken.
TIMED_USERS = (1, 32)


@dataclasses.dataclass(frozen=True)
class Options:
    """The runs."""

    data: tyro.conf.Positional[pathlib.Path]
    models: tuple[str, ...] = ("SASRec", "HSTU", "generative")
    seeds: tuple[int, ...] = (0, 1, 2)
    sequence: SequenceSettings = dataclasses.field(default_factory=SequenceSettings)
    generative: GenerativeSettings = dataclasses.field(default_factory=GenerativeSettings)
    vectors: pathlib.Path = pathlib.Path("vectors")
    """Directory of the item vectors of SASRec by seed, made if it is missing."""
    repeats: int = 10
    """Calls whose median time is reported."""
    output: pathlib.Path | None = None
    """File name without its ending."""


def milliseconds(call: Callable[[], Any], users: int, repeats: int) -> float:
    """Return the median processor milliseconds a user of a call, all threads together."""
    jax.block_until_ready(call())
    times = []
    for _ in range(repeats):
        begun = time.process_time()
        jax.block_until_ready(call())
        times.append(1000 * (time.process_time() - begun) / users)
    return float(np.median(times))


def times_of(model: nnx.Module, data: Histories, options: Options) -> dict[str, float]:
    """Return processor milliseconds a user of a beam search, and of SASRec scoring all items."""
    model.eval()
    generate = generative_models.compile_generate(options.generative)
    ranker = sequence_baselines.make_model("SASRec", options.sequence, data.num_items, seed=0)
    ranker.eval()

    @nnx.jit
    def best(model, batch):
        return jax.lax.top_k(sequence_baselines.score_all(model, batch), 10)[1]

    found: dict[str, float] = {}
    for users in TIMED_USERS:
        seen = [row[:-1] for row in data.rows[:users]]
        asked = generative_models.pack(jaxrec.Packer(), seen, options.generative.longest)
        rows = data.asked(-1, options.generative.longest)[:users]
        for name, timed, model_of, batch in (
            ("beam", generate, model, asked),
            ("all_items", best, ranker,
             sequence_baselines.pack(jaxrec.Packer(), users, history=rows)),
        ):  # fmt: skip
            placed = jax.tree.map(jnp.asarray, batch)

            def call(timed: Any = timed, model_of: Any = model_of, placed: Any = placed) -> Any:
                return timed(model_of, placed)

            key = f"{name}_ms_per_user_of_{users}"
            found[key] = round(milliseconds(call, users, options.repeats), 3)
    return found


def run(kind: str, data: Histories, options: Options, seed: int) -> dict[str, Any]:
    """Train and test one model."""
    path = options.vectors / f"SASRec-{seed}.npy"
    if kind != "generative":
        found, table = sequence_baselines.train(kind, data, options.sequence, seed)
        if kind == "SASRec":
            path.parent.mkdir(parents=True, exist_ok=True)
            np.save(path, table)
        return found
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing: name SASRec before generative in --models")
    found, model = generative_models.train(data, np.load(path), options.generative, seed)
    return found | times_of(model, data, options)


def main(options: Options) -> None:
    """Run all models and seeds, and print a JSON line for each."""
    data = Histories.read(options.data)
    path = None if options.output is None else options.output.with_suffix(".json")
    known = json.loads(path.read_text()) if path is not None and path.exists() else []
    lines = {(x["model"], x["seed"]): x for x in known}
    for seed in options.seeds:
        for kind in options.models:
            line = {"model": kind, "seed": seed} | run(kind, data, options, seed)
            lines[kind, seed] = line
            print(json.dumps(line), flush=True)
            if path is not None:
                path.write_text(json.dumps([*lines.values()], indent=1) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
