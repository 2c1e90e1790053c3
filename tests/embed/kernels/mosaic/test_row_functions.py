"""Functions of rows in a kernel: of padded tiles, by operations that Mosaic has."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrec import optim
from jaxrec.embed.formats.rounding import random_bits
from jaxrec.embed.kernels.mosaic.lanes import Lanes
from jaxrec.embed.kernels.mosaic.programs import interpreted
from jaxrec.embed.kernels.mosaic.row_functions import RowShape, evaluate, unsupported

GROUPS, DIM, COLUMNS = 5, 6, 8
LACKING = {"floor", "ceil", "expm1", "log1p", "is_finite", "sign", "not", "reshape", "slice"}


@pytest.fixture(autouse=True)
def outside_of_kernels():
    with interpreted():
        yield


def shape_of(first: int = 0, dim: int = DIM) -> RowShape:
    return RowShape(Lanes(1, 1, COLUMNS, COLUMNS), GROUPS, first, dim)


def padded(rows: np.ndarray) -> jax.Array:
    """Rows with numbers at padding that must not matter."""
    return jnp.asarray(np.pad(rows, ((0, 0), (0, COLUMNS - rows.shape[1])), constant_values=1e9))


def numbers(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(GROUPS, DIM)).astype(np.float32)


FUNCTIONS = {
    "columns": lambda x, line: x / line[:, None] + jnp.arange(x.shape[1])[None],
    "norms": lambda x, line: x * (jnp.sqrt(jnp.sum(x * x, axis=1)) + line)[:, None],
    "mean": lambda x, line: jnp.mean(x, axis=1, keepdims=True) * line[:, None] + jnp.zeros_like(x),
    "largest": lambda x, line: x - jnp.max(x, axis=1, keepdims=True) - jnp.min(-x, axis=1)[:, None],
    "one_column": lambda x, line: x - x[:, 2:3] + jnp.squeeze(x[:, :1], 1)[:, None],
    "rounding": lambda x, line: jnp.floor(5 * x) + 10 * jnp.ceil(7 * x) + 100 * jnp.sign(x),
    "selection": lambda x, line: jnp.where(~(x > 0) & jnp.isfinite(1 / line)[:, None], x**0, x**3),
    "exponentials": lambda x, line: jnp.expm1(x) + jnp.log1p(jnp.abs(x)) + jnp.clip(x, -0.5, 0.5),
    "same_in_all_rows": lambda x, line: jnp.float32(3),
    "line": lambda x, line: line * 2,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_padded_rows(name: str):
    rows, line = numbers(), np.abs(numbers(1)[:, 0])
    function = FUNCTIONS[name]
    result = evaluate(function, shape_of(), padded(rows), jnp.asarray(line))
    expected = function(jnp.asarray(rows), jnp.asarray(line))
    result = result[:, :DIM] if jnp.ndim(result) == 2 else result
    np.testing.assert_allclose(result, expected, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["expm1", "log1p"])
def test_exponentials_near_zero(name: str):
    values = np.concatenate([np.logspace(-30, -1, 12), -np.logspace(-30, -1, 12), [0, 3, -0.999]])
    rows = np.resize(values, (GROUPS, DIM)).astype(np.float32)
    result = evaluate(getattr(jnp, name), shape_of(), padded(rows))[:, :DIM]
    np.testing.assert_allclose(result, getattr(np, name)(rows.astype(float)), rtol=1e-6)


@pytest.mark.parametrize("name", ["expm1", "log1p"])
def test_exponentials_of_special_numbers(name: str):
    special = [np.inf, -np.inf if name == "expm1" else -2, np.nan, -1, 1e-45, 3e38]
    rows = np.resize(special, (GROUPS, DIM)).astype(np.float32)
    result = evaluate(getattr(jnp, name), shape_of(), padded(rows))[:, :DIM]
    with np.errstate(all="ignore"):
        expected = getattr(np, name)(rows)
    np.testing.assert_allclose(result, expected, rtol=1e-6, atol=1e-44)


def test_some_columns_of_a_tile():
    rows = numbers()
    result = evaluate(
        lambda x: (jnp.max(x, axis=1), x - x[:, :1] + jnp.arange(3)[None]),
        shape_of(2, 3),
        padded(rows),
    )
    np.testing.assert_array_equal(result[0], rows[:, 2:5].max(axis=1))
    np.testing.assert_allclose(result[1][:, 2:5], rows[:, 2:5] - rows[:, 2:3] + np.arange(3))


def test_rows_of_one_column():
    rows = numbers()
    line = jnp.asarray(rows[:, 1])

    def function(x, line):
        mean = jnp.mean(x * x, axis=1)
        return x / (jnp.sqrt(mean) + jnp.abs(line))[:, None] - x[:, :1], mean

    new, mean = evaluate(function, shape_of(2, 1), padded(rows), line)
    expected, expected_mean = function(jnp.asarray(rows[:, 2:3]), line)
    np.testing.assert_allclose(new[:, 2:3], expected, rtol=1e-6)
    np.testing.assert_allclose(mean, expected_mean, rtol=1e-6)


def test_random_bits():
    ids = jnp.arange(GROUPS, dtype=jnp.int32) * 7

    def bits(ids, step):
        return random_bits(ids, step, DIM, salt=3)

    result = evaluate(bits, shape_of(), ids, jnp.int32(9))
    np.testing.assert_array_equal(result[:, :DIM], bits(ids, jnp.int32(9)))


def test_only_operations_that_mosaic_has():
    """Each operation of LAMB and of rounding is computed by others, if Mosaic lacks it."""
    rule = optim.lamb(0.1, max_norm=1.0, weight_decay=0.1)
    state = {name: jnp.ones((GROUPS, COLUMNS)) for name in rule.init(1, 1)}

    def update(rows, gradients, state, step):
        return evaluate(rule.update, shape_of(), rows, gradients, state, step)

    rows = padded(numbers())
    text = str(jax.make_jaxpr(update)(rows, rows, state, jnp.int32(1)))
    assert [name for name in LACKING if f" {name}" in text] == []


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: jnp.cumsum(x, axis=1), "the operation cumsum"),
        (lambda x: jnp.sort(x, axis=1), "the operation sort"),
        (lambda x: x - jnp.sum(x, axis=0)[None], "reduce_sum over rows"),
        (lambda x: x.T, "the operation transpose"),
        (lambda x: x[:, 1:4], "a slice of several columns"),
        (lambda x: x * jnp.arange(x.shape[0])[:, None], "the number of a row"),
        (lambda x: x * np.arange(4, dtype=np.float32)[None], "a constant array of shape (1, 4)"),
    ],
    ids=["cumsum", "sort", "over_rows", "transpose", "columns", "row_numbers", "constant"],
)
def test_functions_that_kernels_cannot_compute(function, message):
    reason = unsupported(function, jax.ShapeDtypeStruct((3, 4), jnp.float32))
    assert message in str(reason)


def test_functions_that_kernels_can_compute():
    rows = jax.ShapeDtypeStruct((3, 4), jnp.float32)
    assert unsupported(lambda x: x / jnp.linalg.norm(x, axis=1)[:, None], rows) is None
