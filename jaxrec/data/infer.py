"""Schemas by the names and types of a table's columns."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from jaxrec.data.column_types import (
    holds_structs,
    how_to_flatten,
    index_columns,
    is_categorical,
    is_dense,
    is_integral,
    is_list,
    is_time,
    is_vector,
    value_type,
)
from jaxrec.data.patterns import named_by
from jaxrec.data.schema import CategoricalColumn, DenseColumn, LabelColumn, Schema, SchemaError
from jaxrec.data.structs import flat_schema

# Default names of the label column; the first that a table has is the label.
LABEL_NAMES = ("label", "click", "target")


def infer_schema(
    columns: pa.Schema,
    label: str | Sequence[str] | None = None,
    *,
    weight: str | None = None,
    exclude: Collection[str] = (),
    dense: Collection[str] = (),
    categorical: Collection[str] = (),
    ids: Collection[str] = (),
    numbers: Collection[str] = (),
    widths: Mapping[str, int] | None = None,
) -> tuple[Schema, dict[str, str]]:
    """Make a schema from the types of a table's columns.

    Columns of floats and decimals with fractions become dense features, and lists of floats of one
    length vectors of them. Columns of strings, bytes, integers and bools, and lists of these,
    become tables with a vocabulary. Timestamps and dates become features for their parts: the age
    is dense, hour, weekday and month are categorical. Fields of structs are columns. The index of a
    pandas data frame is left out.

    Args:
        columns: Names and types of the columns.
        label: Name of the label column, or names of several; None: the first of `LABEL_NAMES` that
            the table has. An empty sequence: there is none.
        weight: Name of the column of sample weights; None: all weights are 1.
        exclude: Names of columns to leave out of the features, or patterns of names such as
            ``user.*``: see `jaxrec.data.patterns.matching`.
        dense: Names or patterns of columns of numbers that become dense features.
        categorical: Names or patterns of columns that become tables; floats must be whole.
        ids: Names of columns of floats that hold integers. They become tables, too.
        numbers: Names of labels that are numbers to predict, not 0 and 1.
        widths: Length of the lists of columns of numbers whose type does not tell it, by name.

    Returns:
        The schema, and for each column that is left out its type and the reason, by name.

    Raises:
        SchemaError: There is no label column, a name or pattern matches no column, two options
            contradict each other, a column cannot have the role that an option gives it, or no
            column can be a table.

    Example:
        >>> table = pa.table({"click": [0], "price": [1.5], "user": [{"tags": ["a", "b"]}]})
        >>> schema, _ = infer_schema(table.schema)
        >>> schema.label, [*schema.dense], [*schema.categorical]
        ('click', ['price'], ['user.tags'])
    """
    columns = flat_schema(columns)
    features = {each.name: each for each in _features(columns, {*ids}, widths or {})}
    sources = {name: each.source for name, each in features.items()}
    excluded = named_by(exclude, sources)
    labels = _labels(columns.names, label, weight, {*excluded})
    names = (*labels, *([] if weight is None else [weight]))
    for name in names:
        if name not in columns.names:
            raise SchemaError(
                f"there is no column {name!r}; the columns are {', '.join(columns.names)}"
            )
    roles = {"exclude": excluded, "dense": named_by(dense, sources)}
    roles["categorical"] = named_by(categorical, sources)
    _check_roles(roles, {name: "weight" if name == weight else "label" for name in names}, sources)
    chosen: dict[str, dict[str, Any]] = {"dense": {}, "categorical": {}}
    left_out = {}
    for name, feature in features.items():
        if feature.source in names or name in excluded:
            continue
        for role in ("dense", "categorical"):
            if name in roles[role]:
                feature = feature.as_role(role)
        if isinstance(feature.column, DenseColumn):
            chosen["dense"][name] = feature.column
        elif feature.column is not None:
            chosen["categorical"][name] = feature.column
        else:
            left_out[name] = feature.reason
    kinds = {name: LabelColumn("number" if name in numbers else "binary") for name in labels}
    schema = Schema(next(iter(kinds), None), **chosen, weight=weight, labels=kinds)
    return schema, left_out


@dataclasses.dataclass(frozen=True)
class _Feature:
    """A possible feature. Without an encoding it is left out for ``reason``.

    ``source`` is the column that it comes from, of the type ``kind``.
    """

    name: str
    source: str
    kind: pa.DataType
    column: DenseColumn | CategoricalColumn | None
    reason: str = ""

    def as_role(self, role: str) -> _Feature:
        """Return the feature with the role that a user gave it; raise a SchemaError if it can't."""
        column = self.column
        part = None if column is None else column.part
        if role == "dense":
            if isinstance(column, CategoricalColumn) and part is not None:
                column = DenseColumn(part=part, zone=column.zone)
            elif is_dense(self.kind):
                column = DenseColumn()
            elif not isinstance(column, DenseColumn):
                raise self._refusal(role, "no number")
        elif not isinstance(column, CategoricalColumn):
            if part is not None or is_vector(self.kind) or not is_categorical(self.kind):
                raise self._refusal(role, "no category")
            column = CategoricalColumn()
        return dataclasses.replace(self, column=column)

    def _refusal(self, role: str, what: str) -> SchemaError:
        if self.column is not None and self.column.part is not None:
            return SchemaError(
                f"--{role}: {self.name!r} is a number of days, {what}; name other parts of "
                f"{self.source!r}"
            )
        advice = f"; {how_to_flatten(self.name, self.kind)}" if holds_structs(self.kind) else ""
        if is_list(self.kind) and is_dense(self.kind.value_type) and role == "dense":
            advice = "; lists of one length are vectors, whose width a --schema gives: {width: 64}"
        return SchemaError(f"--{role}: column {self.name!r} is of type {self.kind}, {what}{advice}")


