"""A row's first values: the rule, the same wherever the row lies, and what does not follow it."""

from __future__ import annotations

import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend.random import threefry_2x32

import jaxrec
from jaxrec.embed import init_tables
from jaxrec.embed.first_values import draw_and_scale, draw_rows, fill_rows, place_of, table_key

pytestmark = pytest.mark.jax_version

SGD = jaxrec.optim.sgd(0.1)
# Rows of a table, and ids of 64 bits, negative ones as well.
NUMBERS = [0, 1, 299, 2**31, 2**32 - 1, 2**32 + 5, 2**33 + 12_345, 2**63 - 1, -(2**63), -7]


# The function that draws a row of standard values, and their factor for 300 rows and 8 columns.
DRAWS = {
    "uniform": (lambda key, shape: jax.random.uniform(key, shape, minval=-1, maxval=1), 300**-0.5),
    "normal": (jax.random.normal, 8**-0.5),
    jax.nn.initializers.truncated_normal(0.5): (jax.nn.initializers.truncated_normal(0.5), 1),
}


def written_out(initializer, key, numbers) -> np.ndarray:
    """The rule with JAX's own Threefry, a row at a time."""
    draw, factor = DRAWS[initializer]
    of_table = jax.random.key_data(jax.random.fold_in(key, zlib.crc32(b"a")))
    rows = []
    for number in numbers:
        words = jnp.array([number >> 32 & 0xFFFFFFFF, number & 0xFFFFFFFF], jnp.uint32)
        of_row = jax.random.wrap_key_data(threefry_2x32(of_table, words), impl="threefry2x32")
        rows.append(np.asarray(draw(of_row, (1, 8)))[0] * np.float32(factor))
    return np.stack(rows)


@pytest.mark.parametrize("initializer", DRAWS, ids=lambda x: getattr(x, "__name__", str(x)))
def test_rows_follow_the_rule(initializer):
    key = jax.random.key(3, impl="threefry2x32")
    draw, scale = draw_and_scale(initializer, 300, 8)
    high, low = np.array([divmod(n % 2**64, 2**32) for n in NUMBERS], np.uint32).T
    rows = jax.jit(draw_rows, static_argnums=(0, 5))(draw, scale, table_key(key, "a"), high, low, 8)
    np.testing.assert_allclose(rows, written_out(initializer, key, NUMBERS), rtol=1e-6)
    whole = init_tables([jaxrec.EmbeddingBagConfig("a", 300, 8, initializer=initializer)], SGD, key)
    np.testing.assert_array_equal(whole.read("a")[jnp.array([0, 1, 299])], rows[:3])


def test_the_first_rows_of_a_fold_are_those_of_fold_in():
    """As the documentation says it, for rows below 2**32."""
    key = jax.random.key(0, impl="threefry2x32")
    config = jaxrec.EmbeddingBagConfig("a", 70, 5, initializer=jax.nn.initializers.normal(0.1))
    table = np.asarray(init_tables([config], SGD, key).read("a"))
    of_table = jax.random.fold_in(key, zlib.crc32(b"a"))
    for row in (0, 1, 69):
        drawn = jax.nn.initializers.normal(0.1)(jax.random.fold_in(of_table, row), (1, 5))
        np.testing.assert_allclose(table[row], drawn[0], rtol=1e-6)


@pytest.mark.parametrize("first", [0, 2**31 - 5, 2**32 - 2, 2**33 + 12_345, 10**11])
@pytest.mark.parametrize("columns", [(0, 8), (3, 5)])
def test_parts_of_large_tables_are_filled(first, columns):
    """Four rows of a table whose rows int32 cannot number, and some columns of them."""
    key = jax.random.key(3, impl="threefry2x32")
    place = place_of((first, first + 4), 2, columns)
    draw, scale = draw_and_scale("uniform", 300, 8)
    array = jnp.full((8, 5 if columns[0] else 8), 7.0)
    of_table = table_key(key, "a"), draw, jnp.float32(scale)
    filled = np.array(fill_rows(array, *of_table, jnp.array(place), 8))
    expected = written_out("uniform", key, range(first, first + 4))[:, slice(*columns)]
    np.testing.assert_allclose(filled[2:6, : expected.shape[1]], expected, rtol=1e-6)
    np.testing.assert_array_equal(filled[2:6, expected.shape[1] :], 0)
    np.testing.assert_array_equal(filled[[0, 1, 6, 7]], 7)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "raw"])
