"""Row optimizers that wrap another one: their base, and moving averages of rows."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool

from jaxrec.optim import checks
from jaxrec.optim.base import Count, RowOptimizer, Rows, RowState, Updated

AVERAGE_OFFSET = "average_offset"


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerWrapper(RowOptimizer):
    """Base of row optimizers that update rows with another optimizer and add something to it.

    Attributes:
        optimizer: The other optimizer, with the learning rate and the bounds on gradients and rows.
    """

    optimizer: RowOptimizer
    learning_rate: Any = None

    def __post_init__(self) -> None:
        inner, name = self.optimizer, type(self).__name__
        if not isinstance(inner, RowOptimizer):
            raise TypeError(
                f"{name}: optimizer is a row optimizer such as jaxrec.optim.rowwise_adagrad(), got "
                f"{inner!r}"
            )
        if self.learning_rate not in (None, inner.learning_rate):
            raise ValueError(f"{name}: give the learning rate to its optimizer")

        # Stores bound gradients before `update`, and ask the outer optimizer for the bounds.
        for bound in ("clip_value", "clip_norm"):
            if getattr(inner, bound) is not None:
                self._set(bound, getattr(inner, bound))
        self._set("optimizer", dataclasses.replace(inner, clip_value=None, clip_norm=None))
        for field in ("learning_rate", "stochastic_rounding", "state_dtype"):
            self._set(field, getattr(inner, field))
        super().__post_init__()

    # The dataclass is frozen, and these fields follow from another one.
    def _set(self, field: str, value: Any) -> None:
        object.__setattr__(self, field, value)

    @property
    def can_cut_rows(self) -> bool:
        return self.optimizer.can_cut_rows

    @property
    def needs_whole_rows(self) -> bool:
        return self.optimizer.needs_whole_rows

    @property
    def squares_gradients(self) -> bool:  # type: ignore[override]  # as `is_trained`
        return self.optimizer.squares_gradients or self.optimizer.max_norm is not None

    @property
    def non_negative_state(self) -> tuple[str, ...]:  # type: ignore[override]  # as `is_trained`
        return self.optimizer.non_negative_state

    @property
    def exact_state(self) -> tuple[str, ...]:  # type: ignore[override]  # as `is_trained`
        return self.optimizer.exact_state

    @property
    def is_trained(self) -> bool:  # type: ignore[override]  # that of the optimizer it wraps
        return self.optimizer.is_trained


@dataclasses.dataclass(frozen=True, kw_only=True)
class ema(OptimizerWrapper):
    """A row optimizer that also keeps an exponential moving average of each row.

    Each update of a row makes ``a <- decay a + (1 - decay) w`` with the new row ``w``; ``a`` starts
    as the row's first value (Polyak and Juditsky 1992, "Acceleration of stochastic approximation by
    averaging", with exponential weights). A row that does not occur keeps its average.
    ``collection.table_average(name)`` reads the averages.

    State: that of the other optimizer, and ``average_offset``, the average minus the row, 4 dim
    bytes a row.

    Attributes:
        optimizer: The other optimizer, with the learning rate and the bounds on gradients and rows.
        decay: Weight of the old average, in [0, 1).

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

    def update(self, rows: Rows, gradients: Rows, state: RowState, step: Count) -> Updated:
        inner = {name: array for name, array in state.items() if name != AVERAGE_OFFSET}
        new_rows, inner = self.optimizer.update(rows, gradients, inner, step)
        # a' - w' = decay a + (1 - decay) w' - w' = decay (a - w'), and a = w + offset. The state is
        # the offset and not the average, since an offset starts at zero whatever the first row is.
        offset = self.decay * (state[AVERAGE_OFFSET] + (rows - new_rows))
        return new_rows, inner | {AVERAGE_OFFSET: offset}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ema_in_place(OptimizerWrapper):
    """A row optimizer that also moves the second half of each row towards its first half.

    ``w[dim / 2:] <- w[dim / 2:] + coefficient (w[:dim / 2] - w[dim / 2:])`` for **all** rows of the
    table, every few steps. The first half is trained; the second half follows it slowly, like a
    target network in reinforcement learning (Lillicrap et al. 2016, "Continuous control with deep
    reinforcement learning", section 3). FBGEMM's EMAINPLACE_ROWWISE_ADAGRAD is
    ``ema_in_place(optimizer=rowwise_adagrad(...))``.

    Iterations count from 1. The lookups of iterations ``every``, ``2 every``, ... from ``start`` on
    read moved rows: the update at the end of the iteration before moves them. A move is in place,
    and reads and writes the whole table. `jaxrec.optim.ema` keeps averages beside the rows instead,
    and changes only rows of the batch.

    State: that of the other optimizer.

    Attributes:
        optimizer: The other optimizer, with the learning rate and the bounds on gradients and rows.
        every: Number of iterations from one move to the next, 1 or more; FBGEMM's ``step_ema``.
        start: First iteration that may read moved rows; FBGEMM's ``step_start``.
        coefficient: Share of the way to the first half, in [0, 1]; FBGEMM's ``step_ema_coef``.

    Raises:
        TypeError: The optimizer is not a row optimizer.
        ValueError: A number is outside its range, or a learning rate or ``max_norm`` is given here.
            A collection also refuses tables with an odd number of columns.

    Example:
        >>> import jax.numpy as jnp
        >>> import jaxrec.optim
        >>> optimizer = jaxrec.optim.ema_in_place(
        ...     optimizer=jaxrec.optim.sgd(0.5), every=2, coefficient=0.25)
        >>> [bool(optimizer.is_sweep_due(jnp.int32(step))) for step in range(4)]
        [True, False, True, False]
        >>> optimizer.sweep(jnp.array([[4.0, 0.0], [1.0, 1.0]])).tolist()
        [[4.0, 1.0], [1.0, 1.0]]
    """

    every: int = 10
    start: int = 0
    coefficient: float = 0.6

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.optimizer.sweeps:
            raise ValueError("ema_in_place: optimizer is another ema_in_place; give one")
        if self.max_norm not in (None, self.optimizer.max_norm):
            raise ValueError("ema_in_place: give max_norm to its optimizer")
        self._set("max_norm", self.optimizer.max_norm)
        checks.count(self, "every")
        checks.whole(self, "start")
        checks.share(self, "coefficient")

    # The inner optimizer lost its bounds to this one in `__post_init__`; alone it needs them back.
    @property
    def of_batch(self) -> RowOptimizer:
        return dataclasses.replace(
            self.optimizer, clip_value=self.clip_value, clip_norm=self.clip_norm
        )

    @property
    def can_cut_rows(self) -> bool:
        return False  # `sweep` needs both halves of a row

    @property
    def needs_whole_rows(self) -> bool:
        return True

    @property
    def sweeps(self) -> bool:  # type: ignore[override]  # frozen rows stay as they are
        return self.optimizer.is_trained

    def refuse(self, dim: int) -> str | None:
        if dim % 2:
            return f"ema_in_place needs an even number of columns, got {dim}"
        return self.optimizer.refuse(dim)

    def init(self, num_rows: int, dim: int) -> dict[str, Array]:
        return self.optimizer.init(num_rows, dim)

    def update(self, rows: Rows, gradients: Rows, state: RowState, step: Count) -> Updated:
        return self.optimizer.update(rows, gradients, state, step)

    def is_sweep_due(self, step: Count) -> Bool[Array, ""]:
        iteration = jnp.asarray(step) + 2  # the next one, counted from 1
        return (iteration % self.every == 0) & (iteration >= self.start)

    def sweep(self, rows: Rows) -> Rows:
        fast, slow = jnp.split(rows, 2, axis=1)
        return jnp.concatenate([fast, slow + self.coefficient * (fast - slow)], axis=1)
