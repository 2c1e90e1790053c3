"""The calls of a model's tables are those of a training step."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from jaxrec import EmbeddingBagConfig, EmbeddingConfig, optim
from jaxrec.embed import apply_gradients, init_tables, lookup
from jaxrec.embed.kernels import registry
from jaxrec.embed.kernels.trial import Form, size_of
from jaxrec.plan import ParameterConstraints
from jaxrec.ragged import KeyedJaggedArray
from jaxrec.tune.calls import Batch, calls_of

pytestmark = pytest.mark.every_case

RULE = optim.rowwise_adagrad(0.1)
BAGS = [
    EmbeddingBagConfig("a", 50, 8, feature_names=["a1", "a2"], optimizer=RULE),
    EmbeddingBagConfig("b", 20, 8, pooling="mean", optimizer=RULE),
    EmbeddingBagConfig("c", 30, 4, dtype="bfloat16", optimizer=optim.adam(0.1)),
    EmbeddingBagConfig("d", 30, 4, trainable=False, optimizer=RULE),
]
SEQUENCES = [EmbeddingConfig("s", 40, 8, optimizer=RULE)]
NONE = {table.name: ParameterConstraints() for table in (*BAGS, *SEQUENCES)}
CONSTRAINTS = NONE | {
    "a": ParameterConstraints(pooling_factors=[2, 0.5]),
    "s": ParameterConstraints(pooling_factors=3),
}
IDS = {"a1": 2.0, "a2": 0.5, "s": 3.0}  # one in the other features


@pytest.fixture
def made(monkeypatch):
    """Form and size of each call that is chosen an implementation for."""
    calls = set()
    choose = registry.Primitive.choose

    def noting(primitive, arguments, **options):
        if primitive.name in ("pooled_lookup", "row_lookup", "fused_update", "sum_rows"):
            form = Form.of(primitive.name, arguments)
            calls.add((form, size_of(primitive.name, arguments)))
        return choose(primitive, arguments, **options)

    monkeypatch.setattr(registry.Primitive, "choose", noting)
    return calls


@pytest.mark.parametrize("tables", [BAGS, SEQUENCES], ids=["bags", "sequences"])
def test_calls_are_those_of_a_step(made, tables):
    lists = {
        feature: [[1] * (i % 2 if IDS.get(feature) == 0.5 else int(IDS.get(feature, 1)))
                  for i in range(6)]
        for table in tables
        for feature in table.feature_names
    }  # fmt: skip
    features = KeyedJaggedArray.from_lists(lists)
    store = init_tables(tables, RULE, jax.random.key(0))
    activations, residuals = lookup(store, features)
    apply_gradients(store, residuals, activations, step=0)
    calls = calls_of(tables, CONSTRAINTS, Batch(6))
    assert {call.form for call in calls} == {form for form, _ in made}
    for form, size in made:  # whose capacities are rounded up
        (same,) = (call.size for call in calls if call.form == form)
        assert all(a <= b <= 2 * a for a, b in zip(same, size, strict=True))


def test_calls_of_packed_rows():
    table = EmbeddingBagConfig("p", 50, 8, dtype="int8", optimizer=RULE)
    calls = calls_of([table], {"p": ParameterConstraints()}, Batch(6, is_sharded=True))
    assert [call.primitive for call in calls] == ["pooled_lookup", "row_lookup", "sum_rows"]
    pooled, rows, _ = calls
    assert str(pooled.form) == "pooled_lookup D8 TrainedInt8Rows() float32"
    arrays = pooled.make()
    assert arrays["table"].row_format == table.row_format
    first = [[0, 1, 2, 0, 1, 2, 0, 1], [1, 2, 3, 1, 2, 3, 1, 2]]
    np.testing.assert_allclose(rows.make()["table"][:2], first, atol=0.01)


def test_calls_of_sharded_tables():
    calls = calls_of(BAGS[:1], CONSTRAINTS, Batch(6, is_sharded=True))
    primitives = ["pooled_lookup", "row_lookup", "fused_update", "sum_rows"]
    assert [call.primitive for call in calls] == primitives
    assert {call.size[0] for call in calls} == {15}


@pytest.mark.parametrize("primitive", ["pooled_lookup", "row_lookup", "fused_update", "sum_rows"])
@pytest.mark.parametrize("is_weighted", [False, True], ids=["plain", "weighted"])
def test_arrays_are_arguments(primitive, is_weighted):
    constraints = {
        name: dataclasses.replace(each, is_weighted=is_weighted)
        for name, each in CONSTRAINTS.items()
    }
    for call in calls_of([*BAGS, *SEQUENCES], constraints, Batch(6, is_sharded=True)):
        if call.primitive == primitive:
            arrays = call.make()
            arguments = {**arrays, **call.static}
            assert Form.of(primitive, arguments) == call.form
            assert size_of(primitive, arguments) == call.size
            getattr(registry.IMPLEMENTATIONS[-1].module, primitive)(**arguments)


def test_tables_are_cut_to_the_memory():
    rows = {"a": 1_500_000_000, "b": 500_000_000, "e": 3}
    tables = [
        EmbeddingBagConfig(name, count, 16, optimizer=optim.sgd(0.1))
        for name, count in rows.items()
    ]
    constraints = {name: ParameterConstraints() for name in "abe"}
    call, _ = calls_of(tables, constraints, Batch(4, max_bytes=64_000))
    counts = call.static["layout"].row_counts
    assert counts == (749, 249, 1)
    ids = np.asarray(call.make()["ids"]).reshape(3, 4)
    assert (ids >= 0).all()
    assert (ids < np.array(counts)[:, None]).all()


@pytest.mark.parametrize(("skew", "least", "most"), [("powerlaw", 0.3, 0.7), ("uniform", 0, 0.1)])
def test_skew(skew, least, most):
    table = EmbeddingBagConfig("a", 10_000, 4, optimizer=RULE)
    call, _ = calls_of([table], NONE, Batch(2000, ids=2, skew=skew))
    share = np.mean(np.asarray(call.make()["ids"]) < 100)
    assert least < share < most


def test_ids_of_all_features_are_given_at_once():
    call, *_ = calls_of(BAGS[:1], CONSTRAINTS, Batch(6, ids=4))
    assert call.static["layout"].capacities == (24, 24)
    assert np.asarray(call.make()["lengths"]).tolist() == [4] * 12


def test_fewer_pooling_factors_than_features():
    constraints = {"a": ParameterConstraints(pooling_factors=[1, 2, 3])}
    with pytest.raises(ValueError, match="table 'a' has 2 features and 3 pooling_factors"):
        calls_of(BAGS[:1], constraints, Batch(6))
