"""Every public name of `jaxrec.ragged` and `jaxrec.nn`, over Auto and Explicit axes.

Results and gradients over a mesh are those of one device, with and without `jax.set_mesh`, and no
operation reads padding.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxrec
from jaxrec.nn import KeyedJaggedTensorPool, TensorPool
from tests.nn.cases import CASES
from tests.walk import modules
from tests.walk.meshes import DEVICES, SETTINGS
from tests.walk.operations import EACH, HOST, SAMPLES, TYPES, WHOLE, batch_of
from tests.walk.programs import program

pytestmark = pytest.mark.jax_version


def slow_but_first(parameter, values):
    """Parameters of which the first runs by default, and the others with ``--slow``."""
    first, *others = values
    slow = [pytest.param(values[name], marks=pytest.mark.slow, id=name) for name in others]
    return pytest.mark.parametrize(parameter, [pytest.param(values[first], id=first), *slow])


EVERY_SETTING = slow_but_first("setting", SETTINGS)
RAGGED = {"each": EACH, "whole": WHOLE}


def public_names(package):
    return {
        name
        for name, value in vars(package).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }


def test_every_public_name_has_an_entry():
    names = public_names(jaxrec.ragged) | public_names(jaxrec.nn)
    of_fbgemm = ("jaxrec.ragged.fbgemm", "jaxrec.ragged.bucketize")
    members = vars(jaxrec.ragged.fbgemm).items()
    members = {name: value for name, value in members if not name.startswith("_")}.items()
    names |= {name for name, value in members if getattr(value, "__module__", "") in of_fbgemm}
    with_cases = {name for name in names if getattr(jaxrec.nn, name, None) in list(CASES)}
    assert names == {*EACH, *WHOLE, *SAMPLES, *HOST, *TYPES, *POOLS} | with_cases
    assert sum(map(len, modules.GROUPS.values())) == len(CASES)


def parts(batch):
    """The batch of each device."""
    return [jax.tree.map(operator.itemgetter(device), batch) for device in range(DEVICES)]


@functools.cache
def on_one_device(kind):
    """The compiled operations, and their results of each device's batch, stacked."""
    run = program(RAGGED[kind])
    results = [jax.device_get(run(part)) for part in parts(batch_of())]
    return run, jax.tree.map(lambda *arrays: np.stack(arrays), *results)


def assert_equal(found, expected, **tolerance):
    """Compare results by name, whatever axes are merged."""
    assert found.keys() == expected.keys()
    for name in found:
        pairs = zip(jax.tree.leaves(found[name]), jax.tree.leaves(expected[name]), strict=True)
        for one, other in pairs:
            np.testing.assert_allclose(one, np.reshape(other, one.shape), err_msg=name, **tolerance)


