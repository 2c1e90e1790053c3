"""Schemas: the columns of a table that a model reads, and their encodings."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args, get_type_hints

import yaml

# Parts of a time that a feature may be. Categories of "weekday" are 0 (Monday) to 6, those of
# "month" 1 to 12.
Part = Literal["age", "hour", "weekday", "month"]


class SchemaError(ValueError):
    """A schema cannot be read or does not fit the columns of a file."""


def time_of(name: str, part: str) -> str:
    """Return the column of times that a feature is a part of: "ts" for "ts.hour"."""
    return name.removesuffix(f".{part}")


@dataclasses.dataclass(frozen=True)
class DenseColumn:
    """Encoding of a column of numbers as one dense feature, or of vectors as several.

    Attributes:
        transform: "standardize" subtracts the mean of the training rows and divides by their
            standard deviation. "log1p" is ``sign(x) * log(1 + abs(x))``. "log_standardize" is
            "standardize" after "log1p", for numbers of which a few are much larger than the rest.
            "log_counts" is ``log(x + 3)``, MLPerf's transform of Criteo's counts. "none" keeps the
            numbers.
        missing: Value of a null before the transform. "mean": the mean of the training rows.
            "zero": 0. "error": nulls are refused. A null vector becomes zeros after the transform.
        width: Number of floats of each list in a column of vectors, such as pretrained embeddings;
            None: a column of numbers. All numbers of the vectors share one mean and one deviation.
        part: Part of the times of a column; the feature is named after both, such as ``ts.age``.
            "age": days since the earliest training row's time, negative before it. "hour",
            "weekday" and "month": numbers, those of `CategoricalColumn`. None: the column holds
            numbers.
        since: Column of times from which the age counts, in place of the earliest time.
        zone: Time zone of "hour", "weekday" and "month", as in `CategoricalColumn`.

    Raises:
        SchemaError: Options contradict each other, or a number is out of range.
    """

    transform: Literal["standardize", "log1p", "log_standardize", "log_counts", "none"] = (
        "standardize"
    )
    missing: Literal["mean", "zero", "error"] = "mean"
    width: int | None = None
    part: Part | None = None
    since: str | None = None
    zone: str | None = None

    def __post_init__(self) -> None:
        if self.width is not None and not 1 <= self.width < 2**31:
            raise SchemaError(f"width must be from 1 to 2**31 - 1, got {self.width}")
        if self.width is not None and self.part is not None:
            raise SchemaError("vectors have a width, and times have parts; give one of the two")
        if self.since is not None and self.part != "age":
            raise SchemaError("since is for part: age; leave it out")
        if self.zone is not None and self.part in (None, "age"):
            raise SchemaError("zone is for part: hour, weekday or month; leave it out")
        # The logarithm would be that of the days since 1970.
        if self.transform == "log_standardize" and self.is_from_earliest:
            raise SchemaError(
                "an age from the earliest time has no transform: log_standardize; give log1p, or "
                "since"
            )

    @property
    def is_learned(self) -> bool:
        """Whether the encoding needs the mean or the smallest number of the training rows."""
        return self.is_standardized or self.missing == "mean" or self.is_from_earliest

    @property
    def is_standardized(self) -> bool:
        """Whether the encoding ends with the mean and the deviation of the training rows."""
        return self.transform in ("standardize", "log_standardize")

    @property
    def is_from_earliest(self) -> bool:
        """Whether numbers count from the smallest one of the training rows, as ages do."""
        return self.part == "age" and self.since is None


@dataclasses.dataclass(frozen=True)
class CategoricalColumn:
    """Encoding of a column of strings, ids or lists of these as the bags of one table.

    Attributes:
        encoding: How a value gets its row. "vocabulary": each value that is frequent enough in the
            training rows has a row (`Vocabulary`). "hash": the row is the value's hash
            (`jaxrec.ragged.hash_ids`). "ids": ids are row indices. "modulo": the row is the id
            modulo the rows of the table. "dynamic": values get rows when they first come, and may
            lose them later (`jaxrec.tier`); the raw id is the integer itself, or the 64-bit hash of
            a string or bytes. "frozen", in exported models: values keep the rows that "dynamic" had
            given them.
        num_embeddings: Number of rows of the table; None for "vocabulary", which determines it.
        min_count: Smallest number of appearances of a value of the vocabulary.
        max_size: Largest number of values of the vocabulary; None: no limit.
        num_unknown: Number of rows for values outside the vocabulary.
        missing: How a null is encoded. "unknown": as row 0 with a vocabulary, and as an empty bag
            with other encodings. "error": nulls are refused.
        embedding_dim: Number of columns of the table; None: the model's.
        pooling: "sum" or "mean" of the embeddings of a list.
        table: Name of the categorical column whose table and vocabulary this column shares, such as
            that of the items in a history; None: it has its own. All other options but ``missing``
            are that column's.
        part: Part of the times of a column; the feature is named after both, such as ``ts.hour``.
            None: the column holds the categories.
        zone: Name of the time zone that the part is taken in, such as "Europe/Berlin"; None: UTC.

    Raises:
        SchemaError: A number is out of range, ``num_embeddings`` is missing, or the encoding is
            "vocabulary" and has ``num_embeddings``.
    """

    encoding: Literal["vocabulary", "hash", "ids", "modulo", "dynamic", "frozen"] = "vocabulary"
    num_embeddings: int | None = None
    min_count: int = 2
    max_size: int | None = None
    num_unknown: int = 1
    missing: Literal["unknown", "error"] = "unknown"
    embedding_dim: int | None = None
    pooling: Literal["sum", "mean"] = "sum"
    table: str | None = None
    part: Literal["hour", "weekday", "month"] | None = None
    zone: str | None = None

    def __post_init__(self) -> None:
        if self.zone is not None and self.part is None:
            raise SchemaError("zone is for part: hour, weekday or month; leave it out")
        has_vocabulary = self.encoding == "vocabulary"
        if has_vocabulary and self.num_embeddings is not None:
            raise SchemaError(
                "a vocabulary has as many rows as values; give max_size, or another encoding, "
                "instead of num_embeddings"
            )
        if not has_vocabulary and self.num_embeddings is None:
            raise SchemaError(f"encoding {self.encoding} needs num_embeddings, the table's rows")
        for name in ("num_embeddings", "min_count", "max_size", "num_unknown", "embedding_dim"):
            value = getattr(self, name)
            if value is not None and not 1 <= value < 2**31:
                raise SchemaError(f"{name} must be from 1 to 2**31 - 1, got {value}")


@dataclasses.dataclass(frozen=True)
class LabelColumn:
    """A column of labels, and what a model predicts for it.

    Attributes:
        kind: "binary": labels are 0 or 1, and the model predicts the probability of 1. "number":
            the model predicts the number, with the least squared error.
    """

    kind: Literal["binary", "number"] = "binary"


@dataclasses.dataclass(frozen=True)
class Schema:
    """The columns of a table that a model is trained on, and their encodings.

    Attributes:
        label: Name of the column of labels, the first if there are several; None: there are none,
            as for models of interactions.
        dense: Encodings of dense features by column name, in the order of the features.
        categorical: Encodings of categorical features by column name, in the order of the tables.
        weight: Name of the column of sample weights, 0 or above; None: all weights are 1.
        labels: Labels by column name, in order; by default ``label`` alone, with labels of 0 or 1
            or bool.

    Raises:
        SchemaError: A column has two roles, or the schema has no categorical column.

    Example:
        >>> schema = Schema.from_dict({
        ...     "label": "clicked",
        ...     "dense": ["age", "price"],
        ...     "categorical": {"city": {}, "user": {"encoding": "hash", "num_embeddings": 1000}},
        ... })
        >>> schema.dense["age"].transform, schema.categorical["city"].encoding
        ('standardize', 'vocabulary')
    """

    label: str | None
    dense: Mapping[str, DenseColumn]
    categorical: Mapping[str, CategoricalColumn]
    weight: str | None = None
    labels: Mapping[str, LabelColumn] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.labels and self.label is not None:
            object.__setattr__(self, "labels", {self.label: LabelColumn()})
        if next(iter(self.labels), None) != self.label:
            raise SchemaError(f"label is {self.label!r}, not the first of labels, {[*self.labels]}")
        names = self.columns
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise SchemaError(f"column {repeated[0]!r} has two roles; give each column one")
        for name, part, _ in self.parts:
            if not name.endswith(f".{part}") or name == f".{part}":
                raise SchemaError(
                    f"column {name!r} is the {part} of a time; name it after the column of times, "
                    f"such as time.{part}"
                )
        if not self.categorical:
            raise SchemaError("there is no categorical column, and so no table to train")
        columns = {name: self._of_table(name, column) for name, column in self.categorical.items()}
        object.__setattr__(self, "categorical", columns)

    def _of_table(self, name: str, column: CategoricalColumn) -> CategoricalColumn:
        """Return the options of a column, with those of the column whose table it shares."""
        if column.table is None:
            return column
        owner = self.categorical.get(column.table)
        if owner is None or owner.table is not None or column.table == name:
            owners = [n for n, x in self.categorical.items() if x.table is None and n != name]
            raise SchemaError(
                f"column {name!r} shares the table of {column.table!r}; it must name a categorical "
                f"column with a table of its own: {', '.join(owners) or 'there is none'}"
            )
        own = {field: getattr(column, field) for field in ("table", "missing", "part", "zone")}
        shared = dataclasses.replace(owner, **own)
        for field in dataclasses.fields(column):
            if getattr(column, field.name) not in (field.default, getattr(shared, field.name)):
                raise SchemaError(
                    f"column {name!r} has the table of {column.table!r}, and so its "
                    f"{field.name}, {getattr(shared, field.name)!r}; leave {field.name} out"
                )
        return shared

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of all columns."""
        weight = () if self.weight is None else (self.weight,)
        return (*self.labels, *weight, *self.dense, *self.categorical)

    @property
    def _features(self) -> tuple[tuple[str, DenseColumn | CategoricalColumn], ...]:
        return (*self.dense.items(), *self.categorical.items())

    @property
    def parts(self) -> tuple[tuple[str, str, DenseColumn | CategoricalColumn], ...]:
        """Name, part and encoding of each feature that is a part of times."""
        return tuple((name, x.part, x) for name, x in self._features if x.part is not None)

    @property
    def feature_inputs(self) -> tuple[str, ...]:
        """Names of the columns of a file that the features are encoded from.

        They are those of the features, with the columns of times in place of their parts.
        """
        inputs: list[str] = []
        for name, column in self._features:
            inputs.append(name if column.part is None else time_of(name, column.part))
            if isinstance(column, DenseColumn) and column.since is not None:
                inputs.append(column.since)
        return tuple(dict.fromkeys(inputs))

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the columns of a file: labels, weight and `feature_inputs`."""
        weight = () if self.weight is None else (self.weight,)
        return tuple(dict.fromkeys((*self.labels, *weight, *self.feature_inputs)))

    @property
    def widths(self) -> tuple[int, ...]:
        """Number of dense features of each dense column: 1, or the width of its vectors."""
        return tuple(column.width or 1 for column in self.dense.values())

    @property
    def num_dense(self) -> int:
        """Number of dense features."""
        return sum(self.widths)

    @property
    def dynamic(self) -> tuple[str, ...]:
        """Names of the columns of encoding "dynamic"."""
        return tuple(n for n, x in self.categorical.items() if x.encoding == "dynamic")

    @classmethod
    def from_dict(cls, content: Any) -> Schema:
        """Make a schema from the content of a YAML file.

        Args:
            content: Mapping with the keys ``label``, ``weight``, ``dense`` and ``categorical``.
                ``label`` is the name of a column, a list of names, or a mapping of names to
                attributes of `LabelColumn`; ``dense`` and ``categorical`` are lists or mappings to
                attributes of `DenseColumn` and `CategoricalColumn`.

        Raises:
            SchemaError: A key is unknown, or a value is wrong.
        """
        content = _mapping("a schema", content)
        _check_keys("a schema", content, ("label", "weight", "dense", "categorical"))
        weight, label = content.get("weight"), content.get("label")
        if weight is not None and not isinstance(weight, str):
            raise SchemaError(f"weight must be the name of a column, got {weight!r}")
        labels = {}
        # A schema without labels says so by `label: []`: one that lacks the key is incomplete.
        if isinstance(label, list | Mapping):
            labels = _columns(LabelColumn, "label", label)
        elif isinstance(label, str):
            labels = {label: LabelColumn()}
        else:
            raise SchemaError(f"label must be the name of a column, got {label!r}")
        return cls(
            next(iter(labels), None),
            _columns(DenseColumn, "dense", content.get("dense")),
            _columns(CategoricalColumn, "categorical", content.get("categorical")),
            weight,
            labels,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the content of a YAML file, without default values."""

        def plain(columns: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
            return {
                name: {
                    field.name: getattr(column, field.name)
                    for field in dataclasses.fields(column)
                    if getattr(column, field.name) != field.default
                }
                for name, column in columns.items()
            }

        label: Any = plain(self.labels)
        if not any(label.values()):
            label = [*label] if len(label) != 1 else self.label
        weight = {} if self.weight is None else {"weight": self.weight}
        columns = {"dense": plain(self.dense), "categorical": plain(self.categorical)}
        return {"label": label, **weight, **columns}

    def to_yaml(self) -> str:
        """Return the text of a YAML file."""
        return yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True)


