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
    target: str, results: list[jax.ShapeDtypeStruct], in_place: dict[int, int] | None = None
) -> Callable[..., Sequence[Array]]:
    """Return a function of the library; ``in_place`` maps operands to results in their memory."""
    return jax.ffi.ffi_call(
        f"jaxrec_{target}", results, vmap_method="sequential", input_output_aliases=in_place
    )
