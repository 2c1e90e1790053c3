"""Compiles sharded training steps for several NVIDIA GPUs without one, and prints collectives.

    python -m benchmarks.gpu.mesh [--exchange rows pooled bags] [--topology 1x8x1] [--routed True]

A step has eight tables of 80,000 rows of 128 columns, 1,024 samples a device, 20 ids a bag, and a
small dense part. Its optimizer is row-wise Adagrad unless ``--optimizer`` names another, and its
rows are of float32 unless ``--dtype`` does; ``--ragged`` sends lists without padding.

For each collective of the scheduled program it prints the bytes of its result on a device, the
devices of a group, and what the schedule runs between its start and its end: matrix products,
kernels of jaxrec and other kernels. Then it prints, for each step, the least time of its work on
tables by the bytes that the program moves (see `benchmarks.gpu.roofline`), beside the planner's
estimate at the same rates and at its own. The exit status is 1, with a sentence for each reason, if
the collectives of tables of float32 do not have the bytes that docs/sharding.md states, or no work
lies between the start and the end of a routed step's exchange of ids.

docs/internals/gpu.md says how to set this up. A run of all steps writes
``benchmarks/results/compiled_mesh.h200.md``.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from benchmarks.gpu.environment import compile_without_cards

if __name__ == "__main__":  # Who imports this has devices of its own.
    compile_without_cards()

import jax
import numpy as np
import optax
import tyro
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jaxrec
from benchmarks.gpu.cards import CARDS
from benchmarks.gpu.roofline import data_sheet, shape_bytes, work_on_tables
from jaxrec.embed.kernels import use_kernels
from jaxrec.mesh.ahead import route_ahead, use_ahead
from jaxrec.mesh.exchange import EXCHANGES, Workload

TABLES, ROWS, DIM, SAMPLES, IDS = 8, 80_000, 128, 1024, 20
OPTIMIZERS = {
    "rowwise_adagrad": jaxrec.optim.rowwise_adagrad(0.01),
    "sgd": jaxrec.optim.sgd(0.01),
    "adam": jaxrec.optim.adam(0.01),
}
RESULTS = pathlib.Path(__file__).parents[1] / "results"
COLLECTIVES = "all-to-all|all-gather|reduce-scatter|all-reduce|ragged-all-to-all|collective-permute"
HEADER = (
    "| step | temporaries GB | collective | MB a device | devices of a group "
    "| between start and end: matrix products, our kernels, others |",
    "|---|---|---|---|---|---|",
)
ESTIMATE_HEADER = (
    "| step | kernels | memory traffic MB | µs by bytes | planner's µs at the same rates | ratio "
    "| planner's µs |",
    "|---|---|---|---|---|---|---|",
)


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the compilation.

    Attributes:
        exchange: Placements: by rows, by rows with bags pooled where the rows are, whole tables.
        topology: Hosts x devices of a host x 1.
        routed: Whether the step routes the next batch, as `jaxrec.train.RoutedSteps` does; None:
            both kinds of steps.
        kernels: Implementations that run, in order of preference.
        optimizer: Row optimizer.
        dtype: Type of the tables.
        ragged: Whether exchanges send lists without padding, by XLA's ragged all-to-all.
    """

    exchange: tuple[Literal["rows", "pooled", "bags"], ...] = ("rows", "pooled", "bags")
    topology: tuple[str, ...] = ("1x8x1", "2x8x1")
    routed: bool | None = None
    kernels: tuple[str, ...] = ("triton", "reference")
    optimizer: Literal[tuple(OPTIMIZERS)] = "rowwise_adagrad"  # type: ignore[valid-type]
    dtype: Literal["float32", "bfloat16", "int8"] = "float32"
    ragged: bool = False


