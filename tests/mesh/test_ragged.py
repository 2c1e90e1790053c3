"""Exchanges by ragged all-to-all, which CPUs lack: an emulation of its definition stands in."""

from __future__ import annotations

import re

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType

import jaxrec
from jaxrec.mesh import ExchangePrecision, grid, row_wise, table_row_wise, table_wise
from jaxrec.train import compile_step

pytestmark = pytest.mark.jax_version

BATCH = 16
PLACEMENTS = {
    "rows": {"a": row_wise(), "b": table_row_wise(1)},
    "pooled": {"a": row_wise(exchange="pooled"), "b": row_wise(exchange="pooled")},
    "cut": {"a": grid(), "b": table_wise(3)},
}


def ragged_all_to_all(
    operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name
):
    """As `jax.lax.ragged_all_to_all` is defined, on what all devices gather."""
    devices, here = len(send_sizes), jax.lax.axis_index(axis_name)

    def gathered(x):
        return jax.lax.all_gather(x, axis_name)

    operands, begins, sizes, ends = map(
        gathered, (operand, input_offsets, send_sizes, output_offsets)
    )
    places = jnp.arange(len(output))
    for sender in range(devices):
        first, size = ends[sender, here], sizes[sender, here]
        is_here = (places >= first) & (places < first + size)
        # Where sizes disagree, so would the real one: nothing right comes out.
        is_here &= recv_sizes[sender] == size
        lines = operands[sender].at[begins[sender, here] + places - first].get(mode="clip")
        mask = is_here.reshape(-1, *[1] * (output.ndim - 1))
        output = jnp.where(mask, lines, output)
    return output


class Ranker(nnx.Module):
    def __init__(self, optimizer):
        tables = [
            jaxrec.EmbeddingBagConfig("a", 100, 8),
            jaxrec.EmbeddingBagConfig("b", 40, 8, pooling="mean"),
        ]
        self.embeddings = jaxrec.EmbeddingBagCollection(
            tables, optimizer=optimizer, rngs=nnx.Rngs(0)
        )

    def __call__(self, features):
        return self.embeddings(features).values.sum(axis=1)


def train_step(model, optimizer, features):
    def loss_fn(model):
        return jnp.square(model(features) - 1).mean()

    loss, gradients = jaxrec.value_and_grad(loss_fn)(model)
    optimizer.update(model, gradients)
    return loss


def make(placements, is_ragged, optimizer=None, precision=ExchangePrecision()):  # noqa: B008
    mesh = jax.make_mesh((2, 4), ("host", "device"), axis_types=(AxisType.Auto,) * 2)
    plan = jaxrec.plan.ShardingPlan.from_dict(placements)
    model = Ranker(optimizer or jaxrec.optim.adam())
    model = jaxrec.shard(model, plan, mesh, precision=precision, is_ragged=is_ragged)
    return model, jaxrec.Optimizer(model, optax.sgd(0.1)), mesh


def batches(mesh):
    """Even ones, and ones that need several rounds."""
    random = np.random.default_rng(0)
    for most in ((100, 40), (12, 5), (1, 1)):
        ids = {
            name: random.integers(0, rows, (BATCH, 8)).tolist()
            for name, rows in zip("ab", most, strict=True)
        }
        yield jaxrec.mesh.shard_batch(jaxrec.KeyedJaggedArray.from_lists(ids), mesh)


@pytest.fixture
def emulated(monkeypatch):
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", ragged_all_to_all)
    monkeypatch.setattr("jaxrec.mesh.ragged_support._RAGGED_PLATFORMS", ("cpu",))


@pytest.mark.parametrize(
    ("name", "optimizer", "precision"),
    [
        ("rows", jaxrec.optim.adam(), ExchangePrecision()),
        ("pooled", jaxrec.optim.adam(), ExchangePrecision()),
        ("cut", jaxrec.optim.rowwise_adagrad(), ExchangePrecision()),
        ("rows", jaxrec.optim.sgd(0.1), ExchangePrecision(forward="int8", backward="bfloat16")),
    ],
    ids=["rows", "pooled", "cut", "few_bits"],
)
def test_the_same_bits_as_with_room(emulated, name, optimizer, precision):
    results = []
    for is_ragged in (False, True):
        model, dense, mesh = make(PLACEMENTS[name], is_ragged, optimizer, precision)
        step = compile_step(train_step, model, dense)
        losses = [float(step(batch)) for batch in batches(mesh)]
        results.append((losses, [model.embeddings.table(name) for name in "ab"]))
    (losses, tables), (ragged_losses, ragged_tables) = results
    assert ragged_losses == losses
    for table, ragged in zip(tables, ragged_tables, strict=True):
        np.testing.assert_array_equal(table, ragged)


@pytest.mark.parametrize("name", ["rows", "pooled"])
def test_lowered_for_gpus(monkeypatch, name):
    """What travels by all-to-all is counts; ids, rows and gradients go by the ragged one."""
    monkeypatch.setattr("jaxrec.mesh.ragged_support._RAGGED_PLATFORMS", ("cpu",))
    model, dense, mesh = make(PLACEMENTS[name], True)
    graph, state = nnx.split((model, dense))

    def step(state, batch):
        model, dense = nnx.merge(graph, state)
        train_step(model, dense, batch)
        return nnx.state((model, dense))

    batch = next(batches(mesh))
    text = jax.jit(step).trace(state, batch).lower(lowering_platforms=("cuda",)).as_text()
    assert "@ragged_all_to_all" in text
    bags = 2 * BATCH // 8
    found = re.findall(r"stablehlo.all_to_all.*-> tensor<([0-9]+)xi32>", text)
    assert found
    assert max(map(int, found)) <= 8 * (3 + (bags if name == "pooled" else 0))
    rows = re.findall(r"stablehlo.all_to_all.*-> tensor<[0-9]+x8xf32>", text)
    assert not rows


def test_cpus_have_none():
    with pytest.raises(
        ValueError, match=r"no ragged all-to-all for cpu devices; .*is_ragged=False"
    ):
        make(PLACEMENTS["rows"], True)
