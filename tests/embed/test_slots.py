"""Some rows of tables, on one device and in every placement over eight, compared with NumPy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxrec
from jaxrec import mesh as m
from jaxrec.embed import rows as row_access
from jaxrec.embed.rows import read, write
from jaxrec.embed.slots import TableRows, group_slots
from tests.copies import find_copies
from tests.embed.placed_tables import CASES, OPTIMIZERS, assert_tables, make_collection
from tests.users_xla import AS_USERS_DO

pytestmark = pytest.mark.jax_version


def make_store(placement, optimizer):
    collection, tables = make_collection(placement, optimizer)
    return collection.tables.get_value(), tables


def some_rows(rng, tables, counts):
    return [
        TableRows(name, rng.permutation(len(tables[name]["rows"]))[:count].astype(np.int32))
        for name, count in counts.items()
    ]


@pytest.mark.parametrize(("placement", "optimizer"), CASES)
def test_read_and_write(placement, optimizer):
    store, tables = make_store(placement, optimizer)
    rng = np.random.default_rng(1)
    for counts in ({"user": 5, "item": 7, "wide": 3}, {"wide": 33, "user": 0, "item": 101}):
        requests = some_rows(rng, tables, counts)
        found = read(store, requests).to_host()
        values = []
        for request, arrays in zip(requests, found, strict=True):
            expected = tables[request.table]
            if len(request.rows):
                assert arrays.keys() == expected.keys()
            for key, array in arrays.items():
                np.testing.assert_array_equal(array, expected[key][request.rows])
                assert array.dtype == expected[key].dtype
            values.append({k: rng.normal(size=a.shape).astype(a.dtype) for k, a in arrays.items()})
        store = write(store, requests, values)
        for request, arrays in zip(requests, values, strict=True):
            for key, array in arrays.items():
                tables[request.table][key][request.rows] = array
        assert_tables(store, tables)


def test_a_cpu_device_reads_gathered_values_where_they_are():
    store, tables = make_store("one_device", "sgd")
    requests = some_rows(np.random.default_rng(1), tables, {"user": 5, "item": 7})
    for slots in group_slots(store, requests).values():
        values = slots.gather([np.ones((len(r.rows), slots.dim), np.float32) for r in requests])
        assert store.devices.put(values).unsafe_buffer_pointer() == values.ctypes.data


@pytest.mark.parametrize("placement", ["one_device", "row_wise", "column_wise"])
def test_state_that_is_missing_stays(placement):
    store, tables = make_store(placement, "adam")
    rows = np.array([69, 0, 30], np.int32)
    values = np.ones((3, 8), np.float32)
    store = write(store, [TableRows("user", rows)], [{"rows": values}])
    tables["user"]["rows"][rows] = values
    assert_tables(store, tables)


@pytest.mark.parametrize("placement", ["one_device", "row_wise", "data_parallel"])
def test_rows_may_be_read_twice(placement):
    store, tables = make_store(placement, "rowwise_adagrad")
    rows = np.array([3, 3, 69, 3], np.int32)
    requests = [TableRows("user", rows), TableRows("user", rows[:1])]
    first, second = read(store, requests).to_host()
    np.testing.assert_array_equal(first["rows"], tables["user"]["rows"][rows])
    np.testing.assert_array_equal(second["rows"], tables["user"]["rows"][rows[:1]])


@pytest.mark.parametrize("placement", ["one_device", "row_wise"])
def test_no_rows(placement):
    store, tables = make_store(placement, "sgd")
    nothing = TableRows("user", np.zeros(0, np.int32))
    assert group_slots(store, [nothing]) == {}
    assert read(store, [nothing]).to_host() == [{}]
    assert read(store, []).to_host() == []
    assert write(store, [nothing], [{"rows": np.zeros((0, 8), np.float32)}]) is store
    assert_tables(store, tables)


@pytest.mark.parametrize("placement", ["one_device", "row_wise"])
def test_tables_that_are_not_there(placement):
    store, _ = make_store(placement, "sgd")
    request = TableRows("nowhere", np.array([1], np.int32))
    with pytest.raises(KeyError, match="nowhere"):
        read(store, [request])
    with pytest.raises(KeyError, match="nowhere"):
        write(store, [request], [{"rows": np.zeros((1, 8), np.float32)}])


@pytest.mark.parametrize(
    ("count", "size"),
    [(64, 64), (65, 128), (2049, 4096), (4097, 5120), (5121, 6144), (8192, 8192), (8193, 10_240)],
)
def test_ladder_of_sizes(count, size):
    config = jaxrec.EmbeddingBagConfig("big", 20_000, 4)
    store = jaxrec.EmbeddingBagCollection([config], rngs=nnx.Rngs(0)).tables.get_value()
    (slots,) = group_slots(store, [TableRows("big", np.arange(count))]).values()
    assert slots.slots.shape == (size,)
    assert slots.slots[:count].tolist() == list(range(count))
    assert (slots.slots[count:] == -1).all()


@pytest.mark.parametrize("placement", ["one_device", "row_wise", "column_wise"])
def test_few_programs_compile(placement, caplog):
    store, tables = make_store(placement, "rowwise_adagrad")
    rng = np.random.default_rng(2)
    with jax.log_compiles():
        for number in range(12):
            if number == 1:
                caplog.clear()
            counts = {name: int(rng.integers(1, 16)) for name in ("user", "item", "wide")}
            requests = some_rows(rng, tables, counts)
            store = write(store, requests, read(store, requests).to_host())
    compiled = [r.getMessage() for r in caplog.records if "Finished XLA" in r.getMessage()]
    assert compiled == []
    assert_tables(store, tables)


@pytest.mark.parametrize("placement", [None, m.row_wise()], ids=["one_device", "row_wise"])
def test_no_copy_of_a_table(placement):
    rows, dim, devices = 80_008, 8, 1 if placement is None else 8
    config = jaxrec.EmbeddingBagConfig("big", rows, dim)

    def made():
        return jaxrec.EmbeddingBagCollection(
            [config], optimizer=OPTIMIZERS["adam"], rngs=nnx.Rngs(0)
        )

    if placement is None:
        store = made().tables.get_value()
    else:
        plan = jaxrec.plan.ShardingPlan.from_dict({"big": placement})
        store = jaxrec.shard(made, plan, jax.make_mesh((8,), ("data",))).tables.get_value()
    ((group, slots),) = group_slots(store, [TableRows("big", np.arange(0, rows, 5000))]).items()
    on_devices = store.devices.put(slots.slots)
    reading = row_access._read.lower(store, on_devices, group).compile(AS_USERS_DO)
    values, state = row_access._read(store, on_devices, group)
    writing = row_access._write.lower(store, on_devices, values, state, group).compile(AS_USERS_DO)
    local = rows // devices, dim
    for compiled in (reading, writing):
        assert find_copies(compiled, local) == []
        assert compiled.memory_analysis().temp_size_in_bytes < local[0] * dim * 4 / 10

    def pointers(store):
        return [
            shard.data.unsafe_buffer_pointer()
            for array in jax.tree.leaves(store)
            for shard in array.addressable_shards
        ]

    before = pointers(store)
    store = row_access._write(store, on_devices, jnp.zeros_like(values), state, group)
    assert pointers(store) == before
