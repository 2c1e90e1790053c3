"""The formats that users choose by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jaxrec.embed.config import TableConfig
from jaxrec.embed.formats import FORMATS, RowFormat
from jaxrec.embed.formats.integers import Fused8Rows

ROW_FORMATS: Mapping[str, RowFormat] = {**FORMATS, Fused8Rows().name: Fused8Rows()}
"""The formats of rows outside of tables, by name."""


def find_format(name: str, formats: Mapping[str, RowFormat] = FORMATS) -> RowFormat:
    """Return the row format of a name.

    Raises:
        ValueError: There is no such format.
    """
    if name not in formats:
        raise ValueError(f"dtype={name!r} is not one of {', '.join(map(repr, formats))}")
    return formats[name]


def table_formats(
    tables: Sequence[TableConfig], dtype: str, per_table: Mapping[str, str]
) -> dict[str, RowFormat]:
    """Return the row format of each table, by name.

    Args:
        tables: The tables of a model.
        dtype: Name of the format of tables that ``per_table`` does not name.
        per_table: Names of formats by name of table.

    Raises:
        KeyError: ``per_table`` names a table that the model lacks.
        ValueError: There is no such format, or a table's width does not fit it.
    """
    names = [table.name for table in tables]
    for name in per_table:
        if name not in names:
            raise KeyError(
                f"per_table has a dtype for {name!r}, but no table is named so; there are "
                f"{', '.join(map(repr, names))}"
            )
    formats = {name: find_format(per_table.get(name, dtype)) for name in names}
    for table in tables:
        reason = formats[table.name].refuse(table.embedding_dim)
        if reason is not None:
            raise ValueError(
                f"table {table.name!r} cannot be {formats[table.name].name}: {reason}; give it "
                f"another format, such as per_table={{{table.name!r}: 'int8'}}"
            )
    return formats
