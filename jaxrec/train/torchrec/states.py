"""Names of optimizer state: those of TorchRec and PyTorch, of row optimizers and of optax."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from flax import nnx

from jaxrec.train.torchrec.layers import DenseArray

# For each state of a row optimizer, its names in TorchRec: as sharded modules write it now, as they
# wrote it, as `FusedEmbeddingBagCollection` has it, and as torchrec.optim's optimizers have it.
_FIRST = ("momentum1", "momentum_1")
TABLE_STATES: dict[str, tuple[str, ...]] = {
    "accumulator": (*_FIRST, "sum"),
    "first_moment": (*_FIRST, "exp_avg"),
    "second_moment": ("exp_avg_sq", "momentum2", "momentum_2"),
    "momentum": (*_FIRST, "momentum_buffer"),
    "count": ("row_counter",),
    "last_step": ("prev_iter",),
}

# For each state of optax, its names in PyTorch.
DENSE_STATES: dict[str, tuple[str, ...]] = {
    "mu": ("exp_avg",),
    "nu": ("exp_avg_sq", "square_avg"),
    "trace": ("momentum_buffer",),
    "sum_of_squares": ("sum",),
}


def table_state_names(kept: list[str], state: str) -> tuple[str, ...]:
    """Return TorchRec's names of a state of a row optimizer, the one to write first.

    Args:
        kept: Names of all state that the optimizer keeps.
        state: One of them.
    """
    if state == "second_moment" and "first_moment" not in kept:
        return _FIRST  # row-wise RMSprop has one state
    return TABLE_STATES.get(state, ())


def dense_states(
    optimizer: nnx.Optimizer, arrays: list[DenseArray]
) -> Iterator[tuple[DenseArray, nnx.Variable, tuple[str, ...]]]:
    """Yield optax's state of some dense arrays, with PyTorch's names, the one to write first."""
    by_path = {array.path: array for array in arrays}
    for path, variable in nnx.to_flat_state(nnx.state(optimizer)):
        for position, part in enumerate(path):
            array = by_path.get(path[position + 1 :])
            if array is not None and part in DENSE_STATES:
                yield array, variable, DENSE_STATES[part]


def counters(optimizer: nnx.Optimizer) -> list[nnx.Variable]:
    """Return the numbers of updates that an optimizer and its optax state count."""
    found: list[Any] = [optimizer.step]
    for path, variable in nnx.to_flat_state(nnx.state(optimizer)):
        if path[0] == "opt_state" and path[-1] == "count":
            found.append(variable)
    return found
