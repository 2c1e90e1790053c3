"""Holds one implementation to sums by NumPy and updates by `jaxrec.optim`, both in float64.

    python -m benchmarks.gpu.check triton                          # on this machine's GPU
    python -m benchmarks.gpu.check triton --part 2 8               # the second of eight parts
    python -m benchmarks.gpu.check triton --dry-run                # interpreted on the CPU

Prints a JSON line for each primitive and shape: its largest error, relative to the sum of the
absolute values that make up a number, and whether a second run gave the same bits and rows that do
not occur kept theirs. The exit status says whether all is as it should be. ``--seconds`` ends the
run in time: shapes that no longer begin have a line that says so.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu.backends import BACKENDS, NAMES, module
from benchmarks.gpu.batches import PACKED, TRAINED, Shape, bags_of
from jaxrec import optim
from jaxrec.embed.formats import TableArray

SHAPES = [
    *(Shape(f"d{dim}", 2, 500, dim, 64, 5) for dim in (1, 3, 4, 16, 64, 100, 128, 256, 1024)),
    Shape("bfloat16", 2, 500, 128, 64, 5, dtype="bfloat16"),
    Shape("float16", 2, 500, 64, 64, 5, dtype="float16"),
    Shape("weighted_mean", 3, 500, 128, 64, 7, weighted=True, mean=True),
    Shape("ragged", 3, 1000, 128, 4096, 6, ragged=True),
    Shape("hot_rows", 2, 1000, 64, 8192, 20, ids="powerlaw", weighted=True),
    *(
        Shape(f"{name}_d{dim}", 2, 500, dim, 64, 5, packed=name)
        for name in PACKED
        for dim in (4, 64, 100)
    ),
    Shape("int8_ragged", 3, 1000, 64, 4096, 6, ragged=True, weighted=True, packed="int8"),
]
OPTIMIZERS: dict[str, optim.RowOptimizer] = {
    "sgd": optim.sgd(0.1),
    "adagrad": optim.adagrad(0.1, eps=1e-3),
    "rowwise_adagrad": optim.rowwise_adagrad(0.1, eps=1e-3, max_norm=5.0),
    "adam": optim.adam(0.1, eps=1e-3),
    "partial_rowwise_adam": optim.partial_rowwise_adam(0.1, eps=1e-3),
}
# Sums are taken in float32; a table of 16 or 8 bits is rounded up or down to a neighbour.
SUM_BOUND = 2e-6
STORE_BOUND = {"float32": SUM_BOUND, "bfloat16": 2.0**-7, "float16": 2.0**-10}
STORE_BOUND |= {"trained int8": 2.0**-6, "float8_e4m3": 2.0**-3, "float8_e5m2": 2.0**-2}


# Those of a dry run, which are interpreted.
DRY_SHAPES = ("d4", "int8_d4", "trained int8_d4")
DRY_OPTIMIZERS = ("rowwise_adagrad",)


def main() -> None:
    names = [shape.name for shape in SHAPES]
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("implementation", choices=NAMES)
    parser.add_argument("--shapes", nargs="*", choices=names, help="names; default all")
    parser.add_argument(
        "--part", nargs=2, type=int, default=(1, 1), metavar=("PART", "PARTS"),
        help="check this part of the shapes, of so many",
    )  # fmt: skip
    parser.add_argument("--seconds", type=float, default=math.inf, help="then no shape begins")
    parser.add_argument("--dry-run", action="store_true", help="interpret a few shapes on the CPU")
    arguments = parser.parse_args()
    end, failures = time.monotonic() + arguments.seconds, 0
    name, (part, parts) = arguments.implementation, arguments.part
    options = {"interpret": True} if arguments.dry_run and name in BACKENDS else {}
    optimizers = DRY_OPTIMIZERS if arguments.dry_run else tuple(OPTIMIZERS)
    chosen = arguments.shapes or (DRY_SHAPES if arguments.dry_run else names)
    # Neighbours cost about the same, so that parts take one after the other in turn.
    for shape in [shape for shape in SHAPES if shape.name in chosen][part - 1 :: parts]:
        start = {"implementation": name, "shape": shape.name}
        if time.monotonic() > end:
            print(json.dumps({"kind": "left out", **start}), flush=True)
            continue
        for primitive, check in checks(module(name), shape, optimizers, options):
            is_update = primitive.startswith("fused_update")
            bound = STORE_BOUND[shape.packed or shape.dtype] if is_update else SUM_BOUND
            line = {"kind": "check", **start, "primitive": primitive, **outcome(check, bound)}
            print(json.dumps(line), flush=True)
            failures += not line["passed"]
    sys.exit(failures > 0)


def outcome(check: Callable[[], tuple[float, bool]], bound: float) -> dict[str, Any]:
    """Result of a check. An error of one check does not keep the others from running."""
    try:
        error, repeats = check()
    except Exception as exception:
        return {"passed": False, "exception": f"{type(exception).__name__}: {exception}"[:300]}
    return {"passed": bool(error <= bound) and repeats, "error": error, "repeats": repeats}


def checks(
    implementation: ModuleType, shape: Shape, optimizers: Sequence[str], options: dict[str, bool]
) -> list[tuple[str, Callable[[], tuple[float, bool]]]]:
    """The checks of the primitives that the implementation has for the shape."""
    table = shape.table()
    if refuses_table(implementation, table):
        return []
    found = [("pooled_lookup", functools.partial(pooled, implementation, shape, table, options))]
    if hasattr(implementation, "row_lookup"):
        found.append(("row_lookup", functools.partial(rows, implementation, shape, table, options)))
    if shape.packed is None:
        check = functools.partial(flat, implementation, shape, options)
        found.append(("flatten_bags", check))
    if not hasattr(implementation, "fused_update"):
        return found
    if shape.packed in TRAINED:
        optimizer = OPTIMIZERS["rowwise_adagrad"]
        state = optimizer.init(*shape.table_shape)
        others = {"optimizer": optimizer, "state": state}
        if not refuses_table(implementation, table, "fused_update", **others):
            check = functools.partial(packed_update, implementation, shape, table, options)
            found.append(("fused_update rowwise_adagrad", check))
    if shape.packed is None:
        for name in optimizers:
            rule = OPTIMIZERS[name]
            check = functools.partial(update, implementation, shape, table, rule, options)
            found.append((f"fused_update {name}", check))
    return found


def refuses_table(
    implementation: ModuleType, table: TableArray, primitive: str = "pooled_lookup", **others: Any
) -> bool:
    """Whether an implementation does not take a call with a table and other arguments."""
    refuse = getattr(implementation, "refuse", lambda *_: None)
    return refuse(primitive, {"table": table, **others}) is not None


def pooled(
    implementation: ModuleType, shape: Shape, table: TableArray, options: dict[str, bool]
) -> tuple[float, bool]:
    kernel = jax.jit(
        lambda table, *batch: implementation.pooled_lookup(
            table, *batch, shape.layout, jnp.float32, **options
        )
    )
    first, second = (np.asarray(kernel(table, *shape.batch_arrays())) for _ in range(2))
    _, row, bag, scale = bags_of(shape)
    each = floats_of(table)[row]
    terms = each * scale[:, None]
    expected, size = np.zeros(first.shape), np.zeros(first.shape)
    np.add.at(expected, bag, terms)
    np.add.at(size, bag, rounded_size(each, shape) * np.abs(scale)[:, None])
    return float(np.max(np.abs(first - expected) / (size + 1e-30))), bool((first == second).all())


def flat(implementation: ModuleType, shape: Shape, options: dict[str, bool]) -> tuple[float, bool]:
    """Check flat lookups: rows and bags are exact, so that an error of factors is all there is."""
    layout, num_rows = shape.layout, shape.table_shape[0]
    kernel = jax.jit(
        lambda *batch: implementation.flatten_bags(*batch, layout, num_rows, **options)
    )
    first, second = (jax.tree.map(np.asarray, kernel(*shape.batch_arrays())) for _ in range(2))
    position, row, bag, scale = bags_of(shape)
    rows = np.full(layout.num_positions, num_rows)
    rows[position] = row
    is_same = (first.rows == rows).all() and (first.bags[position] == bag).all()
    error = 0.0 if is_same else np.inf
    if first.scales is not None:
        error += float(np.max(np.abs(first.scales[position] / scale - 1)))
    return error, jax.tree.all(jax.tree.map(np.array_equal, first, second))


def rows(
    implementation: ModuleType, shape: Shape, table: TableArray, options: dict[str, bool]
) -> tuple[float, bool]:
    row = bags_of(shape)[1].astype(np.int32)
    kernel = jax.jit(functools.partial(implementation.row_lookup, **options))
    first, second = (np.asarray(kernel(table, jnp.asarray(row))) for _ in range(2))
    want = floats_of(table)[row]
    if shape.packed is None:
        return 0.0, bool((first == want).all())
    error = np.max(np.abs(first - want) / (rounded_size(want, shape) + 1e-30))
    return float(error), bool((first == second).all())


def floats_of(table: TableArray) -> np.ndarray:
    """Return the rows in float64; packed ones are unpacked on the host."""
    with jax.default_device(jax.devices("cpu")[0]):
        return np.asarray(jax.device_get(table)[:], np.float64)


def rounded_size(rows: np.ndarray, shape: Shape) -> np.ndarray:
    """Return the size of the terms that make up each element: of packed rows, that of the row."""
    sizes = np.abs(rows)
    return sizes if shape.packed is None else 2 * np.max(sizes, axis=1, keepdims=True)


def update(
    implementation: ModuleType,
    shape: Shape,
    table: jax.Array,
    optimizer: optim.RowOptimizer,
    options: dict[str, bool],
) -> tuple[float, bool]:
    state = {name: values + 1 for name, values in optimizer.init(*shape.table_shape).items()}
    gradients = jax.random.normal(jax.random.key(1), (shape.layout.num_bags, shape.dim))
    step = jnp.int32(3)

    @jax.jit
    def kernel(table: jax.Array, state: dict, gradients: jax.Array, *batch: Any) -> tuple:
        lookups = implementation.flatten_bags(*batch, shape.layout, table.shape[0], **options)
        return implementation.fused_update(
            table, state, lookups, gradients, optimizer, step, **options
        )

    first, second = (
        jax.tree.map(np.asarray, kernel(table, state, gradients, *shape.batch_arrays()))
        for _ in range(2)
    )
    repeats = jax.tree.all(jax.tree.map(np.array_equal, first, second))

    # A sum's error grows with the absolute values in it, a square's with their squares.
    _, row, bag, scale = bags_of(shape)
    used, run = np.unique(row, return_inverse=True)
    terms = np.asarray(gradients, np.float64)[bag] * scale[:, None]
    summed, size = np.zeros((used.size, shape.dim)), np.zeros((used.size, shape.dim))
    np.add.at(summed, run, terms)
    np.add.at(size, run, np.abs(terms))
    arrays = jax.tree.map(lambda array: np.asarray(array, np.float64), (table, state))
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        old = jax.tree.map(lambda array: jnp.asarray(array[used]), arrays)
        new_rows, new_state = optimizer.update(old[0], jnp.asarray(summed), old[1], step)
        expected = {"rows": np.asarray(new_rows)} | jax.tree.map(np.asarray, dict(new_state))

    errors = []
    for name, want in expected.items():
        got = (first[0] if name == "rows" else first[1][name]).astype(np.float64)
        spread = size if name in ("rows", "first_moment") else size**2
        spread = spread if want.ndim == 2 else spread.mean(axis=1)
        errors.append(np.max(np.abs(got[used] - want) / (1 + np.abs(want) + spread)))
        before = arrays[0] if name == "rows" else arrays[1][name]
        untouched = np.setdiff1d(np.arange(got.shape[0]), used)
        repeats &= np.array_equal(got[untouched], before[untouched])
    return float(max(errors)), bool(repeats)


def packed_update(
    implementation: ModuleType, shape: Shape, table: TableArray, options: dict[str, bool]
) -> tuple[float, bool]:
    """Check an update of packed rows against the reference's, relative to each row's largest."""
    optimizer, num_rows = OPTIMIZERS["rowwise_adagrad"], shape.table_shape[0]
    state = optimizer.init(*shape.table_shape)
    gradients = jax.random.normal(jax.random.key(1), (shape.layout.num_bags, shape.dim))

    def updated(module: ModuleType, options: dict[str, bool]) -> TableArray:
        @jax.jit
        def kernel(table: TableArray, state: dict, gradients: jax.Array, *batch: Any) -> TableArray:
            lookups = module.flatten_bags(*batch, shape.layout, num_rows, **options)
            return module.fused_update(
                table, state, lookups, gradients, optimizer, jnp.int32(3), **options
            )[0]

        return kernel(table, state, gradients, *shape.batch_arrays())

    first, second = (floats_of(updated(implementation, options)) for _ in range(2))
    expected = floats_of(updated(module("reference"), {}))
    sizes = np.max(np.abs(expected), axis=1, keepdims=True) + 1e-30
    used = np.unique(bags_of(shape)[1])
    untouched = np.setdiff1d(np.arange(num_rows), used)
    repeats = np.array_equal(first, second)
    repeats &= np.array_equal(first[untouched], floats_of(table)[untouched])
    return float(np.max(np.abs(first - expected) / sizes)), repeats


if __name__ == "__main__":
    main()
