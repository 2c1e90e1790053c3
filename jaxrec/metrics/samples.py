"""Windows of the last samples, for metrics that are not functions of sums over samples."""

from __future__ import annotations

import abc
import dataclasses
from typing import ClassVar, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxrec.metrics.metric import Batch, Metric, Values

# Predictions, labels, weights and groups.
Columns: TypeAlias = tuple[Array, Array, Array, Array | None]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class SampleWindow:
    """A ring buffer of the last samples of each task, on the device.

    Attributes:
        predictions, labels, weights: ``[tasks, window]`` float32.
        groups: ``[tasks, window]`` int32, or None.
        next: ``[tasks]`` int32, position of the next sample.
        filled: ``[tasks]`` int32, number of samples in the ring.
    """

    predictions: Float[Array, "tasks window"]
    labels: Float[Array, "tasks window"]
    weights: Float[Array, "tasks window"]
    groups: Int[Array, "tasks window"] | None
    next: Int[Array, " tasks"]
    filled: Int[Array, " tasks"]


@dataclasses.dataclass(frozen=True, eq=False)
class Samples:
    """Samples of one task on the host, ``[samples]``."""

    predictions: Float[np.ndarray, " samples"]
    labels: Float[np.ndarray, " samples"]
    weights: Float[np.ndarray, " samples"]
    groups: Int[np.ndarray, " samples"] | None = None

    def by_group(self) -> list[Samples]:
        """Return the samples of each group that has some."""
        assert self.groups is not None
        order = np.argsort(self.groups, kind="stable")
        groups = self.groups[order]
        cuts = np.flatnonzero(groups[1:] != groups[:-1]) + 1
        columns = (self.predictions[order], self.labels[order], self.weights[order])
        parts = [np.split(column, cuts) for column in columns]
        return [Samples(*part) for part in zip(*parts, strict=True)] if len(groups) else []


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleMetric(Metric[SampleWindow]):
    """A metric of the last samples, computed exactly on the host.

    The state takes 12 bytes for each task and sample of the window on the device, 16 with groups.

    With groups, such as users, it also reports two means over groups: ``window_grouped_...`` weighs
    all groups the same, ``window_weighted_grouped_...`` by the total weight of their samples. A
    group has its samples of all batches of the window.

    Attributes:
        window: Number of samples of each task to keep.
        groups: Name of the group numbers among the inputs of `update`, ``[batch]`` or
            ``[tasks, batch]`` int32; None: no groups.
    """

    window: int = 1_000_000
    groups: str | None = None

    name: ClassVar[str]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window < 1:
            raise ValueError(f"{type(self).__name__}: window={self.window} must be 1 or more")

    @property
    def required(self) -> tuple[str, ...]:
        return () if self.groups is None else (self.groups,)

    @abc.abstractmethod
    def value(self, samples: Samples) -> float:
        """Compute the value of samples of one task, or of one group of it."""

    @abc.abstractmethod
    def counts(self, samples: Samples) -> bool:
        """Return whether the means over groups count a group with these samples."""

    def init(self) -> SampleWindow:
        # Separate arrays: a step that donates the state must not get one buffer twice.
        shape = (self.tasks, self.window)
        return SampleWindow(
            predictions=jnp.zeros(shape, jnp.float32),
            labels=jnp.zeros(shape, jnp.float32),
            weights=jnp.zeros(shape, jnp.float32),
            groups=None if self.groups is None else jnp.zeros(shape, jnp.int32),
            next=jnp.zeros(self.tasks, jnp.int32),
            filled=jnp.zeros(self.tasks, jnp.int32),
        )

    def add(self, state: SampleWindow, batch: Batch) -> SampleWindow:
        counts = jnp.ones_like(batch.real) if self.compat else batch.real
        groups = None if self.groups is None else batch.inputs[self.groups].astype(jnp.int32)
        # A broken sample makes the values NaN until it has left the window.
        predictions = jnp.where(batch.broken, jnp.nan, batch.predictions)
        new = (predictions, batch.labels, batch.weights, groups)
        return self._append(state, new, counts)

    def merge(self, state: SampleWindow, other: SampleWindow) -> SampleWindow:
        """Merge two states; if the window overflows, keep the newest samples, half from each.

        A state that fills less than half of the window keeps all of its samples.
        """
        # Each state gets half of the window, and the rest of the other half if that is not full.
        half = self.window // 2
        of_state = jnp.maximum(self.window - half, self.window - other.filled)
        of_other = jnp.maximum(half, self.window - state.filled)
        merged = self._append(self.init(), *_newest(state, of_state))
        return self._append(merged, *_newest(other, of_other))

    def compute(self, state: SampleWindow) -> Values:
        window = jax.device_get(state)
        tasks = [self._values(self._samples(window, task)) for task in range(self.tasks)]
        return {name: np.array([values[name] for values in tasks]) for name in tasks[0]}

    def weight(self, state: SampleWindow) -> Float[np.ndarray, " tasks"]:
        """Return the total weight of the samples in the window."""
        return np.asarray(jax.device_get(state.weights), np.float64).sum(axis=1)

    def _values(self, samples: Samples) -> dict[str, float]:
        """Return the values of one task by name."""
        broken = np.isnan(samples.predictions).any()
        values = {f"window_{self.name}": np.nan if broken else self.value(samples)}
        if self.groups is not None:
            groups = [] if broken else [x for x in samples.by_group() if self.counts(x)]
            of_groups = np.array([self.value(group) for group in groups])
            weights = np.array([group.weights.sum(dtype=np.float64) for group in groups])
            for name, by in (("grouped", np.ones(len(groups))), ("weighted_grouped", weights)):
                mean = (by * of_groups).sum() / by.sum() if by.sum() > 0 else np.nan
                values[f"window_{name}_{self.name}"] = float(mean)
        return values

    def _append(
        self,
        state: SampleWindow,
        new: Columns,
        counts: Bool[Array, "tasks batch"],
    ) -> SampleWindow:
        """Add the ``new`` samples that count, ``[tasks, batch]``, in place of the oldest."""
        number = jnp.cumsum(counts, axis=1, dtype=jnp.int32)
        total = number[:, -1:]
        # A batch larger than the window: only its last samples fit, and two samples must not go to
        # one position, where the order of writes is undefined.
        counts = counts & (number > total - self.window)
        # Samples that do not count go to a position behind the last, which mode="drop" leaves out:
        # shapes stay static, whatever the number of samples.
        slot = jnp.where(counts, (state.next[:, None] + number - 1) % self.window, self.window)
        task = jnp.arange(self.tasks)[:, None]

        def put(ring: Array, values: Array) -> Array:
            return ring.at[task, slot].set(values, mode="drop")

        predictions, labels, weights, groups = new
        return SampleWindow(
            put(state.predictions, predictions),
            put(state.labels, labels),
            put(state.weights, weights),
            None if state.groups is None or groups is None else put(state.groups, groups),
            next=(state.next + total[:, 0]) % self.window,
            filled=jnp.minimum(state.filled + total[:, 0], self.window),
        )

    def _samples(self, window: SampleWindow, task: int) -> Samples:
        filled, following = int(window.filled[task]), int(window.next[task])
        # From the oldest sample to the newest: under `compat` ties are ranked by this order.
        newest_last = (following - filled + np.arange(filled)) % self.window
        groups = None if window.groups is None else np.asarray(window.groups)[task, newest_last]
        return Samples(
            np.asarray(window.predictions)[task, newest_last],
            np.asarray(window.labels)[task, newest_last],
            np.asarray(window.weights)[task, newest_last],
            groups,
        )


def _newest(
    window: SampleWindow, number: Int[Array, " tasks"]
) -> tuple[Columns, Bool[Array, "tasks window"]]:
    """Return a window's samples, oldest first, and a mask of its ``number`` newest."""
    size = window.predictions.shape[1]
    order = (window.next[:, None] + jnp.arange(size)[None]) % size

    def ordered(x: Array) -> Array:
        return jnp.take_along_axis(x, order, axis=1)

    groups = None if window.groups is None else ordered(window.groups)
    columns = (ordered(window.predictions), ordered(window.labels), ordered(window.weights), groups)
    number = jnp.minimum(window.filled, number)
    return columns, jnp.arange(size)[None] >= size - number[:, None]
