"""The primitives on CPUs, by a library of C++ that is built with the package.

XLA calls the library's functions in the middle of a program (`jax.ffi`), on its own threads.
Layouts and optimizer settings are attributes of the call. Tables and optimizer state are operands
and results of an update in the same memory.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import math
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
from jaxtyping import Array, DTypeLike, Float, Int, Int32

from jaxrec.embed.formats import PackedRows, TableArray, is_packed
from jaxrec.embed.kernels import reference
from jaxrec.embed.kernels.base import BagLayout, Buckets, Lookups, Runs
from jaxrec.embed.kernels.cpu_packed import (
    TARGETS,
    packed_pooled_lookup,
    packed_row_lookup,
    refuse_packed,
)
from jaxrec.embed.kernels.dispatch import PRIMITIVES
from jaxrec.embed.kernels.native_call import (
    MAX_DIM,
    ROW_TYPES,
    join_rows,
    layout_numbers,
    native_function,
    optional_operand,
    part_shapes,
    split_rows,
    target_symbols,
)
from jaxrec.embed.kernels.pairs import check_vectors
from jaxrec.optim import adagrad, adam, partial_rowwise_adam, rowwise_adagrad, sgd
from jaxrec.optim.base import RowOptimizer
from jaxrec.optim.hyperparameter import Step, hyperparameter, resolve

_LIBRARY = pathlib.Path(__file__).parent / "native" / "libjaxrec.so"

# The order of enum Rule in native/kernels.h, and each rule's state in the order of enum's Step.
_RULES: dict[type[RowOptimizer], tuple[int, tuple[str, ...]]] = {
    sgd: (0, ()),
    adagrad: (1, ("accumulator",)),
    rowwise_adagrad: (2, ("accumulator",)),
    adam: (3, ("first_moment", "second_moment", "count")),
    partial_rowwise_adam: (4, ("first_moment", "second_moment")),
}
_DECAYS = {"none": 0, "l2": 1, "decoupled": 2}


def library_targets() -> dict[str, str]:
    """Return the targets that XLA calls in the library, and the symbol of each."""
    targets: dict[str, str] = {}
    for name in (*PRIMITIVES, *TARGETS):
        if name in globals():
            targets |= target_symbols(name)
    return targets


@functools.cache
def _load() -> ctypes.CDLL | str:
    """Load the native library and register its functions with XLA, or return why there is none."""
    if not _LIBRARY.exists():
        return (
            "the native library was not built, which needs a C++17 compiler: install jaxrec again, "
            "in a checkout by `pip install -e .`"
        )
    library = ctypes.CDLL(str(_LIBRARY))
    targets = library_targets()
    if lacking := [target for target, symbol in targets.items() if not hasattr(library, symbol)]:
        return (
            f"the native library lacks {', '.join(lacking)}, as it was built from another version "
            "of jaxrec: reinstall jaxrec"
        )
    library.jaxrec_instruction_set.restype = ctypes.c_char_p
    library.jaxrec_jaxlib.restype = ctypes.c_char_p
    oldest = library.jaxrec_jaxlib().decode()
    if _version(jaxlib.__version__) < _version(oldest):
        return (
            f"the native library was built for jaxlib {oldest} and newer, this is "
            f"{jaxlib.__version__}: reinstall jaxrec"
        )
    for target, symbol in targets.items():
        handler = jax.ffi.pycapsule(getattr(library, symbol))
        jax.ffi.register_ffi_target(target, handler, platform="cpu")
    return library


def _version(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def instruction_set() -> str | None:
    """Return the instruction set that the library uses, such as "avx2"; None without library."""
    library = _load()
    return None if isinstance(library, str) else library.jaxrec_instruction_set().decode()


def select_instruction_set(name: str) -> bool:
    """Make the library use a smaller instruction set, for tests; False if it lacks the set."""
    library = _load()
    return not isinstance(library, str) and bool(library.jaxrec_select(name.encode()))


def missing() -> str | None:
    """Return the reason why no native library works here; None: one does."""
    library = _load()
    return library if isinstance(library, str) else None


def refuse(primitive: str, arguments: Mapping[str, Any]) -> str | None:
    """Return the reason why the library does not take a call of a primitive; None: it does."""
    library = _load()
    if isinstance(library, str):
        return library
    vectors = arguments.get("vectors")
    if vectors is not None and vectors.dtype.name != "float32":
        return f"vectors are float32, not {vectors.dtype.name}"
    gradients = arguments.get("gradients")
    if gradients is not None:
        if gradients.dtype.name not in ROW_TYPES:
            return f"gradients are {', '.join(ROW_TYPES)}, not {gradients.dtype.name}"
        if gradients.shape[1] > MAX_DIM:
            return f"rows have at most {MAX_DIM} elements, not {gradients.shape[1]}"
    table = arguments.get("table")
    if table is None:
        return None
    if is_packed(table) and (reason := refuse_packed(primitive, arguments)) is not None:
        return reason
    if table.dtype.name not in ROW_TYPES:
        return f"rows are {', '.join(ROW_TYPES)}, not {table.dtype.name}"
    if table.shape[1] > MAX_DIM:
        return f"rows have at most {MAX_DIM} elements, not {table.shape[1]}"
    if 0 in table.shape:
        return "the table is empty"
    if primitive == "pooled_lookup" and jnp.dtype(arguments["dtype"]).name not in ROW_TYPES:
        return f"results are {', '.join(ROW_TYPES)}, not {jnp.dtype(arguments['dtype']).name}"
    return None


def new_rows(row: Array, num_rows: int) -> Array:
    """Return equal rows, in huge pages; see `jaxrec.embed.kernels.reference`."""
    shape = jax.ShapeDtypeStruct((num_rows, *row.shape), row.dtype)
    (rows,) = native_function("new_rows", [shape])(row)
    return rows


def pooled_lookup(
    table: Float[TableArray, "rows dim"],
    ids: Int32[Array, " ids"],
    lengths: Int32[Array, " all_bags"],
    weights: Float[Array, " ids"] | None,
    layout: BagLayout,
    dtype: DTypeLike,
    *,
    parts_in: int = 1,
    parts_out: int = 1,
) -> Float[Array, "bags dim"]:
    """Return the sum or mean of each bag's rows; see `jaxrec.embed.kernels.reference`."""
    if isinstance(table, PackedRows):
        return packed_pooled_lookup(table, ids, lengths, weights, layout, dtype)
    results = part_shapes((layout.num_bags, table.shape[1]), dtype, parts_out)
    pooled = native_function("pooled_lookup", results)(
        ids,
        lengths,
        optional_operand(weights, jnp.float32),
        *split_rows(table, parts_in),
        layout=layout_numbers(layout),
    )
    return join_rows(pooled)


