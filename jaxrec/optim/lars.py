"""LARS: momentum whose step is scaled to the length of the row."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrec.optim import checks
from jaxrec.optim.base import RowOptimizer, RowState
from jaxrec.optim.hyperparameters import check_weight_decay, hyperparameter
from jaxrec.optim.norm import limit_norm, row_norms, trust_ratio


@dataclasses.dataclass(frozen=True, kw_only=True)
class lars_sgd(RowOptimizer):
    """Gradient descent with momentum and layer-wise adaptive rates, with rows as the layers.

    ``a = lr eta |w| / (|g| + wd |w|)``, ``m <- momentum m + a (g + wd w)``, ``w <- w - m``: You,
    Gitman and Ginsburg 2017, "Large batch training of convolutional networks", Algorithm 1.
    FBGEMM's LARS_SGD, with one difference: where a norm is zero ``a`` is ``lr``, as in optax and in
    the LAMB paper's programs, where FBGEMM gives NaN or never moves a row of zeros.

    State: ``momentum``, 4 dim bytes a row.

    Attributes:
        momentum: Decay of the sum of past steps, in [0, 1).
        eta: The trust coefficient.
        weight_decay: Strength ``wd`` of the decay of rows that occur.

    Raises:
        ValueError: A hyperparameter outside its range.

    Example:
        >>> import jax.numpy as jnp
        >>> import jaxrec.optim
        >>> optimizer = jaxrec.optim.lars_sgd(learning_rate=1.0, eta=0.5)
        >>> rows, state = jnp.array([[3.0, 4.0]]), optimizer.init(1, 2)
        >>> rows, state = optimizer.update(rows, jnp.array([[0.0, 2.0]]), state, jnp.int32(0))
        >>> rows.tolist(), state["momentum"].tolist()
        ([[3.0, 1.5]], [[0.0, 2.5]])
    """

    sums_rows: ClassVar[bool] = True

    momentum: float = 0.9
    eta: float = 0.001
    weight_decay: float | hyperparameter = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.fraction(self, "momentum")
        checks.positive(self, "eta")
        check_weight_decay(self)

    def init(self, num_rows: int, dim: int) -> dict[str, Array]:
        return {"momentum": jnp.zeros((num_rows, dim), jnp.float32)}

    def update(
        self,
        rows: Float[Array, "rows dim"],
        gradients: Float[Array, "rows dim"],
        state: RowState,
        step: Int[Array, ""],
    ) -> tuple[Float[Array, "rows dim"], dict[str, Array]]:
        norms = row_norms(rows)
        decayed = row_norms(gradients) + self.weight_decay * norms
        rate = self.rate(step) * trust_ratio(self.eta * norms, decayed)
        momentum = self.momentum * state["momentum"] + rate * (gradients + self.weight_decay * rows)
        return limit_norm(rows - momentum, self.max_norm), {"momentum": momentum}
