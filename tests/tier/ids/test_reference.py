"""Records of mapped files, in C++ and in NumPy."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from jaxrec.tier.ids import implementation, library, reference
from jaxrec.tier.ids.reference import stride
from jaxrec.tier.stores.record_file import RecordFile
from jaxrec.tier.stores.record_format import RecordFormat
from jaxrec.tier.stores.record_header import create
from tests.fuzz import max_examples

IMPLEMENTATIONS = [reference]
if library.missing() is None:
    IMPLEMENTATIONS.append(library)
by_name = pytest.mark.parametrize(
    "module",
    IMPLEMENTATIONS,
    ids=[module.__name__.rpartition(".")[2] for module in IMPLEMENTATIONS],
)
RECORDS = hnp.arrays(np.uint8, st.tuples(st.integers(1, 20), st.integers(1, 70)))


@contextlib.contextmanager
def file_of(path, width, num_ids):
    create(path, RecordFormat(width, "rows", num_ids))
    file = RecordFile(path)
    try:
        yield file
    finally:
        file.close()
        path.unlink()


@pytest.mark.parametrize(
    ("width", "has_id", "wanted"), [(8, False, 16), (8, True, 24), (9, True, 32), (260, False, 272)]
)
def test_stride(width, has_id, wanted):
    assert stride(width, has_id) == wanted


@pytest.mark.parametrize("num_ids", [None, 5000], ids=["any-ids", "range"])
@pytest.mark.parametrize("reader", IMPLEMENTATIONS, ids=lambda module: module.__name__[12:])
@pytest.mark.parametrize("writer", IMPLEMENTATIONS, ids=lambda module: module.__name__[12:])
def test_each_reads_what_each_wrote(writer, reader, num_ids, tmp_path, monkeypatch):
    @settings(max_examples=max_examples(20))
    @given(RECORDS, st.integers(0, 1000), st.randoms())
    def check(records, first, random):
        slots = first + np.array(random.sample(range(24), len(records)))
        ids = slots if num_ids else slots * 10**17 - 5
        with file_of(tmp_path / "records", records.shape[1], num_ids) as file:
            for _ in range(2):  # the second time into pages that exist
                monkeypatch.setattr(implementation, "current", lambda: writer)
                file.write(slots, ids, records)
                monkeypatch.setattr(implementation, "current", lambda: reader)
                found, found_ids, same = file.read(slots)
                assert found.all()
                np.testing.assert_array_equal(found_ids, ids)
                np.testing.assert_array_equal(same, records)
            absent = np.setdiff1d(np.arange(first, first + 24), slots)
            found, _, zeros = file.read(np.append(absent, -1))
            assert not found.any()
            assert not zeros.any()
            if not num_ids:
                assert not file.read(slots, ids + 1)[0].any()
            monkeypatch.setattr(implementation, "current", lambda: writer)
            file.erase(np.append(slots[::2], absent[:1]))
            monkeypatch.setattr(implementation, "current", lambda: reader)
            assert file.read(slots)[0].tolist() == [i % 2 == 1 for i in range(slots.size)]

    check()


@by_name
@pytest.mark.parametrize("num_ids", [None, 1000], ids=["any-ids", "range"])
def test_a_record_with_a_wrong_byte_is_absent(module, num_ids, tmp_path, monkeypatch):
    monkeypatch.setattr(implementation, "current", lambda: module)
    path, slots = tmp_path / "records", np.array([3])
    records = np.random.default_rng(0).integers(0, 256, (1, 21), np.uint8)
    with file_of(path, 21, num_ids) as file:
        file.write(slots, slots, records)
        start = file.start + 3 * file.stride
        used = 21 + (16 if num_ids is None else 8)
        for position in range(start, start + used):
            for bit in (1, 128):
                with path.open("r+b") as raw:
                    raw.seek(position)
                    (byte,) = raw.read(1)
                    raw.seek(position)
                    raw.write(bytes([byte ^ bit]))
                    raw.flush()
                    found, _, zeros = file.read(slots)
                    assert not found[0]
                    assert not zeros.any()
                    raw.seek(position)
                    raw.write(bytes([byte]))
        assert file.read(slots)[0][0]


@by_name
def test_a_record_of_two_versions_is_absent(module, tmp_path, monkeypatch):
    """Wherever the write of a record is cut off, in bytes, it is the old one, the new or none."""
    monkeypatch.setattr(implementation, "current", lambda: module)
    path, slots = tmp_path / "records", np.array([0])
    old, new = np.random.default_rng(0).integers(0, 256, (2, 1, 40), np.uint8)
    with file_of(path, 40, 10) as file:
        for front, back in ((old, new), (new, old)):
            for cut in range(file.stride + 1):
                file.write(slots, slots, front)
                first = path.read_bytes()[file.start :][: file.stride]
                file.write(slots, slots, back)
                second = path.read_bytes()[file.start :][: file.stride]
                mixed = first[:cut] + second[cut:]
                with path.open("r+b") as raw:
                    raw.seek(file.start)
                    raw.write(mixed)
                found, _, records = file.read(slots)
                assert not found[0] or bytes(records[0]) in (bytes(old[0]), bytes(new[0]))
                assert found[0] == (mixed in (first, second))


def test_checksums_tell_alike_records_apart():
    """Signs, neighbouring words that swap, zeros: whatever an additive checksum would miss."""
    base = np.random.default_rng(0).standard_normal((1, 64)).astype(np.float32)
    variants = [base, np.zeros_like(base), base[:, ::-1]]
    for i in range(0, 64, 2):
        flipped = base.copy()
        flipped[0, i : i + 2] *= -1
        swapped = base.copy()
        swapped[0, [i, (i + 2) % 64]] = swapped[0, [(i + 2) % 64, i]]
        variants += [flipped, swapped]
    records = np.concatenate(variants).view(np.uint8)
    assert np.unique(reference.record_tags(np.zeros(len(records), np.int64), records)).size == len(
        records
    )
    ids = np.arange(-500, 500)
    assert np.unique(reference.record_tags(ids, np.tile(records[:1], (1000, 1)))).size == 1000
