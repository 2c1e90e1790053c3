"""Row stores by URL, and the interface of one's own."""

from __future__ import annotations

import numpy as np
import pytest

from jaxrec.tier import RowStore
from jaxrec.tier.memory_store import MemoryStore
from jaxrec.tier.stores import open_store


class DictStore(RowStore):
    """The smallest store."""

    def open(self, width):
        self.width, self.records = width, {}

    def get(self, ids):
        found = np.array([i in self.records for i in ids.tolist()], bool)
        zeros = np.zeros(self.width, np.uint8)
        records = [self.records.get(i, zeros) for i in ids.tolist()]
        return found, np.array(records, np.uint8).reshape(-1, self.width)

    def put(self, ids, records):
        self.records.update(zip(ids.tolist(), records.copy(), strict=True))

    def delete(self, ids):
        for i in ids.tolist():
            self.records.pop(i, None)

    def scan(self, size=1 << 16):
        if self.records:
            yield np.array(list(self.records)), np.array(list(self.records.values()))

    def __len__(self):
        return len(self.records)


def test_a_url_makes_a_store_each_time():
    first, second = open_store("memory://"), open_store("memory://")
    assert isinstance(first, MemoryStore)
    assert first is not second


def test_a_store_is_itself():
    store = DictStore()
    assert open_store(store) is store


@pytest.mark.parametrize("url", ["memory:", "redis://host", ""])
def test_unknown_urls(url):
    message = f"no row store has the URL '{url}'; use 'memory://' or a jaxrec.tier.RowStore"
    with pytest.raises(ValueError, match=message):
        open_store(url)


def test_what_a_store_need_not_say():
    store = DictStore()
    assert store.is_durable
    store.flush()
    store.close()


def test_a_store_lacks_no_method():
    with pytest.raises(TypeError, match="abstract"):
        RowStore()
