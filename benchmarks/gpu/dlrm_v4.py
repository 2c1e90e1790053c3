"""Compiles the training step of examples/dlrm_v4.py for H200s without one, and reports its memory.

    python -m benchmarks.gpu.dlrm_v4 [--devices 1 8] [--samples 64] [--length 4086]

The step has MLPerf's widths and lengths, in bfloat16, with rematerialization. On eight devices the
tables have all their rows, where the planner puts them; on one device a tenth of them. Every
history has the greatest length. Prints, for each number of devices and of samples a device: bytes
of arguments (tables, their state, the batch), how many of them the program updates in place, bytes
of temporaries, and the seconds of the compilation; then the collectives of a device; then the
floating-point operations of 1,024 samples.

Dense operations are those of the traced step's matrix products, without what rematerialization
computes again. The attention's follow from the pairs that the mask shows: two products forward and
five backward.

A failure is a copy of a table, or a table that is not updated in place; the exit status is then 1.
A run without options writes ``benchmarks/results/compiled_dlrm_v4.h200.md``. docs/internals/gpu.md
says how to set this up.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import math
import pathlib
import re
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

from benchmarks.gpu.environment import compile_without_cards

if __name__ == "__main__":  # Who imports this has devices of its own.
    compile_without_cards()

import jax
import numpy as np
import tyro
from flax import nnx
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.sharding import (
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
    SingleDeviceSharding,
)

import jaxrec
from benchmarks.gpu.cards import CARDS
from benchmarks.gpu.mesh import RESULTS, collectives
from jaxrec.embed.kernels import use_kernels
from jaxrec.mesh.creation import layout_on_mesh
from jaxrec.mesh.tables import ShardedTables

EXAMPLE = pathlib.Path(__file__).parents[2] / "examples/dlrm_v4.py"
MEMORY_HEADER = (
    "| devices | samples a device | rows | arguments GB | in place GB | temporaries GB "
    "| sum, of 141 GB | compiled in s |",
    "|---|---|---|---|---|---|---|---|",
)
COLLECTIVES_HEADER = (
    "| devices | samples a device | collective | number | MB |",
    "|---|---|---|---|---|",
)
WORK_HEADER = (
    "| samples | dense TFLOP | attention TFLOP | sum | MLPerf's rules |",
    "|---|---|---|---|---|",
)
RULES = 323  # TFLOP for 1,024 samples


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the compilation.

    Attributes:
        devices: Numbers of devices.
        samples: Numbers of samples of a device.
        length: Events of a history.
        remat: Whether the backward pass computes layers again.
        kernels: Implementations of lookups and updates, in order of preference.
    """

    devices: tuple[int, ...] = (1, 8)
    samples: tuple[int, ...] = (64,)
    length: int = 4086
    remat: bool = True
    kernels: tuple[str, ...] = ("triton", "reference")


@dataclasses.dataclass(frozen=True)
class Step:
    """A traced step, not yet compiled.

    Attributes:
        settings: The example's settings.
        devices: Number of devices.
        samples: Samples of a device.
        traced: What `jax.jit` traced.
        tables: Shapes of a device's tables and of their state.
    """

    settings: Any
    devices: int
    samples: int
    traced: Any
    tables: list[tuple[int, ...]]

    @property
    def name(self) -> str:
        return f"| {self.devices} | {self.samples}"


