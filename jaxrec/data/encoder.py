"""Encoding of tables with any columns into batches."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import pathlib
import urllib.parse
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from jaxrec.data.clicks import ClickBatch
from jaxrec.data.column_types import check_columns, feature_schema, is_dense, value_type
from jaxrec.data.encode import (
    Location,
    check_booleans,
    encode_categorical,
    encode_dense,
    encode_label,
    encode_weight,
    is_boolean,
    joined,
)
from jaxrec.data.feature_table import feature_table
from jaxrec.data.files import DataError
from jaxrec.data.groups import LocatedGroups
from jaxrec.data.schema import Schema, read_schema
from jaxrec.data.statistics import ListLengths, Moments
from jaxrec.data.structs import flat_table
from jaxrec.data.vectors import encode_vectors, stacked
from jaxrec.data.vocabulary import FrozenVocabulary, Vocabulary
from jaxrec.files.atomic import write_atomically
from jaxrec.ragged import Packer
from jaxrec.ragged.capacity import LengthMoments, capacity_for

SCHEMA_FILE = "schema.yaml"
STATISTICS_FILE = "statistics.json"
VOCABULARIES = "vocabularies"
EXAMPLE_FILE = "example.parquet"

# Number of rows of the example: enough to show the server's users a request, not the data set.
NUM_ROWS = 2


@dataclasses.dataclass(frozen=True, eq=False)
class TableEncoder:
    """Encodes the columns of tables into batches, by a schema and learned vocabularies.

    `learn_encoder` makes one. `jaxrec train` saves it with the model, in ``features/`` of the run's
    directory.

    An encoder is a function from Arrow to Arrow. Called with a table or a record batch it returns
    one with the same rows and the columns `encoded_columns`; called with an iterator of record
    batches it yields record batches. It depends on nothing else and can be pickled, so that Ray
    (``dataset.map_batches(encoder, batch_format="pyarrow")``) and Spark
    (``frame.mapInArrow(encoder, ...)``) run it on other machines.

    Attributes:
        schema: The schema.
        vocabularies: Vocabulary of each column that has one.
        moments: Mean and variance of each dense column that needs them.
        lengths: Histogram of the list lengths of each column of lists.
        example: The first two training rows, with the columns of the features and their types;
            None: unknown.

    Example:
        >>> from jaxrec.data import learn_encoder
        >>> table = pa.table({"label": [0, 1], "age": [20, 40], "tags": [["a"], ["a", "b"]]})
        >>> schema = Schema.from_dict({"label": "label", "dense": ["age"], "categorical": ["tags"]})
        >>> encoder = learn_encoder(schema, [table])
        >>> encoder.table_rows
        {'tags': 2}
        >>> encoder(table)["tags"].to_pylist()
        [[1], [1, 0]]
        >>> batch = encoder.batch(table)
        >>> batch.features["tags"].to_lists(), batch.dense.round(1).tolist()
        ([[1], [1, 0]], [[-1.0], [1.0]])
    """

    schema: Schema
    vocabularies: Mapping[str, Vocabulary | FrozenVocabulary]
    moments: Mapping[str, Moments]
    lengths: Mapping[str, ListLengths]
    example: pa.Table | None = None

    @property
    def table_rows(self) -> dict[str, int]:
        """Number of rows of the table of each categorical column."""
        return {
            name: self.vocabularies[name].num_embeddings
            if options.num_embeddings is None
            else options.num_embeddings
            for name, options in self.schema.categorical.items()
        }

    def capacities(self, samples: int, *, certain: bool = False) -> dict[str, int]:
        """Return the capacity of each feature in a batch.

        Args:
            samples: Number of samples of the batch.
            certain: True: the capacity holds every batch of the rows that the encoder was learned
                from. False: it holds nearly every batch, and is smaller.
        """

        def capacity(name: str) -> int:
            if (lengths := self.lengths.get(name)) is None:
                return capacity_for(samples)
            return lengths.most(samples) if certain else lengths.usual(samples)

        return {name: capacity(name) for name in self.schema.categorical}

    def without(self, names: Collection[str]) -> TableEncoder:
        """Return the encoder of all other columns; the named ones are categorical.

        Raises:
            SchemaError: No categorical column is left, or one shares the table of a named column.
        """

        def others(columns: Mapping[str, Any]) -> dict[str, Any]:
            return {name: column for name, column in columns.items() if name not in names}

        schema = dataclasses.replace(self.schema, categorical=others(self.schema.categorical))
        example = self.example
        if example is not None:
            example = example.select(list(schema.feature_inputs))
        return TableEncoder(
            schema, others(self.vocabularies), self.moments, others(self.lengths), example
        )

    @functools.cached_property
    def is_text(self) -> dict[str, bool]:
        """Whether a categorical column had text in training, by name.

        Columns are left out if their encoding does not take both text and numbers, or if their type
        in training is not known.
        """
        if self.example is None:
            return {}
        columns = feature_schema(self.schema, self.example.schema, "the example")
        kinds = {field.name: value_type(field.type) for field in columns}
        return {
            name: not is_dense(kinds[name])
            for name, options in self.schema.categorical.items()
            if options.encoding in ("hash", "dynamic", "frozen")
            and not pa.types.is_null(kinds[name])
        }

    @functools.cached_property
    def _packer(self) -> Packer:
        """Packer that all batches share, so that batches of one size get equal capacities."""
        # A column without lists has one id in each sample.
        one = LengthMoments(1.0, 0.0, 0.0)
        return Packer.of_moments(
            {
                name: self.lengths[name].moments() if name in self.lengths else one
                for name in self.schema.categorical
            }
        )

    @property
    def encoded_columns(self) -> pa.Schema:
        """Names and types of the columns that `encode` returns."""
        schema = self.schema
        labels = [f"label {number}" if number else "label" for number in range(len(schema.labels))]
        columns = dict.fromkeys((*labels, "weight", *schema.dense), pa.float32())
        for name, options in schema.categorical.items():
            kind = pa.int64() if options.encoding == "dynamic" else pa.int32()
            columns[name] = pa.list_(kind) if name in self.lengths else kind
        return pa.schema(columns)

    def __call__(self, rows: Any) -> Any:
        """Encode a table, a record batch, or an iterator of record batches."""
        if isinstance(rows, pa.Table):
            return self.encode(rows)
        if isinstance(rows, pa.RecordBatch):
            return as_batch(self.encode(pa.Table.from_batches([rows])))
        return map(self, rows)

    def __reduce__(self) -> tuple[Any, ...]:
        # Without what properties have computed: another process computes it if it needs it.
        return TableEncoder, tuple(getattr(self, x.name) for x in dataclasses.fields(self))

    def batch(
        self, table: pa.Table | Mapping[str, Any], batch_size: int | None = None
    ) -> ClickBatch:
        """Make a batch of the rows of a table.

        Args:
            table: Table with the columns of the schema, or arrays by name. Rows to predict need no
                labels and no weights: if the column is missing or of type null, labels are 0 and
                weights are 1.
            batch_size: Number of samples of the batch, filled up with padding; None: the number of
                rows.

        Raises:
            DataError: A column is missing or has an invalid value.
        """
        table = as_table(table)
        return self.pack(self.encode(table), len(table) if batch_size is None else batch_size)

    def encode(
        self, table: pa.Table, path: str | os.PathLike[str] = "the table", first_row: int = 0
    ) -> pa.Table:
        """Encode the columns: numbers as float32, categories as int32 row indices or lists of them.

        Columns of encoding "dynamic" become int64 ids or lists of them. Vectors become lists of
        float32 of a fixed size.

        Args:
            table: Table with the columns of `Schema.inputs`; fields of structs may be columns
                already, such as ``user.age``.
            path: The table's file, for errors.
            first_row: Number of the table's first row in the file, for errors.
        """
        schema = self.schema
        table = feature_table(schema, table, path, first_row)
        features = (*schema.dense, *schema.categorical)
        booleans = [name for name in features if is_boolean(self.example, name)]
        check_columns(schema, table.schema, path, has_labels=False, booleans=booleans)
        self._check_kinds(table.schema, path)

        def location(name: str) -> Location:
            return Location(path, first_row, name)

        ones = np.ones(len(table), np.float32)
        labels, weight = [], ones
        # Rows to predict may have the columns of labels and weights with nulls alone.
        given = {field.name for field in table.schema if not pa.types.is_null(field.type)}
        for name, label in schema.labels.items():
            moments = self.moments.get(name, Moments())
            labels.append(
                encode_label(table[name], label, moments, location(name))
                if name in given
                else np.zeros_like(ones)
            )
        if schema.weight is not None and schema.weight in given:
            weight = encode_weight(table[schema.weight], location(schema.weight))
        columns = [*labels, weight]
        for name in booleans:
            check_booleans(table[name], location(name).error)
        for name, dense in schema.dense.items():
            moments = self.moments.get(name, Moments())
            encoded = encode_dense if dense.width is None else encode_vectors
            columns.append(encoded(table[name], dense, moments, location(name)))
        for name, options in schema.categorical.items():
            vocabulary, column = self.vocabularies.get(name), table[name]
            # A request without any value has no type. As a column of lists its nulls are empty
            # bags; as plain values they would be unknown ids.
            if pa.types.is_null(column.type) and name in self.lengths:
                column = pa.nulls(len(table), pa.list_(pa.null()))
            columns.append(encode_categorical(column, options, vocabulary, location(name)))
        return pa.table(columns, self.encoded_columns.names)

    def _check_kinds(self, columns: pa.Schema, path: str | os.PathLike[str]) -> None:
        """Raise a DataError if a column had text in training and has numbers, or the reverse."""
        # Both could be encoded, but the hash of "7" is not that of 7.
        for name, was_text in self.is_text.items():
            kind = value_type(columns.field(name).type)
            if not pa.types.is_null(kind) and was_text == is_dense(kind):
                assert self.example is not None
                raise DataError(
                    f"{path}, column {name!r} is of type {columns.field(name).type}; expected "
                    f"{'text' if was_text else 'numbers'}, as in training, where it was of type "
                    f"{self.example.schema.field(name).type}"
                )

    def pack(self, encoded: pa.Table, batch_size: int) -> ClickBatch:
        """Make a batch of rows that `encode` returned, filled up with padding.

        With a column of encoding "dynamic" the batch has raw ids, for `jaxrec.tier.ahead`.
        """
        missing = batch_size - len(encoded)
        columns = [joined(column) for column in encoded.columns]

        def padded(array: np.ndarray) -> np.ndarray:
            return np.pad(array, (0, missing)) if missing else array

        # The labels come first, then the weight, then the features.
        count = len(self.schema.labels)
        labels, weight, rest = columns[:count], columns[count], columns[count + 1 :]
        widths = self.schema.widths
        dense = stacked(rest[: len(widths)], widths, batch_size)
        flat, lengths = [], []
        for column in rest[len(widths) :]:
            values, each = bags_of(column)
            flat.append(values)
            lengths.append(padded(each))
        keys = tuple(self.schema.categorical)
        features = self._packer.from_lengths(
            keys,
            np.concatenate(flat),
            np.concatenate(lengths),
            id_bits=64 if self.schema.dynamic else 32,
        )
        weights = padded(weight.to_numpy())
        if count == 1:
            return ClickBatch(dense, features, padded(labels[0].to_numpy()), weights)
        # A column for each label; a schema without labels has none.
        both = np.zeros((batch_size, count), np.float32)
        for number, column in enumerate(labels):
            both[: len(encoded), number] = column.to_numpy()
        return ClickBatch(dense, features, both, weights)

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Write the encoder to a directory, which is replaced once all files are complete.

        Raises:
            OSError: The directory cannot be written.
        """
        statistics = {
            "moments": {name: self._saved_moments(name) for name in self.moments},
            "lengths": {
                name: {"lengths": x.lengths.tolist(), "counts": x.counts.tolist()}
                for name, x in self.lengths.items()
            },
        }
        with write_atomically(directory) as unfinished:
            (unfinished / VOCABULARIES).mkdir(parents=True)
            (unfinished / SCHEMA_FILE).write_text(self.schema.to_yaml())
            for name, vocabulary in self.vocabularies.items():
                vocabulary.save(_vocabulary_file(unfinished, name))
            (unfinished / STATISTICS_FILE).write_text(json.dumps(statistics) + "\n")
            if self.example is not None:
                pq.write_table(self.example, unfinished / EXAMPLE_FILE)

    def _saved_moments(self, name: str) -> dict[str, Any]:
        moments = dataclasses.asdict(self.moments[name])
        # Earlier versions, which know no ages, read encoders without them.
        if name not in self.schema.dense or not self.schema.dense[name].is_from_earliest:
            del moments["smallest"]
        return moments

    @classmethod
    def load(cls, directory: str | os.PathLike[str]) -> TableEncoder:
        """Read an encoder that `save` wrote.

        Raises:
            OSError: A file is missing or cannot be read.
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
        # The schema says which class wrote a column's file.
        kinds: dict[str, Any] = {"vocabulary": Vocabulary, "frozen": FrozenVocabulary}
        vocabularies = {
            name: kinds[options.encoding].load(_vocabulary_file(directory, name))
            for name, options in schema.categorical.items()
            if options.encoding in kinds
        }
        file = directory / EXAMPLE_FILE
        example = _read_example(schema, file) if file.exists() else None
        return cls(schema, vocabularies, moments, lengths, example)


@dataclasses.dataclass(frozen=True, eq=False)
class EncodedGroups:
    """Row groups that are encoded when they are read."""

    groups: LocatedGroups
    encoder: TableEncoder

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.groups.sizes

    def read(self, group: int) -> pa.Table:
        return self.encoder.encode(self.groups.read(group), *self.groups.location(group))


def first_rows(schema: Schema, table: pa.Table) -> pa.Table:
    """Return the example for an encoder: the first rows of a table, with the features' columns."""
    columns = flat_table(table).select(list(schema.feature_inputs)).replace_schema_metadata(None)
    # A copy: a slice would keep the whole table in memory, and so would a dictionary.
    rows = columns.take(np.arange(min(NUM_ROWS, len(table))))
    fields = [
        field.with_type(field.type.value_type) if pa.types.is_dictionary(field.type) else field
        for field in rows.schema
    ]
    return rows.cast(pa.schema(fields))


