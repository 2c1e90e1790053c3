"""Sizes of the tables of a model."""

from __future__ import annotations

from collections.abc import Sequence

from jaxrec.embed import EmbeddingBagCollection
from jaxrec.embed.config import TableConfig


def common_width(model: str, tables: Sequence[TableConfig]) -> int:
    """Return the width of all tables.

    Raises:
        ValueError: They differ.
    """
    widths = {table.name: table.embedding_dim for table in tables}
    if len(set(widths.values())) != 1:
        raise ValueError(f"{model}'s tables are of one width, embedding_dim; got {widths}")
    return next(iter(widths.values()))


def num_features(embeddings: EmbeddingBagCollection) -> int:
    """Return the number of blocks of the pooled output: one for each feature of each table."""
    return sum(len(table.feature_names) for table in embeddings.configs)


def num_columns(embeddings: EmbeddingBagCollection) -> int:
    """Return the number of columns of the pooled output."""
    return sum(table.embedding_dim * len(table.feature_names) for table in embeddings.configs)
