"""Tables whose rows are mostly in a store train as tables that lie on the devices whole."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from flax import nnx

import jaxrec
from jaxrec.ragged import KeyedJaggedArray
from jaxrec.tier import Cached, Dynamic, ahead, make
from jaxrec.tier.planning.tier import tier_of
from jaxrec.train.checkpoint import CheckpointError, restore, save
from tests.tier import models
from tests.tier.test_exactness import PLACEMENTS, on_mesh

NUM_IDS = 6000
NAMES = ("item", "query", "item_wide")


def make_cached(optimizer: str, rows: int = 300, placement: str | None = None, **options):
    seed = options.pop("seed", None)

    def make_model():
        tables = dict.fromkeys(NAMES, Cached(rows, **options))
        return make(lambda: models.Ranker(NUM_IDS, optimizer), tables, seed=seed)

    return make_model() if placement is None else on_mesh(make_model, PLACEMENTS[placement])


def make_whole(optimizer: str):
    """The model with all rows on the device."""
    return models.Ranker(NUM_IDS, optimizer)


def make_stream(steps: int, samples: int = 8, seed: int = 0):
    """Batches of ids with a power law, 32 bits wide."""
    rng = np.random.default_rng(seed)
    batches = []
    for _ in range(steps):
        data = {
            key: [
                (rng.zipf(1.2, n) % NUM_IDS * 7919 % NUM_IDS).tolist()
                for n in rng.integers(0, 4, samples)
            ]
            for key in ("item", "query", "context")
        }
        data["age"] = [[int(age)] for age in rng.integers(0, 10, samples)]
        capacities = dict.fromkeys(data, 3 * samples)
        features = KeyedJaggedArray.from_lists(data, capacities=capacities)
        batches.append((features, rng.integers(0, 2, samples).astype(np.float32)))
    return batches


def all_rows(model) -> dict[str, np.ndarray]:
    """Rows and optimizer state of all ids of all tables."""
    result = {}
    for name in NAMES:
        collection = model.wide if name == "item_wide" else model.embeddings
        result[name] = np.asarray(collection.table(name))
        for key, array in collection.table_state(name).items():
            result[f"{name}/{key}"] = np.asarray(array)
    return result


def assert_same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray], rtol: float = 0):
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol, rtol, err_msg=name)


@pytest.mark.parametrize("optimizer", models.OPTIMIZERS)
def test_the_same_bits_as_whole_tables(optimizer: str):
    batches = make_stream(140)
    model, whole = make_cached(optimizer), make_whole(optimizer)
    losses = models.train(model, ahead(model, batches, look_ahead=2))
    np.testing.assert_array_equal(losses, models.train(whole, batches))
    assert tier_of(model).statistics()["item+item_wide"]["evicted"] > 300
    assert_same(all_rows(model), all_rows(whole))


def test_whole_tables_are_read_and_written():
    model, whole = make_cached("rowwise_adagrad"), make_whole("rowwise_adagrad")
    assert_same(all_rows(model), all_rows(whole))
    batches = make_stream(50)
    models.train(model, ahead(model, batches, look_ahead=2))
    rng = np.random.default_rng(0)
    rows, sums = rng.normal(size=(NUM_IDS, 8)).astype(np.float32), rng.random(NUM_IDS, np.float32)
    for each in (model, whole):
        each.embeddings.load_table("query", rows)
        each.embeddings.load_table_state("query", {"accumulator": sums})
    np.testing.assert_array_equal(model.embeddings.table("query"), rows)
    np.testing.assert_array_equal(model.embeddings.table_state("query")["accumulator"], sums)
    ids = rng.integers(0, NUM_IDS, 50)
    np.testing.assert_array_equal(model.embeddings.rows("query", ids), rows[ids])
    values = np.ones((3, 8), np.float32)
    model.embeddings.load_rows("query", [5, 5999, 7], values)
    np.testing.assert_array_equal(model.embeddings.rows("query", [7, 5, 5999]), values)
    with pytest.raises(ValueError, match=r"table 'query' has the rows 0 to 5,999, got id 6000"):
        model.embeddings.rows("query", [6000])


@pytest.mark.parametrize(
    ("placement", "optimizer"),
    [
        *itertools.product(["row_wise"], models.OPTIMIZERS),
        ("table_wise", "rowwise_adagrad"),
        ("column_wise", "adam"),
    ],
)
def test_over_a_mesh(placement: str, optimizer: str):
    batches = make_stream(40)
    model, whole = make_cached(optimizer, placement=placement), make_whole(optimizer)
    losses = models.train(model, ahead(model, batches, look_ahead=2))
    np.testing.assert_allclose(losses, models.train(whole, batches), rtol=1e-6, atol=1e-6)


predict = nnx.jit(lambda model, features: model(features))


@pytest.mark.parametrize("when", ["between_loops", "within_a_loop"])
def test_evaluation_reads_all_rows_and_changes_none(when: str):
    batches, others = make_stream(60), make_stream(30, seed=1)
    model, whole = make_cached("adam"), make_whole("adam")
    optimizer, of_whole = (jaxrec.Optimizer(each, models.TX) for each in (model, whole))

    def train(iterator, part):
        for expected in part:
            features, labels = next(iterator)
            loss = models.train_step(model, optimizer, features, labels)
            np.testing.assert_array_equal(loss, models.train_step(whole, of_whole, *expected))

    def evaluate():
        placed = ahead(model, others, is_training=False)
        for (features, _), (expected, _) in zip(placed, others, strict=True):
            np.testing.assert_array_equal(predict(model, features), predict(whole, expected))

    iterator = ahead(model, batches, look_ahead=3)
    train(iterator, batches[:30])
    if when == "between_loops":
        iterator.close()
        iterator = ahead(model, batches[30:], look_ahead=3)
    evaluate()
    train(iterator, batches[30:])
    evaluate()


@pytest.mark.slow
def test_evaluation_of_an_open_vocabulary_with_a_store():
    """Evicted ids read their rows, ids that were never trained read zeros."""
    batches, names = models.stream(40, 600, samples=8)
    tables = dict.fromkeys(NAMES, Dynamic(store="memory://"))
    small = make(lambda: models.Ranker(151, "adam"), tables)
    large = make(lambda: models.Ranker(2000, "adam"), tables)
    optimizers = [jaxrec.Optimizer(each, models.TX) for each in (small, large)]
    iterators = [ahead(each, batches, look_ahead=2) for each in (small, large)]
    evaluated = models.stream(10, 600, samples=8, seed=0)[0] + models.stream(5, 9, seed=5)[0]
    for number, pair in enumerate(zip(*iterators, strict=True)):
        losses = [
            models.train_step(each, optimizer, *batch)
            for each, optimizer, batch in zip((small, large), optimizers, pair, strict=True)
        ]
        np.testing.assert_array_equal(*losses)
        if number in (20, 39):
            rows = [ahead(each, evaluated, is_training=False) for each in (small, large)]
            for (one, _), (other, _) in zip(*rows, strict=True):
                np.testing.assert_array_equal(predict(small, one), predict(large, other))
    assert tier_of(small).statistics()["item+item_wide"]["evicted"] > 100
    assert tier_of(large).statistics()["item+item_wide"]["evicted"] == 0
    assert len(names) == 600


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "placement"),
    [
        (300, None),
        (200, None),
        (900, None),
        pytest.param(400, "row_wise", marks=pytest.mark.slow),
    ],
    ids=["the_same", "fewer_rows", "more_rows", "eight_devices"],
)
def test_a_restored_run_goes_on(tmp_path, rows: int, placement: str | None):
    """The checkpoint is saved while batches are planned ahead, and has the key of first values."""
    batches = make_stream(60)
    model = make_cached("adam")
    optimizer = jaxrec.Optimizer(model, models.TX)
    losses = []
    for number, (features, labels) in enumerate(ahead(model, batches, look_ahead=2), 1):
        losses.append(float(models.train_step(model, optimizer, features, labels)))
        if number == 30:
            save(tmp_path, model, optimizer, batches=number)

    other = make_cached("adam", rows, placement, seed=9)
    other_optimizer = jaxrec.Optimizer(other, models.TX)
    restore(other, tmp_path, other_optimizer)
    again = [
        float(models.train_step(other, other_optimizer, *batch))
        for batch in ahead(other, batches[30:], look_ahead=2)
    ]
    rtol = 0 if placement is None else 1e-5
    np.testing.assert_allclose(again, losses[30:], rtol=rtol)
    assert_same(all_rows(other), all_rows(model), rtol)


@pytest.mark.slow
def test_a_checkpoint_of_another_kind_is_refused(tmp_path):
    model = make_cached("sgd")
    save(tmp_path, model, jaxrec.Optimizer(model, models.TX))
    other = make(
        lambda: models.Ranker(300, "sgd"), dict.fromkeys(NAMES, Dynamic(store="memory://"))
    )
    with pytest.raises(
        CheckpointError, match=r"saved with jaxrec\.tier\.Cached and num_embeddings=6"
    ):
        restore(other, tmp_path)


@pytest.mark.parametrize(("rows", "most"), [(200, 8), (900, 9)], ids=["few_rows", "many_rows"])
def test_fewer_batches_wait_where_rows_are_few(rows: int, most: int):
    """Eleven batches under way have more than 300 distinct queries."""
    batches = make_stream(40, samples=16)
    model, whole = make_cached("adam", rows), make_whole("adam")
    optimizer, of_whole = (jaxrec.Optimizer(each, models.TX) for each in (model, whole))
    planned = set()
    for number, batch in enumerate(ahead(model, batches, look_ahead=8)):
        loss = models.train_step(model, optimizer, *batch)
        np.testing.assert_array_equal(loss, models.train_step(whole, of_whole, *batches[number]))
        planned.add(tier_of(model).order.last_planned - tier_of(model).order.last_taken)
    assert max(planned) <= most


def lists(**ids):
    return KeyedJaggedArray.from_lists(
        {"item": [[1]], "query": [[1]], "context": [[1]], "age": [[1]]} | ids, id_bits=64
    )


ERRORS = {
    "beyond_the_table": (
        lists(item=[[5, NUM_IDS]]),
        r"feature 'item', sample 0: id 6000 is not in table item\+item_wide, whose ids are 0 to "
        "5999; give the table more rows",
    ),
    "negative": (lists(context=[[-2]]), "feature 'context', sample 0: id -2 is not in table query"),
    "too_many": (
        lists(item=[list(range(100, 140))]),
        r"sample 0: no row of table item\+item_wide is left for id 130: the batch has 40 new ids, "
        r"and 30 of the 30 rows .* Give the table 40 rows or more \(jaxrec.tier.Cached\(rows=",
    ),
}


@pytest.mark.parametrize("is_training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize(("features", "message"), ERRORS.values(), ids=ERRORS)
def test_bad_batches(features, message: str, is_training: bool):
    model = make_cached("sgd", rows=30)
    with pytest.raises(ValueError, match=message):
        list(ahead(model, [features], is_training=is_training))
    # Nothing has changed.
    assert len(list(ahead(model, [lists()] * 3, is_training=is_training))) == 3


BAD_SETTINGS = {
    "no_rows": ({"rows": 0}, "rows is 1 or more, got 0"),
    "fraction": ({"rows": 5, "evict_fraction": 2}, "Cached: evict_fraction is above 0 and at most"),
    "scheme": ({"rows": 5, "store": "ftp://x"}, "no row store has the URL 'ftp://x'"),
}


@pytest.mark.parametrize(("options", "message"), BAD_SETTINGS.values(), ids=BAD_SETTINGS)
def test_bad_settings(options: dict, message: str):
    with pytest.raises(ValueError, match=message):
        make(lambda: models.Ranker(NUM_IDS, "sgd"), {"query": Cached(**options)})


def test_a_model_that_is_made_is_refused():
    with pytest.raises(TypeError, match=r"the model is made already.*give jaxrec.tier.make a func"):
        make(models.Ranker(NUM_IDS, "sgd"), dict.fromkeys(NAMES, Cached(100)))


def test_a_table_beyond_int32():
    config = jaxrec.EmbeddingConfig("user", num_embeddings=10**11, embedding_dim=4)
    model = make(
        lambda: jaxrec.EmbeddingCollection([config], rngs=nnx.Rngs(0)), {"user": Cached(64)}
    )
    assert model.configs == (config,)
    batch = KeyedJaggedArray.from_lists({"user": [[10**11 - 1, 3], [2**36]]}, id_bits=64)
    (features,) = ahead(model, [batch])
    rows = model(features)["user"].values[:3]
    assert len(np.unique(np.asarray(rows))) == 12
    assert np.abs(rows).max() <= 10**-5.5
    with pytest.raises(ValueError, match="id 100000000000 is not in table user"):
        list(ahead(model, [KeyedJaggedArray.from_lists({"user": [[10**11]]}, id_bits=64)]))
