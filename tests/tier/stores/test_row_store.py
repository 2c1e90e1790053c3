"""The rules of `jaxrec.tier.RowStore`, for each store and one of the test's own."""

from __future__ import annotations

import itertools
import json
import threading
from contextlib import nullcontext as does_nothing

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from jaxrec.tier import RowStore
from jaxrec.tier.stores import open_store, snapshots
from jaxrec.tier.stores.record_format import RecordFormat
from tests.fuzz import max_examples
from tests.tier.servers import redis_port  # noqa: F401

WIDTH = 13
NUM_IDS = 3000
ANY_IDS = RecordFormat(WIDTH, "item rows uint8[13]")
RANGE = RecordFormat(WIDTH, "item rows uint8[13]", NUM_IDS)
LARGEST = 2**63 - 1


class DictStore(RowStore):
    """The smallest store."""

    def open(self, format):
        self.format, self.records = format, {}

    def get(self, ids):
        found = np.array([i in self.records for i in ids.tolist()], bool)
        zeros = np.zeros(self.format.width, np.uint8)
        records = [self.records.get(i, zeros) for i in ids.tolist()]
        return found, np.array(records, np.uint8).reshape(-1, self.format.width)

    def put(self, ids, records):
        self.records.update(zip(ids.tolist(), records.copy(), strict=True))

    def delete(self, ids):
        for i in ids.tolist():
            self.records.pop(i, None)

    def scan(self, size=1 << 16):
        all_ids = list(self.records)
        for start in range(0, len(all_ids), size):
            ids = np.array(all_ids[start : start + size])
            yield ids, self.get(ids)[1]

    def __len__(self):
        return len(self.records)


URLS = {
    "memory": "memory://",
    "file": "file://{path}/store",
    "rocksdb": "rocksdb://{path}/store",
    "redis": "redis://127.0.0.1:{port}/0?prefix=p{number}&lock=2",
    "memory+file": "memory+file://{path}/store?memory=4KB",
    "memory+rocksdb": "memory+rocksdb://{path}/store?memory=1MB",
    "memory+redis": "memory+redis://127.0.0.1:{port}/0?prefix=p{number}&lock=2&memory=0",
}
DURABLE = [name for name in URLS if name != "memory"]
numbers = itertools.count()


@pytest.fixture
def opened(request, tmp_path):
    """Makes and opens stores of a name; each call with the same path opens the same store."""
    stores = []
    number = next(numbers)

    def open_named(name, format=ANY_IDS, path="."):
        if name == "own":
            store = DictStore()
        else:
            port = request.getfixturevalue("redis_port") if "redis" in name else None
            at = f"{number}{path}".replace("/", "").replace(".", "x")
            store = open_store(URLS[name].format(path=tmp_path / path, port=port, number=at))
        store.open(format)
        stores.append(store)
        return store

    yield open_named
    for store in stores:
        store.close()


every_store = pytest.mark.parametrize("name", ["own", *URLS])
every_format = pytest.mark.parametrize("format", [ANY_IDS, RANGE], ids=["any-ids", "range"])


def records_of(ids, version=0):
    """Return records that depend on their id and a version."""
    return np.array(
        [np.random.default_rng([i % 2**63, version]).integers(0, 256, WIDTH) for i in ids.tolist()],
        np.uint8,
    ).reshape(-1, WIDTH)


def contents(store, size=1 << 16):
    parts = list(store.scan(size))
    assert all(0 < ids.size <= size for ids, _ in parts)
    found = {}
    for ids, records in parts:
        assert ids.dtype == np.int64
        assert records.shape == (ids.size, store.format.width)
        assert not found.keys() & set(ids.tolist())
        found.update(zip(ids.tolist(), map(bytes, records), strict=True))
    return found


@every_store
@every_format
def test_the_same_as_a_dict(name, format, opened):
    """Whatever is put, deleted and cleared, a store has what a dict has."""
    store = opened(name, format)
    lowest, highest = (0, NUM_IDS - 1) if format.num_ids else (-(2**63), LARGEST)
    some_ids = st.integers(lowest, highest).filter(lambda i: i != -1)
    few_ids = st.sampled_from([lowest, highest, 0, 1, 7, 15, 16, 17, 100, 1023, 1024, 2048])
    batches = hnp.arrays(np.int64, st.integers(0, 40), elements=few_ids | some_ids, unique=True)
    steps = st.lists(
        st.tuples(st.sampled_from(["put", "put", "put", "get", "delete", "clear"]), batches),
        max_size=8,
    )

    @hypothesis.settings(
        max_examples=max_examples(12),
        suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
    )
    @hypothesis.given(steps)
    def check(steps):
        store.clear()
        expected = {}
        for version, (step, ids) in enumerate(steps):
            if step == "put":
                records = records_of(ids, version)
                store.put(ids, records)
                expected.update(zip(ids.tolist(), map(bytes, records), strict=True))
            elif step == "delete":
                store.delete(ids)
                for i in ids.tolist():
                    expected.pop(i, None)
            elif step == "clear":
                store.clear()
                expected.clear()
            found, records = store.get(ids)
            assert found.dtype == bool
            assert records.dtype == np.uint8
            assert found.tolist() == [i in expected for i in ids.tolist()]
            wanted = [expected.get(i, bytes(WIDTH)) for i in ids.tolist()]
            assert [bytes(record) for record in records] == wanted
        assert contents(store) == expected
        assert contents(store, size=7) == expected
        assert len(store) == len(expected)

    check()