@dataclasses.dataclass(frozen=True)
class Step:
    """A sharded step.

    Attributes:
        exchange: "rows", "pooled" or "bags".
        topology: Hosts x devices of a host x 1.
        routed: Whether it routes the next batch.
        optimizer: Row optimizer, of `OPTIMIZERS`.
        dtype: Type of the tables.
        ragged: Whether exchanges send lists without padding.
        samples: Samples of a device.
    """

    exchange: str
    topology: str
    routed: bool = False
    optimizer: str = "rowwise_adagrad"
    dtype: str = "float32"
    ragged: bool = False
    samples: int = SAMPLES

    @property
    def name(self) -> str:
        words = [self.exchange, self.topology, *["routed"] * self.routed]
        words += [self.optimizer] * (self.optimizer != "rowwise_adagrad")
        words += [self.dtype] * (self.dtype != "float32") + ["ragged"] * self.ragged
        return " ".join(words)

    @property
    def machine(self) -> jaxrec.plan.Topology:
        """The devices, as the planner sees them."""
        hosts, each = map(int, self.topology.split("x")[:2])
        return jaxrec.plan.Topology.named("h200", devices=hosts * each, devices_per_host=each)

    def configs(self) -> list[jaxrec.EmbeddingBagConfig]:
        """Return the configurations of its tables."""
        return [
            jaxrec.EmbeddingBagConfig(
                f"t{i}",
                ROWS,
                DIM,
                feature_names=(f"f{i}",),
                dtype=self.dtype,
                optimizer=OPTIMIZERS[self.optimizer],
            )
            for i in range(TABLES)
        ]


# What a run without options compiles besides, of exchanges of rows in one host.
OTHERS = (
    *(Step("rows", "1x8x1", optimizer=name) for name in ("sgd", "adam")),
    *(Step("rows", "1x8x1", dtype=dtype) for dtype in ("bfloat16", "int8")),
    *(Step(exchange, "1x8x1", ragged=True) for exchange in ("rows", "pooled")),
)


@dataclasses.dataclass(frozen=True)
class Collective:
    """A collective of a scheduled program.

    Attributes:
        kind: Kind, such as "all-to-all".
        num_bytes: Bytes of its result on a device.
        groups: Its replica groups, as the program writes them.
        under: Work between its start and its end: numbers of matrix products, of jaxrec's
            kernels and of other kernels; None: nothing can, since it has no start of its own.
    """

    kind: str
    num_bytes: int
    groups: str
    under: tuple[int, int, int] | None


def main(options: Options) -> None:
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    lines: list[str] = []
    estimates: list[str] = []
    failures: list[str] = []
    print(*HEADER, sep="\n")
    steps = [
        Step(exchange, topology, routed, options.optimizer, options.dtype, options.ragged)
        for topology in options.topology
        for exchange in options.exchange
        for routed in ((False, True) if options.routed is None else (options.routed,))
    ]
    for step in [*steps, *OTHERS] if options == Options() else steps:
        lowered, num_lookups = lower_step(
            step, CARDS["h200"].topology(step.topology), options.kernels, "cuda"
        )
        compiled = lowered.compile()
        for line in report(step.name, compiled):
            lines.append(line)
            print(line, flush=True)
        failures += check(step, list(collectives(compiled.as_text())), num_lookups)
        estimates.append(estimate(step, compiled.as_text()))
    print("", *ESTIMATE_HEADER, *estimates, sep="\n")
    if options == Options():
        path = RESULTS / "compiled_mesh.h200.md"
        path.write_text(
            "# Sharded steps compiled for NVIDIA H200s\n\n"
            "Made by `python -m benchmarks.gpu.mesh` without a GPU, by JAX "
            f"{jax.__version__}. Nothing was timed; docs/internals/gpu.md says what the figures "
            "mean.\n\n" + "\n".join((*HEADER, *lines, "", *ESTIMATE_HEADER, *estimates, ""))
        )
        print(path)
    print(*failures or ["No failure."], sep="\n")
    sys.exit(bool(failures))


