"""Generation is the exact ranking of all items by the model's own likelihood, also when served."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType

import jaxrec
from jaxrec.nn import SemanticIdDecoder
from jaxrec.nn.semantic_ids import SemanticIds

pytestmark = pytest.mark.usefixtures("compiled_fast")

ITEMS, LONGEST = 12, 4
CODES = np.random.default_rng(0).integers(0, 3, (ITEMS, 2))
HISTORIES = [[1, 2, 3], [], [7], [9, 4, 4, 5]]
USERS = [[5], [1], [7], [0]]
FORMS = pytest.mark.parametrize("encoders", [0, 1], ids=["decoder_only", "encoder_decoder"])


def batch_of(histories, users=USERS):
    return jaxrec.KeyedJaggedArray.from_lists(
        {"history": histories, "user": users}, capacities={"history": 16, "user": 8}
    )


@functools.cache
def make(encoders):
    ids = SemanticIds.of(CODES, sizes=(3, 3), last_size=6)
    model = SemanticIdDecoder(
        ids, dim=8, num_layers=2 - encoders, num_encoder_layers=encoders, num_heads=2,
        max_length=LONGEST + 1, num_user_tokens=3, capacity=ITEMS + 4, block_size=16,
        rngs=nnx.Rngs(0),
    )  # fmt: skip
    # Larger values, so that items differ by more than rounding.
    nnx.update(model, jax.tree.map(lambda x: 3 * x, nnx.state(model, nnx.Param)))
    model.eval()
    return model


generate = nnx.jit(lambda model, batch: model.generate(batch, k=14, beam_size=14, longest=LONGEST))
without_seen = nnx.jit(
    lambda model, batch: model.generate(
        batch, k=14, beam_size=14, longest=LONGEST, exclude=("history",)
    )
)
losses = nnx.jit(lambda model, batch: model(batch))


def likelihoods(model, encoders):
    """Log-likelihood of each item after each history, by teacher forcing."""
    # The causal model's loss has the history's own items, too.
    known = np.zeros(4) if encoders else np.asarray(losses(model, batch_of(HISTORIES)))
    found = [
        known - np.asarray(losses(model, batch_of([[*row, item] for row in HISTORIES])))
        for item in range(ITEMS)
    ]
    return np.stack(found, axis=1)


@pytest.mark.slow
@FORMS
@pytest.mark.every_case
def test_wide_beams_rank_all_items_by_their_likelihood(encoders):
    model = make(encoders)
    expected, found = likelihoods(model, encoders), generate(model, batch_of(HISTORIES))
    order = np.argsort(-expected, axis=1)
    np.testing.assert_array_equal(np.asarray(found.items)[:, :ITEMS], order)
    np.testing.assert_allclose(
        np.asarray(found.scores)[:, :ITEMS], np.take_along_axis(expected, order, 1), rtol=1e-4
    )
    assert (np.asarray(found.items)[:, ITEMS:] == -1).all()  # no item that does not exist
    np.testing.assert_allclose(np.exp(expected).sum(1), np.exp(found.scores).sum(1), rtol=1e-4)
    assert (np.exp(expected).sum(1) < 1).all()  # the rest is of codes that no item has
    rest = np.asarray(without_seen(model, batch_of(HISTORIES)).items)
    for row, seen in enumerate(HISTORIES):
        kept = [item for item in order[row].tolist() if item not in seen]
        assert rest[row, : len(kept)].tolist() == kept


@FORMS
@pytest.mark.every_case
def test_unknown_items_and_long_histories_are_not_a_number(encoders):
    model = make(encoders)
    found = generate(model, batch_of([[1], [ITEMS], [0, 1, 2, 3, 4], [2]]))
    assert (np.asarray(found.items)[1:3] == -1).all()
    assert np.isnan(np.asarray(found.scores)[1:3, 0]).all()
    assert np.isfinite(np.asarray(found.scores)[[0, 3], 0]).all()
    loss = np.asarray(losses(model, batch_of([[1, 2], [ITEMS], [1, 99], [2, 3]])))
    assert np.isnan(loss).tolist() == [False, True, True, False]


@pytest.mark.slow
@FORMS
@pytest.mark.parametrize("axes", ["Auto", "Explicit"])
def test_eight_devices_generate_and_learn_what_one_does(encoders, axes):
    rows = {"history": HISTORIES * 4, "user": USERS * 4}
    model, batch = make(encoders), jaxrec.KeyedJaggedArray.from_lists(rows)
    found, loss = without_seen(model, batch), losses(model, batch)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(getattr(AxisType, axes),))
    placed = jaxrec.shard(nnx.clone(model), jaxrec.plan.ShardingPlan.from_dict({}), mesh)
    batch = jaxrec.mesh.shard_batch(batch, mesh)
    beams = without_seen(placed, batch)
    assert len(beams.items.sharding.device_set) == 8
    np.testing.assert_array_equal(beams.items.reshape(16, 14), found.items)
    np.testing.assert_allclose(beams.scores.reshape(16, 14), found.scores, rtol=1e-5)
    np.testing.assert_allclose(losses(placed, batch).reshape(16), loss, rtol=1e-5)


@pytest.mark.slow
def test_training_learns_what_follows():
    """Item ``i`` is followed by ``i + 1``: the first beam says so."""
    ids = SemanticIds.of(CODES, sizes=(3, 3), last_size=6)
    model = SemanticIdDecoder(
        ids, dim=16, num_layers=1, num_heads=2, max_length=5, dropout_rate=0.1, rngs=nnx.Rngs(1)
    )
    optimizer = jaxrec.Optimizer(model, optax.adam(2e-2))

    @nnx.jit
    def step(model, optimizer, batch):
        loss, gradients = jaxrec.value_and_grad(lambda model: model.loss(batch))(model)
        optimizer.update(model, gradients)
        return loss

    rows = [[(start + n) % ITEMS for n in range(4)] for start in range(ITEMS)]
    batch = jaxrec.KeyedJaggedArray.from_lists({"history": rows})
    first = float(step(model, optimizer, batch))
    for _ in range(60):
        last = float(step(model, optimizer, batch))
    assert last < 0.4 * first
    model.eval()
    asked = jaxrec.KeyedJaggedArray.from_lists({"history": [row[:3] for row in rows]})
    beams = nnx.jit(lambda model, batch: model.generate(batch, k=1, beam_size=4))(model, asked)
    assert (np.asarray(beams.items)[:, 0] == [row[3] for row in rows]).mean() > 0.8
    np.testing.assert_allclose(model.loss(batch), model(batch).sum() / (4 * ITEMS * 3), rtol=1e-5)


@pytest.mark.slow
def test_appended_items_are_served_without_a_new_export(tmp_path):
    """An exported model answers as the model does; `publish` brings new items to it."""
    graph, state = nnx.split(make(0))
    model = nnx.merge(graph, state)
    batch = batch_of(HISTORIES)

    def serve(model, features):
        beams = model.generate(features, k=14, beam_size=14, longest=LONGEST)
        return {"items": beams.items, "scores": beams.scores}

    jaxrec.serve.export(
        model, tmp_path / "model", function=serve, example=batch, batch_sizes=(4,),
        platforms=("cpu",),
    )  # fmt: skip
    served = jaxrec.serve.load(tmp_path / "model")
    out, expected = served.predict(batch), generate(model, batch)
    np.testing.assert_array_equal(out["items"], expected.items)
    np.testing.assert_allclose(out["scores"], expected.scores, rtol=1e-5)

    ids = SemanticIds.of(CODES, sizes=(3, 3), last_size=6)
    model.set_items(ids.append([[0, 1], [2, 2]], items=[100, 101]))
    jaxrec.tier.publish(model, tmp_path / "versions")
    from jaxrec.serve.artifact.refresh import Refresher

    assert Refresher(served, tmp_path / "versions").update() == 1
    out = served.predict(batch)
    assert {ITEMS, ITEMS + 1} <= {*out["items"][0].tolist()}
    np.testing.assert_array_equal(out["items"], generate(model, batch).items)


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda model, ids: model.generate(batch_of(HISTORIES), k=5, beam_size=4), "k must be"),
        (lambda model, ids: model.generate(batch_of(HISTORIES), longest=9), "longest must be"),
        (lambda model, ids: model.set_items(SemanticIds.of(CODES, sizes=(3, 3))), "codes of sizes"),
        (
            lambda model, ids: model.set_items(
                ids.append([[0, 0], [1, 0], [2, 0], [0, 2], [1, 2]], items=range(50, 55))
            ),
            "17 items do not fit a capacity of 16",
        ),
        (lambda model, ids: SemanticIdDecoder(ids, dim=9, rngs=nnx.Rngs(0)), "does not divide"),
        (lambda model, ids: SemanticIdDecoder(ids, max_length=0, rngs=nnx.Rngs(0)), "max_length"),
    ],
)
def test_errors_say_what_is_wrong(call, message):
    with pytest.raises(ValueError, match=message):
        call(make(0), SemanticIds.of(CODES, sizes=(3, 3), last_size=6))
    assert isinstance(make(0).codes[...], jnp.ndarray)
