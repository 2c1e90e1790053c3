"""Named blocks of columns."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrec.ragged import KeyedArray

pytestmark = pytest.mark.every_case


def block(start: int, dim: int, xp=jnp):
    return xp.asarray(np.arange(start, start + 3 * dim, dtype=np.float32).reshape(3, dim))


def make_arrays(xp=jnp) -> list[KeyedArray]:
    one = KeyedArray.from_arrays({"a": block(0, 1, xp), "b": block(10, 3, xp)})
    return [one, KeyedArray.from_arrays({"c": block(20, 2, xp)})]


@pytest.mark.parametrize("xp", [np, jnp], ids=["numpy", "jax"])
def test_blocks(xp):
    array, _ = make_arrays(xp)
    assert isinstance(array.values, xp.ndarray)
    assert array.keys == ("a", "b")
    assert array.dims == (1, 3)
    assert array.offset_per_key == (0, 1, 4)
    assert array.batch_size == 3
    assert list(array) == ["a", "b"]
    np.testing.assert_array_equal(array["b"], block(10, 3))
    assert list(array.to_dict()) == ["a", "b"]
    np.testing.assert_array_equal(array.to_dict()["a"], block(0, 1))


@pytest.mark.parametrize("xp", [np, jnp], ids=["numpy", "jax"])
def test_regroup(xp):
    groups = {"x": ["c", "a"], "y": ["b"], "z": ["a", "a"]}
    regrouped = KeyedArray.regroup_as_dict(make_arrays(xp), groups)
    assert list(regrouped) == ["x", "y", "z"]
    np.testing.assert_array_equal(regrouped["x"], np.hstack([block(20, 2), block(0, 1)]))
    np.testing.assert_array_equal(regrouped["y"], block(10, 3))
    np.testing.assert_array_equal(regrouped["z"], np.hstack([block(0, 1), block(0, 1)]))
    assert all(isinstance(group, xp.ndarray) for group in regrouped.values())


def test_gradients_of_repeated_blocks_add_up():
    def loss(arrays):
        return sum(group.sum() for group in KeyedArray.regroup(arrays, [["a", "c"], ["a"]]))

    first, second = jax.jit(jax.grad(loss))(make_arrays())
    np.testing.assert_array_equal(first.values, np.repeat([[2, 0, 0, 0]], 3, axis=0))
    np.testing.assert_array_equal(second.values, np.ones((3, 2)))
    assert first.keys == ("a", "b")


def test_a_tree_of_anything():
    array, _ = make_arrays()
    assert jax.tree.map(lambda leaf: None, array).dims == (1, 3)
    assert jax.eval_shape(lambda a: a, array).values.shape == (3, 4)


ERRORS = {
    "getitem": (lambda: make_arrays()[0]["x"], KeyError, r"no key 'x' among \['a', 'b'\]"),
    "nothing": (lambda: KeyedArray.from_arrays({}), ValueError, "at least one block"),
    "rank": (
        lambda: KeyedArray.from_arrays({"a": jnp.ones((2, 1)), "b": jnp.ones((3, 1))}),
        ValueError,
        r"blocks must be \[batch, dim\] of one batch size, not {'a': \(2, 1\), 'b': \(3, 1\)}",
    ),
    "regroup_missing": (
        lambda: KeyedArray.regroup(make_arrays(), [["a", "x"]]),
        KeyError,
        r"no keys \['x'\] among \['a', 'b', 'c'\]",
    ),
    "regroup_shared": (
        lambda: KeyedArray.regroup(make_arrays()[:1] * 2, [["a"]]),
        ValueError,
        r"keys \['a', 'b'\] are in more than one of the arrays",
    ),
    "regroup_empty": (
        lambda: KeyedArray.regroup(make_arrays(), [["a"], []]),
        ValueError,
        r"groups \[1\] have no keys",
    ),
}


@pytest.mark.parametrize(("call", "error", "message"), ERRORS.values(), ids=ERRORS)
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()
