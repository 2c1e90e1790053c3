"""Checksums of segments of files, and manifests."""

from __future__ import annotations

import pytest

import jaxrec.files.manifest
from jaxrec.files.manifest import describe_files, find_damage, seal, segments_of, unseal


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


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"abc", ""),
        (b"abd", "x/file does not have the bytes that were saved"),
        (b"abcd", "x/file has 4 bytes, but 3 were saved"),
        (b"ab", "x/file has 2 bytes, but 3 were saved"),
        (None, "x/file cannot be read: No such file or directory"),
    ],
)
def test_damage_is_found(tmp_path, content, said):
    path = tmp_path / "x" / "file"
    path.parent.mkdir()
    path.write_bytes(b"abc")
    files = describe_files(tmp_path)
    assert list(files) == ["x/file"]
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)
    assert find_damage(tmp_path, files, "saved") == said
    by_size = find_damage(tmp_path, files, "saved", with_checksums=False)
    assert by_size == ("" if content == b"abd" else said)


@pytest.mark.parametrize("is_hex", [False, True])
def test_manifests_hold_their_checksum(is_hex):
    content = {"format": "x 1", "numbers": [1, 2.5, None], "name": "\u00fc"}
    text = seal(content, is_hex=is_hex)
    assert unseal(text, "x 1") == {"numbers": [1, 2.5, None], "name": "\u00fc"}
    with pytest.raises(ValueError, match="its checksum does not match"):
        unseal(text.replace(b"2.5", b"2.6"), "x 1")
    with pytest.raises(ValueError, match="its format is 'x 1', and this jaxrec reads 'x 2'"):
        unseal(text, "x 2")
    for other in (b"[]", b"{}", b"", b"7"):
        with pytest.raises(ValueError):  # noqa: PT011  # of json, too
            unseal(other, "x 1")
