"""Tables of columns of one's own as batches that a model takes."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import shutil
import urllib.parse
from collections.abc import Mapping

import numpy as np
import pyarrow as pa

from jaxrec.data.batches import ClickBatch
from jaxrec.data.column_types import check_columns
from jaxrec.data.encode import (
    Moments,
    Place,
    encode_categorical,
    encode_dense,
    encode_label,
    encode_weight,
    joined,
)
from jaxrec.data.groups import PlacedGroups
from jaxrec.data.list_lengths import ListLengths
from jaxrec.data.schema import Schema, read_schema
from jaxrec.data.text import DataError
from jaxrec.data.vocabulary import Vocabulary
from jaxrec.ragged import KeyedJaggedArray, rung

SCHEMA_FILE = "schema.yaml"
STATISTICS_FILE = "statistics.json"
VOCABULARIES = "vocabularies"

# Columns of an encoded table before those of the features.
_FIRST = ("label", "weight")


@dataclasses.dataclass(frozen=True, eq=False)
class TableEncoder:
    """Turns the columns of a table into batches: a schema with its vocabularies and statistics.

    `jaxrec train` saves it with the model, in ``features/`` of the run's directory.

    Attributes:
        schema: The columns.
        vocabularies: Of each column with a vocabulary.
        moments: Of each dense column that needs its mean.
        lengths: Of each column of lists.

    Example:
        >>> from jaxrec.data import learn_encoder
        >>> table = pa.table({"label": [0, 1], "age": [20, 40], "tags": [["a"], ["a", "b"]]})
        >>> schema = Schema.from_dict({"label": "label", "dense": ["age"], "categorical": ["tags"]})
        >>> encoder = learn_encoder(schema, [table])
        >>> encoder.table_rows
        {'tags': 2}
        >>> batch = encoder.batch(table)
        >>> batch.features["tags"].to_lists(), batch.dense.round(1).tolist()
        ([[1], [1, 0]], [[-1.0], [1.0]])
    """

    schema: Schema
    vocabularies: Mapping[str, Vocabulary]
    moments: Mapping[str, Moments]
    lengths: Mapping[str, ListLengths]

    @property
    def table_rows(self) -> dict[str, int]:
        """Rows of the table of each categorical column."""
        return {
            name: self.vocabularies[name].num_embeddings
            if options.num_embeddings is None
            else options.num_embeddings
            for name, options in self.schema.categorical.items()
        }

    def capacities(self, samples: int, *, certain: bool = False) -> dict[str, int]:
        """The capacity of each feature in batches of ``samples`` samples.

        Args:
            samples: Number of samples of a batch.
            certain: Whether no batch of the rows learned from exceeds it; by default hardly one.
        """
        return {
            name: rung(samples)
            if name not in self.lengths
            else self.lengths[name].most(samples)
            if certain
            else self.lengths[name].usual(samples)
            for name in self.schema.categorical
        }

    def batch(self, table: pa.Table, batch_size: int | None = None) -> ClickBatch:
        """Make a batch of the rows of a table.

        Args:
            table: With the columns of the schema. Without a column of labels, as rows to predict
                have none, labels are 0; without weights they are 1.
            batch_size: Samples of the batch, the last of them padding; None: the table's rows.

        Raises:
            DataError: A column is lacking, or has a value that it must not have.
        """
        return self.pack(self.encode(table), len(table) if batch_size is None else batch_size)

    def encode(
        self, table: pa.Table, path: str | os.PathLike[str] = "the table", first_row: int = 0
    ) -> pa.Table:
        """Encode the columns: numbers as float32, categories as int32 row indices or lists of them.

        Args:
            table: With the columns of the schema.
            path: Where it is from, for errors.
            first_row: Rows there before its first.
        """
        schema = self.schema
        check_columns(schema, table.schema, path, has_labels=False)

        def place(name: str) -> Place:
            return Place(path, first_row, name)

        ones = np.ones(len(table), np.float32)
        label, weight = np.zeros_like(ones), ones
        if schema.label in table.column_names:
            label = encode_label(table[schema.label], place(schema.label))
        if schema.weight is not None and schema.weight in table.column_names:
            weight = encode_weight(table[schema.weight], place(schema.weight))
        columns = [label, weight]
        for name, dense in schema.dense.items():
            moments = self.moments.get(name, Moments())
            columns.append(encode_dense(table[name], dense, moments, place(name)))
        for name, options in schema.categorical.items():
            vocabulary = self.vocabularies.get(name)
            columns.append(encode_categorical(table[name], options, vocabulary, place(name)))
        return pa.table(columns, [*_FIRST, *schema.dense, *schema.categorical])

    def pack(self, encoded: pa.Table, batch_size: int) -> ClickBatch:
        """Make a batch of encoded rows; the last samples are padding where there are too few."""
        missing = batch_size - len(encoded)
        columns = [joined(column) for column in encoded.columns]

        def padded(array: np.ndarray) -> np.ndarray:
            return np.pad(array, (0, missing)) if missing else array

        label, weight, *rest = columns
        dense = np.zeros((batch_size, len(self.schema.dense)), np.float32)
        for number, column in enumerate(rest[: dense.shape[1]]):
            dense[: len(encoded), number] = column.to_numpy()
        flat, lengths = [], []
        for column in rest[dense.shape[1] :]:
            values, each = _ragged(column)
            flat.append(values)
            lengths.append(padded(each))
        keys = tuple(self.schema.categorical)
        room = self.capacities(batch_size)
        needs = {key: rung(values.size) for key, values in zip(keys, flat, strict=True)}
        features = KeyedJaggedArray.from_lengths(
            keys,
            np.concatenate(flat),
            np.concatenate(lengths),
            capacities={
                key: batch_size if key not in self.lengths else max(room[key], needs[key])
                for key in keys
            },
        )
        labels, weights = (padded(column.to_numpy()) for column in (label, weight))
        return ClickBatch(dense, features, labels, weights)

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Write a directory, all of it or, if killed, none; one that is there is replaced.

        Raises:
            OSError: It cannot be written.
        """
        directory = pathlib.Path(directory)
        unfinished = directory.with_name(f".{directory.name}.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        (unfinished / VOCABULARIES).mkdir(parents=True)
        (unfinished / SCHEMA_FILE).write_text(self.schema.to_yaml())
        for name, vocabulary in self.vocabularies.items():
            vocabulary.save(_vocabulary_file(unfinished, name))
        statistics = {
            "moments": {name: dataclasses.asdict(x) for name, x in self.moments.items()},
            "lengths": {
                name: {"lengths": x.lengths.tolist(), "counts": x.counts.tolist()}
                for name, x in self.lengths.items()
            },
        }
        (unfinished / STATISTICS_FILE).write_text(json.dumps(statistics) + "\n")
        shutil.rmtree(directory, ignore_errors=True)
        unfinished.replace(directory)

    @classmethod
    def load(cls, directory: str | os.PathLike[str]) -> TableEncoder:
        """Read what `save` wrote.

        Raises:
            OSError: A file is lacking or cannot be read.
            SchemaError, DataError: A file is damaged.
        """
        directory = pathlib.Path(directory)
        schema = read_schema(directory / SCHEMA_FILE)
        try:
            statistics = json.loads((directory / STATISTICS_FILE).read_text())
            moments = {name: Moments(**x) for name, x in statistics["moments"].items()}
            lengths = {
                name: ListLengths(*(np.array(x[key], np.int64) for key in ("lengths", "counts")))
                for name, x in statistics["lengths"].items()
            }
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{directory / STATISTICS_FILE} is damaged ({error})") from None
        vocabularies = {
            name: Vocabulary.load(_vocabulary_file(directory, name))
            for name, options in schema.categorical.items()
            if options.encoding == "vocabulary"
        }
        return cls(schema, vocabularies, moments, lengths)


@dataclasses.dataclass(frozen=True, eq=False)
class EncodedGroups:
    """Row groups whose tables are encoded as they are read."""

    groups: PlacedGroups
    encoder: TableEncoder

    @property
    def sizes(self) -> tuple[int, ...]:
        """Rows of each group."""
        return self.groups.sizes

    def read(self, group: int) -> pa.Table:
        """The encoded rows of a group.

        Raises:
            OSError: They cannot be read.
            DataError: A column has a value that it must not have.
        """
        return self.encoder.encode(self.groups.read(group), *self.groups.place(group))


def _ragged(column: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """The values of an encoded column and the length of each bag."""
    if isinstance(column, pa.ListArray):
        return column.flatten().to_numpy(), np.diff(column.offsets.to_numpy())
    valid = np.asarray(column.is_valid()).astype(np.int32)
    return (column.drop_null() if column.null_count else column).to_numpy(), valid


def _vocabulary_file(directory: pathlib.Path, name: str) -> pathlib.Path:
    # The name of a column may hold what a file's must not.
    return directory / VOCABULARIES / f"{urllib.parse.quote(name, safe=' ')}.parquet"
