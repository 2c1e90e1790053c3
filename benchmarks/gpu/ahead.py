"""Compiles steps that fetch rows ahead for NVIDIA GPUs without one, and runs their schedules.

    python -m benchmarks.gpu.ahead [--exchange rows bags pooled] [--topology 1x8x1] [--stale 0.61]

The step is that of DLRM-DCNv2 with the bags of MLPerf and 8,192 samples a device: plain, routed,
and with `jaxrec.train.RoutedSteps(fetch_ahead=True)`. A message holds half of a device's lookups,
and one of rows that are sent again holds ``--stale`` of that: what log-uniform ids need. Tables are
cut to 4,096 rows, on which the schedule does not depend.

The schedule then runs on a device whose kernels and links have the rates of data sheets (see
`benchmarks.gpu.timeline`). For each collective of rows the command prints its time, and how much of
it runs under matrix products and under any kernel. docs/internals/gpu.md says how to set this up. A
run of all steps writes ``benchmarks/results/compiled_ahead.h200.md``.
"""

from __future__ import annotations

import dataclasses
import pathlib
import warnings
from collections.abc import Iterator
from typing import Any, Literal

from benchmarks.gpu.environment import compile_without_cards

if __name__ == "__main__":  # Who imports this has devices of its own.
    compile_without_cards()

import jax
import numpy as np
import tyro
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jaxrec
from benchmarks.gpu.cards import CARDS
from benchmarks.gpu.roofline import data_sheet
from benchmarks.gpu.step_models import loss_of, make_click
from benchmarks.gpu.step_shapes import STEPS, ClickStep
from benchmarks.gpu.timeline import Transfer, timeline
from jaxrec.embed.kernels import use_kernels
from jaxrec.embed.taps import tapped_modules
from jaxrec.mesh.ahead import fetch_ahead, refetch_ahead, route_ahead, use_ahead
from jaxrec.mesh.store import stale_lines

