"""Arrays of npz files of others, and headers that are not those of the arrays."""

from __future__ import annotations

import io
import zipfile

import numpy as np
import pytest

from jaxrec.files.npz import NpzFile

pytestmark = pytest.mark.every_case

ARRAYS = {
    "matrix": np.arange(6, dtype=np.float32).reshape(2, 3),
    "columns": np.asfortranarray(np.arange(6, dtype=np.int16).reshape(2, 3)),
    "number": np.array(2.5),
    "none": np.zeros((0, 3)),
    "other order of bytes": np.arange(3, dtype=">i4"),
    "bools": np.array([True, False]),
}


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_arrays(tmp_path, save):
    save(tmp_path / "x.npz", **ARRAYS)
    with NpzFile(tmp_path / "x.npz", KeyError) as file:
        assert file.names == list(ARRAYS)
        for name, array in ARRAYS.items():
            found = file.read(name)
            assert file.form(name).shape == array.shape
            assert found.dtype == array.dtype.newbyteorder("=")
            np.testing.assert_array_equal(found, array)


def header(descr, shape, version=1):
    buffer = io.BytesIO()
    write = {1: np.lib.format.write_array_header_1_0, 2: np.lib.format.write_array_header_2_0}
    write[version](buffer, {"descr": descr, "fortran_order": False, "shape": shape})
    return buffer.getvalue()


HEADERS = {
    "more": (header("<f4", (7,)), "float32 of shape (7,) is 28 bytes, 24 are there"),
    "fewer": (header("<f4", (5,), 2), "float32 of shape (5,) is 20 bytes, 24 are there"),
    "beyond 64 bits": (header("<f4", (1 << 62, 4)), "float32 of shape"),
    "beyond 64 bits, and empty": (header("<f4", (1 << 62, 4, 0)), "float32 of shape"),
    "both negative": (header("<f4", (-2, -3)), "float32 of shape (-2, -3)"),
    "axes": (header("<f4", (1,) * 65 + (6,)), "is not an npy array"),
    "objects": (header("|O", (3,)), "it has type object"),
    "large elements": (header("<U2000000000", (0,)), "is not an npy array"),
    "elements without bytes": (header("<U0", (6,)), "it has type <U0"),
    "no header": (b"", "is not an npy array"),
    "no type": (header("<q9", (6,)), "is not an npy array"),
    "code": (header("<f4", (6,)).replace(b"(6,)", b"f() "), "is not an npy array"),
}


@pytest.mark.parametrize(("head", "message"), HEADERS.values(), ids=HEADERS)
def test_headers(tmp_path, head, message):
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
        archive.writestr("a.npy", head + bytes(24))
    with (
        NpzFile(tmp_path / "x.npz", LookupError) as file,
        pytest.raises(LookupError, match=r"x\.npz: 'a' is not an npy array") as raised,
    ):
        file.form("a")
    assert message in str(raised.value)
