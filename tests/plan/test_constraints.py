"""What may be said of tables and of the planner, and what is refused."""

from __future__ import annotations

import pytest

import jaxrec
from jaxrec import optim
from jaxrec.mesh import table_wise
from jaxrec.plan import ParameterConstraints, Planner, Topology

TABLES = [
    jaxrec.EmbeddingBagConfig("a", 1000, 64, feature_names=("f", "g"), optimizer=optim.sgd(0.1)),
    jaxrec.EmbeddingBagConfig("b", 500, 64, optimizer=optim.sgd(0.1)),
]
H100 = Topology.named("h100", devices=4)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"sharding_types": ["diagonal"]}, "sharding_types are some of data_parallel"),
        ({"sharding_types": []}, "sharding_types are some of"),
        ({"storages": ["tape"]}, "storages are some of device, host, disk"),
        ({"exchanges": ["bags"]}, "exchanges are some of rows, sums"),
        ({"devices": []}, "devices are different numbers from 0"),
        ({"devices": [1, 1]}, "devices are different numbers from 0"),
        ({"devices": [-1]}, "devices are different numbers from 0"),
        ({"pooling_factors": 0}, "pooling_factors are numbers above 0"),
        ({"pooling_factors": [3.0, -1.0]}, "pooling_factors are numbers above 0"),
        ({"batch_sizes": 0}, "batch_sizes are numbers above 0"),
        ({"min_column_width": 0}, "min_column_width is 1 or more"),
        ({"cache_ratio": 0.0}, "cache_ratio is above 0 and at most 1"),
        ({"cache_ratio": 1.5}, "cache_ratio is above 0 and at most 1"),
        ({"dtype": "int8"}, "dtype is one of"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_values_that_are_refused(said, message):
    with pytest.raises(ValueError, match=message):
        ParameterConstraints(**said)


def test_a_placement_is_made_by_its_functions(unchecked):
    with pytest.raises(TypeError, match=r"placement is made by jaxrec\.mesh"):
        ParameterConstraints(placement="row_wise")


def plan(said=None, tables=TABLES, batch_size=400, **settings):
    return Planner(H100, said or {}, **settings).plan(tables, batch_size=batch_size)


def test_pooling_factors_and_batch_sizes_are_by_feature():
    said = {"a": ParameterConstraints(pooling_factors=[2, 5], batch_sizes=[400, 40])}
    a, b = plan(said).estimate.tables
    assert a.lookups == 2 * 100 + 5 * 10
    assert b.lookups == 100


@pytest.mark.parametrize("field", ["pooling_factors", "batch_sizes"])
def test_as_many_values_as_features(field):
    said = {"a": ParameterConstraints(**{field: [1, 2, 3]})}
    with pytest.raises(ValueError, match=f"table 'a' has 2 features and 3 {field}"):
        plan(said)


def test_constraints_are_for_tables_that_there_are():
    with pytest.raises(ValueError, match="constraints for table 'c', which the model lacks"):
        plan({"c": ParameterConstraints()})


def test_a_dtype_is_planned_for_configurations():
    said = {"a": ParameterConstraints(dtype="bfloat16")}
    a, _ = plan(said).estimate.tables
    assert (a.dtype, a.bytes % (1000 * 64 * 2)) == ("bfloat16", 0)


def test_weights_take_memory_of_batches():
    weighted = plan({"a": ParameterConstraints(is_weighted=True)}).estimate
    assert weighted.devices[0].bytes["batches"] > plan().estimate.devices[0].bytes["batches"]


def test_batches_ahead_take_memory():
    one, five = plan(batches=1).estimate, plan(batches=5).estimate
    assert five.devices[0].bytes["batches"] == 5 * one.devices[0].bytes["batches"]


def test_dense_parameters_take_memory():
    assert plan(dense_bytes=1000).estimate.devices[0].bytes["dense"] == 6000


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"reserve": 1.0}, "reserve is a part of memory"),
        ({"storages": ()}, "storages are some of device, host, disk"),
        ({"storages": ("tape",)}, "storages are some of device, host, disk"),
        ({"time_limit": 0.0}, "time_limit is above 0"),
        ({"gap": 0.0}, "gap is above 0"),
        ({"batches": 0}, "batches is 1 or more"),
        ({"proposers": ()}, "at least one proposer"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_settings_that_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Planner(H100, **settings)


@pytest.mark.parametrize("batch_size", [0, -4, 401])
def test_the_batch_is_divided_among_devices(batch_size):
    with pytest.raises(ValueError, match="the batch is divided among 4 devices"):
        plan(batch_size=batch_size)


def test_models_without_tables(unchecked):
    with pytest.raises(ValueError, match="there are no tables to plan"):
        plan(tables=[])
    with pytest.raises(TypeError, match="a plan is for a Flax model"):
        plan(tables=3)


def test_a_pinned_placement_must_fit():
    said = {"a": ParameterConstraints(placement=table_wise(device=9))}
    with pytest.raises(ValueError, match="table 'a' is placed table_wise on device 9"):
        plan(said)


def test_all_placements_may_be_pinned():
    said = {name: ParameterConstraints(placement=table_wise(2)) for name in ("a", "b")}
    found = plan(said)
    assert found.to_dict() == {"a": table_wise(2), "b": table_wise(2)}
    assert found.estimate.search == "every placement was decided"
