"""LAMB: Adam whose step is scaled to the length of the row."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrec.optim import checks
from jaxrec.optim.base import RowOptimizer, RowState
from jaxrec.optim.hyperparameters import check_weight_decay, hyperparameter
from jaxrec.optim.moments import adam_direction, moving_average
from jaxrec.optim.norm import limit_norm, mean_squares, row_norms, trust_ratio


@dataclasses.dataclass(frozen=True, kw_only=True)
class lamb(RowOptimizer):
    """LAMB with a trust ratio for each row.

    ``r = m^ / (sqrt(v^) + eps) + wd w`` with ``m^`` and ``v^`` as in `jaxrec.optim.adam`, then
    ``w <- w - lr (|w| / |r|) r``: You et al. 2020, "Large batch optimization for deep learning:
    training BERT in 76 minutes", Algorithm 2, with rows in the place of layers. FBGEMM's LAMB,
    with one difference: where ``|w|`` or ``|r|`` is zero the ratio is 1, as in the authors' own
    program, where FBGEMM gives NaN or never moves a row of zeros.

    State: ``first_moment`` and ``second_moment``, 8 dim bytes a row.

    Attributes:
        b1: Decay of the first moment, in [0, 1).
        b2: Decay of the second moment, in [0, 1).
        eps: Added to the root; above 0.
        weight_decay: Strength ``wd`` of the decay of rows that occur.

    Raises:
        ValueError: A hyperparameter outside its range.

    Example:
        >>> import jax.numpy as jnp
        >>> import jaxrec.optim
        >>> optimizer = jaxrec.optim.lamb(learning_rate=0.5)
        >>> rows, state = jnp.full((1, 2), 4.0), optimizer.init(1, 2)
        >>> rows, state = optimizer.update(rows, jnp.array([[0.5, -1.0]]), state, jnp.int32(0))
        >>> rows.round(4).tolist(), sorted(state)
        ([[2.0, 6.0]], ['first_moment', 'second_moment'])
    """

    sums_rows: ClassVar[bool] = True
    non_negative_state: ClassVar[tuple[str, ...]] = ("second_moment",)

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
            "second_moment": jnp.zeros((num_rows, dim), jnp.float32),
        }

    def update(
        self,
        rows: Float[Array, "rows dim"],
        gradients: Float[Array, "rows dim"],
        state: RowState,
        step: Int[Array, ""],
    ) -> tuple[Float[Array, "rows dim"], dict[str, Array]]:
        first = moving_average(state["first_moment"], gradients, self.b1)
        second = moving_average(state["second_moment"], gradients * gradients, self.b2)
        direction = adam_direction(first, second, step + 1, b1=self.b1, b2=self.b2, eps=self.eps)
        rows = _scaled_step(rows, direction + self.weight_decay * rows, self.rate(step))
        return limit_norm(rows, self.max_norm), {"first_moment": first, "second_moment": second}


@dataclasses.dataclass(frozen=True, kw_only=True)
class partial_rowwise_lamb(RowOptimizer):
    """LAMB with one second moment a row: ``v <- b2 v + (1 - b2) mean(g^2)``, the rest as `lamb`.

    The mean is over the row's elements. FBGEMM's PARTIAL_ROWWISE_LAMB, with the ratio 1 for norms
    of zero as in `lamb`; the formulas are by You et al. 2020, Algorithm 2.

    State: ``first_moment``, 4 dim bytes a row, and ``second_moment``, 4 bytes a row.

    Attributes:
        b1: Decay of the first moment, in [0, 1).
        b2: Decay of the second moment, in [0, 1).
        eps: Added to the root; above 0.
        weight_decay: Strength of the decay of rows that occur.

    Raises:
        ValueError: A hyperparameter outside its range.

    Example:
        >>> import jax.numpy as jnp
        >>> import jaxrec.optim
        >>> optimizer = jaxrec.optim.partial_rowwise_lamb(learning_rate=0.5)
        >>> rows, state = jnp.full((1, 2), 4.0), optimizer.init(1, 2)
        >>> rows, state = optimizer.update(rows, jnp.array([[1.0, -1.0]]), state, jnp.int32(0))
        >>> rows.round(4).tolist(), state["second_moment"].shape
        ([[2.0, 6.0]], (1,))
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
        rows = _scaled_step(rows, direction + self.weight_decay * rows, self.rate(step))
        return limit_norm(rows, self.max_norm), {"first_moment": first, "second_moment": second}


def _scaled_step(
    rows: Float[Array, "rows dim"], direction: Float[Array, "rows dim"], rate: Float[Array, ""]
) -> Float[Array, "rows dim"]:
    """Move each row against ``direction`` by ``rate`` times its own length."""
    return rows - rate * trust_ratio(row_norms(rows), row_norms(direction)) * direction
