"""Adam and LAMB, with a second moment for every element or for every row."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrec.optim import checks
from jaxrec.optim.base import Count, RowOptimizer, Rows, RowState, Updated
from jaxrec.optim.hyperparameters import check_weight_decay, hyperparameter
from jaxrec.optim.norm import limit_norm, mean_squares, root, row_norms, trust_ratio


@dataclasses.dataclass(frozen=True, kw_only=True)
class _MomentOptimizer(RowOptimizer):
    """Base of Adam and LAMB: a step by the row's moments, which LAMB scales to the row's norm."""

    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    weight_decay: float | hyperparameter = 0.0

    # Whether a row has one second moment, of its mean squared gradient. This halves the state of a
    # wide table.
    _is_partial: ClassVar[bool] = False

    # Whether the norm of a step is the rate times the norm of its row: LAMB's trust ratio.
    _follows_length: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.fraction(self, "b1", "b2")
        checks.positive(self, "eps")
        check_weight_decay(self)

    def init(self, num_rows: int, dim: int) -> dict[str, Array]:
        second = (num_rows,) if self._is_partial else (num_rows, dim)
        return {
            "first_moment": jnp.zeros((num_rows, dim), jnp.float32),
            "second_moment": jnp.zeros(second, jnp.float32),
        }

    def update(self, rows: Rows, gradients: Rows, state: RowState, step: Count) -> Updated:
        squares = mean_squares(gradients) if self._is_partial else gradients * gradients
        first = moving_average(state["first_moment"], gradients, self.b1)
        second = moving_average(state["second_moment"], squares, self.b2)
        new_state = {"first_moment": first, "second_moment": second}
        updates, counts = self._updates(state, step)
        direction = adam_direction(
            first,
            second[:, None] if self._is_partial else second,
            updates,
            b1=self.b1,
            b2=self.b2,
            eps=self.eps,
        )
        rate, direction = self.rate(step), direction + self.weight_decay * rows
        if self._follows_length:
            rate = rate * trust_ratio(row_norms(rows), row_norms(direction))
        return limit_norm(rows - rate * direction, self.max_norm), new_state | counts

    def _updates(self, state: RowState, step: Count) -> tuple[Any, dict[str, Array]]:
        """Return the number of updates, this one included, and the new state that counts them."""
        return step + 1, {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class adam(_MomentOptimizer):
    """Adam with decoupled weight decay, on the rows that occur.

    ``m <- b1 m + (1 - b1) g``, ``v <- b2 v + (1 - b2) g^2``, ``m^ = m / (1 - b1^t)``,
    ``v^ = v / (1 - b2^t)``, ``w <- w - lr (m^ / (sqrt(v^) + eps) + wd w)``: Kingma and Ba 2015,
    "Adam: a method for stochastic optimization", Algorithm 1. The decay is that of Loshchilov and
    Hutter 2019, "Decoupled weight decay regularization", Algorithm 2, times the rate. FBGEMM's
    ADAM. A row that does not occur keeps its weights and moments. ``t`` counts all updates of the
    table, or with ``rowwise_bias_correction`` those of the row.

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

    rowwise_bias_correction: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.boolean(self, "rowwise_bias_correction")

    def init(self, num_rows: int, dim: int) -> dict[str, Array]:
        state = super().init(num_rows, dim)
        if self.rowwise_bias_correction:
            state["count"] = jnp.zeros(num_rows, jnp.float32)
        return state

    def _updates(self, state: RowState, step: Count) -> tuple[Any, dict[str, Array]]:
        if not self.rowwise_bias_correction:
            return super()._updates(state, step)
        # A row first seen at step 1000 has moments of one gradient. Corrected as if they were of
        # 1000, they would stay close to zero.
        count = state["count"] + 1
        return count[:, None], {"count": count}


@dataclasses.dataclass(frozen=True, kw_only=True)
class partial_rowwise_adam(_MomentOptimizer):
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
    _is_partial: ClassVar[bool] = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class lamb(_MomentOptimizer):
    """LAMB with a trust ratio for each row.

    ``r = m^ / (sqrt(v^) + eps) + wd w`` with ``m^`` and ``v^`` as in `jaxrec.optim.adam`, then
    ``w <- w - lr (|w| / |r|) r``: You et al. 2020, "Large batch optimization for deep learning:
    training BERT in 76 minutes", Algorithm 2, with rows in the place of layers. FBGEMM's LAMB,
    with one difference: if ``|w|`` or ``|r|`` is zero the ratio is 1, as in the authors' own
    program. FBGEMM then gives NaN, or never moves a row of zeros.

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
    _follows_length: ClassVar[bool] = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class partial_rowwise_lamb(_MomentOptimizer):
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
    _is_partial: ClassVar[bool] = True
    _follows_length: ClassVar[bool] = True


def moving_average(
    average: Float[Array, "*shape"], value: Float[Array, "*shape"], decay: float
) -> Float[Array, "*shape"]:
    """Return ``decay average + (1 - decay) value``."""
    return decay * average + (1 - decay) * value


def adam_direction(
    first_moment: Float[Array, "rows dim"],
    second_moment: Float[Array, "rows dim"] | Float[Array, "rows 1"],
    count: Float[Array, "rows 1"] | Int[Array, ""] | int,
    *,
    b1: float,
    b2: float,
    eps: float,
) -> Float[Array, "rows dim"]:
    """Return ``m^ / (sqrt(v^) + eps)`` from moments after ``count`` updates (Kingma, Ba 2015)."""
    first = first_moment / _unbiased_share(b1, count)
    second = second_moment / _unbiased_share(b2, count)
    return first / (root(second) + eps)


def _unbiased_share(decay: float, count: Array | int) -> Float[Array, "*shape"]:
    """Return ``1 - decay^count``, the total weight of ``count`` values in a moving average."""
    # By expm1: with a decay near 1 the plain difference loses most of float32's digits.
    if decay == 0:
        return jnp.ones((), jnp.float32)
    return -jnp.expm1(jnp.asarray(count, jnp.float32) * math.log(decay))
