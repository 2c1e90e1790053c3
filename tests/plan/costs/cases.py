"""Devices and tables whose costs can be counted by hand."""

from __future__ import annotations

import jaxrec
from jaxrec import optim
from jaxrec.mesh.exchange import EXCHANGES
from jaxrec.mesh.precision import ExchangePrecision
from jaxrec.plan import ParameterConstraints, Planner, ShardingPlan, Topology
from jaxrec.plan.costs import Group, make_costs
from jaxrec.plan.model_tables import read_model
from jaxrec.plan.quantities import Links, Rate
from jaxrec.plan.workload import measure_workloads

FREE = Rate()


def topology(*, hosts=1, each=4, **rates):
    """Devices on which everything is free but the given rates."""
    operations = ("gather", "update", "sort", "copy", "assign", "host_moves", "store_moves")
    free = dict.fromkeys(operations, FREE)
    links = {"within": Links(FREE, FREE, FREE), "between": Links(FREE, FREE, FREE)}
    known = {"name": "test", "memory": 10**12, "granule": 1, "host_memory": 10**13}
    return Topology(hosts=hosts, devices_per_host=each, **{**free, **links, **known, **rates})


def linked(within=0.0, between=0.0, call=0.0):
    """Rates of links, in seconds a byte."""
    return {
        name: Links(*[Rate(call=call, byte=byte)] * 3)
        for name, byte in (("within", within), ("between", between))
    }


def workload_of(topology, *, rows=1000, dim=8, pooling=1, batch=4, is_weighted=False, **config):
    """The workload of one table with ``batch`` samples a device."""
    kind = config.pop("kind", jaxrec.EmbeddingBagConfig)
    table = kind("a", rows, dim, **{"optimizer": optim.sgd(0.1), "dtype": "float32", **config})
    constraint = ParameterConstraints(pooling_factors=pooling, is_weighted=is_weighted)
    (workload,) = measure_workloads(
        read_model([table]),
        batch_size=batch * topology.num_devices,
        num_devices=topology.num_devices,
        constraints={"a": constraint},
        statistics=None,
    )
    return workload


def costs_of(exchange, workload, topology, *, width=None):
    """The costs of a table's group under an exchange."""
    group = Group.of(workload, width or workload.dim, EXCHANGES[exchange])
    return make_costs(group, topology)


def evaluate(
    placement,
    topology,
    *,
    rows=1000,
    dim=8,
    pooling=1,
    batch=4,
    precision=ExchangePrecision(),  # noqa: B008 (frozen)
    **config,
):
    """The estimate of one table under a placement."""
    kind = config.pop("kind", jaxrec.EmbeddingBagConfig)
    table = kind("a", rows, dim, **{"optimizer": optim.sgd(0.1), "dtype": "float32", **config})
    constraints = {"a": ParameterConstraints(pooling_factors=pooling)}
    plan = ShardingPlan.from_dict({"a": placement})
    batch_size = batch * topology.num_devices
    planner = Planner(topology, constraints, precision=precision)
    return planner.evaluate([table], plan, batch_size=batch_size).estimate
