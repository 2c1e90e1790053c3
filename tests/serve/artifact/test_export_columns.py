"""Encoders in npy files: a reader with xxhash finds the rows of the vocabulary."""

from __future__ import annotations

import bisect
import pathlib

import numpy as np
import pyarrow as pa
import pytest
import xxhash

from jaxrec.data import Schema, TableEncoder, Vocabulary
from jaxrec.data.statistics import Moments
from jaxrec.serve.artifact.export import write_columns
from jaxrec.serve.artifact.manifest import ColumnEncoding, VocabularyFiles

VALUES = {
    "text": pa.array(["", "Ulm", "Ägypten", "x" * 50, "Ulm", "a"]),
    "bytes": pa.array([b"\x00", b"\xff\xfe", b"", b"\x00"]),
    "integers": pa.array([5, -1, 2**62, 5]),
    "unsigned": pa.array([2**64 - 1, 7], pa.uint64()),
    "sliced": pa.array(["z", "Ulm", "b", "b"])[1:],
}
OTHER = ["Paris", "b", 3, -7]


def encoder_of(vocabulary: Vocabulary) -> TableEncoder:
    schema = Schema.from_dict({"label": "label", "dense": ["age"], "categorical": ["word"]})
    return TableEncoder(schema, {"word": vocabulary}, {"age": Moments(4, 0.1, 2.0)}, {})


def row(directory: pathlib.Path, files: VocabularyFiles, value: bytes | int) -> int:
    """Return the row of a value as another program finds it."""
    data = value if isinstance(value, bytes) else (value % 2**64).to_bytes(8, "little")
    wanted = xxhash.xxh64_intdigest(data, files.seed)
    hashes = np.load(directory / files.hashes).tolist()
    values = np.load(directory / files.values)
    place = bisect.bisect_left(hashes, wanted)
    if place < len(hashes) and hashes[place] == wanted:
        position = np.load(directory / files.places)[place]
        if files.offsets is None:
            known = int(values[position])
        else:
            start, stop = np.load(directory / files.offsets)[position : position + 2]
            known = values[start:stop].tobytes()
        if known == value:
            return files.num_unknown + int(position)
    return wanted % files.num_unknown


@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.parametrize("num_unknown", [1, 3])
def test_rows_are_those_of_the_vocabulary(kind, num_unknown, tmp_path):
    vocabulary = Vocabulary.build(VALUES[kind], num_unknown=num_unknown)
    encoding = write_columns(tmp_path, encoder_of(vocabulary))
    (column,) = encoding.categorical
    files = column.vocabulary
    assert column.num_embeddings == vocabulary.num_embeddings
    is_integer = pa.types.is_integer(VALUES[kind].type)
    asked = VALUES[kind].to_pylist() + [x for x in OTHER if isinstance(x, int) == is_integer]
    if kind == "bytes":
        asked = [x if isinstance(x, bytes) else x.encode() for x in asked]
    kinds = {"bytes": pa.binary(), "unsigned": pa.uint64()}
    if kind == "unsigned":
        asked = [x % 2**64 for x in asked]
    expected = vocabulary(pa.array(asked, kinds.get(kind))).to_pylist()
    as_stored = [x.encode() if isinstance(x, str) else x for x in asked]
    if is_integer:
        as_stored = np.array([x % 2**64 for x in asked], np.uint64).view(np.int64).tolist()
    assert [row(tmp_path, files, each) for each in as_stored] == expected


def test_a_vocabulary_without_values(tmp_path):
    vocabulary = Vocabulary.build(VALUES["text"], min_count=9)
    (column,) = write_columns(tmp_path, encoder_of(vocabulary)).categorical
    assert row(tmp_path, column.vocabulary, b"Ulm") == 0
    assert np.load(tmp_path / column.vocabulary.offsets).tolist() == [0]


def test_moments_and_files(tmp_path):
    vocabulary = Vocabulary.build(VALUES["text"])
    encoding = write_columns(tmp_path, encoder_of(vocabulary))
    assert isinstance(encoding, ColumnEncoding)
    moments = np.load(tmp_path / encoding.moments)
    np.testing.assert_array_equal(moments, [[0.1, 0.5**0.5]])
    written = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.npy"))
    assert written == sorted(encoding.files)
