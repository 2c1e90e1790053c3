"""The row optimizers that kernels fuse, written for rows padded to a power of two columns.

Kernels on GPUs hold rows in blocks of a power of two columns, zeros past the row's width, so a mean
over a row must be told that width; otherwise these are the formulas of `jaxrec.optim`, to which the
tests hold them. What is the same for all rows of a step is computed once, outside the kernel.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrec.optim import adagrad, adam, partial_rowwise_adam, rowwise_adagrad, sgd
from jaxrec.optim.base import RowOptimizer
from jaxrec.optim.hyperparameter import hyperparameter
from jaxrec.optim.norm import limit_norm

State: TypeAlias = Mapping[str, Array]


@dataclasses.dataclass(frozen=True)
class Step:
    """One step of a row optimizer, the same for all rows.

    Attributes:
        optimizer: The optimizer.
        dim: Width of the rows; columns past it are zeros.
        factors: What `step_factors` gave, as scalars.
    """

    optimizer: Any  # one of `_RULES`' types
    dim: int
    factors: tuple[Float[Array, ""], ...]

    def row_means(self, values: Float[Array, "rows padded"]) -> Float[Array, " rows"]:
        return jnp.sum(values, axis=1) / self.dim


def refuse(optimizer: RowOptimizer) -> str | None:
    """Why `apply` does not know the optimizer with its settings; None: it does."""
    if type(optimizer) not in _RULES:
        names = ", ".join(known.__name__ for known in _RULES)
        return f"it fuses {names}, not {type(optimizer).__name__}"
    if optimizer.clip_norm is not None:
        return "it does not clip by the norm of a whole table's gradient (clip_norm)"
    if getattr(optimizer, "rowwise_bias_correction", False):
        return "it does not count the updates of each row (rowwise_bias_correction)"
    if isinstance(getattr(optimizer, "weight_decay", None), hyperparameter):
        return "its weight_decay is fixed when it is compiled, and no hyperparameter"
    return None


def step_factors(optimizer: RowOptimizer, step: Int[Array, ""]) -> Float[Array, " factors"]:
    """The numbers of a step that all rows share: the learning rate, and Adam's bias corrections."""
    factors = [optimizer.rate(step)]
    if isinstance(optimizer, adam | partial_rowwise_adam):
        count = step.astype(jnp.float32) + 1
        for decay in (optimizer.b1, optimizer.b2):
            log = math.log(decay) if decay else -math.inf
            factors.append(-1 / jnp.expm1(count * log))
    return jnp.stack(factors)


def apply(
    step: Step,
    rows: Float[Array, "rows padded"],
    gradients: Float[Array, "rows padded"],
    state: State,
) -> tuple[Float[Array, "rows padded"], State]:
    """`RowOptimizer.update` on padded rows, all arrays float32."""
    rows, state = _RULES[type(step.optimizer)](step, rows, gradients, state)
    return limit_norm(rows, step.optimizer.max_norm), state


def _sgd(step: Step, rows: Array, gradients: Array, state: State) -> tuple[Array, State]:
    (rate,) = step.factors
    return rows - rate * gradients, {}


def _adagrad(step: Step, rows: Array, gradients: Array, state: State) -> tuple[Array, State]:
    (rate,) = step.factors
    accumulator = state["accumulator"] + gradients * gradients
    rows = rows - rate * gradients / (jnp.sqrt(accumulator) + step.optimizer.eps)
    return rows, {"accumulator": accumulator}


def _rowwise_adagrad(
    step: Step, rows: Array, gradients: Array, state: State
) -> tuple[Array, State]:
    (rate,) = step.factors
    optimizer = step.optimizer
    if optimizer.weight_decay_mode == "l2":
        gradients = gradients + optimizer.weight_decay * rows
    accumulator = state["accumulator"] + step.row_means(gradients * gradients)
    if optimizer.weight_decay_mode == "decoupled":
        rows = (1 - rate * optimizer.weight_decay) * rows
    rates = rate / (jnp.sqrt(accumulator) + optimizer.eps)
    return rows - rates[:, None] * gradients, {"accumulator": accumulator}


def _adam(step: Step, rows: Array, gradients: Array, state: State) -> tuple[Array, State]:
    squares = gradients * gradients
    second = _average(state["second_moment"], squares, step.optimizer.b2)
    return _adam_rows(step, rows, gradients, state, second, second)


def _partial_rowwise_adam(
    step: Step, rows: Array, gradients: Array, state: State
) -> tuple[Array, State]:
    squares = step.row_means(gradients * gradients)
    second = _average(state["second_moment"], squares, step.optimizer.b2)
    return _adam_rows(step, rows, gradients, state, second, second[:, None])


def _adam_rows(
    step: Step, rows: Array, gradients: Array, state: State, second: Array, squares: Array
) -> tuple[Array, State]:
    """The new rows and state, given the new second moment and the same as a column or a matrix."""
    rate, first_factor, second_factor = step.factors
    optimizer = step.optimizer
    first = _average(state["first_moment"], gradients, optimizer.b1)
    direction = first * first_factor / (jnp.sqrt(squares * second_factor) + optimizer.eps)
    rows = rows - rate * (direction + optimizer.weight_decay * rows)
    return rows, {"first_moment": first, "second_moment": second}


def _average(average: Array, value: Array, decay: float) -> Array:
    return decay * average + (1 - decay) * value


_RULES: dict[type, Callable[[Step, Array, Array, State], tuple[Array, State]]] = {
    sgd: _sgd,
    adagrad: _adagrad,
    rowwise_adagrad: _rowwise_adagrad,
    adam: _adam,
    partial_rowwise_adam: _partial_rowwise_adam,
}
