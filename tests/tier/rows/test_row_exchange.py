"""Rows between devices and the processes that own them; test_processes.py has several processes."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrec.embed.slots import TableRows
from jaxrec.tier.rows import row_exchange
from jaxrec.tier.rows.row_exchange import send_to_owners, write_from_owners
from tests.embed.placed_tables import CASES, assert_tables, make_collection

ON_A_MESH = [case for case in CASES if "one_device" not in case]


def requests_of(rng, tables, counts):
    return [
        TableRows(name, rng.permutation(len(tables[name]["rows"]))[:count], np.zeros(count, int))
        for name, count in counts.items()
    ]


@pytest.mark.parametrize(("placement", "optimizer"), ON_A_MESH)
def test_rows_arrive_in_every_placement(placement, optimizer):
    collection, tables = make_collection(placement, optimizer)
    store = collection.tables.get_value()
    rng = np.random.default_rng(1)
    requests = requests_of(rng, tables, {"wide": 33, "user": 0, "item": 101})
    values = []
    for request, arrays in zip(requests, send_to_owners(store, requests).to_host(), strict=True):
        for key, array in arrays.items():
            np.testing.assert_array_equal(array, tables[request.table][key][request.rows])
        values.append({k: rng.normal(size=a.shape).astype(a.dtype) for k, a in arrays.items()})
    store = write_from_owners(store, requests, values)
    for request, arrays in zip(requests, values, strict=True):
        for key, array in arrays.items():
            tables[request.table][key][request.rows] = array
    assert_tables(store, tables)


@pytest.mark.parametrize("count", [0, 1, 5, 1000])
@pytest.mark.parametrize("processes", [[0, 0, 1, 1], [1, 0, 1, 2, 0], [0]], ids=str)
def test_messages_take_each_row_to_a_device_of_its_owner(processes, count):
    rng = np.random.default_rng(count)
    processes = np.array(processes)
    owners = rng.integers(0, processes.max() + 1, count)
    index = np.full((processes.size, count + 2), -1)
    for device, rows in enumerate(
        np.split(rng.permutation(count), np.sort(rng.integers(0, count + 1, processes.size - 1)))
    ):
        index[device, : rows.size] = rows
    places, rows = row_exchange._messages(index, owners, processes)
    assert places.shape == rows.shape == (processes.size, processes.size, places.shape[2])
    here, there, position = np.nonzero(rows >= 0)
    sent = rows[here, there, position]
    np.testing.assert_array_equal(np.sort(sent), np.arange(count))
    np.testing.assert_array_equal(index.reshape(-1)[places[here, there, position]], sent)
    np.testing.assert_array_equal(processes[there], owners[sent])
    # The largest message has twice an even share or less, for many rows.
    if count == 1000 and processes.size == 4:
        assert rows.shape[2] <= 256


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "int32"])
def test_bytes_are_those_of_the_numbers(dtype):
    values = jnp.array([[0.0, -0.0, 3.5], [-1e4, 7, 100]], "float32").astype(dtype)
    for array in (values, values[:, 0]):
        message = row_exchange._as_bytes(array, 2)
        assert message.shape[:2] == (2, 1)
        back = row_exchange._from_bytes(message, array)
        assert np.asarray(back).tobytes() == np.asarray(array).tobytes()
