"""Moving averages of one half of each row in its other half."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrec.optim import checks
from jaxrec.optim.base import RowOptimizer, RowState


@dataclasses.dataclass(frozen=True, kw_only=True)
class ema_in_place(RowOptimizer):
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

    optimizer: RowOptimizer
    every: int = 10
    start: int = 0
    coefficient: float = 0.6
    learning_rate: Any = None

    def __post_init__(self) -> None:
        inner = self.optimizer
        if not isinstance(inner, RowOptimizer):
            raise TypeError(
                "ema_in_place: optimizer is a row optimizer such as "
                f"jaxrec.optim.rowwise_adagrad(), got {inner!r}"
            )
        if inner.sweeps:
            raise ValueError("ema_in_place: optimizer is another ema_in_place; give one")
        if self.learning_rate not in (None, inner.learning_rate):
            raise ValueError("ema_in_place: give the learning rate to its optimizer")
        if self.max_norm not in (None, inner.max_norm):
            raise ValueError("ema_in_place: give max_norm to its optimizer")
        checks.count(self, "every")
        checks.whole(self, "start")
        checks.share(self, "coefficient")

        def set_field(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)

        # Callers bound gradients before `update`, and ask this optimizer for the bounds.
        for bound in ("clip_value", "clip_norm"):
            if getattr(inner, bound) is not None:
                set_field(bound, getattr(inner, bound))
        set_field("optimizer", dataclasses.replace(inner, clip_value=None, clip_norm=None))
        for field in ("learning_rate", "stochastic_rounding", "state_dtype", "max_norm"):
            set_field(field, getattr(inner, field))
        super().__post_init__()

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
    def squares_gradients(self) -> bool:  # type: ignore[override]  # as `is_trained`
        return self.optimizer.squares_gradients or self.optimizer.max_norm is not None

    @property
    def non_negative_state(self) -> tuple[str, ...]:  # type: ignore[override]  # as `is_trained`
        return self.optimizer.non_negative_state

    @property
    def exact_state(self) -> tuple[str, ...]:  # type: ignore[override]  # as `is_trained`
        return self.optimizer.exact_state

    @property
    def is_trained(self) -> bool:  # type: ignore[override]  # that of the optimizer within
        return self.optimizer.is_trained

    @property
    def sweeps(self) -> bool:  # type: ignore[override]  # frozen rows stay as they are
        return self.optimizer.is_trained

    def refuse(self, dim: int) -> str | None:
        if dim % 2:
            return f"ema_in_place needs an even number of columns, got {dim}"
        return self.optimizer.refuse(dim)

    def init(self, num_rows: int, dim: int) -> dict[str, Array]:
        return self.optimizer.init(num_rows, dim)

    def update(
        self,
        rows: Float[Array, "rows dim"],
        gradients: Float[Array, "rows dim"],
        state: RowState,
        step: Int[Array, ""],
    ) -> tuple[Float[Array, "rows dim"], dict[str, Array]]:
        return self.optimizer.update(rows, gradients, state, step)

    def is_sweep_due(self, step: Int[Array, ""]) -> Bool[Array, ""]:
        iteration = jnp.asarray(step) + 2  # the next one, counted from 1
        return (iteration % self.every == 0) & (iteration >= self.start)

    def sweep(self, rows: Float[Array, "rows dim"]) -> Float[Array, "rows dim"]:
        fast, slow = jnp.split(rows, 2, axis=1)
        return jnp.concatenate([fast, slow + self.coefficient * (fast - slow)], axis=1)
