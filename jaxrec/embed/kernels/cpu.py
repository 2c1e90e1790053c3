"""The primitives on CPUs, by a C++ library that is built with the package.

XLA calls the library's functions within a compiled program (`jax.ffi`), on its own threads. An
update gets tables and optimizer state as operands and returns them in the same memory. The
functions below are described in `jaxrec.embed.kernels.reference`.
"""

# Why a library of our own: lookups and updates wait for memory, and XLA's gathers and scatters on
# CPUs, which do not request rows before their turn, were three times slower than FBGEMM's kernels.
# The library prefetches rows, uses the threads of XLA's pool, and has its loops for AVX2, AVX-512
# and any other machine; it takes the best that the processor has.

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
from jaxtyping import Array, DTypeLike, Float, Int32

from jaxrec.embed.formats import PackedRows, is_packed
from jaxrec.embed.kernels import updates
from jaxrec.embed.kernels.base import (
    BagLayout,
    BagRows,
    Buckets,
    DroppingFeature,
    Ids,
    KeptIds,
    Lengths,
    Lookups,
    RowIndices,
    Runs,
    State,
    Table,
    Weights,
)
from jaxrec.embed.kernels.native_call import (
    CODES,
    MAX_DIM,
    ROW_TYPES,
    RULES,
    is_fused,
    join_rows,
    layout_numbers,
    native_function,
    optional_operand,
    part_shapes,
    rates,
    settings,
    split_rows,
    target_symbols,
)
from jaxrec.embed.kernels.reference import check_vectors
from jaxrec.optim.base import RowOptimizer
from jaxrec.optim.hyperparameters import Step, resolve

_LIBRARY = pathlib.Path(__file__).parent / "native" / "libjaxrec.so"

# The functions of the library: one for each primitive below, and others for packed rows.
_FUNCTIONS = (
    "new_rows",
    "pooled_lookup",
    "flatten_bags",
    "row_lookup",
    "build_runs",
    "bucket",
    "shift_rows",
    "sum_rows",
    "fused_update",
    "pair_products",
    "pair_gradients",
    "attention",
    "attention_gradients",
    "packed_pooled_lookup",
    "packed_row_lookup",
    "max_lookup",
    "packed_max_lookup",
    "max_gradients",
    "drop_ids",
)


def library_targets() -> dict[str, str]:
    """Return the library's symbol for each target that XLA calls, by the target's name."""
    return {
        target: symbol for name in _FUNCTIONS for target, symbol in target_symbols(name).items()
    }


@functools.cache
def _load() -> ctypes.CDLL | str:
    """Load the native library and register its functions with XLA, or return why that fails."""
    # A reason instead of an exception: without the library jaxrec works by XLA, with a warning that
    # gives the reason. A library of another version must not be called: its operands may differ.
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
    # The headers of jaxlib that the library was built with fix the version of XLA's interface for
    # such calls. Newer versions of jaxlib accept it, older ones do not.
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
    """Return the instruction set that the library uses, such as "avx2"; None: no library."""
    library = _load()
    return None if isinstance(library, str) else library.jaxrec_instruction_set().decode()


def select_instruction_set(name: str) -> bool:
    """Make the library use another instruction set, for tests; return whether it has that set."""
    library = _load()
    return not isinstance(library, str) and bool(library.jaxrec_select(name.encode()))


def missing() -> str | None:
    """Return why the native library does not work here; None: it does."""
    library = _load()
    return library if isinstance(library, str) else None


def refuse(primitive: str, arguments: Mapping[str, Any]) -> str | None:
    """Return why the library does not take a call of a primitive; None: it does."""
    if (reason := missing()) is not None:
        return reason
    vectors = arguments.get("vectors")
    if vectors is not None and vectors.dtype.name != "float32":
        return f"vectors are float32, not {vectors.dtype.name}"
    query = arguments.get("query")
    if query is not None:
        if query.dtype.name != "float32":
            return f"queries are float32, not {query.dtype.name}"
        if max(query.shape[2], arguments["value"].shape[2]) > MAX_DIM:
            return f"vectors have at most {MAX_DIM} elements"
    gradients = arguments.get("gradients")
    if gradients is not None:
        if gradients.dtype.name not in ROW_TYPES:
            return f"gradients are {', '.join(ROW_TYPES)}, not {gradients.dtype.name}"
        if gradients.shape[1] > MAX_DIM:
            return f"rows have at most {MAX_DIM} elements, not {gradients.shape[1]}"
    table = arguments.get("table")
    if table is None:
        return None
    # Updates of packed rows never unpack in the library: see `fused_update`.
    if is_packed(table) and primitive != "fused_update" and table.row_format not in CODES:
        return f"it does not unpack {table.row_format.name}"
    if table.dtype.name not in ROW_TYPES:
        return f"rows are {', '.join(ROW_TYPES)}, not {table.dtype.name}"
    if table.shape[1] > MAX_DIM:
        return f"rows have at most {MAX_DIM} elements, not {table.shape[1]}"
    if 0 in table.shape:
        return "the table is empty"
    is_pooled = primitive in ("pooled_lookup", "max_lookup")
    if is_pooled and jnp.dtype(arguments["dtype"]).name not in ROW_TYPES:
        return f"results are {', '.join(ROW_TYPES)}, not {jnp.dtype(arguments['dtype']).name}"
    return None


