"""Row-wise Adagrad with a counter of each row's updates, which scales decay and rate."""

from __future__ import annotations

import abc
import dataclasses
import math
from typing import ClassVar, Literal, TypeAlias, get_args

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrec.optim import checks
from jaxrec.optim.base import Count, RowOptimizer, Rows, RowState, Updated
from jaxrec.optim.hyperparameters import check_weight_decay, hyperparameter
from jaxrec.optim.norm import limit_norm, mean_squares, root, row_norms

_CounterDecay: TypeAlias = Literal["none", "l2", "decoupled", "adagradw"]
_CowclipDecay: TypeAlias = Literal["none", "l2", "decoupled"]
_RateMode: TypeAlias = Literal[
    "equal", "tail_increase", "tail_decrease", "counter_sgd", "sqrt_counter", "capped_counter"
]

PerRow: TypeAlias = Float[Array, " rows"]

# Bounds on the factor of the rate in the modes "tail_increase" and "tail_decrease".
_MAX_INCREASE, _MIN_DECREASE = 10.0, 0.1


@dataclasses.dataclass(frozen=True)
class _Counted:
    """Numbers of one update, each ``[rows]`` or a scalar.

    Attributes:
        iteration: Number of this update of the table, 1 at the first.
        gap: Updates of the table since the row's last one; 1 at the row's first.
        count: The row's counter, this update included.
        root: ``sqrt(v) + eps`` of the new accumulator.
        rate: The learning rate.
    """

    iteration: Float[Array, ""]
    gap: Float[Array, " rows"]
    count: Float[Array, " rows"]
    root: Float[Array, " rows"]
    rate: Float[Array, ""]

    @property
    def adagrad_rate(self) -> Float[Array, " rows"]:
        """Row-wise Adagrad's rate, ``lr / (sqrt(v) + eps)``."""
        return self.rate / self.root


@dataclasses.dataclass(frozen=True, kw_only=True)
class _CountingAdagrad(RowOptimizer):
    """Base of the Adagrad optimizers with a counter: their state and their update."""

    # State is float32, as for all row optimizers. Counters and step numbers are exact up to 2**24;
    # one step more or less matters little after sixteen million.
    sums_rows: ClassVar[bool] = True

    eps: float = 1e-8
    weight_decay: float | hyperparameter = 0.0
    halflife: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.positive(self, "eps")
        check_weight_decay(self)
        if self.halflife is not None:
            checks.non_negative(self, "halflife")

    def init(self, num_rows: int, dim: int) -> dict[str, Array]:
        return {
            "accumulator": jnp.zeros(num_rows, jnp.float32),
            "count": jnp.zeros(num_rows, jnp.float32),
            "last_step": jnp.zeros(num_rows, jnp.float32),
        }

    def update(self, rows: Rows, gradients: Rows, state: RowState, step: Count) -> Updated:
        last = state["last_step"]
        # 0 means that the row was never updated, so iterations are counted from 1.
        iteration = jnp.asarray(step + 1, jnp.float32)
        gap = jnp.where(last == 0, 1, iteration - last)
        count = 1 + self._decayed_count(state["count"], gap)
        decayed = gradients + self.weight_decay * rows if self._is_coupled else gradients
        accumulator = state["accumulator"] + mean_squares(decayed)
        shifted = root(accumulator) + self.eps
        counted = _Counted(iteration, gap, count, shifted, self.rate(step))
        shrinkage, rates = self._factors(counted, rows, decayed)
        # The raw gradient, also where the decay is coupled: `shrinkage` has the decay's share, with
        # the factors of the mode.
        rows = shrinkage[:, None] * rows - rates[:, None] * gradients
        return limit_norm(rows, self.max_norm), {
            "accumulator": accumulator,
            "count": count,
            "last_step": jnp.full_like(last, step + 1),
        }

    def _decayed_count(self, count: PerRow, gap: PerRow) -> PerRow:
        if self.halflife is None:
            return count
        if self.halflife == 0:
            return jnp.zeros_like(count)
        return jnp.exp(gap * (-math.log(2) / self.halflife)) * count

    @property
    @abc.abstractmethod
    def _is_coupled(self) -> bool:
        """Whether the accumulator sees the gradient with weight decay."""

    @abc.abstractmethod
    def _factors(self, counted: _Counted, rows: Rows, decayed: Rows) -> tuple[PerRow, PerRow]:
        """Return shrinkage and rates, ``[rows]`` each: ``w <- shrinkage w - rate g``.

        ``decayed`` are the gradients, with weight decay if it is coupled.
        """