@every_store
def test_many_records(name, opened):
    """More than there is room for at first, in memory or in one command."""
    store = opened(name)
    ids = np.random.default_rng(0).integers(-(2**62), 2**62, 5000)
    records = np.random.default_rng(1).integers(0, 256, (5000, WIDTH), np.uint8)
    store.put(ids, records)
    found, same = store.get(ids[::-1].copy())
    assert found.all()
    np.testing.assert_array_equal(same, records[::-1])
    assert len(store) == 5000
    store.put(ids[:100], records[100:200])
    np.testing.assert_array_equal(store.get(ids[:200])[1], records[[*range(100, 200)] * 2])


@every_store
def test_what_is_read_is_the_callers(name, opened):
    store = opened(name)
    ids = np.arange(3)
    records = records_of(ids)
    given = records.copy()
    store.put(ids, given)
    given[:] = 0
    store.get(ids)[1][:] = 0
    np.testing.assert_array_equal(store.get(ids)[1], records)


@pytest.mark.parametrize("name", list(URLS))
@every_format
def test_several_threads(name, format, opened):
    """Threads that write and read ids of their own, some of which cross a page or a chunk."""
    store, errors = opened(name, format), []

    def work(first):
        try:
            ids = np.arange(first, NUM_IDS, 4)
            for version in range(5):
                records = np.full((ids.size, WIDTH), 16 * version + first, np.uint8)
                store.put(ids, records)
                found, same = store.get(ids)
                assert found.all()
                np.testing.assert_array_equal(same, records)
                store.delete(ids[::2])
                assert store.get(ids)[0].tolist() == [i % 2 == 1 for i in range(ids.size)]
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(store) == 4 * (NUM_IDS // 4 // 2)


@pytest.mark.parametrize("name", DURABLE)
@every_format
def test_records_outlive_a_store(name, format, opened):
    ids = np.array([5, 2000, 0])
    first = opened(name, format)
    first.put(ids, records_of(ids))
    first.flush()
    first.close()
    first.close()
    second = opened(name, format)
    np.testing.assert_array_equal(second.get(ids)[1], records_of(ids))
    assert len(second) == 3


@pytest.mark.parametrize("name", DURABLE)
def test_another_format(name, opened):
    """A store with records keeps its format; an empty one takes any."""
    store = opened(name, RecordFormat(4, "user rows float32[1]", 10))
    store.close()
    store = opened(name)
    store.put(np.array([7]), records_of(np.array([7])))
    store.close()
    others = [
        RecordFormat(WIDTH + 1, ANY_IDS.description),
        RecordFormat(WIDTH, "item rows int8[13]"),
        RANGE,
    ]
    for other in others:
        with pytest.raises(ValueError, match="has records of 13 bytes") as raised:
            opened(name, other)
        assert str(ANY_IDS) in str(raised.value)
        assert f"the table's records are {other};" in str(raised.value)
    assert len(opened(name)) == 1


@pytest.mark.parametrize("name", DURABLE)
def test_a_store_that_is_open_is_refused(name, opened):
    store = opened(name)
    waits = pytest.warns(UserWarning, match="waiting") if "redis" in name else does_nothing()
    with waits, pytest.raises(BlockingIOError, match=r"another run has it|has it open already"):
        opened(name)
    store.put(np.array([7]), records_of(np.array([7])))
    store.close()
    assert len(opened(name)) == 1


@every_store
@pytest.mark.parametrize("bad", [-1, NUM_IDS, -(2**63)])
def test_ids_outside_of_the_range(name, bad, opened):
    if name in ("own", "memory"):
        pytest.skip("keeps any id")
    store = opened(name, RANGE)
    ids = np.array([3, bad])
    for call in (store.get, store.delete, lambda ids: store.put(ids, records_of(ids))):
        with pytest.raises(ValueError, match=rf"id {bad} at position 1: the store has 0 to 2,999"):
            call(ids)
    assert len(store) == 0


@every_store
@every_format
def test_snapshots(name, format, opened, tmp_path):
    store, ids = opened(name, format), np.arange(0, NUM_IDS, 7)
    store.put(ids, records_of(ids))
    store.snapshot(tmp_path / "a" / "snapshot")
    expected = contents(store)
    store.put(ids, records_of(ids, 1))
    store.put(ids + 1, records_of(ids))
    with pytest.raises(FileExistsError, match="a snapshot needs a new directory"):
        store.snapshot(tmp_path / "a" / "snapshot")
    for _ in range(2):
        store.load_snapshot(tmp_path / "a" / "snapshot")
        assert contents(store) == expected
        assert len(store) == ids.size
        store.put(ids + 2, records_of(ids))  # what is put later is not the snapshot's
    assert len(store) == 2 * ids.size


@pytest.mark.parametrize("source", ["memory", "file", "rocksdb", "redis"])
@pytest.mark.parametrize("target", ["own", "memory", "file", "rocksdb", "redis"])
def test_snapshots_of_other_stores(source, target, opened, tmp_path):
    first, ids = opened(source, path="first"), np.arange(0, 2 * NUM_IDS, 3) - 50
    ids = ids[ids != -1]
    first.put(ids, records_of(ids))
    first.snapshot(tmp_path / "snapshot")
    second = opened(target, path="second")
    second.put(np.array([1]), records_of(np.array([1])))
    second.load_snapshot(tmp_path / "snapshot")
    assert contents(second) == contents(first)


@every_store
def test_snapshots_of_nothing(name, opened, tmp_path):
    store = opened(name)
    store.snapshot(tmp_path / "snapshot")
    store.put(np.array([1]), records_of(np.array([1])))
    store.load_snapshot(tmp_path / "snapshot")
    assert contents(store) == {}


@pytest.mark.parametrize("source", ["memory", "file", "rocksdb"])
@pytest.mark.parametrize("target", ["memory", "file", "rocksdb", "redis"])
def test_damaged_snapshots_change_nothing(source, target, opened, tmp_path):
    snapshot, ids = tmp_path / "snapshot", np.arange(1000)
    first = opened(source, path="first")
    first.put(ids, records_of(ids))
    first.snapshot(snapshot)
    first.close()
    second = opened(target, path="second")
    second.put(ids[:3], records_of(ids[:3], 1))
    expected = contents(second)
    largest = max((p for p in snapshot.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    whole, manifest = largest.read_bytes(), snapshot / "snapshot.json"
    middle = whole.find(bytes(records_of(ids[500:501])[0]))
    assert middle > 0
    damages = {
        "truncated": whole[: len(whole) // 2],
        "flipped": whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :],
        "empty": b"",
    }
    for damage in damages.values():
        largest.unlink()  # it may be shared with the store
        largest.write_bytes(damage)
        with pytest.raises(ValueError, match="damaged"):
            second.load_snapshot(snapshot)
    largest.unlink()
    with pytest.raises(ValueError, match="damaged"):
        second.load_snapshot(snapshot)
    largest.write_bytes(whole)
    text = manifest.read_text()
    for bad in (text[:-40], text.replace("13", "12"), "[]", ""):
        manifest.write_text(bad)
        with pytest.raises(ValueError, match="damaged"):
            second.load_snapshot(snapshot)
    manifest.unlink()
    with pytest.raises(ValueError, match=r"is not a snapshot .* it lacks snapshot\.json"):
        second.load_snapshot(snapshot)
    assert contents(second) == expected
    manifest.write_text(text)
    second.load_snapshot(snapshot)
    assert len(second) == 1000
    assert json.loads(text)["kind"] in ("arrow", source)


@every_store
def test_snapshots_of_another_format(name, opened, tmp_path):
    other = opened("memory", RecordFormat(WIDTH, "other rows uint8[13]"))
    other.snapshot(tmp_path / "snapshot")
    store = opened(name)
    store.put(np.array([7]), records_of(np.array([7])))
    with pytest.raises(ValueError, match=r"the snapshot .* has records of .*other rows"):
        store.load_snapshot(tmp_path / "snapshot")
    assert len(store) == 1


def test_a_recorded_manifest_is_read(tmp_path):
    (tmp_path / "snapshot.json").write_text(
        '{"kind": "file", "format": {"width": 13, "description": "rows uint8[13]", "num_ids": null}'
        ', "files": {"records": [73728, null], "extra.bin": [4, 176944289]}'
        ', "details": {"count": 3, "sum": 9223372036854775811}, "crc32": 1244385873}'
    )
    (tmp_path / "records").write_bytes(bytes(73728))
    (tmp_path / "extra.bin").write_bytes(b"rows")
    manifest = snapshots.read_manifest(tmp_path)
    assert manifest.kind == "file"
    assert manifest.format == RecordFormat(13, "rows uint8[13]")
    assert manifest.files == {"records": (73728, None), "extra.bin": (4, 176944289)}
    assert manifest.details == {"count": 3, "sum": 9223372036854775811}
    (tmp_path / "extra.bin").write_bytes(b"cows")
    with pytest.raises(ValueError, match=r"extra\.bin has not the bytes that were saved"):
        snapshots.check(tmp_path, manifest.format)


def test_what_a_store_need_not_say(opened):
    store = opened("own")
    store.flush()
    store.close()


def test_a_store_lacks_no_method():
    with pytest.raises(TypeError, match="abstract"):
        RowStore()