@pytest.mark.slow
@EVERY_SETTING
@pytest.mark.parametrize("kind", RAGGED)
def test_ragged_operations_over_a_mesh(kind, setting):
    _, expected = on_one_device(kind)
    operations = RAGGED[kind]
    if kind == "each":
        operations = {name: jax.vmap(operation) for name, operation in operations.items()}
    batch = setting.place(batch_of())
    with setting.context():
        found = program(operations)(batch)
    assert_equal(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.every_case
@pytest.mark.parametrize("kind", RAGGED)
def test_ragged_operations_do_not_read_padding(kind):
    """NaN and ids of no table there change neither results nor gradients."""
    run, _ = on_one_device(kind)
    for clean, filled in zip(parts(batch_of()), parts(batch_of(np.nan, -7)), strict=True):
        assert_equal(jax.device_get(run(filled)), jax.device_get(run(clean)), rtol=0)


def vectors():
    return np.random.default_rng(0).standard_normal((4 * DEVICES, 3, 4), np.float32)


@functools.cache
def samples_on_one_device():
    return jax.device_get(program(SAMPLES)(vectors()))


@EVERY_SETTING
def test_operations_on_samples_over_a_mesh(setting):
    with setting.context():
        found = program(SAMPLES)(setting.place(vectors()))
    assert_equal(found, samples_on_one_device(), rtol=1e-5, atol=1e-6)


@pytest.mark.every_case
@pytest.mark.parametrize("name", HOST)
def test_operations_on_the_host(name):
    expected = HOST[name](batch_of())
    for setting in SETTINGS.values():
        with setting.context():
            found = HOST[name](setting.place(batch_of()))
        np.testing.assert_array_equal(found, expected)


EVERY_GROUP = slow_but_first("kinds", modules.GROUPS)


def step_over_a_mesh(kinds, setting, mode="eval"):
    placed = {}
    for name, module in modules.modules_of(kinds).items():
        if mode == "train":
            module.train()
        placed[name] = modules.sharded(module, setting.mesh)
    inputs = modules.inputs_of(kinds, setting.mesh)
    with setting.context():
        return modules.take_step(kinds, placed, inputs)


@EVERY_SETTING
@EVERY_GROUP
def test_modules_over_a_mesh(kinds, setting):
    found, expected = step_over_a_mesh(kinds, setting), modules.on_one_device(kinds)
    assert_equal(found.values, expected.values, rtol=1e-5, atol=1e-5)
    assert_equal(found.gradients, expected.gradients, rtol=1e-4, atol=1e-5)
    assert_equal(found.rows, expected.rows, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(found.uses, expected.uses)


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("name", ["explicit", "auto_set"])  # both axes, with and without set_mesh
def test_modules_that_are_random_in_training_train_over_a_mesh(name):
    setting = SETTINGS[name]
    found = step_over_a_mesh(modules.TRAINED, setting, "train")
    for leaf in jax.tree.leaves((found.values, found.gradients, found.rows)):
        assert np.isfinite(leaf).all()


@EVERY_GROUP
def test_modules_do_not_read_padding(kinds):
    expected = modules.on_one_device(kinds)
    inputs = {
        name: [fill_padding(array) for array in arrays]
        for name, arrays in modules.inputs_of(kinds).items()
    }
    found = modules.take_step(kinds, modules.modules_of(kinds), inputs)
    for name in ("values", "gradients", "rows", "uses"):
        jax.tree.map(np.testing.assert_array_equal, getattr(found, name), getattr(expected, name))


def test_position_weights_ignore_the_weights_of_padding():
    column = jaxrec.JaggedArray(
        jnp.zeros(4, jnp.int32), jnp.array([2, 1]), jnp.array([2.0, 3.0, 4.0, np.nan])
    )

    def loss(module):
        return module(column).weights[:3].sum()

    module = jaxrec.nn.PositionWeightedModule(3)
    gradients = nnx.grad(loss)(module)
    np.testing.assert_array_equal(gradients["position_weight"][...], [6, 3, 0])


def fill_padding(array):
    """Put NaN, or an id of no table, behind the rows of each ragged array."""
    if isinstance(array, jaxrec.KeyedJaggedArray):
        columns = {key: fill_padding(column) for key, column in array.to_dict().items()}
        values = np.concatenate([column.values for column in columns.values()])
        return array._with(values=jnp.asarray(values))
    if not isinstance(array, jaxrec.JaggedArray):
        return array
    values = np.array(array.values)
    values[int(array.lengths.sum()) :] = -7 if values.dtype.kind == "i" else np.nan
    return dataclasses.replace(array, values=jnp.asarray(values))


@nnx.jit
def write_and_read(pool, ids, values):
    pool.update(ids, values)
    found = pool(ids)
    return found if isinstance(pool, TensorPool) else found["f"].to_padded_dense(2)


def rows_of_a_pool(setting):
    rows = np.arange(16, dtype=np.float32).reshape(4, 4)
    return TensorPool(8, 4, mesh=setting and setting.mesh), rows


def bags_of_a_pool(setting):
    bags = jaxrec.KeyedJaggedArray.from_lists({"f": [[1], [2, 3], [], [4]]})
    pool = KeyedJaggedTensorPool(8, {"f": 2}, mesh=setting and setting.mesh)
    return pool, bags


POOLS = {"KeyedJaggedTensorPool": bags_of_a_pool, "TensorPool": rows_of_a_pool}


@EVERY_SETTING
@pytest.mark.parametrize("name", POOLS)
def test_pools_over_a_mesh(name, setting):
    ids = np.array([5, 0, 7, 2], np.int32)
    pool, values = POOLS[name](None)
    expected = write_and_read(pool, ids, jax.tree.map(jnp.asarray, values))
    pool, values = POOLS[name](setting)
    placed = jaxrec.mesh.shard_batch((ids, values), setting.mesh)
    with setting.context():
        found = write_and_read(pool, *placed)
    np.testing.assert_array_equal(found, expected)