def flatten_bags(
    ids: Int32[Array, " ids"],
    lengths: Int32[Array, " all_bags"],
    weights: Float[Array, " ids"] | None,
    layout: BagLayout,
    num_rows: int,
) -> Lookups:
    """Return a batch as flat lookups; see `jaxrec.embed.kernels.reference`."""
    positions = layout.num_positions
    has_scales = weights is not None or any(layout.means)
    results = [
        jax.ShapeDtypeStruct((positions,), jnp.int32),
        jax.ShapeDtypeStruct((positions,), jnp.int32),
        jax.ShapeDtypeStruct((positions if has_scales else 0,), jnp.float32),
    ]
    rows, bags, scales = native_function("flatten_bags", results)(
        ids,
        lengths,
        optional_operand(weights, jnp.float32),
        layout=layout_numbers(layout),
        num_rows=np.int64(num_rows),
    )
    return Lookups(rows, bags, scales if has_scales else None)


def row_lookup(
    table: Float[TableArray, "rows dim"],
    rows: Int32[Array, " n"],
    *,
    parts_in: int = 1,
    parts_out: int = 1,
) -> Float[Array, "n dim"]:
    """Return the rows; see `jaxrec.embed.kernels.reference`."""
    if isinstance(table, PackedRows):
        return packed_row_lookup(table, rows)
    results = part_shapes((rows.size, table.shape[1]), table.dtype, parts_out)
    return join_rows(native_function("row_lookup", results)(rows, *split_rows(table, parts_in)))


def build_runs(rows: Int32[Array, " n"], num_rows: int) -> Runs:
    """Sort lookups by row; see `jaxrec.embed.kernels.reference`."""
    results = [jax.ShapeDtypeStruct(rows.shape, jnp.int32)] * 4
    return Runs(*native_function("build_runs", results)(rows, num_rows=np.int64(num_rows)))


def bucket(owners: Int32[Array, " n"], num_owners: int) -> Buckets:
    """Group lookups by owner; see `jaxrec.embed.kernels.reference`."""
    results = [
        jax.ShapeDtypeStruct(owners.shape, jnp.int32),
        jax.ShapeDtypeStruct((num_owners,), jnp.int32),
    ]
    return Buckets(*native_function("bucket", results)(owners))


def shift_rows(
    rows: Int32[Array, " n"],
    starts: tuple[int, ...],
    shifts: tuple[int, ...],
    num_rows: int,
    outside: int,
) -> Int32[Array, " n"]:
    """Number rows anew; see `jaxrec.embed.kernels.reference`."""
    (shifted,) = native_function("shift_rows", [jax.ShapeDtypeStruct(rows.shape, jnp.int32)])(
        rows,
        starts=np.array(starts, np.int64),
        shifts=np.array(shifts, np.int64),
        num_rows=np.int64(num_rows),
        outside=np.int64(outside),
    )
    return shifted


def sum_rows(
    lookups: Lookups,
    gradients: Float[Array, "bags dim"],
    num_rows: int,
    bound: float | None = None,
    *,
    parts_out: int = 1,
) -> Float[Array, "num_rows dim"]:
    """Return the sum of each row's gradients; see `jaxrec.embed.kernels.reference`."""
    results = part_shapes((num_rows, gradients.shape[1]), jnp.float32, parts_out)
    sums = native_function("sum_rows", results)(
        lookups.rows,
        optional_operand(lookups.bags, jnp.int32),
        optional_operand(lookups.scales, jnp.float32),
        gradients,
        bound=np.float32(math.inf if bound is None else bound),
    )
    return join_rows(sums)


