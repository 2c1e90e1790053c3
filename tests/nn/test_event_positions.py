"""Positions and times are those of the authors' code, and of a plain loop."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxrec.nn import EventPositions
from tests.nn import ranker_cases
from tests.nn.ranker_cases import CASES, differentiate, load, padded

pytestmark = [pytest.mark.usefixtures("compiled_fast"), pytest.mark.every_case]


@pytest.mark.jax_version
@pytest.mark.parametrize("name", ranker_cases.names("positions_"))
def test_positions(name):
    arrays, case = load(name), CASES[name]
    meta, size = case["meta"], len(arrays["x"])
    module = EventPositions(
        len(arrays["position_table"]),
        arrays["x"].shape[1],
        num_times=len(arrays["time_table"]),
        contextual_length=meta["contextual_seq_len"],
        time_scale=meta["time_bucket_fn"],
        rngs=nnx.Rngs(0),
    )
    module.positions.set_value(jnp.asarray(arrays["position_table"]))
    module.times.set_value(jnp.asarray(arrays["time_table"]))
    targets = arrays.get("num_targets")
    if targets is not None and meta["interleaved_targets"]:
        targets = 2 * targets

    def call(module, x):
        times = padded(arrays["timestamps"])
        return module(x, jnp.asarray(arrays["lengths"]), times, targets)[:size]

    out, gradients, (of_x,) = differentiate(module, call, arrays["grad_out"], padded(arrays["x"]))
    found = {
        "out": out,
        "grad__x": of_x[:size],
        "grad__position_table": gradients["positions"][...],
        "grad__time_table": gradients["times"][...],
    }
    for key, array in found.items():
        np.testing.assert_allclose(array, arrays[key], err_msg=key, **case["tolerance"])


def from_the_start(lengths, targets, times, context):
    """Position and elapsed seconds of each token, in a loop."""
    places, elapsed, first = [], [], 0
    for length, count in zip(lengths, targets, strict=True):
        row, end = times[first : first + length], length - count
        for i in range(length):
            places.append(min(i, end))
            before = min(i, end) - 1
            elapsed.append(0 if before < context else int(row[i] - row[before]))
        first += length
    return places, elapsed


@pytest.mark.parametrize("context", [0, 2])
def test_positions_from_the_start(context):
    rng = np.random.default_rng(0)
    lengths = np.array([7, context, 5 + context, context + 1], np.int32)
    targets = np.array([2, 0, 3, 1], np.int32)
    times = np.sort(rng.integers(0, 100_000, lengths.sum())).astype(np.int32)
    module = EventPositions(
        20, 4, num_times=30, contextual_length=context, count_from="start", rngs=nnx.Rngs(0)
    )
    x = rng.standard_normal((len(times), 4)).astype(np.float32)
    found = nnx.jit(EventPositions.__call__)(module, x, lengths, times, targets)
    places, elapsed = from_the_start(lengths, targets, times, context)
    buckets = np.minimum(np.sqrt(np.maximum(elapsed, 1e-6) / 60), 29).astype(int)
    expected = 2 * x + module.positions[...][np.array(places)] + module.times[...][buckets]
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


def test_new_events_leave_older_tokens_as_they_are():
    module = EventPositions(20, 4, num_times=30, count_from="start", rngs=nnx.Rngs(0))
    times, x = jnp.array([10, 700, 5000, 90000]), jnp.ones((4, 4))
    short = module(x[:3], jnp.array([3]), times[:3])
    long = module(x, jnp.array([4]), times)
    np.testing.assert_array_equal(short, long[:3])
    module.count_from = "end"
    assert float(jnp.abs(module(x[:3], jnp.array([3]), times[:3]) - long[:3]).max()) > 1e-3


def test_times_to_a_given_end():
    module = EventPositions(20, 4, num_times=90, rngs=nnx.Rngs(0))
    times, x = jnp.array([10, 7000, 90000]), jnp.ones((3, 4))
    with_target = module(x, jnp.array([3]), times, jnp.array([1]))
    found = module(x[:2], jnp.array([2]), times[:2], last_times=jnp.array([90000]))
    np.testing.assert_array_equal(found, with_target[:2])


def test_refusals():
    rngs = nnx.Rngs(0)
    with pytest.raises(ValueError, match="num_positions and dim are 1 or more"):
        EventPositions(0, 4, rngs=rngs)
    with pytest.raises(ValueError, match="time_scale is 'sqrt' or 'log'"):
        EventPositions(4, 4, time_scale="cube", rngs=rngs)
    with pytest.raises(ValueError, match="come together"):
        EventPositions(4, 4, rngs=rngs)(jnp.ones((2, 4)), jnp.array([2]), jnp.array([1, 2]))
    with pytest.raises(ValueError, match="come together"):
        EventPositions(4, 4, num_times=3, rngs=rngs)(jnp.ones((2, 4)), jnp.array([2]))
