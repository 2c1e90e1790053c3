"""Tables of 8-bit rows with 8-bit optimizer state, behind caches and with open vocabularies."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxrec
from jaxrec.tier import Cached, ChangeTracker, Dynamic, Subscriber, ahead, make, publish
from jaxrec.tier.planning.tier import tier_of
from jaxrec.train.checkpoint import restore, save
from tests.tier.deltas.models import assert_same
from tests.tier.models import train_step

# Caches this small lose rows in every step.
pytestmark = pytest.mark.filterwarnings("ignore:the table .* thrashes")

ROWS, DIM, SAMPLES = 90, 8, 4
IDS = np.arange(ROWS)
SETTINGS = {
    "cached": Cached(rows=40, store="memory://"),
    "dynamic": Dynamic(store="memory://"),
}
every_format = pytest.mark.parametrize("dtype", ["int8", "float8_e4m3", "float8_e5m2"])
every_kind = pytest.mark.parametrize("kind", SETTINGS)


class Ranker(nnx.Module):
    """A table of packed rows whose optimizer state is packed, too."""

    def __init__(self, dtype: str, rows: int = ROWS, *, is_random: bool = False):
        optimizer = jaxrec.optim.adam(0.02, state_dtype="float8", stochastic_rounding=is_random)
        config = jaxrec.EmbeddingBagConfig("user", rows, DIM, initializer="normal", dtype=dtype)
        rngs = nnx.Rngs(0)
        self.embeddings = jaxrec.EmbeddingBagCollection([config], optimizer=optimizer, rngs=rngs)
        self.over = nnx.Linear(DIM, 1, rngs=rngs)

    def __call__(self, features):
        return self.over(self.embeddings(features).values)[:, 0]


def tiered(dtype: str, kind: str, *, is_random: bool = True) -> Ranker:
    rows = ROWS if kind == "cached" else 40
    ranker = functools.partial(Ranker, dtype, rows, is_random=is_random)
    return make(ranker, {"user": SETTINGS[kind]})


def stream(steps: int, kind: str = "cached", seed: int = 0):
    rng = np.random.default_rng(seed)
    more = {"id_bits": 64} if kind == "dynamic" else {}
    for _ in range(steps):
        ids = {"user": [rng.integers(0, ROWS, n) for n in rng.integers(1, 3, SAMPLES)]}
        features = jaxrec.KeyedJaggedArray.from_lists(ids, capacities={"user": 8}, **more)
        yield features, rng.integers(0, 2, SAMPLES).astype(np.float32)


def train(model, optimizer, batches) -> list[float]:
    return [float(train_step(model, optimizer, x, jnp.asarray(y))) for x, y in batches]


def contents(model, ids=IDS) -> dict[str, np.ndarray]:
    """Rows and state of ids, wherever they are."""
    arrays = {"rows": model.embeddings.rows("user", ids)}
    arrays |= model.embeddings.row_state("user", ids)
    return {name: np.asarray(array) for name, array in arrays.items()}


def known(model, kind: str) -> np.ndarray:
    """The ids that have a row."""
    if kind == "cached":
        return IDS
    (of_table,) = tier_of(model).vocabularies
    ids = set(of_table.vocabulary.map.items()[0].tolist())
    for stored, _ in of_table.transfer.store.scan():
        ids |= set(stored.tolist())
    return np.array(sorted(ids))


def assert_equal(found, expected) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


@pytest.mark.slow
@every_format
def test_cached_rows_train_as_those_of_a_whole_table(dtype):
    """Losses, rows and state: rounding to nearest does not depend on where a row is."""
    model, whole = tiered(dtype, "cached", is_random=False), Ranker(dtype)
    batches = ahead(model, stream(25), look_ahead=2)
    losses = train(model, jaxrec.Optimizer(model, optax.sgd(0.1)), batches)
    expected = train(whole, jaxrec.Optimizer(whole, optax.sgd(0.1)), stream(25))
    assert jaxrec.tier.statistics(model)["user"]["evicted"] > 25
    assert losses == expected
    assert_equal(contents(model), contents(whole))


@every_format
@every_kind
def test_evicted_rows_return_with_their_bytes(dtype, kind):
    model = tiered(dtype, kind)
    optimizer = jaxrec.Optimizer(model, optax.sgd(0.1))
    train(model, optimizer, ahead(model, stream(10, kind), look_ahead=1))
    ids = known(model, kind)
    before = contents(model, ids)
    evicted = jaxrec.tier.statistics(model)["user"]["evicted"]
    for features in ahead(model, [x for x, _ in stream(20, kind, seed=1)], look_ahead=1):
        model(features)
    assert jaxrec.tier.statistics(model)["user"]["evicted"] > evicted + 20
    assert_equal(contents(model, ids), before)


@every_kind
def test_a_restored_run_goes_on_as_if_undisturbed(tmp_path, kind):
    model = tiered("int8", kind)
    optimizer = jaxrec.Optimizer(model, optax.sgd(0.1))
    train(model, optimizer, ahead(model, stream(10, kind), look_ahead=2))
    save(tmp_path, model, optimizer)
    ids = known(model, kind)
    saved = contents(model, ids)

    other = tiered("int8", kind)
    other_optimizer = jaxrec.Optimizer(other, optax.sgd(0.1))
    restore(other, tmp_path, other_optimizer)
    assert_equal(contents(other, ids), saved)
    again = train(other, other_optimizer, ahead(other, stream(10, kind, seed=1)))
    assert again == train(model, optimizer, ahead(model, stream(10, kind, seed=1)))
    assert_equal(contents(other, ids), contents(model, ids))


@every_kind
def test_versions_hold_the_bytes_of_rows(tmp_path, kind):
    model, copy = tiered("int8", kind), tiered("int8", kind)
    optimizer = jaxrec.Optimizer(model, optax.sgd(0.1))
    tracker, subscriber = (
        ChangeTracker(model, ["publisher"]),
        Subscriber(copy, tmp_path, with_state=True),
    )
    for seed in range(3):
        train(model, optimizer, ahead(model, stream(3, kind, seed), look_ahead=1))
        publish(model, tmp_path, tracker=tracker, with_state=True)
        subscriber.update()
        assert_same(copy, model, with_state=True, ids=known(model, kind))
