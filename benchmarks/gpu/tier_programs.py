"""Programs of a batch of tables beyond the card's memory, compiled for a card that is described.

`python -m benchmarks.gpu.tier --compile` runs this.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxrec
from benchmarks.gpu.cards import CARDS
from benchmarks.gpu.compile import Report, build, check_program
from benchmarks.gpu.programs import Program
from benchmarks.peer_shapes import zipf_ids
from jaxrec.embed import apply_gradients, lookup, rows
from jaxrec.embed.config import TableConfig
from jaxrec.embed.first_values import draw_and_scale
from jaxrec.embed.kernels import use_kernels
from jaxrec.embed.layout import layout_tables
from jaxrec.embed.slots import size_for
from jaxrec.embed.tables import Tables
from jaxrec.optim import RowOptimizer
from jaxrec.tier.rows import first_rows

if TYPE_CHECKING:  # That module begins this one.
    from benchmarks.gpu.tier import Shape

CARD = CARDS["h200"]
RESULTS = pathlib.Path(__file__).parents[1] / "results"
HEADER = (
    "| program | launches | arguments GB | changed in place GB | temporaries MB "
    "| arrays from the host | MB | arrays to the host | MB | copies within the program "
    "| calls of the host |",
    "|---|---|---|---|---|---|---|---|---|---|---|",
)


def write_page(optimizers: dict[str, RowOptimizer], shape: Shape, cached: int) -> list[str]:
    """Compile the programs of a batch, print their lines, write the page; return the failures.

    Args:
        optimizers: Row optimizers by name.
        shape: Tables and ids of a batch, as they are timed on a card.
        cached: Rows of each table on the card.
    """
    moved = size_for(shape.tables * rows_beyond(shape, cached))
    report, lines = Report(CARD), list(HEADER)
    print(*HEADER, sep="\n")
    for name, optimizer in optimizers.items():
        for program, sent, received in programs(name, optimizer, shape, cached, moved):
            if (built := build(program, report)) is None:
                continue
            check_program(program, built, report)
            memory, text = built.compiled.memory_analysis(), built.compiled.as_text()
            cells = (
                program.name,
                built.launches.total,
                f"{memory.argument_size_in_bytes / 1e9:.2f}",
                f"{memory.alias_size_in_bytes / 1e9:.2f}",
                f"{memory.temp_size_in_bytes / 1e6:.1f}",
                *_number_and_megabytes(sent),
                *_number_and_megabytes(received),
                text.count(" copy(") + text.count(" copy-start("),
                text.count("callback"),
            )
            lines.append(f"| {' | '.join(map(str, cells))} |")
            print(lines[-1], flush=True)
    failed = [f"- {each}" for each in report.failures] or ["None."]
    page = [
        "# Programs of a batch of tables beyond the card's memory, compiled for an NVIDIA H200\n",
        "Made by `python -m benchmarks.gpu.tier --compile` without a GPU, by JAX "
        f"{jax.__version__}. Nothing was timed.\n",
        f"{shape.tables} tables of {shape.rows:,} rows of {shape.dim} columns in float32, "
        f"{cached:,} of each on the card; a batch has {shape.tables * shape.ids:,} ids. "
        f"{moved:,} rows come, from their store or with first values, and as many leave: those "
        f"that a batch reads beyond the {cached:,} most frequent ones of a table, padded. Arrays "
        "from the host are put on the card before the program, and arrays to the host are copied "
        "after it, by transfers of their own.\n",
        *lines,
        "\nFailures:\n",
        *failed,
        "",
    ]
    path = RESULTS / "compiled_tier.h200.md"
    path.write_text("\n".join(page))
    print(*failed, path, sep="\n")
    return report.failures


def rows_beyond(shape: Shape, cached: int) -> int:
    """Return the number of rows of a table that a batch reads beyond its most frequent ones."""
    ids = zipf_ids(np.random.default_rng(0).random(shape.ids), shape.rows, 1.05)
    return np.unique(ids[ids >= cached]).size


def programs(
    name: str, optimizer: RowOptimizer, shape: Shape, cached: int, moved: int
) -> Iterator[tuple[Program, Any, Any]]:
    """Yield the programs of a batch, with the arrays that each gets from and gives to the host."""
    configs = [
        TableConfig(f"t{i}", cached, shape.dim, feature_names=(f"f{i}",))
        for i in range(shape.tables)
    ]
    layout = layout_tables(configs, optimizer)
    store = jax.eval_shape(lambda: Tables.init(layout, jax.random.key(0)))
    (group,) = store.groups
    tables = frozenset(x.shape for x in jax.tree.leaves(store))
    slots = jax.ShapeDtypeStruct((moved,), jnp.int32)
    rows_and_state = jax.eval_shape(lambda *x: rows._read(*x, group), store, slots)

    def gather(store: Any, slots: Any) -> Any:
        return rows._read(store, slots, group)

    def write(store: Any, slots: Any, values: Any) -> Any:
        return rows._write(store, slots, *values, group)

    draw, _ = draw_and_scale(configs[0].initializer, shape.rows, shape.dim)
    new = (
        jax.ShapeDtypeStruct((moved, 6), jnp.int32),
        jax.ShapeDtypeStruct((shape.tables, 3), jnp.uint32),
    )

    def reset(store: Any, *new: Any) -> Any:
        return first_rows._reset(store, *new, group, draw, shape.dim)

    features = jax.eval_shape(
        lambda: jaxrec.KeyedJaggedArray(
            jnp.zeros(shape.tables * shape.ids, jnp.int32),
            jnp.zeros(shape.tables * shape.ids, jnp.int32),
            keys=tuple(f"f{i}" for i in range(shape.tables)),
            capacities=(shape.ids,) * shape.tables,
            strides=(shape.ids,) * shape.tables,
        )
    )

    def step(store: Any, features: Any) -> Any:
        with use_kernels("triton", "reference"):
            activations, residuals = lookup(store, features)
            gradients = jax.tree.map(lambda rows: jnp.full_like(rows, 1e-3), activations)
            return apply_gradients(store, residuals, gradients, 0)

    def made(what: str, function: Any, *arguments: Any, donate: tuple[int, ...] = (0,)) -> Program:
        # No program may take as many temporaries as the rows that a batch reads or moves, thrice.
        most = 12 * shape.dim * max(moved, shape.tables * shape.ids)
        return Program(
            f"{what}, {name}", function, (store, *arguments), tables, donate, temporaries=most
        )

    yield made("rows that leave", gather, slots, donate=()), slots, rows_and_state
    yield made("first rows", reset, *new), new, ()
    yield made("rows that come", write, slots, rows_and_state), (slots, rows_and_state), ()
    yield made("lookup and update", step, features), features, ()


def _number_and_megabytes(arrays: Any) -> tuple[int, str]:
    leaves = jax.tree.leaves(arrays)
    return len(leaves), f"{sum(x.size * x.dtype.itemsize for x in leaves) / 1e6:.1f}"
