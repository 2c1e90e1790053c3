"""Row optimizers around another one: their base, and moving averages of rows."""

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
    """Base of row optimizers that change rows as another one does, and keep more state.

    Attributes:
        optimizer: How rows change; bounds on gradients and rows are its own.
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

        # Callers bound gradients before `update`, and ask this optimizer for the bounds.
        for bound in ("clip_value", "clip_norm"):
            if getattr(inner, bound) is not None:
                self._set(bound, getattr(inner, bound))
        self._set("optimizer", dataclasses.replace(inner, clip_value=None, clip_norm=None))
        for field in ("learning_rate", "stochastic_rounding", "state_dtype"):
            self._set(field, getattr(inner, field))
        super().__post_init__()

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

    def update(self, rows: Rows, gradients: Rows, state: RowState, step: Count) -> Updated:
        inner = {name: array for name, array in state.items() if name != AVERAGE_OFFSET}
        new_rows, inner = self.optimizer.update(rows, gradients, inner, step)
        # a' - w' = decay a + (1 - decay) w' - w' = decay (a - w'), and a = w + offset.
        offset = self.decay * (state[AVERAGE_OFFSET] + (rows - new_rows))
        return new_rows, inner | {AVERAGE_OFFSET: offset}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ema_in_place(OptimizerWrapper):
    """A row optimizer, and every few steps the second half of each row moves towards its first.

    ``w[dim / 2:] <- w[dim / 2:] + coefficient (w[:dim / 2] - w[dim / 2:])`` for **all** rows of the
    table, before the lookups of iterations ``every``, ``2 every``, ... from ``start`` on, counted
    from 1: the first half is the network that learns, the second half a slow copy of it, as target
    networks of reinforcement learning have (Lillicrap et al. 2016, "Continuous control with deep
    reinforcement learning", section 3). FBGEMM's EMAINPLACE_ROWWISE_ADAGRAD is
    ``ema_in_place(optimizer=rowwise_adagrad(...))``.

    The update of iteration ``n`` already makes the change that comes before iteration ``n + 1``, in
    place. It reads and writes the whole table. `jaxrec.optim.ema` keeps averages beside the rows,
    and touches the rows of the batch alone.

    State: that of the other optimizer.

    Attributes:
        optimizer: How rows change in each step; bounds on gradients and rows are its own.
        every: Number of iterations between two changes, 1 or more; FBGEMM's ``step_ema``.
        start: First iteration that may follow a change; FBGEMM's ``step_start``.
        coefficient: Share of the way to the first half, in [0, 1]; FBGEMM's ``step_ema_coef``.

    Raises:
        TypeError: The optimizer is not a row optimizer.
        ValueError: A number is outside its range, a learning rate or ``max_norm`` is given here,
            or, of a collection, rows have an odd number of columns.

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

    @property
    def of_batch(self) -> RowOptimizer:
        return dataclasses.replace(
            self.optimizer, clip_value=self.clip_value, clip_norm=self.clip_norm
        )

    @property
    def can_cut_rows(self) -> bool:
        return False  # the halves of a row meet

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
