"""The formulas for padded rows are those of the row optimizers."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrec import optim
from jaxrec.embed.kernels import fused_rules, triton

OPTIMIZERS = [
    optim.sgd(0.1),
    optim.adagrad(0.1, eps=1e-3),
    optim.rowwise_adagrad(0.1),
    optim.rowwise_adagrad(0.1, weight_decay=0.1, weight_decay_mode="l2", max_norm=0.5),
    optim.rowwise_adagrad(0.1, weight_decay=0.1, weight_decay_mode="decoupled"),
    optim.adam(0.1, b1=0.0, weight_decay=0.1),
    optim.adam(lambda step: 0.1 * (step + 1), b2=0.99, max_norm=1.0),
    optim.adam(0.1, b1=0.99999, b2=0.99999),
    optim.partial_rowwise_adam(0.1, weight_decay=0.1),
]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: type(optimizer).__name__)
def test_trajectory(optimizer: optim.RowOptimizer):
    dim, padded = 5, 8
    rows, state = jax.random.normal(jax.random.key(0), (3, dim)), optimizer.init(3, dim)
    padded_rows, padded_state = pad(rows, padded), {k: pad(v, padded) for k, v in state.items()}
    for i in range(4):
        step = jnp.int32(i)
        gradients = jax.random.normal(jax.random.key(i + 1), (3, dim))
        rows, state = optimizer.update(rows, gradients, state, step)
        factors = tuple(fused_rules.step_factors(optimizer, step))
        padded_rows, padded_state = fused_rules.apply(
            fused_rules.Step(optimizer, dim, factors),
            padded_rows,
            pad(gradients, padded),
            padded_state,
        )
    np.testing.assert_allclose(padded_rows, pad(rows, padded), rtol=1e-5, atol=1e-6)
    for name, values in state.items():
        np.testing.assert_allclose(padded_state[name], pad(values, padded), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("optimizer", "named"),
    [
        (optim.lamb(), "not lamb"),
        (optim.sgd(clip_norm=1.0), "clip_norm"),
        (optim.adam(rowwise_bias_correction=True), "rowwise_bias_correction"),
    ],
    ids=["lamb", "clip_norm", "rowwise_bias_correction"],
)
def test_what_is_refused(optimizer: optim.RowOptimizer, named: str):
    reason = triton.refuse("fused_update", {"optimizer": optimizer})
    assert reason is not None
    assert named in reason
    assert triton.refuse("row_lookup", {"optimizer": optimizer}) is None


def test_subclasses_may_differ():
    @dataclasses.dataclass(frozen=True)
    class Ascent(optim.sgd):
        def update(self, rows, gradients, state, step):
            return super().update(rows, -gradients, state, step)

    assert fused_rules.refuse(optim.sgd(0.1)) is None
    assert fused_rules.refuse(Ascent(0.1)) is not None


def pad(values: jax.Array, columns: int) -> jax.Array:
    """Zeros up to ``columns``, if the array has columns."""
    return jnp.pad(values, ((0, 0), (0, columns - values.shape[1]))) if values.ndim == 2 else values
