"""The interface of metrics (`Metric`), and metrics that are functions of sums over samples.

To write a metric of sums, subclass `SumMetric` with ``sums``, which runs in the compiled step, and
``values``, which runs on the host.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Generic, Literal, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int, Shaped

from jaxrec.metrics.domain import NUMBER, WEIGHT, AnyArray, Domains, as_numbers, check_domain
from jaxrec.metrics.sums import BatchWindow, Total

Compat: TypeAlias = Literal["torchrec"] | None
Sums: TypeAlias = Mapping[str, Float[np.ndarray, "tasks ..."]]
Values: TypeAlias = dict[str, Float[np.ndarray, "tasks ..."]]
State = TypeVar("State")

# TorchRec clips probabilities to this and to 1 minus this.
ETA = 1e-12


@dataclasses.dataclass(frozen=True, eq=False)
class Batch:
    """The checked samples of one step, in float32.

    Attributes:
        predictions: ``[tasks, batch]``, or ``[tasks, batch, classes]``.
        labels: ``[tasks, batch]``.
        weights: ``[tasks, batch]``.
        real: ``[tasks, batch]``, whether a sample's weight is not 0. Other samples are padding.
        inputs: Further inputs of the metric, ``[tasks, batch]``, by name.
        broken: ``[tasks, batch]``, whether a real sample has a prediction, label or weight that is
            NaN or outside its domain. It makes the values of its task NaN.
    """

    predictions: Float[Array, "tasks batch ..."]
    labels: Float[Array, "tasks batch"]
    weights: Float[Array, "tasks batch"]
    real: Bool[Array, "tasks batch"]
    inputs: Mapping[str, Shaped[Array, "..."]]
    broken: Bool[Array, "tasks batch"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Metric(abc.ABC, Generic[State]):
    """A metric: its options, and pure functions on its state.

    The state is a pytree of arrays of fixed shapes. `init` makes the state, `update` adds a batch
    in the compiled step, `merge` joins the states of two devices or processes that had different
    samples, and `compute` waits for the device and returns the values in float64.

    A sample of weight 0 is padding: metrics ignore its prediction and label, and it takes no place
    in a window. Under ``compat="torchrec"`` it counts where it counts in TorchRec.

    A number outside of a metric's domain is an error: a logit instead of a probability, a label of
    -1, a negative weight. `update` raises the error if it can read the numbers. In a compiled
    function it cannot; there such a number makes the values of its task NaN. A prediction, label or
    weight of NaN always does.

    Attributes:
        tasks: Number of tasks. Predictions and labels are ``[tasks, batch]``, or ``[batch]`` with
            one task.
        compat: None: the value by the definition. ``"torchrec"``: TorchRec 1.8's value where it
            differs; each metric says where.
    """

    tasks: int = 1
    compat: Compat = None

    def __post_init__(self) -> None:
        if self.tasks < 1:
            raise ValueError(f"{type(self).__name__}: tasks={self.tasks} must be 1 or more")
        if self.compat not in (None, "torchrec"):
            raise ValueError(
                f"{type(self).__name__}: compat={self.compat!r} must be None or 'torchrec'"
            )

    @property
    def required(self) -> tuple[str, ...]:
        """Names of the arrays that `update` needs besides predictions, labels and weights."""
        return ()

    @property
    def whole(self) -> tuple[str, ...]:
        """Names of the `required` arrays that must be integers, such as session numbers."""
        return self.required

    @property
    def domains(self) -> Domains:
        """Domains of predictions and labels; None if the metric does not read them."""
        return NUMBER, NUMBER

    @property
    def trailing(self) -> tuple[int, ...]:
        """Sizes of the predictions' axes after the batch, such as classes."""
        return ()

    @abc.abstractmethod
    def init(self) -> State:
        """Return the state before any sample."""

    def update(
        self,
        state: State,
        predictions: Shaped[AnyArray, "..."],
        labels: Shaped[AnyArray, "..."],
        weights: Shaped[AnyArray, "..."] | None = None,
        **inputs: Shaped[AnyArray, "..."],
    ) -> State:
        """Add a batch to the state; call it in the compiled step.

        Args:
            state: State before the batch.
            predictions: ``[tasks, batch]`` float; probabilities for a metric of clicks.
            labels: ``[tasks, batch]``.
            weights: ``[tasks, batch]`` or ``[batch]``, 0 or above; None: all 1.
            **inputs: The `required` arrays of the metric by name, ``[tasks, batch]`` or
                ``[batch]``.

        Raises:
            TypeError: An array does not hold real numbers, or sessions or groups are not integers.
            ValueError: Shapes do not fit, an input is missing, or (outside of compiled functions) a
                number is outside its domain.
        """
        batch = self.batch(predictions, labels, weights, inputs)
        return self.add(state, batch) if batch.real.shape[1] else state

    @abc.abstractmethod
    def add(self, state: State, batch: Batch) -> State:
        """Add a checked batch of one sample or more to the state."""

    @abc.abstractmethod
    def merge(self, state: State, other: State) -> State:
        """Merge two states: the result has the samples of both."""

    @abc.abstractmethod
    def compute(self, state: State) -> Values:
        """Return the values ``[tasks, ...]`` by name, NaN where undefined; wait for the device."""

    def batch(
        self,
        predictions: Shaped[AnyArray, "..."],
        labels: Shaped[AnyArray, "..."],
        weights: Shaped[AnyArray, "..."] | None,
        inputs: Mapping[str, Shaped[AnyArray, "..."]],
    ) -> Batch:
        """Check a batch, and set the predictions and labels of padding to 0."""
        who = type(self).__name__
        predictions = as_numbers(who, "predictions", predictions)
        labels = as_numbers(who, "labels", labels)
        # Most models have one task: the task axis is optional there.
        if self.tasks == 1 and labels.ndim == 1:
            labels, predictions = labels[None], predictions[None]
        if (
            labels.ndim != 2
            or len(labels) != self.tasks
            or predictions.shape != labels.shape + self.trailing
        ):
            classes = "".join(f", {size}" for size in self.trailing)
            raise ValueError(
                f"{who} of {self.tasks} task(s) takes labels of [{self.tasks}, batch] and "
                f"predictions of [{self.tasks}, batch{classes}]; got {labels.shape} and "
                f"{predictions.shape}"
            )
        # NumPy: `jnp.ones` would be an operation of its own on the device, in eager code.
        if weights is None:
            weights = np.ones(labels.shape, np.float32)
        weights = self._per_sample("weights", as_numbers(who, "weights", weights), labels.shape)
        missing = [name for name in self.required if name not in inputs]
        if missing:
            raise ValueError(f"{who} needs {missing[0]!r}; give it to update by that name")
        extra = {}
        for name in self.required:
            array = as_numbers(who, name, inputs[name])
            if name in self.whole and jnp.issubdtype(array.dtype, jnp.floating):
                raise TypeError(f"{who}: {name} must be integers, got an array of {array.dtype}")
            extra[name] = self._per_sample(name, _fits(name, array), labels.shape)

        of_predictions, of_labels = self.domains
        # Checked before the conversion to float32, which rounds: the error must show the number
        # that the user gave.
        check_domain(who, "weights", weights, WEIGHT)
        if of_predictions is not None:
            check_domain(who, "predictions", predictions, of_predictions, weights, nan=True)
        if of_labels is not None:
            check_domain(who, "labels", labels, of_labels, weights, nan=True)

        predictions, labels, weights = (
            _on_every_device(jnp.asarray(x, jnp.float32)) for x in (predictions, labels, weights)
        )
        arrays = {name: _on_every_device(jnp.asarray(x)) for name, x in extra.items()}
        real = weights != 0
        # A sample's weight counts for all its classes.
        shown = real.reshape(real.shape + (1,) * len(self.trailing))
        broken = jnp.asarray(WEIGHT.excludes(weights))
        if of_labels is not None:
            broken |= real & of_labels.excludes(labels)
        if of_predictions is not None:
            outside = shown & of_predictions.excludes(predictions)
            broken |= outside.any(axis=tuple(range(2, outside.ndim)))
        # Padding may hold NaN, and NaN times a weight of 0 is NaN. TorchRec multiplies all the
        # same, so that its NaN is right under compat.
        if self.compat is None:
            labels = jnp.where(real, labels, 0)
            predictions = jnp.where(shown, predictions, 0)
        return Batch(predictions, labels, weights, real, arrays, broken)

    def _per_sample(
        self, name: str, array: Shaped[AnyArray, "..."], shape: tuple[int, ...]
    ) -> Shaped[AnyArray, "tasks batch"]:
        if array.shape not in (shape, shape[1:]):
            raise ValueError(
                f"{type(self).__name__}: {name} must be {shape} or {shape[1:]}, got {array.shape}"
            )
        stack = np if isinstance(array, np.ndarray) else jnp
        return stack.broadcast_to(array if array.ndim == 2 else array[None], shape)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class SumState:
    """The state of a `SumMetric`: sums over all samples, by name, and over the last batches.

    ``window`` is None if the metric has no window.
    """

    lifetime: dict[str, Total]
    window: BatchWindow | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class SumMetric(Metric[SumState]):
    """A metric that is a function of sums over samples.

    It reports ``lifetime_`` values over all samples, and ``window_`` values over the last batches.

    Attributes:
        window: Largest number of samples of the window. The window holds the newest batches that
            fit, and always the newest one. None: no window.
        max_batches: Largest number of batches of the window; each takes the memory of one batch's
            sums.
        skip_empty: Whether a task's window leaves out batches whose weights are all 0 for the task
            (TorchRec's ``should_validate_update``). None: True, or False under
            ``compat="torchrec"``.
        undefined: Value to report where the metric is undefined. None: NaN, or TorchRec's value
            under ``compat="torchrec"``.
    """

    window: int | None = 10_000_000
    max_batches: int = 1000
    skip_empty: bool | None = None
    undefined: float | None = None

    name: ClassVar[str]
    torchrec_undefined: ClassVar[float] = float("nan")
    # Sums that count samples. A broken sample makes the other sums NaN, but it is still counted.
    counters: ClassVar[tuple[str, ...]] = ("outside", "examples")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_batches < 1 or (self.window is not None and self.window < 1):
            raise ValueError(
                f"{type(self).__name__}: window={self.window} and max_batches={self.max_batches} "
                "must be 1 or more"
            )

    @abc.abstractmethod
    def sums(self, batch: Batch) -> dict[str, Float[Array, "tasks ..."]]:
        """Return the sums of a batch that `values` needs, ``[tasks, ...]`` by name."""

    @abc.abstractmethod
    def values(self, sums: Sums) -> Values:
        """Compute the values, ``[tasks, ...]`` float64 by name, from the sums."""

    def init(self) -> SumState:
        shapes = self._shapes()
        # A batch has one sample or more, so that a window of 100 samples has at most 100 batches.
        slots = 0 if self.window is None else min(self.window, self.max_batches)
        return SumState(
            {name: Total.zeros(shape) for name, shape in shapes.items()},
            BatchWindow.empty(slots, shapes, self.tasks) if slots else None,
        )

    def add(self, state: SumState, batch: Batch) -> SumState:
        broken = batch.broken.any(axis=1)
        sums = {
            name: x if name in self.counters else jnp.where(_along(broken, x), jnp.nan, x)
            for name, x in self.sums(batch).items()
        }
        # In TorchRec a batch without weight takes the place of an older one in the window.
        skip = self.compat is None if self.skip_empty is None else self.skip_empty
        counts = batch.real.any(axis=1) | (not skip)
        # `where` and no branch: whether a batch counts is known on the device alone, per task.
        lifetime = {
            name: total + jnp.where(_along(counts, sums[name]), sums[name], 0)
            for name, total in state.lifetime.items()
        }
        window = state.window
        if window is not None:
            window = window.append(sums, self._sizes(batch), counts)
        return SumState(lifetime, window)

    def merge(self, state: SumState, other: SumState) -> SumState:
        window = state.window
        if window is not None:
            assert other.window is not None
            window = window.merge(other.window)
        lifetime = {name: state.lifetime[name] + other.lifetime[name] for name in state.lifetime}
        return SumState(lifetime, window)

    def compute(self, state: SumState) -> Values:
        values = self._reported("lifetime", {n: t.on_host() for n, t in state.lifetime.items()})
        if state.window is not None:
            assert self.window is not None
            values |= self._reported("window", state.window.on_host(self.window))
        return values

    def check_groups(self, state: SumState, groups: str | None, num_groups: int) -> None:
        """Raise ValueError if samples were counted as ``outside`` of the groups."""
        if outside := state.lifetime["outside"].on_host().sum():
            raise ValueError(
                f"{outside:.0f} samples have a number of {groups!r} that is not in "
                f"[0, {num_groups}); raise num_groups, or give the samples weight 0"
            )

    def _reported(self, prefix: str, sums: Sums) -> Values:
        undefined = self.torchrec_undefined if self.compat else float("nan")
        if self.undefined is not None:
            undefined = self.undefined
        # An undefined value is NaN at first and is replaced below, so that NumPy's warning of it
        # would be noise.
        with np.errstate(divide="ignore", invalid="ignore"):
            values = self.values(sums)
        # Broken samples make sums NaN. Their NaN must be reported, and not replaced by `undefined`.
        broken = np.any(
            [np.isnan(x).reshape(self.tasks, -1).any(axis=1) for x in sums.values()], axis=0
        )
        reported = {}
        for name, value in values.items():
            value = np.where(np.isnan(value), undefined, value)
            of_task = broken.reshape(broken.shape + (1,) * (value.ndim - 1))
            reported[f"{prefix}_{name}"] = np.where(of_task, np.nan, value)
        return reported

    def _sizes(self, batch: Batch) -> Int[Array, " tasks"]:
        # TorchRec's window counts padding, too.
        if self.compat is not None:
            return jnp.full(self.tasks, batch.real.shape[1], jnp.int32)
        return batch.real.sum(axis=1, dtype=jnp.int32)

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the sums, from a batch of one sample."""
        shape = jax.ShapeDtypeStruct((self.tasks, 1), jnp.float32)
        predictions = jax.ShapeDtypeStruct((self.tasks, 1, *self.trailing), jnp.float32)
        inputs = {name: jax.ShapeDtypeStruct((self.tasks, 1), jnp.int32) for name in self.required}

        def of_one(predictions: Any, samples: Any, inputs: Any) -> dict[str, Array]:
            # `eval_shape` computes shapes alone, so that one array may serve as labels and weights.
            real = samples != 0
            return self.sums(Batch(predictions, samples, samples, real, inputs, real))

        return {n: x.shape for n, x in jax.eval_shape(of_one, predictions, shape, inputs).items()}


def _on_every_device(array: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
    """Replicate an array over the devices of a mesh with explicit axes."""
    # JAX refuses to sort and scatter samples that are sharded over explicit axes. With automatic
    # axes the spec is empty here, and XLA gathers the samples where it must.
    sharding = jax.typeof(array).sharding
    if all(axis is None for axis in sharding.spec):
        return array
    return jax.sharding.reshard(array, NamedSharding(sharding.mesh, PartitionSpec()))


def _fits(name: str, array: Shaped[AnyArray, "..."]) -> Shaped[AnyArray, "..."]:
    """Convert 64-bit integers to 32 bits; raise an error if one does not fit."""
    # JAX would drop the high bits silently, which may join different sessions.
    if isinstance(array, np.ndarray) and array.dtype.kind in "iu" and array.dtype.itemsize > 4:
        narrow = array.astype(np.int32)
        if (narrow != array).any():
            raise ValueError(
                f"{name} has {array[narrow != array][0]}, which does not fit 32 bits; number the "
                "sessions or groups of a batch anew, by np.unique(..., return_inverse=True)"
            )
        return narrow
    return array


def _along(counts: Bool[Array, " tasks"], like: Float[Array, "tasks ..."]) -> Bool[Array, "..."]:
    return counts.reshape(counts.shape + (1,) * (like.ndim - 1))


def ratio(
    numerator: Float[np.ndarray, "..."], denominator: Float[np.ndarray, "..."]
) -> Float[np.ndarray, "..."]:
    """Return the quotient; NaN where the denominator is 0 or less."""
    return np.where(denominator > 0, numerator / np.where(denominator > 0, denominator, 1), np.nan)
