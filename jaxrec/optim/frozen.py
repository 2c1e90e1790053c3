"""Rows that are not trained."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from jaxtyping import Array, Float, Int

from jaxrec.optim.base import RowOptimizer, RowState


@dataclasses.dataclass(frozen=True)
class frozen(RowOptimizer):
    """A row optimizer that leaves rows as they are, without state or the cost of a gradient.

    ``trainable=False`` of a table's config gives the table this optimizer.

    State: none.

    Example:
        >>> import jax.numpy as jnp
        >>> import jaxrec.optim
        >>> optimizer = jaxrec.optim.frozen()
        >>> rows, state = optimizer.update(jnp.ones((1, 2)), jnp.ones((1, 2)), {}, jnp.int32(0))
        >>> rows.tolist(), state
        ([[1.0, 1.0]], {})
    """

    is_elementwise: ClassVar[bool] = True
    is_trained: ClassVar[bool] = False
    squares_gradients: ClassVar[bool] = False

    learning_rate: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.learning_rate != 0:
            raise ValueError(
                "frozen: rows that are not trained have no learning rate, got "
                f"learning_rate={self.learning_rate!r}"
            )

    def init(self, num_rows: int, dim: int) -> dict[str, Array]:
        return {}

    def update(
        self,
        rows: Float[Array, "rows dim"],
        gradients: Float[Array, "rows dim"],
        state: RowState,
        step: Int[Array, ""],
    ) -> tuple[Float[Array, "rows dim"], dict[str, Array]]:
        return rows, {}
