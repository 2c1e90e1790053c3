"""The ways to place a table that the planner says it considers."""

from __future__ import annotations

import jaxrec
from jaxrec.mesh import row_wise
from jaxrec.plan import ParameterConstraints, Planner, Topology

TABLES = [
    jaxrec.EmbeddingBagConfig("few", 3, 64),
    jaxrec.EmbeddingConfig("ids", 1000, 48),
    jaxrec.EmbeddingBagConfig("fixed", 1000, 64),
]


def considered(**settings):
    constraints = {"fixed": ParameterConstraints(placement=row_wise(shares=range(1, 9)))}
    planner = Planner(Topology.named("h100", devices=8), constraints, **settings)
    return planner, planner.options(TABLES, batch_size=64)


def test_ways_and_reasons():
    _, ways = considered()
    assert ways["few"].ways == (
        "data_parallel",
        "table_wise by rows",
        "table_wise by pooled",
        "column_wise in 2 parts by rows",
        "column_wise in 2 parts by pooled",
    )
    assert ways["few"].left_out[0] == "row_wise: 3 rows are fewer than the 8 devices"
    assert ways["ids"].ways == ("data_parallel", "table_wise by rows", "row_wise by rows")
    assert (
        "column_wise: 48 columns do not divide into equal parts of 32 or more"
        in ways["ids"].left_out
    )
    assert str(ways["fixed"]) == "considered: row_wise, as its constraints place it"


def test_the_plan_has_a_way_that_is_considered():
    planner, ways = considered()
    for name, placement in planner.plan(TABLES, batch_size=64).to_dict().items():
        assert any(way.startswith(placement.kind) for way in ways[name].ways)


def test_rows_beside_the_devices_are_ways():
    _, ways = considered(storages=["device", "host"])
    assert "row_wise by rows, rows in storage host" in ways["ids"].ways
    assert "data_parallel: copies are kept on devices" in ways["ids"].left_out


def test_no_way_is_said_with_its_reasons():
    constraints = {"ids": ParameterConstraints(sharding_types=["column_wise"])}
    ways = Planner(Topology.named("h100", devices=8), constraints).options(TABLES, batch_size=64)
    assert str(ways["ids"]).startswith("considered: none\nleft out: column_wise: 48 columns")
