"""Loss functions that take or return something else than they should."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxrec.data import WeightedBatch
from jaxrec.train.evaluation import call_loss

MODEL = nnx.Dropout(0.5)
BATCH = np.ones(3, np.float32)


def test_arguments():
    weighted = WeightedBatch(BATCH, np.float32([1, 1, 0]))
    assert call_loss(lambda m, x: (x.sum(), {}), MODEL, BATCH, has_metrics=False) == (3, {})
    found = call_loss(
        lambda m, x, weights: ((x * weights).sum(), {}), MODEL, weighted, has_metrics=True
    )
    assert found == (2, {})
    assert call_loss(lambda *args: (1.0 * len(args), {}), MODEL, weighted, has_metrics=False) == (
        3,
        {},
    )
    scaled = functools.partial(lambda scale, m, x: (scale * x.sum(), {}), 2)
    assert call_loss(scaled, MODEL, BATCH, has_metrics=False) == (6, {})


@pytest.mark.parametrize(
    ("loss", "batch", "message"),
    [
        (
            lambda model, batch: None,
            WeightedBatch(BATCH, BATCH),
            r"have weights .* as loss\(model, batch, weights\), but it takes \(model, batch\)",
        ),
        (
            lambda model, batch, weights: None,
            BATCH,
            r"have no weights \(see batch_size of Trainer\), .* as loss\(model, batch\), but",
        ),
        (
            lambda model, x: jnp.asarray(x).mean(),
            BATCH,
            r"must return a pair.*an array float32\[\]",
        ),
        (lambda model, x: (x.mean(), 1, 2), BATCH, "must return a pair.*got a tuple of 3"),
        (lambda model, x: None, BATCH, "must return a pair.*got None"),
        (lambda model, x: (jnp.asarray(x), {}), BATCH, r"one number, the mean .* float32\[3\]"),
        (lambda model, x: (x.mean(), [x]), BATCH, "outputs for metrics by name.*a list of 1"),
    ],
    ids=["no weights", "weights", "array", "three", "none", "losses", "list"],
)
def test_errors(unchecked, loss, batch, message):
    with pytest.raises(TypeError, match=message):
        call_loss(loss, MODEL, batch, has_metrics=True)
