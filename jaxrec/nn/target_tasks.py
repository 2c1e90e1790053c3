"""Tasks of a ranker's targets: the last norm of their states, logits, labels and losses."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, DTypeLike, Float, Int, Num

from jaxrec.nn.arithmetic import promote
from jaxrec.nn.mlp import MLP
from jaxrec.ragged.arrays import AnyArray

# Length in seconds, and number, of the units of each period of a time: hours of a day, days of a
# week.
_PERIODS = ((3600, 24), (86400, 7))


@dataclasses.dataclass(frozen=True)
class TargetTask:
    """A task: one quantity to predict for a target.

    Attributes:
        name: Name of the task.
        bit: A target is positive if its actions have this bit. 0: the task is a regression of the
            watch time.
        weight: Factor of the task's loss.

    Example:
        >>> TargetTask("click", bit=1), TargetTask("seconds", weight=0.2)
        (TargetTask(name='click', bit=1, weight=1.0), TargetTask(name='seconds', bit=0, weight=0.2))
    """

    name: str
    bit: int = 0
    weight: float = 1.0

    @property
    def is_binary(self) -> bool:
        """Whether the task's label is 0 or 1."""
        return self.bit > 0


class TargetTasks(nnx.Module):
    """Computes logits, labels and losses of several tasks of each target.

    The logits are an MLP of ``user * item``, a target's state times its item's embedding. The loss
    of a task is a weighted mean over targets: binary cross entropy, or squared error for a
    regression. From the authors' code for Zhai et al. 2024 (arXiv:2402.17152).

    Args:
        tasks: The tasks.
        dim: Columns of a state.
        hidden_sizes: Columns of the MLP's hidden layers, each with `SwishLayerNorm`.
        dtype: Type that it computes in; None: the wider of the input's and ``param_dtype``.
        param_dtype: Type of the parameters.
        rngs: Gives the random keys of first values.

    Raises:
        ValueError: ``tasks`` is empty, two tasks have one name, or a bit or weight is negative.

    Example:
        >>> import jax.numpy as jnp
        >>> targets = [TargetTask("click", bit=1), TargetTask("seconds")]
        >>> tasks = TargetTasks(targets, 8, rngs=nnx.Rngs(0))
        >>> logits = tasks(jnp.ones((3, 8)), jnp.ones((3, 8)))
        >>> labels = tasks.labels(jnp.array([0, 1, 3]), jnp.array([10, 20, 30]))
        >>> labels.tolist()
        [[0.0, 10.0], [1.0, 20.0], [1.0, 30.0]]
        >>> tasks.losses(logits, labels).shape
        (2,)
    """

    def __init__(
        self,
        tasks: Sequence[TargetTask],
        dim: int,
        *,
        hidden_sizes: Sequence[int] = (512,),
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        names = [task.name for task in tasks]
        if not tasks or len(set(names)) < len(names):
            raise ValueError(f"there is one task or more, each with a name of its own; got {names}")
        if wrong := [task for task in tasks if task.bit < 0 or task.weight < 0]:
            raise ValueError(f"a task's bit and weight are not negative; got {wrong[0]}")
        self.tasks = tuple(tasks)
        self.mlp = MLP(
            dim,
            (*hidden_sizes, len(names)),
            activation="swish_layernorm",
            activation_on_last=False,
            dtype=dtype,
            param_dtype=param_dtype,
            rngs=rngs,
        )

    def __call__(
        self, user: Float[AnyArray, "*axes dim"], item: Float[AnyArray, "*axes dim"]
    ) -> Float[Array, "*axes tasks"]:
        """Return the logits of targets (for a regression, the prediction itself).

        Args:
            user: ``[..., dim]`` states of the targets.
            item: ``[..., dim]`` embeddings of their items.
        """
        user, item = promote(None, user, item)
        return self.mlp(user * item)

    def predictions(self, logits: Float[AnyArray, "*axes tasks"]) -> Float[Array, "*axes tasks"]:
        """Return probabilities of binary tasks, and predictions of regressions."""
        logits = jnp.asarray(logits)
        return jnp.where(self._is_binary(logits.ndim), nnx.sigmoid(logits), logits)

    def labels(
        self,
        actions: Int[AnyArray, "*axes"] | None,
        watch_times: Num[AnyArray, "*axes"] | None = None,
    ) -> Float[Array, "*axes tasks"]:
        """Return the labels of targets, float32.

        Args:
            actions: ``[...]`` integers whose bits are the targets' actions; needed if a task is
                binary.
            watch_times: ``[...]`` seconds; needed if a task is a regression.

        Raises:
            ValueError: Actions or watch times are missing.
        """
        columns = []
        for task in self.tasks:
            given = actions if task.is_binary else watch_times
            if given is None:
                kind, name = (
                    ("binary", "actions") if task.is_binary else ("a regression", "watch_times")
                )
                raise ValueError(f"task {task.name!r} is {kind}, which needs {name}")
            values = jnp.asarray(given)
            columns.append((values & task.bit) > 0 if task.is_binary else values)
        return jnp.stack([column.astype(jnp.float32) for column in columns], axis=-1)

    def losses(
        self,
        logits: Float[AnyArray, "*axes tasks"],
        labels: Float[AnyArray, "*axes tasks"],
        weights: Num[AnyArray, "*axes tasks"] | None = None,
    ) -> Float[Array, " tasks"]:
        """Return the loss of each task: ``sum(w l) / max(sum(w), 1)`` times the task's weight.

        Args:
            logits: ``[..., tasks]``.
            labels: The same.
            weights: The same; None: ones. Targets of weight 0, such as padding, are not read.
        """
        if weights is None:
            weights = jnp.ones(labels.shape, jnp.float32)
        shares = self.shares(weights)
        return self.target_losses(logits, labels, shares).sum(tuple(range(labels.ndim - 1)))

    def shares(self, weights: Num[AnyArray, "*axes tasks"]) -> Float[Array, "*axes tasks"]:
        """Return each target's share in each task's loss: ``weight w / max(sum(w), 1)``."""
        weights = jnp.asarray(weights, jnp.float32)
        total = jnp.maximum(weights.sum(tuple(range(weights.ndim - 1)), keepdims=True), 1)
        return weights / total * self._of_tasks([t.weight for t in self.tasks], weights.ndim)

    def target_losses(
        self,
        logits: Float[AnyArray, "*axes tasks"],
        labels: Float[AnyArray, "*axes tasks"],
        shares: Float[AnyArray, "*axes tasks"],
    ) -> Float[Array, "*axes tasks"]:
        """Return each target's part of each task's loss, from its `shares`."""
        logits = jnp.asarray(logits, jnp.promote_types(logits.dtype, jnp.float32))
        # Padding may be NaN, which a weight of zero does not remove.
        counts = jnp.asarray(shares) > 0
        logits, labels = jnp.where(counts, logits, 0), jnp.where(counts, labels, 0)
        entropy = optax.sigmoid_binary_cross_entropy(logits, labels)
        each = jnp.where(self._is_binary(logits.ndim), entropy, jnp.square(logits - labels))
        return each * shares

    def _is_binary(self, ndim: int) -> Array:
        return self._of_tasks([task.is_binary for task in self.tasks], ndim)

    def _of_tasks(self, values: Sequence[Any], ndim: int) -> Array:
        return jnp.asarray(values).reshape((1,) * (ndim - 1) + (-1,))


class TargetNorm(nnx.Module):
    """The last norm of a target's state.

    * ``kind="l2"``: ``x / max(||x||, 1e-6)``.
    * ``kind="layer_norm"``: a layer norm.
    * ``kind="time"``: cosine and sine of the hour of the day and of the day of the week are
      appended, then a dense layer and a layer norm. An angle is ``2 * 3.14`` times the share of the
      period that passed, in whole hours or days, as in the authors' code for Zhai et al. 2024
      (arXiv:2402.17152).

    Args:
        dim: Columns.
        kind: "l2", "layer_norm" or "time".
        dtype: Type that it computes in; None: the wider of the input's and ``param_dtype``.
        param_dtype: Type of the parameters.
        rngs: Gives the random keys of the dense layer's first values.

    Raises:
        ValueError: ``kind`` is none of the three.

    Example:
        >>> import jax.numpy as jnp
        >>> norm = TargetNorm(8, "time", rngs=nnx.Rngs(0))
        >>> norm(jnp.ones((3, 8)), jnp.array([0, 3600, 86400])).shape
        (3, 8)
    """

    def __init__(
        self,
        dim: int,
        kind: Literal["l2", "layer_norm", "time"] = "layer_norm",
        *,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        if kind not in ("l2", "layer_norm", "time"):
            raise ValueError(f"kind is 'l2', 'layer_norm' or 'time', got {kind!r}")
        types: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        columns = dim + 2 * len(_PERIODS)
        self.combine = nnx.data(nnx.Linear(columns, dim, **types) if kind == "time" else None)
        self.norm = nnx.data(
            None
            if kind == "l2"
            else nnx.LayerNorm(dim, use_fast_variance=False, epsilon=1e-5, **types)
        )
        self.dtype = dtype

    def __call__(
        self, states: Float[AnyArray, "*axes dim"], times: Int[AnyArray, "*axes"] | None = None
    ) -> Float[Array, "*axes dim"]:
        """Normalise the states of targets.

        Args:
            states: ``[..., dim]``.
            times: ``[...]`` integers, the targets' times in seconds; read by ``kind="time"``.

        Raises:
            ValueError: Times are missing.
        """
        (states,) = promote(self.dtype, states)
        if self.norm is None:
            wide = states.astype(jnp.promote_types(states.dtype, jnp.float32))
            # The root's derivative at zero is infinite, so zero rows, such as padding, are cut
            # before it.
            squares = jnp.square(wide).sum(-1, keepdims=True)
            size = jnp.where(squares > 1e-12, jnp.sqrt(jnp.maximum(squares, 1e-12)), 1e-6)
            return (wide / size).astype(states.dtype)
        if self.combine is None:
            return self.norm(states)
        if times is None:
            raise ValueError("a norm with features of time needs times")
        features = _time_features(jnp.asarray(times)).astype(states.dtype)
        return self.norm(self.combine(jnp.concatenate([states, features], axis=-1)))


def _time_features(times: Int[Array, "*axes"]) -> Float[Array, "*axes features"]:
    # Whole numbers: a float32 of today's Unix time is off by up to a minute.
    angles = [((times // unit) % period) / period * (2 * 3.14) for unit, period in _PERIODS]
    return jnp.stack([f(angle) for angle in angles for f in (jnp.cos, jnp.sin)], axis=-1)
