"""Zip files of others: parts of files, damage and sizes that are not what they seem."""

from __future__ import annotations

import io
import struct
import zipfile

import pytest

from jaxrec.files.archive import Archive

pytestmark = pytest.mark.every_case

CONTENT = bytes(range(256)) * 20


def zipped(compression=zipfile.ZIP_STORED, content=CONTENT):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as archive:
        archive.writestr("a", content)
        archive.writestr("empty", b"")
    return file.getvalue()


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize("before", [0, 7, 5000])
def test_entries_of_a_part_of_a_file(tmp_path, compression, before):
    content = zipped(compression)
    (tmp_path / "x").write_bytes(b"\1" * before + content + b"\2" * before)
    with Archive(
        tmp_path / "x", "a zip file", KeyError, start=before, size=len(content)
    ) as archive:
        assert archive.names == ["a", "empty"]
        assert archive.is_compressed("a") == (compression == zipfile.ZIP_DEFLATED)
        assert archive.size("a") == len(CONTENT)
        assert archive.head("a", 3) == CONTENT[:3]
        entries = [archive.read(name, limit=1 << 20) for name in ("a", "empty", "a")]
    assert [entry.tobytes() for entry in entries] == [CONTENT, b"", CONTENT]


def with_field(content, before, field, value):
    """A file whose first header of a kind has another field."""
    at = content.index(before) + field
    return content[:at] + value + content[at + len(value) :]


LOCAL, CENTRAL = b"PK\3\4", b"PK\1\2"
STORED, DEFLATED = zipped(), zipped(zipfile.ZIP_DEFLATED)
DAMAGED = {
    "empty": (b"", "x is not a zip file, or is cut short"),
    "garbage": (b"a" * 99, "x is not a zip file, or is cut short"),
    "cut": (STORED[:-9], "x is not a zip file, or is cut short"),
    "bytes": (STORED.replace(b"\5\6\7\x08", b"\5\6\7\7", 1), "x is damaged: 'a' (Bad CRC-32"),
    "compressed bytes": (with_field(DEFLATED, LOCAL, 40, b"\xff" * 9), "x is damaged: 'a'"),
    "local header": (with_field(STORED, LOCAL, 0, b"PP"), "x is damaged: 'a' (Bad magic number"),
    "name": (with_field(STORED, LOCAL, 30, b"b"), "x is damaged: 'a' (File name in directory"),
    "encrypted": (with_field(STORED, CENTRAL, 8, b"\1"), "entry 'a' is encrypted"),
    "compression": (with_field(STORED, CENTRAL, 10, b"\14"), "has compression 12, which is not"),
    "two sizes": (with_field(STORED, CENTRAL, 24, b"\1"), "entry 'a' has two sizes"),
    "smaller than it is": (
        with_field(DEFLATED, CENTRAL, 24, struct.pack("<I", 10)),
        "x is damaged: 'a' (Bad CRC-32",
    ),
    "larger than it is": (
        with_field(DEFLATED, CENTRAL, 24, struct.pack("<I", 6000)),
        "x is damaged: 'a' (it is cut short",
    ),
    "larger than the limit": (
        with_field(DEFLATED, CENTRAL, 24, struct.pack("<I", 1 << 31)),
        "entry 'a' is compressed and has 2,147,483,648 bytes, more than the 9,999",
    ),
}


@pytest.mark.parametrize(("content", "message"), DAMAGED.values(), ids=DAMAGED)
def test_damage(tmp_path, content, message):
    (tmp_path / "x").write_bytes(content)
    with (
        pytest.raises(LookupError) as raised,
        Archive(tmp_path / "x", "a zip file", LookupError) as archive,
    ):
        archive.read("a", limit=9999)
    assert message in str(raised.value)
    assert str(tmp_path / "x") in str(raised.value)


def test_parts_that_are_cut_short(tmp_path):
    (tmp_path / "x").write_bytes(STORED)
    message = r"x is cut short: 9 bytes from byte 5,500 on are wanted, \d+ are there"
    with pytest.raises(LookupError, match=message):
        Archive(tmp_path / "x", "a zip file", LookupError, start=5500, size=9)
    with pytest.raises(LookupError, match="3 bytes from byte 9,999 on are wanted, 0 are there"):
        Archive(tmp_path / "x", "a zip file", LookupError, start=9999, size=3)
    with pytest.raises(FileNotFoundError):
        Archive(tmp_path / "none", "a zip file", LookupError)
