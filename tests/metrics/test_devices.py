"""The same values from eight devices as from one."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrec import metrics
from jaxrec.metrics import MetricGroup, Task, merge_all, merge_over_axis
from jaxrec.metrics.binned import Bins
from tests.metrics import batches as samples

BATCHES, BATCH, TASKS = 3, 64, 2

GROUP = MetricGroup(
    tasks=(
        Task(name="click", prediction="p0", label="y0", weight="w0"),
        Task(name="buy", prediction="p1", label="y1", weight="w1"),
    ),
    metrics={
        "ne": metrics.NormalizedEntropy(tasks=2, window=2 * TASKS * BATCH),
        "segmented": metrics.SegmentedNormalizedEntropy(tasks=2, num_groups=6, window=None),
        "auc": metrics.AUC(tasks=2, window=5 * BATCH, groups="groups"),
        "binned": metrics.BinnedAUC(tasks=2, bins=Bins(count=64)),
        "xauc": metrics.XAUC(tasks=2),
        "ndcg": metrics.NDCG(tasks=2),
        "uauc": metrics.UserAUC(tasks=2, users="session"),
        "pairs": metrics.SessionPairwiseAUC(tasks=2),
        "loss": metrics.ServingLoss(tasks=2, tensor="p1"),
        "output": metrics.OutputMetric(tasks=2, outputs=("p0",)),
    },
)
# Without those made of the pairs and sessions within a batch, where it matters how it is cut.
OF_SAMPLES = MetricGroup(
    tasks=GROUP.tasks,
    metrics={name: GROUP.metrics[name] for name in ("ne", "auc", "binned", "loss", "output")},
)


def outputs():
    """The outputs of each step, as a model on one device puts them out."""
    columns = samples.make("sessions", BATCHES, BATCH)
    predictions, labels, weights, sessions = (np.nan_to_num(x) for x in columns)
    return [
        {
            "p0": predictions[i, 0],
            "p1": predictions[i, 1],
            "y0": labels[i, 0],
            "y1": labels[i, 1],
            "w0": weights[i, 0],
            "w1": weights[i, 1],
            "session": sessions[i, 0],
            "groups": sessions[i, 1] + 1,
        }
        for i in range(BATCHES)
    ]


@pytest.fixture(scope="module")
def on_one_device():
    update, state = jax.jit(GROUP.update), GROUP.init()
    for batch in outputs():
        state = update(state, batch)
    return GROUP.compute(state)


def close(got, expected):
    assert set(got) <= set(expected)
    for name, value in got.items():
        assert value == pytest.approx(expected[name], rel=1e-5, nan_ok=True), name


@pytest.mark.slow
@pytest.mark.parametrize("axis_type", ["Auto", "Explicit"])
def test_sharded_batches(on_one_device, axis_type):
    """The compiler's partitioning: the state is on all devices and of all samples."""
    types = (getattr(jax.sharding.AxisType, axis_type),)
    mesh = jax.make_mesh((8,), ("data",), axis_types=types)
    whole = NamedSharding(mesh, P())
    update = jax.jit(GROUP.update, donate_argnums=0, out_shardings=whole)
    with jax.set_mesh(mesh):
        state = jax.device_put(GROUP.init(), whole)
        for batch in outputs():
            state = update(state, jax.device_put(batch, NamedSharding(mesh, P("data"))))
    assert all(x.sharding.is_equivalent_to(whole, x.ndim) for x in jax.tree.leaves(state))
    got = GROUP.compute(state)
    assert set(got) == set(on_one_device)
    close(got, on_one_device)


def test_explicit_axes_without_a_mesh_in_context():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    group = MetricGroup(
        (Task(name="a", prediction="p", label="y"),), {"auc": metrics.AUC(window=16)}
    )
    outputs = {"p": np.arange(16, dtype=np.float32), "y": np.arange(16) % 2 * np.float32(1)}
    placed = jax.device_put(outputs, NamedSharding(mesh, P("data")))
    state = jax.jit(group.update)(group.init(), placed)
    assert group.compute(state)["a/window_auc"] == pytest.approx(36 / 64)


@pytest.mark.slow
def test_shard_map(on_one_device):
    """A state for each device, merged where they meet."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    def update(states, batch):
        state = jax.tree.map(lambda x: x[0], states)
        return jax.tree.map(lambda x: x[None], OF_SAMPLES.update(state, batch))

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=P("data"), out_specs=P())
    def merged(states):
        return merge_over_axis(OF_SAMPLES, jax.tree.map(lambda x: x[0], states), "data")

    states = jax.tree.map(lambda x: jnp.stack([x] * 8), OF_SAMPLES.init())
    for batch in outputs():
        states = update(states, batch)
    inside = OF_SAMPLES.compute(merged(states))
    close(inside, on_one_device)
    close(inside, OF_SAMPLES.compute(merge_all(OF_SAMPLES, jax.device_get(states))))


def test_metrics_of_a_batch_over_devices():
    """Pairs and sessions are those within each device's part of the batch."""
    p, y, w, s = samples.make("sessions", 1, BATCH)
    parts = [np.nan_to_num(x[0, 0]).reshape(8, -1) for x in (p, y, w)] + [s[0, 0].reshape(8, -1)]
    for metric in (metrics.XAUC(), metrics.GroupedAUC()):
        update = jax.jit(metric.update)
        name = f"lifetime_{metric.name}"
        values, sizes = [], []
        for part in zip(*parts, strict=True):
            inputs = {"session": part[3]} if metric.required else {}
            state = update(metric.init(), *part[:3], **inputs)
            total, size = list(state.lifetime.values())[:2]
            values.append(total.on_host()), sizes.append(size.on_host())
        inputs = {"session": s[0, 0].reshape(8, -1)} if metric.required else {}
        states = jax.jit(jax.vmap(lambda p, y, w, i, m=metric: m.update(m.init(), p, y, w, **i)))(
            *parts[:3], inputs
        )
        merged = metric.compute(jax.jit(lambda x, m=metric: merge_all(m, x))(states))[name]
        assert merged == pytest.approx(np.sum(values) / np.sum(sizes), rel=1e-6), name
