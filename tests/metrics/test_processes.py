"""Two processes, each with samples of its own, report the values of all samples."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrec.metrics import AUC, MetricGroup, NormalizedEntropy, Task, merge_over_processes

pytestmark = [pytest.mark.jax_version, pytest.mark.processes, pytest.mark.slow]


def report():
    """Values of a state of all samples; of states of each process, merged; of a state on a mesh."""
    group = MetricGroup(
        tasks=(Task(name="click", prediction="p", label="y"),),
        metrics={"ne": NormalizedEntropy(window=32), "auc": AUC(window=64)},
    )
    rng = np.random.default_rng(0)
    batches = [
        {"p": rng.random(16, np.float32), "y": (rng.random(16) < 0.5).astype(np.float32)}
        for _ in range(4)
    ]
    process = jax.process_index()
    mine = slice(8 * process, 8 * process + 8)
    update = jax.jit(group.update)
    alone, own = group.init(), group.init()
    for batch in batches:
        alone = update(alone, batch)
        own = update(own, {name: x[mine] for name, x in batch.items()})
    merged = group.compute(merge_over_processes(group, own))

    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    whole, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    step = jax.jit(group.update, out_shardings=whole)
    from_local = jax.make_array_from_process_local_data
    state = jax.tree.map(lambda x: from_local(whole, np.asarray(x)), group.init())
    for batch in batches:
        state = step(state, {name: from_local(split, x[mine]) for name, x in batch.items()})
    return [
        {name: float(value) for name, value in values.items()}
        for values in (group.compute(alone), merged, group.compute(state))
    ]


def test_two_processes(pair):
    for expected, *others in pair.run("tests.metrics.test_processes:report"):
        for values in others:
            assert values.keys() >= expected.keys()
            for name, value in expected.items():
                assert abs(values[name] - value) < 1e-6, (name, values, expected)
