"""The calls and training steps that jaxrec supports on TPUs, as programs to compile."""

from __future__ import annotations

import dataclasses
import functools
import math
import pathlib
import runpy
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import jaxrec
from benchmarks.gpu import mesh, programs
from benchmarks.gpu.batches import Shape
from benchmarks.gpu.step_shapes import STEPS
from benchmarks.tpu.chips import CHIPS, Chip
from jaxrec.embed.kernels import reference, sparse_core, use_kernels
from jaxrec.embed.tables import read_slots, write_slots

EXAMPLE = pathlib.Path(__file__).parents[2] / "examples" / "hstu_ranker.py"
# Samples of a device: XLA compiles sorts of more than 8,192 numbers for seconds each.
SAMPLES = 32
# Columns and packed formats of looked-up tables.
LOOKUPS = (
    *((dim, None) for dim in (128, 100, 64, 32)),
    *((dim, "float8") for dim in (128, 64)),
    (128, "trained int8"),
    (128, "int8"),
    (128, "int4"),
)


@dataclasses.dataclass(frozen=True)
class Lowered:
    """A program before XLA compiles it.

    Attributes:
        lowered: What `jax.jit` lowered.
        tables: Shapes of a device's tables and of their state, none of which may be copied.
        table_bytes: Bytes of those that the program must change in place; 0 for calls that read.
    """

    lowered: Any
    tables: frozenset[tuple[int, ...]]
    table_bytes: int


@dataclasses.dataclass(frozen=True)
class Program:
    """A program to compile.

    Attributes:
        name: Name in the results.
        lower: Lowers it for a chip.
        is_quick: Whether it belongs to the cut that CI compiles.
        is_supported: Whether it must not fail; docs/tpu.md says why the others do.
        chips: Names of the chips that it is for.
    """

    name: str
    lower: Callable[[Chip], Lowered]
    is_quick: bool = False
    is_supported: bool = True
    chips: tuple[str, ...] = tuple(CHIPS)


def on_one_chip(
    program: programs.Program,
    *,
    is_quick: bool = False,
    is_supported: bool = True,
    chips: tuple[str, ...] = tuple(CHIPS),
) -> Program:
    """Return a program of one device, for a chip."""

    def lower(chip: Chip) -> Lowered:
        with use_kernels("reference"):
            lowered = chip.lower(program.function, *program.arguments, donate=program.donate)
        donated = [program.arguments[i] for i in program.donate]
        table_bytes = sum(
            math.prod(x.shape) * x.dtype.itemsize
            for x in jax.tree.leaves(donated)
            if x.shape in program.tables
        )
        return Lowered(lowered, program.tables, table_bytes)

    return Program(program.name.replace("reference ", ""), lower, is_quick, is_supported, chips)


def sharded_step(exchange: str, *, ragged: bool = False) -> mesh.Step:
    """Return the step of tables over eight chips, whose rows travel by an exchange."""
    return mesh.Step(exchange, "1x8x1", ragged=ragged, samples=SAMPLES)


def over_eight_chips(
    step: mesh.Step, *kernels: str, chips: tuple[str, ...] = tuple(CHIPS)
) -> Program:
    """Return a sharded step by the named kernels, for eight chips."""

    def lower(chip: Chip) -> Lowered:
        lowered, _ = mesh.lower_step(step, chip.devices(8), (*kernels, "reference"), "tpu")
        rows = mesh.TABLES * mesh.ROWS // 8
        return Lowered(lowered, frozenset([(rows, mesh.DIM), (rows,)]), 4 * rows * (mesh.DIM + 1))

    name = " ".join(["step 8 chips", step.exchange, *["ragged"] * step.ragged, *kernels])
    return Program(name, lower, chips=chips)


def every() -> Iterator[Program]:
    """Yield the programs, small ones first."""
    yield from calls()
    yield from sparse_core_programs()
    yield from steps()
    yield from sharded_steps()


def calls() -> Iterator[Program]:
    """Yield lookups and moves of rows of one device."""
    for dim, packed in LOOKUPS:
        name = f"D{dim} {packed or 'float32'} L20"
        # More than a chip's own memory holds, into which XLA copies smaller tables.
        shape = Shape(name, 4, 1_000_000, dim, 512, 20, packed=packed)
        yield on_one_chip(programs.pooled_lookup(reference, shape))
    yield on_one_chip(read_rows(400_000, 128, 4096))
    yield on_one_chip(write_rows(400_000, 128, 4096))


