"""Checkpoints of models over a mesh: any placement, several processes, capacities, replicas."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType

import jaxrec
from jaxrec.embed.variables import variables
from jaxrec.mesh.ahead import capacity_factors, set_capacity_factors
from jaxrec.train import checkpoint
from tests.train import processes
from tests.train.test_checkpoint import Model

pytestmark = pytest.mark.jax_version


def mesh_of(devices):
    auto = (jax.sharding.AxisType.Auto,)
    return jax.make_mesh((devices,), ("data",), auto, devices=jax.devices()[:devices])


def on(devices, placement, seed):
    """Tables on so many devices, their state none that tables begin with."""
    tables = [jaxrec.EmbeddingBagConfig(name, 9, 4) for name in "abc"]
    bags = jaxrec.EmbeddingBagCollection(tables, rngs=nnx.Rngs(seed))
    state = np.random.default_rng(seed).random((3, 9))
    for name, rows in zip("abc", state, strict=True):
        bags.load_table_state(name, dict.fromkeys(bags.table_state(name), rows))
    if devices:
        plan = jaxrec.plan.ShardingPlan.from_dict(dict.fromkeys("abc", placement))
        bags = jaxrec.shard(bags, plan, mesh_of(devices))
    return bags, jaxrec.Optimizer(bags, optax.sgd(0.1))


def test_restores_to_any_placement(tmp_path):
    """From eight devices to two and to one."""
    bags, optimizer = on(8, jaxrec.mesh.row_wise(), 0)
    checkpoint.save(tmp_path, bags, optimizer)
    for devices, placement in ((2, jaxrec.mesh.column_wise((0, 1))), (0, None)):
        other = on(devices, placement, 1)
        checkpoint.restore(other[0], tmp_path, other[1])
        for name in "abc":
            np.testing.assert_array_equal(other[0].table(name), bags.table(name))
            for key, value in bags.table_state(name).items():
                np.testing.assert_array_equal(other[0].table_state(name)[key], value)


class Deep(nnx.Module):
    """A table, and a dense layer that "fsdp" shards."""

    def __init__(self, seed):
        rngs = nnx.Rngs(seed)
        tables = [jaxrec.EmbeddingBagConfig("a", 9, 64)]
        self.bags = jaxrec.EmbeddingBagCollection(tables, rngs=rngs)
        self.over = nnx.Linear(64, 1024, rngs=rngs)


def deep_on(devices, seed, dense="replicated"):
    model = Deep(seed)
    if devices:
        plan = jaxrec.plan.ShardingPlan.from_dict({"a": jaxrec.mesh.row_wise()})
        model = jaxrec.shard(model, plan, mesh_of(devices), dense=dense)
    return model, jaxrec.Optimizer(model, optax.adam(0.1))


@nnx.jit
def advance_deep(model, optimizer):
    _, gradients = jaxrec.value_and_grad(lambda model: (model.over.kernel[...] ** 2).sum())(model)
    optimizer.update(model, gradients)


DENSE = {
    "one_device": (0, "replicated"),
    "replicated": (8, "replicated"),
    "fsdp": (8, "fsdp"),
    "fsdp_on_four": (4, "fsdp"),
}


@pytest.mark.parametrize(
    ("saved", "restored"),
    [
        ("fsdp", "one_device"),
        ("fsdp", "replicated"),
        ("fsdp", "fsdp_on_four"),
        ("one_device", "fsdp"),
        ("replicated", "fsdp"),
    ],
)
def test_a_dense_part_restores_to_any_placement(saved, restored, tmp_path):
    model, optimizer = deep_on(*DENSE[saved][:1], 0, DENSE[saved][1])
    advance_deep(model, optimizer)
    checkpoint.save(tmp_path, model, optimizer)
    other, other_optimizer = deep_on(*DENSE[restored][:1], 1, DENSE[restored][1])
    moments = other_optimizer.opt_state[0]
    arrays = (other.over.kernel, moments.mu["over"]["kernel"], moments.nu["over"]["kernel"])
    before = [array.get_raw_value().sharding for array in arrays]
    checkpoint.restore(other, tmp_path, other_optimizer)
    for node, wanted in ((other, model), (other_optimizer, optimizer)):
        dense = nnx.Not(jaxrec.embed.TableVariable)
        for name, each in variables(wanted, dense).items():
            found = variables(node, dense)[name]
            np.testing.assert_array_equal(found.get_value(), each.get_value(), err_msg=name)
    devices, dense = DENSE[restored]
    for array, sharding in zip(arrays, before, strict=True):
        assert array.get_raw_value().sharding == sharding
        columns = array.get_raw_value().addressable_shards[0].data.shape[1]
        assert columns == (1024 // devices if dense == "fsdp" else 1024)


@pytest.mark.slow
def test_several_processes_save_and_restore(tmp_path, pair):
    """One process saves, two restore and save, one restores; see processes.py."""
    model = processes.Ranker()
    before = checkpoint.save(tmp_path / "one", model, jaxrec.Optimizer(model, optax.adam(0.1)))
    # Half of the table is on the devices of each process.
    for held in pair.run("tests.train.processes:checkpoint", directory=tmp_path):
        assert max(held) < 0.75, held
    assert before.name == "0"
    assert checkpoint.all_steps(tmp_path / "two") == [1]
    other = processes.Ranker(seed=1)
    optimizer = jaxrec.Optimizer(other, optax.adam(0.1))
    assert checkpoint.restore(other, tmp_path / "two", optimizer).batches == 7
    assert checkpoint.restore_state({"sum": jnp.float32(0)}, tmp_path / "two")["sum"] == 3
    # The two made a step with a loss of the dense layer alone.
    assert not np.array_equal(other.over.kernel[...], model.over.kernel[...])
    for name in processes.ROWS:
        np.testing.assert_array_equal(other.embeddings.table(name), model.embeddings.table(name))
        for key, value in model.embeddings.table_state(name).items():
            np.testing.assert_array_equal(other.embeddings.table_state(name)[key], value)


@pytest.mark.parametrize("devices", [4, 2])
def test_capacities_of_exchanges_come_back_on_as_many_devices(tmp_path, devices):
    def on_mesh(devices):
        mesh = jax.make_mesh((devices,), ("data",), devices=jax.devices()[:devices])
        plan = jaxrec.plan.ShardingPlan.from_dict(dict.fromkeys("abc", jaxrec.mesh.row_wise()))
        model = jaxrec.shard(Model, plan, mesh)
        return model, jaxrec.Optimizer(model, optax.adam(0.1))

    model, optimizer = on_mesh(4)
    group = model.bags.tables.get_value().layout.groups[0].name
    set_capacity_factors(model, {("bags", group): 2.5})
    checkpoint.save(tmp_path, model, optimizer)
    restored, optimizer = on_mesh(devices)
    jaxrec.train.restore(restored, tmp_path, optimizer)
    assert capacity_factors(restored) == ({("bags", group): 2.5} if devices == 4 else {})


def test_replicas_are_averaged_before_they_are_saved(tmp_path):
    """In the model itself, so that a restored run goes on as the one that saved."""
    axis_types = (AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 2), ("replica", "data"), axis_types, devices=jax.devices()[:4])
    plan = jaxrec.plan.ShardingPlan.from_dict({"t": jaxrec.mesh.row_wise()})

    def collection():
        config = jaxrec.EmbeddingBagConfig("t", 4, 1)
        optimizer = jaxrec.optim.sgd(1.0)
        return jaxrec.EmbeddingBagCollection([config], optimizer=optimizer, rngs=nnx.Rngs(0))

    def on_mesh():
        model = jaxrec.shard(collection(), plan, mesh, replica_axis="replica")
        return model, jaxrec.Optimizer(model, optax.sgd(0.1))

    model, optimizer = on_mesh()
    before = np.asarray(model.table("t"))
    # The first replica sees row 0, the other row 3.
    batch = jaxrec.KeyedJaggedArray.from_lists({"t": [[0], [0], [3], [3]]})
    batch = jaxrec.mesh.shard_batch(batch, mesh)

    @nnx.jit
    def step(model, optimizer, batch):
        _, gradients = jaxrec.value_and_grad(lambda model: model(batch).values.mean())(model)
        optimizer.update(model, gradients)

    step(model, optimizer, batch)
    checkpoint.save(tmp_path, model, optimizer)
    restored, optimizer = on_mesh()
    jaxrec.train.restore(restored, tmp_path, optimizer)
    expected = before - 0.5 * np.float32([[1], [0], [0], [1]])
    np.testing.assert_allclose(restored.table("t"), expected, rtol=1e-6)
    np.testing.assert_array_equal(model.table("t"), restored.table("t"))