ROWS = 4096
RESULTS = pathlib.Path(__file__).parents[1] / "results"
HEADER = (
    "| exchange | topology | step | step ms | temporaries GB | collective | what it carries "
    "| MB a device | ms | share under matrix products | share under any kernel |",
    "|---|---|---|---|---|---|---|---|---|---|---|",
)
Kind = Literal["plain", "routed", "fetched"]


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the compilation.

    Attributes:
        exchange: Placements: by rows, whole tables, by rows with bags pooled where the rows are.
        topology: Hosts x devices of a host x 1.
        step: Kinds of steps.
        stale: Share of the lines that are sent again, as a capacity.
        capacity: Capacity factor of messages.
        kernels: Implementations that run, in order of preference.
    """

    exchange: tuple[Literal["rows", "bags", "pooled"], ...] = ("rows", "bags", "pooled")
    topology: tuple[str, ...] = ("1x8x1", "2x8x1")
    step: tuple[Kind, ...] = ("plain", "routed", "fetched")
    stale: float = 0.61
    capacity: float = 0.5
    kernels: tuple[str, ...] = ("triton", "reference")


def main(options: Options) -> None:
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    lines = list(HEADER)
    print(*HEADER, sep="\n")
    for topology in options.topology:
        hosts, each = map(int, topology.split("x")[:2])
        machine = jaxrec.plan.Topology.named("h200", devices=hosts * each, devices_per_host=each)
        for exchange in options.exchange:
            for kind in options.step:
                compiled = compile_step(exchange, topology, kind, options)
                for line in report((exchange, topology, kind), compiled, machine):
                    lines.append(line)
                    print(line, flush=True)
    if options == Options():
        path = RESULTS / "compiled_ahead.h200.md"
        path.write_text(
            "# Steps that fetch rows ahead, compiled for NVIDIA H200s\n\n"
            "Made by `python -m benchmarks.gpu.ahead` without a GPU, by JAX "
            f"{jax.__version__}. Nothing was timed: the times are those of bytes and products at "
            "the rates of data sheets.\n\n" + "\n".join((*lines, ""))
        )
        print(path)


def report(
    names: tuple[str, str, str], compiled: Any, machine: jaxrec.plan.Topology
) -> Iterator[str]:
    """Yield a line for each collective of rows in a compiled step."""
    run = timeline(compiled.as_text(), data_sheet(machine))
    gigabytes = compiled.memory_analysis().temp_size_in_bytes / 1e9
    for each in run.transfers:
        if each.is_rows:
            yield (
                f"| {' | '.join(names)} | {1e3 * run.seconds:.2f} | {gigabytes:.2f} | {each.kind} "
                f"| {load(each)} | {each.num_bytes / 1e6:.1f} | {1e3 * each.seconds:.3f} "
                f"| {each.under_products / each.seconds:.2f} "
                f"| {each.under_kernels / each.seconds:.2f} |"
            )


def load(transfer: Transfer) -> str:
    """Return what a transfer carries."""
    for scope, name in (("/refetch/", "sent again"), ("/fetch/", "ahead"), ("/jvp()/", "rows")):
        if scope in transfer.scope:
            return name
    return "gradients"


def compile_step(exchange: str, topology: str, kind: Kind, options: Options) -> Any:
    """Return a step compiled for described devices."""
    step = STEPS["dlrm_dcnv2_8192"]
    assert isinstance(step, ClickStep)
    step = dataclasses.replace(step, rows=tuple(min(rows, ROWS) for rows in step.rows))
    described = CARDS["h200"].topology(topology)
    auto = (AxisType.Auto,)
    # The model is made on as many CPU devices; then arrays become shapes on the described ones.
    mesh = Mesh(np.array(jax.devices()[: len(described)]), ("data",), axis_types=auto)
    described_mesh = Mesh(np.array(described), ("data",), axis_types=auto)
    placement = {
        f"t{i}": jaxrec.mesh.table_wise(device=i % len(described))
        if exchange == "bags"
        else jaxrec.mesh.row_wise(exchange=exchange)
        for i in range(len(step.rows))
    }
    made = make_click(step, nnx.Rngs(0))
    model = jaxrec.shard(made.model, jaxrec.plan.ShardingPlan.from_dict(placement), mesh)
    optimizer = jaxrec.Optimizer(model, made.optimizer.tx)
    for module in tapped_modules(model).values():
        store = module.tables.get_value()
        factors = {placed.name: options.capacity for placed in store.layout.groups}
        factors |= {stale_lines(name): options.stale for name in factors}
        module.tables.set_value(
            dataclasses.replace(store, mesh=described_mesh, capacity_factors=tuple(factors.items()))
        )
    samples = step.batch * len(described)
    lengths = np.repeat(np.array(step.bags, np.int32), samples)
    features = jaxrec.KeyedJaggedArray.from_lengths(
        [f"f{i}" for i in range(len(step.rows))], np.zeros(lengths.sum(), np.int32), lengths
    )
    dense, labels = np.zeros((samples, 13), np.float32), np.zeros(samples, np.float32)
    batch = jaxrec.mesh.shard_batch((dense, features, labels), mesh)
    loss, (graph, state) = loss_of(step), nnx.split((model, optimizer))

    def on_described(x: Any) -> Any:
        spec = x.sharding.spec if isinstance(x.sharding, NamedSharding) else PartitionSpec()
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(described_mesh, spec))

    def over_batch(x: Any) -> Any:
        sharding = NamedSharding(described_mesh, PartitionSpec("data"))
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    def forward(batch: Any) -> Any:
        return lambda model: loss(model, *batch)

    def train(model: Any, optimizer: Any, batch: Any) -> Any:
        value, gradients = jaxrec.value_and_grad(forward(batch))(model)
        optimizer.update(model, gradients)
        return value

    def route(state: Any, batch: Any) -> Any:
        return route_ahead(forward(batch), nnx.merge(graph, state)[0])

    def fetch(state: Any, routes: Any, batch: Any) -> Any:
        return fetch_ahead(forward(batch), nnx.merge(graph, state)[0], routes, routes)[0]

    def plain(state: Any, batch: Any) -> Any:
        model, optimizer = nnx.merge(graph, state)
        return train(model, optimizer, batch), nnx.state((model, optimizer))

    def routed(state: Any, ahead: Any, batch: Any, following: Any) -> Any:
        model, optimizer = nnx.merge(graph, state)
        with use_ahead(model, ahead):
            value = train(model, optimizer, batch)
        return value, nnx.state((model, optimizer)), route_ahead(forward(following), model)

    # As `jaxrec.train.RoutedSteps`: rows of the next batch, this step, rows again, and a route.
    def fetched(state: Any, first: Any, routes: Any, batch: Any, second: Any, third: Any) -> Any:
        model, optimizer = nnx.merge(graph, state)
        lines, first, is_read = fetch_ahead(forward(second), model, routes, first)
        with use_ahead(model, first, is_read):
            value = train(model, optimizer, batch)
        lines = refetch_ahead(forward(second), model, lines, first)
        return value, nnx.state((model, optimizer)), lines, route_ahead(forward(third), model)

    with use_kernels(*options.kernels):
        state, batch = jax.tree.map(on_described, (state, batch))
        if kind == "plain":
            traced = jax.jit(plain, donate_argnums=0).trace(state, batch)
        else:
            routes = jax.tree.map(over_batch, jax.eval_shape(route, state, batch))
            if kind == "routed":
                traced = jax.jit(routed, donate_argnums=(0, 1)).trace(state, routes, batch, batch)
            else:
                first = jax.tree.map(over_batch, jax.eval_shape(fetch, state, routes, batch))
                traced = jax.jit(fetched, donate_argnums=(0, 1, 2)).trace(
                    state, first, routes, batch, batch, batch
                )
        return traced.lower(lowering_platforms=("cuda",)).compile()


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
