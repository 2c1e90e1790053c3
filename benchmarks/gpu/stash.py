"""Compiles training steps with each `stash` for GPUs without one, and prints their bytes.

    python -m benchmarks.gpu.stash [--exchange pooled bags rows] [--layers 24] [--no-write]

A step has eight tables of 80,000 rows of 128 columns over eight H200s, 8,192 samples a device, 20
ids a bag, and a tower of ``--layers`` dense layers of 1,024 columns. The bytes are those that XLA's
`memory_analysis` gives for a device. docs/internals/gpu.md says how to set this up. A run of all
exchanges writes ``benchmarks/results/stash.h200.md``.
"""

from __future__ import annotations

import dataclasses
import pathlib
import re
import warnings
from collections.abc import Iterator
from typing import Any, Literal

from benchmarks.gpu.environment import compile_without_cards

if __name__ == "__main__":  # Who imports this has devices of its own.
    compile_without_cards(devices=8)

import jax
import numpy as np
import optax
import tyro
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jaxrec
from benchmarks.gpu.cards import CARDS
from jaxrec.embed.kernels import use_kernels

TABLES, ROWS, DIM, SAMPLES, IDS, DEVICES = 8, 80_000, 128, 8192, 20, 8
RESULTS = pathlib.Path(__file__).parents[1] / "results"
HEADER = (
    "| exchange | stash | temporaries MB | pinned host memory MB | all-to-alls |",
    "|---|---|---|---|---|",
)


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the compilation.

    Attributes:
        exchange: Placements: by rows, by rows with bags pooled where the rows are, whole tables.
        layers: Number of dense layers.
        write: Whether to write the page of results.
    """

    exchange: tuple[Literal["rows", "pooled", "bags"], ...] = ("rows", "pooled", "bags")
    layers: int = 24
    write: bool = True


class Tower(nnx.Module):
    """Tables, and dense layers on top."""

    def __init__(self, layers: int):
        rngs, width = nnx.Rngs(0), TABLES * DIM
        configs = [
            jaxrec.EmbeddingBagConfig(f"t{i}", ROWS, DIM, feature_names=(f"f{i}",))
            for i in range(TABLES)
        ]
        self.tables = jaxrec.EmbeddingBagCollection(configs, rngs=rngs)
        self.hidden = nnx.List([nnx.Linear(width, width, rngs=rngs) for _ in range(layers)])
        self.out = nnx.Linear(width, 1, rngs=rngs)

    def __call__(self, features: jaxrec.KeyedJaggedArray) -> jax.Array:
        values = self.tables(features).values
        for layer in self.hidden:
            values = nnx.relu(layer(values))
        return self.out(values)[:, 0]


def placement(exchange: str, table: int) -> jaxrec.mesh.Placement:
    """Return the placement of a table."""
    if exchange == "bags":
        return jaxrec.mesh.table_wise(device=table % DEVICES)
    return jaxrec.mesh.row_wise(exchange=exchange)


def train_step(model: Any, optimizer: Any, features: Any, labels: Any) -> Any:
    def loss(model: Any) -> Any:
        return optax.sigmoid_binary_cross_entropy(model(features), labels).mean()

    value, gradients = jaxrec.value_and_grad(loss)(model)
    optimizer.update(model, gradients)
    return value


def lines(exchange: str, layers: int) -> Iterator[str]:
    """Yield a line of the results for each stash."""
    simulated = jax.make_mesh((DEVICES,), ("data",), axis_types=(AxisType.Auto,))
    mesh = Mesh(np.array(CARDS["h200"].topology(f"1x{DEVICES}x1")), ("data",))
    places = {f"t{i}": placement(exchange, i) for i in range(TABLES)}
    plan = jaxrec.plan.ShardingPlan.from_dict(places)
    model = jaxrec.shard(Tower(layers), plan, simulated)
    optimizer = jaxrec.Optimizer(model, optax.adam(1e-3))
    bags = TABLES * SAMPLES * DEVICES
    features = jaxrec.KeyedJaggedArray.from_lengths(
        [f"f{i}" for i in range(TABLES)],
        np.random.default_rng(0).integers(0, ROWS, bags * IDS),
        np.full(bags, IDS, np.int32),
    )
    labels = np.zeros(SAMPLES * DEVICES, np.float32)
    batch = jaxrec.mesh.shard_batch((features, labels), simulated)
    tables = model.tables.tables
    tables.set_value(dataclasses.replace(tables.get_value(), mesh=mesh))

    def described(array: jax.Array) -> jax.ShapeDtypeStruct:
        placed = array.sharding
        spec = placed.spec if isinstance(placed, NamedSharding) else PartitionSpec()
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=NamedSharding(mesh, spec))

    for stash in (None, "host", "recompute"):
        model.tables.stash = stash
        graph, state = nnx.split((model, optimizer))

        def step(state: Any, *batch: Any, graph: Any = graph) -> Any:
            model, optimizer = nnx.merge(graph, state)
            return train_step(model, optimizer, *batch), nnx.state((model, optimizer))

        arguments = jax.tree.map(described, (state, *batch))
        with use_kernels("triton", "reference"):
            traced = jax.jit(step, donate_argnums=0).trace(*arguments)
            compiled = traced.lower(lowering_platforms=("cuda",)).compile()
        memory, program = compiled.memory_analysis(), compiled.as_text()
        exchanges = len(re.findall(r" all-to-all(?:-start)?\(", program))
        yield (
            f"| {exchange} | {stash} | {memory.temp_size_in_bytes / 1e6:,.1f} "
            f"| {memory.host_temp_size_in_bytes / 1e6:,.1f} | {exchanges} |"
        )


def main(options: Options) -> None:
    warnings.filterwarnings("ignore")
    page = [
        "# Bytes of a step with each stash, compiled for eight NVIDIA H200\n",
        f"Made by `python -m benchmarks.gpu.stash` without a GPU, by JAX {jax.__version__}: eight "
        f"tables, {SAMPLES:,} samples a device, bags of {IDS} ids, {options.layers} dense layers "
        "of 1,024 columns. Nothing was timed.\n",
        *HEADER,
    ]
    print(*HEADER, sep="\n")
    for exchange in options.exchange:
        for line in lines(exchange, options.layers):
            print(line, flush=True)
            page.append(line)
    if options.write and options == Options():
        (RESULTS / "stash.h200.md").write_text("\n".join(page) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