def read_schema(path: str | os.PathLike[str]) -> Schema:
    """Read a schema from a YAML file.

    Raises:
        OSError: The file cannot be read.
        SchemaError: The file holds no schema.
    """
    try:
        return Schema.from_dict(yaml.safe_load(pathlib.Path(path).read_text()))
    except (yaml.YAMLError, UnicodeDecodeError, SchemaError) as error:
        raise SchemaError(f"{path}: {' '.join(str(error).split())}") from None


def _mapping(where: str, content: Any) -> Mapping[Any, Any]:
    if not isinstance(content, Mapping):
        raise SchemaError(f"{where} must be a mapping, got {content!r}")
    return content


def _check_keys(where: str, content: Mapping[Any, Any], known: Sequence[str]) -> None:
    for key in content:
        if key not in known:
            raise SchemaError(f"{where} has no key {key!r}; its keys are {', '.join(known)}")


def _columns(kind: Any, where: str, content: Any) -> dict[str, Any]:
    # A list of names is short for a mapping of names to no options.
    if isinstance(content, Sequence) and not isinstance(content, str):
        content = dict.fromkeys(content)
    columns = {}
    for name, options in _mapping(where, content or {}).items():
        if not isinstance(name, str):
            raise SchemaError(f"{where}: {name!r} is not the name of a column; put it in quotes")
        try:
            columns[name] = _column(kind, options or {})
        except SchemaError as error:
            raise SchemaError(f"{where} column {name!r}: {error}") from None
    return columns


def _choices(kind: Any) -> list[str]:
    """Return the texts of a ``Literal``, also of one that may be None."""
    choices = []
    for each in get_args(kind):
        choices += [each] if isinstance(each, str) else _choices(each)
    return choices


def _column(kind: Any, options: Any) -> Any:
    # The annotations of the dataclass are the format: its fields are integers or Literals of text.
    types = get_type_hints(kind)
    options = _mapping("its options", options)
    _check_keys("it", options, [*types])
    for key, value in options.items():
        if choices := _choices(types[key]):
            if value not in choices:
                raise SchemaError(f"{key} must be one of {', '.join(choices)}; got {value!r}")
        elif types[key] == str | None:
            if not isinstance(value, str):
                what = "a time zone" if key == "zone" else "a column"
                raise SchemaError(f"{key} must be the name of {what}, got {value!r}")
        # `type() is`, since YAML's `true` is an instance of int.
        elif type(value) is not int and (value is not None or types[key] is int):
            raise SchemaError(f"{key} must be a whole number, got {value!r}")
    return kind(**options)