def _features(
    columns: pa.Schema, ids: Collection[str], widths: Mapping[str, int]
) -> Iterator[_Feature]:
    """Yield the possible features of all columns, in the order of the columns."""
    index = index_columns(columns)
    for name, kind in zip(columns.names, columns.types, strict=True):

        def left_out(reason: str, name: str = name, kind: pa.DataType = kind) -> _Feature:
            return _Feature(name, name, kind, None, f"{kind}{reason}")

        width = kind.list_size if pa.types.is_fixed_size_list(kind) else widths.get(name)
        if name in index:
            yield left_out(", an index of pandas")
        elif pa.types.is_null(value_type(kind)):
            yield left_out(", which has no values")
        elif is_time(kind):
            yield from _parts(name, kind, columns.names)
        elif is_vector(kind) and width:
            yield _Feature(name, name, kind, DenseColumn(width=width))
        elif is_vector(kind):
            yield left_out(", lists of several lengths or without values")
        elif is_dense(kind) and not is_integral(kind) and name not in ids:
            # A vocabulary of true and false has a row for nulls, that of unknown values.
            is_bool = pa.types.is_boolean(kind)
            yield _Feature(name, name, kind, CategoricalColumn() if is_bool else DenseColumn())
        elif is_dense(kind) or is_categorical(kind, floats=False):
            yield _Feature(name, name, kind, CategoricalColumn())
        elif holds_structs(kind):
            yield left_out(f"; to have it as features, {how_to_flatten(name, kind)}")
        else:
            yield left_out("")


def _parts(name: str, kind: pa.DataType, names: Collection[str]) -> Iterator[_Feature]:
    """Yield the parts of a column of times as features, except those that ``names`` has already."""
    zone = getattr(kind, "tz", None)
    zone = None if zone == "UTC" else zone
    parts: dict[str, Any] = {"age": DenseColumn("log1p", part="age")}
    # A date has no hour.
    for part in ("weekday", "month") if pa.types.is_date(kind) else ("hour", "weekday", "month"):
        parts[part] = CategoricalColumn(part=part, zone=zone)
    for part, column in parts.items():
        if (feature := f"{name}.{part}") not in names:
            yield _Feature(feature, name, kind, column)


def _labels(
    names: Sequence[str],
    label: str | Sequence[str] | None,
    weight: str | None,
    excluded: Collection[str],
) -> list[str]:
    """Return the names of the labels: the user's, or the first usual name."""
    if label is None:
        left = [name for name in LABEL_NAMES if name in names and name not in excluded]
        label = [name for name in left if name != weight][:1]
        if not label:
            raise SchemaError(
                f"none of the columns {', '.join(names)} is named {', '.join(LABEL_NAMES[:-1])} or "
                f"{LABEL_NAMES[-1]}; name the label column with --label"
            )
    return [label] if isinstance(label, str) else [*label]


def _check_roles(
    roles: Mapping[str, Mapping[str, str]], others: Mapping[str, str], sources: Mapping[str, str]
) -> None:
    """Raise a SchemaError if a feature has two roles; ``others`` has "label" and "weight"."""
    before: dict[str, tuple[str, str]] = {}
    for role, named in roles.items():
        for name, pattern in named.items():
            given = f" ({pattern})" if pattern != name else ""
            if (other := others.get(sources[name])) is not None:
                raise SchemaError(
                    f"column {sources[name]!r} is the {other}; leave it out of --{role}{given}"
                )
            if name in before:
                first, first_pattern = before[name]
                raise SchemaError(
                    f"column {name!r} is named by --{first} {first_pattern} and by --{role} "
                    f"{pattern}; name it by one of them"
                )
            before[name] = role, pattern
