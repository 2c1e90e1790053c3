"""The interface of row optimizers, and `frozen`, which leaves rows as they are."""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import ClassVar, TypeAlias

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrec.optim import checks

# Types of `RowOptimizer.update`. Its rows are the rows of one batch, not of a table.
Rows: TypeAlias = Float[Array, "rows dim"]
RowState: TypeAlias = Mapping[str, Array]
"""Optimizer state of some rows, by name; each array's first axis is the rows."""
Updated: TypeAlias = tuple[Rows, dict[str, Array]]
Count: TypeAlias = Int[Array, ""]
Schedule: TypeAlias = Callable[[Count], Float[Array, ""] | float]
"""Learning rate as a function of the step, such as optax's schedules."""

STATE_DTYPES = ("float32", "bfloat16", "float8")
LARGEST_SQUARED = 2.0**50  # 2**27 squares of it, 2**127 in all, still fit float32


@dataclasses.dataclass(frozen=True)
class RowOptimizer(abc.ABC):
    """A pair of pure functions: `init` makes the state of rows, `update` changes rows and state.

    Like an optax transformation, with two differences: `update` sees only the rows that occur in a
    batch, and it returns new rows instead of differences. Optimizers with equal hyperparameters are
    equal and hashable, and tables with equal optimizers are stored together.

    Attributes:
        learning_rate: A number; a function of the number of updates made so far (0 at the first
            update), such as any optax schedule; or a `hyperparameter`, which is set between steps.
        clip_value: Bound on the absolute value of each element of the embeddings' gradient, applied
            before the gradients of a row's occurrences are summed. If samples share a bag
            (``inverse_indices``), the gradient of each sample is bounded.
        clip_norm: Bound on the Euclidean norm of each table's whole gradient in a step. A larger
            gradient is multiplied by ``clip_norm / (norm + 1e-6)``.
        max_norm: Bound on the Euclidean norm of each updated row. A longer row is scaled down.
        stochastic_rounding: Whether tables and state of 16 or 8 bits round new numbers up or down
            at random, so that the mean is exact. Without it small updates are lost to rounding.
        state_dtype: Type of stored state with one number per element: "float32"; "bfloat16"; or
            "float8", 8-bit floats with a float32 scale per 128 columns of a row (Dettmers et al.
            2022, "8-bit optimizers via block-wise quantization", with floats for codes). State with
            one number per row stays float32.

    Raises:
        ValueError: A rate is below zero, a bound is not above zero, ``state_dtype`` is unknown, or
            the rate is a function that ignores its argument: a compiled step would keep its first
            value.
    """

    learning_rate: float | Schedule = 0.01
    _: dataclasses.KW_ONLY
    clip_value: float | None = None
    clip_norm: float | None = None
    max_norm: float | None = None
    stochastic_rounding: bool = True
    state_dtype: str = "float32"

    # State whose elements are 0 or more, such as sums of squares. In 8 bits they are stored without
    # a sign, and a positive number never becomes 0.
    non_negative_state: ClassVar[tuple[str, ...]] = ()

    # State that stays float32 whatever `state_dtype` is, since `update` cannot bear its rounding.
    exact_state: ClassVar[tuple[str, ...]] = ()

    # Whether `update` treats each element alone. Then some columns of a row may be updated without
    # the others.
    is_elementwise: ClassVar[bool] = False

    # Whether rows change at all; the rows of `frozen` tables need no gradient.
    is_trained: ClassVar[bool] = True

    # Whether `update` computes all sums over a row by the functions of `jaxrec.optim.norm`, which
    # know about padding and about rows cut by columns.
    sums_rows: ClassVar[bool] = False

    # Whether `update` squares gradients, for state or for norms; see `largest_gradient`.
    squares_gradients: ClassVar[bool] = True

    # Whether `sweep` changes rows between two steps.
    sweeps: ClassVar[bool] = False

    @property
    def of_batch(self) -> RowOptimizer:
        """The optimizer without `sweep`, as kernels use it."""
        return self

    @property
    def can_cut_rows(self) -> bool:
        """Whether devices may hold different columns of a row."""
        return self.is_elementwise or self.sums_rows

    @property
    def needs_whole_rows(self) -> bool:
        """Whether updating some columns of a row needs the others."""
        return not self.is_elementwise or self.max_norm is not None

    @property
    def largest_gradient(self) -> float:
        """Largest element of a gradient whose square is safe in float32.

        `jaxrec.Optimizer` skips a step with a larger one, as it skips one that is not finite.
        """
        # The bound leaves space for sums over the occurrences of a row and over its columns.
        if self.clip_value is not None and self.clip_value <= LARGEST_SQUARED:
            return math.inf
        bounds_norms = self.clip_norm is not None or self.max_norm is not None
        return LARGEST_SQUARED if self.squares_gradients or bounds_norms else math.inf

    def __post_init__(self) -> None:
        if callable(self.learning_rate):
            checks.schedule(self, "learning_rate")
        else:
            checks.non_negative(self, "learning_rate")
        for bound in ("clip_value", "clip_norm", "max_norm"):
            if getattr(self, bound) is not None:
                checks.positive(self, bound)
        checks.boolean(self, "stochastic_rounding")
        checks.one_of(self, "state_dtype", STATE_DTYPES)

    def refuse(self, dim: int) -> str | None:
        """Return the reason why rows cannot have ``dim`` columns, or None if they can."""
        return None

    @abc.abstractmethod
    def init(self, num_rows: int, dim: int) -> dict[str, Array]:
        """Return the state of new rows: float32 arrays ``[num_rows]`` or ``[num_rows, dim]``.

        Stores keep the state in ``state_dtype``; `update` always gets and returns float32. The
        state of all rows must be equal, since large tables repeat that of ``init(1, dim)``.
        """

    @abc.abstractmethod
    def update(
        self,
        rows: Float[Array, "rows dim"],
        gradients: Float[Array, "rows dim"],
        state: RowState,
        step: Int[Array, ""],
    ) -> tuple[Float[Array, "rows dim"], dict[str, Array]]:
        """Update rows by one step.

        Args:
            rows: The rows, float32.
            gradients: The gradient of each row, summed over its occurrences in the batch, float32.
            state: The rows' state, as `init` makes it.
            step: Number of updates made before this one (0 at the first), int32.

        Returns:
            The new rows and the new state, in the shapes of the old.
        """

    def is_sweep_due(self, step: Int[Array, ""]) -> Bool[Array, ""]:
        """Return whether `sweep` runs after update number ``step``, counted from 0."""
        return jnp.zeros((), bool)

    # `update` sees only the rows of a batch. Changes to all rows of a table are a method of their
    # own, so that an ordinary step never walks a whole table.
    def sweep(self, rows: Float[Array, "rows dim"]) -> Float[Array, "rows dim"]:
        """Change rows between two steps; stores call this for all rows of a table.

        Args:
            rows: Some rows of the table, float32.

        Returns:
            The new rows. A new row must depend on its old row only.
        """
        return rows

    def rate(self, step: Int[Array, ""]) -> Float[Array, ""]:
        """Return the learning rate of update number ``step``, counted from 0."""
        rate = self.learning_rate
        return jnp.asarray(rate(step) if callable(rate) else rate, jnp.float32)


@dataclasses.dataclass(frozen=True)
class frozen(RowOptimizer):
    """A row optimizer that leaves rows as they are, without state and without their gradients.

    A table whose config has ``trainable=False`` gets this optimizer.

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

    def update(self, rows: Rows, gradients: Rows, state: RowState, step: Count) -> Updated:
        return rows, {}
