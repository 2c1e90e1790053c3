"""Some rows of a collection's tables by id, in every placement, compared with NumPy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxrec
from jaxrec import mesh as m
from jaxrec.embed import rows as row_access
from jaxrec.embed.slots import TableRows, group_slots
from tests.copies import find_copies
from tests.embed.placed_tables import CASES, OPTIMIZERS, make_collection
from tests.fuzz import max_examples
from tests.users_xla import AS_USERS_DO

pytestmark = pytest.mark.jax_version


def make_plain(kind=jaxrec.EmbeddingBagCollection, dtype="float32"):
    config = kind._config("item", 10, 2, dtype=dtype)
    return kind([config], optimizer=OPTIMIZERS["adam"], rngs=nnx.Rngs(0))


def assert_tables(collection, tables):
    for name, arrays in tables.items():
        np.testing.assert_array_equal(collection.table(name), arrays["rows"], err_msg=name)
        for key, array in collection.table_state(name).items():
            np.testing.assert_array_equal(array, arrays[key], err_msg=f"{name} {key}")


@pytest.mark.parametrize(("placement", "optimizer"), CASES)
def test_rows_and_state(placement, optimizer, monkeypatch):
    collection, tables = make_collection(placement, optimizer)
    rng = np.random.default_rng(1)
    for name, count in {"user": 70, "item": 9, "wide": 5}.items():
        expected = tables[name]
        ids = rng.integers(0, len(expected["rows"]), count)
        rows = collection.rows(name, ids)
        assert type(rows) is np.ndarray
        np.testing.assert_array_equal(rows, expected["rows"][ids])
        state = collection.row_state(name, ids)
        assert state.keys() == expected.keys() - {"rows"}
        for key, array in state.items():
            np.testing.assert_array_equal(array, expected[key][ids])
            assert array.dtype == expected[key].dtype

        ids = np.unique(ids)[::-1]
        new = {key: rng.normal(size=array[ids].shape) for key, array in expected.items()}
        collection.load_rows(name, ids, new["rows"])
        expected["rows"][ids] = new["rows"]
        assert_tables(collection, tables)
        collection.load_row_state(name, ids, {key: new[key] for key in state})
        for key in state:
            expected[key][ids] = new[key]
        assert_tables(collection, tables)
    # What a table takes in several parts is what it takes at once.
    monkeypatch.setattr(row_access, "_BYTES", 1000)
    ids = rng.permutation(101)
    np.testing.assert_array_equal(collection.rows("item", ids), tables["item"]["rows"][ids])
    collection.load_rows("item", ids, ids[:, None] * np.ones(8))
    tables["item"]["rows"][ids] = ids[:, None]
    assert_tables(collection, tables)


@pytest.mark.parametrize("placement", ["one_device", "row_wise"])
def test_tables_of_one_group_are_given_different_arrays(placement):
    collection, tables = make_collection(placement, "adam")
    ids, rng = np.array([5, 0, 33]), np.random.default_rng(1)
    new = {
        name: {key: rng.normal(size=tables[name][key][ids].shape) for key in keys}
        for name, keys in {"user": ["first_moment", "second_moment"], "item": ["rows"]}.items()
    }
    requests = [TableRows(name, ids) for name in new]
    store = row_access.write(collection.tables.get_value(), requests, list(new.values()))
    collection.tables.set_value(store)
    for name, arrays in new.items():
        for key, array in arrays.items():
            tables[name][key][ids] = array
    assert_tables(collection, tables)


@pytest.fixture(scope="module")
def many():
    """Collections on one device and on eight, with their tables in NumPy."""
    return [make_collection(placement, "adam") for placement in ("one_device", "row_wise")]


@given(data=st.data())
@settings(max_examples=max_examples(15))
def test_any_ids(many, data):
    for collection, tables in many:
        expected = tables["item"]
        ids = data.draw(st.lists(st.integers(0, 100), max_size=200))
        np.testing.assert_array_equal(collection.rows("item", ids), expected["rows"][ids])
        ids = list(dict.fromkeys(ids))
        values = np.random.default_rng(len(ids)).normal(size=(len(ids), 8)).astype(np.float32)
        collection.load_rows("item", ids, values)
        expected["rows"][ids] = values
        state = {key: array[ids] + 1 for key, array in expected.items() if key != "rows"}
        collection.load_row_state("item", ids, state)
        for key, array in state.items():
            expected[key][ids] = array
    assert_tables(collection, tables)


@pytest.mark.parametrize(
    "ids",
    [
        [3, 9, 3],
        (3, 9, 3),
        np.array([3, 9, 3], np.uint64),
        np.array([3, 9, 3], np.int8),
        jnp.array([3, 9, 3]),
        [np.int64(3), 9, 3],
    ],
    ids=["list", "tuple", "uint64", "int8", "jax", "mixed"],
)
def test_types_of_ids(ids):
    collection = make_plain()
    expected = np.asarray(collection.table("item"))[[3, 9, 3]]
    np.testing.assert_array_equal(collection.rows("item", ids), expected)


@pytest.mark.parametrize("ids", [[], np.zeros(0, np.int32)], ids=["list", "array"])
def test_no_ids(ids):
    collection = make_plain()
    before = np.asarray(collection.table("item"))
    assert collection.rows("item", ids).shape == (0, 2)
    assert {a.shape for a in collection.row_state("item", ids).values()} == {(0, 2)}
    collection.load_rows("item", ids, np.zeros((0, 2)))
    np.testing.assert_array_equal(collection.table("item"), before)


def test_sequence_collections_and_16_bits():
    collection = make_plain(jaxrec.EmbeddingCollection, "bfloat16")
    collection.load_rows("item", [8], np.array([[1.5, 1 / 3]]))
    rows = collection.rows("item", [8, 0])
    assert rows.dtype == jnp.bfloat16
    np.testing.assert_array_equal(rows, np.asarray(collection.table("item"))[[8, 0]])
    assert rows[0, 0] == 1.5


ONES = np.ones((1, 2))
STATE = {"first_moment": ONES, "second_moment": ONES}
ERRORS = {
    "no_table": (lambda c: c.rows("user", [1]), KeyError, "no table is named 'user'"),
    "too_large": (
        lambda c: c.rows("item", [3, 10]),
        ValueError,
        r"table 'item' has the rows 0 to 9, got id 10 at position 1",
    ),
    "negative": (lambda c: c.load_rows("item", [-1], ONES), ValueError, "got id -1 at position 0"),
    # As int32 these would be 3 and 5.
    "64_bits": (lambda c: c.rows("item", [2**32 + 3]), ValueError, "got id 4294967299"),
    "unsigned": (
        lambda c: c.rows("item", np.array([2**63 + 5], np.uint64)),
        ValueError,
        "got id 9223372036854775813",
    ),
    "beyond_64_bits": (lambda c: c.rows("item", [1, 2**64]), ValueError, "got id 184467440737095"),
    "floats": (lambda c: c.rows("item", [1.0]), TypeError, "ids are integers, got .* float64"),
    "bools": (lambda c: c.rows("item", [True]), TypeError, "ids are integers, got .* bool"),
    "strings": (lambda c: c.rows("item", ["a"]), TypeError, "'item': ids are integers, got"),
    "one_id": (lambda c: c.rows("item", 3), ValueError, r"ids have one axis, got .* shape \[\]"),
    "axes": (lambda c: c.rows("item", [[3]]), ValueError, r"one axis, got .* shape \[1, 1\]"),
    "repeated": (
        lambda c: c.load_rows("item", [1, 2, 1], np.ones((3, 2))),
        ValueError,
        "table 'item': id 1 is given more than once",
    ),
    "shape": (
        lambda c: c.load_rows("item", [1, 2], ONES),
        ValueError,
        r"rows of table 'item' for 2 ids have shape \(2, 2\), got \(1, 2\)",
    ),
    "state_names": (
        lambda c: c.load_row_state("item", [1], {"first_moment": ONES}),
        ValueError,
        r"'item': its optimizer keeps \['first_moment', 'second_moment'\], got \['first_moment'\]",
    ),
    "state_shape": (
        lambda c: c.load_row_state(
            "item", [1], {"first_moment": ONES, "second_moment": np.ones(2)}
        ),
        ValueError,
        r"state 'second_moment' of table 'item' for 1 ids have shape \(1, 2\), got \(2,\)",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case, unchecked):
    call, kind, message = ERRORS[case]
    collection = make_plain()
    before = np.asarray(collection.table("item"))
    with pytest.raises(kind, match=message):
        call(collection)
    np.testing.assert_array_equal(collection.table("item"), before)


def test_losses_are_refused():
    collection = make_plain()

    def loss(model):
        return jnp.sum(model.rows("item", [1]))

    with pytest.raises(TypeError, match=r"a loss calls rows\('item', ...\), through which no grad"):
        jaxrec.value_and_grad(loss)(collection)
    with pytest.raises(TypeError, match=r"use jaxrec\.value_and_grad"):
        jax.grad(lambda x: x * loss(collection))(1.0)
    collection.eval()  # a teacher, whose rows are constants
    assert jax.grad(lambda x: x * loss(collection))(1.0) == np.sum(collection.rows("item", [1]))


@pytest.mark.parametrize("is_argument", [True, False], ids=["argument", "closure"])
@pytest.mark.parametrize("method", ["rows", "load_rows", "row_state", "load_row_state"])
def test_compiled_functions_are_refused(method, is_argument):
    collection = make_plain()

    values = {"load_rows": (ONES,), "load_row_state": (STATE,)}.get(method, ())

    @nnx.jit
    def compiled(model):
        return getattr(model if is_argument else collection, method)("item", [1], *values)

    with pytest.raises(TypeError, match=rf"{method}\('item', ...\) reads or writes rows from the"):
        compiled(collection)


@pytest.mark.parametrize("placement", [None, m.row_wise()], ids=["one_device", "row_wise"])
def test_no_copy_of_a_table(placement):
    rows, dim, devices = 80_008, 8, 1 if placement is None else 8
    config = jaxrec.EmbeddingBagConfig("big", rows, dim)

    def made():
        return jaxrec.EmbeddingBagCollection(
            [config], optimizer=OPTIMIZERS["adam"], rngs=nnx.Rngs(0)
        )

    collection = made()
    if placement is not None:
        plan = jaxrec.plan.ShardingPlan.from_dict({"big": placement})
        collection = jaxrec.shard(made, plan, jax.make_mesh((8,), ("data",)))
    store = collection.tables.get_value()
    ids = np.arange(0, rows, 5000)
    ((group, slots),) = group_slots(store, [TableRows("big", ids)]).items()
    on_devices = store.devices.put(slots.slots)
    values, state = row_access._read(store, on_devices, group)
    programs = [
        row_access._read.lower(store, on_devices, group, False),
        row_access._write.lower(store, on_devices, values, {}, group),
        row_access._write.lower(store, on_devices, None, state, group),
    ]
    local = rows // devices, dim
    for program in programs:
        compiled = program.compile(AS_USERS_DO)
        assert find_copies(compiled, local) == []
        assert compiled.memory_analysis().temp_size_in_bytes < local[0] * dim * 4 / 10

    def pointers():
        return [
            shard.data.unsafe_buffer_pointer()
            for array in jax.tree.leaves(collection.tables.get_value())
            for shard in array.addressable_shards
        ]

    before = pointers()
    collection.load_rows("big", ids, np.ones((ids.size, dim)))
    collection.load_row_state("big", ids, collection.row_state("big", ids))
    assert pointers() == before