def check(step: Step, every: list[Collective], num_lookups: int) -> Iterator[str]:
    """Yield a sentence for each way in which a step's collectives are not as the docs say.

    Args:
        step: The step.
        every: Its collectives.
        num_lookups: Space for the ids of a device's samples, over all features.
    """
    devices = step.machine.num_devices
    found: Counter[str] = Counter()
    for each in every:
        # The bytes that a device puts into it.
        parts = devices if each.kind == "reduce-scatter" else 1
        found[each.kind] += parts * each.num_bytes
    del found["all-reduce"]  # of dense parameters, and of single numbers
    capacity = math.ceil(1.25 * num_lookups / devices)
    bags = TABLES * step.samples
    work = Workload(
        devices, DIM, num_lookups, bags, capacity, num_lookups // TABLES, bags // TABLES
    )
    promised = EXCHANGES[step.exchange].traffic(work)
    if step.dtype == "float32" and not step.ragged and found != promised:
        yield f"{step.name} puts {dict(found)} bytes into collectives, not {dict(promised)}."
    if step.routed:
        ids = min((each for each in every if each.kind == "all-to-all"), key=_num_bytes)
        if not ids.under or not any(ids.under):
            yield f"{step.name} runs nothing while the next batch's ids travel."


def _num_bytes(each: Collective) -> int:
    return each.num_bytes


def report(name: str, compiled: Any) -> Iterator[str]:
    """Yield the lines of a step's collectives."""
    gigabytes = compiled.memory_analysis().temp_size_in_bytes / 1e9
    for each in collectives(compiled.as_text()):
        under = "no" if each.under is None else ", ".join(map(str, each.under))
        yield (
            f"| {name} | {gigabytes:.2f} | {each.kind} | {each.num_bytes / 1e6:.2f} "
            f"| {each.groups} | {under} |"
        )


def estimate(step: Step, program: str) -> str:
    """Return the line of a step's time by its bytes and by the planner."""
    h200s = step.machine
    ideal = data_sheet(h200s)
    work = work_on_tables(program, ideal)
    ids = {f"t{i}": jaxrec.plan.ParameterConstraints(pooling_factors=IDS) for i in range(TABLES)}
    batch = h200s.num_devices * step.samples

    def planned(machine: jaxrec.plan.Topology) -> float:
        placed, planner = plan(step), jaxrec.plan.Planner(machine, ids)
        evaluated = planner.evaluate(step.configs(), placed, batch_size=batch)
        assert evaluated.estimate is not None
        return evaluated.estimate.seconds

    same, own = planned(ideal), planned(h200s)
    return (
        f"| {step.name} | {work.kernels:.0f} | {work.memory / 1e6:.0f} | {1e6 * work.seconds:.0f} "
        f"| {1e6 * same:.0f} | {same / work.seconds:.2f} | {1e6 * own:.0f} |"
    )


class Model(nnx.Module):
    """Tables and a dense part of two layers."""

    def __init__(self, configs: list[jaxrec.EmbeddingBagConfig], rngs: nnx.Rngs):
        self.tables = jaxrec.EmbeddingBagCollection(configs, rngs=rngs)
        self.hidden = nnx.Linear(TABLES * DIM, 1024, rngs=rngs)
        self.out = nnx.Linear(1024, 1, rngs=rngs)

    def __call__(self, features: Any) -> Any:
        return self.out(jax.nn.relu(self.hidden(self.tables(features).values)))[:, 0]


