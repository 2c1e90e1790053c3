"""A run of batches has few shapes and little padding, whatever the batches are packed from."""

from __future__ import annotations

import copy
import json
import pickle
import threading

import jax
import numpy as np
import pyarrow as pa
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxrec
from jaxrec.data import pad_batch
from jaxrec.mesh import shard_batch
from jaxrec.ragged import KeyedJaggedArray, Packer
from tests.fuzz import max_examples


def draw(rng, features, samples):
    """Geometric lengths with means from 1 to 30, and ids."""
    means = np.linspace(1, 30, features)[:, None]
    lengths = rng.geometric(1 / means, (features, samples)).astype(np.int32)
    return lengths, np.zeros(lengths.sum(), np.int32)


def run(features, samples, devices, batches):
    """Return the shapes of a run's batches, as the step sees them, and the share of padding."""
    rng, packer = np.random.default_rng(features * samples), Packer()
    keys = [f"f{number}" for number in range(features)]
    mesh = jax.make_mesh((devices,), ("data",), devices=jax.devices()[:devices])
    shapes, ids, slots = set(), 0, 0
    for _ in range(batches):
        lengths, values = draw(rng, features, samples)
        batch = packer.from_lengths(keys, values, lengths.reshape(-1))
        if devices > 1:
            batch = shard_batch((batch, np.zeros(samples)), mesh)[0]
        arrays, tree = jax.tree.flatten(batch)
        shapes.add((tree, *(array.shape for array in arrays)))
        ids, slots = ids + values.size, slots + batch.values.size
    return shapes, 1 - ids / slots


@pytest.mark.every_case
@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize(
    ("features", "samples", "batches"),
    [
        (26, 512, 500),
        # Batches of more samples differ less: 200 of them take each shape that 500 take.
        pytest.param(100, 2048, 200, marks=pytest.mark.slow),
    ],
)
def test_a_run_has_few_shapes_and_little_padding(features, samples, batches, devices):
    shapes, padding = run(features, samples, devices, batches)
    assert len(shapes) <= 4
    assert padding <= 0.4


def ranker(mesh=None):
    tables = [jaxrec.EmbeddingBagConfig(key, 50, 4) for key in "ab"]

    def make():
        return jaxrec.EmbeddingBagCollection(tables, rngs=nnx.Rngs(0))

    if mesh is None:
        return make()
    return jaxrec.shard(make, jaxrec.plan.ShardingPlan.from_dict(dict.fromkeys("ab", ROWS)), mesh)


ROWS = jaxrec.mesh.row_wise()


@pytest.mark.parametrize("devices", [1, 4])
def test_a_loop_compiles_few_steps(devices):
    """A loop of its own, in which the step counts its traces."""
    mesh = jax.make_mesh((devices,), ("data",), devices=jax.devices()[:devices])
    model, traces = ranker(mesh), []

    @nnx.jit
    def step(model, features):
        traces.append(features.capacities)
        return model(features).values.sum()

    rng, packer = np.random.default_rng(0), Packer()
    for _ in range(40):
        lists = {key: [[1] * n for n in rng.geometric(0.2, 32)] for key in "ab"}
        features, _ = shard_batch((packer.from_lists(lists), np.zeros(32)), mesh)
        step(model, features)
    assert len(traces) <= 3


LISTS = {"a": [[1, 2], [], [3]], "b": [[4], [5, 6], []]}
FLAT = [1, 2, 3, 4, 5, 6]
SOURCES = {
    "lists": lambda packer: packer.from_lists(LISTS),
    "lists of arrays": lambda packer: packer.from_lists(
        {key: [np.array(bag, int) for bag in bags] for key, bags in LISTS.items()}
    ),
    "lengths": lambda packer: packer.from_lengths(["a", "b"], FLAT, [2, 0, 1, 1, 2, 0]),
    "offsets": lambda packer: packer.from_offsets(["a", "b"], FLAT, [0, 2, 2, 3, 4, 6, 6]),
    "arrow": lambda packer: packer.from_arrow(pa.table(LISTS)),
    "raw ids": lambda packer: packer.from_lists(LISTS, id_bits=64),
    "weights": lambda packer: packer.from_lists(LISTS, LISTS),
    "another packer": lambda packer: packer.fit((KeyedJaggedArray.from_lists(LISTS), 0))[0],
}


