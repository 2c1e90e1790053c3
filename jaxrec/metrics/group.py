"""Groups of metrics for several tasks, and merges of states over devices and processes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Shaped

from jaxrec.metrics.domain import as_numbers
from jaxrec.metrics.metric import AnyArray, Metric

GroupState: TypeAlias = dict[str, Any]
"""State of each metric of a `MetricGroup`, by the metric's name; a pytree."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """Names of one task's arrays among a model's outputs.

    Attributes:
        name: Name of the task in reports.
        prediction: Name of the predictions, ``[batch]`` or ``[batch, 1]``; for a multi-class metric
            ``[batch, classes]``.
        label: Name of the labels, ``[batch]`` or ``[batch, 1]``.
        weight: Name of the weights, ``[batch]`` or ``[batch, 1]``; None: all 1.
    """

    name: str
    prediction: str
    label: str
    weight: str | None = None


@dataclasses.dataclass(frozen=True)
class MetricGroup:
    """Metrics of several tasks: one state, one update, one flat report.

    Attributes:
        tasks: The tasks, in the order of the metrics' task axis.
        metrics: Metrics by name. The ``tasks`` of a metric is the number of its tasks. If two
            metrics report a value of the same name, the second gets the metric's name in front.
        tasks_of: Names of a metric's tasks, by the name of the metric. A metric that is not here is
            computed for all tasks. The tasks of one metric need outputs of one shape.

    Raises:
        KeyError: ``tasks_of`` has an unknown metric or task.
        TypeError: ``tasks_of`` has a string in place of a sequence of names.
        ValueError: A metric has another number of tasks, or two tasks have the same name.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jaxrec.metrics import AUC, NormalizedEntropy
        >>> group = MetricGroup(
        ...     tasks=(
        ...         Task(name="click", prediction="p_click", label="click"),
        ...         Task(name="buy", prediction="p_buy", label="buy"),
        ...     ),
        ...     metrics={
        ...         "ne": NormalizedEntropy(tasks=2, window=None),
        ...         "auc": AUC(tasks=2, window=8),
        ...     },
        ... )
        >>> outputs = {
        ...     "p_click": jnp.array([0.2, 0.8]), "click": jnp.array([0.0, 1.0]),
        ...     "p_buy": jnp.array([0.5, 0.5]), "buy": jnp.array([1.0, 0.0]),
        ... }
        >>> state = jax.jit(group.update)(group.init(), outputs)
        >>> report = group.compute(state)
        >>> sorted(report)
        ['buy/lifetime_ne', 'buy/window_auc', 'click/lifetime_ne', 'click/window_auc']
        >>> report["click/window_auc"], round(report["buy/lifetime_ne"], 6)
        (1.0, 1.0)
        >>> group = MetricGroup(
        ...     tasks=group.tasks,
        ...     metrics={
        ...         "ne": NormalizedEntropy(tasks=2, window=None),
        ...         "auc": AUC(tasks=1, window=8),
        ...     },
        ...     tasks_of={"auc": ("click",)},
        ... )
        >>> sorted(group.compute(group.update(group.init(), outputs)))
        ['buy/lifetime_ne', 'click/lifetime_ne', 'click/window_auc']
    """

    tasks: tuple[Task, ...]
    metrics: Mapping[str, Metric]
    tasks_of: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        names = [task.name for task in self.tasks]
        if len(set(names)) != len(names) or not names:
            raise ValueError(f"tasks need names of their own, one at least; got {names}")
        for metric_name, chosen in self.tasks_of.items():
            if metric_name not in self.metrics:
                raise KeyError(
                    f"tasks_of names the metric {metric_name!r}; there are {sorted(self.metrics)}"
                )
            if isinstance(chosen, str):
                raise TypeError(
                    f"tasks_of[{metric_name!r}] must be a sequence of task names, such as "
                    f"({chosen!r},), got a string"
                )
            if missing := [name for name in chosen if name not in names]:
                raise KeyError(
                    f"tasks_of[{metric_name!r}] names the task {missing[0]!r}; there are {names}"
                )
            if len(set(chosen)) != len(chosen) or not chosen:
                raise ValueError(
                    f"tasks_of[{metric_name!r}] must name one task or more, each once; got "
                    f"{list(chosen)}"
                )
        for name, metric in self.metrics.items():
            if metric.tasks != len(tasks := self._tasks(name)):
                raise ValueError(
                    f"metric {name!r} has tasks={metric.tasks}, but it is computed for "
                    f"{len(tasks)}: {[task.name for task in tasks]}; give it "
                    f"tasks={len(tasks)}, or name its tasks in tasks_of"
                )

    def init(self) -> GroupState:
        """Return the state before any sample."""
        return {name: metric.init() for name, metric in self.metrics.items()}

    def update(
        self, state: GroupState, outputs: Mapping[str, Shaped[AnyArray, "..."]]
    ) -> GroupState:
        """Add a batch to the state; call it in the compiled step.

        Args:
            state: State before the batch.
            outputs: Arrays by name: those of the tasks, and further inputs of metrics such as
                sessions and groups.

        Raises:
            TypeError, ValueError: An output is missing, tasks have outputs of different shapes, or
                a metric refuses one (`Metric.update`).
        """
        updated: GroupState = {}
        columns: dict[tuple[Task, ...], tuple[Array, Array, Array]] = {}
        for name, metric in self.metrics.items():
            tasks = self._tasks(name)
            # Most metrics have the same tasks: stack their columns once.
            if tasks not in columns:
                columns[tasks] = self._columns(outputs, tasks)
            inputs = {key: outputs[key] for key in metric.required if key in outputs}
            updated[name] = metric.update(state[name], *columns[tasks], **inputs)
        return updated

    def merge(self, state: GroupState, other: GroupState) -> GroupState:
        """Merge two states: the result has the samples of both."""
        return {
            name: metric.merge(state[name], other[name]) for name, metric in self.metrics.items()
        }

    def compute(self, state: GroupState) -> dict[str, float]:
        """Return the values by ``task/value``, such as "click/window_auc"; wait for the device.

        A value of several numbers becomes ``task/value_0``, ``task/value_1``, ...
        """
        report: dict[str, float] = {}
        # One transfer for all metrics: each transfer has a latency of its own.
        state = jax.device_get(state)
        for metric_name, metric in self.metrics.items():
            for value_name, values in metric.compute(state[metric_name]).items():
                for task, value in zip(self._tasks(metric_name), values, strict=True):
                    for suffix, number in _numbers(value):
                        key = f"{task.name}/{value_name}{suffix}"
                        # Two metrics may report the same name, such as "window_ne" of two windows.
                        if key in report:
                            key = f"{task.name}/{metric_name}/{value_name}{suffix}"
                        report[key] = number
        return report

    def _tasks(self, metric: str) -> tuple[Task, ...]:
        """Return the tasks of a metric, in the order of its task axis."""
        if metric not in self.tasks_of:
            return self.tasks
        by_name = {task.name: task for task in self.tasks}
        return tuple(by_name[name] for name in self.tasks_of[metric])

    def _columns(
        self, outputs: Mapping[str, Shaped[AnyArray, "..."]], tasks: tuple[Task, ...]
    ) -> tuple[Array, Array, Array]:
        """Return predictions, labels and weights of tasks, ``[tasks, batch, ...]``."""
        predictions = self._stacked(outputs, [(t.name, t.prediction) for t in tasks])
        labels = self._stacked(outputs, [(t.name, t.label) for t in tasks])
        # A task without weights has None for their name.
        ones = {None: jnp.ones(labels.shape[1:], jnp.float32)}
        weights = self._stacked({**outputs, **ones}, [(t.name, t.weight) for t in tasks], labels)
        return predictions, labels, weights

    def _stacked(
        self,
        outputs: Mapping[Any, Shaped[AnyArray, "..."]],
        names: list[tuple[str, Any]],
        like: Shaped[Array, "tasks ..."] | None = None,
    ) -> Shaped[Array, "tasks ..."]:
        """Stack one output for each task, ``[tasks, ...]``.

        ``names`` has the name of each task and the name of its output.
        """
        columns = []
        for task, name in names:
            if name not in outputs:
                there = ", ".join(sorted(x for x in outputs if x is not None))
                raise ValueError(f"task {task!r} needs the output {name!r}; there are {there}")
            output = jnp.asarray(as_numbers(f"task {task!r}", repr(name), outputs[name]))
            columns.append(output[:, 0] if output.ndim == 2 and output.shape[1] == 1 else output)
            shape = columns[0].shape if like is None else like.shape[1:]
            if columns[-1].shape != shape:
                raise ValueError(
                    f"task {task!r} has the output {name!r} of {columns[-1].shape}, but others are "
                    f"of {shape}; metrics of one group take outputs of one shape"
                )
        return jnp.stack(columns)


def _numbers(value: np.ndarray | np.floating) -> list[tuple[str, float]]:
    if np.ndim(value) == 0:
        return [("", float(value))]
    return [(f"_{i}", float(number)) for i, number in enumerate(np.ravel(value))]


def merge_all(metric: Metric | MetricGroup, states: Any) -> Any:
    """Merge the states of several devices or processes; the result has the samples of all.

    Args:
        metric: Metric of the states.
        states: Stacked states. Each array has one more axis in front, of devices or processes, as
            `jax.lax.all_gather` and ``multihost_utils.process_allgather`` return it.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jaxrec.metrics import ClickThroughRate
        >>> metric = ClickThroughRate(window=8)
        >>> clicks = jnp.array([[0.0, 1.0], [1.0, 1.0]])
        >>> states = jax.vmap(lambda y: metric.update(metric.init(), y, y))(clicks)
        >>> metric.compute(merge_all(metric, states))["window_ctr"].tolist()
        [0.75]
    """
    # A scan compiles one merge, whatever the number of devices.
    first = jax.tree.map(lambda x: jnp.asarray(x[0]), states)
    others = jax.tree.map(lambda x: jnp.asarray(x[1:]), states)
    return jax.lax.scan(lambda a, b: (metric.merge(a, b), None), first, others)[0]


def merge_over_axis(metric: Metric | MetricGroup, state: Any, axis_name: str) -> Any:
    """Merge the states of all devices inside of `jax.shard_map`.

    Args:
        metric: Metric of the state.
        state: State of this device.
        axis_name: Mesh axis along which the devices have different samples.
    """
    # "invarying" tells shard_map that all devices get the same result, so that it may be returned
    # as replicated.
    gathered = jax.tree.map(lambda x: jax.lax.all_gather(x, axis_name, to="invarying"), state)
    return merge_all(metric, gathered)


def merge_over_processes(metric: Metric | MetricGroup, state: Any) -> Any:
    """Merge the states of all processes of a `jax.distributed` run; every process must call it.

    Use it if each process keeps a state of its own samples. The state of a step over a global mesh
    has the samples of all processes already, and must not be merged.
    """
    if jax.process_count() == 1:
        return state
    from jax.experimental import multihost_utils

    return merge_all(metric, multihost_utils.process_allgather(state))
