"""Models of several tasks over shared experts: MMoE and PLE."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, DTypeLike, Float

from jaxrec.nn.arithmetic import dot_general, promote
from jaxrec.nn.click_model import check_logit_layer
from jaxrec.nn.mlp import MLP
from jaxrec.ragged.arrays import AnyArray


class Gate(nnx.Module):
    """Mixes experts: a softmax of a linear function of the input weighs their outputs.

    Args:
        in_features: Columns of the input.
        num_experts: Number of experts.
        dtype: Type that it computes in; None: the wider of the input's and ``param_dtype``.
        param_dtype: Type of the parameters.
        rngs: Gives the random key of the kernel's first values (LeCun's normal).

    Example:
        >>> import jax.numpy as jnp
        >>> Gate(8, 3, rngs=nnx.Rngs(0))(jnp.ones((2, 8)), jnp.ones((2, 3, 4))).shape
        (2, 4)
    """

    def __init__(
        self,
        in_features: int,
        num_experts: int,
        *,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        types: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.linear = nnx.Linear(
            in_features, num_experts, use_bias=False, dot_general=dot_general, **types
        )
        self.dtype = dtype

    def __call__(
        self, x: Float[AnyArray, "batch columns"], experts: Float[Array, "batch experts dim"]
    ) -> Float[Array, "batch dim"]:
        """Map ``[batch, in_features]`` and ``[batch, experts, dim]`` to ``[batch, dim]``."""
        x, experts = promote(self.dtype, x, experts)
        weights = nnx.softmax(self.linear(x), axis=1)
        return jnp.einsum("be,bed->bd", weights, experts)


class MMoE(nnx.Module):
    """Computes a logit per task: each task has its own mixture of shared experts, and a tower.

    Ma et al. 2018, "Modeling task relationships in multi-task learning with multi-gate
    mixture-of-experts" (KDD), equations 6 and 7: ``tower_k(sum_i softmax(W_k x)_i expert_i(x))``.

    Args:
        in_features: Columns of the input, such as pooled embeddings side by side.
        num_tasks: Number of tasks.
        num_experts: Number of experts.
        expert_layer_sizes: Layers of each expert.
        tower_layer_sizes: Layers of each task's tower; the last is 1.
        dtype: Type that it computes in; None: the wider of the input's and ``param_dtype``.
        param_dtype: Type of the parameters.
        rngs: Gives the random keys of first values.

    Raises:
        ValueError: A number is below 1, or a tower does not end with 1.

    Example:
        >>> import jax.numpy as jnp
        >>> model = MMoE(8, num_tasks=2, num_experts=3, expert_layer_sizes=(16,),
        ...              tower_layer_sizes=(4, 1), rngs=nnx.Rngs(0))
        >>> model(jnp.ones((5, 8))).shape
        (5, 2)
    """

    def __init__(
        self,
        in_features: int,
        *,
        num_tasks: int,
        num_experts: int,
        expert_layer_sizes: Sequence[int],
        tower_layer_sizes: Sequence[int],
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        types: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        if min(num_tasks, num_experts) < 1:
            raise ValueError(
                f"num_tasks and num_experts are 1 or more, got {num_tasks} and {num_experts}"
            )
        check_logit_layer("tower_layer_sizes", tower_layer_sizes)
        self.experts = nnx.List(
            MLP(in_features, expert_layer_sizes, **types) for _ in range(num_experts)
        )
        self.gates = nnx.List(Gate(in_features, num_experts, **types) for _ in range(num_tasks))
        self.towers = nnx.List(
            MLP(expert_layer_sizes[-1], tower_layer_sizes, activation_on_last=False, **types)
            for _ in range(num_tasks)
        )

    def __call__(self, x: Float[AnyArray, "batch columns"]) -> Float[Array, "batch tasks"]:
        """Map ``[batch, in_features]`` to ``[batch, num_tasks]`` logits."""
        # Each expert runs once, for all tasks.
        experts = jnp.stack([expert(x) for expert in self.experts], axis=1)
        logits = [
            tower(gate(x, experts)) for gate, tower in zip(self.gates, self.towers, strict=True)
        ]
        return jnp.concatenate(logits, axis=1)


class ExtractionLayer(nnx.Module):
    """One level of `PLE`: each task mixes its own experts and the shared experts.

    Tang et al. 2020 (RecSys), section 4.2, equations 3 and 6.

    Args:
        in_features: Columns of each input.
        num_tasks: Number of tasks.
        task_experts: Experts of each task.
        shared_experts: Experts that all tasks share.
        expert_layer_sizes: Layers of each expert.
        gate_shared: Whether there is a further gate, over all experts, for the shared input of a
            next level.
        dtype: Type that it computes in; None: the wider of the input's and ``param_dtype``.
        param_dtype: Type of the parameters.
        rngs: Gives the random keys of first values.

    Example:
        >>> import jax.numpy as jnp
        >>> layer = ExtractionLayer(8, num_tasks=2, task_experts=1, shared_experts=1,
        ...                         expert_layer_sizes=(4,), gate_shared=True, rngs=nnx.Rngs(0))
        >>> [x.shape for x in layer([jnp.ones((5, 8))] * 3)]
        [(5, 4), (5, 4), (5, 4)]
    """

    def __init__(
        self,
        in_features: int,
        *,
        num_tasks: int,
        task_experts: int,
        shared_experts: int,
        expert_layer_sizes: Sequence[int],
        gate_shared: bool,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        types: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        if min(num_tasks, task_experts, shared_experts) < 1:
            raise ValueError(
                "num_tasks, task_experts and shared_experts are 1 or more, got "
                f"{num_tasks}, {task_experts} and {shared_experts}"
            )

        def group(count: int) -> list[MLP]:
            return [MLP(in_features, expert_layer_sizes, **types) for _ in range(count)]

        def gate(count: int) -> Gate:
            return Gate(in_features, count, **types)

        # One group of experts per task, then the shared group; the gates in the same order.
        groups = [*[group(task_experts) for _ in range(num_tasks)], group(shared_experts)]
        self.groups = nnx.List([nnx.List(experts) for experts in groups])
        gates = [gate(task_experts + shared_experts) for _ in range(num_tasks)]
        # The last level has no gate for the shared experts, since no level is left that reads it.
        if gate_shared:
            gates.append(gate(num_tasks * task_experts + shared_experts))
        self.gates = nnx.List(gates)

    def __call__(
        self, inputs: Sequence[Float[AnyArray, "batch columns"]]
    ) -> list[Float[Array, "batch dim"]]:
        """Return the mixtures of a batch.

        Args:
            inputs: ``[batch, in_features]`` for each task, then for the shared experts.

        Returns:
            ``[batch, dim]`` for each task, then for the shared experts if ``gate_shared``.
        """
        outputs = [
            jnp.stack([expert(x) for expert in group], axis=1)
            for group, x in zip(self.groups, inputs, strict=True)
        ]
        *of_tasks, shared = outputs
        seen = [jnp.concatenate([own, shared], axis=1) for own in of_tasks]
        seen.append(jnp.concatenate(outputs, axis=1))
        # `strict=False` drops the shared part where it has no gate.
        return [
            gate(x, experts) for gate, x, experts in zip(self.gates, inputs, seen, strict=False)
        ]


class PLE(nnx.Module):
    """Computes a logit per task, from levels of task-specific and shared experts.

    Tang et al. 2020, "Progressive layered extraction (PLE): A novel multi-task learning model for
    personalized recommendations" (RecSys), section 4; with one level the paper's CGC model.

    Args:
        in_features: Columns of the input, such as pooled embeddings side by side.
        num_tasks: Number of tasks.
        num_levels: Number of `ExtractionLayer`.
        task_experts: Experts of each task and level.
        shared_experts: Experts that all tasks share, in each level.
        expert_layer_sizes: Layers of each expert.
        tower_layer_sizes: Layers of each task's tower; the last is 1.
        dtype: Type that it computes in; None: the wider of the input's and ``param_dtype``.
        param_dtype: Type of the parameters.
        rngs: Gives the random keys of first values.

    Raises:
        ValueError: A number is below 1, or a tower does not end with 1.

    Example:
        >>> import jax.numpy as jnp
        >>> model = PLE(8, num_tasks=2, num_levels=2, task_experts=2, shared_experts=1,
        ...             expert_layer_sizes=(16,), tower_layer_sizes=(4, 1), rngs=nnx.Rngs(0))
        >>> model(jnp.ones((5, 8))).shape
        (5, 2)
    """

    def __init__(
        self,
        in_features: int,
        *,
        num_tasks: int,
        num_levels: int = 2,
        task_experts: int,
        shared_experts: int,
        expert_layer_sizes: Sequence[int],
        tower_layer_sizes: Sequence[int],
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        types: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        if num_levels < 1:
            raise ValueError(f"num_levels is 1 or more, got {num_levels}")
        check_logit_layer("tower_layer_sizes", tower_layer_sizes)
        self.num_tasks = num_tasks
        self.levels = nnx.List(
            ExtractionLayer(
                in_features if level == 0 else expert_layer_sizes[-1],
                num_tasks=num_tasks,
                task_experts=task_experts,
                shared_experts=shared_experts,
                expert_layer_sizes=expert_layer_sizes,
                gate_shared=level < num_levels - 1,
                **types,
            )
            for level in range(num_levels)
        )
        self.towers = nnx.List(
            MLP(expert_layer_sizes[-1], tower_layer_sizes, activation_on_last=False, **types)
            for _ in range(num_tasks)
        )

    def __call__(self, x: Float[AnyArray, "batch columns"]) -> Float[Array, "batch tasks"]:
        """Map ``[batch, in_features]`` to ``[batch, num_tasks]`` logits."""
        # The first level sees only the input. In later levels a task's experts and gate see the
        # task's mixture, and the shared experts see the mixture of all experts.
        states = [jnp.asarray(x)] * (self.num_tasks + 1)
        for level in self.levels:
            states = level(states)
        logits = [tower(state) for tower, state in zip(self.towers, states, strict=True)]
        return jnp.concatenate(logits, axis=1)