@functools.cache
def example() -> Any:
    """Return the module of the example."""
    spec = importlib.util.spec_from_file_location("dlrm_v4", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["dlrm_v4"] = module
    spec.loader.exec_module(module)
    return module


def main(options: Options) -> None:
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    memory, moved, failures = [], [], []
    print(*MEMORY_HEADER, sep="\n")
    for devices in options.devices:
        for samples in options.samples:
            with use_kernels(*options.kernels):
                step = trace(options, devices, samples)
                start = time.perf_counter()
                with kernels_of(devices):
                    compiled = step.traced.lower(lowering_platforms=("cuda",)).compile()
            memory.append(memory_of(step, compiled, time.perf_counter() - start))
            print(memory[-1], flush=True)
            moved += collectives_of(step, compiled)
            failures += check(step, compiled)
    work = work_of(options)
    print("", *COLLECTIVES_HEADER, *moved, "", *WORK_HEADER, work, sep="\n")
    if options == Options():
        path = RESULTS / "compiled_dlrm_v4.h200.md"
        path.write_text(
            "# MLPerf's DLRMv4 compiled for NVIDIA H200s\n\n"
            "Made by `python -m benchmarks.gpu.dlrm_v4` without a GPU, by JAX "
            f"{jax.__version__}. Nothing was timed.\n\n"
            + "\n".join((*MEMORY_HEADER, *memory, "", *COLLECTIVES_HEADER, *moved, ""))
            + "\n".join(("", *WORK_HEADER, work, ""))
        )
        print(path)
    print(*failures or ["No failure."], sep="\n")
    sys.exit(bool(failures))


def kernels_of(devices: int) -> contextlib.AbstractContextManager[None]:
    """Return the context in which kernels know the card; a mesh of several devices says it, too."""
    if devices > 1:
        return contextlib.nullcontext()
    return jax.sharding.use_abstract_mesh(CARDS["h200"].abstract_mesh)


def trace(options: Options, devices: int, samples: int, *, remat: bool | None = None) -> Step:
    """Trace the step of described devices; no array of the model is made."""
    settings = example().Settings(
        scale=1.0 if devices > 1 else 0.1,
        length=options.length,
        batch_size=devices * samples,
        bfloat16=True,
        remat=options.remat if remat is None else remat,
    )
    gpus = CARDS["h200"].topology(f"1x{devices}x1")
    mesh = Mesh(np.array(gpus), ("data",), axis_types=(AxisType.Auto,))
    model, optimizer = nnx.eval_shape(lambda: make(settings))
    store = model.embeddings.tables.get_value()
    if devices > 1:
        store = sharded(settings, store, devices, mesh)
        model.embeddings.tables.set_value(store)
    graph, state = nnx.split((model, optimizer))

    def train(state: Any, batch: Any) -> Any:
        model, optimizer = nnx.merge(graph, state)
        loss = example().train_step(model, optimizer, batch)
        return loss, nnx.state((model, optimizer))

    def described(x: Any) -> Any:
        sharding = x.sharding or sharding_over(mesh, PartitionSpec())
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    batch = described_batch(settings, devices, samples, mesh)
    with kernels_of(devices):
        traced = jax.jit(train, donate_argnums=0).trace(jax.tree.map(described, state), batch)
    tables = [
        x.shape if devices == 1 else x.sharding.shard_shape(x.shape)
        for x in jax.tree.leaves((store.rows, store.state))
    ]
    return Step(settings, devices, samples, traced, tables)


def make(settings: Any) -> tuple[Any, Any]:
    model = example().make_model(settings)
    return model, jaxrec.Optimizer(model, example().make_optimizer(settings))


def sharded(settings: Any, store: Any, devices: int, mesh: Mesh) -> ShardedTables:
    """Return the shapes of tables that the planner placed on a mesh."""
    machine = jaxrec.plan.Topology.named("h200", devices=devices)
    plan = example().make_plan(settings, machine)
    print(plan, file=sys.stderr)
    on_cpus = Mesh(np.array(jax.devices()[:devices]), ("data",), axis_types=(AxisType.Auto,))
    layout = layout_on_mesh(store, plan.to_dict(), on_cpus)
    placed = jax.eval_shape(lambda: ShardedTables.zeros(layout, on_cpus))
    placed = dataclasses.replace(placed, mesh=mesh)

    def described(name: str) -> Any:
        sharding = NamedSharding(mesh, placed.specs()[name])
        return lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return dataclasses.replace(
        placed,
        rows={name: jax.tree.map(described(name), x) for name, x in placed.rows.items()},
        state={name: jax.tree.map(described(name), x) for name, x in placed.state.items()},
    )


def described_batch(settings: Any, devices: int, samples: int, mesh: Mesh) -> Any:
    """Return the shapes of a batch whose histories all have the greatest length."""
    one = example().draw_batch(dataclasses.replace(settings, batch_size=1), 0)
    capacities = tuple(samples * capacity for capacity in one.capacities)
    whole = jaxrec.KeyedJaggedArray(
        np.zeros(sum(capacities), np.int32),
        np.zeros(samples * len(one.keys), np.int32),
        keys=one.keys,
        capacities=capacities,
        strides=(samples,) * len(one.keys),
    )
    front = (devices,) if devices > 1 else ()
    sharding = sharding_over(mesh, PartitionSpec("data"))
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((*front, *x.shape), x.dtype, sharding=sharding), whole
    )


