"""Sequence models see what they may see, and each sequence for itself."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxrec
from jaxrec.nn import HSTU, BERT4Rec, HSTUBlock, SASRec, last_states

pytestmark = pytest.mark.usefixtures("compiled_fast")

DIM = 8
ROWS = [[1, 2, 3, 4, 5], [], [6, 7], [8]]


def make(kind, **options):
    rngs = nnx.Rngs(0)
    table = jaxrec.EmbeddingConfig("item", 20, DIM, ("history",), initializer="normal")
    items = jaxrec.EmbeddingCollection([table], rngs=rngs)
    model = kind(items, max_length=6, num_blocks=2, num_heads=2, rngs=rngs, **options)
    model.eval()
    return model


@nnx.jit
def run(model, batch):
    return model(batch)


def states(model, rows):
    """``[length, dim]`` states of each sequence."""
    batch = jaxrec.KeyedJaggedArray.from_lists({"history": rows}, capacities={"history": 16})
    column = run(model, batch)["history"]
    return np.split(np.asarray(column.values), np.cumsum(column.lengths))[:-1]


@pytest.mark.parametrize("kind", [SASRec, HSTU, BERT4Rec])
def test_what_a_state_knows(kind):
    model = make(kind)
    whole = states(model, ROWS)
    later = states(model, [[1, 2, 3, 4, 9], [], [6, 9], [8]])
    alone = states(model, [[], [6, 7], [], [1, 2, 3, 4, 5]])
    np.testing.assert_allclose(alone[1], whole[2], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(alone[3], whole[0], rtol=1e-4, atol=1e-5)
    assert np.abs(later[0][4] - whole[0][4]).max() > 1e-3
    looks_ahead = np.abs(later[0][:4] - whole[0][:4]).max() > 1e-4
    assert looks_ahead == (kind is BERT4Rec)
    if kind is not BERT4Rec:
        np.testing.assert_allclose(later[0][:4], whole[0][:4], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [SASRec, HSTU, BERT4Rec])
def test_a_sequence_longer_than_the_model(kind):
    batch = jaxrec.KeyedJaggedArray.from_lists({"history": [[1] * 7]})
    with pytest.raises(ValueError, match="max_length=6"):
        make(kind)(batch)


def test_hstu_block_is_the_paper():
    """Equations 1 to 3, over one sequence, in float64."""
    block = HSTUBlock(DIM, 2, max_length=6, qk_dim=3, value_dim=5, time_buckets=9, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)
    x = rng.standard_normal((5, DIM)).astype(np.float32)
    times = np.cumsum(rng.integers(0, 900, 5)).astype(np.int32)
    found = nnx.jit(HSTUBlock.__call__)(block, x, np.array([5], np.int32), times)

    def wide(variable):
        return np.asarray(variable[...], np.float64)

    def norm(layer, x):
        mean, var = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
        return (x - mean) / np.sqrt(var + layer.epsilon) * wide(layer.scale) + wide(layer.bias)

    def silu(x):
        return x / (1 + np.exp(-x))

    y = np.asarray(x, np.float64)
    mixed = silu(norm(block.norm, y) @ wide(block.inputs.kernel) + wide(block.inputs.bias))
    gate, value, query, key = np.split(mixed, [10, 20, 26], axis=1)
    attended = np.zeros((5, 2, 5))
    for head in range(2):
        for i in range(5):
            for j in range(i + 1):
                following = int(times[i + 1]) if i + 1 < 5 else 0
                elapsed = max(1, abs(following - int(times[j])))
                bucket = int(np.clip(np.log(elapsed) / 0.301, 0, 8))
                score = query[i].reshape(2, 3)[head] @ key[j].reshape(2, 3)[head]
                score += (
                    wide(block.position_bias)[i - j, head] + wide(block.time_bias)[bucket, head]
                )
                attended[i, head] += silu(score) / 6 * value[j].reshape(2, 5)[head]
    gated = norm(block.attended_norm, attended.reshape(5, 10)) * gate
    expected = y + gated @ wide(block.out.kernel) + wide(block.out.bias)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_time_moves_hstu():
    model = make(HSTU, time_buckets=8)
    batch = jaxrec.KeyedJaggedArray.from_lists({"history": [[1, 2, 3]]})
    timed = nnx.jit(lambda model, batch, times: model(batch, times))
    quick, slow = (
        timed(model, batch, jnp.arange(8, dtype=jnp.int32) * seconds)["history"].values
        for seconds in (1, 1000)
    )
    assert float(jnp.abs(quick[:3] - slow[:3]).max(1).min()) > 1e-4
    with pytest.raises(ValueError, match="come together"):
        model(batch)


def test_the_time_after_a_sequence_moves_its_last_state():
    model = make(HSTU, time_buckets=8)
    batch = jaxrec.KeyedJaggedArray.from_lists({"history": [[1, 2, 3], [4, 5]]})
    times = jnp.arange(8, dtype=jnp.int32) * 10

    @nnx.jit
    def run_until(model, after):
        return model(batch, times, after)["history"].values

    at_once, later = (run_until(model, jnp.array(x)) for x in ([20, 40], [20, 90]))
    np.testing.assert_allclose(at_once[:4], later[:4], rtol=1e-5)
    assert float(jnp.abs(at_once[4] - later[4]).max()) > 1e-4
    with pytest.raises(ValueError, match="next_timestamps needs timestamps"):
        model(batch, None, jnp.array([1, 2]))
    with pytest.raises(ValueError, match=r"a time for each row, \(2,\); its shape is \(1,\)"):
        model(batch, times, jnp.array([1]))


def test_the_time_of_the_query_itself():
    """As in models of earlier versions: the first state does not depend on times."""
    model = make(HSTU, time_buckets=8, query_time="own")
    batch = jaxrec.KeyedJaggedArray.from_lists({"history": [[1, 2, 3]]})
    timed = nnx.jit(lambda model, batch, times: model(batch, times))
    quick, slow = (
        timed(model, batch, jnp.arange(8, dtype=jnp.int32) * seconds)["history"].values
        for seconds in (1, 1000)
    )
    np.testing.assert_allclose(quick[0], slow[0], rtol=1e-5)
    assert float(jnp.abs(quick[2] - slow[2]).max()) > 1e-4
    with pytest.raises(ValueError, match='query_time="next"'):
        model(batch, jnp.arange(8, dtype=jnp.int32), jnp.array([4]))
    with pytest.raises(ValueError, match="got 'last'"):
        make(HSTU, query_time="last")


@pytest.mark.parametrize("kind", [SASRec, BERT4Rec, HSTU])
def test_one_table_reads_the_history(kind):
    rngs = nnx.Rngs(0)
    tables = [jaxrec.EmbeddingConfig(name, 20, DIM, ("history",)) for name in ("a", "b")]
    items = jaxrec.EmbeddingCollection(tables, rngs=rngs)
    with pytest.raises(ValueError, match="which 2 tables have among their features"):
        kind(items, max_length=6, rngs=rngs)


def test_last_states_on_a_mesh():
    values = jnp.arange(12.0).reshape(2, 3, 2)
    column = jaxrec.JaggedArray(values, jnp.array([[2, 0], [1, 2]], jnp.int32))
    expected = [[values[0, 1], jnp.zeros(2)], [values[1, 0], values[1, 2]]]
    np.testing.assert_array_equal(last_states(column), jnp.array(expected))