def sparse_core_programs() -> Iterator[Program]:
    """Yield the programs of our own kernels for SparseCores."""
    chips = tuple(name for name, chip in CHIPS.items() if chip.has_sparse_cores)
    for dim, rows in ((128, 1_000_000), (1024, 100_000)):
        shape = Shape(f"D{dim} float32 L20", 4, rows, dim, 512, 20)
        yield on_one_chip(programs.row_lookup(sparse_core, shape), chips=chips)
        yield on_one_chip(programs.pooled_lookup(sparse_core, shape), chips=chips)
        for optimizer in ("sgd", "adagrad", "rowwise_adagrad"):
            program = programs.fused_update(sparse_core, optimizer, shape)
            yield on_one_chip(program, chips=chips)
    tables = programs.tables_step("sparse_core", "reference", tables=4, rows=100_000, batch=512)
    yield on_one_chip(tables, chips=chips)
    # Its updates are in a loop.
    yield over_eight_chips(sharded_step("rows"), "sparse_core", chips=chips)


def read_rows(rows: int, dim: int, count: int) -> programs.Program:
    """Return the reads of rows with their state, as open vocabularies and caches evict rows."""
    table, state, slots = _rows(rows, dim), {"sum": _rows(rows)}, _slots(count)
    tables = frozenset([table.shape, (rows,)])
    return programs.Program(f"read rows D{dim}", read_slots, (table, state, slots), tables)


def write_rows(rows: int, dim: int, count: int) -> programs.Program:
    """Return the writes of rows with their state, as open vocabularies and caches admit rows."""
    table, state = _rows(rows, dim), {"sum": _rows(rows)}
    new = _slots(count), _rows(count, dim), {"sum": _rows(count)}
    tables = frozenset([table.shape, (rows,)])
    name = f"write rows D{dim}"
    return programs.Program(name, write_slots, (table, state, *new), tables, donate=(0, 1))


def steps() -> Iterator[Program]:
    """Yield training steps of one device."""
    tables = programs.tables_step("reference", tables=4, rows=100_000, batch=512)
    yield on_one_chip(tables, is_quick=True)
    # XLA copies such a table if it has few rows for each row that is written.
    tables = programs.tables_step("reference", tables=4, rows=4_000_000, batch=512, dim=64)
    yield on_one_chip(dataclasses.replace(tables, name=f"{tables.name} D64"))
    for name in ("dlrm_kaggle_8192", "dlrm_dcnv2_8192", "sasrec_512x200"):
        step = dataclasses.replace(STEPS[name].cut(1_000_000_000), batch=SAMPLES)
        step = dataclasses.replace(step, name=f"{name.rpartition('_')[0]}_{SAMPLES}")
        # SASRec's table of 64 columns is small enough for XLA to copy it before it is written.
        is_supported = not name.startswith("sasrec")
        yield on_one_chip(programs.timed_step(step, "reference"), is_supported=is_supported)
    yield on_one_chip(ranker_step())


def ranker_step() -> programs.Program:
    """Return a step of the HSTU ranker of examples/hstu_ranker.py."""
    example: Any = runpy.run_path(str(EXAMPLE))
    settings = example["Settings"](steps=1, num_items=10_000, dim=128)
    log = example["make_log"](settings)

    def make() -> Any:
        model = example["make_model"](settings, log, 0.01)
        return model, jaxrec.Optimizer(model, optax.adam(0.01))

    def function(state: Any, batch: Any) -> Any:
        model, optimizer = nnx.merge(graph, state)
        with use_kernels("reference"):
            loss = example["train_step"](model, optimizer, batch)
        return loss, nnx.state((model, optimizer))

    graph, state = nnx.split(nnx.eval_shape(make))
    draw = functools.partial(example["draw_batch"], settings, log, 0)
    batch = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, draw()))
    tables = frozenset([(settings.num_items, settings.dim)])
    return programs.Program("step HSTU ranker", function, (state, batch), tables, donate=(0,))


def sharded_steps() -> Iterator[Program]:
    """Yield training steps of eight devices."""
    for exchange in ("rows", "pooled", "bags"):
        yield over_eight_chips(sharded_step(exchange))
    for exchange in ("rows", "pooled"):
        yield over_eight_chips(sharded_step(exchange, ragged=True))


def _rows(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def _slots(count: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((count,), jnp.int32)
