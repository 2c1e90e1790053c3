"""Tokens of actions, context and events are those of the authors' code, forward and backward."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxrec
from jaxrec.nn import ActionEncoder, ContextTokens, EventTokens
from jaxrec.nn.row_pieces import join_rows
from tests.nn import ranker_cases
from tests.nn.ranker_cases import (
    CASES,
    assert_gradients,
    differentiate,
    fill,
    load,
    padded,
)

pytestmark = [pytest.mark.usefixtures("compiled_fast"), pytest.mark.every_case]


@pytest.mark.jax_version
@pytest.mark.parametrize("name", ["actions", "actions_watchtime"])
def test_actions(name):
    arrays, case = load(name), CASES[name]
    meta = case["meta"]
    module = ActionEncoder(
        meta["action_weights"],
        meta["dim"],
        watch_thresholds=meta["thresholds_and_weights"],
        rngs=nnx.Rngs(0),
    )
    places = ranker_cases.actions(module)
    fill(places, arrays)
    lengths = [jnp.asarray(arrays[key]) for key in ("history_lengths", "num_targets")]

    def call(module):
        events = module(padded(arrays["actions"]), padded(arrays["watchtimes"]))
        count = int(arrays["num_targets"].sum())
        targets = jnp.broadcast_to(module.target[...][None], (count, module.columns))
        return join_rows(lengths, [events, targets])[: len(arrays["out"])]

    out, gradients = differentiate(module, call, arrays["grad_out"])[:2]
    np.testing.assert_allclose(out, arrays["out"], **case["tolerance"])
    assert_gradients(places, gradients, module, arrays, case["tolerance"])


def test_content():
    arrays, case = load("content"), CASES["content"]
    module = EventTokens(3, 4, hidden_dim=5, additional_dim=6, target_dim=3, rngs=nnx.Rngs(0))
    # In the sum additional features have an MLP of their own. Here they are columns.
    module.additional_mlp = None
    module.no_target.set_value(jnp.asarray(arrays["p___target_enrich_dummy_embeddings__t0"][0]))
    history, targets = arrays["history_lengths"], arrays["num_targets"]
    rows = np.repeat([0, 1] * len(history), np.stack([history, targets], 1).ravel())
    additional = np.concatenate([arrays["a0"], arrays["a1"]], axis=1)

    def columns(which, of_targets=None):
        return module.columns(arrays["x"][rows == which], additional[rows == which], of_targets)

    out = np.zeros_like(arrays["out"])
    out[rows == 0], out[rows == 1] = columns(0), columns(1, arrays["t0"])
    np.testing.assert_allclose(out, arrays["out"], **case["tolerance"])


def test_context_over_slots():
    """Slots beyond a row's ids are the bias, ids beyond the slots are cut, short rows are zeros."""
    module = ContextTokens(2, 3, {"user": 1, "tags": 2}, min_lengths={"user": 4}, rngs=nnx.Rngs(0))
    module.biases.set_value(jnp.arange(9.0).reshape(3, 3))
    rng = np.random.default_rng(0)
    user, tags = rng.standard_normal((3, 2)), rng.standard_normal((8, 2))
    tags[4:] = np.nan
    embedded = {
        "user": jaxrec.JaggedArray(jnp.asarray(user), jnp.array([1, 1, 1], jnp.int32)),
        "tags": jaxrec.JaggedArray(jnp.asarray(tags), jnp.array([0, 1, 3], jnp.int32)),
    }
    found = nnx.jit(ContextTokens.__call__)(module, embedded, jnp.array([4, 3, 9]))
    slots = np.zeros((3, 3, 2))
    slots[0, 0], slots[2, 0] = user[0], user[2]
    slots[1, 1], slots[2, 1], slots[2, 2] = tags[0], tags[1], tags[2]
    kernels, biases = np.asarray(module.kernels[...]), np.asarray(module.biases[...])
    expected = np.einsum("bsi,sio->bso", slots, kernels) + biases
    np.testing.assert_allclose(found, expected.reshape(9, 3), rtol=1e-5, atol=1e-6)


def test_targets_of_interleaved_tokens():
    actions = ActionEncoder((1,), 2, rngs=nnx.Rngs(0))
    tokens = EventTokens(4, 6, hidden_dim=5, actions=actions, form="interleaved", rngs=nnx.Rngs(0))
    x = jnp.asarray(np.random.default_rng(0).standard_normal((3, 4), np.float32))
    single, double = tokens.targets(x, with_actions=False), tokens.targets(x)
    np.testing.assert_allclose(double[::2], single, rtol=1e-6)
    np.testing.assert_allclose(double[1], double[3], rtol=1e-6)
    np.testing.assert_allclose(tokens(x, actions=jnp.zeros(3, jnp.int32))[::2], single, rtol=1e-6)


def test_refusals():
    rngs = nnx.Rngs(0)
    with pytest.raises(ValueError, match=r"from 1 to 2\*\*31 - 1"):
        ActionEncoder((0,), 4, rngs=rngs)
    with pytest.raises(ValueError, match="need watch_times"):
        ActionEncoder((1,), 4, watch_thresholds=((30, 2),), rngs=rngs)(jnp.array([1]))
    with pytest.raises(ValueError, match="1 slot or more"):
        ContextTokens(4, 8, {"user": 0}, rngs=rngs)
    with pytest.raises(ValueError, match=r"min_lengths name \['item'\]"):
        ContextTokens(4, 8, {"user": 1}, min_lengths={"item": 2}, rngs=rngs)
    with pytest.raises(ValueError, match="'sum' or 'interleaved'"):
        EventTokens(4, 8, hidden_dim=4, form="both", rngs=rngs)
    with pytest.raises(ValueError, match="interleaved tokens are items and actions"):
        EventTokens(4, 8, hidden_dim=4, form="interleaved", rngs=rngs)
    actions = ActionEncoder((1,), 4, rngs=rngs)
    tokens = EventTokens(4, 8, hidden_dim=4, actions=actions, rngs=rngs)
    with pytest.raises(ValueError, match="have no actions"):
        tokens(jnp.ones((2, 4)))
    with pytest.raises(ValueError, match="of_targets and target_dim come together"):
        tokens.targets(jnp.ones((2, 4)), of_targets=jnp.ones((2, 3)))
