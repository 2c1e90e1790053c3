"""FTRL-Proximal: follow the regularized leader, with L1 and L2 regularization."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array

from jaxrec.optim import checks
from jaxrec.optim.base import Count, RowOptimizer, Rows, RowState, Updated
from jaxrec.optim.norm import limit_norm, root


@dataclasses.dataclass(frozen=True, kw_only=True)
class ftrl(RowOptimizer):
    """FTRL-Proximal: one rate per element, and exact zeros in rows that rarely occur.

    Element by element, with ``p = -learning_rate_power``: ``n' = n + g^2``,
    ``s = (n'^p - n^p) / lr``, ``z' = z + g - s w``, and then ``w' = 0`` if ``|z'| <= l1``, else
    ``w' = -(z' - sign(z') l1) / ((beta + n'^p) / lr + l2)``: McMahan et al. 2013, "Ad click
    prediction: a view from the trenches", Algorithm 1 (which has ``p = 1/2``).

    The algorithm assumes weights that start at zero. With ``beta`` or
    ``initial_accumulator_value`` above 0, the first update of a row forgets most of its first
    value, and all of it where ``|z'| <= l1``. With both 0 and no regularization it equals
    `jaxrec.optim.adagrad` from any start. An element that never had a gradient would then divide by
    zero; it keeps its value. Keras has the defaults ``beta=0`` and
    ``initial_accumulator_value=0.1``. A step with a rate of zero, as some warmups begin with,
    changes nothing.

    State: ``accumulator`` (n) and ``linear`` (z), 8 dim bytes a row.

    Attributes:
        learning_rate_power: Exponent of the decay of the rate, 0 or less; -0.5 is Adagrad's.
        beta: Added to the root; a larger one makes the first steps smaller.
        l1: Strength of the L1 regularization.
        l2: Strength of the L2 regularization.
        initial_accumulator_value: First value of ``n``.

    Raises:
        ValueError: A hyperparameter outside its range.

    Example:
        >>> import jax.numpy as jnp
        >>> import jaxrec.optim
        >>> optimizer = jaxrec.optim.ftrl(learning_rate=0.5, l1=0.25)
        >>> rows, state = jnp.zeros((1, 2)), optimizer.init(1, 2)
        >>> rows, state = optimizer.update(rows, jnp.array([[1.0, -0.125]]), state, jnp.int32(0))
        >>> rows.tolist(), state["linear"].tolist()
        ([[-0.1875, 0.0]], [[1.0, -0.125]])
    """

    is_elementwise: ClassVar[bool] = True
    non_negative_state: ClassVar[tuple[str, ...]] = ("accumulator",)
    # Each update computes the whole row from `linear`, so its rounding would be the row's.
    exact_state: ClassVar[tuple[str, ...]] = ("linear",)

    learning_rate_power: float = -0.5
    beta: float = 1.0
    l1: float = 0.0
    l2: float = 0.0
    initial_accumulator_value: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.non_positive(self, "learning_rate_power")
        checks.non_negative(self, "beta", "l1", "l2", "initial_accumulator_value")

    def init(self, num_rows: int, dim: int) -> dict[str, Array]:
        start = self.initial_accumulator_value
        return {
            "accumulator": jnp.full((num_rows, dim), start, jnp.float32),
            "linear": jnp.zeros((num_rows, dim), jnp.float32),
        }

    def update(self, rows: Rows, gradients: Rows, state: RowState, step: Count) -> Updated:
        rate = self.rate(step)
        # The formulas divide by the rate. With a rate of zero rows and state stay, as rows do in
        # the other optimizers.
        trains = rate > 0
        safe_rate = jnp.where(trains, rate, 1)

        accumulator = state["accumulator"] + gradients * gradients
        power = self._power(accumulator)
        growth = self._growth(state["accumulator"], gradients, power)
        linear = state["linear"] + gradients - growth / safe_rate * rows

        curvature = (self.beta + power) / safe_rate + self.l2
        is_flat = curvature == 0
        new_rows = (jnp.sign(linear) * self.l1 - linear) / jnp.where(is_flat, 1, curvature)
        new_rows = jnp.where(jnp.abs(linear) <= self.l1, 0, new_rows)
        if self.l1 == 0:
            new_rows = jnp.where(is_flat, rows, new_rows)

        rows = jnp.where(trains, new_rows, rows)
        return limit_norm(rows, self.max_norm), {
            "accumulator": jnp.where(trains, accumulator, state["accumulator"]),
            "linear": jnp.where(trains, linear, state["linear"]),
        }

    def _power(self, accumulator: Rows) -> Rows:
        if self.learning_rate_power == -0.5:
            return root(accumulator)
        return accumulator**-self.learning_rate_power

    def _growth(self, accumulator: Rows, gradients: Rows, power: Rows) -> Rows:
        """Return ``n'^p - n^p``, given ``n``, the gradients and ``n'^p``."""
        # The two powers are almost equal late in training, and their plain difference would lose
        # its digits. For p = 1/2 it is g^2 / (sqrt(n') + sqrt(n)), else n'^p (1 - (n / n')^p), the
        # last factor by expm1 and log1p.
        squares = gradients * gradients
        if self.learning_rate_power == -0.5:
            sums = power + jnp.sqrt(accumulator)
            return squares / jnp.where(sums > 0, sums, 1)
        if self.learning_rate_power == 0:
            return jnp.zeros_like(power)
        started = accumulator > 0
        ratio = jnp.where(started, squares / jnp.where(started, accumulator, 1), jnp.inf)
        return -power * jnp.expm1(self.learning_rate_power * jnp.log1p(ratio))
