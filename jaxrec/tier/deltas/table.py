"""A table of a model as versions see it: rows by id, wherever they are.

While tables are used the model is settled (`jaxrec.tier.tier.Tier.settled`): they agree with their
vocabularies, and all evicted rows are in their stores.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator
from typing import Any

import numpy as np

from jaxrec.embed.collection import Collection
from jaxrec.embed.config import TableConfig
from jaxrec.embed.rows import check_values, read, write
from jaxrec.embed.slots import TableRows
from jaxrec.tier.deltas.manifest import TableFacts
from jaxrec.tier.row_columns import TableShapes

Values = dict[str, np.ndarray]
"""Rows ``[n, embedding_dim]`` under ``"rows"``, and optimizer state ``[n, ...]`` by name."""


class PublishedTable(abc.ABC):
    """A table that is published, or that takes over what was published.

    `PlainTable` and `OpenTable` implement it. Ids are int64 and distinct.

    Args:
        path: Path of the table's collection in the model.
        collection: The collection.
        config: The table as the user gave it.
    """

    def __init__(self, path: str, collection: Collection, config: TableConfig) -> None:
        self.path, self.config = path, config
        self._collection = collection
        logical = collection.tables.get_value().checkpoint_shapes(config.name)
        self._shapes = TableShapes(config.name, logical.rows, logical.state)

    @property
    def name(self) -> str:
        """Path of its collection and its name."""
        return f"{self.path}/{self.config.name}" if self.path else self.config.name

    @property
    @abc.abstractmethod
    def facts(self) -> TableFacts:
        """Description of the table, with its optimizer state."""

    @abc.abstractmethod
    def scan(self, with_state: bool) -> Iterator[tuple[np.ndarray, Values]]:
        """Iterate over all ids that have a row, and their values, in parts."""

    @abc.abstractmethod
    def read(self, ids: np.ndarray, with_state: bool) -> tuple[np.ndarray, Values]:
        """Return whether each id has a row, bool ``[n]``, and the values of those that have one."""

    @abc.abstractmethod
    def write(self, ids: np.ndarray, values: Values) -> None:
        """Set the values of ids, which get rows where they have none."""

    @abc.abstractmethod
    def forget(self, ids: np.ndarray) -> None:
        """Take the rows of ids away; ids without one are skipped."""

    @abc.abstractmethod
    def forget_others(self, ids: np.ndarray, key: tuple[int, int] | None) -> None:
        """Take the rows of all other ids away.

        Args:
            ids: The ids of a full version.
            key: Its `TableFacts.seed`, with which other ids begin.
        """

    @abc.abstractmethod
    def find_shortage(self, ids: np.ndarray, removed: np.ndarray | None) -> str:
        """Return why ids would not fit; empty if they fit.

        Args:
            ids: Ids that are to be written.
            removed: Ids that are forgotten before; None: all others.
        """

    @property
    def initializer(self) -> str:
        """Name of the initializer; empty if it is a function."""
        return self.config.initializer if isinstance(self.config.initializer, str) else ""

    def shapes(self, with_state: bool) -> dict[str, Any]:
        """Return shapes and types of `Values`."""
        return {"rows": self._shapes.rows} | (dict(self._shapes.state) if with_state else {})

    def parts(self, ids: np.ndarray) -> Iterator[np.ndarray]:
        """Return ids in parts that fit the memory."""
        size = self._shapes.rows_at_once
        return (ids[start : start + size] for start in range(0, ids.size, size))

    def read_rows(self, rows: np.ndarray, with_state: bool) -> Values:
        """Return the values of rows of the devices' table by their indices."""
        if not rows.size:
            return {
                name: np.zeros((0, *shape.shape[1:]), shape.dtype)
                for name, shape in self.shapes(with_state).items()
            }
        placed = self._collection.tables.get_value().placed
        requests = [TableRows(self.config.name, rows)]
        return read(placed, requests, with_state=with_state).to_host()[0]

    def write_rows(self, rows: np.ndarray, values: Values) -> None:
        """Set the values of rows of the devices' table by their indices.

        Raises:
            ValueError: The table, such as a quantized one, cannot hold a value.
        """
        if not rows.size:
            return
        store = self._collection.tables.get_value()
        if "rows" in values:
            check_values(store, self.config.name, values["rows"])
        placed = write(store.placed, [TableRows(self.config.name, rows)], [values])
        self._collection.tables.set_value(store.with_placed(placed))

    def _facts(self, **details: Any) -> TableFacts:
        state = {
            name: (np.dtype(x.dtype).name, int(x.shape[1]) if len(x.shape) > 1 else None)
            for name, x in sorted(self._shapes.state.items())
        }
        config = self.config
        dtype = np.dtype(self._shapes.rows.dtype).name
        return TableFacts(
            config.num_embeddings, config.embedding_dim, dtype, state=state, **details
        )
