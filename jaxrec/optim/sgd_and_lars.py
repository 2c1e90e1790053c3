"""Stochastic gradient descent: plain, with momentum, and with layer-wise adaptive rates."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array

from jaxrec.optim import checks
from jaxrec.optim.base import Count, RowOptimizer, Rows, RowState, Updated
from jaxrec.optim.hyperparameters import check_weight_decay, hyperparameter
from jaxrec.optim.norm import limit_norm, row_norms, trust_ratio


@dataclasses.dataclass(frozen=True)
class sgd(RowOptimizer):
    """Stochastic gradient descent: ``w <- w - lr g``. FBGEMM's EXACT_SGD.

    As in all row optimizers, ``g`` is the gradient of a row summed over its occurrences in the
    batch, so a row gets one update per step.

    State: none.

    Example:
        >>> import jax.numpy as jnp
        >>> import jaxrec.optim
        >>> optimizer = jaxrec.optim.sgd(learning_rate=0.5)
        >>> rows, state = jnp.ones((1, 2)), optimizer.init(1, 2)
        >>> rows, state = optimizer.update(rows, jnp.array([[0.5, -1.0]]), state, jnp.int32(0))
        >>> rows.tolist(), state
        ([[0.75, 1.5]], {})
    """

    is_elementwise: ClassVar[bool] = True
    squares_gradients: ClassVar[bool] = False

    def init(self, num_rows: int, dim: int) -> dict[str, Array]:
        return {}

    def update(self, rows: Rows, gradients: Rows, state: RowState, step: Count) -> Updated:
        return limit_norm(rows - self.rate(step) * gradients, self.max_norm), {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class momentum_sgd(RowOptimizer):
    """Gradient descent with heavy-ball or Nesterov momentum.

    ``m <- momentum m + g``, then ``w <- w - lr m``, or with ``nesterov``
    ``w <- w - lr (g + momentum m)``: Sutskever et al. 2013, "On the importance of initialization
    and momentum in deep learning", section 2, in the form of optax and PyTorch. The momentum of a
    row decays only when the row occurs.

    State: ``momentum``, 4 dim bytes a row.

    Attributes:
        momentum: Decay of the sum of past gradients, in [0, 1).
        nesterov: Whether to use Nesterov's form.

    Raises:
        ValueError: A hyperparameter outside its range.

    Example:
        >>> import jax.numpy as jnp
        >>> import jaxrec.optim
        >>> optimizer = jaxrec.optim.momentum_sgd(learning_rate=0.5, momentum=0.5)
        >>> rows, gradients = jnp.ones((1, 2)), jnp.array([[0.5, -1.0]])
        >>> state = optimizer.init(1, 2)
        >>> for step in range(2):
        ...     rows, state = optimizer.update(rows, gradients, state, jnp.int32(step))
        >>> rows.tolist(), state["momentum"].tolist()
        ([[0.375, 2.25]], [[0.75, -1.5]])
    """

    is_elementwise: ClassVar[bool] = True
    squares_gradients: ClassVar[bool] = False

    momentum: float = 0.9
    nesterov: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.fraction(self, "momentum")
        checks.boolean(self, "nesterov")

    def init(self, num_rows: int, dim: int) -> dict[str, Array]:
        return {"momentum": jnp.zeros((num_rows, dim), jnp.float32)}

    def update(self, rows: Rows, gradients: Rows, state: RowState, step: Count) -> Updated:
        momentum = self.momentum * state["momentum"] + gradients
        direction = gradients + self.momentum * momentum if self.nesterov else momentum
        rows = rows - self.rate(step) * direction
        return limit_norm(rows, self.max_norm), {"momentum": momentum}


@dataclasses.dataclass(frozen=True, kw_only=True)
class lars_sgd(RowOptimizer):
    """Gradient descent with momentum and layer-wise adaptive rates, with rows as the layers.

    ``a = lr eta |w| / (|g| + wd |w|)``, ``m <- momentum m + a (g + wd w)``, ``w <- w - m``: You,
    Gitman and Ginsburg 2017, "Large batch training of convolutional networks", Algorithm 1.
    FBGEMM's LARS_SGD, with one difference: if a norm is zero ``a`` is ``lr``, as in optax and in
    the LAMB paper's programs. FBGEMM then gives NaN, or never moves a row of zeros.

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

    def update(self, rows: Rows, gradients: Rows, state: RowState, step: Count) -> Updated:
        # `row_norms` sums over whole rows, also if a device has only some of their columns.
        norms = row_norms(rows)
        decayed = row_norms(gradients) + self.weight_decay * norms
        rate = self.rate(step) * trust_ratio(self.eta * norms, decayed)
        momentum = self.momentum * state["momentum"] + rate * (gradients + self.weight_decay * rows)
        return limit_norm(rows - momentum, self.max_norm), {"momentum": momentum}