def sharding_over(mesh: Mesh, spec: PartitionSpec) -> Sharding:
    if mesh.size == 1:
        return SingleDeviceSharding(mesh.devices.item())
    return NamedSharding(mesh, spec)


def memory_of(step: Step, compiled: Any, seconds: float) -> str:
    memory = compiled.memory_analysis()
    arguments, temporaries = memory.argument_size_in_bytes, memory.temp_size_in_bytes
    names = [*example().ITEMS, *example().CONTEXT]
    rows = sum(example().rows_of(name, step.settings.scale) for name in names)
    cells = [
        f"{rows:,}",
        *(f"{x / 1e9:.2f}" for x in (arguments, memory.alias_size_in_bytes, temporaries)),
        f"{(arguments + temporaries) / 1e9:.1f}",
        f"{seconds:.0f}",
    ]
    return f"{step.name} | {' | '.join(cells)} |"


def collectives_of(step: Step, compiled: Any) -> Iterator[str]:
    """Yield a line for each kind and size of collective of a device."""
    found = Counter(
        (each.kind, f"{each.num_bytes / 1e6:.2f}") for each in collectives(compiled.as_text())
    )
    for (kind, size), number in found.items():
        yield f"{step.name} | {kind} | {number} | {size} |"


def check(step: Step, compiled: Any) -> Iterator[str]:
    """Yield a sentence for each table that is copied, and if tables are not updated in place."""
    program, name = compiled.as_text(), f"The step of {step.devices} x {step.samples} samples"
    for shape in sorted(set(step.tables)):
        size = ",".join(map(str, shape))
        if re.search(rf"\[{size}\]\S* copy(-start)?\(", program):
            yield f"{name} copies an array of a table's shape [{size}]."
    tables = sum(4 * math.prod(shape) for shape in step.tables)
    if (in_place := compiled.memory_analysis().alias_size_in_bytes) < tables:
        yield (
            f"{name} changes {in_place / 1e9:.2f} GB in place, less than its tables' "
            f"{tables / 1e9:.2f} GB."
        )


def work_of(options: Options) -> str:
    """Return the line of the floating-point operations of 1,024 samples."""
    with use_kernels(*options.kernels):
        step = trace(options, 1, 1, remat=False)
    dense = 1024 * dot_flops(step.traced.jaxpr.jaxpr)
    tokens = options.length + len(example().CONTEXT) + 1
    # Three layers, four heads of 128 columns; two products forward and five backward.
    attention = 1024 * 3 * 4 * 7 * 2 * 128 * tokens * (tokens + 1) / 2
    cells = [f"{x / 1e12:.0f}" for x in (dense, attention, dense + attention)]
    return f"| 1,024 | {' | '.join(cells)} | {RULES} |"


def dot_flops(jaxpr: Any) -> float:
    """Return the operations of a program's matrix products, loops of unknown length aside."""
    total = 0.0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            ((contracted, _), _), shape = equation.params["dimension_numbers"], equation.invars[0]
            depth = math.prod(shape.aval.shape[axis] for axis in contracted)
            total += 2.0 * depth * math.prod(equation.outvars[0].aval.shape)
        elif equation.primitive.name != "while":
            times = equation.params.get("length", 1) if equation.primitive.name == "scan" else 1
            inner = jax.tree.leaves(list(equation.params.values()), is_leaf=is_program)
            programs = (getattr(each, "jaxpr", each) for each in inner if is_program(each))
            total += times * sum(dot_flops(each) for each in programs)
    return total


def is_program(parameter: Any) -> bool:
    return isinstance(parameter, Jaxpr | ClosedJaxpr)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
