"""Ragged batches as text."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrec.ragged import JaggedArray, KeyedArray, KeyedJaggedArray


def make_batch(**options) -> KeyedJaggedArray:
    return KeyedJaggedArray.from_lists({"a": [[1], []], "b": [[2, 3], [4]]}, **options)


@pytest.mark.parametrize("place", [lambda x: x, jax.device_put], ids=["numpy", "jax"])
def test_small_batches_are_lists(place):
    assert str(place(make_batch())) == (
        "KeyedJaggedArray(batch_size=2, {\n    'a': [[1], []],\n    'b': [[2, 3], [4]],\n})"
    )
    weights = {"a": [[0.5], []], "b": [[1, 2], [3]]}
    batch = place(make_batch(weights=weights, inverse_indices=[[0, 1, 1], [0, 0, 1]]))
    assert repr(batch) == (
        "KeyedJaggedArray(batch_size=3, {\n"
        "    'a': [[1], []] weights [[0.5], []] inverse [0, 1, 1],\n"
        "    'b': [[2, 3], [4]] weights [[1.0, 2.0], [3.0]] inverse [0, 0, 1],\n"
        "})"
    )
    column = place(JaggedArray.from_lists([[1], [2, 3]], [[1], [2, 3]]))
    assert repr(column) == "JaggedArray([[1], [2, 3]], weights=[[1.0], [2.0, 3.0]], capacity=8)"


def test_slots_are_marked():
    batch = dataclasses.replace(make_batch(), slot_keys=("b",))
    assert str(batch).splitlines()[1:3] == ["    'a': [[1], []],", "    'b': slots [[2, 3], [4]],"]


def test_repeated_keys_are_all_there():
    assert str(make_batch().permute([0, 0])).count("'a': [[1], []]") == 2


def test_large_batches_are_shapes():
    batch = KeyedJaggedArray.from_dense({f"f{i}": np.arange(100) for i in range(9)})
    assert repr(batch) == (
        "KeyedJaggedArray(keys=('f0', 'f1', 'f2', 'f3', 'f4', 'f5', 'f6', 'f7', ... 9 in all), "
        "values=int32[1152], lengths=int32[900], weights=None, inverse_indices=None, "
        "capacities=(128, 128, 128, 128, 128, 128, 128, 128, ... 9 in all), "
        "strides=(100, 100, 100, 100, 100, 100, 100, 100, ... 9 in all))"
    )
    column = repr(batch["f0"])
    assert column == "JaggedArray(values=int32[128], lengths=int32[100], weights=None)"


def test_traced_batches_are_shapes():
    seen = []

    @jax.jit
    def show(batch, column, pooled):
        seen.extend(map(repr, (batch, column, pooled)))

    show(make_batch(), make_batch()["a"], KeyedArray(jnp.ones((2, 3)), ("a", "b"), (1, 2)))
    assert seen == [
        "KeyedJaggedArray(keys=('a', 'b'), values=int32[16], lengths=int32[4], weights=None, "
        "inverse_indices=None, capacities=(8, 8), strides=(2, 2))",
        "JaggedArray(values=int32[8], lengths=int32[2], weights=None)",
        "KeyedArray(values=float32[2, 3], dims={'a': 1, 'b': 2})",
    ]


def test_anything_else_has_a_text_too():
    batch = make_batch()
    placeholders = jax.tree.map(lambda leaf: object(), batch)
    assert "<object object" in repr(placeholders)
    assert "values=None" in repr(jax.tree.map(lambda leaf: None, batch["a"]))
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), batch)
    assert "values=int32[2, 16]" in repr(stacked)
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), batch["a"])
    assert "values=int32[2, 8]" in repr(stacked)
    shapes = jax.eval_shape(lambda b: b, batch)
    assert "values=int32[16]" in repr(shapes)


def test_deleted_batches_are_shapes():
    batch = jax.device_put(make_batch())
    batch.values.delete()
    assert "values=int32[16]" in repr(batch)


def test_batches_spread_over_devices_are_printed_whole():
    mesh = jax.make_mesh((2,), ("data",))
    sharding = jax.NamedSharding(mesh, jax.P("data"))
    batch = jax.device_put(make_batch(), sharding)
    assert repr(batch) == repr(make_batch())