@pytest.mark.every_case
@pytest.mark.parametrize("source", SOURCES)
def test_all_sources_share_capacities(source):
    packer = Packer(capacities={"a": 40})
    long = packer.from_lists({"a": [[1] * 50, [], []], "b": [[2] * 30, [], []]})
    batch = SOURCES[source](packer)
    assert batch.capacities == long.capacities
    assert batch.to_lists() == LISTS
    if batch.weights is not None:
        assert batch.weights[:3].tolist() == [1, 2, 3]
        assert batch["b"].weights[:3].tolist() == [4, 5, 6]


def test_dense_features_have_no_padding():
    packer = Packer()
    ids = np.arange(30).reshape(10, 3)
    assert packer.from_dense({"f": ids}).capacities == (30,)
    assert packer.from_dense({"f": ids[::-1]}).capacities == (30,)
    assert packer.from_dense({"f": ids[:, :2]}).capacities == (30,)
    assert packer.from_dense({"f": np.zeros((10, 4), int)}).capacities[0] > 40


@given(
    counts=st.lists(st.lists(st.integers(0, 300), min_size=2, max_size=2), min_size=1, max_size=40)
)
@settings(max_examples=max_examples(50))
def test_each_batch_is_whole_and_shapes_are_few(counts):
    """Also where lengths are anything at all: sizes grow together, by at least an eighth."""
    packer, shapes = Packer(), []
    for first, second in counts:
        lists = {"a": [[7] * first, []], "b": [[9], [8] * second]}
        batch = packer.from_lists(lists)
        assert batch.to_lists() == lists
        shapes.append(batch.capacities)
    distinct = np.array(sorted(set(shapes)))
    assert (np.diff(distinct, axis=0) >= 0).all()
    assert len(distinct) <= 5


def test_a_long_sample_does_not_enlarge_later_batches():
    packer = Packer()
    short = {"a": [[1]] * 100, "b": [[1], [1, 2]] * 50}
    first = packer.from_lists(short).capacities
    assert packer.from_lists(short | {"b": [[1] * 5000] + [[1]] * 99}).capacities > first
    assert packer.from_lists(short).capacities == first


def test_known_lengths():
    lengths = np.random.default_rng(0).geometric(0.1, 10_000)
    packer = Packer(lengths={"f": lengths})
    short = packer.from_lists({"f": [[1]] * 64})  # not what the lengths say
    assert 640 + 4 * 76 < short.capacities[0] < 640 + 6 * 76
    rng = np.random.default_rng(1)
    for _ in range(50):
        lists = {"f": [[1] * n for n in rng.choice(lengths, 64)]}
        assert packer.from_lists(lists).capacities == short.capacities


def restored(packer, how):
    if how == "json":
        return Packer.from_dict(json.loads(json.dumps(packer.to_dict())))
    return pickle.loads(pickle.dumps(packer)) if how == "pickle" else copy.deepcopy(packer)


@pytest.mark.every_case
@pytest.mark.parametrize("how", ["json", "pickle", "deepcopy"])
def test_a_saved_packer_goes_on(how):
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    packer = Packer(lengths={"c": [3]}, capacities={"b": 24})
    long = {"a": [[1] * 9, [2]], "b": [[3], [4]]}
    before = packer.from_lists(long), shard_batch(packer.from_lists(long), mesh)
    again, short = restored(packer, how), {"a": [[1], []], "b": [[], []]}
    after = again.from_lists(short), shard_batch(again.from_lists(short), mesh)
    assert [x.capacities for x in after] == [x.capacities for x in before]
    assert again.to_dict() == packer.to_dict()


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("saved", "message"),
    [
        ({}, "takes what Packer.to_dict returned, got {}"),
        ({"lengths": {}, "capacities": {}, "sizes": 1}, "Packer.to_dict"),
        ({"lengths": {}, "capacities": {"f": -1}, "sizes": []}, "0 or more"),
        ({"lengths": {"f": [1]}, "capacities": {}, "sizes": []}, "TypeError"),
        (
            {
                "lengths": {},
                "capacities": {},
                "sizes": [{"keys": ["f"], "samples": 2, "devices": 1, "capacities": [[8, 8]]}],
            },
            "other numbers of capacities",
        ),
    ],
    ids=["empty", "number", "negative", "moments", "keys"],
)
def test_something_else_to_restore(saved, message):
    with pytest.raises(ValueError, match=message):
        Packer.from_dict(saved)


