"""The error when no plan fits, and that the changes it names would make one fit."""

from __future__ import annotations

import dataclasses
import re

import pytest

import jaxrec
from jaxrec.mesh import table_wise
from jaxrec.plan import ParameterConstraints, PlanError, Planner, Topology
from jaxrec.plan.shortage import smallest_number

TB, GB = 10**12, 10**9
TABLES = [
    jaxrec.EmbeddingBagConfig("large", 100_000_000, 64),
    jaxrec.EmbeddingBagConfig("middle", 50_000_000, 64),
    jaxrec.EmbeddingBagConfig("small", 1_000, 64),
]


def topology(*, devices=4, memory=5 * GB, host_memory=1 * TB):
    known = Topology.named("h100", devices=devices)
    return dataclasses.replace(known, memory=memory, host_memory=host_memory)


def failure(planner, tables=TABLES):
    with pytest.raises(PlanError) as error:
        planner.plan(tables, batch_size=1024)
    return str(error.value)


def test_the_message_says_what_is_missing_where():
    message = failure(Planner(topology()))
    # 150 million rows of 64 float32 and 4 bytes of row-wise Adagrad's state: 39 GB over 4 devices
    # of 5 GB less 15 % each.
    assert "no plan fits 4 devices: each device lacks 5.5" in message
    assert "Tables and optimizer state take 39.00 GB in all" in message
    assert "750 MB are reserve" in message
    assert "'large' 26.00 GB, 'middle' 13.00 GB, 'small' 260 kB" in message


def test_the_named_number_of_devices_is_enough_and_the_smallest():
    message = failure(Planner(topology()))
    assert "Smallest changes that would fit: 16 devices on 2 hosts" in message
    Planner(topology(devices=16)).plan(TABLES, batch_size=1024)
    failure(Planner(topology(devices=8)))


def test_the_named_size_of_devices_is_enough_and_the_smallest():
    message = failure(Planner(topology()))
    found = re.search(r"devices of (\d+) GB", message)
    assert found is not None
    larger = int(found[1])
    Planner(topology(memory=larger * GB)).plan(TABLES, batch_size=1024)
    failure(Planner(topology(memory=(larger - 1) * GB)))


def test_bfloat16_of_the_named_tables_is_enough():
    planner = Planner(topology(memory=10 * GB))
    assert "dtype bfloat16 for 'large'" in failure(planner)
    constraints = {"large": ParameterConstraints(dtype="bfloat16")}
    dataclasses.replace(planner, constraints=constraints).plan(TABLES, batch_size=1024)


def test_host_memory_for_the_named_tables_is_enough():
    planner = Planner(topology(memory=10 * GB))
    assert "storage host for 'large' (with caches on the devices)" in failure(planner)
    constraints = {"large": ParameterConstraints(storages=["device", "host"])}
    plan = dataclasses.replace(planner, constraints=constraints).plan(TABLES, batch_size=1024)
    assert plan.estimate.tables[0].storage == "host"


@pytest.mark.parametrize(
    "constraints",
    [
        ParameterConstraints(sharding_types=["table_wise", "data_parallel"]),
        ParameterConstraints(devices=[0]),
        ParameterConstraints(placement=table_wise(device=0)),
    ],
    ids=["sharding_types", "devices", "placement"],
)
def test_the_constraint_that_binds_is_named(request, constraints):
    field = request.node.callspec.id
    planner = Planner(
        topology(memory=14 * GB),
        {"large": constraints, "small": ParameterConstraints(pooling_factors=2)},
    )
    message = failure(planner)
    assert f"it would fit without the constraint {field} of 'large'." in message
    without = {"large": dataclasses.replace(constraints, **{field: None})}
    dataclasses.replace(planner, constraints=without).plan(TABLES, batch_size=1024)


def test_the_memory_of_hosts_is_named_where_that_is_missing():
    planner = Planner(topology(memory=100 * GB, host_memory=10 * GB), storages=["host"])
    message = failure(planner)
    assert "the memory of a host lacks" in message
    found = re.search(r"hosts of (\d+) GB", message)
    assert found is not None
    enough = topology(memory=100 * GB, host_memory=int(found[1]) * GB)
    dataclasses.replace(planner, topology=enough).plan(TABLES, batch_size=1024)


def test_decided_placements_alone_may_not_fit():
    constraints = {table.name: ParameterConstraints(placement=table_wise(0)) for table in TABLES}
    message = failure(Planner(topology(memory=14 * GB), constraints))
    assert "each device lacks" in message
    assert "it would fit without the constraint placement of 'large'" in message


def test_changes_that_do_not_help_are_not_named():
    table = jaxrec.EmbeddingBagConfig("wide", 2_000_000_000, 2048)
    message = failure(Planner(topology(devices=8, memory=GB, host_memory=0)), [table])
    changes = message.split("\n")[-1]
    assert re.fullmatch(r"Smallest changes that would fit: devices of \d+ GB.", changes)


def test_nothing_is_named_where_nothing_helps():
    constraints = {"large": ParameterConstraints(cache_ratio=0.5)}
    planner = Planner(
        topology(host_memory=1),
        constraints,
        time_limit=600,
        storages=["store"],
        store="file:///data/{table}",
    )
    message = failure(dataclasses.replace(planner, topology=none_of_disk(planner.topology)))
    assert "the disk of a host lacks" in message
    assert "No change that was tried would fit: more devices" in message


def none_of_disk(topology):
    return dataclasses.replace(topology, disk=0)


def test_time_that_was_too_short_is_named():
    message = failure(Planner(topology(), time_limit=1e-3))
    assert "Time was up before a change was found that would fit; raise time_limit" in message


@pytest.mark.parametrize("wanted", [1, 2, 3, 7, 8, 100])
def test_smallest_number_by_bisection(wanted):
    calls = []
    assert smallest_number(lambda n: calls.append(n) or n >= wanted, 1, 100) == wanted
    assert len(calls) <= 16


def test_smallest_number_that_there_is_not():
    assert smallest_number(lambda n: n > 100, 1, 100) is None
    assert smallest_number(lambda n: True, 1, 100, deadline=0.0) is None
