"""Columns of floats whose values are whole numbers, as pandas writes integers with nulls."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

import numpy as np
import pyarrow as pa

from jaxrec.data.encode import are_whole, numbers
from jaxrec.data.groups import ParquetGroups

# Names of ids: user_id, itemID, userId, "id".
_ID_NAME = re.compile(r"(^|[^a-zA-Z])(id|ids|ID|IDS)$|[a-z0-9](Id|Ids|ID|IDs)$")


def whole_floats(columns: pa.Schema, groups: Iterable[ParquetGroups]) -> dict[str, bool]:
    """Find the columns of floats that hold whole numbers alone, in all rows.

    A column is read up to its first fraction, which mostly is in the first rows.

    Args:
        columns: Names and types of the columns.
        groups: The rows.

    Returns:
        Whether each such column has nulls, by name. A column without values is not among them.
    """
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
                # NaN is how NumPy, and fastparquet, have a null.
                is_null = is_null | np.isnan(values)
                kind = table.field(name).type
                is_float = pa.types.is_floating(kind)
                if is_float and not (are_whole(values, kind) | is_null).all():
                    del kinds[name]
                counts[name] += int((~is_null).sum())
                has_nulls[name] |= bool(is_null.any())
    return {name: has_nulls[name] for name in kinds if counts[name]}


def are_ids(whole: dict[str, bool], mixed: Collection[str]) -> list[str]:
    """Return which columns of `whole_floats` are integers to their writer: ids, to us.

    Such columns have nulls (pandas writes integers with nulls as floats), or are integers in other
    files, or have the name of an id.
    """
    return [
        name
        for name, has_nulls in whole.items()
        if has_nulls or name in mixed or _ID_NAME.search(name)
    ]
