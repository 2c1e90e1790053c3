"""A model measured in evaluation mode, over exactly all samples."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

import jaxrec
from jaxrec import metrics
from jaxrec.data import WeightedBatch
from jaxrec.mesh import ahead
from jaxrec.train.evaluation import Evaluation

ROWS = np.random.default_rng(0).normal(3, 2, (10, 4)).astype(np.float32)
BATCHES = [ROWS[:4], ROWS[4:8], ROWS[8:]]
GROUP = metrics.MetricGroup(
    tasks=(metrics.Task(name="t", prediction="p", label="y"),),
    metrics={"mse": metrics.MeanSquaredError(window=None)},
)


class Model(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.frozen = nnx.BatchNorm(4, rngs=rngs, use_running_average=True)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.frozen(self.norm(x)))[:, 0]


def loss(model, x):
    traced.append(x.shape)
    p = model(x)
    return (p**2).mean(), {"p": p, "y": x[:, 1]}


traced: list[tuple[int, ...]] = []


def contents(model):
    modes = [
        (type(node).__name__, getattr(node, "use_running_average", None), node.deterministic)
        if isinstance(node, nnx.Dropout)
        else (type(node).__name__, node.use_running_average, None)
        for _, node in nnx.iter_graph(model)
        if isinstance(node, nnx.BatchNorm | nnx.Dropout)
    ]
    leaves = jax.tree.leaves(nnx.state(model))
    is_key = [jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) for x in leaves]
    arrays = [
        np.asarray(jax.random.key_data(x) if key else x).tolist()
        for x, key in zip(leaves, is_key, strict=True)
    ]
    return modes, arrays


def test_evaluation_mode():
    """No dropout and running statistics; the model stays in its modes, with its numbers."""
    model, evaluate = Model(), Evaluation()
    before = contents(model)
    got = evaluate(model, loss, GROUP, BATCHES)
    p, y = np.float64(ROWS[:, 0]) / (1 + 1e-5), np.float64(ROWS[:, 1])
    assert got["loss"] == pytest.approx(np.mean(p**2), rel=1e-6)
    assert got["t/lifetime_mse"] == pytest.approx(np.mean((p - y) ** 2), rel=1e-6)
    assert contents(model) == before
    assert any(mode[1] is False for mode in before[0])

    def failing(model, x):
        model(x)
        raise RuntimeError("no loss")

    with pytest.raises(RuntimeError, match="no loss"):
        evaluate(model, failing, None, BATCHES)
    assert contents(model) == before


def test_programs_are_kept():
    model, evaluate = Model(), Evaluation()
    traced.clear()
    first = evaluate(model, loss, GROUP, BATCHES)
    assert traced == [(4, 4), (2, 4)]
    assert evaluate(model, loss, GROUP, BATCHES) == first
    model.norm.mean[...] += 1
    assert evaluate(model, loss, GROUP, BATCHES)["loss"] != first["loss"]
    model.eval()  # which the copy is already
    evaluate(model, loss, GROUP, BATCHES)
    assert traced == [(4, 4), (2, 4)]
    assert evaluate(model, loss, None, BATCHES[:1]).keys() == {"loss"}
    assert traced == [(4, 4), (2, 4), (4, 4)]


def test_samples_count_by_their_weights():
    def weighted(model, x, weights):
        return (weights * x[:, 0]).sum() / weights.sum(), {}

    weights = np.float32([1, 0.5, 0, 2]), np.float32([0, 0, 0, 0]), np.float32([3, 1])
    batches = [WeightedBatch(*pair) for pair in zip(BATCHES, weights, strict=True)]
    got = Evaluation()(Model(), weighted, None, batches)["loss"]
    expected = np.average(np.float64(ROWS[:, 0]), weights=np.concatenate(weights))
    assert got == pytest.approx(expected, rel=1e-6)


def test_nothing_to_evaluate_on():
    with pytest.raises(ValueError, match="no batches to evaluate on"):
        Evaluation()(Model(), loss, None, [])


class Ranker(nnx.Module):
    def __init__(self):
        tables = [jaxrec.EmbeddingBagConfig(name, 64, 4) for name in ("a", "b")]
        self.embeddings = jaxrec.EmbeddingBagCollection(tables, rngs=nnx.Rngs(0))

    def __call__(self, features):
        return self.embeddings(features).values.sum(axis=1)


def ranker_loss(model, features):
    traced.append(features.batch_size)
    p = model(features)
    return (p**2).mean(), {"p": p, "y": p * p}


def on_mesh():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    placements = {"a": jaxrec.mesh.row_wise(), "b": jaxrec.mesh.row_wise(exchange="pooled")}
    plan = jaxrec.plan.ShardingPlan.from_dict(placements)
    model = jaxrec.shard(Ranker(), plan, mesh)
    random = np.random.default_rng(0)
    batches = []
    for most in (64, 64, 1, 5, 64, 3):  # even ones, and ones of few owners' rows
        ids = {name: random.integers(0, most, (16, 4)).tolist() for name in ("a", "b")}
        batch = jaxrec.KeyedJaggedArray.from_lists(ids, capacities=dict.fromkeys(ids, 8 * 8))
        batches.append(jaxrec.mesh.shard_batch(batch, mesh, capacities=dict.fromkeys(ids, 8)))
    return model, batches


class TestRoutedAhead:
    @pytest.mark.slow
    def test_the_same_numbers_as_one_by_one(self, monkeypatch):
        """While capacities follow the demand, and in a second call, which compiles nothing."""
        monkeypatch.setattr(ahead, "WINDOW", 2)
        model, batches = on_mesh()
        monkeypatch.setattr("jaxrec.train.evaluation.mesh_stores", lambda model: {})
        expected = Evaluation()(model, ranker_loss, GROUP, batches)
        outputs = list(Evaluation().outputs(model, ranker_loss, batches))
        monkeypatch.undo()
        monkeypatch.setattr(ahead, "WINDOW", 2)
        evaluate = Evaluation()
        assert evaluate(model, ranker_loss, GROUP, iter(batches)) == expected
        for got, wanted in zip(evaluate.outputs(model, ranker_loss, batches), outputs, strict=True):
            np.testing.assert_array_equal(got["p"], wanted["p"])
        assert evaluate._factors != {}
        assert ahead.capacity_factors(model) == {}
        assert model.embeddings.probe is None

    def test_a_second_evaluation_compiles_nothing(self):
        model, batches = on_mesh()
        evaluate = Evaluation()
        first = evaluate(model, ranker_loss, GROUP, batches)
        traced.clear()
        assert evaluate(model, ranker_loss, GROUP, batches) == first
        assert traced == []

    def test_no_batches(self):
        model, _ = on_mesh()
        with pytest.raises(ValueError, match="no batches to evaluate on"):
            Evaluation()(model, ranker_loss, None, [])
