"""Tables that the tests of the planner plan."""

from __future__ import annotations

import itertools

import numpy as np

import jaxrec
from jaxrec import optim
from jaxrec.plan import ParameterConstraints, Topology
from jaxrec.plan.options import enumerate_options
from jaxrec.plan.problem import Choice, Problem, Solution
from jaxrec.plan.workload import measure_work, read_model

CRITEO_ROWS = (
    *(40000000, 39060, 17295, 7424, 20265, 3, 7122, 1543, 63, 40000000, 3067956, 405282, 10),
    *(2209, 11938, 155, 4, 976, 14, 40000000, 40000000, 40000000, 590152, 12973, 108, 36),
)
CRITEO_POOLING = (
    *(3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1),
)


def criteo(dim=128, dtype="float32"):
    """MLPerf's DLRM-DCNv2: tables and what is said of them."""
    tables = [
        jaxrec.EmbeddingBagConfig(f"cat_{i}", rows, dim, dtype=dtype)
        for i, rows in enumerate(CRITEO_ROWS)
    ]
    said = {
        f"cat_{i}": ParameterConstraints(pooling_factors=pooling)
        for i, pooling in enumerate(CRITEO_POOLING)
    }
    return tables, said


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
    said = {name: ParameterConstraints(pooling_factors=p) for name, (_, _, p) in shapes.items()}
    return tables, said


def random_model(seed, *, max_tables=12, types=None):
    """Tables of random number, size, width and pooling."""
    random = np.random.default_rng(seed)
    tables, said = [], {}
    optimizers = [jaxrec.optim.rowwise_adagrad(), jaxrec.optim.adam(), jaxrec.optim.sgd()]
    optimizer = optimizers[random.integers(3)]
    for i in range(random.integers(2, max_tables + 1)):
        rows = int(10 ** random.uniform(0.5, 7))
        dim = int(2 ** random.integers(3, 9))
        tables.append(jaxrec.EmbeddingBagConfig(f"t{i}", rows, dim, optimizer=optimizer))
        said[f"t{i}"] = ParameterConstraints(
            pooling_factors=float(np.round(10 ** random.uniform(0, 2), 1)), sharding_types=types
        )
    return tables, said


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
):
    """Tables ``(rows, dim, pooling)`` on few devices, some decided to have their first option."""
    tables = [
        jaxrec.EmbeddingBagConfig(f"t{i}", rows, dim, optimizer=optim.sgd(0.1))
        for i, (rows, dim, _) in enumerate(shapes)
    ]
    said = {
        f"t{i}": ParameterConstraints(
            pooling_factors=pooling, sharding_types=types, exchanges=exchanges, min_column_width=16
        )
        for i, (_, _, pooling) in enumerate(shapes)
    }
    topology = Topology.named("h100", devices=hosts * each, devices_per_host=each)
    works = measure_work(
        read_model(tables),
        batch_size=512 * hosts * each,
        num_devices=hosts * each,
        constraints=said,
        statistics=None,
    )
    options = [enumerate_options(w, topology, said[w.name], storages=storages) for w in works]
    return Problem(
        topology,
        tuple(w.name for i, w in enumerate(works) if i not in decided),
        tuple(o for i, o in enumerate(options) if i not in decided),
        tuple(options[i][0] for i in decided),
        capacity=memory,
        host_capacity=10**12,
        disk_capacity=10**12,
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
