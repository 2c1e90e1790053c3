"""Checksums of segments of files."""

from __future__ import annotations

import pytest

import jaxrec.files.manifest
from jaxrec.files.manifest import segments_of


@pytest.mark.every_case
@pytest.mark.parametrize("place", [0, 299, 300, 999, 1000, 2499])
def test_a_checksum_sees_each_byte(tmp_path, monkeypatch, place):
    monkeypatch.setattr(jaxrec.files.manifest, "_SEGMENT_BYTES", 1000)
    monkeypatch.setattr(jaxrec.files.manifest, "_BUFFER_BYTES", 300)
    content = bytearray(range(250)) * 10

    def checksums():
        (tmp_path / "file").write_bytes(content)
        return [each.checksum(tmp_path) for each in segments_of("file", len(content))]

    before = checksums()
    content[place] ^= 1
    pairs = zip(before, checksums(), strict=True)
    assert [i for i, (old, new) in enumerate(pairs) if old != new] == [place // 1000]