def test_wrong_arguments():
    with pytest.raises(TypeError, match="Packer chooses the capacities"):
        Packer().from_lists({"f": [[1]]}, capacities={"f": 8})
    with pytest.raises(TypeError, match="not an integer"):
        Packer(capacities={"f": 8.0})
    with pytest.raises(ValueError, match="negative length -1"):
        Packer(lengths={"f": [1, -1]})
    with pytest.raises(ValueError, match="sample 1: id 9 is outside"):
        Packer().from_lists({"f": [[1], [9]]}, bounds={"f": 9})
    with pytest.raises(ValueError, match="different numbers of samples"):
        Packer().from_lists({"f": [[1]], "g": [[1], [2]]})


def test_shared_bags_have_one_number_of_bags():
    packer, inverse = Packer(), np.array([[0, 1, 0, 1], [0, 0, 0, 0]])
    one = packer.from_lists({"a": [[1], [2]], "b": [[3]]}, inverse_indices=inverse)
    other = packer.from_lists({"a": [[1], [2], [3]], "b": [[], [3]]}, inverse_indices=inverse)
    assert one.strides == other.strides == (4, 4)
    model = ranker()
    plain = KeyedJaggedArray.from_lists({"a": [[1], [2]], "b": [[3]]}, inverse_indices=inverse)
    np.testing.assert_array_equal(model(one).values, model(plain).values)


def test_a_smaller_batch_is_padded_to_the_shape_of_the_others():
    packer = Packer()
    full = packer.from_lists({"a": [[1, 2]] * 30 + [[]] * 2, "b": [[1]] * 32})
    padded, _ = pad_batch(packer.from_lists({"a": [[5]], "b": [[6]]}), 32)
    assert (padded.capacities, padded.strides) == (full.capacities, full.strides)
    assert padded.to_lists() == {"a": [[5]] + [[]] * 31, "b": [[6]] + [[]] * 31}


def test_fit_leaves_equal_capacities_alone():
    """Batches that a program gave one shape of its own choice keep it."""
    packer = Packer()
    for ids in ([1], [2, 3], [4] * 13):
        batch = KeyedJaggedArray.from_lists({"f": [ids]}, capacities={"f": 13})
        assert packer.fit({"x": batch, "y": 1})["x"].capacities == (13,)
    other = Packer().from_lists({"f": [[1]]})
    assert packer.fit(other) is other
    on_device = jax.device_put(KeyedJaggedArray.from_lists({"f": [[1]]}))
    assert packer.fit(on_device).capacities == on_device.capacities


def test_keys_of_a_batch_keep_its_packer_on_a_mesh():
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    packer = Packer(capacities={"a": 100})
    batch = packer.from_lists({"a": [[1], []], "b": [[], [3]]})
    assert shard_batch(batch.select(["b", "a"]), mesh).capacities == (8, 104)
    whole = KeyedJaggedArray.concat(batch.split([1, 1]))
    assert shard_batch({"x": whole}, mesh)["x"].capacities == (104, 8)


def test_threads_share_a_packer():
    packer, shapes = Packer(), set()

    def pack(seed):
        rng = np.random.default_rng(seed)
        for _ in range(50):
            batch = packer.from_lists({"f": [[1] * n for n in rng.geometric(0.2, 16)]})
            shapes.add(batch.capacities)

    threads = [threading.Thread(target=pack, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(shapes) <= 4


@pytest.mark.parametrize("devices", [None, 4])
def test_samples_that_share_bags_have_few_shapes(devices):
    """The ids of all samples vary, by how many share a bag, more than those of the bags."""
    rng, packer, shapes = np.random.default_rng(5), Packer(), set()
    for number in range(60):
        lists = {name: [[1] * n for n in rng.geometric(1 / 4, 24)] for name in ("a", "b", "c")}
        inverse = rng.integers(0, rng.integers(1, 25), (3, 64))
        batch = packer.from_lists(lists, inverse_indices=inverse)
        if number == 0:
            alone = KeyedJaggedArray.from_lists(lists, inverse_indices=inverse)
            assert batch.expanded().to_lists() == alone.expanded().to_lists()
        if devices is not None:
            batch = shard_batch(batch, jax.make_mesh((devices,), ("data",)))
        shapes.add(jax.tree.structure(batch))
        lengths = np.asarray(batch.lengths).reshape(-1, 3, batch.strides[0])
        bags = np.reshape(batch.inverse_indices, (len(lengths), 3, -1))
        of_samples = np.take_along_axis(lengths, bags, axis=2)
        assert (of_samples.sum(-1) <= batch.sample_capacities).all()
    assert len(shapes) <= 4