def test_keys_of_every_kind(impl):
    """Rows differ with the key and the name of the table, and are drawn in `jax.jit` as outside."""
    keys = [jax.random.key(seed, impl="rbg" if impl == "rbg" else None) for seed in (0, 1)]
    if impl == "raw":
        keys = [jax.random.key_data(key) for key in keys]
    configs = [jaxrec.EmbeddingBagConfig(name, 9, 4, initializer="normal") for name in "ab"]

    def rows(key):
        tables = init_tables(configs, SGD, key)
        return jnp.concatenate([tables.read("a"), tables.read("b")])

    found = np.concatenate([rows(key) for key in keys])
    assert len(np.unique(found[:, 0])) == len(found) == 36
    np.testing.assert_array_equal(jax.jit(rows)(keys[0]), found[:18])


def first_row_is_zero(key, shape, dtype):
    return jax.random.normal(key, shape, dtype).at[0].set(0)


def with_numpy(key, shape, dtype):
    return np.random.default_rng(0).normal(size=shape)


def waves(key, shape, dtype):
    return jnp.sin(jnp.arange(shape[0])[:, None] * jnp.arange(1.0, shape[1] + 1)[None])


def noisy_waves(key, shape, dtype):
    return waves(key, shape, dtype) + 0.3 * jax.random.normal(key, shape, dtype)


def identity(key, shape, dtype):
    return jnp.eye(*shape, dtype=dtype)


def standardized(key, shape, dtype):
    values = jax.random.normal(key, shape, dtype)
    return (values - values.mean(0, keepdims=True)) / values.std(0, keepdims=True)


OF_SEVERAL_ROWS = (first_row_is_zero, with_numpy, waves, noisy_waves, identity, standardized)


@pytest.mark.parametrize("initializer", OF_SEVERAL_ROWS, ids=lambda x: x.__name__)
@pytest.mark.parametrize("dim", [4, 64])
def test_initializers_of_several_rows_are_refused(initializer, dim):
    tables = [jaxrec.EmbeddingBagConfig("a", 100, dim, initializer=initializer)]
    with pytest.raises(ValueError, match=r"depend on the number of rows or on other rows \(.*by"):
        init_tables(tables, SGD, jax.random.key(0))


def test_given_values_are_refused():
    values = jnp.ones((100, 4))
    tables = [jaxrec.EmbeddingBagConfig("a", 100, 4, initializer=lambda *_: values)]
    with pytest.raises(ValueError, match=r"called with shape \(\d+, 4\) .* \(100, 4\).*load_table"):
        init_tables(tables, SGD, jax.random.key(0))


def test_columns_may_differ():
    def ramp(key, shape, dtype):
        return jnp.broadcast_to(jnp.arange(shape[1], dtype=dtype), shape)

    def noisy_ramp(key, shape, dtype):
        return ramp(key, shape, dtype) + jax.random.normal(key, shape, dtype)

    for initializer in (ramp, noisy_ramp):
        assert draw_and_scale(initializer, 100, 8) == (initializer, 1)


def test_a_collection_knows_its_key_and_no_step_does():
    """A step is compiled once for models of any key."""
    configs = [jaxrec.EmbeddingBagConfig("a", 9, 4)]
    models = [jaxrec.EmbeddingBagCollection(configs, rngs=nnx.Rngs(seed)) for seed in (0, 1)]
    for seed, model in enumerate(models):
        assert model.first_key == nnx.Rngs(seed).params()
    counts = []

    @nnx.jit
    def read(model):
        counts.append(1)
        return model.table("a")

    tables = [np.asarray(read(model)) for model in models]
    assert len(counts) == 1
    assert (tables[0] != tables[1]).all()
    assert nnx.clone(models[0]).first_key is None
