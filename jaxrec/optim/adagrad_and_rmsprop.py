"""Adagrad, with a rate for every element or for every row."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrec.optim import checks
from jaxrec.optim.base import RowOptimizer, RowState
from jaxrec.optim.hyperparameters import check_weight_decay, hyperparameter
from jaxrec.optim.norm import limit_norm, mean_squares, root

_WEIGHT_DECAY_MODES = ("none", "l2", "decoupled")


@dataclasses.dataclass(frozen=True, kw_only=True)
class adagrad(RowOptimizer):
    """Adagrad: ``v <- v + g^2``, ``w <- w - lr g / (sqrt(v) + eps)``, element by element.

    Duchi, Hazan and Singer 2011, "Adaptive subgradient methods for online learning and stochastic
    optimization", section 1.1 (the diagonal form), with ``eps`` outside the root as in FBGEMM's
    EXACT_ADAGRAD.

    State: ``accumulator``, 4 dim bytes a row.

    Attributes:
        eps: Added to the root; above 0.
        initial_accumulator_value: Where ``v`` starts.

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

    def update(
        self,
        rows: Float[Array, "rows dim"],
        gradients: Float[Array, "rows dim"],
        state: RowState,
        step: Int[Array, ""],
    ) -> tuple[Float[Array, "rows dim"], dict[str, Array]]:
        accumulator = state["accumulator"] + gradients * gradients
        rows = rows - self.rate(step) * gradients / (root(accumulator) + self.eps)
        return limit_norm(rows, self.max_norm), {"accumulator": accumulator}


@dataclasses.dataclass(frozen=True, kw_only=True)
class rowwise_adagrad(RowOptimizer):
    """Adagrad with one rate a row: the usual choice for large tables.

    ``v <- v + mean(g^2)``, ``u = lr / (sqrt(v) + eps)``, ``w <- w - u g``, where ``v`` and ``u``
    are one number a row and the mean is over the row's elements. FBGEMM's EXACT_ROWWISE_ADAGRAD;
    Adagrad is that of Duchi, Hazan and Singer 2011, section 1.1; Mudigere et al. 2022,
    "Software-hardware co-design for fast and scalable training of deep learning recommendation
    models", train with its row-wise form.

    State: ``accumulator``, 4 bytes a row.

    Attributes:
        eps: Added to the root; above 0.
        weight_decay: Strength ``wd`` of the decay of rows that occur in the batch. Used according
            to ``weight_decay_mode``, and **not at all in the mode "none", the default** (FBGEMM's
            behaviour, kept so that settings carry over).
        weight_decay_mode: "none"; "l2": ``g + wd w`` takes the place of ``g`` in both formulas;
            "decoupled": ``w <- (1 - lr wd) w - u g``.
        initial_accumulator_value: Where ``v`` starts.

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
    weight_decay_mode: Literal["none", "l2", "decoupled"] = "none"
    initial_accumulator_value: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.positive(self, "eps")
        check_weight_decay(self)
        checks.non_negative(self, "initial_accumulator_value")
        checks.one_of(self, "weight_decay_mode", _WEIGHT_DECAY_MODES)

    def init(self, num_rows: int, dim: int) -> dict[str, Array]:
        return {"accumulator": jnp.full(num_rows, self.initial_accumulator_value, jnp.float32)}

    def update(
        self,
        rows: Float[Array, "rows dim"],
        gradients: Float[Array, "rows dim"],
        state: RowState,
        step: Int[Array, ""],
    ) -> tuple[Float[Array, "rows dim"], dict[str, Array]]:
        rate = self.rate(step)
        if self.weight_decay_mode == "l2":
            gradients = gradients + self.weight_decay * rows
        accumulator = state["accumulator"] + mean_squares(gradients)
        if self.weight_decay_mode == "decoupled":
            rows = (1 - rate * self.weight_decay) * rows
        rows = rows - (rate / (root(accumulator) + self.eps))[:, None] * gradients
        return limit_norm(rows, self.max_norm), {"accumulator": accumulator}