def new_rows(row: Array, num_rows: int) -> Array:
    # In huge pages: with pages of 4 KiB, finding the page of a random row costs as much as the row.
    shape = jax.ShapeDtypeStruct((num_rows, *row.shape), row.dtype)
    (rows,) = native_function("new_rows", [shape])(row)
    return rows


def pooled_lookup(
    table: Table,
    ids: Ids,
    lengths: Lengths,
    weights: Weights,
    layout: BagLayout,
    dtype: DTypeLike,
    *,
    parts_in: int = 1,
    parts_out: int = 1,
) -> BagRows:
    bags = ids, lengths, optional_operand(weights, jnp.float32)
    numbers, shape = layout_numbers(layout), (layout.num_bags, table.shape[1])
    if isinstance(table, PackedRows):
        lookup = native_function("packed_pooled_lookup", part_shapes(shape, dtype, 1))
        code = np.int32(CODES[table.row_format])
        return join_rows(lookup(*bags, table.stored, layout=numbers, code=code))
    lookup = native_function("pooled_lookup", part_shapes(shape, dtype, parts_out))
    return join_rows(lookup(*bags, *split_rows(table, parts_in), layout=numbers))


def max_lookup(
    table: Table,
    ids: Ids,
    lengths: Lengths,
    layout: BagLayout,
    dtype: DTypeLike,
    has_winners: bool = True,
    *,
    parts_in: int = 1,
) -> tuple[BagRows, Int32[Array, "_bags dim"]]:
    num_bags, dim = layout.num_bags, table.shape[1]
    results = part_shapes((num_bags, dim), dtype, 1)
    results += part_shapes((num_bags if has_winners else 0, dim), jnp.int32, 1)
    numbers = layout_numbers(layout)
    if isinstance(table, PackedRows):
        lookup = native_function("packed_max_lookup", results)
        code = np.int32(CODES[table.row_format])
        values, winners = lookup(ids, lengths, table.stored, layout=numbers, code=code)
    else:
        lookup = native_function("max_lookup", results)
        values, winners = lookup(ids, lengths, *split_rows(table, parts_in), layout=numbers)
    return values, winners


def max_gradients(
    winners: Int32[Array, "bags dim"],
    gradients: BagRows,
    bags: Int32[Array, " lookups"],
) -> Float[Array, "lookups dim"]:
    results = part_shapes((bags.size, winners.shape[1]), jnp.float32, 1)
    operands = winners, gradients.astype(jnp.float32), bags
    (of_rows,) = native_function("max_gradients", results)(*operands)
    return of_rows


def drop_ids(ids: Ids, lengths: Lengths, features: tuple[DroppingFeature, ...]) -> KeptIds:
    numbers = np.array([dataclasses.astuple(each) for each in features], np.int64).reshape(-1)
    results = [jax.ShapeDtypeStruct(each.shape, jnp.int32) for each in (ids, lengths, ids)]
    return KeptIds(*native_function("drop_ids", results)(ids, lengths, features=numbers))


def flatten_bags(
    ids: Ids, lengths: Lengths, weights: Weights, layout: BagLayout, num_rows: int
) -> Lookups:
    positions = layout.num_positions
    # Without scales the result is an array of no elements; see `optional_operand`.
    has_scales = weights is not None or any(layout.means)
    results = [jax.ShapeDtypeStruct((positions,), jnp.int32)] * 2
    results += [jax.ShapeDtypeStruct((positions if has_scales else 0,), jnp.float32)]
    operands = ids, lengths, optional_operand(weights, jnp.float32)
    rows, bags, scales = native_function("flatten_bags", results)(
        *operands, layout=layout_numbers(layout), num_rows=np.int64(num_rows)
    )
    return Lookups(rows, bags, scales if has_scales else None)


def row_lookup(
    table: Table, rows: RowIndices, *, parts_in: int = 1, parts_out: int = 1
) -> Float[Array, "n dim"]:
    shape = rows.size, table.shape[1]
    if isinstance(table, PackedRows):
        lookup = native_function("packed_row_lookup", part_shapes(shape, table.dtype, 1))
        return join_rows(lookup(rows, table.stored, code=np.int32(CODES[table.row_format])))
    lookup = native_function("row_lookup", part_shapes(shape, table.dtype, parts_out))
    return join_rows(lookup(rows, *split_rows(table, parts_in)))