@dataclasses.dataclass(frozen=True, kw_only=True)
class rowwise_adagrad_with_counter(_CountingAdagrad):
    """Row-wise Adagrad whose weight decay and rate depend on how often a row was updated.

    Each update of a row adds 1 to its counter ``c``, however often the row occurs in the batch.
    With a ``halflife`` the counter halves in that many updates of the table. As in
    `rowwise_adagrad`, ``v <- v + mean(g^2)`` and ``u = lr / (sqrt(v) + eps)``; then
    ``w <- s w - r g``. FBGEMM's EXACT_ROWWISE_ADAGRAD with ``WeightDecayMode.COUNTER``.

    The shrinkage ``s`` depends on ``weight_decay_mode`` and the strength ``wd``:

    ==============  ================================================================================
    "none"          1
    "l2"            1 - (halflife / c) wd u, and ``g + wd w`` takes the place of ``g`` in ``v``
    "decoupled"     1 - (halflife / c) wd lr
    "adagradw"      (1 - wd lr) ^ gap, where ``gap`` counts the updates of the table since the row's
                    last one; the rate is multiplied by (1 - wd lr) ^ (gap - 1)
    ==============  ================================================================================

    The rate ``r`` is ``u`` for rows whose ``c`` is at most ``tail_threshold``. For other rows it
    depends on ``learning_rate_mode``:

    =================  =============================================================================
    "equal"            u
    "tail_increase"    u clip((max_counter / (c + 1)) ^ adjustment, 1, 10)
    "tail_decrease"    u clip(((c + 1) / max_counter) ^ adjustment, 0.1, 1)
    "counter_sgd"      lr / (sqrt(adjustment c) + eps)
    "sqrt_counter"     u sqrt(c)
    "capped_counter"   min(lr c, adjustment) / (sqrt(v) + eps)
    =================  =============================================================================

    FBGEMM chooses the last two by AdagradW with ``counter_halflife`` of -1 and -2.

    State: ``accumulator``, ``count`` and ``last_step``, 12 bytes a row. ``last_step`` is the number
    of the table's update that last changed the row, from 1; 0: none did.

    Attributes:
        eps: Added to the root; above 0.
        weight_decay: Strength of the decay of rows that occur, used according to
            ``weight_decay_mode``.
        weight_decay_mode: A name in the first table above.
        halflife: Updates of the table in which a counter halves. 0: counters are always 1. None:
            counters count all updates (FBGEMM's -1); "l2" and "decoupled" need a number.
        learning_rate_mode: A name in the second table above.
        adjustment: The exponent, factor or bound of the second table; FBGEMM's ``adjustment_ub``.
        adjust_after: Number of updates of the table before decay and adjustment begin; FBGEMM's
            ``adjustment_iter``.
        tail_threshold: Largest counter of rows whose rate is not adjusted.
        tail_threshold_is_ratio: Whether ``tail_threshold`` is a share of ``max_counter``.
        max_counter: Largest counter of the tables, plus 1. Set it now and then as a
            `hyperparameter`; FBGEMM computes it every 1000 updates.

    Raises:
        ValueError: A hyperparameter outside its range, an unknown mode, or the mode "l2" or
            "decoupled" without a halflife.

    Example:
        >>> import jax.numpy as jnp
        >>> import jaxrec.optim
        >>> optimizer = jaxrec.optim.rowwise_adagrad_with_counter(
        ...     learning_rate=0.5, halflife=1, weight_decay=0.25, weight_decay_mode="decoupled")
        >>> rows, state = jnp.ones((1, 2)), optimizer.init(1, 2)
        >>> rows, state = optimizer.update(rows, jnp.array([[1.0, -1.0]]), state, jnp.int32(0))
        >>> rows.tolist(), state["count"].tolist()
        ([[0.375, 1.375]], [1.0])
    """

    weight_decay_mode: _CounterDecay = "none"
    learning_rate_mode: _RateMode = "equal"
    adjustment: float = 1.0
    adjust_after: int = 0
    tail_threshold: float = 0.0
    tail_threshold_is_ratio: bool = False
    max_counter: float | hyperparameter = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.one_of(self, "weight_decay_mode", get_args(_CounterDecay))
        checks.one_of(self, "learning_rate_mode", get_args(_RateMode))
        checks.non_negative(self, "adjustment", "tail_threshold")
        checks.whole(self, "adjust_after")
        checks.boolean(self, "tail_threshold_is_ratio")
        if not isinstance(self.max_counter, hyperparameter):
            checks.positive(self, "max_counter")
        if self.weight_decay_mode in ("l2", "decoupled") and self.halflife is None:
            raise ValueError(
                f"rowwise_adagrad_with_counter: weight_decay_mode={self.weight_decay_mode!r} "
                "divides the halflife by the counter, got halflife=None; give a halflife in "
                "updates of the table, such as 1000"
            )

    @property
    def _is_coupled(self) -> bool:
        return self.weight_decay_mode == "l2"

    def _factors(self, counted: _Counted, rows: Rows, decayed: Rows) -> tuple[PerRow, PerRow]:
        unadjusted = counted.adagrad_rate
        shrinkage, lazy = self._shrinkage(counted)
        rates = lazy * jnp.where(
            counted.count > self._threshold(), self._adjusted(counted), unadjusted
        )
        if self.adjust_after == 0:
            return shrinkage, rates
        is_adjusted = counted.iteration > self.adjust_after
        return jnp.where(is_adjusted, shrinkage, 1), jnp.where(is_adjusted, rates, unadjusted)

    def _shrinkage(self, counted: _Counted) -> tuple[PerRow, PerRow]:
        """Return the factors of the rows and of the rates, ``[rows]`` each."""
        ones = jnp.ones_like(counted.count)
        decay, count, halflife = self.weight_decay, counted.count, self.halflife or 0
        match self.weight_decay_mode:
            case "l2":
                return 1 - halflife / count * decay * counted.adagrad_rate, ones
            case "decoupled":
                return 1 - halflife / count * decay * counted.rate, ones
            case "adagradw":
                # A row is decayed at its next update for all steps in between. Those before
                # `adjust_after` had no decay.
                gap = jnp.minimum(counted.gap, counted.iteration - self.adjust_after)
                base = jnp.maximum(1 - decay * counted.rate, 0) * ones
                # With a gap of 1 and a base of 0 this is 0 to the power of 0, which must be 1.
                lazy = jnp.where(gap == 1, 1, jnp.exp((gap - 1) * jnp.log(base)))
                return base * lazy, lazy
        return ones, ones

    def _adjusted(self, counted: _Counted) -> Float[Array, " rows"]:
        """Return the rate of rows whose counter exceeds the threshold."""
        rates, count = counted.adagrad_rate, counted.count
        # The logarithm of (c + 1) / max_counter.
        rarity = jnp.log(count + 1) - jnp.log(self.max_counter * jnp.ones((), jnp.float32))
        match self.learning_rate_mode:
            case "tail_increase":
                return rates * jnp.clip(jnp.exp(-self.adjustment * rarity), 1, _MAX_INCREASE)
            case "tail_decrease":
                return rates * jnp.clip(jnp.exp(self.adjustment * rarity), _MIN_DECREASE, 1)
            case "counter_sgd":
                return counted.rate / (jnp.sqrt(self.adjustment * count) + self.eps)
            case "sqrt_counter":
                return rates * jnp.sqrt(count)
            case "capped_counter":
                return jnp.minimum(counted.rate * count, self.adjustment) / counted.root
        return rates

    def _threshold(self) -> float | Float[Array, ""]:
        if self.tail_threshold_is_ratio:
            return jnp.floor(self.tail_threshold * (self.max_counter * jnp.ones((), jnp.float32)))
        return self.tail_threshold


