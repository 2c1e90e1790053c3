"""Warmup in stages: TorchRec's `WarmupOptimizer` as a schedule of the learning rate."""

from __future__ import annotations

import dataclasses
from typing import Literal, TypeAlias, get_args

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxrec.optim import checks

_Policy: TypeAlias = Literal[
    "none",
    "linear",
    "constant",
    "poly",
    "step",
    "inv_sqrt",
    "cosine_annealing_warm_restarts",
    "interpolate",
]


@dataclasses.dataclass(frozen=True)
class WarmupStage:
    """One stage of a `warmup`: the factor of the rate up to iteration ``max_iters``.

    The factor at iteration ``it`` is ``lr_scale`` times:

    ==================================  ============================================================
    "none"                              1
    "linear"                            value + (1 - value) it / max_iters
    "constant"                          value
    "poly"                              max(0, 1 - it / decay_iters) ^ value
    "step"                              value ^ floor(it / decay_iters)
    "inv_sqrt"                          1 / sqrt(max(it, 1))
    "cosine_annealing_warm_restarts"    value + (1 - value) (1 + cos(pi (it mod p) / p)) / 2,
                                        with p = sgdr_period
    "interpolate"                       value + (end_value - value) (it - start) /
                                        (max_iters - start), start = start_interpolating_iters
    ==================================  ============================================================

    ``it`` is the number of updates since training began, not since the stage began, as in
    TorchRec's ``torchrec.optim.warmup``. The cosine is that of Loshchilov and Hutter 2017, "SGDR:
    stochastic gradient descent with warm restarts", equation 5. TorchRec fails for the inverse root
    at 0, and gives complex numbers for a polynomial past ``decay_iters``; this class does neither.

    Attributes:
        policy: Name of a formula above.
        max_iters: Last iteration of the stage.
        value: Parameter of the formula.
        lr_scale: Factor of the formula's result.
        decay_iters: Parameter of "poly" and "step"; None: ``max_iters``, or 1 for "step".
        sgdr_period: Iterations between restarts of the cosine.
        start_interpolating_iters: Iteration at which "interpolate" is at ``value``.
        end_value: Factor of "interpolate" in iteration ``max_iters``.

    Raises:
        ValueError: An unknown policy, or a number outside its range, or "interpolate" without
            ``start_interpolating_iters`` below ``max_iters`` and an ``end_value``.
    """

    policy: _Policy = "linear"
    max_iters: int = 1
    value: float = 1.0
    lr_scale: float = 1.0
    decay_iters: int | None = None
    sgdr_period: int = 1
    start_interpolating_iters: int | None = None
    end_value: float | None = None

    def __post_init__(self) -> None:
        checks.one_of(self, "policy", get_args(_Policy))
        checks.count(self, "max_iters", "sgdr_period")
        checks.non_negative(self, "value", "lr_scale")
        if self.decay_iters is not None:
            checks.count(self, "decay_iters")
        if self.policy == "interpolate":
            self._interpolation()

    def multiplier(self, step: Int[Array, ""]) -> Float[Array, ""]:
        """Return the factor of the learning rate in iteration ``step``."""
        return self.lr_scale * self._policy_multiplier(jnp.asarray(step))

    def _policy_multiplier(self, step: Int[Array, ""]) -> Float[Array, ""]:
        iteration = step.astype(jnp.float32)
        value = jnp.float32(self.value)
        decay_iters = self.decay_iters or (1 if self.policy == "step" else self.max_iters)
        match self.policy:
            case "none":
                return jnp.float32(1)
            case "linear":
                return value + (1 - value) * (iteration / self.max_iters)
            case "constant":
                return value
            case "poly":
                return jnp.maximum(0, 1 - iteration / decay_iters) ** value
            case "step":
                return value ** (step // decay_iters).astype(jnp.float32)
            case "inv_sqrt":
                return 1 / jnp.sqrt(jnp.maximum(iteration, 1))
            case "cosine_annealing_warm_restarts":
                phase = (step % self.sgdr_period).astype(jnp.float32) / self.sgdr_period
                return value + (1 - value) * 0.5 * (1 + jnp.cos(jnp.pi * phase))
            case "interpolate":
                start, end_value = self._interpolation()
                share = (iteration - start) / (self.max_iters - start)
                return value + (end_value - value) * share

    def _interpolation(self) -> tuple[int, float]:
        """Return the first iteration and the last factor of "interpolate", checked."""
        start, end_value = self.start_interpolating_iters, self.end_value
        if start is None or end_value is None:
            raise ValueError(
                "WarmupStage: the policy 'interpolate' needs start_interpolating_iters and "
                f"end_value, got {start} and {end_value}"
            )
        checks.non_negative(self, "start_interpolating_iters", "end_value")
        if start >= self.max_iters:
            raise ValueError(
                "WarmupStage: start_interpolating_iters must be below max_iters, got "
                f"{start} and {self.max_iters}"
            )
        return start, end_value


@dataclasses.dataclass(frozen=True)
class warmup:
    """A learning rate that passes through stages: a schedule for row optimizers and for optax.

    Iteration ``it``, the number of updates made before (0 at the first), belongs to the first stage
    with ``it <= max_iters``. After the last stage the rate is ``learning_rate``. TorchRec's
    ``WarmupOptimizer(optimizer, stages, lr=learning_rate)``.

    Call it with a step. Equal schedules compare equal, and so do row optimizers made from them.

    Args:
        learning_rate: The rate that the stages scale.
        stages: Each `WarmupStage` has a larger ``max_iters`` than the one before.

    Raises:
        ValueError: The rate is below zero, a stage is not a `WarmupStage`, or stages are out of
            order.

    Example:
        >>> import optax
        >>> import jaxrec.optim
        >>> rate = jaxrec.optim.warmup(
        ...     0.5,
        ...     stages=(
        ...         jaxrec.optim.WarmupStage("linear", max_iters=4, value=0.0),
        ...         jaxrec.optim.WarmupStage("constant", max_iters=6, value=0.5),
        ...     ),
        ... )
        >>> [float(rate(step)) for step in range(8)]
        [0.0, 0.125, 0.25, 0.375, 0.5, 0.25, 0.25, 0.5]
        >>> for_tables = jaxrec.optim.rowwise_adagrad(learning_rate=rate)
        >>> for_the_rest = optax.adam(rate)
    """

    learning_rate: float
    stages: tuple[WarmupStage, ...]

    def __post_init__(self) -> None:
        checks.non_negative(self, "learning_rate")
        object.__setattr__(self, "stages", tuple(self.stages))
        last = 0
        for i, stage in enumerate(self.stages):
            if not isinstance(stage, WarmupStage):
                raise ValueError(f"warmup: stage {i} must be a WarmupStage, got {stage!r}")
            if stage.max_iters <= last:
                raise ValueError(
                    f"warmup: max_iters must grow from stage to stage, got {stage.max_iters} in "
                    f"stage {i} after {last}"
                )
            last = stage.max_iters

    def __call__(self, step: Int[Array, ""] | int) -> Float[Array, ""]:
        """Return the learning rate of iteration ``step``: a float32 scalar. Safe under jit."""
        step = jnp.asarray(step)
        # Computing all stages and picking one is cheaper than a branch: each is a single number.
        ends = np.asarray([stage.max_iters for stage in self.stages], np.int32)
        stage = jnp.sum(step > ends)
        multipliers = [stage.multiplier(step) for stage in self.stages] + [jnp.float32(1)]
        return self.learning_rate * jnp.stack(multipliers)[stage]
