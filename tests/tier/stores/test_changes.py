from __future__ import annotations

import numpy as np
import pytest

from jaxrec.tier.stores import row_store
from jaxrec.tier.stores.file_store import FileStore
from jaxrec.tier.stores.memory_store import MemoryStore
from jaxrec.tier.stores.row_store import RecordFormat, apply_changes, is_changes, write_changes

FORMAT = RecordFormat(12, "rows of 3 columns")


def opened(store):
    store.open(FORMAT)
    return store


def contents(store):
    return {
        int(key): bytes(record)
        for ids, records in store.scan()
        for key, record in zip(ids, records, strict=True)
    }


@pytest.mark.parametrize("part", [3, 1 << 16])
def test_a_store_is_brought_up_to_date(tmp_path, monkeypatch, part):
    monkeypatch.setattr(row_store, "_PART", part)
    rng = np.random.default_rng(0)
    first, second = opened(MemoryStore()), opened(FileStore(tmp_path / "store"))
    ids = rng.choice(1000, 100, replace=False)
    first.put(ids, rng.integers(0, 256, (100, 12), np.uint8))
    first.snapshot(tmp_path / "whole")
    new = np.array([5000, 5001, *ids[:10]])
    first.put(new, rng.integers(0, 256, (12, 12), np.uint8))
    first.delete(ids[20:30])
    write_changes(tmp_path / "changes", first, np.concatenate([new, ids[20:30], [7777]]))
    assert is_changes(tmp_path / "changes")
    assert not is_changes(tmp_path / "whole")
    second.load_snapshot(tmp_path / "whole")
    apply_changes(tmp_path / "changes", second)
    assert contents(second) == contents(first)
    second.close()


def test_they_are_not_loaded_as_whole(tmp_path):
    store = opened(MemoryStore())
    store.put(np.array([1]), np.ones((1, 12), np.uint8))
    write_changes(tmp_path / "changes", store, np.array([1]))
    with pytest.raises(ValueError, match="has changes since an earlier snapshot, not all records"):
        store.load_snapshot(tmp_path / "changes")
    assert len(store) == 1


@pytest.mark.parametrize("file", ["records.arrow", "removed.npy"])
def test_damage_is_found(tmp_path, file):
    store = opened(MemoryStore())
    write_changes(tmp_path / "changes", store, np.array([1]))
    content = bytearray((tmp_path / "changes" / file).read_bytes())
    content[-1] ^= 1
    (tmp_path / "changes" / file).write_bytes(content)
    with pytest.raises(ValueError, match="the snapshot is damaged"):
        row_store.snapshots.check(tmp_path / "changes", FORMAT)
