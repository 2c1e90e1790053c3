"""Tables that are made with the rows of their cache alone."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping

from jaxtyping import Array

from jaxrec.embed.config import TableConfig
from jaxrec.embed.functional import default_store, store_factory
from jaxrec.embed.layout import TableLayout
from jaxrec.embed.store import TableStore


@contextlib.contextmanager
def cached_tables(rows: Mapping[str, int]) -> Iterator[dict[str, TableConfig]]:
    """Make some tables of models with fewer rows than they are said to have, while this lasts.

    Args:
        rows: Largest number of rows by table.

    Yields:
        The configurations of these tables as they were given, by name; filled as tables are made.

    Raises:
        ValueError: Two collections have tables of one name and of different sizes.
    """
    make_store = store_factory()
    whole: dict[str, TableConfig] = {}

    def make(layout: TableLayout, key: Array) -> TableStore:
        for config in layout.configs:
            if config.name in rows:
                other = whole.setdefault(config.name, config)
                if other.num_embeddings != config.num_embeddings:
                    raise ValueError(
                        f"two tables are named {config.name!r}, of {other.num_embeddings} and "
                        f"{config.num_embeddings} rows; jaxrec.tier.Cached goes by name, so rename "
                        "one of them"
                    )
        return make_store(_smaller(layout, rows), key)

    with default_store(make):
        yield whole


def _smaller(layout: TableLayout, rows: Mapping[str, int]) -> TableLayout:
    def configs(tables: tuple[TableConfig, ...]) -> tuple[TableConfig, ...]:
        return tuple(
            dataclasses.replace(table, num_embeddings=min(rows[table.name], table.num_embeddings))
            if table.name in rows
            else table
            for table in tables
        )

    groups = tuple(
        dataclasses.replace(group, tables=configs(group.tables)) for group in layout.groups
    )
    return dataclasses.replace(layout, configs=configs(layout.configs), groups=groups)
