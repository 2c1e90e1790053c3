"""What travels in fewer bits comes out near what went in, and training with it goes on."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import jaxrec
from jaxrec.mesh import ExchangePrecision, row_wise, table_wise
from jaxrec.mesh.precision import decode, encode
from tests.mesh.test_training import Ranker, one_device, place_on, run

pytestmark = pytest.mark.jax_version

# Greatest error of an element, over the largest element of its row.
ERRORS = {"float32": 0, "bfloat16": 2**-8, "float16": 2**-11, "int8": 1 / 255, "float8": 2**-4}


@pytest.mark.parametrize("format", ERRORS)
def test_what_comes_out(format):
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(3, 50, 16)) * 10.0 ** rng.integers(-4, 4, (3, 50, 1))
    rows[0, 0] = 0
    rows[1, 1] = 2.5
    rows = jnp.asarray(rows, jnp.float32)
    parts = encode(rows, format)
    found = decode(parts, format)
    error = np.abs(found - rows).max(axis=-1) / np.maximum(np.abs(rows).max(axis=-1), 1e-30)
    assert error.max() <= ERRORS[format]
    np.testing.assert_array_equal(found[0, 0], 0)
    sent = sum(part.size * part.dtype.itemsize for part in parts) / (3 * 50)
    assert sent == {"float32": 64, "bfloat16": 32, "float16": 32, "int8": 24, "float8": 20}[format]


@pytest.mark.parametrize("format", ERRORS)
def test_nan_is_not_lost(format):
    rows = jnp.ones((4, 8)).at[1, 3].set(jnp.nan)
    found = decode(encode(rows, format), format)
    assert np.isnan(found[1]).any()
    np.testing.assert_allclose(found[np.array([0, 2, 3])], 1, rtol=0.1)


def test_float16_is_cut_to_its_range():
    found = decode(encode(jnp.array([[1e6, -1e6, 1.0]]), "float16"), "float16")
    assert found.tolist() == [[65504.0, -65504.0, 1.0]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"forward": "int4"}, "forward='int4' is not one of float32, bfloat16"),
        ({"loss_scale": 0.0}, "loss_scale=0.0 is not a positive number"),
        ({"loss_scale": float("nan")}, "loss_scale=nan"),
    ],
)
def test_errors(unchecked, arguments, message):
    with pytest.raises(ValueError, match=message):
        ExchangePrecision(**arguments)


@pytest.mark.parametrize(
    "precision",
    [
        pytest.param(
            ExchangePrecision(forward="int8", backward="float16", loss_scale=256.0),
            id="int8_float16",
        ),
        pytest.param(
            ExchangePrecision(forward="float8", backward="bfloat16"),
            marks=pytest.mark.slow,
            id="float8_bfloat16",
        ),
    ],
)
def test_training(precision):
    """Every exchange, near the run on one device; and the same bits again."""
    placements = {
        "a": row_wise(),
        "b": row_wise(exchange="pooled"),
        "c": table_wise(1),
        "d": jaxrec.mesh.data_parallel(),
    }
    plan = jaxrec.plan.ShardingPlan.from_dict(placements)
    mesh = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4], axis_types=(AxisType.Auto,))
    expected, _ = one_device("sgd")
    model = jaxrec.shard(Ranker(jaxrec.optim.sgd(0.1)), plan, mesh, precision=precision)
    losses = run(model, place_on(mesh))
    np.testing.assert_allclose(losses, expected, rtol=0.02)
    assert losses != expected