def as_batch(table: pa.Table) -> pa.RecordBatch:
    """Return a table's rows as one record batch, also if there are none."""
    return pa.RecordBatch.from_arrays([joined(x) for x in table.columns], schema=table.schema)


def as_table(table: pa.Table | Mapping[str, Any]) -> pa.Table:
    """Convert arrays by name to a table; in arrays of objects None and NaN become nulls.

    An array ``[rows, width]`` becomes a column of vectors.
    """
    if isinstance(table, pa.Table):
        return table
    if not isinstance(table, Mapping):
        return pa.table(table)  # a data frame, or a record batch
    columns = {}
    for name, values in table.items():
        # NaN in an array of objects is pandas' missing value. NaN among floats stays a number, and
        # the encoding of dense columns refuses it.
        is_object = isinstance(values, np.ndarray) and values.dtype == object
        try:
            given = isinstance(values, pa.Array | pa.ChunkedArray)
            if isinstance(values, np.ndarray) and values.ndim == 2 and not is_object:
                flat = pa.array(values.reshape(-1))
                columns[name] = pa.FixedSizeListArray.from_arrays(flat, values.shape[1])
                continue
            columns[name] = values if given else pa.array(values, from_pandas=is_object or None)
        except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as error:
            raise DataError(
                f"the table, column {name!r}: Arrow cannot make a column of its values ({error}); "
                "expected values of one kind, or lists of them"
            ) from None
    try:
        return pa.table(columns)
    except pa.ArrowInvalid as error:
        raise DataError(f"the table: {' '.join(str(error).split())}") from None


def bags_of(column: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """Return the values ``[ids]`` of an encoded column and the length of each bag ``[rows]``."""
    if isinstance(column, pa.ListArray):
        return column.flatten().to_numpy(), np.diff(column.offsets.to_numpy())
    # A column without lists has bags of one id, or of none where it is null.
    valid = np.asarray(column.is_valid()).astype(np.int32)
    return (column.drop_null() if column.null_count else column).to_numpy(), valid


def _vocabulary_file(directory: pathlib.Path, name: str) -> pathlib.Path:
    # A column's name may hold characters that a file's name must not.
    return directory / VOCABULARIES / f"{urllib.parse.quote(name, safe=' ')}.parquet"


def _read_example(schema: Schema, path: pathlib.Path) -> pa.Table:
    """Read `TableEncoder.example`; raise a DataError if its columns are not the schema's."""
    try:
        rows = pq.read_table(path)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} is not a Parquet file, or damaged ({error})") from None
    names = list(schema.feature_inputs)
    if rows.column_names != names or len(rows) > NUM_ROWS:
        raise DataError(
            f"{path} has {len(rows)} rows of the columns {', '.join(rows.column_names)}; expected "
            f"{NUM_ROWS} of {', '.join(names)}"
        )
    return rows
