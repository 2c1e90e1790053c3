"""Exponential moving averages of rows beside any row optimizer."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrec.optim import checks
from jaxrec.optim.base import RowState
from jaxrec.optim.wrappers import OptimizerWrapper

AVERAGE_OFFSET = "average_offset"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ema(OptimizerWrapper):
    """A row optimizer that also keeps an exponential moving average of each row.

    ``a <- decay a + (1 - decay) w`` with the new row ``w``, starting at the row's first value, each
    time that the row is updated (Polyak and Juditsky 1992, "Acceleration of stochastic
    approximation by averaging", with exponential weights). A row that no batch has keeps its
    average, as it keeps its weights. ``collection.table_average(name)`` reads the averages.

    State: that of the other optimizer, and ``average_offset``, the average less the row, 4 dim
    bytes a row. (An offset starts at zero, so no correction for the start is needed.)

    Attributes:
        optimizer: How rows change; bounds on gradients and rows are its own.
        decay: Weight of the average before, in [0, 1).

    Raises:
        TypeError: The optimizer is not a row optimizer.
        ValueError: The decay is outside its range, or a learning rate is given here.

    Example:
        >>> import jax.numpy as jnp
        >>> import jaxrec.optim
        >>> optimizer = jaxrec.optim.ema(optimizer=jaxrec.optim.sgd(0.5), decay=0.75)
        >>> rows, state = jnp.ones((1, 1)), optimizer.init(1, 1)
        >>> rows, state = optimizer.update(rows, jnp.ones((1, 1)), state, jnp.int32(0))
        >>> rows.tolist(), (rows + state["average_offset"]).tolist()
        ([[0.5]], [[0.875]])
    """

    decay: float = 0.999

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.fraction(self, "decay")

    def init(self, num_rows: int, dim: int) -> dict[str, Array]:
        offset = jnp.zeros((num_rows, dim), jnp.float32)
        return self.optimizer.init(num_rows, dim) | {AVERAGE_OFFSET: offset}

    def update(
        self,
        rows: Float[Array, "rows dim"],
        gradients: Float[Array, "rows dim"],
        state: RowState,
        step: Int[Array, ""],
    ) -> tuple[Float[Array, "rows dim"], dict[str, Array]]:
        inner = {name: array for name, array in state.items() if name != AVERAGE_OFFSET}
        new_rows, inner = self.optimizer.update(rows, gradients, inner, step)
        # a' - w' = decay a + (1 - decay) w' - w' = decay (a - w'), and a = w + offset.
        offset = self.decay * (state[AVERAGE_OFFSET] + (rows - new_rows))
        return new_rows, inner | {AVERAGE_OFFSET: offset}
