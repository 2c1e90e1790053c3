"""Adam, with a second moment for every element or for every row."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrec.optim import checks
from jaxrec.optim.base import RowOptimizer, RowState
from jaxrec.optim.hyperparameters import check_weight_decay, hyperparameter
from jaxrec.optim.moments import adam_direction, moving_average
from jaxrec.optim.norm import limit_norm, mean_squares


@dataclasses.dataclass(frozen=True, kw_only=True)
class adam(RowOptimizer):
    """Adam with decoupled weight decay, on the rows that occur.

    ``m <- b1 m + (1 - b1) g``, ``v <- b2 v + (1 - b2) g^2``, ``m^ = m / (1 - b1^t)``,
    ``v^ = v / (1 - b2^t)``, ``w <- w - lr (m^ / (sqrt(v^) + eps) + wd w)``: Kingma and Ba 2015,
    "Adam: a method for stochastic optimization", Algorithm 1; the decay is that of Loshchilov and
    Hutter 2019, "Decoupled weight decay regularization", Algorithm 2, times the rate. FBGEMM's
    ADAM. A row that does not occur keeps its weights and moments; ``t`` counts all updates of the
    table, or the row's own with ``rowwise_bias_correction``.

    State: ``first_moment`` and ``second_moment``, 8 dim bytes a row; with
    ``rowwise_bias_correction`` also ``count``, 4 bytes a row.

    Attributes:
        b1: Decay of the first moment, in [0, 1).
        b2: Decay of the second moment, in [0, 1).
        eps: Added to the root; above 0.
        weight_decay: Strength ``wd`` of the decay of rows that occur.
        rowwise_bias_correction: Whether ``t`` is the number of the row's own updates, so that the
            first updates of rare rows are not too small.

    Raises:
        ValueError: A hyperparameter outside its range.

    Example:
        >>> import jax.numpy as jnp
        >>> import jaxrec.optim
        >>> optimizer = jaxrec.optim.adam(learning_rate=0.5)
        >>> rows, state = jnp.ones((1, 2)), optimizer.init(1, 2)
        >>> rows, state = optimizer.update(rows, jnp.array([[0.5, -1.0]]), state, jnp.int32(0))
        >>> rows.round(4).tolist(), sorted(state)
        ([[0.5, 1.5]], ['first_moment', 'second_moment'])
    """

    is_elementwise: ClassVar[bool] = True
    non_negative_state: ClassVar[tuple[str, ...]] = ("second_moment",)

    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    weight_decay: float | hyperparameter = 0.0
    rowwise_bias_correction: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.fraction(self, "b1", "b2")
        checks.positive(self, "eps")
        check_weight_decay(self)
        checks.boolean(self, "rowwise_bias_correction")

    def init(self, num_rows: int, dim: int) -> dict[str, Array]:
        state = {
            "first_moment": jnp.zeros((num_rows, dim), jnp.float32),
            "second_moment": jnp.zeros((num_rows, dim), jnp.float32),
        }
        if self.rowwise_bias_correction:
            state["count"] = jnp.zeros(num_rows, jnp.float32)
        return state

    def update(
        self,
        rows: Float[Array, "rows dim"],
        gradients: Float[Array, "rows dim"],
        state: RowState,
        step: Int[Array, ""],
    ) -> tuple[Float[Array, "rows dim"], dict[str, Array]]:
        first = moving_average(state["first_moment"], gradients, self.b1)
        second = moving_average(state["second_moment"], gradients * gradients, self.b2)
        new_state = {"first_moment": first, "second_moment": second}
        updates = step + 1
        if self.rowwise_bias_correction:
            new_state["count"] = state["count"] + 1
            updates = new_state["count"][:, None]
        direction = adam_direction(first, second, updates, b1=self.b1, b2=self.b2, eps=self.eps)
        rows = rows - self.rate(step) * (direction + self.weight_decay * rows)
        return limit_norm(rows, self.max_norm), new_state


@dataclasses.dataclass(frozen=True, kw_only=True)
class partial_rowwise_adam(RowOptimizer):
    """Adam with one second moment a row: ``v <- b2 v + (1 - b2) mean(g^2)``, the rest as `adam`.

    The mean is over the row's elements. FBGEMM's PARTIAL_ROWWISE_ADAM; the formulas are by
    Kingma and Ba 2015, Algorithm 1.

    State: ``first_moment``, 4 dim bytes a row, and ``second_moment``, 4 bytes a row.

    Attributes:
        b1: Decay of the first moment, in [0, 1).
        b2: Decay of the second moment, in [0, 1).
        eps: Added to the root; above 0.
        weight_decay: Strength of the decoupled decay of rows that occur.

    Raises:
        ValueError: A hyperparameter outside its range.

    Example:
        >>> import jax.numpy as jnp
        >>> import jaxrec.optim
        >>> optimizer = jaxrec.optim.partial_rowwise_adam(learning_rate=0.5)
        >>> rows, state = jnp.ones((1, 2)), optimizer.init(1, 2)
        >>> rows, state = optimizer.update(rows, jnp.array([[1.0, -1.0]]), state, jnp.int32(0))
        >>> rows.round(4).tolist(), state["second_moment"].shape
        ([[0.5, 1.5]], (1,))
    """

    sums_rows: ClassVar[bool] = True

    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    weight_decay: float | hyperparameter = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.fraction(self, "b1", "b2")
        checks.positive(self, "eps")
        check_weight_decay(self)

    def init(self, num_rows: int, dim: int) -> dict[str, Array]:
        return {
            "first_moment": jnp.zeros((num_rows, dim), jnp.float32),
            "second_moment": jnp.zeros(num_rows, jnp.float32),
        }

    def update(
        self,
        rows: Float[Array, "rows dim"],
        gradients: Float[Array, "rows dim"],
        state: RowState,
        step: Int[Array, ""],
    ) -> tuple[Float[Array, "rows dim"], dict[str, Array]]:
        squares = mean_squares(gradients)
        first = moving_average(state["first_moment"], gradients, self.b1)
        second = moving_average(state["second_moment"], squares, self.b2)
        direction = adam_direction(
            first, second[:, None], step + 1, b1=self.b1, b2=self.b2, eps=self.eps
        )
        rows = rows - self.rate(step) * (direction + self.weight_decay * rows)
        return limit_norm(rows, self.max_norm), {"first_moment": first, "second_moment": second}
