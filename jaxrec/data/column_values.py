"""Finds columns by their values: hidden labels, weights, ids stored as floats, skewed numbers."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterable, Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jaxrec.data.column_types import is_dense, is_list, is_string
from jaxrec.data.encode import are_whole, decoded, joined, numbers, signed_log1p
from jaxrec.data.feature_table import feature_table
from jaxrec.data.files import DataError
from jaxrec.data.groups import FileGroups, RowGroups
from jaxrec.data.infer import LABEL_NAMES
from jaxrec.data.schema import Schema

# Number of row groups to sample, and number of rows of each.
_GROUPS, _GROUP_ROWS = 4, 1 << 14

# Words in the names of columns of 0 and 1 that are labels.
_LABEL_WORD = re.compile(
    r"label|target|click|conver[st]|purchas|bought|buy|like|love|install|subscri|outcome|response"
)
_WEIGHT_NAME = re.compile(r"(^|_)(weights?|importances?)$")

# Names of ids: user_id, itemID, userId, "id".
_ID_NAME = re.compile(r"(^|[^a-zA-Z])(id|ids|ID|IDS)$|[a-z0-9](Id|Ids|ID|IDs)$")

# Forms of text that people write for other values, and what is read as these.
_FORMS = (
    (
        "numbers",
        r"^[-+]?[$€£]? ?(\d{1,3}([,.' ]\d{3})+|\d*)([.,]\d+)? ?[%€$£]?$",
        "write 12000.5, without marks",
    ),
    (
        "dates",
        r"^(\d{1,2}[./-]\d{1,2}[./-]\d{2,4}|\d{4}[-/.]\d{1,2}[-/.]\d{1,2})([T ]\d.*)?$",
        "write dates as 2024-03-01 in a column of times",
    ),
    ("lists", r"^[\[{(].*[\]})]$", "write lists, in Parquet or JSON lines"),
)

# Largest share of the rarer label's rows in which a copy of the label may differ from it.
_DIFFERENT = 0.005
# Fewest rows of each label, and fewest rows of the missing label that a value would have by chance,
# for a conclusion.
_MIN_ROWS, _MIN_CHANCE = 5, 10
# Skewness from which numbers are taken by their logarithm: that of an exponential distribution. And
# fewest numbers to tell.
_SKEWED, _MIN_NUMBERS = 2.0, 20
# Fewest rows of a value, on average: values of one row each tell any label.
_MIN_REPEATS = 10


def suspects(schema: Schema, rows: RowGroups, *, by_name: bool = True) -> Iterator[str]:
    """Yield a warning for each feature that looks like a label, a copy of the label or a weight.

    Some rows are read. ``by_name=False`` ignores the names of columns: the user chose the columns.
    """
    table = _sample(rows)
    # Without the features of times if a text is none: the pass over all rows names the file.
    with contextlib.suppress(DataError):
        table = feature_table(schema, table)
    labels = {
        name: numbers(table[name])[0] for name, x in schema.labels.items() if x.kind == "binary"
    }
    for name in (*schema.dense, *schema.categorical):
        if name not in table.column_names:
            continue
        advice = f"--exclude {name}" if by_name else "leave it out of the schema"
        column = joined(table[name])
        if is_list(column.type):
            continue
        reasons = {label: _tells(column, values) for label, values in labels.items()}
        if told := [(label, reason) for label, reason in reasons.items() if reason is not None]:
            yield f"column {name!r} may come from the label {told[0][0]!r}: {told[0][1]}; {advice}"
        elif by_name and schema.weight is None and _is_weight(name, column):
            yield f"column {name!r} looks like weights of the rows; --weight {name}, or {advice}"
        elif by_name and _is_label(name, column):
            yield f"column {name!r} looks like another label, and is a feature; {advice}"
        elif by_name and (form := _form(column)) is not None:
            yield f"column {name!r} is text for categories that looks like {form}; or {advice}"


def _sample(rows: RowGroups) -> pa.Table:
    # From the beginning to the end: rows may be sorted by time, or by the label.
    numbers_of_groups = np.linspace(0, len(rows.sizes) - 1, _GROUPS).astype(int)
    tables = []
    for group in dict.fromkeys(numbers_of_groups.tolist()):
        table = rows.read(group)
        # A copy, since a slice would keep the whole group.
        tables.append(table.take(pa.array(np.arange(min(len(table), _GROUP_ROWS)))))
    # Other files may write a column of numbers or strings in another type.
    return pa.concat_tables([table for table in tables if table.schema.equals(tables[0].schema)])


def _tells(column: pa.Array, labels: np.ndarray) -> str | None:
    """Describe how well a column predicts the labels ``[rows]``; None if it does not."""
    positives = int((labels == 1).sum())
    if min(positives, len(labels) - positives) < _MIN_ROWS:
        return None
    if isinstance(column.type, pa.DictionaryType):
        column = column.cast(column.type.value_type)
    # A null may tell the label as well as any value.
    encoded = pc.dictionary_encode(column, null_encoding="encode")
    codes, count = encoded.indices.to_numpy(), len(encoded.dictionary)
    if count < 2 or count * _MIN_REPEATS > len(labels):
        return None
    totals = np.bincount(codes, minlength=count)
    ones = np.bincount(codes, labels == 1, count)
    # The rows that differ from the more frequent label of their value.
    different = np.minimum(ones, totals - ones)
    if different.sum() <= _DIFFERENT * min(positives, len(labels) - positives):
        return f"it tells {1 - different.sum() / len(labels):.1%} of {len(labels):,} labels"
    # A column such as "time of purchase is known": one of its two or three values has one label.
    if count <= 3:
        share = positives / len(labels)
        for code in range(count):
            chance = totals[code] * np.array([1 - share, share])
            for label, seen in enumerate((totals[code] - ones[code], ones[code])):
                if seen == 0 and chance[label] >= _MIN_CHANCE:
                    value = encoded.dictionary[code].as_py()
                    return f"all {totals[code]:,} rows where it is {value!r} have label {1 - label}"
    return None


def skewed_numbers(schema: Schema, rows: RowGroups) -> list[str]:
    """Return the names of columns to standardize that have a few much larger numbers than the rest.

    Some rows are read. The logarithm of such numbers must be less skewed than they are.
    """
    names = [name for name, x in schema.dense.items() if x.transform == "standardize"]
    table = _sample(rows) if names else pa.table({})
    found = []
    for name in names:
        if name not in table.column_names or not is_dense(table[name].type):
            continue
        values, is_null = numbers(table[name])
        values = values[~is_null & np.isfinite(values)]
        skew = _skewness(values)
        if skew > _SKEWED and abs(_skewness(signed_log1p(values))) < skew:
            found.append(name)
    return found


def _skewness(values: np.ndarray) -> float:
    """Return the third moment of standardized values; 0 if they do not differ."""
    if len(values) < _MIN_NUMBERS:
        return 0.0
    # Scaled first: the cube of a large number overflows.
    values = values / max(np.abs(values).max(), np.finfo(float).tiny)
    values = values - values.mean()
    deviation = values.std()
    return float(((values / deviation) ** 3).mean()) if deviation > 1e-12 else 0.0


def _is_label(name: str, column: pa.Array) -> bool:
    if not is_dense(column.type):
        return False
    values, is_null = numbers(column)
    is_binary = (is_null | np.isin(values, (0, 1))).all() and not is_null.all()
    return name in LABEL_NAMES or (bool(is_binary) and bool(_LABEL_WORD.search(name.lower())))


def _form(column: pa.Array) -> str | None:
    """Return what the text of a column looks like, and how to write that; None: like categories."""
    texts = decoded(column)
    if not is_string(texts.type):
        return None
    texts = pc.unique(texts.cast(pa.string())).drop_null()
    for form, pattern, advice in _FORMS:
        if pc.all(pc.match_substring_regex(texts, pattern), min_count=1).as_py():
            # Codes of digits alone are categories.
            other = texts.filter(pc.invert(pc.match_substring_regex(texts, r"^\d*$")))
            if len(other):
                return f"{form}, such as {other[0].as_py()!r}; {advice}"
    return None


def _is_weight(name: str, column: pa.Array) -> bool:
    if not _WEIGHT_NAME.search(name.lower()) or not is_dense(column.type):
        return False
    values, is_null = numbers(column)
    return bool((is_null | (values >= 0)).all())


def whole_floats(columns: pa.Schema, groups: Iterable[FileGroups]) -> dict[str, bool]:
    """Find the float columns whose values are all whole; return by name whether each has nulls."""
    # A column is dropped at its first fraction, which is mostly in the first row group, so that few
    # columns are read to the end.
    kinds = {field.name: field.type for field in columns if pa.types.is_floating(field.type)}
    counts = dict.fromkeys(kinds, 0)
    has_nulls = dict.fromkeys(kinds, False)
    for rows in groups:
        for group in range(len(rows.sizes)):
            if not kinds:
                return {}
            table = rows.read(group, [*kinds])
            for name in table.column_names:
                values, is_null = numbers(table[name])
                # NaN is a null as NumPy and fastparquet write it.
                is_null = is_null | np.isnan(values)
                kind = table.field(name).type
                is_float = pa.types.is_floating(kind)
                if is_float and not (are_whole(values, kind) | is_null).all():
                    del kinds[name]
                counts[name] += int((~is_null).sum())
                has_nulls[name] |= bool(is_null.any())
    return {name: has_nulls[name] for name in kinds if counts[name]}


def number_labels(
    columns: pa.Schema, names: Iterable[str], groups: Iterable[FileGroups]
) -> list[str]:
    """Return the names of float columns among labels that have values other than 0 and 1."""
    found = []
    groups = [*groups]
    for name in names:
        if name in columns.names and pa.types.is_floating(columns.field(name).type):
            parts = (
                numbers(rows.read(group, [name])[name])[0]
                for rows in groups
                for group in range(len(rows.sizes))
            )
            if any((np.isfinite(x) & (x != 0) & (x != 1)).any() for x in parts):
                found.append(name)
    return found


def are_ids(whole: dict[str, bool], mixed: Collection[str]) -> list[str]:
    """Return the names of columns that hold ids; ``whole`` is the result of `whole_floats`.

    A column holds ids if it has nulls (pandas writes integers with nulls as floats), is one of
    ``mixed``, which are integers in other files, or is named like an id.
    """
    return [
        name
        for name, has_nulls in whole.items()
        if has_nulls or name in mixed or _ID_NAME.search(name)
    ]
