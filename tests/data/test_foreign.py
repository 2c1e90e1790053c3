"""Files that are neither Parquet nor Criteo's text, by their first bytes."""

from __future__ import annotations

import gzip
import pickle
import re
import struct
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.orc
import pyarrow.parquet as pq
import pytest

from jaxrec.data.foreign import foreign_format
from tests.data.criteo.test_log import GOOD, KAGGLE, changed

pytestmark = pytest.mark.every_case

CSV = "user,item,label\n1,2,0\n3,4,1\n"


def records(*payloads: bytes) -> bytes:
    return b"".join(struct.pack("<QI", len(x), 7) + x + struct.pack("<I", 9) for x in payloads)


def feather() -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, pa.schema({"x": pa.int8()})):
        pass
    return sink.getvalue().to_pybytes()


FILES = {
    "x.csv": (CSV, r"is CSV: 3 columns separated by commas \(user, item, label\); name it x.csv"),
    "x.csv.gz": (gzip.compress(CSV.encode()), "is CSV: 3 columns .* name it x.csv.gz"),
    "x.txt": (gzip.compress(CSV.encode()), "is CSV: 3 columns .* name it x.csv.gz"),
    "x.tsv": (CSV.replace(",", "\t"), "has 3 columns separated by tabs .* and Criteo's format has"),
    "german.csv": (CSV.replace(",", ";"), "is CSV: 3 columns separated by semicolons"),
    "one.csv": ("label\n1\n0\n", r"is CSV: 1 columns separated by commas \(label\)"),
    "no_label.txt": ("\t".join(["1"] * 39) + "\n", r"has 39 columns .* \(1, 1, 1, 1, 1, ...\)"),
    "x.inter": (
        "user_id:token\titem_id:token\trating:float\n1\t2\t3.0\n",
        "is a file of RecBole, of user_id:token, .* a column of labels",
    ),
    "x.jsonl": ('{"user": 1, "label": 0}\n{"user": 2, "label": 1}\n', "is JSON; name it x.jsonl"),
    "x.json": ('[\n{"user": 1}]', "is JSON; "),
    "x.libsvm": ("1 3:0.5 7:1\n0 2:1\n", "has lines of libsvm's format"),
    "x.tfrecords": (records(b"a" * 30, b"b" * 99), "holds TFRecords; .*tf.data"),
    "one.tfrecord": (records(b"\n\x05label"), "holds TFRecords"),
    "x.npz": (b"PK\x03\x04rest", r"is an .npz archive; .*makes columns of arrays"),
    "x.zip": (b"PK\x03\x04rest", "is a zip archive; "),
    "x.npy": (b"\x93NUMPY\x01\x00", "is an array of NumPy"),
    "x.feather": (feather(), "is an Arrow .Feather. file"),
    "x.pkl": (pickle.dumps([1, 2]), "is a pickle"),
    "x.bz2": (b"BZh91AY", "is a file compressed by bzip2; unpack it"),
    "x.orc": (
        b"ORC\x08",
        r"is an ORC file; .*pyarrow.orc.read_table\(\".*x.orc\"\), \".*x.parquet",
    ),
    "x.avro": (b"Obj\x01\x04", r"is an Avro file; .*polars.read_avro\(.*x.avro\"\).write_parquet"),
    "x.h5": (b"\x89HDF\r\n", r"is an HDF5 file; .*pandas.read_hdf"),
    "x.xlsx": (b"PK\x03\x04rest", r"is an Excel file; .*pandas.read_excel"),
    "x.xls": (b"\xd0\xcf\x11\xe0rest", r"is an Excel file; .*pandas.read_excel"),
    "x.db": (b"SQLite format 3\0", r"is an SQLite database; .*sqlite3.connect\(\".*x.db\"\)"),
    "x.xz": (b"\xfd7zXZ\0", "is a file compressed by xz; unpack it"),
    "x.crypt": (b"PAREetc", "is an encrypted Parquet file; write it without encryption"),
    "x.bin": (np.arange(400, dtype=np.int32).tobytes(), "is not text; "),
}


@pytest.mark.parametrize("name", FILES)
def test_formats(tmp_path, name):
    content, message = FILES[name]
    path = tmp_path / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    said = foreign_format(path)
    assert said is not None
    assert re.match(message, said), said
    assert "\n" not in said


TEXTS = {
    "criteo": "\t".join(GOOD) + "\n",
    "malformed": "\t".join(changed(3, "x")) + "\n",
    "later": "a,header\n" + "\t".join(GOOD) + "\n",
    "empty": "",
    "word": "hello\n",
}


@pytest.mark.parametrize("name", TEXTS)
def test_what_may_be_criteos_text(tmp_path, name):
    for compress in (bytes, gzip.compress):
        (tmp_path / "x").write_bytes(compress(TEXTS[name].encode()))
        assert foreign_format(tmp_path / "x") is None
    assert foreign_format(KAGGLE) is None


@pytest.mark.slow
@pytest.mark.parametrize("name", ["x.npz", "x.orc"])
def test_the_command_that_is_named_writes_parquet(tmp_path, name):
    if name == "x.npz":
        np.savez(tmp_path / name, x=np.arange(3))
    else:
        pyarrow.orc.write_table(pa.table({"x": [0, 1, 2]}), tmp_path / name)
    said = foreign_format(tmp_path / name)
    (code,) = re.findall(r"python -c '(.*)'", said)
    code = code.replace("{name: array, ...}", "{'x': [0, 1, 2]}")
    subprocess.run([sys.executable, "-P", "-c", code], check=True)
    assert pq.read_table(tmp_path / "x.parquet")["x"].to_pylist() == [0, 1, 2]
