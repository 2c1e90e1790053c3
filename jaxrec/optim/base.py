"""The interface of row optimizers, and the one that leaves rows as they are."""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import ClassVar, TypeAlias

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrec.optim import checks

# Arguments and results of `RowOptimizer.update`: its rows are those of a batch, not of a table.
Rows: TypeAlias = Float[Array, "rows dim"]
RowState: TypeAlias = Mapping[str, Array]
Updated: TypeAlias = tuple[Rows, dict[str, Array]]
Count: TypeAlias = Int[Array, ""]
Schedule: TypeAlias = Callable[[Count], Float[Array, ""] | float]

STATE_DTYPES = ("float32", "bfloat16", "float8")
LARGEST_SQUARED = 2.0**50  # its square times 2**27 is below float32's largest number


@dataclasses.dataclass(frozen=True)
class RowOptimizer(abc.ABC):
    """A pair of pure functions that start and advance the rows of a table.

    Shaped like an optax transformation, with two differences: it sees only the rows that occur in
    a batch, and it returns the new rows instead of updates. Instances are values: equal
    hyperparameters make equal, hashable optimizers, and tables with equal optimizers are stored
    together.

    Attributes:
        learning_rate: A number; a function of the number of updates made so far (0 at the first
            update), such as any optax schedule; or a `hyperparameter`, which is set between steps.
        clip_value: Bound on the absolute value of each element of the gradient of the *looked-up*
            embeddings, applied before the gradients of a row's occurrences are summed. Samples that
            share a bag (``inverse_indices``) have their gradients bounded one by one, as if each
            had a bag of its own.
        clip_norm: Bound on the Euclidean norm of each table's whole gradient in a step; a larger
            one is scaled by ``clip_norm / (norm + 1e-6)``.
        max_norm: Bound on the Euclidean norm of each updated row; a longer one is scaled down.
        stochastic_rounding: Whether tables and state of 16 or 8 bits round new numbers up or down
            at random, so that their mean is right. Without it small updates are lost to rounding.
        state_dtype: Type of the stored state of one number an element: "float32"; "bfloat16"; or
            "float8", 8-bit floats with a float32 scale for each 128 columns of a row (Dettmers et
            al. 2022, "8-bit optimizers via block-wise quantization", with floats for codes). State
            of one number a row stays float32.

    Raises:
        ValueError: A rate below zero, a bound that is not above zero, an unknown ``state_dtype``,
            or a rate that is a function whose value does not depend on its argument: compiled steps
            would keep the first value.
    """

    learning_rate: float | Schedule = 0.01
    _: dataclasses.KW_ONLY
    clip_value: float | None = None
    clip_norm: float | None = None
    max_norm: float | None = None
    stochastic_rounding: bool = True
    state_dtype: str = "float32"

    # State whose elements are 0 or more, such as sums of squares: in 8 bits they have no sign, and
    # a number above 0 stays above 0.
    non_negative_state: ClassVar[tuple[str, ...]] = ()

    # State that stays float32, whatever `state_dtype` is.
    exact_state: ClassVar[tuple[str, ...]] = ()

    # Whether `update` treats every element of a row by itself.
    is_elementwise: ClassVar[bool] = False

    # Whether rows change at all; the rows of `frozen` tables need no gradient.
    is_trained: ClassVar[bool] = True

    # Whether `update` takes all sums over a row by the functions of `jaxrec.optim.norm`.
    sums_rows: ClassVar[bool] = False

    # Whether `update` squares gradients, for state or for norms.
    squares_gradients: ClassVar[bool] = True

    # Whether `sweep` changes rows between two steps.
    sweeps: ClassVar[bool] = False

    @property
    def of_batch(self) -> RowOptimizer:
        """The optimizer of a batch's rows, without `sweep`; kernels get this one."""
        return self

    @property
    def can_cut_rows(self) -> bool:
        """Whether devices may hold different columns of a row."""
        return self.is_elementwise or self.sums_rows

    @property
    def needs_whole_rows(self) -> bool:
        """Whether advancing some columns of a row needs the others."""
        return not self.is_elementwise or self.max_norm is not None

    @property
    def largest_gradient(self) -> float:
        """Bound on the elements of gradients that float32 holds the squares of.

        A step with a larger one is not finite, though its gradients are: `jaxrec.Optimizer` skips
        it. The bound leaves room for sums of the gradients of a row and of their squares.
        """
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
        """Return the reason why rows cannot have ``dim`` columns; None: they can."""
        return None

    @abc.abstractmethod
    def init(self, num_rows: int, dim: int) -> dict[str, Array]:
        """Return the state of fresh rows: float32 arrays ``[num_rows]`` or ``[num_rows, dim]``.

        Stores keep it in ``state_dtype``; `update` always gets and returns float32.

        All rows begin alike: a large table's state is made of what ``init(1, dim)`` gives.
        """

    @abc.abstractmethod
    def update(
        self,
        rows: Float[Array, "rows dim"],
        gradients: Float[Array, "rows dim"],
        state: RowState,
        step: Int[Array, ""],
    ) -> tuple[Float[Array, "rows dim"], dict[str, Array]]:
        """Advance rows by one step.

        Args:
            rows: The rows, float32.
            gradients: The gradient of each, summed over its occurrences in the batch, float32.
            state: The rows' state, as `init` makes it.
            step: Number of updates made before this one (0 at the first), int32.

        Returns:
            The new rows and the new state, shaped as they came.
        """

    def is_sweep_due(self, step: Int[Array, ""]) -> Bool[Array, ""]:
        """Return whether `sweep` follows the update that ``step`` updates came before."""
        return jnp.zeros((), bool)

    # `update` sees the rows of a batch alone. What changes all rows of a table is a method of its
    # own, so that the usual step never walks a whole table.
    def sweep(self, rows: Float[Array, "rows dim"]) -> Float[Array, "rows dim"]:
        """Change rows between two steps; stores call this for all rows of a table.

        Args:
            rows: Some rows of the table, float32.

        Returns:
            The new rows, each a function of the old row alone.
        """
        return rows

    def rate(self, step: Int[Array, ""]) -> Float[Array, ""]:
        """Return the learning rate of the update after ``step`` updates."""
        rate = self.learning_rate
        return jnp.asarray(rate(step) if callable(rate) else rate, jnp.float32)


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

    def update(self, rows: Rows, gradients: Rows, state: RowState, step: Count) -> Updated:
        return rows, {}
