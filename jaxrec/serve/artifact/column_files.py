"""The encoder of raw columns in npy files, which C++ reads."""

from __future__ import annotations

import pathlib

import numpy as np
import pyarrow as pa

from jaxrec.data import TableEncoder, Vocabulary
from jaxrec.data.encode import Moments
from jaxrec.data.examples import is_boolean
from jaxrec.data.frozen_vocabulary import FrozenVocabulary
from jaxrec.serve.artifact.column_encoding import (
    CategoricalEncoding,
    ColumnEncoding,
    DenseEncoding,
    VocabularyFiles,
)
from jaxrec.serve.artifact.files import write_array

DIRECTORY = "columns"


def write_columns(directory: pathlib.Path, encoder: TableEncoder) -> ColumnEncoding:
    """Write the moments and the vocabularies of an encoder, and describe its columns.

    Args:
        directory: Folder of the exported model; the files go to ``columns/``.
        encoder: The encoder, without columns of encoding "dynamic".

    Returns:
        The description, which the manifest holds.
    """
    (directory / DIRECTORY).mkdir()
    moments = [encoder.moments.get(name, Moments()) for name in encoder.schema.dense]
    numbers = np.array([(each.mean, each.scale) for each in moments], np.float64).reshape(-1, 2)
    file = f"{DIRECTORY}/moments.npy"
    write_array(directory / file, numbers)
    rows = encoder.table_rows
    categorical = [
        CategoricalEncoding(
            name,
            options.encoding,
            rows[name],
            options.missing == "error",
            name in encoder.lengths,
            vocabulary=_write_vocabulary(directory, number, vocabulary)
            if isinstance(vocabulary := encoder.vocabularies.get(name), Vocabulary)
            else None,
            ids=_write_ids(directory, number, vocabulary)
            if isinstance(vocabulary, FrozenVocabulary)
            else None,
            is_boolean=is_boolean(encoder.example, name),
            is_text=encoder.is_text.get(name),
        )
        for number, (name, options) in enumerate(encoder.schema.categorical.items())
    ]
    dense = [
        DenseEncoding(name, options.transform, options.missing, is_boolean(encoder.example, name))
        for name, options in encoder.schema.dense.items()
    ]
    return ColumnEncoding(tuple(dense), tuple(categorical), file)


def _write_ids(directory: pathlib.Path, number: int, vocabulary: FrozenVocabulary) -> str:
    file = f"{DIRECTORY}/{number}.ids.npy"
    write_array(directory / file, vocabulary.ids)
    return file


def _write_vocabulary(
    directory: pathlib.Path, number: int, vocabulary: Vocabulary
) -> VocabularyFiles:
    index = vocabulary.index
    arrays = {"hashes": index.hashes, "places": index.positions.astype(np.int32)}
    is_integer = pa.types.is_integer(vocabulary.values.type)
    if is_integer:
        arrays["values"] = vocabulary.values.to_numpy()
    else:
        arrays["values"], arrays["offsets"] = _strings(vocabulary.values)
    files = {name: f"{DIRECTORY}/{number}.{name}.npy" for name in arrays}
    for name, array in arrays.items():
        write_array(directory / files[name], array)
    return VocabularyFiles(
        is_integer,
        vocabulary.num_unknown,
        index.seed,
        files["hashes"],
        files["places"],
        files["values"],
        files.get("offsets"),
    )


def _strings(values: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """Return the bytes of all strings, one behind the other, and their offsets."""
    if not len(values):
        return np.empty(0, np.uint8), np.zeros(1, np.int64)
    _, offsets, data = values.cast(pa.large_binary()).buffers()
    starts = np.frombuffer(offsets, np.int64)[values.offset :][: len(values) + 1]
    content = np.frombuffer(data or b"", np.uint8)[starts[0] : starts[-1]]
    return content, starts - starts[0]
