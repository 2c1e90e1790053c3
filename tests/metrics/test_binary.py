from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrec.metrics import BinarySums, binary_sums, calibration, log_loss, normalized_entropy
from tests import golden

CASES = [
    (name, case)
    for name, case in golden.cases("metrics")
    if name in ("ne", "ne_default_weights", "ne_logloss", "calibration")
]


@pytest.mark.parametrize(("name", "case"), CASES, ids=[name for name, _ in CASES])
def test_golden(name, case):
    arrays = golden.load("metrics", name)
    predictions = arrays["predictions"].astype(np.float64)
    logits = (np.log(predictions) - np.log1p(-predictions)).astype(np.float32)
    metrics = {
        "lifetime_ne": normalized_entropy,
        "lifetime_calibration": calibration,
        "lifetime_logloss": lambda sums: log_loss(sums) / np.log(2),  # TorchRec's is in bits
    }
    wanted = [output for output in case["outputs"] if output in metrics]
    assert wanted
    for task in range(predictions.shape[1]):
        total = BinarySums()
        for batch in range(len(predictions)):
            weights = arrays["weights"][batch, task] if "weights" in arrays else None
            total = total + binary_sums(
                jnp.asarray(logits[batch, task]),
                jnp.asarray(arrays["labels"][batch, task]),
                None if weights is None else jnp.asarray(weights),
            )
            for output in wanted:
                expected = arrays[output][batch, task]
                assert metrics[output](total) == pytest.approx(expected, rel=2e-5, abs=1e-6)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.floats(-30, 30), st.integers(0, 1), st.integers(0, 2)), max_size=12))
def test_formulas(samples):
    rows = np.zeros((12, 3))  # padded, so that all examples have one shape
    rows[: len(samples)] = np.array(samples).reshape(-1, 3)
    sums = binary_sums(*(jnp.asarray(column, jnp.float32) for column in rows.T))
    logits, labels, weights = rows.astype(np.float32).astype(np.float64).T
    p = 1 / (1 + np.exp(-logits))
    losses = np.logaddexp(0, logits) - labels * logits
    entropy = (weights * losses).sum()
    np.testing.assert_allclose(sums.cross_entropy, entropy, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(sums.predictions, (weights * p).sum(), rtol=1e-5, atol=1e-6)
    n, positives = weights.sum(), (weights * labels).sum()
    assert log_loss(sums) == pytest.approx(entropy / n if n else np.nan, rel=1e-5, nan_ok=True)
    if 0 < positives < n:
        mean = positives / n
        norm = -(mean * np.log(mean) + (1 - mean) * np.log(1 - mean))
        assert normalized_entropy(sums) == pytest.approx(entropy / n / norm, rel=1e-5)
    else:
        assert np.isnan(normalized_entropy(sums))
    expected = (weights * p).sum() / positives if positives else np.nan
    assert calibration(sums) == pytest.approx(expected, rel=1e-5, nan_ok=True)


def test_host_sums_lose_nothing():
    one = BinarySums(jnp.float32(2**-10), jnp.float32(1), jnp.float32(1), jnp.float32(2)).on_host()
    total = BinarySums(1e9, 0.0, 0.0, 0.0)
    for _ in range(1000):
        total = total + one
    assert total.cross_entropy == pytest.approx(1e9 + 1000 / 1024, abs=1e-5)