@dataclasses.dataclass(frozen=True, kw_only=True)
class rowwise_adagrad_cowclip(_CountingAdagrad):
    """Row-wise Adagrad with CowClip: rates are bounded by the row's norm and counter.

    Counters ``c`` are those of `rowwise_adagrad_with_counter`. With ``v <- v + mean(g^2)`` and
    ``u = lr / (sqrt(v) + eps)`` as in `rowwise_adagrad`, the rate is
    ``r = u min(1, c max(clip_ratio |w|, clip_minimum) / |g|)``, and ``w <- s w - r g``. Zheng et
    al. 2023, "CowClip: reducing CTR prediction model training time from 12 hours to 10 minutes on
    1 GPU", Algorithm 1, with the row's counter as the number of occurrences. FBGEMM's
    EXACT_ROWWISE_ADAGRAD with ``WeightDecayMode.COWCLIP``.

    State: ``accumulator``, ``count`` and ``last_step``, 12 bytes a row.

    Attributes:
        eps: Added to the root; above 0.
        weight_decay: Strength ``wd`` of the decay of rows that occur, used according to
            ``weight_decay_mode``.
        weight_decay_mode: "none"; "l2": ``s = 1 - wd r``, and ``g + wd w`` takes the place of ``g``
            in ``v`` and in ``|g|``; "decoupled": ``s = 1 - wd lr``.
        halflife: As in `rowwise_adagrad_with_counter`.
        clip_ratio: Bound on ``|g|`` per count, as a multiple of the row's norm; FBGEMM's
            ``weight_norm_coefficient``.
        clip_minimum: Smallest bound per count; FBGEMM's ``lower_bound``. With 0, a row of zeros
            never changes.

    Raises:
        ValueError: A hyperparameter outside its range, or an unknown mode.

    Example:
        >>> import jax.numpy as jnp
        >>> import jaxrec.optim
        >>> optimizer = jaxrec.optim.rowwise_adagrad_cowclip(learning_rate=0.5, clip_ratio=0.5)
        >>> rows, state = jnp.ones((1, 4)), optimizer.init(1, 4)
        >>> rows, state = optimizer.update(rows, jnp.full((1, 4), 2.0), state, jnp.int32(0))
        >>> rows.tolist()  # |w| = 2 and |g| = 4: a quarter of Adagrad's step
        [[0.875, 0.875, 0.875, 0.875]]
    """

    weight_decay_mode: _CowclipDecay = "none"
    clip_ratio: float = 0.0
    clip_minimum: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.one_of(self, "weight_decay_mode", get_args(_CowclipDecay))
        checks.non_negative(self, "clip_ratio", "clip_minimum")

    @property
    def _is_coupled(self) -> bool:
        return self.weight_decay_mode == "l2"

    def _factors(self, counted: _Counted, rows: Rows, decayed: Rows) -> tuple[PerRow, PerRow]:
        bounds = jnp.maximum(self.clip_ratio * row_norms(rows)[:, 0], self.clip_minimum)
        bounds, norms = counted.count * bounds, row_norms(decayed)[:, 0]
        # The quotient is not formed where it is not used: a norm of zero would make it NaN.
        is_within = norms <= bounds
        rates = counted.adagrad_rate * jnp.where(
            is_within, 1, bounds / jnp.where(is_within, 1, norms)
        )
        match self.weight_decay_mode:
            case "l2":
                return 1 - self.weight_decay * rates, rates
            case "decoupled":
                decay = 1 - self.weight_decay * counted.rate
                return decay * jnp.ones_like(rates), rates
        return jnp.ones_like(rates), rates