def fused_update(
    table: Float[TableArray, "rows dim"],
    state: dict[str, TableArray],
    lookups: Lookups,
    gradients: Float[Array, "bags dim"],
    optimizer: RowOptimizer,
    step: Step,
    table_starts: tuple[int, ...] = (0,),
    *,
    parts_in: int = 1,
) -> tuple[Float[TableArray, "rows dim"], dict[str, TableArray]]:
    """Update the rows that occur; see `jaxrec.embed.kernels.reference`.

    For packed rows, and for an optimizer that the library does not know, it sums the gradients and
    XLA does the rest.
    """
    if is_packed(table) or not is_fused(optimizer):
        runs = build_runs(lookups.rows, table.shape[0])
        at = dataclasses.replace(lookups, rows=runs.inverse)
        sums = sum_rows(at, gradients, runs.unique.size, optimizer.clip_value)
        return reference.update_unique(
            table, state, runs.unique, sums, optimizer, step, table_starts
        )
    optimizer, step = resolve(optimizer, step)
    rule, names = _RULES[type(optimizer)]
    names = tuple(name for name in names if name in state)
    arrays = [table, *(state[name] for name in names)]
    operands = [
        lookups.rows,
        optional_operand(lookups.bags, jnp.int32),
        optional_operand(lookups.scales, jnp.float32),
        _rates(optimizer, step),
        step.astype(jnp.int32),
        *split_rows(gradients, parts_in),
    ]
    results = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays]
    in_place = {len(operands) + i: i for i in range(len(arrays))}
    new_table, *new_state = native_function("fused_update", results, in_place)(
        *operands,
        *arrays,
        parts=np.int64(parts_in),
        rule=np.int32(rule),
        **_settings(optimizer),
    )
    return new_table, dict(zip(names, new_state, strict=True))


def pair_products(vectors: Float[Array, "batch n dim"]) -> Float[Array, "batch pairs"]:
    """Return the dot products of all pairs; see `jaxrec.embed.kernels.reference`."""
    batch, n, _ = check_vectors(vectors)
    form = jax.ShapeDtypeStruct((batch, n * (n - 1) // 2), vectors.dtype)
    (products,) = native_function("pair_products", [form], vmap_method="broadcast_all")(vectors)
    return products


def pair_gradients(
    vectors: Float[Array, "batch n dim"], gradient: Float[Array, "batch pairs"]
) -> Float[Array, "batch n dim"]:
    """Return the gradients of the vectors; see `jaxrec.embed.kernels.reference`."""
    check_vectors(vectors, gradient)
    form = jax.ShapeDtypeStruct(vectors.shape, vectors.dtype)
    call = native_function("pair_gradients", [form], vmap_method="broadcast_all")
    (gradients,) = call(vectors, gradient.astype(vectors.dtype))
    return gradients


def is_fused(optimizer: RowOptimizer) -> bool:
    """Return whether the library knows an optimizer with its settings."""
    settings = getattr(optimizer, "weight_decay", None)
    if isinstance(settings, hyperparameter) or optimizer.state_dtype != "float32":
        return False
    return type(optimizer) in _RULES and optimizer.clip_norm is None


def _rates(optimizer: RowOptimizer, step: Int[Array, ""]) -> Float[Array, " 3"]:
    """Return the numbers that change every step: the learning rate, and Adam's ``1 - b^t``."""
    count = step.astype(jnp.float32) + 1
    shares = [
        -jnp.expm1(count * math.log(decay)) if decay else jnp.ones((), jnp.float32)
        for decay in (getattr(optimizer, "b1", 0), getattr(optimizer, "b2", 0))
    ]
    return jnp.stack([optimizer.rate(step), *shares])


def _settings(optimizer: RowOptimizer) -> dict[str, Any]:
    """Return the fields of `Step` in native/kernels.h that an optimizer fixes."""

    def setting(name: str) -> float:
        return getattr(optimizer, name, 0.0)

    def bound(name: str) -> np.float32:
        value = getattr(optimizer, name)
        return np.float32(math.inf if value is None else value)

    b1, b2 = setting("b1"), setting("b2")
    return {
        "eps": np.float32(setting("eps")),
        "b1": np.float32(b1),
        "b2": np.float32(b2),
        "rest1": np.float32(1 - b1),
        "rest2": np.float32(1 - b2),
        "log_b1": np.float32(math.log(b1) if b1 else 0),
        "log_b2": np.float32(math.log(b2) if b2 else 0),
        "counts_rows": bool(setting("rowwise_bias_correction")),
        "weight_decay": np.float32(setting("weight_decay")),
        "decay": np.int32(_DECAYS[getattr(optimizer, "weight_decay_mode", "none")]),
        "max_norm": bound("max_norm"),
        "bound": bound("clip_value"),
        "stochastic": optimizer.stochastic_rounding,
    }