def build_runs(rows: RowIndices, num_rows: int) -> Runs:
    results = [jax.ShapeDtypeStruct(rows.shape, jnp.int32)] * 4
    return Runs(*native_function("build_runs", results)(rows, num_rows=np.int64(num_rows)))


def bucket(owners: Int32[Array, " n"], num_owners: int) -> Buckets:
    results = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in (owners.shape, (num_owners,))]
    return Buckets(*native_function("bucket", results)(owners))


def shift_rows(
    rows: RowIndices, starts: tuple[int, ...], shifts: tuple[int, ...], num_rows: int, outside: int
) -> RowIndices:
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
    gradients: BagRows,
    num_rows: int,
    bound: float | None = None,
    *,
    parts_out: int = 1,
) -> Float[Array, "num_rows dim"]:
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
    table: Table,
    state: State,
    lookups: Lookups,
    gradients: BagRows,
    optimizer: RowOptimizer,
    step: Step,
    table_starts: tuple[int, ...] = (0,),
    *,
    parts_in: int = 1,
) -> tuple[Table, State]:
    # For packed rows, and for optimizers without a kernel, the library sums the gradients, which is
    # most of the work, and XLA applies the optimizer to the rows that occur.
    if is_packed(table) or not is_fused(optimizer):
        runs = build_runs(lookups.rows, table.shape[0])
        at = dataclasses.replace(lookups, rows=runs.inverse)
        sums = sum_rows(at, gradients, runs.unique.size, optimizer.clip_value)
        return updates.update_unique(table, state, runs.unique, sums, optimizer, step, table_starts)
    optimizer, step = resolve(optimizer, step)
    rule, names = RULES[type(optimizer)]
    names = tuple(name for name in names if name in state)
    arrays = [table, *(state[name] for name in names)]
    # The kernel takes the state's arrays in the rule's order, and XLA aliases them by position.
    operands = [
        lookups.rows,
        optional_operand(lookups.bags, jnp.int32),
        optional_operand(lookups.scales, jnp.float32),
        rates(optimizer, step),
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
        **settings(optimizer),
    )
    return new_table, dict(zip(names, new_state, strict=True))


def pair_products(vectors: Float[Array, "batch n dim"]) -> Float[Array, "batch pairs"]:
    batch, n, _ = check_vectors(vectors)
    # "broadcast_all": the function takes leading batch dimensions, so `jax.vmap` calls it once.
    form = jax.ShapeDtypeStruct((batch, n * (n - 1) // 2), vectors.dtype)
    (products,) = native_function("pair_products", [form], vmap_method="broadcast_all")(vectors)
    return products


def pair_gradients(
    vectors: Float[Array, "batch n dim"], gradient: Float[Array, "batch pairs"]
) -> Float[Array, "batch n dim"]:
    check_vectors(vectors, gradient)
    form = jax.ShapeDtypeStruct(vectors.shape, vectors.dtype)
    call = native_function("pair_gradients", [form], vmap_method="broadcast_all")
    (gradients,) = call(vectors, gradient.astype(vectors.dtype))
    return gradients


def attention(
    query: Float[Array, "queries heads dim"],
    key: Float[Array, "keys heads dim"],
    value: Float[Array, "keys heads value_dim"],
    ranges: Int32[Array, "ends queries"],
    offsets: Int32[Array, "2 starts"],
    bias: Float[Array, "distances heads"],
    alpha: float,
    scale: float = 1.0,
) -> Float[Array, "queries heads value_dim"]:
    form = jax.ShapeDtypeStruct((*query.shape[:2], value.shape[2]), query.dtype)
    call = native_function("attention", [form])
    (out,) = call(query, key, value, ranges, offsets, bias, alpha=np.float32(alpha))
    return scale * out


def attention_gradients(
    query: Float[Array, "queries heads dim"],
    key: Float[Array, "keys heads dim"],
    value: Float[Array, "keys heads value_dim"],
    ranges: Int32[Array, "ends queries"],
    offsets: Int32[Array, "2 starts"],
    bias: Float[Array, "distances heads"],
    gradient: Float[Array, "queries heads value_dim"],
    alpha: float,
    scale: float = 1.0,
) -> tuple[Array, Array, Array, Array]:
    forms = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in (query, key, value, bias)]
    call = native_function("attention_gradients", forms)
    operands = (query, key, value, ranges, offsets, bias, scale * gradient)
    of_query, of_key, of_value, of_bias = call(*operands, alpha=np.float32(alpha))
    return of_query, of_key, of_value, of_bias
