"""Tables that the tests of the planner plan."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np

import jaxrec
from jaxrec import optim
from jaxrec.plan import ParameterConstraints, Planner, Topology
from jaxrec.plan.model_tables import read_model
from jaxrec.plan.options import enumerate_options
from jaxrec.plan.problem import Choice, Problem, Solution
from jaxrec.plan.workload import measure_workloads

CRITEO_ROWS = (
    *(40000000, 39060, 17295, 7424, 20265, 3, 7122, 1543, 63, 40000000, 3067956, 405282, 10),
    *(2209, 11938, 155, 4, 976, 14, 40000000, 40000000, 40000000, 590152, 12973, 108, 36),
)
CRITEO_POOLING = (
    *(3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1),
)


def criteo(dim=128, dtype="float32"):
    """MLPerf's DLRM-DCNv2: tables and constraints."""
    tables = [
        jaxrec.EmbeddingBagConfig(f"cat_{i}", rows, dim, dtype=dtype)
        for i, rows in enumerate(CRITEO_ROWS)
    ]
    constraints = {
        f"cat_{i}": ParameterConstraints(pooling_factors=pooling)
        for i, pooling in enumerate(CRITEO_POOLING)
    }
    return tables, constraints


def six_tables():
    """Six tables of several widths and lengths."""
    shapes = {
        "user": (5_000_000, 64, 1),
        "item": (20_000_000, 128, 30),
        "shop": (300_000, 64, 5),
        "word": (50_000, 32, 60),
        "city": (8_000, 64, 1),
        "hour": (24, 16, 1),
    }
    tables = [jaxrec.EmbeddingBagConfig(name, r, d) for name, (r, d, _) in shapes.items()]
    constraints = {
        name: ParameterConstraints(pooling_factors=p) for name, (_, _, p) in shapes.items()
    }
    return tables, constraints


def random_model(seed, *, max_tables=12, types=None):
    """Tables of random number, size, width and pooling."""
    random = np.random.default_rng(seed)
    tables, constraints = [], {}
    optimizers = [jaxrec.optim.rowwise_adagrad(), jaxrec.optim.adam(), jaxrec.optim.sgd()]
    optimizer = optimizers[random.integers(3)]
    for i in range(random.integers(2, max_tables + 1)):
        rows = int(10 ** random.uniform(0.5, 7))
        dim = int(2 ** random.integers(3, 9))
        tables.append(jaxrec.EmbeddingBagConfig(f"t{i}", rows, dim, optimizer=optimizer))
        constraints[f"t{i}"] = ParameterConstraints(
            pooling_factors=float(np.round(10 ** random.uniform(0, 2), 1)), sharding_types=types
        )
    return tables, constraints


def problem_of(
    shapes,
    *,
    hosts=1,
    each=2,
    memory=10**9,
    types=None,
    exchanges=None,
    storages=("device",),
    decided=(),
    speeds=(),
):
    """Tables ``(rows, dim, pooling)`` on few devices, some decided to have their first option."""
    tables = [
        jaxrec.EmbeddingBagConfig(f"t{i}", rows, dim, optimizer=optim.sgd(0.1))
        for i, (rows, dim, _) in enumerate(shapes)
    ]
    constraints = {
        f"t{i}": ParameterConstraints(
            pooling_factors=pooling, sharding_types=types, exchanges=exchanges, min_column_width=16
        )
        for i, (_, _, pooling) in enumerate(shapes)
    }
    topology = Topology.named("h100", devices=hosts * each, devices_per_host=each)
    topology = dataclasses.replace(topology, device_speed=speeds)
    workloads = measure_workloads(
        read_model(tables),
        batch_size=512 * hosts * each,
        num_devices=hosts * each,
        constraints=constraints,
        statistics=None,
    )
    options = [
        enumerate_options(w, topology, constraints[w.name], storages=storages) for w in workloads
    ]
    return Problem(
        topology,
        tuple(w.name for i, w in enumerate(workloads) if i not in decided),
        tuple(o for i, o in enumerate(options) if i not in decided),
        tuple(options[i][0] for i in decided),
        capacity=memory,
        host_capacity=10**12,
        store_capacity=10**12,
    )


def every_solution(problem):
    """All choices of options and sites, each as the loads that it makes."""
    choices = [
        [
            Choice(index, sites)
            for index, option in enumerate(options)
            for sites in itertools.combinations(range(len(option.sites)), option.parts)
        ]
        for options in problem.options
    ]
    for chosen in itertools.product(*choices):
        yield Solution.of(problem, chosen)


TWO_TABLES = [
    jaxrec.EmbeddingBagConfig("a", 1000, 64, feature_names=("f", "g"), optimizer=optim.sgd(0.1)),
    jaxrec.EmbeddingBagConfig("b", 500, 64, optimizer=optim.sgd(0.1)),
]


def plan_on_h100(constraints=None, tables=TWO_TABLES, batch_size=400, **settings):
    """A plan of two tables for four devices."""
    planner = Planner(Topology.named("h100", devices=4), constraints or {}, **settings)
    return planner.plan(tables, batch_size=batch_size)


def batch_of(ids, lengths, name="f"):
    return jaxrec.KeyedJaggedArray.from_lengths(
        [name], np.asarray(ids, np.int32), np.asarray(lengths, np.int32)
    )


def log_uniform(random, rows, count):
    """Few ids are frequent, many rare."""
    return np.minimum(rows ** random.random(count), rows - 1).astype(int)


TABLES = [
    jaxrec.EmbeddingBagConfig("item", 3_000_000, 64),
    jaxrec.EmbeddingBagConfig("user", 500_000, 64, dtype="bfloat16"),
    jaxrec.EmbeddingBagConfig("day", 7, 32),
]
CONSTRAINTS = {"item": ParameterConstraints(pooling_factors=20)}


MODEL = """
batch_size: 8192
optimizer: {name: adam, learning_rate: 0.001}
dense_parameters: 1000000
tables:
  - name: product
    num_embeddings: 4000000
    embedding_dim: 64
    pooling: mean
    pooling_factors: 20
    sharding_types: [row_wise, table_wise]
  - {name: user, num_embeddings: 4096, embedding_dim: 64, dtype: bfloat16, optimizer: sgd}
  - {name: page, num_embeddings: 9000, embedding_dim: 32, pooling: none, feature_names: [a, b]}
  - {name: day, num_embeddings: 7, embedding_dim: 32, placement: {table_wise: 1}}
"""
