"""The HSTU ranker is the authors' one, forward and backward, and each of its options works."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxrec
from jaxrec.nn import RankerFeatures
from tests.nn import ranker_cases, rankers
from tests.nn.ranker_cases import CASES, assert_gradients, fill

pytestmark = pytest.mark.usefixtures("compiled_fast")

ONE_LAYER = {"num_layers": 1}
LENGTHS, TARGETS = [12, 3, 0, 7, 20, 1, 9, 5], [3, 1, 2, 0, 4, 2, 1, 3]


# -- recorded cases --------------------------------------------------------------------------------

ASSEMBLED = [n for n in ranker_cases.names("preprocess_") if not n.endswith("context_mlp")]


@pytest.mark.every_case
@pytest.mark.parametrize("name", ASSEMBLED)
def test_tokens(name):
    form = "interleaved" if CASES[name]["meta"].get("interleaved") else "sum"
    model, batch, arrays = rankers.of_embeddings(name, form=form, num_layers=1, max_length=20)
    inner = "" if name == "preprocess_sum" else "___mlp"
    places, tolerance = ranker_cases.tokens(model, inner=inner), CASES[name]["tolerance"]
    fill(places, arrays)
    size = len(arrays["out"])

    def loss(model):
        tokens, _ = model.assemble(batch)
        return (tokens.states[:size] * arrays["grad_out"]).sum(), dataclasses.asdict(tokens)

    out, gradients, moved = rankers.step(model, loss)
    np.testing.assert_allclose(out["states"][:size], arrays["out"], **tolerance)
    np.testing.assert_array_equal(out["states"][size:], 0)
    np.testing.assert_array_equal(out["lengths"], arrays["out_lengths"])
    np.testing.assert_array_equal(out["num_targets"], arrays["out_num_targets"])
    np.testing.assert_array_equal(out["times"][:size], arrays["out_timestamps"])
    np.testing.assert_allclose(moved["item"], arrays["grad__x"], **tolerance)
    assert_gradients(places, gradients, model, arrays, tolerance)


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("name", ranker_cases.names("encoder_"))
def test_interleaved_encoders(name):
    meta, tolerance = CASES[name]["meta"], CASES[name]["tolerance"]
    arrays = ranker_cases.load(name)
    model, batch, arrays = rankers.of_embeddings(
        name,
        form="interleaved",
        num_layers=2,
        num_heads=meta["heads"],
        qk_dim=meta["attention_dim"],
        value_dim=meta["hidden_dim"],
        max_length=meta["max_seq_len"],
        contextual_mask=True,
        num_positions=len(arrays["p___positional_encoder___position_embeddings_weight"]),
        num_times=len(arrays["p___positional_encoder___timestamp_embeddings_weight"]),
        output="l2",
        block_size=8,
    )
    places = {
        **rankers.places_of_units(model, ""),
        **ranker_cases.tokens(model, "_input_preprocessor__", inner="___mlp"),
        **ranker_cases.positions(model.positions, "_positional_encoder__"),
    }
    fill(places, arrays)
    size = len(arrays["out"])

    def loss(model):
        states, _ = model.states(batch)
        return (states[:size] * arrays["grad_out"]).sum(), states

    out, gradients, moved = rankers.step(model, loss)
    np.testing.assert_allclose(out[:size], arrays["out"], **tolerance)
    np.testing.assert_allclose(moved["item"], arrays["grad__x"], **tolerance)
    assert_gradients(places, gradients, model, arrays, tolerance)


def filled(name):
    model, batch, arrays = rankers.whole(name)
    places = rankers.places_of_whole(model)
    of_tables = [key for key in arrays if key.startswith("p___embedding_collection")]
    fill(places, arrays, of_tables)
    return model, batch, arrays, places


@pytest.mark.slow
def test_the_whole_ranker_in_training():
    model, batch, arrays, places = filled("ranker_train")
    size, tolerance = len(arrays["c_item"]), CASES["ranker_train"]["tolerance"]

    def loss(model):
        user, item = model.states(batch)
        logits = model.tasks(user, item)
        losses = model.losses(logits, batch)
        out = {
            "user_encoding": user[:size],
            "item_encoding": item[:size],
            "predictions": model.tasks.predictions(logits)[:size].T,
            "labels": model.labels(batch)[:size].T,
            "weights": model.weights(batch)[:size].T,
            "losses": losses,
        }
        return losses.sum(), out

    out, gradients, moved = rankers.step(model, loss)
    for key, array in out.items():
        np.testing.assert_allclose(array, arrays[key], err_msg=key, **tolerance)
    for name, gradient in moved.items():
        expected = arrays[f"grad__p___embedding_collection__embeddings__t_{name}__weight"]
        np.testing.assert_allclose(gradient, expected, err_msg=name, **tolerance)
    assert_gradients(places, gradients, model, arrays, tolerance)


@pytest.mark.slow
def test_the_whole_ranker_in_inference():
    model, batch, arrays, _ = filled("ranker_inference")
    size, tolerance = len(arrays["c_item"]), CASES["ranker_inference"]["tolerance"]
    model.eval()
    user, item = nnx.jit(type(model).states)(model, batch)
    predictions = model.tasks.predictions(model.tasks(user, item))
    np.testing.assert_allclose(user[:size], arrays["user_encoding"], **tolerance)
    np.testing.assert_allclose(item[:size], arrays["item_encoding"], **tolerance)
    np.testing.assert_allclose(predictions[:size].T, arrays["predictions"], **tolerance)


# -- options ---------------------------------------------------------------------------------------


@nnx.jit(static_argnames="samples")
def value_and_gradients(model, batch, samples=None):
    model.input_dropout.deterministic = False
    (loss, logits), gradients = jaxrec.value_and_grad(
        lambda m: m.loss(batch, samples=samples), has_aux=True
    )(model)
    return loss, logits, gradients.dense


def close(one, other, rtol=1e-5, atol=1e-6):
    for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(x, y, rtol=rtol, atol=atol)


def training(model):
    model.train()
    return model


@pytest.mark.slow
def test_neither_remat_nor_chunks_change_a_number():
    batch = rankers.pack(rankers.lists(LENGTHS, TARGETS))
    expected, by_remat, by_chunks = (
        value_and_gradients(training(rankers.small(**ONE_LAYER, remat=remat)), batch, samples)
        for remat, samples in ((False, None), (True, None), (False, 16))
    )
    close(by_remat, expected)
    close(by_chunks, expected)


@pytest.mark.slow
def test_dropout_is_random_in_training_alone():
    batch = rankers.pack(rankers.lists(LENGTHS, TARGETS))
    model = rankers.small(dropout_rate=0.5, input_dropout_rate=0.2)
    call = nnx.jit(type(model).__call__)
    np.testing.assert_array_equal(call(model, batch), call(model, batch))
    model.train()
    first, second = call(model, batch)[:16], call(model, batch)[:16]
    assert float(jnp.abs(first - second).max()) > 1e-3
    with_remat = training(rankers.small(dropout_rate=0.5, remat=True))
    loss, _, gradients = value_and_gradients(with_remat, batch)
    assert np.isfinite(loss)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(gradients))


def test_a_row_depends_on_itself_alone():
    model = rankers.small()
    call = nnx.jit(type(model).__call__)
    batch = rankers.lists(LENGTHS, TARGETS)
    whole = np.split(np.asarray(call(model, rankers.pack(batch))), np.cumsum(TARGETS))
    for row in (0, 2, 4):
        alone = call(model, rankers.pack({key: [rows[row]] for key, rows in batch.items()}))
        np.testing.assert_allclose(alone[: TARGETS[row]], whole[row], rtol=1e-4, atol=1e-5)


def test_the_order_of_a_history_matters():
    model = rankers.small()
    call = nnx.jit(type(model).__call__)
    batch = rankers.lists([6], [2])
    first = call(model, rankers.pack(batch))
    batch["item"] = [batch["item"][0][::-1]]
    assert float(jnp.abs(call(model, rankers.pack(batch)) - first)[:2].max()) > 1e-3


@pytest.mark.slow
def test_truncation_keeps_the_newest_events():
    """One layer in front of truncation sees all; with none it would be a shorter history."""
    call = nnx.jit(type(rankers.small()).__call__)
    model = rankers.small(truncation=(1, 6), count_from="start", num_positions=1)
    # Times matter, so both batches have the same of them at the events that stay.
    batch = rankers.lists([12, 3], [3, 1])
    changed = {key: [list(row) for row in rows] for key, rows in batch.items()}
    changed["item"][0][2] = (changed["item"][0][2] + 1) % rankers.ITEMS
    found, other = call(model, rankers.pack(batch)), call(model, rankers.pack(changed))
    # An event that was cut still reaches the others through the first layer.
    assert float(jnp.abs(found - other)[:3].max()) > 1e-6
    np.testing.assert_allclose(found[3], other[3], rtol=1e-6)
    wide = rankers.small(truncation=(1, 12), count_from="start", num_positions=1)
    none = rankers.small(count_from="start", num_positions=1)
    expected = call(none, rankers.pack(batch))[:4]
    np.testing.assert_allclose(call(wide, rankers.pack(batch))[:4], expected, rtol=1e-5, atol=1e-6)
    assert float(jnp.abs(found[:3] - expected[:3]).max()) > 1e-4
    np.testing.assert_allclose(found[3], expected[3], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_truncation_by_hand():
    """The layers after it compute what they would of the newest tokens alone."""
    model = rankers.small(truncation=(1, 4))
    batch = rankers.pack(rankers.lists([9], [2]))
    tokens, _ = model.assemble(batch)
    states = model.positions(tokens.states, tokens.lengths, tokens.times, tokens.num_targets)
    states = model.stack.units[0](states, tokens.lengths, tokens.num_targets)
    keep = np.array([0, 6, 7, 8, 9, 10, 11])  # context, the newest four events, two targets
    last = model.stack.units[1](states[keep], jnp.array([7], jnp.int32), jnp.array([2], jnp.int32))
    found, _ = nnx.jit(type(model).states)(model, batch)
    expected = model.output(last[5:])
    np.testing.assert_allclose(found[:2], expected, rtol=1e-4, atol=1e-5)


def test_windows():
    """With a window of two and one layer a target sees the two newest events."""
    model = rankers.small(num_layers=1, max_attention_length=2, count_from="start")
    call = nnx.jit(type(model).__call__)
    batch = rankers.lists([8], [2])
    first = call(model, rankers.pack(batch))
    for place, is_seen in ((5, False), (6, True), (7, True)):
        changed = {key: [list(row) for row in rows] for key, rows in batch.items()}
        changed["item"][0][place] = (changed["item"][0][place] + 1) % rankers.ITEMS
        moved = float(jnp.abs(call(model, rankers.pack(changed)) - first)[:2].max())
        assert (moved > 1e-4) == is_seen, place


# -- training on several devices -------------------------------------------------------------------

ROWS = rankers.lists(LENGTHS * 2, TARGETS * 2)
# Capacities of a device that hold any two rows, so that all orders have one program.
CAPACITIES = {key: 8 if key.startswith("c_") or key == "user" else 40 for key in ROWS}
PLAN = {"item": jaxrec.mesh.row_wise(), "user": jaxrec.mesh.table_wise(device=3)}
# Equal optimizers share compiled programs.
SGD = optax.sgd(0.1)


@nnx.jit
def train_step(model, optimizer, batch):
    (loss, _), gradients = jaxrec.value_and_grad(lambda m: m.loss(batch), has_aux=True)(model)
    optimizer.update(model, gradients)
    return loss


def train(model, batches):
    """The losses of some steps, and the tables after them."""
    model.train()
    optimizer = jaxrec.Optimizer(model, SGD)
    losses = [float(train_step(model, optimizer, batch)) for batch in batches]
    return losses, tables_of(model)


def tables_of(model):
    return [np.asarray(model.embeddings.table(t.name)) for t in model.embeddings.configs]


def ordered(order):
    return {key: [lists[row] for row in order] for key, lists in ROWS.items()}


def sharded(rows, **options):
    """A model over eight devices, and a batch of all rows there."""
    mesh = jax.make_mesh((8,), ("data",))
    plan = jaxrec.plan.ShardingPlan.from_dict(PLAN)
    model = jaxrec.shard(rankers.small(**options), plan, mesh)
    host = jaxrec.KeyedJaggedArray.from_lists(rows)
    return model, jaxrec.mesh.shard_batch(host, mesh, capacities=CAPACITIES)


ONE = {key: 32 if capacity == 8 else 120 for key, capacity in CAPACITIES.items()}


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(ONE_LAYER, id="one_layer"),
        pytest.param(
            {"max_length": None, "form": "interleaved", "truncation": (1, 4)},
            id="interleaved_truncated",
        ),
    ],
)
@pytest.mark.slow  # the walk over modules has a smaller one
def test_eight_devices_equal_one(options):
    """Tables cut by rows and by columns; steps of both optimizers, to 1e-6."""
    expected = train(rankers.small(**options), [rankers.pack(ROWS, **ONE)] * 3)
    model, batch = sharded(ROWS, **options)
    found = train(model, [batch] * 3)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-6, atol=1e-6)
    close(found[1], expected[1], rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_balanced_devices_change_no_number():
    """Rows dealt to eight devices by their work, and the same rows as they come."""
    lengths = np.add(LENGTHS * 2, TARGETS * 2)
    work = jaxrec.data.sequence_work(lengths, attention_dim=16, dense_flops=1000)
    order = jaxrec.data.balanced_order(work, 8)[0].ravel()
    assert order.tolist() != list(range(16))
    results = []
    for rows in (ROWS, ordered(order)):
        model, batch = sharded(rows, **ONE_LAYER)
        results.append(train(model, [batch] * 2))
    close(*results, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_resumed_training_equals_to_the_bit(tmp_path):
    """With dropout, whose random numbers go on where they were."""
    options = {**ONE_LAYER, "dropout_rate": 0.3, "input_dropout_rate": 0.2}
    batches = [rankers.pack(ordered(np.roll(range(16), step)), **ONE) for step in range(4)]

    def make():
        model = rankers.small(**options)
        model.train()
        return model, jaxrec.Optimizer(model, SGD)

    model, optimizer = make()
    losses = [train_step(model, optimizer, batch) for batch in batches[:2]]
    jaxrec.train.checkpoint.save(tmp_path, model, optimizer)
    losses += [train_step(model, optimizer, batch) for batch in batches[2:]]
    again, its_optimizer = make()
    jaxrec.train.checkpoint.restore(again, tmp_path, its_optimizer)
    resumed = [train_step(again, its_optimizer, batch) for batch in batches[2:]]
    assert [float(x) for x in resumed] == [float(x) for x in losses[2:]]
    for found, expected in zip(tables_of(again), tables_of(model), strict=True):
        np.testing.assert_array_equal(found, expected)


# -- refusals --------------------------------------------------------------------------------------


def test_features_of_a_side_have_one_length():
    model, batch = rankers.small(), rankers.lists([3, 4], [1, 2])
    batch["time"] = [batch["time"][0] + [9], batch["time"][1][1:]]
    packed = rankers.pack(batch)
    with pytest.raises(ValueError, match="'item' and 'time' differ in the lengths"):
        model(packed)
    assert np.isnan(nnx.jit(type(model).__call__)(model, packed)[:3]).all()
    with pytest.raises(ValueError, match="so one capacity"):
        model(rankers.pack(rankers.lists([3], [1]), time=32))
    batch = rankers.lists([3, 4], [1, 2])
    with pytest.raises(KeyError, match=r"lacks \['c_time'\], features of the targets"):
        model(rankers.pack({k: v for k, v in batch.items() if k != "c_time"}))
    with pytest.raises(KeyError, match=r"lacks \['user'\], features of the context"):
        model(rankers.pack({k: v for k, v in batch.items() if k != "user"}))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"truncation": (2, 4)}, "from 1 to 1"),
        ({"output": "mean"}, "'l2', 'layer_norm' or 'time'"),
        ({"form": "both"}, "'sum' or 'interleaved'"),
        ({"max_length": 0}, "max_length=0"),
        ({"num_heads": 0}, "num_heads=0"),
    ],
)
def test_options_that_do_not_fit(options, message):
    with pytest.raises(ValueError, match=message):
        rankers.small(**options)


@pytest.mark.parametrize(
    ("features", "message"),
    [
        ({"items": {}}, "at least"),
        ({"times": "time"}, "names of two features"),
        ({"min_lengths": {"item": 2}}, r"min_lengths name \['item'\]"),
    ],
)
def test_features_that_do_not_fit(features, message):
    with pytest.raises(ValueError, match=message):
        RankerFeatures(**{"items": {"item": "c_item"}} | features)


def test_tables_that_do_not_fit():
    from jaxrec.nn import HSTURanker, TargetTask

    def make(*tables, **features):
        rngs = nnx.Rngs(0)
        configs = [jaxrec.EmbeddingConfig(name, 9, dim, of) for name, dim, of in tables]
        embeddings = jaxrec.EmbeddingCollection(configs, rngs=rngs)
        names = RankerFeatures({"item": "c_item"}, **features)
        return HSTURanker(embeddings, names, [TargetTask("a")], dim=8, max_length=9, rngs=rngs)

    with pytest.raises(ValueError, match="'c_item', which 0 tables have"):
        make(("item", 4, ("item",)))
    with pytest.raises(ValueError, match="are a pair, but their tables are of 4 and 6 columns"):
        make(("item", 4, ("item",)), ("other", 6, ("c_item",)))
    pair = ("item", 4, ("item", "c_item"))
    with pytest.raises(ValueError, match="the tables of the context are of one width"):
        make(pair, ("u", 4, ("u",)), ("v", 6, ("v",)), context={"u": 1, "v": 1})
