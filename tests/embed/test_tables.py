"""Tables: first values, groups, reading and writing single tables."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxrec
from jaxrec.embed import init_tables
from jaxrec.embed.first_values import BLOCK_ELEMENTS, draw_and_scale, initialize_rows, table_key
from jaxrec.embed.layout import MAX_ROWS, layout_tables
from jaxrec.embed.tables import Tables

pytestmark = pytest.mark.jax_version

Bag = jaxrec.EmbeddingBagConfig
ADAM = jaxrec.optim.adam()
SGD = jaxrec.optim.sgd(0.1)


def test_equal_width_type_and_optimizer_make_a_group():
    configs = [
        Bag("a", 10, 4),
        Bag("b", 10, 8),
        Bag("c", 5, 4, feature_names=("c", "a")),
        Bag("half", 10, 4, dtype="bfloat16"),
        Bag("own", 10, 4, optimizer=ADAM),
        Bag("same", 10, 4, optimizer=jaxrec.optim.sgd(0.1)),
    ]
    layout = layout_tables(configs, SGD)
    groups = {group.name: [table.name for table in group.tables] for group in layout.groups}
    assert groups == {
        "float32_4": ["a", "c", "same"],
        "float32_8": ["b"],
        "bfloat16_4": ["half"],
        "float32_4_2": ["own"],
    }
    keys = [output.key for output in layout.outputs]
    assert keys == ["a@a", "b", "c", "a@c", "half", "own", "same"]
    assert layout.bounds["a"] == 5


def test_groups_stay_within_int32():
    big = MAX_ROWS // 2 + 1
    layout = layout_tables([Bag("a", big, 1), Bag("b", big, 1), Bag("c", 10, 1)], SGD)
    assert [[t.name for t in group.tables] for group in layout.groups] == [["a"], ["b", "c"]]


def test_rows_beyond_int32_are_refused():
    layout = layout_tables([Bag("a", 5, 1), Bag("big", MAX_ROWS + 1, 1)], SGD)
    with pytest.raises(
        ValueError, match=r"'big': row indices on a device are int32.*jaxrec.shard.*tier.Cached"
    ):
        Tables.init(layout, jax.random.key(0))


def test_layout_errors():
    with pytest.raises(ValueError, match="at least one table"):
        layout_tables([], SGD)
    with pytest.raises(ValueError, match="2 tables are named 'a'"):
        layout_tables([Bag("a", 1, 1), Bag("a", 1, 1)], SGD)
    with pytest.raises(TypeError, match="tables of one kind"):
        layout_tables([Bag("a", 1, 1), jaxrec.EmbeddingConfig("b", 1, 1)], SGD)


@pytest.mark.parametrize("name", ["lecun_normal", "he_uniform", "glorot_normal", "orthogonal"])
def test_initializers_by_fan_in_are_refused(name):
    initializer = getattr(jax.nn.initializers, name)()
    tables = [Bag("a", 3000, 4, initializer=initializer)]
    with pytest.raises(ValueError, match=r"values that depend on the number of rows .*stddev="):
        init_tables(tables, SGD, jax.random.key(0))


@pytest.mark.parametrize("dim", [1, 600])
def test_initializers_of_any_scale_pass(dim):
    zeros = jax.nn.initializers.zeros
    for initializer in (jax.random.normal, jax.random.uniform, jax.random.cauchy, zeros):
        assert draw_and_scale(initializer, 3000, dim) == (initializer, 1)


@pytest.mark.parametrize(
    ("initializer", "low", "high", "deviation"),
    [
        ("uniform", -(3000**-0.5), 3000**-0.5, (3000**-0.5) / 3**0.5),
        ("normal", -4, 4, 0.5),
        ("xavier_uniform", -((6 / 3004) ** 0.5), (6 / 3004) ** 0.5, (2 / 3004) ** 0.5),
        ("xavier_normal", -1, 1, (2 / 3004) ** 0.5),
        ("zeros", 0, 0, 0),
        ("ones", 1, 1, 0),
        (jax.nn.initializers.normal(0.3), -3, 3, 0.3),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_initializers(initializer, low, high, deviation):
    tables = init_tables([Bag("a", 3000, 4, initializer=initializer)], SGD, jax.random.key(0))
    values = np.asarray(tables.read("a"))
    assert values.min() >= low - 1e-7
    assert values.max() <= high + 1e-7
    np.testing.assert_allclose(values.std(), deviation, rtol=0.05)


def test_first_values_depend_on_key_and_name_alone():
    key = jax.random.key(1)
    alone = init_tables([Bag("a", 100, 4)], SGD, key)
    among = init_tables([Bag("z", 77, 4), Bag("a", 100, 4), Bag("b", 100, 4)], SGD, key)
    np.testing.assert_array_equal(alone.read("a"), among.read("a"))
    assert np.abs(among.read("a") - among.read("b")).max() > 0.01
    other = init_tables([Bag("a", 100, 4)], SGD, jax.random.key(2))
    assert np.abs(alone.read("a") - other.read("a")).max() > 0.01


def test_blocks_of_rows_differ_and_reach_the_last_row():
    rows = 2 * BLOCK_ELEMENTS // 64 + 5
    table = np.asarray(init_tables([Bag("a", rows, 64)], SGD, jax.random.key(0)).read("a"))
    assert len(np.unique(table[:, 0])) > 0.99 * rows
    assert np.abs(table[-5:]).min(axis=1).max() > 0
    assert np.abs(table).max(axis=1).min() > 0


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_initialization_works_in_place(dtype):
    """The compiled filling of a table needs a block's worth of memory beside it.

    Before JAX 0.11 bfloat16 on CPUs takes a copy of the same bits, never one in float32 for each
    block.
    """
    from jaxrec.embed.first_values import INITIALIZERS, _fill

    copies = 1.25 if dtype == "bfloat16" and jax.__version_info__ < (0, 11) else 0.25

    rows = 80 * BLOCK_ELEMENTS // 16
    array = jax.ShapeDtypeStruct((rows, 16), jnp.dtype(dtype))
    compiled = _fill.lower(
        array,
        jax.ShapeDtypeStruct((2,), jnp.uint32),
        INITIALIZERS["uniform"][0],
        jax.ShapeDtypeStruct((), jnp.float32),
        jax.ShapeDtypeStruct((6,), jnp.int32),
    ).compile()
    memory = compiled.memory_analysis()
    table_bytes = rows * 16 * array.dtype.itemsize
    assert memory.alias_size_in_bytes == table_bytes
    assert memory.temp_size_in_bytes < copies * table_bytes


def test_rows_of_other_tables_stay():
    key = table_key(jax.random.key(0), "a")
    array = initialize_rows(jnp.zeros((10, 2)), key, "ones", 3, 4)
    np.testing.assert_array_equal(array[:, 0], [0, 0, 0, 1, 1, 1, 1, 0, 0, 0])


@pytest.fixture
def collection():
    configs = [Bag("a", 6, 2), Bag("b", 5, 2), Bag("c", 4, 3)]
    return jaxrec.EmbeddingBagCollection(configs, optimizer=ADAM, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("as_array", [np.asarray, jnp.asarray])
def test_load_table_sets_that_table_alone(collection, as_array):
    values = np.arange(10, dtype=np.float32).reshape(5, 2)
    others = {name: np.asarray(collection.table(name)) for name in "ac"}
    collection.load_table("b", as_array(values))
    np.testing.assert_array_equal(collection.table("b"), values)
    for name, before in others.items():
        np.testing.assert_array_equal(collection.table(name), before)


def test_load_table_in_pieces(collection, monkeypatch):
    monkeypatch.setattr("jaxrec.embed.tables._COPY_ELEMENTS", 4)
    values = np.arange(10, dtype=np.float64).reshape(5, 2)
    collection.load_table("b", values)
    np.testing.assert_array_equal(collection.table("b"), values)


def test_state_of_one_table(collection):
    state = collection.table_state("b")
    assert all(array.shape[0] == 5 for array in state.values())
    new = {name: np.full(array.shape, 2.0, np.float32) for name, array in state.items()}
    collection.load_table_state("b", new)
    for name, array in collection.table_state("b").items():
        np.testing.assert_array_equal(array, new[name])
    for array in collection.table_state("a").values():
        assert not np.any(array)


def test_errors_name_the_table(collection):
    with pytest.raises(KeyError, match=r"no table is named 'd'; there are 'a', 'b', 'c'"):
        collection.table("d")
    with pytest.raises(ValueError, match=r"table 'b' has shape \(5, 2\), got \(2, 5\)"):
        collection.load_table("b", np.zeros((2, 5)))
    with pytest.raises(ValueError, match=r"table 'b': its optimizer keeps"):
        collection.load_table_state("b", {})


def test_the_functional_core_reads_and_writes():
    tables = init_tables([Bag("a", 3, 2), Bag("b", 3, 2)], SGD, jax.random.key(0))
    tables = tables.write("b", np.ones((3, 2)))
    np.testing.assert_array_equal(tables.read("b"), np.ones((3, 2)))
    assert tables.read_state("b") == {}
    tables.write_state("b", {})


def test_rows_are_read_and_written_by_slot():
    """Slots outside of the array give zeros, and are skipped."""
    configs = [Bag("a", 3, 2), Bag("b", 4, 2)]
    tables = init_tables(configs, jaxrec.optim.rowwise_adagrad(0.1), jax.random.key(0))
    before = np.concatenate([tables.read("a"), tables.read("b")])
    slots = jnp.array([4, -1, 0, 7])

    @jax.jit
    def write(tables, slots):
        rows = jnp.arange(8.0).reshape(4, 2)
        return tables.write_rows("float32_2", slots, rows, {"accumulator": jnp.arange(4.0)})

    tables = write(tables, slots)
    rows, state = jax.jit(lambda tables: tables.read_rows("float32_2", slots))(tables)
    np.testing.assert_array_equal(rows, [[0, 1], [0, 0], [4, 5], [0, 0]])
    np.testing.assert_array_equal(state["accumulator"], [0, 0, 2, 0])
    before[4], before[0] = (0, 1), (4, 5)
    np.testing.assert_array_equal(np.concatenate([tables.read("a"), tables.read("b")]), before)
