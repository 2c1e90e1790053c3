"""Calls of the native library: its operands and results as XLA passes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, DTypeLike

from jaxrec.embed.kernels.base import BagLayout

ROW_TYPES = ("float32", "bfloat16", "float16")
MAX_DIM = 4096

# Versions of the targets that exported programs call. A program that was exported with an earlier
# jaxrec keeps its calls, so that the library must serve every version up to this one: a change of a
# target's operands, results or attributes, or of their meaning, gets the next version and a handler
# of its own.
EXPORTED_VERSIONS = {
    "pooled_lookup": 1,
    "flatten_bags": 1,
    "row_lookup": 1,
    "packed_pooled_lookup": 1,
    "packed_row_lookup": 1,
}


def target_name(primitive: str, version: int | None = None) -> str:
    """Return the name by which XLA calls a function of the library.

    Args:
        primitive: Name of the primitive.
        version: One of the versions of a target that exported programs call; None: the newest.
    """
    if primitive not in EXPORTED_VERSIONS:
        return f"jaxrec_{primitive}"
    return f"jaxrec.{primitive}.v{version or EXPORTED_VERSIONS[primitive]}"


def target_symbols(primitive: str) -> dict[str, str]:
    """Return the names of a primitive's targets, all versions, and the library's symbol of each."""
    symbol = f"jaxrec_{primitive}"
    newer = range(2, EXPORTED_VERSIONS.get(primitive, 1) + 1)
    return {target_name(primitive, 1): symbol} | {
        target_name(primitive, version): f"{symbol}_v{version}" for version in newer
    }


def exported_targets() -> tuple[str, ...]:
    """Return the targets that exported programs may call: this and later versions serve them."""
    return tuple(name for primitive in EXPORTED_VERSIONS for name in target_symbols(primitive))


def layout_numbers(layout: BagLayout) -> np.ndarray:
    """Return the layout as the library reads it: nine numbers per feature."""
    out_rows = [layout.bag_rows(feature) for feature in range(layout.num_features)]
    fields = (
        layout.id_starts,
        layout.capacities,
        layout.length_starts,
        layout.strides,
        layout.row_offsets,
        layout.row_counts,
        layout.means,
        [rows.start for rows in out_rows],
        [rows.step or 1 for rows in out_rows],
    )
    return np.array(fields, np.int64).T.reshape(-1)


def part_shapes(shape: tuple[int, int], dtype: DTypeLike, count: int) -> list[jax.ShapeDtypeStruct]:
    """Return the shapes of equal parts of an array along its first axis."""
    return [jax.ShapeDtypeStruct((shape[0] // count, shape[1]), dtype)] * count


def split_rows(array: Array, count: int) -> list[Array]:
    return [array] if count == 1 else jnp.split(array, count)


def join_rows(parts: Sequence[Array]) -> Array:
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)


def optional_operand(array: Array | None, dtype: DTypeLike) -> Array:
    """Return an operand that may be missing: an array without elements then."""
    return jnp.zeros(0, dtype) if array is None else array.astype(dtype)


def native_function(
    target: str,
    results: list[jax.ShapeDtypeStruct],
    in_place: dict[int, int] | None = None,
    vmap_method: str = "sequential",
) -> Callable[..., Sequence[Array]]:
    """Return a function of the library.

    Args:
        target: Name of the primitive.
        results: Shapes and types of the results.
        in_place: The operands whose memory results take, and which result each.
        vmap_method: As of `jax.ffi.ffi_call`: "broadcast_all" for functions that take further
            dimensions before those of their operands.
    """
    return jax.ffi.ffi_call(
        target_name(target), results, vmap_method=vmap_method, input_output_aliases=in_place
    )
