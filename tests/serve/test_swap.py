"""Swaps of tables under a serving model: whole, from checkpoints, and from published versions."""

from __future__ import annotations

import threading

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import jaxrec
from jaxrec.serve import by_norm, quantize, save_quantized, snapshot, swap_tables
from jaxrec.tier import ChangeTracker, Subscriber, VersionError, publish
from jaxrec.train import checkpoint

BATCH = jaxrec.KeyedJaggedArray.from_lists(
    {"user": [[1, 2], [], [7]], "item": [[3], [4, 4], []], "seen": [[0], [5], [9]]}
)


class Ranker(nnx.Module):
    """Two collections and a dense layer."""

    def __init__(self, seed: int = 0):
        rngs = nnx.Rngs(seed)
        tables = [
            jaxrec.EmbeddingBagConfig("user", 40, 8, initializer="normal"),
            jaxrec.EmbeddingBagConfig("item", 30, 8, initializer="normal"),
        ]
        self.embeddings = jaxrec.EmbeddingBagCollection(tables, rngs=rngs)
        self.history = jaxrec.EmbeddingCollection(
            [jaxrec.EmbeddingConfig("seen", 20, 8)], rngs=rngs
        )
        self.over = nnx.Linear(24, 1, rngs=rngs)

    def __call__(self, features):
        seen = self.history(features)["seen"].to_padded_dense(1)[:, 0]
        pooled = self.embeddings(features).values
        return self.over(jax.numpy.concatenate([pooled, seen], axis=1))[:, 0]


predict = nnx.jit(lambda model, batch: model(batch), graph=False)


def constant(value: float) -> Ranker:
    """A model all of whose variables are one number, which every format holds exactly."""
    model = Ranker()
    for collection in (model.embeddings, model.history):
        for config in collection.configs:
            shape = (config.num_embeddings, config.embedding_dim)
            collection.load_table(config.name, np.full(shape, value))
    nnx.update(model.over, jax.tree.map(lambda x: jax.numpy.full_like(x, value),
                                        nnx.state(model.over)))  # fmt: skip
    return model


def same_scores(model: nnx.Module, other: nnx.Module) -> bool:
    return np.array_equal(predict(model, BATCH), predict(other, BATCH))


@pytest.mark.parametrize("dtype", ["int8", "int4", "float16"])
def test_a_float_model(dtype):
    small, source = quantize(Ranker(0), dtype), Ranker(1)
    before = np.asarray(predict(small, BATCH))
    old = snapshot(small)
    assert swap_tables(small, source) == 1
    assert same_scores(small, quantize(source, dtype))
    np.testing.assert_array_equal(predict(old, BATCH), before)
    assert not small.embeddings.is_trainable
    # The source's arrays are its own.
    optimizer = jaxrec.Optimizer(source, optax.sgd(0.1))

    @nnx.jit(donate_argnums=(0, 1))
    def step(model, optimizer):
        _, gradients = jaxrec.value_and_grad(lambda model: model(BATCH).sum())(model)
        optimizer.update(model, gradients)

    step(source, optimizer)
    assert np.isfinite(predict(small, BATCH)).all()


def test_a_quantized_model():
    small, source = quantize(Ranker(0), "int4"), quantize(Ranker(1), "int4")
    swap_tables(small, source)
    assert same_scores(small, source)
    source.embeddings.load_rows("user", [1], np.ones((1, 8)))  # donates the source's rows
    assert not same_scores(small, source)


def test_pruned_ids_stay_pruned():
    prune = {"user": by_norm(share=0.5)}
    small = quantize(Ranker(0), prune=prune)
    is_kept = np.asarray(small.embeddings.table("user")).any(axis=1)
    swap_tables(small, Ranker(1))
    expected = np.asarray(quantize(Ranker(1)).embeddings.table("user"))
    np.testing.assert_array_equal(small.embeddings.table("user"), expected * is_kept[:, None])
    source = quantize(Ranker(2), prune=prune)
    swap_tables(small, source)
    np.testing.assert_array_equal(small.embeddings.table("user"), source.embeddings.table("user"))


def test_a_model_over_a_mesh():
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    names = ("user", "item", "seen")
    plan = jaxrec.plan.ShardingPlan.from_dict(dict.fromkeys(names, jaxrec.mesh.row_wise()))
    small = quantize(Ranker(0))
    swap_tables(small, jaxrec.shard(lambda: Ranker(1), plan, mesh))
    assert same_scores(small, quantize(Ranker(1)))


def test_checkpoints(tmp_path):
    source = Ranker(1)
    optimizer = jaxrec.Optimizer(source, optax.sgd(0.1))
    checkpoint.save(tmp_path, source, optimizer)
    small = quantize(Ranker(0), "int4")
    assert swap_tables(small, tmp_path, step=0) == 1
    assert same_scores(small, quantize(source, "int4"))


def test_a_saved_quantized_model(tmp_path):
    source = quantize(Ranker(1), "int4", prune={"user": by_norm(share=0.5)})
    save_quantized(source, tmp_path)
    small = quantize(Ranker(0), "int4")
    swap_tables(small, str(tmp_path))
    assert same_scores(small, source)


