"""Adagrad and RMSprop, with a rate per element or per row."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal, TypeAlias, get_args

import jax.numpy as jnp
from jaxtyping import Array

from jaxrec.optim import checks
from jaxrec.optim.adam_and_lamb import moving_average
from jaxrec.optim.base import Count, RowOptimizer, Rows, RowState, Updated
from jaxrec.optim.hyperparameters import check_weight_decay, hyperparameter
from jaxrec.optim.norm import limit_norm, mean_squares, root

_WeightDecay: TypeAlias = Literal["none", "l2", "decoupled"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class adagrad(RowOptimizer):
    """Adagrad: ``v <- v + g^2``, ``w <- w - lr g / (sqrt(v) + eps)``, element by element.

    Duchi, Hazan and Singer 2011, "Adaptive subgradient methods for online learning and stochastic
    optimization", section 1.1 (the diagonal form), with ``eps`` outside the root as in FBGEMM's
    EXACT_ADAGRAD.

    State: ``accumulator``, 4 dim bytes a row.

    Attributes:
        eps: Added to the root; above 0.
        initial_accumulator_value: First value of ``v``.

    Raises:
        ValueError: A hyperparameter outside its range.

    Example:
        >>> import jax.numpy as jnp
        >>> import jaxrec.optim
        >>> optimizer = jaxrec.optim.adagrad(learning_rate=0.5)
        >>> rows, state = jnp.ones((1, 2)), optimizer.init(1, 2)
        >>> rows, state = optimizer.update(rows, jnp.array([[0.5, -1.0]]), state, jnp.int32(0))
        >>> rows.tolist(), state["accumulator"].tolist()
        ([[0.5, 1.5]], [[0.25, 1.0]])
    """

    is_elementwise: ClassVar[bool] = True
    non_negative_state: ClassVar[tuple[str, ...]] = ("accumulator",)

    eps: float = 1e-8
    initial_accumulator_value: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.positive(self, "eps")
        checks.non_negative(self, "initial_accumulator_value")

    def init(self, num_rows: int, dim: int) -> dict[str, Array]:
        start = self.initial_accumulator_value
        return {"accumulator": jnp.full((num_rows, dim), start, jnp.float32)}

    def update(self, rows: Rows, gradients: Rows, state: RowState, step: Count) -> Updated:
        accumulator = state["accumulator"] + gradients * gradients
        rows = rows - self.rate(step) * gradients / (root(accumulator) + self.eps)
        return limit_norm(rows, self.max_norm), {"accumulator": accumulator}


@dataclasses.dataclass(frozen=True, kw_only=True)
class rowwise_adagrad(RowOptimizer):
    """Adagrad with one rate per row: the usual choice for large tables.

    ``v <- v + mean(g^2)``, ``u = lr / (sqrt(v) + eps)``, ``w <- w - u g``. A row has one ``v`` and
    one ``u``, and the mean is over its elements. FBGEMM's EXACT_ROWWISE_ADAGRAD. Adagrad is by
    Duchi, Hazan and Singer 2011, section 1.1; its row-wise form is in Mudigere et al. 2022,
    "Software-hardware co-design for fast and scalable training of deep learning recommendation
    models".

    State: ``accumulator``, 4 bytes a row.

    Attributes:
        eps: Added to the root; above 0.
        weight_decay: Strength ``wd`` of the decay of rows that occur in the batch. Used according
            to ``weight_decay_mode``, and **not at all in the mode "none", the default** (FBGEMM's
            behaviour, kept so that settings carry over).
        weight_decay_mode: "none"; "l2": ``g + wd w`` takes the place of ``g`` in both formulas;
            "decoupled": ``w <- (1 - lr wd) w - u g``.
        initial_accumulator_value: First value of ``v``.

    Raises:
        ValueError: A hyperparameter outside its range, or an unknown mode.

    Example:
        >>> import jax.numpy as jnp
        >>> import jaxrec.optim
        >>> optimizer = jaxrec.optim.rowwise_adagrad(learning_rate=0.5)
        >>> rows, state = jnp.ones((1, 2)), optimizer.init(1, 2)
        >>> rows, state = optimizer.update(rows, jnp.array([[1.0, -1.0]]), state, jnp.int32(0))
        >>> rows.tolist(), state["accumulator"].tolist()
        ([[0.5, 1.5]], [1.0])
    """

    sums_rows: ClassVar[bool] = True

    eps: float = 1e-8
    weight_decay: float | hyperparameter = 0.0
    weight_decay_mode: _WeightDecay = "none"
    initial_accumulator_value: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.positive(self, "eps")
        check_weight_decay(self)
        checks.non_negative(self, "initial_accumulator_value")
        checks.one_of(self, "weight_decay_mode", get_args(_WeightDecay))

    def init(self, num_rows: int, dim: int) -> dict[str, Array]:
        return {"accumulator": jnp.full(num_rows, self.initial_accumulator_value, jnp.float32)}

    def update(self, rows: Rows, gradients: Rows, state: RowState, step: Count) -> Updated:
        rate = self.rate(step)
        if self.weight_decay_mode == "l2":
            gradients = gradients + self.weight_decay * rows
        accumulator = state["accumulator"] + mean_squares(gradients)
        if self.weight_decay_mode == "decoupled":
            rows = (1 - rate * self.weight_decay) * rows
        rows = rows - (rate / (root(accumulator) + self.eps))[:, None] * gradients
        return limit_norm(rows, self.max_norm), {"accumulator": accumulator}


@dataclasses.dataclass(frozen=True, kw_only=True)
class rmsprop(RowOptimizer):
    """RMSprop: ``v <- decay v + (1 - decay) g^2``, ``w <- w - lr g / (sqrt(v) + eps)``.

    Tieleman and Hinton 2012, "Lecture 6.5: rmsprop" (Neural networks for machine learning), with
    ``eps`` outside the root as in PyTorch (``eps_in_sqrt=False`` in optax). The average of a row
    advances only when the row occurs.

    State: ``second_moment``, 4 dim bytes a row.

    Attributes:
        decay: Decay of the average of squares, in [0, 1).
        eps: Added to the root; above 0.

    Raises:
        ValueError: A hyperparameter outside its range.

    Example:
        >>> import jax.numpy as jnp
        >>> import jaxrec.optim
        >>> optimizer = jaxrec.optim.rmsprop(learning_rate=0.5, decay=0.75)
        >>> rows, state = jnp.ones((1, 2)), optimizer.init(1, 2)
        >>> rows, state = optimizer.update(rows, jnp.array([[0.5, -1.0]]), state, jnp.int32(0))
        >>> rows.tolist(), state["second_moment"].tolist()
        ([[0.0, 2.0]], [[0.0625, 0.25]])
    """

    is_elementwise: ClassVar[bool] = True
    non_negative_state: ClassVar[tuple[str, ...]] = ("second_moment",)

    decay: float = 0.9
    eps: float = 1e-8

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.fraction(self, "decay")
        checks.positive(self, "eps")

    def init(self, num_rows: int, dim: int) -> dict[str, Array]:
        return {"second_moment": jnp.zeros((num_rows, dim), jnp.float32)}

    def update(self, rows: Rows, gradients: Rows, state: RowState, step: Count) -> Updated:
        second = moving_average(state["second_moment"], gradients * gradients, self.decay)
        rows = rows - self.rate(step) * gradients / (root(second) + self.eps)
        return limit_norm(rows, self.max_norm), {"second_moment": second}


@dataclasses.dataclass(frozen=True, kw_only=True)
class rowwise_rmsprop(RowOptimizer):
    """RMSprop with one rate per row, and optionally adaptive regularization of rare rows.

    ``v <- decay v + (1 - decay) mean(g^2)``, ``w <- s w - lr g / (sqrt(v) + eps)``, where the mean
    is over the row's elements. The shrinkage ``s`` is 1 unless ``ar_alpha`` is above 0. Then
    ``s = max(min_shrinkage, 1 - clip(lr ar_alpha gap, 0, 1))``, where ``gap`` is the number of
    updates of the table since the row's last one (1 at the first). So an update decays a row for
    all steps that it missed. FBGEMM's ROWWISE_RMSPROP_AR, whose ``ema_beta`` is ``decay`` here;
    RMSprop is by Tieleman and Hinton 2012, lecture 6.5.

    State: ``second_moment``, 4 bytes a row. With ``ar_alpha`` also ``last_step``, 4 bytes a row:
    the number of the table's update that last changed the row, from 1; 0: none did.

    Attributes:
        decay: Decay of the average of squares, in [0, 1).
        eps: Added to the root; above 0.
        ar_alpha: Strength of the adaptive regularization.
        min_shrinkage: Smallest shrinkage of a row in one update, in [0, 1].

    Raises:
        ValueError: A hyperparameter outside its range.

    Example:
        >>> import jax.numpy as jnp
        >>> import jaxrec.optim
        >>> optimizer = jaxrec.optim.rowwise_rmsprop(learning_rate=0.5, decay=0.75, ar_alpha=0.25)
        >>> rows, state = jnp.full((1, 2), 8.0), optimizer.init(1, 2)
        >>> rows, state = optimizer.update(rows, jnp.array([[1.0, -1.0]]), state, jnp.int32(0))
        >>> rows.tolist(), state["second_moment"].tolist(), state["last_step"].tolist()
        ([[6.0, 8.0]], [0.25], [1.0])
    """

    sums_rows: ClassVar[bool] = True

    decay: float = 0.9
    eps: float = 1e-8
    ar_alpha: float = 0.0
    min_shrinkage: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.fraction(self, "decay")
        checks.positive(self, "eps")
        checks.non_negative(self, "ar_alpha")
        checks.share(self, "min_shrinkage")

    def init(self, num_rows: int, dim: int) -> dict[str, Array]:
        state = {"second_moment": jnp.zeros(num_rows, jnp.float32)}
        if self.ar_alpha > 0:
            state["last_step"] = jnp.zeros(num_rows, jnp.float32)
        return state

    def update(self, rows: Rows, gradients: Rows, state: RowState, step: Count) -> Updated:
        rate = self.rate(step)
        squares = mean_squares(gradients)
        second = moving_average(state["second_moment"], squares, self.decay)
        new_state = {"second_moment": second}
        # A row is not decayed while it does not occur. This update catches up on the missed steps.
        if self.ar_alpha > 0:
            last = state["last_step"]
            now = jnp.full_like(last, step + 1)
            gap = jnp.where(last == 0, 1, now - last)
            shrinkage = 1 - jnp.clip(rate * self.ar_alpha * gap, 0, 1)
            rows = jnp.maximum(self.min_shrinkage, shrinkage)[:, None] * rows
            new_state["last_step"] = now
        rows = rows - (rate / (root(second) + self.eps))[:, None] * gradients
        return limit_norm(rows, self.max_norm), new_state
