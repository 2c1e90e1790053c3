"""Row optimizers that keep something beside the rows of another one."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxrec.optim.base import RowOptimizer


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
            raise ValueError(f"{name}: give the learning rate to the optimizer that it wraps")

        def set_field(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)

        # Callers bound gradients before `update`, and ask this optimizer for the bounds.
        for bound in ("clip_value", "clip_norm"):
            if getattr(inner, bound) is not None:
                set_field(bound, getattr(inner, bound))
        set_field("optimizer", dataclasses.replace(inner, clip_value=None, clip_norm=None))
        set_field("learning_rate", inner.learning_rate)
        set_field("stochastic_rounding", inner.stochastic_rounding)
        set_field("state_dtype", inner.state_dtype)
        super().__post_init__()

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