def lower_step(
    step: Step, devices: Sequence[Any], kernels: tuple[str, ...], platform: str
) -> tuple[Any, int]:
    """Return the step, lowered for described devices, and the space for a device's ids."""
    routed = step.routed
    # The model is made on as many CPU devices; then arrays become shapes on the described ones.
    mesh = Mesh(np.array(jax.devices()[: len(devices)]), ("data",), axis_types=(AxisType.Auto,))
    described_mesh = Mesh(np.array(devices), ("data",), axis_types=(AxisType.Auto,))
    model = jaxrec.shard(Model(step.configs(), nnx.Rngs(0)), plan(step), mesh)
    optimizer = jaxrec.Optimizer(model, optax.adam(1e-3))
    batch = len(devices) * step.samples
    lengths = np.full(TABLES * batch, IDS, np.int32)
    ids = np.random.default_rng(0).integers(0, ROWS, lengths.sum())
    names = [f"f{i}" for i in range(TABLES)]
    features = jaxrec.KeyedJaggedArray.from_lengths(names, ids, lengths)
    features, labels = jaxrec.mesh.shard_batch((features, np.zeros(batch, np.float32)), mesh)
    store = model.tables.tables.get_value()
    # CPU devices have no ragged all-to-all.
    placed = dataclasses.replace(store, mesh=described_mesh, is_ragged=step.ragged)
    model.tables.tables.set_value(placed)
    graph, state = nnx.split((model, optimizer))

    def described(x: Any) -> Any:
        spec = x.sharding.spec if isinstance(x.sharding, NamedSharding) else PartitionSpec()
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(described_mesh, spec))

    def routes(state: Any, features: Any) -> Any:
        return route_ahead(lambda model: model(features), nnx.merge(graph, state)[0])

    def train(state: Any, ahead: Any, features: Any, labels: Any, following: Any) -> Any:
        model, optimizer = nnx.merge(graph, state)

        def loss(model: Any) -> Any:
            return optax.sigmoid_binary_cross_entropy(model(features), labels).mean()

        with use_ahead(model, ahead):
            value, gradients = jaxrec.value_and_grad(loss)(model)
            optimizer.update(model, gradients)
        if routed:
            ahead = route_ahead(lambda model: model(following), model)
        return value, nnx.state((model, optimizer)), ahead

    with use_kernels(*kernels):
        state, features, labels = jax.tree.map(described, (state, features, labels))
        over_batch = NamedSharding(described_mesh, PartitionSpec("data"))
        ahead: Any = {"tables": []}
        if routed:
            ahead = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=over_batch),
                jax.eval_shape(routes, state, features),
            )
        traced = jax.jit(train, donate_argnums=(0, 1)).trace(
            state, ahead, features, labels, features
        )
        return traced.lower(lowering_platforms=(platform,)), features.values.size // len(devices)


def plan(step: Step) -> Any:
    """Return the placement of a step's tables."""
    row_wise, table_wise = jaxrec.mesh.row_wise, jaxrec.mesh.table_wise
    num_devices = step.machine.num_devices
    return jaxrec.plan.ShardingPlan.from_dict(
        {
            f"t{i}": table_wise(device=i * num_devices // TABLES)
            if step.exchange == "bags"
            else row_wise(exchange=step.exchange)
            for i in range(TABLES)
        }
    )


def collectives(program: str) -> Iterator[Collective]:
    """Yield the collectives of a scheduled program's entry, in the order of their starts."""
    lines = program[program.index("\nENTRY") :].splitlines()
    for i, line in enumerate(lines):
        found = re.match(rf"\s*(?:ROOT )?%?([\w.-]+) = (.*?) ({COLLECTIVES})(-start)?\(", line)
        if found is None:
            continue
        name, shape, kind, start = found.groups()
        groups = re.search(r"replica_groups=(\S+?\}\}|\S+)", line)
        under, result = None, shape
        if start:
            end = next(
                j for j, each in enumerate(lines) if re.search(rf"-done\(.*%?{name}\b", each)
            )
            under = count_work(lines[i + 1 : end])
            result = lines[end].partition(" = ")[2].partition(f" {kind}-done(")[0]
        text = "" if groups is None else groups[1].rstrip(",").replace("|", " ")
        yield Collective(kind, shape_bytes(result), text, under)


def count_work(lines: list[str]) -> tuple[int, int, int]:
    """Return the numbers of matrix products, of jaxrec's kernels and of other kernels."""
    products = ours = others = 0
    for line in lines:
        if "__cublas" in line or "gemm" in line:
            products += 1
        elif "xla_gpu_triton_call" in line or "__gpu$xla.gpu.triton" in line:
            ours += 1
        elif re.search(r" (fusion|custom-call|sort|while|conditional)\(", line):
            others += 1
    return products, ours, others


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
