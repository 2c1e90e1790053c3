"""Outer steps (DiLoCo) for tables with replicas, added to any row optimizer."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array

from jaxrec.optim import checks
from jaxrec.optim.base import Count, Rows, RowState, Updated
from jaxrec.optim.wrappers import OptimizerWrapper

# State of `diloco`: a row's change since the last outer step, and the velocity of outer steps.
MOVED = "moved"
VELOCITY = "outer_velocity"


@dataclasses.dataclass(frozen=True, kw_only=True)
class diloco(OptimizerWrapper):
    """A row optimizer for tables with replicas that makes the replicas equal by outer steps.

    Each replica (``jaxrec.shard(replica_axis=...)``) updates its rows with its own gradients. An
    outer step, `jaxrec.mesh.synchronize_replicas`, takes the mean change ``m`` of the replicas
    since the last outer step, and makes a Nesterov step from the rows ``a`` of that time::

        v <- outer_momentum v + m
        w <- a + outer_learning_rate (m + outer_momentum v)

    (Douillard et al. 2023, "DiLoCo: Distributed low-communication training of language models",
    arXiv:2311.08105, algorithm 1, with ``-m`` for its outer gradient; its section 3 has the
    defaults.) An outer step changes all rows of the table: a row without a change still moves by
    its velocity. With an outer rate of 1 and no momentum the outer step is the mean of the
    replicas.

    Only tables have replicas. Dense layers see the gradients of all samples in each step and need
    no outer step.

    State: that of the other optimizer, ``moved`` (``m`` of this replica) and ``outer_velocity``
    (``v``), each 4 dim bytes a row.

    Attributes:
        optimizer: The other optimizer, with the learning rate and the bounds on gradients and rows.
        outer_learning_rate: Rate of the outer steps, 0 or above.
        outer_momentum: Momentum of the outer steps, in [0, 1).

    Raises:
        TypeError: The optimizer is not a row optimizer.
        ValueError: A number is outside its range, the optimizer changes rows between steps
            (`ema_in_place`), or a learning rate is given here.

    Example:
        >>> import jax.numpy as jnp
        >>> import jaxrec.optim
        >>> optimizer = jaxrec.optim.diloco(optimizer=jaxrec.optim.sgd(0.5))
        >>> rows, state = jnp.ones((1, 1)), optimizer.init(1, 1)
        >>> rows, state = optimizer.update(rows, jnp.ones((1, 1)), state, jnp.int32(0))
        >>> rows.tolist(), state["moved"].tolist()
        ([[0.5]], [[-0.5]])
        >>> rows, state = optimizer.outer_step(rows, state)  # 1 + 0.7 * (-0.5 + 0.9 * -0.5)
        >>> round(float(rows[0, 0]), 6), state["moved"].tolist()
        (0.335, [[0.0]])
    """

    outer_learning_rate: float = 0.7
    outer_momentum: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.optimizer.sweeps:
            raise ValueError(
                f"diloco: {type(self.optimizer).__name__} changes rows between steps; give another "
                "optimizer"
            )
        checks.non_negative(self, "outer_learning_rate")
        checks.fraction(self, "outer_momentum")

    @property
    def exact_state(self) -> tuple[str, ...]:  # type: ignore[override]  # as `is_trained`
        return (*self.optimizer.exact_state, MOVED, VELOCITY)

    def init(self, num_rows: int, dim: int) -> dict[str, Array]:
        # Two arrays, not one twice: a step that donates its state must not get a buffer twice.
        outer = {name: jnp.zeros((num_rows, dim), jnp.float32) for name in (MOVED, VELOCITY)}
        return self.optimizer.init(num_rows, dim) | outer

    def update(self, rows: Rows, gradients: Rows, state: RowState, step: Count) -> Updated:
        outer = {name: state[name] for name in (MOVED, VELOCITY)}
        inner = {name: array for name, array in state.items() if name not in outer}
        new_rows, inner = self.optimizer.update(rows, gradients, inner, step)
        # A sum of differences, since the row at the last outer step is not kept: with `moved` it
        # can be computed.
        outer[MOVED] = outer[MOVED] + (new_rows - rows)
        return new_rows, inner | outer

    def outer_step(self, rows: Rows, state: RowState) -> Updated:
        """Make an outer step.

        Args:
            rows: Mean of the rows of all replicas.
            state: Mean of the state of all replicas.

        Returns:
            The new rows, float32, and the new state, the same for all replicas.
        """
        # The mean of the rows less the mean of their changes is `a`, the same on all replicas.
        wide = rows.astype(jnp.float32)
        moved = state[MOVED]
        velocity = self.outer_momentum * state[VELOCITY] + moved
        step = self.outer_learning_rate * (moved + self.outer_momentum * velocity)
        outer = {MOVED: jnp.zeros_like(moved), VELOCITY: velocity}
        return (wide - moved) + step, {**state, **outer}
