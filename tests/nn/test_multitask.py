"""Mixtures of experts are the papers' formulas in float64."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxrec.nn import PLE, ExtractionLayer, Gate, MMoE

BATCH, COLUMNS = 3, 5
X = np.random.default_rng(0).standard_normal((BATCH, COLUMNS)).astype(np.float32)


def wide(x):
    return np.asarray(x, np.float64)


def dense(mlp, x, last_is_linear=False):
    for i, layer in enumerate(mlp.layers):
        x = x @ wide(layer.kernel[...]) + wide(layer.bias[...])
        if not (last_is_linear and i == len(mlp.layers) - 1):
            x = np.maximum(x, 0)
    return x


def mixed(gate, x, experts):
    scores = np.exp(x @ wide(gate.linear.kernel[...]))
    weights = scores / scores.sum(axis=1, keepdims=True)
    return sum(weights[:, i : i + 1] * expert for i, expert in enumerate(experts))


def test_mmoe():
    model = MMoE(
        COLUMNS, num_tasks=2, num_experts=3, expert_layer_sizes=(6, 4), tower_layer_sizes=(3, 1),
        rngs=nnx.Rngs(0),
    )  # fmt: skip
    experts = [dense(expert, wide(X)) for expert in model.experts]
    expected = [
        dense(tower, mixed(gate, wide(X), experts), last_is_linear=True)
        for gate, tower in zip(model.gates, model.towers, strict=True)
    ]
    np.testing.assert_allclose(model(X), np.concatenate(expected, axis=1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("levels", [1, 2], ids=["cgc", "ple"])
def test_ple(levels):
    model = PLE(
        COLUMNS, num_tasks=2, num_levels=levels, task_experts=2, shared_experts=1,
        expert_layer_sizes=(4,), tower_layer_sizes=(3, 1), rngs=nnx.Rngs(0),
    )  # fmt: skip
    states = [wide(X)] * 3
    for number, level in enumerate(model.levels):
        outputs = [
            [dense(expert, x) for expert in group]
            for group, x in zip(level.groups, states, strict=True)
        ]
        shared = outputs[-1]
        mixtures = [
            mixed(level.gates[task], states[task], outputs[task] + shared) for task in (0, 1)
        ]
        if number < levels - 1:
            mixtures.append(
                mixed(level.gates[2], states[2], [e for group in outputs for e in group])
            )
        else:
            assert len(level.gates) == 2
        states = mixtures
    expected = [
        dense(tower, x, last_is_linear=True) for tower, x in zip(model.towers, states, strict=True)
    ]
    np.testing.assert_allclose(model(X), np.concatenate(expected, axis=1), rtol=1e-5, atol=1e-6)


def test_a_gate_of_equal_scores_is_the_mean():
    gate = Gate(COLUMNS, 4, rngs=nnx.Rngs(0))
    gate.linear.kernel[...] = jnp.zeros((COLUMNS, 4))
    experts = jnp.arange(24.0).reshape(BATCH, 4, 2)
    np.testing.assert_allclose(gate(X, experts), experts.mean(axis=1))


def test_numbers_are_positive():
    sizes = {"expert_layer_sizes": (4,), "rngs": nnx.Rngs(0)}
    with pytest.raises(ValueError, match="num_tasks and num_experts are 1 or more, got 2 and 0"):
        MMoE(COLUMNS, num_tasks=2, num_experts=0, tower_layer_sizes=(), **sizes)
    with pytest.raises(ValueError, match="got 1, 1 and 0"):
        ExtractionLayer(
            COLUMNS, num_tasks=1, task_experts=1, shared_experts=0, gate_shared=False, **sizes
        )
    with pytest.raises(ValueError, match="num_levels is 1 or more, got 0"):
        PLE(
            COLUMNS, num_tasks=1, num_levels=0, task_experts=1, shared_experts=1,
            tower_layer_sizes=(), **sizes,
        )  # fmt: skip