def test_published_versions(tmp_path):
    model = Ranker(1)
    tracker = ChangeTracker(model, consumers=["publisher"])
    small = quantize(Ranker(0), prune={"item": by_norm(share=0.5)})
    subscriber = Subscriber(small, tmp_path)
    assert swap_tables(small, subscriber) == 0
    for version, rows in enumerate([[], [1, 7], [3]], 1):
        model.embeddings.load_rows("user", rows, np.full((len(rows), 8), float(version)))
        model.embeddings.load_rows("item", [3, 4], np.full((2, 8), float(version)))
        tracker.mark("user", rows)
        tracker.mark("item", [3, 4])
        publish(model, tmp_path, tracker=tracker, full_every=10)
        before = snapshot(small)
        scores = np.asarray(predict(before, BATCH))
        assert swap_tables(small, subscriber) == 1
        assert subscriber.version == version
        expected = quantize(Ranker(0), prune={"item": by_norm(share=0.5)})
        swap_tables(expected, model)
        assert same_scores(small, expected)
        np.testing.assert_array_equal(predict(before, BATCH), scores)
    assert swap_tables(small, subscriber) == 0


def test_a_damaged_version_changes_nothing(tmp_path):
    model = Ranker(1)
    publish(model, tmp_path)
    small = quantize(Ranker(0))
    subscriber, before = Subscriber(small, tmp_path), snapshot(small)
    for path in tmp_path.rglob("*"):
        if path.is_file() and path.suffix != ".json" and path.stat().st_size > 9:
            path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(VersionError):
        swap_tables(small, subscriber)
    assert subscriber.version == 0
    assert snapshot(small) is before
    publish(model, tmp_path)
    assert swap_tables(small, subscriber) >= 1


def test_a_published_nan_changes_nothing(tmp_path):
    model = Ranker(1)
    model.embeddings.load_rows("item", [3], np.full((1, 8), np.nan))
    publish(model, tmp_path)
    small = quantize(Ranker(0))
    subscriber, before = Subscriber(small, tmp_path), snapshot(small)
    with pytest.raises(ValueError, match="table 'item', given row 3, column 0 is nan"):
        swap_tables(small, subscriber)
    assert subscriber.version == 0
    assert same_scores(small, before)


@pytest.mark.parametrize("source", ["models", "versions"])
def test_requests_in_other_threads_see_one_version(tmp_path, source):
    values = (1.0, 2.0, 3.0, 4.0, 5.0, 6.0)
    models = [constant(value) for value in values]
    small = quantize(models[0], "int8")
    subscriber = Subscriber(small, tmp_path)
    scores = [tuple(np.asarray(predict(quantize(model), BATCH)).tolist()) for model in models]
    assert len(set(scores)) == len(values)
    results: list[list[tuple]] = [[] for _ in range(3)]
    stop, errors = threading.Event(), []

    def serve(result: list[tuple]) -> None:
        try:
            while not stop.is_set():
                result.append(tuple(np.asarray(predict(snapshot(small), BATCH)).tolist()))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=serve, args=(result,)) for result in results]
    for thread in threads:
        thread.start()
    for model in models[1:]:
        if source == "models":
            swap_tables(small, model)
        else:
            publish(model, tmp_path)
            swap_tables(small, subscriber)
        answered = [len(result) for result in results]
        while not errors and any(len(r) < n + 2 for r, n in zip(results, answered, strict=True)):
            pass
    stop.set()
    for thread in threads:
        thread.join()
    assert errors == []
    for result in results:
        versions = [scores.index(each) for each in result]  # a mixture is not in the list
        assert versions == sorted(versions)
        assert versions[-1] == len(values) - 1


def test_snapshots_are_shared_until_the_model_changes():
    small = quantize(Ranker(0))
    first = snapshot(small)
    assert snapshot(small) is first
    nnx.update(small.over, nnx.state(Ranker(1).over))
    assert snapshot(small) is not first
    assert same_scores(snapshot(small), small)


class Other(nnx.Module):
    def __init__(self, rows: int = 40, bias: bool = True):
        rngs = nnx.Rngs(0)
        tables = [jaxrec.EmbeddingBagConfig("user", rows, 8)]
        self.embeddings = jaxrec.EmbeddingBagCollection(tables, rngs=rngs)
        self.over = nnx.Linear(8, 1, use_bias=bias, rngs=rngs)


def wider(model: Other) -> Other:
    model.over = nnx.Linear(9, 1, rngs=nnx.Rngs(0))
    return model


def with_nan(model: Other) -> Other:
    model.embeddings.load_rows("user", [7], np.full((1, 8), np.nan))
    return model


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda s, path: swap_tables(Other(), Other()), TypeError, "'user' are not quantized"),
        (lambda s, path: swap_tables(s, Other(41)), ValueError, "different tables: table 'user'"),
        (
            lambda s, path: swap_tables(s, quantize(Other(), "int4")),
            ValueError,
            "table 'user' is int4 in the source, but int8 in the model",
        ),
        (
            lambda s, path: swap_tables(s, Other(bias=False)),
            ValueError,
            "variable 'over/bias' is not in the source",
        ),
        (
            lambda s, path: swap_tables(s, wider(Other())),
            ValueError,
            r"variable 'over/kernel' is float32\[9, 1\] in the source, but float32\[8, 1\]",
        ),
        (
            lambda s, path: swap_tables(s, with_nan(Other())),
            ValueError,
            "table 'user', row 7, column 0 is nan",
        ),
        (
            lambda s, path: swap_tables(s, path),
            checkpoint.CheckpointError,
            "there is no saved model here",
        ),
        (
            lambda s, path: swap_tables(s, Other(), step=3),
            ValueError,
            "step=3 names a checkpoint",
        ),
        (
            lambda s, path: swap_tables(s, Subscriber(quantize(Other()), path)),
            ValueError,
            "takes versions over into another model",
        ),
    ],
    ids=[
        "float", "rows", "formats", "missing", "shape", "nan", "no_checkpoint", "step",
        "subscriber",
    ],
)  # fmt: skip
def test_errors(call, error, message, tmp_path):
    small = quantize(Other())
    before = snapshot(small)
    with pytest.raises(error, match=message):
        call(small, tmp_path)
    assert snapshot(small) is before
