"""Precision of samples that have several labels each."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxrec.metrics.domain import Domain
from jaxrec.metrics.metric import Batch, SumMetric, Sums, Values, ratio

# Codes of more bits are not exact in float32.
MAX_LABELS = 24


def label_codes(labels: Bool[Array | np.ndarray, "*batch labels"]) -> Int[Array, "*batch"]:
    """Encode the labels of each sample as one integer, label 0 in the lowest bit.

    Args:
        labels: Whether a sample has each of the labels, 24 at most.

    Raises:
        ValueError: There are more labels.

    Example:
        >>> import jax.numpy as jnp
        >>> label_codes(jnp.array([[True, False, True], [False, True, False]])).tolist()
        [5, 2]
    """
    if labels.shape[-1] > MAX_LABELS:
        raise ValueError(
            f"label_codes takes up to {MAX_LABELS} labels, got {labels.shape[-1]}; use "
            "several metrics for parts of them"
        )
    return jnp.asarray(labels, jnp.int32) @ (1 << jnp.arange(labels.shape[-1]))


@dataclasses.dataclass(frozen=True, kw_only=True)
class MultiLabelPrecision(SumMetric):
    """The precision of each label (``multi_label_precision``).

    ``[tasks, num_labels]``. Predictions and labels are integers, as `label_codes` makes them: bit
    ``i`` says whether the sample has label ``i``. A label that no prediction has is undefined.

    ``compat="torchrec"`` reports 0 there, and ignores the bits of further labels.

    Attributes:
        num_labels: From 1 to 24.

    Example:
        >>> import jax.numpy as jnp
        >>> metric = MultiLabelPrecision(num_labels=2, window=None)
        >>> scores = jnp.array([[0.9, 0.7], [0.8, 0.1]])
        >>> truth = jnp.array([[True, True], [False, True]])
        >>> state = metric.update(metric.init(), label_codes(scores > 0.5), label_codes(truth))
        >>> metric.compute(state)["lifetime_multi_label_precision"].tolist()
        [[0.5, 1.0]]
    """

    num_labels: int

    name: ClassVar[str] = "multi_label_precision"
    torchrec_undefined: ClassVar[float] = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.num_labels <= MAX_LABELS:
            raise ValueError(
                f"MultiLabelPrecision: num_labels={self.num_labels} must be from 1 to {MAX_LABELS}"
            )

    @property
    def domains(self) -> tuple[Domain | None, Domain | None]:
        labels = MAX_LABELS if self.compat else self.num_labels
        code = Domain(
            low=0,
            high=2**labels - 1,
            whole=True,
            remedy="encode whether each label applies by label_codes",
        )
        return code, code

    def sums(self, batch: Batch) -> dict[str, Float[Array, "tasks ..."]]:
        def bits(codes: Float[Array, "tasks batch"]) -> Float[Array, "tasks batch labels"]:
            masks = 1 << jnp.arange(self.num_labels)[None, None]
            return ((codes.astype(jnp.int32)[..., None] & masks) > 0).astype(jnp.float32)

        predicted = batch.weights[..., None] * bits(batch.predictions)
        labels = bits(batch.labels)
        return {
            "true_positives": (predicted * labels).sum(axis=1),
            "false_positives": (predicted * (1 - labels)).sum(axis=1),
        }

    def values(self, sums: Sums) -> Values:
        predicted = sums["true_positives"] + sums["false_positives"]
        return {self.name: ratio(sums["true_positives"], predicted)}
