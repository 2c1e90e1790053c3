"""Calls of the native library: its functions, operands and results as XLA passes them.

Layouts of batches and settings of optimizers are attributes of a call: numbers in the compiled
program. Numbers that change from step to step, such as the learning rate, are operands.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, DTypeLike, Float, Int

from jaxrec.embed.formats import RowFormat
from jaxrec.embed.formats.floats import Float8Rows, ScaledFloat8Rows
from jaxrec.embed.formats.integers import IntegerRows, TrainedInt8Rows
from jaxrec.embed.kernels.base import BagLayout
from jaxrec.optim import adagrad, adam, partial_rowwise_adam, rowwise_adagrad, sgd
from jaxrec.optim.base import RowOptimizer
from jaxrec.optim.hyperparameters import hyperparameter

# Types and widths of rows that the library takes; calls with others go to XLA.
ROW_TYPES = ("float32", "bfloat16", "float16")
MAX_DIM = 4096

# The order of enum Code in native/kernels.h.
CODES: dict[RowFormat, int] = {
    IntegerRows(bits=8): 0,
    IntegerRows(bits=4): 1,
    IntegerRows(bits=2): 2,
    Float8Rows(): 3,
    TrainedInt8Rows(): 4,
    ScaledFloat8Rows("float8_e4m3fn"): 5,
    ScaledFloat8Rows("float8_e5m2"): 6,
}

# The order of enum Rule in native/kernels.h, and each rule's state in the order of enum's Step.
RULES: dict[type[RowOptimizer], tuple[int, tuple[str, ...]]] = {
    sgd: (0, ()),
    adagrad: (1, ("accumulator",)),
    rowwise_adagrad: (2, ("accumulator",)),
    adam: (3, ("first_moment", "second_moment", "count")),
    partial_rowwise_adam: (4, ("first_moment", "second_moment")),
}
_DECAYS = {"none": 0, "l2": 1, "decoupled": 2}

# Versions of the targets that exported programs call. A program that an earlier jaxrec exported
# still makes its calls, so the library must serve every version up to this one. Whoever changes a
# target's operands, results or attributes, or their meaning, gives it the next version here and a
# handler of its own in the library.
EXPORTED_VERSIONS = {
    "pooled_lookup": 1,
    "flatten_bags": 1,
    "row_lookup": 1,
    "packed_pooled_lookup": 1,
    "packed_row_lookup": 1,
    "max_lookup": 1,
    "packed_max_lookup": 1,
    "drop_ids": 1,
    "attention": 1,
}


def target_name(primitive: str, version: int | None = None) -> str:
    """Return the name by which XLA calls a function of the library; None: the newest version."""
    if primitive not in EXPORTED_VERSIONS:
        return f"jaxrec_{primitive}"
    return f"jaxrec.{primitive}.v{version or EXPORTED_VERSIONS[primitive]}"


def target_symbols(primitive: str) -> dict[str, str]:
    """Return the library's symbol for each version of a primitive's target, by target."""
    symbol = f"jaxrec_{primitive}"
    newer = range(2, EXPORTED_VERSIONS.get(primitive, 1) + 1)
    return {target_name(primitive, 1): symbol} | {
        target_name(primitive, version): f"{symbol}_v{version}" for version in newer
    }


def exported_targets() -> tuple[str, ...]:
    """Return the targets that exported programs may call; later versions of jaxrec keep them."""
    return tuple(name for primitive in EXPORTED_VERSIONS for name in target_symbols(primitive))


def layout_numbers(layout: BagLayout) -> np.ndarray:
    """Return a layout as the library reads it: nine int64 numbers for each feature."""
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
    """Return the shapes of ``count`` equal parts of an array along its first axis."""
    return [jax.ShapeDtypeStruct((shape[0] // count, shape[1]), dtype)] * count


def split_rows(array: Array, count: int) -> list[Array]:
    """Split an array into ``count`` equal parts along the first axis, as operands of a call."""
    return [array] if count == 1 else jnp.split(array, count)


def join_rows(parts: Sequence[Array]) -> Array:
    """Join the results of a call, which are parts along the first axis."""
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)


def optional_operand(array: Array | None, dtype: DTypeLike) -> Array:
    """Return the array, or an array without elements for None: XLA has no missing operands."""
    return jnp.zeros(0, dtype) if array is None else array.astype(dtype)


def native_function(
    target: str,
    results: list[jax.ShapeDtypeStruct],
    in_place: dict[int, int] | None = None,
    vmap_method: str = "sequential",
) -> Callable[..., Sequence[Array]]:
    """Return a function of the library; ``in_place`` maps operands to results in their memory."""
    return jax.ffi.ffi_call(
        target_name(target), results, vmap_method=vmap_method, input_output_aliases=in_place
    )


def is_fused(optimizer: RowOptimizer) -> bool:
    """Return whether the library has a kernel for an optimizer with its settings."""
    # A hyperparameter can change from step to step, but the kernel has the decay as an attribute.
    # `clip_norm` needs the gradients of all rows before the first row can be updated.
    decay = getattr(optimizer, "weight_decay", None)
    if isinstance(decay, hyperparameter) or optimizer.state_dtype != "float32":
        return False
    return type(optimizer) in RULES and optimizer.clip_norm is None


def rates(optimizer: RowOptimizer, step: Int[Array, ""]) -> Float[Array, " 3"]:
    """Return the numbers that change every step: the learning rate, ``1 - b1^t``, ``1 - b2^t``."""
    count = step.astype(jnp.float32) + 1
    # By expm1: at the first steps, 1 - 0.999**t in float32 would lose most of its digits.
    shares = [
        -jnp.expm1(count * math.log(decay)) if decay else jnp.ones((), jnp.float32)
        for decay in (getattr(optimizer, "b1", 0), getattr(optimizer, "b2", 0))
    ]
    return jnp.stack([optimizer.rate(step), *shares])


def settings(optimizer: RowOptimizer) -> dict[str, Any]:
    """Return the fields of `Step` in native/kernels.h that follow from an optimizer alone."""

    def setting(name: str) -> float:
        return getattr(optimizer, name, 0.0)

    # No bound is a bound of infinity, which spares the kernel a branch.
    def bound(name: str) -> np.float32:
        value = getattr(optimizer, name)
        return np.float32(math.inf if value is None else value)

    # `1 - b` in double precision, like Python's: float32(0.999) subtracted from 1 has other digits.
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
